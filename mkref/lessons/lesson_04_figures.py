"""Pictures of lesson 04: who holds what of a tile, and the ring of one SM as recorded."""

from __future__ import annotations

from mkref.errors import RequestError
from mkref.lessons.lanes import IDLE, Look, Span, lanes_figure, op_look
from mkref.lessons.recorded import recorded_trace
from mkref.widgets.figure import Figure, Table
from mkref.widgets.palette import INK, OUTLINE
from mkref.widgets.svg import Svg

__all__ = ["consumers_first", "recorded_ring", "tile_figure"]

TRACE = "trace_north_h200.json.gz"
CELL, LEFT, TOP = 26, 70, 74
REGISTERS = (
    ("a0", "#56B4E9"),
    ("a1", "#E69F00"),
    ("a2", "#F0E442"),
    ("a3", "#CC79A7"),
)
"""Colours; which quarter is which is also said in the legend by rows and k."""


def tile_figure(lane: int = 13) -> Figure:
    """A 16 x 16 tile of weights: the lane that holds each pair of words, in which register."""
    if lane not in range(32):
        raise RequestError(f"tile_figure: a warp has lanes 0 to 31, not {lane}")
    g, t = divmod(lane, 4)
    sentence = (
        f"A tile of 16 outputs (rows) by 16 of the depth (columns). Each box is two words, with "
        f"the lane that holds them. The four boxes of lane {lane} lie in rows {g} and {g + 8}, at "
        f"k {2 * t} and k {2 * t + 8}."
    )
    svg = Svg(LEFT + 16 * CELL + 190, TOP + 16 * CELL + 20, sentence)
    svg.text(16, 26, "The A operand of mma.m16n8k16", size=16, bold=True)
    for k in range(0, 16, 2):
        svg.text(LEFT + (k + 1) * CELL, TOP - 8, f"k {k}, {k + 1}", anchor="middle", size=10)
    for register, (name, color) in enumerate(REGISTERS):
        down, right = register % 2, register // 2
        x, y = LEFT + right * 8 * CELL, TOP + down * 8 * CELL
        svg.rect(x, y, 8 * CELL, 8 * CELL, color, stroke=OUTLINE)
        for row in range(8):
            for pair in range(4):
                left, top = x + 2 * pair * CELL, y + row * CELL
                if 4 * row + pair == lane:
                    svg.rect(left, top, 2 * CELL, CELL, "#ffffff", stroke=INK)
                label = str(4 * row + pair)
                svg.text(left + CELL, top + 17, label, anchor="middle", bold=label == str(lane))
        side = LEFT + 16 * CELL + 20
        svg.rect(side, TOP + 10 + 26 * register, 18, 16, color, stroke=OUTLINE)
        rows, ks = ("rows 0-7", "rows 8-15")[down], ("k 0-7", "k 8-15")[right]
        svg.text(side + 26, TOP + 22 + 26 * register, f"{name}: {rows}, {ks}")
    for row in range(16):
        svg.text(16, TOP + row * CELL + 17, f"row {row}")
    rows_ = []
    for register, (name, _) in enumerate(REGISTERS):
        row, k = g + 8 * (register % 2), 2 * t + 8 * (register // 2)
        rows_.append((name, str(row), f"{k}, {k + 1}"))
    head = (f"register of lane {lane}", "row", "k")
    return Figure(svg.render(), sentence, Table(head, tuple(rows_)))


def consumers_first() -> float:
    """The share of recorded stages that were taken before the loader came to look whether they had
    landed; the stamps of these say "landed" after "taken"."""
    stages = recorded_trace(TRACE).stages
    assert stages is not None
    times = stages.times[(stages.times >= 0).all(axis=1)]  # issued, landed, taken, released
    return float((times[:, 1] > times[:, 2]).mean())


def recorded_ring(sm: int = 22, layer: int = 10) -> Figure:
    """The slots of one SM's ring around QKV of one layer, as stamped on an H200, to scale."""
    trace = recorded_trace(TRACE)
    task = next(e for e in trace if (e.sm, e.layer, e.op) == (sm, layer, "QKV"))
    assert trace.stages is not None
    ring = trace.stages.ring
    stages = trace.stages.times[trace.stages.sm == sm]
    begin, end = task.begin - 3000, task.end + 3000
    looks = {
        # As in the ring of lesson 11; what is landed is in use or waits for that.
        "way": Look("on its way", "#E69F00", "vertical"),
        "rests": Look("has landed", "#56B4E9"),
        "used": Look("in use", "#56B4E9", "cross"),
        "waits": Look("consumers wait", IDLE.color, IDLE.pattern),
    }
    who = []
    for one in sorted((e for e in trace if e.sm == sm), key=lambda e: e.begin):
        if one.end <= begin or one.begin >= end or one.op == "MERGE":  # the helper's at one row
            continue
        marks = [min(max(t, begin), end) - begin for t in (one.begin, one.ready, one.end)]
        if marks[1] > marks[0]:
            who.append(Span(marks[0], marks[1], "waits"))
        if marks[2] > marks[1]:
            who.append(Span(marks[1], marks[2], one.op, one.op))
            looks[one.op] = op_look(one.op)
    lanes: list[tuple[str, list[Span]]] = [("consumers", who)]
    lanes += [(f"slot {slot}", []) for slot in range(ring.stages)]
    ahead = taken_slots = 0
    first = min(times[2] for times in stages.tolist() if times[2] >= task.ready)
    for number, times in enumerate(stages.tolist()):
        issued, looked, taken, released = times
        if min(times) < 0 or released < begin or issued > end:
            continue
        # "Landed" is stamped when the loader comes to look. Who is taken has landed before.
        landed = min(looked, taken)
        ahead += landed <= task.ready <= taken
        taken_slots += issued <= first <= released
        marks = [min(max(t, begin), end) - begin for t in (issued, landed, taken, released)]
        for kind, a, b in zip(("way", "rests", "used"), marks, marks[1:], strict=False):
            if b > a:
                lanes[1 + number % ring.stages][1].append(Span(a, b, kind))
    lanes = [lane for lane in lanes if lane[1]]
    wide = (end - begin) / 1000
    sentence = (
        f"The ring of SM {sm} around QKV of layer {layer}, {trace.where} [measured]: "
        f"{ring.stages} slots of {ring.stage_bytes // 1024} KB over "
        f"{wide:.1f} us. When x is there, {ahead} stages of weights have landed "
        f"and wait for the consumers; when they take the first, {taken_slots} slots are full or "
        "being filled."
    )
    return lanes_figure(
        f"The loader is ahead of the consumers: {wide:.1f} us", sentence, lanes, looks
    )
