"""One traced step: for every task the time it was seen, could start, was done, and was loaded.

A `Trace` stands alone: it keeps the names of operations and counters, so that a recording stays
readable after opcodes have changed. Times are nanoseconds since the first stamp of the step.

What it does not do: take the stamps (`cuda/megakernel.cu`, section 10), or say what the step would
have cost without them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np

from mkref.errors import MachineError, PlanError
from mkref.plan.task import NO_COUNTER, Op

if TYPE_CHECKING:
    from mkref.plan.build import Plan

__all__ = ["ABSENT", "BEGIN", "COLUMNS", "END", "ISSUED", "READY", "Event", "Trace"]

BEGIN, READY, END, ISSUED = range(4)
"""Columns of the stamps: task seen by the consumers, inputs there, signalled, all copies issued."""
ABSENT = -1
"""A time that was not stamped."""
COLUMNS = ("sm", "op", "layer", "first", "count", "wait", "signal")
_UNWRITTEN = (0, 2**64 - 1)  # never written; poisoned


@dataclass(frozen=True)
class Event:
    """One task of one SM; times in ns since the start of the trace, `ABSENT` if not stamped."""

    sm: int
    index: int  # place in the SM's list
    op: str
    layer: int
    first: int
    count: int
    wait: str  # name of the counter it waited for; "" if none
    signal: str
    begin: int
    ready: int
    end: int
    issued: int

    @property
    def wait_ns(self) -> int:
        """Time between seeing the task and having its inputs."""
        return self.ready - self.begin

    @property
    def work_ns(self) -> int:
        """Time between having the inputs and having signalled."""
        return self.end - self.ready


@dataclass(frozen=True, eq=False)
class Trace:
    """All tasks of one step, SM after SM in the order in which each SM ran them.

    Attributes:
        ops: names of operations, indexed by `columns["op"]`.
        counters: names of counters, indexed by `columns["wait"]` and `columns["signal"]`.
        columns: int32 [n_tasks] for each name in `COLUMNS`.
        times: int64 [n_tasks, 4], ns since the first stamp; `ABSENT` where nothing was stamped.
        provenance: where the stamps come from: machine, model, date ... as short texts.
    """

    ops: tuple[str, ...]
    counters: tuple[str, ...]
    columns: dict[str, np.ndarray]
    times: np.ndarray
    provenance: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        n = len(self.times)
        if self.times.shape != (n, 4) or any(len(self.columns[c]) != n for c in COLUMNS):
            raise PlanError(
                f"trace: times of shape {self.times.shape} do not fit "
                f"{len(self.columns['sm'])} tasks; four times per task are needed"
            )
        self._check_order()

    def _check_order(self) -> None:
        """Within an SM, time does not run backwards: begin, ready, end, begin of the next."""
        traced = np.flatnonzero(self.complete)
        flat = self.times[traced, :ISSUED]
        inside = np.diff(flat, axis=1).min(axis=1, initial=0) < 0
        same_sm = np.diff(self.columns["sm"][traced]) == 0
        between = np.zeros(len(traced), dtype=bool)
        between[1:] = same_sm & (flat[1:, BEGIN] < flat[:-1, END])
        wrong = traced[inside | between]
        if len(wrong):
            i = int(wrong[0])
            raise MachineError(
                f"trace: task {i} on SM {int(self.columns['sm'][i])} has times "
                f"{self.times[i].tolist()}, which run backwards; the clock of the machine is broken"
            )

    @classmethod
    def from_plan(
        cls, plan: Plan, stamps: np.ndarray, provenance: Mapping[str, str] | None = None
    ) -> Trace:
        """Put a machine's stamps beside the tasks of the plan that it ran.

        Args:
            plan: the plan, whose tasks stand in the order of the stamps.
            stamps: uint64 [n_tasks, 4] ns of one clock, the kernel's buffer "trace"; 0 or all ones
                where nothing was written.
            provenance: where the stamps come from.

        Raises:
            PlanError: the stamps belong to another plan.
            MachineError: no stamp at all, or times that run backwards on one SM.
        """
        if stamps.shape != (plan.n_tasks, 4):
            raise PlanError(
                f"trace: stamps of shape {stamps.shape} are not those of this plan, "
                f"which has {plan.n_tasks} tasks and so needs ({plan.n_tasks}, 4)"
            )
        raw = stamps.astype(np.uint64)
        written = ~np.isin(raw, np.array(_UNWRITTEN, dtype=np.uint64))
        if not written.any():
            raise MachineError(
                "trace: the machine stamped nothing; load it with trace=True and run a step first"
            )
        times = np.full(raw.shape, ABSENT, dtype=np.int64)
        times[written] = (raw[written] - raw[written].min()).astype(np.int64)
        tasks = [(sm, task) for sm, _, task in plan]
        columns = {
            name: np.array(
                [sm if name == "sm" else getattr(task, name) for sm, task in tasks], np.int32
            )
            for name in COLUMNS
        }
        return cls(
            ops=tuple(op.name for op in sorted(Op)),
            counters=tuple(counter.name for counter in plan.counters),
            columns=columns,
            times=times,
            provenance=dict(provenance or {}),
        )

    @property
    def where(self) -> str:
        """What it was recorded on, in words; "" if the provenance does not say."""
        return self.provenance.get("machine") or self.provenance.get("gpu", "")

    @property
    def n_tasks(self) -> int:
        """Number of tasks on all SMs."""
        return len(self.times)

    @property
    def n_sm(self) -> int:
        """Number of SMs."""
        return int(self.columns["sm"].max(initial=-1)) + 1

    @cached_property
    def complete(self) -> np.ndarray:
        """bool [n_tasks]: begin, ready and end are all stamped."""
        return np.asarray((self.times[:, :ISSUED] != ABSENT).all(axis=1))

    @property
    def span_ns(self) -> int:
        """Time from the first stamp to the last end."""
        return int(self.times[:, END].max(initial=0))

    def tasks_of(self, sm: int) -> np.ndarray:
        """Indices of the tasks of one SM, in order: int64 [n]."""
        return np.flatnonzero(self.columns["sm"] == sm)

    def event(self, i: int) -> Event:
        """Task number `i` with names instead of numbers."""
        c = {name: int(column[i]) for name, column in self.columns.items()}
        first_of_sm = int(np.searchsorted(self.columns["sm"], c["sm"]))
        begin, ready, end, issued = (int(t) for t in self.times[i])
        return Event(
            c["sm"], i - first_of_sm, self.ops[c["op"]], c["layer"], c["first"], c["count"],
            self._counter(c["wait"]), self._counter(c["signal"]), begin, ready, end, issued,
        )  # fmt: skip

    def __iter__(self) -> Iterator[Event]:
        """Every task that was stamped completely, SM after SM."""
        return (self.event(int(i)) for i in np.flatnonzero(self.complete))

    def _counter(self, index: int) -> str:
        return "" if index == NO_COUNTER else self.counters[index]

    def only(self, sms: range) -> Trace:
        """The same step with the tasks of some SMs only; times keep their zero."""
        keep = np.isin(self.columns["sm"], np.array(sms))
        columns = {name: column[keep] for name, column in self.columns.items()}
        return replace(self, columns=columns, times=self.times[keep])
