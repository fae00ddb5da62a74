"""The calculator without a kernel: bars of bytes by part, one sentence, a table."""

from __future__ import annotations

from mkref.widgets.figure import Figure, Table
from mkref.widgets.hardware import Bandwidth
from mkref.widgets.palette import GRID, OUTLINE
from mkref.widgets.speed_of_light.model import SpeedOfLight
from mkref.widgets.svg import Svg

__all__ = ["figure"]

WIDTH = 760
LEFT, BAR, ROW, TOP = 170, 330, 28, 62
_LOOK = {
    "attention projections": ("#0072B2", "plain"),
    "keys and values": ("#E69F00", "plain"),
    "dense MLP": ("#CC79A7", "horizontal"),
    "routers": ("#F0E442", "dots"),
    "experts": ("#009E73", "diagonal"),
    "norms": ("#C8C8C8", "plain"),
    "LM head": ("#D55E00", "vertical"),
}


def gigabytes(n_bytes: float) -> str:
    """Bytes as text.

    >>> gigabytes(7.1305e9), gigabytes(25_165_824), gigabytes(204_800)
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
        f"{gigabytes(step.n_bytes)}; at {memory.tb_per_s:g} TB/s ({memory.name}) that takes at least "
        f"{step.ms(memory.bytes_per_s):.3f} ms, so at most "
        f"{step.tokens_per_s(memory.bytes_per_s):.1f} tokens per second [derived]."
    )


def table(step: SpeedOfLight, memory: Bandwidth) -> Table:
    """Bytes, share and time of every part, and of all together."""

    def row(name: str, n_bytes: float) -> tuple[str, ...]:
        share = n_bytes / step.n_bytes
        ms = n_bytes / memory.bytes_per_s * 1e3
        return (name, f"{n_bytes:,.0f}", f"{share:.1%}", f"{ms:.4f}")

    rows = [row(part.name, part.n_bytes) for part in step.parts]
    return Table(
        ("part", "bytes", "share", "ms"), (*rows, row("all", step.n_bytes))
    )


def picture(step: SpeedOfLight, memory: Bandwidth, name: str) -> str:
    """The SVG document."""
    height = TOP + ROW * len(step.parts) + 48
    svg = Svg(WIDTH, height, summary(step, memory, name))
    speed = step.tokens_per_s(memory.bytes_per_s)
    svg.text(16, 28, f"at most {speed:.1f} tokens per second", size=20, bold=True)
    svg.text(WIDTH - 16, 22, f"{name}, batch {step.batch}, context {context_text(step.context)}", anchor="end")
    svg.text(WIDTH - 16, 40, f"{memory.tb_per_s:g} TB/s: {memory.name} [{memory.label}]", anchor="end")
    largest = max(part.n_bytes for part in step.parts)
    for i, part in enumerate(step.parts):
        y = TOP + i * ROW
        color, pattern = _LOOK.get(part.name, ("#C8C8C8", "plain"))
        width = max(BAR * part.n_bytes / largest, 1.0)
        svg.text(LEFT - 10, y + 16, part.name, anchor="end")
        svg.rect(LEFT, y + 3, width, ROW - 8, svg.fill(color, pattern), stroke=OUTLINE)
        share = part.n_bytes / step.n_bytes
        svg.text(LEFT + width + 8, y + 16, f"{gigabytes(part.n_bytes)}  ({share:.1%})")
    y = TOP + ROW * len(step.parts) + 6
    svg.rect(LEFT, y, WIDTH - LEFT - 16, 1, GRID)
    ms = step.ms(memory.bytes_per_s)
    svg.text(LEFT - 10, y + 22, "one step", anchor="end", bold=True)
    svg.text(LEFT, y + 22, f"{gigabytes(step.n_bytes)} in at least {ms:.3f} ms", bold=True)
    return svg.render()


def figure(step: SpeedOfLight, memory: Bandwidth, name: str) -> Figure:
    """Picture, sentence and table."""
    return Figure(picture(step, memory, name), summary(step, memory, name), table(step, memory))
