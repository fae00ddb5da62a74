"""Pictures of lesson 09: the same tasks with barriers and with counters; what it was worth."""

from __future__ import annotations

from typing import TYPE_CHECKING

from mkref.lessons.lanes import IDLE, Span, lanes_figure, op_look
from mkref.lessons.lesson_09 import producers
from mkref.lessons.recorded import bench_record
from mkref.measure.rungs import ORDER
from mkref.plan import Op
from mkref.plan.effects import READS, WRITES
from mkref.widgets.bars import Bar, bar_chart
from mkref.widgets.figure import Figure, Table

if TYPE_CHECKING:
    from mkref.plan import Plan

__all__ = ["false_wait_figure", "needs", "rung_ms", "rungs_figure"]

RECORD = "h200/ladder.json"
NAMES = {
    "d": ("barriers", "#56B4E9", "diagonal"),
    "e": ("counters, same order", "#56B4E9", "plain"),
    "f": ("counters, better order", "#56B4E9", "dots"),
}
HOP = 0.8
WORK = {
    "O_PROJ": (2.0, 4.5, 3.0),
    "GATE_UP": (4.5, 2.5, 3.5),
    "DOWN": (3.0, 3.0, 3.0),
}


def rung_ms(rung: str, batch: int = 1) -> float:
    """Milliseconds per step of the best variant of a rung."""
    rows = bench_record(RECORD)["rows"]
    chosen = (r for r in rows if (r["rung"], r["batch"], r["best"]) == (rung, batch, True))
    return float(next(chosen)["ms_per_step"])


def rungs_figure() -> Figure:
    """Barriers, counters, and the order that counters allow, at both batch sizes."""
    provenance = bench_record(RECORD)["provenance"]
    bars, rows, said = [], [], []
    for batch in (1, 8):
        first = rung_ms("d", batch)
        for rung, (name, color, pattern) in NAMES.items():
            ms = rung_ms(rung, batch)
            part = ms / first
            text = f"{ms:.2f} ms, {part:.1%} of barriers [measured]"
            bars.append(Bar(f"batch {batch}: {name}", part, text, color, pattern))
            rows.append((str(batch), name, f"{ms:.3f}", f"{part:.1%}"))
            said.append(f"batch {batch}, {name}: {ms:.2f} ms")
    sentence = (
        f"Time per step, 8192 tokens of context, {provenance['gpu']}, {provenance['date'][:10]} "
        f"[measured]: {'; '.join(said)}."
    )
    chart = bar_chart(bars, title=sentence, head="the same launch, the same tasks")
    table = Table(("batch", "rung", "ms per step", "of barriers"), tuple(rows))
    return Figure(chart, sentence, table)


def needs(plan: Plan, layer: int) -> list[str]:
    """For every operation of a layer, whose outputs it reads and what it writes, as the proofs have
    it; in the order of the model, with EMBED before and HEAD and SAMPLE behind the layers."""
    last = plan.config.num_hidden_layers
    lines = []
    for op in ORDER:
        at = {Op.EMBED: 0, Op.HEAD: last, Op.SAMPLE: last}.get(op, layer)
        sources = sorted(producers(op, at), key=lambda pair: (pair[1], pair[0]))
        read = [f"{one.name}{' of the layer before' if of < at else ''}" for one, of in sources]
        read += [
            f"{one.name} of the step before"
            for touch in READS[op]
            for one in ORDER
            if touch.of_step_before and touch.buffer in {w.buffer for w in WRITES[one]}
        ]
        written = (f"{w.buffer}{' of the next layer' * (w.layer == 'next')}" for w in WRITES[op])
        lines.append(f"{op.name:9} reads outputs of {', '.join(read)}")
        lines.append(f"{'':9}   and writes {', '.join(written)}")
    return lines


def _lanes(waits: dict[str, str], mark: str) -> list[tuple[str, list[Span]]]:
    """Three SMs, each with its tasks in order; `waits` says for whose last end."""
    n_sm = len(WORK["DOWN"])
    free = [0.0] * n_sm
    full: dict[str, float] = {}
    spans: list[list[Span]] = [[] for _ in range(n_sm)]
    for op, lengths in WORK.items():
        ends = []
        for sm, length in enumerate(lengths):
            begin = max(free[sm], full[waits[op]] + HOP if op in waits else 0.0)
            if begin > free[sm]:
                spans[sm].append(Span(free[sm], begin, "idle"))
            spans[sm].append(Span(begin, begin + length, op, op))
            free[sm] = begin + length
            ends.append(free[sm])
        full[op] = max(ends)
    return [(f"SM {sm}{mark}", mine) for sm, mine in enumerate(spans)]


def false_wait_figure() -> Figure:
    """The same three operations with a barrier after each, and with what they need."""
    looks = {**{op: op_look(op) for op in WORK}, "idle": IDLE}
    with_barriers = _lanes({"GATE_UP": "O_PROJ", "DOWN": "GATE_UP"}, "")
    with_counters = _lanes({"DOWN": "GATE_UP"}, " ")
    ends = [
        max(s.end for _, spans in lanes for s in spans) for lanes in (with_barriers, with_counters)
    ]
    sentence = (
        "Scheme, not to scale: with a barrier GATE_UP waits until every SM has ended O_PROJ, of "
        "which it reads nothing. With counters an SM goes on at once, and those who were late in "
        f"the one may be early in the other: {ends[1]:.1f} units instead of {ends[0]:.1f}."
    )
    lanes = [("barriers", []), *with_barriers, ("counters", []), *with_counters]
    return lanes_figure("A wait for nothing", sentence, lanes, looks)
