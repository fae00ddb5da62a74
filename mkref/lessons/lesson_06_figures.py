"""Pictures of lesson 06: rows and the experts they hit, experts by batch, the shares of SMs, and
what a loader does until the experts are known."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

import numpy as np

from mkref.config import NORTH_MINI_CODE
from mkref.lessons.lanes import IDLE, Look, Span, lanes_figure
from mkref.lessons.lesson_06_routing import (
    RECORD,
    expected_hits,
    expert_gb,
    measured,
    routing,
)
from mkref.lessons.recorded import recorded_trace
from mkref.plan.share import share_half
from mkref.trace.events import END, ISSUED, READY
from mkref.widgets.bars import Bar, bar_chart
from mkref.widgets.figure import Figure, Table
from mkref.widgets.palette import GRID, INK, OUTLINE, style_of
from mkref.widgets.svg import Svg, rect_path

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["hits_by_batch", "route_in_time", "routing_figure", "shares_figure"]

LEFT, CELL, ROW, TOP = 90, 5, 20, 44
HIT = (("#56B4E9", "plain"), ("#E69F00", "diagonal"), ("#D55E00", "cross"))
"""Looks of experts that one row hit, two rows, more."""


def routing_figure(rows: int = 8) -> Figure:
    """Which experts rows with random logits choose, and which are hit by the batch."""
    chosen = routing(rows)
    experts = NORTH_MINI_CODE.num_experts
    hits = Counter(e for row in chosen for e in row)
    shared = sum(n > 1 for n in hits.values())
    sentence = (
        f"{rows} rows with random logits choose 8 of {experts} experts each [simulated]: "
        f"{rows * 8} choices hit {len(hits)} experts, {shared} of them by more than one row."
    )
    height = TOP + ROW * (rows + 1) + 66
    svg = Svg(LEFT + CELL * experts + 30, height, sentence)
    svg.text(16, 26, "What the batch reads is the bottom line", size=16, bold=True)
    for row, ids in enumerate(chosen):
        y = TOP + ROW * row
        svg.text(LEFT - 10, y + 14, f"row {row}", anchor="end")
        svg.rect(LEFT, y + ROW - 2, CELL * experts, 1, GRID)
        data = "".join(rect_path(LEFT + CELL * e, y + 2, CELL, ROW - 5) for e in ids)
        svg.path(data, INK)
    y = TOP + ROW * rows + 8
    svg.text(LEFT - 10, y + 15, "hit", anchor="end", bold=True)
    for level, (color, pattern) in enumerate(HIT):
        data = "".join(
            rect_path(LEFT + CELL * e, y, CELL, ROW)
            for e, n in hits.items()
            if min(n, 3) == level + 1
        )
        if data:
            svg.path(data, svg.fill(color, pattern), stroke=OUTLINE)
    svg.rect(LEFT, y, CELL * experts, ROW, "none", stroke=OUTLINE)
    for e in range(0, experts + 1, 16):
        svg.text(LEFT + CELL * e, y + ROW + 14, str(e), anchor="middle")
    x = float(LEFT)
    for (color, pattern), says in zip(HIT, ("one row", "two rows", "three or more"), strict=True):
        svg.rect(x, height - 18, 14, 12, svg.fill(color, pattern), stroke=OUTLINE)
        svg.text(x + 20, height - 7, f"expert of {says}")
        x += 170
    table = [(f"row {row}", ", ".join(map(str, ids))) for row, ids in enumerate(chosen)]
    table.append(("more than one row", ", ".join(str(e) for e in sorted(hits) if hits[e] > 1)))
    return Figure(svg.render(), sentence, Table(("who", "experts"), tuple(table)))


def hits_by_batch(batches: Sequence[int] = (1, 2, 4, 8, 16, 32)) -> Figure:
    """Distinct experts per layer by batch, counted on an H200 and with equal chances."""
    bars, rows, said, worst = [], [], [], 0.0
    for batch in batches:
        found, expected = measured(batch)["experts"], expected_hits(batch)
        text = f"{found:.1f} [measured], {expected:.1f} [derived]"
        name = f"{batch} row{'s' if batch > 1 else ''}"
        bars.append(Bar(name, found, text, "#009E73", "horizontal"))
        each = expert_gb(found) / batch
        rows.append(
            (name, f"{found:.2f}", f"{expected:.2f}", f"{expert_gb(found):.2f}", f"{each:.2f}")
        )
        said.append(f"{batch}: {found:.1f}")
        worst = max(worst, abs(found / expected - 1))
    sentence = (
        "Distinct experts per layer by rows of the batch, random weights, NVIDIA H200 [measured]: "
        f"{', '.join(said)}; equal chances give the same within {worst:.1%} [derived]."
    )
    chart = bar_chart(bars, title=sentence, head="experts of 128 that a batch hits", full=128.0)
    head = ("batch", "counted", "equal chances", "GB of experts", "GB per row")
    return Figure(chart, sentence, Table(head, tuple(rows)))


def shares_figure(
    experts: Sequence[int] = (3, 40, 77), blocks: int = 12, n_sm: int = 5, other: int = 0
) -> Figure:
    """Granules of gate and up of a few hit experts, and the halves of each SM's share."""
    total = len(experts) * blocks
    looks = {
        "expert": Look("an expert's granules", "#C8C8C8"),
        "first": Look("first half", "#009E73"),
        "second": Look("second half", "#009E73", "diagonal"),
    }
    lanes: list[tuple[str, list[Span]]] = [
        (
            "granules",
            [
                Span(i * blocks, (i + 1) * blocks, "expert", f"expert {e}: {blocks} granules")
                for i, e in enumerate(experts)
            ],
        )
    ]
    said = []
    for sm in range(n_sm):
        spans, lengths = [], []
        for half, kind in enumerate(("first", "second")):
            at, end = share_half(total, other, 2 * n_sm, 2 * sm + half)
            lengths.append(end - at)
            while at < end:  # a run ends where its expert ends
                upto = min(end, (at // blocks + 1) * blocks)
                spans.append(Span(at, upto, kind, str(upto - at)))
                at = upto
        lanes.append((f"SM {sm}", spans))
        said.append(str(sum(lengths)))
    sentence = (
        f"Scheme: {len(experts)} hit experts of {blocks} granules on {n_sm} SMs [derived]. The "
        f"shares have {', '.join(said)} granules; each is cut into two halves, and into runs where "
        "an expert ends."
    )
    return lanes_figure("Shares do not stop at experts", sentence, lanes, looks)


def route_in_time(sm: int = 22, layer: int = 10) -> Figure:
    """Router, consumers and loader of one SM in a recorded layer, until GATE_UP is under way."""
    trace = recorded_trace(RECORD)
    stages = trace.stages
    assert stages is not None
    here = trace.complete & (trace.columns["layer"] == layer)
    mine = here & (trace.columns["sm"] == sm)
    ops = {op: trace.columns["op"] == trace.ops.index(op) for op in trace.ops}
    router = trace.times[here & ops["ROUTER"]]
    start = int(router[:, READY].min())
    asked = stages.times[stages.sm == sm, 0]
    known = int(trace.times[mine & ops["ATTENTION"], ISSUED].max())
    first = int(asked[np.searchsorted(asked, known, "right")])
    looks = {
        "ROUTER": Look("ROUTER", style_of("ROUTER").fill, "dots"),
        "known": Look("asks for known bytes", "#C8C8C8", "horizontal"),
        "experts": Look("asks for experts", style_of("GATE_UP").fill, "vertical"),
        "idle": IDLE,
    }
    tasks = [e for e in trace if (e.sm, e.layer) == (sm, layer) and not e.beside]
    spans, last = [], start
    for task in tasks[: [t.op for t in tasks].index("GATE_UP") + 1]:
        style = style_of(task.op)
        looks.setdefault(task.op, Look(task.op, style.fill, style.pattern, style.ink))
        begin, ready, end = (max(t, start) for t in (task.begin, task.ready, task.end))
        if ready > begin:
            spans.append(Span(begin - start, ready - start, "idle"))
        spans.append(Span(ready - start, end - start, task.op, f"{(end - ready) / 1000:.1f} us"))
        last = end - start
    begun = next(t.ready for t in tasks if t.op == "GATE_UP")
    routed = int(router[:, END].max())
    lanes = [
        (f"{len(router)} SMs", [Span(0, routed - start, "ROUTER", "ROUTER")]),
        (
            f"loader of SM {sm}",
            [
                Span(0, known - start, "known"),
                Span(known - start, first - start, "idle"),
                Span(first - start, last, "experts"),
            ],
        ),
        (f"consumers of SM {sm}", spans),
    ]
    sentence = (
        f"Layer {layer} on SM {sm}, one row, {trace.where} [measured]: the last SM ends ROUTER "
        f"after {(routed - start) / 1000:.1f} us, the loader asks for the first expert at "
        f"{(first - start) / 1000:.1f} us, and the consumers begin GATE_UP at "
        f"{(begun - start) / 1000:.1f} us."
    )
    return lanes_figure("Known in time", sentence, lanes, looks)
