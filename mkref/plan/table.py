"""The words of a plan as columns: what the verifier and the balance sheet compute with.

What it does not do: judge them.
"""

from __future__ import annotations

from collections.abc import Collection
from copy import copy
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from mkref.errors import PlanError
from mkref.plan.effects import HELPED
from mkref.plan.task import FIELDS, NO_COUNTER, Flag, Op

if TYPE_CHECKING:
    from mkref.plan.build import Plan

__all__ = ["Ints", "TaskTable"]

Ints = npt.NDArray[np.int64]


class TaskTable:
    """All records of a plan, SM after SM; a column for every word.

    Args:
        plan: its tasks may hold any integers.
        helped: operations that the helper does.
        early: x is read before its counter; both make one of `mkref.plan.effects.KINDS`.

    Attributes:
        helped, early: as given.
        columns: word name -> int64 [n_tasks].
        sm: int64 [n_tasks], the SM that runs the record.
        at: int64 [n_tasks], its position in that SM's list.
        lane: int64 [n_tasks], who works on it: the consumers of SM `lane`, or, from n_sm on, the
            helper of SM `lane - n_sm`.
        turn: int64 [n_tasks], how many records its lane has before it.
        lengths: int64 [2 n_sm], records of every lane.

    Raises:
        PlanError: a word does not fit into 32 bits.
    """

    def __init__(self, plan: Plan, helped: Collection[Op] = HELPED, early: bool = False) -> None:
        self.plan, self.early = plan, early
        try:
            words = plan.words().astype(np.int64)
        except OverflowError:
            raise PlanError(f"plan: {_first_too_large(plan)}") from None
        self.columns: dict[str, Ints] = dict(zip(FIELDS, words.T.copy(), strict=True))
        lengths = np.array([len(tasks) for tasks in plan.tasks], dtype=np.int64)
        self.offsets: Ints = np.concatenate([[0], np.cumsum(lengths)])
        self.sm: Ints = np.repeat(np.arange(plan.n_sm), lengths)
        self.at: Ints = np.arange(len(words)) - self.offsets[self.sm]
        self._groups: dict[tuple[int, int], Ints] | None = None
        self._into_lanes(helped)

    def _into_lanes(self, helped: Collection[Op]) -> None:
        n_sm = self.plan.n_sm
        self.helped = tuple(helped)
        self.lane: Ints = self.sm + n_sm * self.by_helper()
        self.lengths: Ints = np.bincount(self.lane, minlength=2 * n_sm)
        order = np.argsort(self.lane, kind="stable")
        self.turn: Ints = np.empty_like(self.lane)
        first = np.cumsum(self.lengths) - self.lengths
        self.turn[order] = np.arange(len(self)) - first[self.lane[order]]

    def with_helped(self, helped: Collection[Op], early: bool = False) -> TaskTable:
        """The same records in another kind of launch: arguments as of the class."""
        other = copy(self)
        other.early = early
        other._into_lanes(helped)
        return other

    def reads_early(self, records: Ints) -> npt.NDArray[np.bool_]:
        """Which records read x before its counter."""
        return ((self["flags"][records] & Flag.EARLY) != 0) & self.early

    def by_helper(self) -> npt.NDArray[np.bool_]:
        """Which records the helper does."""
        return np.isin(self["op"], self.helped)

    def __getitem__(self, field: str) -> Ints:
        return self.columns[field]

    def __len__(self) -> int:
        return len(self.sm)

    def group(self, op: int, layer: int) -> Ints:
        """Records of one operation in one layer, ascending."""
        if self._groups is None:
            key = self["op"] * (1 << 32) + self["layer"]
            order = np.argsort(key, kind="stable")
            starts = np.flatnonzero(np.diff(key[order], prepend=np.iinfo(np.int64).min))
            parts = np.split(order, starts[1:])
            self._groups = {
                (int(self["op"][part[0]]), int(self["layer"][part[0]])): part
                for part in parts
                if len(part)
            }
        return self._groups.get((op, layer), np.zeros(0, dtype=np.int64))

    def place(self, record: int | np.integer[Any]) -> str:
        """A record in words: SM, position in its list, operation and layer."""
        op, layer = int(self["op"][record]), int(self["layer"][record])
        name = Op(op).name if op in set(Op) else f"opcode {op}"
        return f"SM {self.sm[record]}, task {self.at[record]} ({name} of layer {layer})"

    def counter(self, index: int | np.integer[Any]) -> str:
        """A counter's name, quoted."""
        if index == NO_COUNTER:
            return "no counter"
        return f"counter {self.plan.counters[int(index)].name!r}"


def _first_too_large(plan: Plan) -> str:
    for sm, at, task in plan:
        for name, word in zip(FIELDS, task.words(), strict=True):
            if not -(1 << 31) <= word < 1 << 31:
                return f"SM {sm}, task {at}: {name} = {word} does not fit into 32 bits"
    return "a word does not fit into 32 bits"
