"""One traced step: for every task the time it was seen, could start, was done, and was loaded.

A `Trace` stands alone: it keeps the names of operations and counters, so that a recording stays
readable after opcodes have changed. Times are nanoseconds since the first task was seen. Where the
machine also stamped the stages of the ring, they come along (`stages`).

What it does not do: take the stamps (`cuda/megakernel.cu`, wherever it says TRACE), or say what the
step would have cost without them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np

from mkref.errors import MachineError, PlanError
from mkref.plan.task import NO_COUNTER, Op
from mkref.trace.stages import ABSENT, Stages, is_written

if TYPE_CHECKING:
    from mkref.plan.build import Plan
    from mkref.trace.stages import RingShape

__all__ = ["ABSENT", "BEGIN", "COLUMNS", "END", "ISSUED", "READY", "Event", "Trace"]

BEGIN, READY, END, ISSUED = range(4)
"""Columns of the stamps: task seen by the consumers, inputs there, signalled, all copies issued."""
COLUMNS = ("sm", "op", "layer", "first", "count", "wait", "signal")
BESIDE = Op.MERGE.name
"""The operation that a warp of its own may run beside the consumers."""


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
    beside: bool = False  # ran beside the tasks around it, not in turn with them

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
        times: int64 [n_tasks, 4], ns since the first task was seen, 0 for what came before;
            `ABSENT` where nothing was stamped.
        provenance: where the stamps come from: machine, model, date ... as short texts.
        stages: what happened to the stages of the ring; None if that was not stamped.
    """

    ops: tuple[str, ...]
    counters: tuple[str, ...]
    columns: dict[str, np.ndarray]
    times: np.ndarray
    provenance: dict[str, str] = field(default_factory=dict)
    stages: Stages | None = None

    def __post_init__(self) -> None:
        n = len(self.times)
        if self.times.shape != (n, 4) or any(len(self.columns[c]) != n for c in COLUMNS):
            raise PlanError(
                f"trace: times of shape {self.times.shape} do not fit "
                f"{len(self.columns['sm'])} tasks; four times per task are needed"
            )
        for lane in (~self.beside, self.beside):
            self._check_order(np.flatnonzero(self.complete & lane))

    def _check_order(self, traced: np.ndarray) -> None:
        """Within an SM, time does not run backwards: begin, ready, end, begin of the next."""
        flat = self.times[traced, :ISSUED]
        wrong = np.diff(flat, axis=1).min(axis=1, initial=0) < 0
        wrong[1:] |= self._before_its_turn(traced)
        if wrong.any():
            i = int(traced[wrong][0])
            raise MachineError(
                f"trace: task {i} on SM {int(self.columns['sm'][i])} has times "
                f"{self.times[i].tolist()}, which run backwards; the clock of the machine is broken"
            )

    def _before_its_turn(self, tasks: np.ndarray) -> np.ndarray:
        """bool [n - 1]: each task but the first began while the one before, of its SM, ran."""
        same_sm = np.diff(self.columns["sm"][tasks]) == 0
        return same_sm & (self.times[tasks[1:], BEGIN] < self.times[tasks[:-1], END])

    @cached_property
    def beside(self) -> np.ndarray:
        """bool [n_tasks]: ran beside the tasks around it, on a warp of its own.

        That is MERGE, where the helper did it. With few rows the consumers do it in its turn.
        """
        merge = np.isin(self.columns["op"], [k for k, op in enumerate(self.ops) if op == BESIDE])
        traced = np.flatnonzero(self.complete)
        early = self._before_its_turn(traced)
        either = merge[traced[1:]] | merge[traced[:-1]]
        return np.asarray(merge & bool((early & either).any()))

    @classmethod
    def from_plan(
        cls,
        plan: Plan,
        stamps: np.ndarray,
        provenance: Mapping[str, str] | None = None,
        *,
        stage_stamps: np.ndarray | None = None,
        ring: RingShape | None = None,
    ) -> Trace:
        """Put a machine's stamps beside the tasks of the plan that it ran.

        Args:
            plan: the plan, whose tasks stand in the order of the stamps.
            stamps: uint64 [n_tasks, 4] ns of one clock, the kernel's buffer "trace"; 0 or all ones
                where nothing was written.
            provenance: where the stamps come from.
            stage_stamps: uint64 [n_sm, n, 4] ns of the same clock, the buffer "stage_trace".
            ring: shape of the ring; without it the stages are left out.

        Raises:
            PlanError: the stamps belong to another plan.
            MachineError: no stamp at all, or times that run backwards on one SM.
        """
        if stamps.shape != (plan.n_tasks, 4):
            raise PlanError(
                f"trace: stamps of shape {stamps.shape} are not those of this plan, "
                f"which has {plan.n_tasks} tasks and so needs ({plan.n_tasks}, 4)"
            )
        tasks = [(sm, task) for sm, _, task in plan]
        columns = {
            name: np.array(
                [sm if name == "sm" else getattr(task, name) for sm, task in tasks], np.int32
            )
            for name in COLUMNS
        }
        raw = stamps.astype(np.uint64)
        written = is_written(raw)
        if not written.any():
            raise MachineError(
                "trace: the machine stamped nothing; load it with trace=True and run a step first"
            )
        # Who ran ahead into a step that then did not come has overwritten what it stamped first:
        # the helper that it saw a MERGE, the loader that it issued copies.
        ahead = (columns["op"] == Op.MERGE) & (raw[:, BEGIN] > raw[:, END])
        raw[ahead, BEGIN] = raw[ahead, READY]
        written[:, ISSUED] &= ~written[:, END] | (raw[:, ISSUED] <= raw[:, END])
        # The step begins with the first task that a consumer sees. The loader and the helper have
        # done some of it before, in a launch of several steps; that counts as time 0.
        seen = written[:, BEGIN] & (columns["op"] != Op.MERGE)
        zero = int(raw[seen, BEGIN].min()) if seen.any() else int(raw[written].min())
        stages = None
        if stage_stamps is not None and ring is not None:
            stages = Stages.from_stamps(stage_stamps, ring, zero=zero)
        times = np.full(raw.shape, ABSENT, dtype=np.int64)
        times[written] = np.maximum(raw[written], np.uint64(zero)) - np.uint64(zero)
        return cls(
            ops=tuple(op.name for op in sorted(Op)),
            counters=tuple(counter.name for counter in plan.counters),
            columns=columns,
            times=times,
            provenance=dict(provenance or {}),
            stages=stages,
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
        """Time from the first task to the last end."""
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
            bool(self.beside[i]),
        )  # fmt: skip

    def __iter__(self) -> Iterator[Event]:
        """Every task that was stamped completely, SM after SM."""
        return (self.event(int(i)) for i in np.flatnonzero(self.complete))

    def _counter(self, index: int) -> str:
        return "" if index == NO_COUNTER else self.counters[index]

    def only(self, sms: range) -> Trace:
        """The same step with the tasks and stages of some SMs only; times keep their zero."""
        keep = np.isin(self.columns["sm"], np.array(sms))
        columns = {name: column[keep] for name, column in self.columns.items()}
        stages = self.stages and self.stages.only(sms)
        return replace(self, columns=columns, times=self.times[keep], stages=stages)

    def with_stages_of(self, sms: Sequence[int]) -> Trace:
        """The same step with the stages of some SMs only, which make up most of a file."""
        return replace(self, stages=self.stages and self.stages.only(sms))
