"""What lesson 08 shows: the lower rungs of the ladder, what a barrier costs the faster SMs, and
what becomes of a barrier whose counter is set back."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from mkref.lessons.lanes import IDLE, Look, Span, lanes_figure
from mkref.lessons.lesson_02 import rung_color
from mkref.lessons.recorded import bench_record
from mkref.plan.task import Op
from mkref.widgets.bars import Bar, bar_chart
from mkref.widgets.figure import Figure, Table
from mkref.widgets.palette import style_of

if TYPE_CHECKING:
    from mkref.plan.build import Plan

__all__ = ["barrier_figure", "barrier_orders", "phases", "rung_ms", "rungs_figure"]

RECORD = "h200/ladder.json"
ROWS = {
    "a launch per operation": ("a", 345),
    "graph, per operation": ("c", 345),
    "graph, three per layer": ("c", 149),
    "one launch, grid barriers": ("d", 1),
}
"""Four ways to run the same tasks: rung and launches per step. Graphs are those with dependent
launch."""
WORK = (5.0, 3.0, 4.0, 2.5), (2.0, 4.5, 3.0, 3.5), (4.0, 2.5, 5.0, 3.0)
TRIP = 1.2


def rung_ms(rung: str, launches: int, batch: int = 1) -> float:
    """Milliseconds per step of a rung, the best of those with so many launches per step."""
    return min(
        float(row["ms_per_step"])
        for row in bench_record(RECORD)["rows"]
        if (row["rung"], row["launches_per_step"], row["batch"]) == (rung, launches, batch)
    )


def rungs_figure(batch: int = 1) -> Figure:
    """Four ways to run the same tasks, from 345 launches to one, as measured."""
    record = bench_record(RECORD)
    bars, rows, said = [], [], []
    for name, (rung, many) in ROWS.items():
        ms = rung_ms(rung, many, batch)
        text = f"{ms:.2f} ms, {many} launch{'es' if many > 1 else ''} [measured]"
        bars.append(Bar(name, ms, text, rung_color(rung)))
        rows.append((name, str(many), f"{ms:.3f}"))
        said.append(f"{name} {ms:.2f} ms ({many})")
    gpu, date = record["provenance"]["gpu"], record["provenance"]["date"][:10]
    sentence = (
        f"Time per step and number of launches, batch {batch}, 8192 tokens of context, graphs with "
        f"dependent launch, {gpu}, {date} [measured]: {', '.join(said)}."
    )
    chart = bar_chart(bars, title=sentence, head="the same tasks, the same tokens")
    return Figure(chart, sentence, Table(("way", "launches", "ms per step"), tuple(rows)))


def phases(plan: Plan, layer: int) -> list[str]:
    """For every phase of a layer: its operation, and how many tasks each SM has in it."""
    names = list(dict.fromkeys(Op(t.op).name for _, _, t in plan if t.layer == layer))
    order = sorted(names, key=lambda name: _place(plan, layer, name))
    lines = []
    for name in order:
        counts = [
            sum(Op(t.op).name == name and t.layer == layer for t in tasks) for tasks in plan.tasks
        ]
        lines.append(f"{name:10} tasks per SM: {' '.join(map(str, counts))}")
    return lines


def _place(plan: Plan, layer: int, name: str) -> int:
    """The counter that the tasks of an operation wait for: phases wait for one another."""
    return next(t.wait for _, _, t in plan if t.layer == layer and Op(t.op).name == name)


def barrier_figure() -> Figure:
    """Four SMs, three phases: everybody waits for the slowest, and then for the news."""
    styles = [(op, style_of(op)) for op in ("QKV", "ATTENTION", "MERGE")]
    looks = {str(k): Look(op, s.fill, s.pattern, s.ink) for k, (op, s) in enumerate(styles)}
    looks["idle"] = IDLE
    spans: list[list[Span]] = [[] for _ in WORK[0]]
    start = idle = work = 0.0
    for phase, lengths in enumerate(WORK):
        end = start + max(lengths) + TRIP
        for sm, length in enumerate(lengths):
            spans[sm].append(Span(start, start + length, str(phase)))
            spans[sm].append(Span(start + length, end, "idle"))
            idle, work = idle + end - start - length, work + length
        start = end
    lanes = [(f"SM {sm}", mine) for sm, mine in enumerate(spans)]
    sentence = (
        "Scheme, not to scale: three operations on four SMs with a barrier of the grid after each. "
        "Every SM waits for the slowest of the phase and then for the news of its arrival; "
        f"{100 * idle / (idle + work):.0f} % of the picture is waiting."
    )
    return lanes_figure("Everybody waits for everybody", sentence, lanes, looks)


def barrier_orders(
    *, set_back: bool, blocks: int = 2, barriers: int = 2, orders: int = 1000
) -> dict[str, int]:
    """What becomes of some blocks at some barriers, if turns go by chance.

    A block's moves at a barrier: it arrives; it sees the counter full; and block 0, if the counter
    is set back, does so after that. Each turn goes to one of the blocks that can move, all equally
    likely.

    Args:
        set_back: the counter counts to `blocks` each time, else it grows.
        blocks, barriers: how many.
        orders: how many are tried.

    Returns:
        Number of orders with each ending: "too early" if a block has passed a barrier at which
        another had not arrived, "for ever" if nobody can move any more.
    """
    endings = dict.fromkeys(("right", "too early", "for ever"), 0)
    for seed in range(orders):
        endings[_one_order(np.random.default_rng([8, seed]), set_back, blocks, barriers)] += 1
    return endings


def _one_order(turns: np.random.Generator, set_back: bool, blocks: int, barriers: int) -> str:
    counter, place, move = 0, [0] * blocks, ["arrive"] * blocks
    while min(place) < barriers:
        full = [counter >= blocks * (1 if set_back else number + 1) for number in place]
        able = [b for b in range(blocks) if place[b] < barriers and (move[b] != "look" or full[b])]
        if not able:
            return "for ever"
        b = able[int(turns.integers(len(able)))]
        if move[b] == "arrive":
            counter, move[b] = counter + 1, "look"
            continue
        if move[b] == "look":
            numbers = [at + (to != "arrive") for at, to in zip(place, move, strict=True)]
            if min(numbers) <= place[b]:  # of arrivals: somebody has not come to this barrier
                return "too early"
            if set_back and b == 0:
                move[b] = "set back"
                continue
        else:
            counter = 0
        place[b], move[b] = place[b] + 1, "arrive"
    return "right"
