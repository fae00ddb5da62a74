"""The calculator without a kernel: bars of bytes by part, one sentence, a table."""

from __future__ import annotations

from typing import TYPE_CHECKING

from mkref.widgets.bars import Bar, bar_chart
from mkref.widgets.figure import Figure, Table

if TYPE_CHECKING:
    from collections.abc import Sequence

    from mkref.widgets.hardware import Bandwidth
    from mkref.widgets.light.model import SpeedOfLight

__all__ = ["batches", "figure"]

_LOOK = {
    "attention projections": ("#0072B2", "plain"),
    "keys and values": ("#E69F00", "plain"),
    "dense MLP": ("#009E73", "diagonal"),
    "routers": ("#F0E442", "dots"),
    "experts": ("#009E73", "plain"),
    "norms": ("#C8C8C8", "plain"),
    "LM head": ("#D55E00", "plain"),
}


def gigabytes(n_bytes: float) -> str:
    """Bytes as text.

    >>> gigabytes(7_130_521_600), gigabytes(25_165_824), gigabytes(204_800)
    ('7.131 GB', '25.2 MB', '0.2 MB')
    """
    return f"{n_bytes / 1e9:.3f} GB" if n_bytes >= 1e8 else f"{n_bytes / 1e6:.1f} MB"


def context_text(tokens: int) -> str:
    """A context length as people say it.

    >>> context_text(8192), context_text(1000)
    ('8K', '1000')
    """
    return f"{tokens // 1024}K" if tokens and tokens % 1024 == 0 else str(tokens)


def summary(step: SpeedOfLight, memory: Bandwidth, name: str) -> str:
    """One sentence with the result and how its inputs are known."""
    rows = "1 row" if step.batch == 1 else f"{step.batch} rows"
    return (
        f"{name}, {rows}, context {context_text(step.context)}: a step reads "
        f"{gigabytes(step.n_bytes)}; at {memory.tb_per_s:g} TB/s ({memory.name}) that takes at "
        f"least {step.ms(memory.bytes_per_s):.3f} ms, so at most "
        f"{step.tokens_per_s(memory.bytes_per_s):.1f} tokens per second [derived]."
    )


def table(step: SpeedOfLight, memory: Bandwidth) -> Table:
    """Bytes, share and time of every part, and of all together."""

    def row(name: str, n_bytes: float) -> tuple[str, ...]:
        share = n_bytes / step.n_bytes
        ms = n_bytes / memory.bytes_per_s * 1e3
        return (name, f"{n_bytes:,.0f}", f"{share:.1%}", f"{ms:.4f}")

    rows = [row(part.name, part.n_bytes) for part in step.parts]
    return Table(("part", "bytes", "share", "ms"), (*rows, row("all", step.n_bytes)))


def picture(step: SpeedOfLight, memory: Bandwidth, name: str) -> str:
    """The SVG document."""
    bars = [
        Bar(
            part.name,
            part.n_bytes,
            f"{gigabytes(part.n_bytes)}  ({part.n_bytes / step.n_bytes:.1%})",
            *_LOOK.get(part.name, ("#C8C8C8", "plain")),
        )
        for part in step.parts
    ]
    return bar_chart(
        bars,
        title=summary(step, memory, name),
        head=f"at most {step.tokens_per_s(memory.bytes_per_s):.1f} tokens per second",
        notes=(
            f"{name}, batch {step.batch}, context {context_text(step.context)}",
            f"{memory.tb_per_s:g} TB/s: {memory.name} [{memory.label}]",
        ),
        foot=(
            "one step",
            f"{gigabytes(step.n_bytes)} in at least {step.ms(memory.bytes_per_s):.3f} ms",
        ),
    )


def figure(step: SpeedOfLight, memory: Bandwidth, name: str) -> Figure:
    """Picture, sentence and table."""
    shown = picture(step, memory, name)
    return Figure(shown, summary(step, memory, name), table(step, memory), fits=True)


def batches(steps: Sequence[SpeedOfLight], memory: Bandwidth, name: str) -> Figure:
    """The bounds of several steps beside each other: tokens per second of all rows together.

    Args:
        steps: of one model, for instance with growing batch or context.
        memory: whose bandwidth bounds them.
        name: of the model.
    """
    speeds = [step.tokens_per_s(memory.bytes_per_s) for step in steps]
    names = [f"batch {s.batch}, context {context_text(s.context)}" for s in steps]
    said = "; ".join(f"{n}: {v:.0f}" for n, v in zip(names, speeds, strict=True))
    sentence = f"{name} at {memory.tb_per_s:g} TB/s, most tokens per second [derived]: {said}."
    bars = [
        Bar(n, speed, f"{speed:.1f} ({gigabytes(step.n_bytes)} a step)")
        for n, speed, step in zip(names, speeds, steps, strict=True)
    ]
    notes = (name, f"{memory.tb_per_s:g} TB/s: {memory.name} [{memory.label}]")
    chart = bar_chart(bars, title=sentence, head="tokens per second, at most", notes=notes)
    rows = tuple(
        (n, f"{step.n_bytes:,.0f}", f"{step.distinct:.1f}", f"{speed:.1f}")
        for n, step, speed in zip(names, steps, speeds, strict=True)
    )
    heads = ("step", "bytes", "experts a layer", "tokens per second, at most")
    return Figure(chart, sentence, Table(heads, rows))
