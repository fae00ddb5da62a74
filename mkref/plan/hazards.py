"""Checks of order: every read comes after the writes it needs, every write after the last reads.

For each value (a buffer's content during one layer of a step, `mkref.plan.effects`):

    read after write    whoever reads it starts after all who write the part that is read;
    write after read    whoever writes the next value into the same memory starts after all who
    write after write   read or wrote the overlapping part of this one.

The first value of a step in its memory lies over the last one of the step before. And for each
counter, which is never set back:

    arrival             whoever signals it starts after all who signal it in the step before: else
                        a counter could be full without one who is late.

"After" means: known to be finished by the vector clock of the later task (`mkref.plan.clocks`).
Being later in the same SM's list is enough where each thread reads only what it wrote itself.
Words that tell by themselves that they are there need no read after write. But they must not be
taken for those of before:

    blank before read   whoever looks at x early starts after all who made its place ABSENT; they
                        are those who wrote the x of the layer before.

Values further back need no look: their users came before the writers of the one in between.

What it does not do: look at weights, which nobody writes.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from mkref.plan.effects import PER_LAYER, READS, ROW_OPS, SAME_THREADS, WRITES, Touch, layers_of
from mkref.plan.task import NO_COUNTER, Flag, Op

if TYPE_CHECKING:
    from mkref.plan.clocks import Clock, Clocks
    from mkref.plan.table import Ints, TaskTable

__all__ = ["check_arrivals", "check_order"]

ALL = np.iinfo(np.int32).max
BEFORE = -1
"""The step before that of the later task."""


@dataclass(frozen=True)
class Access:
    """Tasks that touch one value.

    Attributes:
        records: int64 [n].
        begin, end: int64 [n], the part that each touches, in row blocks or entries.
        start: int32 [n, 2 n_sm], their clocks when they do.
    """

    records: Ints
    begin: Ints
    end: Ints
    start: Clock

    def __getitem__(self, index: Ints) -> Access:
        return Access(self.records[index], self.begin[index], self.end[index], self.start[index])

    @staticmethod
    def join(parts: list[Access]) -> Access:
        """All of them in one; at least one."""
        columns = ("records", "begin", "end", "start")
        return Access(*(np.concatenate([getattr(p, name) for p in parts]) for name in columns))

    def extremes(self, table: TaskTable, *, last: bool) -> Access:
        """Per lane and part only the last (or first) record: its order answers for the others."""
        rank = -self.records if last else self.records
        order = np.lexsort((rank, self.end, self.begin, table.lane[self.records]))
        keys = np.stack([table.lane[self.records], self.begin, self.end])[:, order]
        new = np.ones(len(order), dtype=bool)
        new[1:] = (keys[:, 1:] != keys[:, :-1]).any(axis=0)
        return self[order[new]]


@dataclass
class Value:
    """Who writes and who reads a buffer's content of one layer, and who reads it a step later.

    `looks` are reads of words that tell by themselves that they are there.
    """

    writes: list[Access] = field(default_factory=list)
    reads: list[Access] = field(default_factory=list)
    looks: list[Access] = field(default_factory=list)
    reads_later: list[Access] = field(default_factory=list)

    def users(self, step: int) -> Iterator[tuple[Access, int]]:
        """All who touch the value that was written in `step`, and the steps in which they do."""
        yield Access.join(self.writes + self.reads + self.looks), step
        if self.reads_later:
            yield Access.join(self.reads_later), step + 1


def check_order(table: TaskTable, clocks: Clocks) -> Iterator[str]:
    """One sentence for the first violation of every kind on every value."""
    values = _values(table, clocks)
    for (buffer, layer), value in sorted(values.items()):
        what = f"{buffer} of layer {layer}"
        if not value.writes:
            reader = table.place((value.reads + value.looks + value.reads_later)[0].records[0])
            yield f"{reader}: reads {what}, which nobody writes"
            continue
        writers = Access.join(value.writes).extremes(table, last=True)
        for reads, step in ((value.reads, 0), (value.reads_later, BEFORE)):
            if not reads:
                continue
            readers = Access.join(reads).extremes(table, last=False)
            itself = buffer in SAME_THREADS
            for early, late in _unordered(table, writers, step, readers, itself):
                yield (
                    f"{table.place(late)}: reads {what}{_of(step)} without a wait that comes after "
                    f"{table.place(early)}, which writes it"
                )
        if buffer == "x" and value.looks:
            blank = Access.join(values[(buffer, layer - 1)].writes).extremes(table, last=True)
            readers = Access.join(value.looks).extremes(table, last=False)
            for early, late in _unordered(table, blank, 0, readers):
                yield (
                    f"{table.place(late)}: looks at {what} without a wait that comes after "
                    f"{table.place(early)}, which makes its place ABSENT"
                )
        source, step = _earlier(values, buffer, layer)
        writers = Access.join(value.writes).extremes(table, last=False)
        for users, when in values[(buffer, source)].users(step):
            users = users.extremes(table, last=True)
            for early, late in _unordered(table, users, when, writers, buffer in SAME_THREADS):
                yield (
                    f"{table.place(late)}: writes {what} over that of layer {source}{_of(step)}, "
                    f"which {table.place(early)}{_of(when)} may still be using"
                )


def check_arrivals(table: TaskTable, clocks: Clocks) -> Iterator[str]:
    """One sentence per counter to which an arrival may come a step too early."""
    signals = np.flatnonzero(table["signal"] != NO_COUNTER)
    order = signals[np.argsort(table["signal"][signals], kind="stable")]
    starts = np.flatnonzero(np.diff(table["signal"][order])) + 1
    for records in np.split(order, starts) if len(order) else []:
        begin = np.zeros_like(records)
        mine = Access(records, begin, begin + 1, clocks.start[records])
        late = mine.extremes(table, last=False)
        for slow, fast in _unordered(table, mine.extremes(table, last=True), BEFORE, late):
            yield (
                f"{table.place(fast)}: signals {table.counter(table['signal'][fast])} without a "
                f"wait that comes after the signal of {table.place(slow)}{_of(BEFORE)}"
            )


def _values(table: TaskTable, clocks: Clocks) -> dict[tuple[str, int], Value]:
    """All values of the plan, with the tasks that touch them."""
    values: dict[tuple[str, int], Value] = {}
    for op in Op:
        for layer in layers_of(table.plan.config, op):
            records = table.group(op, layer)
            if not len(records):
                continue
            for touch, reading in [(t, True) for t in READS[op]] + [(t, False) for t in WRITES[op]]:
                access = _access(table, clocks, records, touch, reading)
                if not len(access.records):
                    continue
                of = {"own": layer, "next": layer + 1, "last": table.plan.config.num_hidden_layers}
                value = values.setdefault((touch.buffer, of[touch.layer]), Value())
                if not reading:
                    value.writes.append(access)
                    continue
                # A task that reads early reads nothing but x.
                looks = table.reads_early(access.records) | touch.announced
                reads = value.reads_later if touch.of_step_before else value.reads
                for kind, which in ((value.looks, looks), (reads, ~looks)):
                    if which.any():
                        kind.append(access[np.flatnonzero(which)])
    return values


def _access(table: TaskTable, clocks: Clocks, records: Ints, touch: Touch, reading: bool) -> Access:
    idle = np.isin(table["op"][records], ROW_OPS) & (table["count"][records] == 0)
    if touch.part != "index":  # a HEAD without rows still fills its slot
        records = records[~idle]
    if touch.by_loader:
        records = records[np.isin(records, clocks.readers)]
        # A dense layer has one expert and no router.
        records = records[(table["flags"][records] & Flag.DENSE) == 0]
        clock = clocks.loader[np.searchsorted(clocks.readers, records)]
    else:
        clock = clocks.start[records]
    begin, end = np.zeros_like(records), np.full_like(records, ALL)
    if touch.part == "rows":
        begin = table["first"][records]
        end = begin + table["count"][records]
    elif touch.part == "index":
        begin = begin if reading else table["index"][records]
        end = table["index"][records] + (0 if reading else 1)
    elif touch.part == "sm":
        begin = table.sm[records]
        end = begin + 1
    # The part of a slot is known at run time only: for order, it may be anything.
    return Access(records, begin, end, clock)


def _earlier(values: dict[tuple[str, int], Value], buffer: str, layer: int) -> tuple[int, int]:
    """Layer and step of the value that lay in the same memory before."""
    if buffer in PER_LAYER:
        return layer, BEFORE
    same = [at for name, at in values if name == buffer]
    lower = [at for at in same if at < layer]
    return (max(lower), 0) if lower else (max(same), BEFORE)


def _of(step: int) -> str:
    return " of the step before" if step == BEFORE else ""


def _unordered(
    table: TaskTable, early: Access, step: int, late: Access, itself: bool = False
) -> Iterator[tuple[int, int]]:
    """The first pair of overlapping accesses of which `late` does not surely come later.

    Args:
        step: in which `early` happens: 0 is that of `late`, -1 the step before.
        itself: on the same SM, if both are about the same row blocks, list order is enough.
    """
    lane = table.lane[early.records]
    turn = table.turn[early.records] + step * table.lengths[lane]
    known = late.start[:, lane]  # [late, early]: finished tasks of that lane
    overlap = (late.begin[:, None] < early.end) & (late.end[:, None] > early.begin)
    wrong = overlap & (known <= turn)
    if itself:
        same = table.lane[late.records][:, None] == lane
        same &= (late.begin[:, None] == early.begin) & (late.end[:, None] == early.end)
        wrong &= ~(same & (table.turn[late.records][:, None] > turn))
    if wrong.any():
        i, j = np.argwhere(wrong)[0]
        yield int(early.records[j]), int(late.records[i])
