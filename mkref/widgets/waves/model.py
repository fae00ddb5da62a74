"""Tiles on SMs: how long operations take when each is a grid of its own, and when all are a queue.

An operation is a number of equal tiles; an SM does one at a time. Three ways to hand them out:

    grids      one operation after another: all tiles of one have ended before the next begins, and
               a boundary (a launch, a barrier) lies between; the last wave leaves SMs idle
    queue      persistent SMs take tiles from one queue, in the order of the operations; who takes
               a tile whose inputs are not there yet waits for them, and for the hand-over (the time
               in which a counter makes its way from one SM to the others)
    back-fill  the same, but a tile whose inputs are there may be taken before its turn

All times are computed from the numbers given here, nothing is measured.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from heapq import heapify, heapreplace
from typing import Literal

from mkref.errors import RequestError

__all__ = ["WAYS", "Bar", "Operation", "Schedule", "Way", "schedule", "utilisation", "waves"]

Way = Literal["grids", "queue", "back-fill"]
WAYS: tuple[Way, ...] = ("grids", "queue", "back-fill")
MOST_TILES, MOST_SMS = 20_000, 1024


@dataclass(frozen=True)
class Operation:
    """Tiles that are alike.

    Attributes:
        name: of the operation.
        tiles: how many.
        tile_us: what an SM needs for one.
        needs: names of operations before it, all tiles of which must have ended.
    """

    name: str
    tiles: int
    tile_us: float
    needs: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.tiles < 1 or not self.tile_us > 0:
            raise RequestError(
                f"waves: {self.name} has {self.tiles} tiles of {self.tile_us} us; "
                "give at least one tile that takes time"
            )

    @property
    def work_us(self) -> float:
        """SM-time of all tiles."""
        return self.tiles * self.tile_us


@dataclass(frozen=True)
class Bar:
    """A tile: its SM, the number of its operation, when it begins and ends, in us."""

    sm: int
    op: int
    begin: float
    end: float


@dataclass(frozen=True)
class Schedule:
    """Who did what when.

    Attributes:
        way: how tiles were handed out.
        operations: in order.
        n_sm: SMs.
        bars: all tiles, in the order in which they were handed out.
    """

    way: Way
    operations: tuple[Operation, ...]
    n_sm: int
    bars: tuple[Bar, ...]

    @property
    def end_us(self) -> float:
        """When the last tile has ended."""
        return max(bar.end for bar in self.bars)

    @property
    def used(self) -> float:
        """The part of SM-time, 0 to 1, that tiles take."""
        return sum(op.work_us for op in self.operations) / (self.n_sm * self.end_us)

    def ends(self) -> list[float]:
        """When each operation has ended."""
        last = [0.0] * len(self.operations)
        for bar in self.bars:
            last[bar.op] = max(last[bar.op], bar.end)
        return last


def waves(tiles: int, n_sm: int) -> int:
    """Rounds in which `n_sm` SMs do `tiles` tiles.

    >>> waves(132, 132), waves(133, 132), waves(256, 132)
    (1, 2, 2)
    """
    return -(-tiles // n_sm)


def utilisation(tiles: int, n_sm: int) -> float:
    """The part of SM-time that the tiles of one operation take, if the SMs wait for the last wave.

    >>> utilisation(132, 132), round(utilisation(133, 132), 3)
    (1.0, 0.504)
    """
    return tiles / (waves(tiles, n_sm) * n_sm)


def schedule(
    operations: Sequence[Operation],
    n_sm: int,
    way: Way,
    *,
    boundary_us: float = 0.0,
    hand_over_us: float = 0.0,
) -> Schedule:
    """Hand out all tiles, each to the SM that is free first.

    Args:
        operations: in order; an operation needs only such as come before it.
        n_sm: SMs.
        way: one of `WAYS`.
        boundary_us: between two grids.
        hand_over_us: of a queue, from the end of an operation until its results can be used.

    Raises:
        RequestError: no operation, too many tiles or SMs, a need that does not come before, or a
            time below 0.
    """
    _check(operations, n_sm, boundary_us, hand_over_us)
    if way == "grids":
        bars = _grids(operations, n_sm, boundary_us)
    else:
        bars = _queue(operations, n_sm, hand_over_us, out_of_turn=way == "back-fill")
    return Schedule(way, tuple(operations), n_sm, tuple(bars))


def _check(operations: Sequence[Operation], n_sm: int, *times_us: float) -> None:
    tiles = sum(op.tiles for op in operations)
    if not 1 <= tiles <= MOST_TILES or not 1 <= n_sm <= MOST_SMS:
        raise RequestError(
            f"waves: {tiles} tiles on {n_sm} SMs; give 1 to {MOST_TILES:,} tiles and 1 to "
            f"{MOST_SMS:,} SMs"
        )
    if not all(us >= 0 for us in times_us):
        raise RequestError(
            f"waves: boundary and hand-over of {times_us[0]} and {times_us[1]} us; give times from "
            "0 on"
        )
    names: set[str] = set()
    for op in operations:
        if not set(op.needs) <= names:
            raise RequestError(
                f"waves: {op.name} needs {', '.join(op.needs)}; what it needs must come before it"
            )
        names.add(op.name)


def _grids(operations: Sequence[Operation], n_sm: int, boundary_us: float) -> list[Bar]:
    bars, start = [], 0.0
    for number, op in enumerate(operations):
        for tile in range(op.tiles):
            begin = start + tile // n_sm * op.tile_us
            bars.append(Bar(tile % n_sm, number, begin, begin + op.tile_us))
        start = bars[-1].end + boundary_us
    return bars


def _queue(
    operations: Sequence[Operation], n_sm: int, hand_over_us: float, *, out_of_turn: bool
) -> list[Bar]:
    free = [(0.0, sm) for sm in range(n_sm)]
    heapify(free)
    left = [op.tiles for op in operations]
    ended = dict.fromkeys((op.name for op in operations), 0.0)  # of the tiles handed out so far
    open_ops = {op.name for op in operations}
    bars = []
    for _ in range(sum(left)):
        now, sm = free[0]
        chosen, begin = -1, 0.0
        for number, op in enumerate(operations):
            if not left[number] or open_ops & set(op.needs):
                continue
            ready = max((ended[name] + hand_over_us for name in op.needs), default=0.0)
            if chosen < 0 or max(ready, now) < begin:
                chosen, begin = number, max(ready, now)
            if begin == now or not out_of_turn:
                break
        op = operations[chosen]
        bars.append(Bar(sm, chosen, begin, begin + op.tile_us))
        heapreplace(free, (bars[-1].end, sm))
        ended[op.name] = max(ended[op.name], bars[-1].end)
        left[chosen] -= 1
        if not left[chosen]:
            open_ops.remove(op.name)
    return bars
