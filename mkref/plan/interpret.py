"""Run a plan in NumPy: the same words, the same buffers, the same bits as the kernel.

One task at a time, on as many SMs as the plan has. Counters are honoured as the kernel honours them
(monotonic, `arrivals * (step + 1)`); which of the SMs that could go on does so is a matter of
`order`, and must not matter for the result. What the operations compute is in `interpret_ops` and
`interpret_attention`.

What it does not do: model time, the ring in shared memory or memory that is not yet visible. A
missing wait may go unnoticed in one order; `mkref.plan.verify` finds it in all of them.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from mkref.errors import MachineError, PlanError
from mkref.plan import interpret_ops as ops
from mkref.plan.interpret_attention import attention, merge
from mkref.plan.memory import Buffers, UnpackedWeights, allocate
from mkref.plan.runtime import Route, dense_route, find_experts
from mkref.plan.task import NO_COUNTER, Flag, Op, Task

if TYPE_CHECKING:
    from mkref.config import NorthConfig
    from mkref.plan.build import Plan

__all__ = ["NOT_FINITE", "WAIT_COUNTER", "WAIT_ROUTE", "Interpreter", "interpret"]

WAIT_COUNTER, WAIT_ROUTE, NOT_FINITE = 1, 4, 5
"""Codes in `status[0]`, as in the kernel."""

PLAIN: dict[int, Callable[[ops.Step, Task], None]] = {
    Op.EMBED: ops.embed,
    Op.ROUTER: ops.router,
    Op.QKV: ops.qkv,
    Op.ATTENTION: attention,
    Op.MERGE: merge,
    Op.O_PROJ: ops.o_proj,
    Op.HEAD: ops.head,
    Op.SAMPLE: ops.sample,
}
ROUTED: dict[int, Callable[[ops.Step, Task, Route], None]] = {
    Op.GATE_UP: ops.gate_up,
    Op.DOWN: ops.down,
}


@dataclass
class _Sm:
    """One SM: where it is in its list, and the experts that its loader has found."""

    index: int
    at: int  # record
    end: int
    route: Route | None = None  # None: released, the loader may write the next


@dataclass(frozen=True)
class _Blocked:
    """Why an SM cannot go on: `have` of something is not yet `want`."""

    code: int
    what: int  # counter or layer
    have: int
    want: int


class Interpreter:
    """Runs decode steps on a dictionary of NumPy buffers.

    Args:
        config: the model's geometry.
        buffers: names, types and shapes of `mkref.plan.buffers`; the tasks are decoded from
            `buffers["tasks"]` and `buffers["task_offsets"]`. Weights must not change afterwards.
        counters: names of the counters, for messages.
        order: None lets the SMs take turns; a number seeds a random order.
        trace: stamp `buffers["trace"]`.

    Raises:
        PlanError: a record has an unknown opcode.
    """

    def __init__(
        self,
        config: NorthConfig,
        buffers: Buffers,
        counters: Sequence[str],
        *,
        order: int | None = None,
        trace: bool = False,
    ) -> None:
        self.config = config
        self.buffers = buffers
        self.counters = tuple(counters)
        self.trace = trace
        self.random = None if order is None else np.random.default_rng(order)
        self.weights = UnpackedWeights(buffers["weights"])
        self.tasks = [Task.from_words(words) for words in buffers["tasks"].tolist()]
        self.offsets: list[int] = buffers["task_offsets"].tolist()
        for record, task in enumerate(self.tasks):
            if task.op not in PLAIN and task.op not in ROUTED:
                raise PlanError(f"plan: record {record} has opcode {task.op}; 0..{max(Op)} exist")

    @classmethod
    def of(
        cls, plan: Plan, max_context: int, *, order: int | None = None, trace: bool = False
    ) -> Interpreter:
        """An interpreter with poisoned buffers of its own; weights and inputs are still missing."""
        names = [counter.name for counter in plan.counters]
        return cls(plan.config, allocate(plan, max_context), names, order=order, trace=trace)

    def run(self, rows: int, step: int) -> None:
        """One decode step.

        Args:
            rows: active rows, 1 to 8.
            step: steps since the counters were zero.

        Raises:
            PlanError: no SM can go on; names an SM, its task, and what it waits for. `status`
                holds the same in numbers.
            MachineError: a logit is not finite; the step was finished all the same.
        """
        state = ops.Step(self.config, self.buffers, self.weights, rows)
        starts = zip(self.offsets, self.offsets[1:], strict=False)
        sms = [_Sm(i, at, end) for i, (at, end) in enumerate(starts)]
        running = [sm for sm in sms if sm.at < sm.end]
        while running:
            moved = False
            for sm in self._turns(running):
                if self._blocked(sm, step) is None:
                    self._run_task(sm, state)
                    moved = True
            if not moved:
                self._give_up(running, step)
            running = [sm for sm in running if sm.at < sm.end]
        if state.not_finite is not None:
            row, token = state.not_finite
            self.buffers["status"][:6] = (NOT_FINITE, 0, len(self.tasks) - 1, row, token, 0)
            raise MachineError(f"logits: row {row} is not finite at token {token}")

    def _turns(self, running: list[_Sm]) -> Iterator[_Sm]:
        """The SMs that are asked next: each once, or as many at random."""
        if self.random is None:
            yield from running
            return
        for i in self.random.integers(len(running), size=len(running)):
            if running[i].at < running[i].end:
                yield running[i]

    def _reached(self, counter: int, arrivals: int, step: int) -> _Blocked | None:
        """Compare a counter with its target the way the kernel does, in 32 bits that wrap."""
        have = int(self.buffers["counters"][counter, 0])
        want = (arrivals * (step + 1) + (1 << 31)) % (1 << 32) - (1 << 31)
        short = (want - have + (1 << 31)) % (1 << 32) - (1 << 31)
        return _Blocked(WAIT_COUNTER, counter, have, want) if short > 0 else None

    def _blocked(self, sm: _Sm, step: int) -> _Blocked | None:
        """What the SM's next task lacks; finds the task's experts on the way."""
        task = self.tasks[sm.at]
        if task.op in ROUTED and not self._has_route(sm, task):
            if sm.route is not None:
                return _Blocked(WAIT_ROUTE, task.layer, 0, 1)  # the last layer's are still in use
            if task.flags & Flag.DENSE:
                sm.route = dense_route(task.layer)
            else:
                short = self._reached(task.route_wait, task.route_count, step)
                if short is not None:
                    return short
                logits = self.buffers["router_logits"][: self._rows]
                sm.route = find_experts(task.layer, logits, self.config)
        if task.wait == NO_COUNTER:
            return None
        return self._reached(task.wait, task.wait_count, step)
