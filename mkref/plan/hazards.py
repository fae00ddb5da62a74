"""Checks of order: every read comes after the writes it needs, every write after the last reads.

For each value (a buffer's content during one layer, `mkref.plan.effects`):

    read after write    whoever reads it starts after all who write the part that is read;
    write after read    whoever writes the next value into the same memory starts after all who
    write after write   read or wrote the overlapping part of this one.

"After" means: known to be finished by the vector clock of the later task (`mkref.plan.clocks`). A
writer that signals nothing is fine as long as its readers come later in the same SM's list.

What it does not do: look at weights or the KV cache, which no two tasks of a step share.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from mkref.plan.effects import COPIES, READS, WRITES, Touch, layers_of
from mkref.plan.task import Op

if TYPE_CHECKING:
    from mkref.plan.clocks import Clock, Clocks
    from mkref.plan.table import Ints, TaskTable

__all__ = ["check_order"]

ALL = np.iinfo(np.int32).max


@dataclass(frozen=True)
class Access:
    """Tasks that touch one value.

    Attributes:
        records: int64 [n].
        begin, end: int64 [n], the part that each touches, in row blocks or entries.
        start: int32 [n, n_sm], their clocks when they do.
    """

    records: Ints
    begin: Ints
    end: Ints
    start: Clock

    def __getitem__(self, index: Ints) -> Access:
        return Access(self.records[index], self.begin[index], self.end[index], self.start[index])

    @staticmethod
    def join(parts: list[Access]) -> Access:
        """All of them in one."""
        columns = ("records", "begin", "end", "start")
        return Access(*(np.concatenate([getattr(p, name) for p in parts]) for name in columns))

    def extremes(self, table: TaskTable, *, last: bool) -> Access:
        """Per SM and part only the last (or first) record: list order answers for the others."""
        rank = -self.records if last else self.records
        order = np.lexsort((rank, self.end, self.begin, table.sm[self.records]))
        keys = np.stack([table.sm[self.records], self.begin, self.end])[:, order]
        new = np.ones(len(order), dtype=bool)
        new[1:] = (keys[:, 1:] != keys[:, :-1]).any(axis=0)
        return self[order[new]]


@dataclass
class Value:
    """Who writes and who reads a buffer's content of one layer."""

    writes: list[Access] = field(default_factory=list)
    reads: list[Access] = field(default_factory=list)


def check_order(table: TaskTable, clocks: Clocks) -> Iterator[str]:
    """One sentence for the first violation of every kind on every value."""
    values = _values(table, clocks)
    for (buffer, layer), value in sorted(values.items()):
        what = f"{buffer} of layer {layer}"
        if not value.writes:
            reader = table.place(value.reads[0].records[0])
            yield f"{reader}: reads {what}, which nobody writes"
            continue
        writers = Access.join(value.writes).extremes(table, last=True)
        if value.reads:
            readers = Access.join(value.reads).extremes(table, last=False)
            for early, late in _unordered(table, writers, readers):
                yield (
                    f"{table.place(late)}: reads {what} without a wait that comes after "
                    f"{table.place(early)}, which writes it"
                )
        earlier = _earlier(values, buffer, layer)
        if earlier is None:
            continue
        before = values[earlier]
        users = Access.join(before.writes + before.reads).extremes(table, last=True)
        writers = Access.join(value.writes).extremes(table, last=False)
        for early, late in _unordered(table, users, writers):
            yield (
                f"{table.place(late)}: writes {what} over that of layer {earlier[1]}, which "
                f"{table.place(early)} may still be using"
            )


def _values(table: TaskTable, clocks: Clocks) -> dict[tuple[str, int], Value]:
    """All values of the plan, with the tasks that touch them."""
    values: dict[tuple[str, int], Value] = {}
    for op in Op:
        for layer in layers_of(table.plan.config, op):
            records = table.group(op, layer)
            if not len(records):
                continue
            for touches, kind in ((READS[op], "reads"), (WRITES[op], "writes")):
                for touch in touches:
                    access = _access(table, clocks, records, touch, kind == "reads")
                    if len(access.records):
                        key = (touch.buffer, layer + touch.of_next)
                        getattr(values.setdefault(key, Value()), kind).append(access)
    return values


def _access(table: TaskTable, clocks: Clocks, records: Ints, touch: Touch, reading: bool) -> Access:
    start = clocks.start
    if touch.by_loader:
        records = np.intersect1d(records, clocks.finders)
        # A dense layer has one expert and no router.
        records = records[table["route_wait"][records] >= 0]
        clock = clocks.loader[np.searchsorted(clocks.finders, records)]
    else:
        clock = start[records]
    begin, end = np.zeros_like(records), np.full_like(records, ALL)
    if touch.part == "rows":
        begin = table["first"][records]
        end = begin + table["count"][records]
    elif touch.part == "index":
        begin = begin if reading else table["index"][records]
        end = table["index"][records] + (0 if reading else 1)
    # The part of a slot is known at run time only: for order, it may be anything.
    return Access(records, begin, end, clock)


def _earlier(
    values: dict[tuple[str, int], Value], buffer: str, layer: int
) -> tuple[str, int] | None:
    """The value that lay in the same memory before."""
    copies = COPIES.get(buffer, 1)
    for before in range(layer - copies, -1, -copies):
        if (buffer, before) in values:
            return buffer, before
    return None


def _unordered(table: TaskTable, early: Access, late: Access) -> Iterator[tuple[int, int]]:
    """The first pair of overlapping accesses of which `late` does not surely come later."""
    known = late.start[:, table.sm[early.records]]  # [late, early]: finished tasks of that SM
    overlap = (late.begin[:, None] < early.end) & (late.end[:, None] > early.begin)
    wrong = overlap & (known <= table.at[early.records])
    if wrong.any():
        i, j = np.argwhere(wrong)[0]
        yield int(early.records[j]), int(late.records[i])
