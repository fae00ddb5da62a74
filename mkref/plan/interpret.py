"""Run a plan in NumPy: the same words, the same buffers, the same bits as the kernel.

One task at a time, on as many SMs as the plan has. Counters are honoured as the kernel honours them
(monotonic, `arrivals * (step + 1)`); which of the SMs that could go on does so is a matter of
`order`, and must not matter for the result. What the operations compute is in `interpret_ops` and
`interpret_attention`. Each step of a launch is one call of `run`; the loop is the caller's.

What it does not do: model time, the ring in shared memory, memory that is not yet visible or SMs
that begin the next step early. A missing wait may go unnoticed in one order; `mkref.plan.verify`
finds it in all of them.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from mkref.errors import MachineError, PlanError
from mkref.plan import interpret_ops as ops
from mkref.plan.interpret_attention import attention, merge
from mkref.plan.memory import Buffers, UnpackedWeights, allocate
from mkref.plan.runtime import Route, dense_route, find_experts, launch_ends
from mkref.plan.task import NO_COUNTER, Flag, Op, Task

if TYPE_CHECKING:
    from mkref.config import NorthConfig
    from mkref.plan.build import Plan

__all__ = ["NOT_FINITE", "WAIT_COUNTER", "WAIT_ROUTE", "Interpreter"]

WAIT_COUNTER, WAIT_ROUTE, NOT_FINITE = 1, 4, 5
"""Codes in `status[0]`, as in the kernel."""

PLAIN: dict[int, Callable[[ops.Step, Task], None]] = {
    Op.ROUTER: ops.router,
    Op.QKV: ops.qkv,
    Op.ATTENTION: attention,
    Op.MERGE: merge,
    Op.O_PROJ: ops.o_proj,
    Op.HEAD: ops.head,
}
ROUTED: dict[int, Callable[[ops.Step, Task, Route], None]] = {
    Op.GATE_UP: ops.gate_up,
    Op.DOWN: ops.down,
}
TOKENS: dict[int, Callable[[ops.Step, Task, ops.Ints], None]] = {
    Op.EMBED: ops.embed,
    Op.SAMPLE: ops.sample,
}


@dataclass
class _Sm:
    """One SM: the record it is at, the end of its list, and the experts that its loader found."""

    index: int
    at: int
    end: int
    sampled: ops.Ints  # tokens of its last SAMPLE: they live from step to step
    routed_layer: int = -1
    route: Route | None = None  # None once released: the loader may find the next layer's
    taken_ns: int = 0


@dataclass(frozen=True)
class _Blocked:
    """Why an SM cannot go on: `what` (a counter or a layer) is at `have`, not yet at `want`."""

    code: int
    what: int
    have: int
    want: int


class Interpreter:
    """Runs decode steps on a dictionary of NumPy buffers.

    Args:
        config: the model's geometry.
        buffers: names, types and shapes of `mkref.plan.buffers`; the tasks are decoded from
            `buffers["tasks"]` and `buffers["task_offsets"]`.
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
        self.decode()

    @classmethod
    def of(
        cls, plan: Plan, max_context: int, *, order: int | None = None, trace: bool = False
    ) -> Interpreter:
        """An interpreter with poisoned buffers of its own; weights and inputs are still missing."""
        names = [counter.name for counter in plan.counters]
        return cls(plan.config, allocate(plan, max_context), names, order=order, trace=trace)

    def decode(self) -> None:
        """Read tasks, offsets and weights again; call it after changing any of them.

        Raises:
            PlanError: a record has an unknown opcode.
        """
        self.weights = UnpackedWeights(self.buffers["weights"])
        self.tasks = [Task.from_words(words) for words in self.buffers["tasks"].tolist()]
        self.offsets: list[int] = self.buffers["task_offsets"].tolist()
        shape = (len(self.offsets) - 1, len(self.buffers["tokens"]))
        self.sampled = np.full(shape, ops.NO_TOKEN, dtype=np.int64)
        for record, task in enumerate(self.tasks):
            if task.op not in {*PLAIN, *ROUTED, *TOKENS}:
                raise PlanError(f"plan: record {record} has opcode {task.op}; 0..{max(Op)} exist")

    def run(self, rows: int, index: int, launch_step: int = 0) -> None:
        """One decode step.

        Args:
            rows: active rows, at most those that the plan was built for.
            index: steps since the counters were zero.
            launch_step: steps of this launch before this one; positions move on by it. Step 0
                takes `tokens`, a later one the tokens that came out of the step before.

        Raises:
            PlanError: no SM can go on; names an SM, its task, and what it waits for. `status`
                holds the same in numbers, as the kernel reports a hang. Or a token is none.
            MachineError: a logit is not finite; the step was finished all the same.
        """
        step = ops.Step(self.config, self.buffers, self.weights, rows, index, launch_step)
        if launch_step == 0:
            step.forget_router_logits()
        now = time.perf_counter_ns()
        starts = zip(self.offsets, self.offsets[1:], strict=False)
        running = [
            _Sm(i, at, end, self.sampled[i], taken_ns=now) for i, (at, end) in enumerate(starts)
        ]
        with np.errstate(all="ignore"):  # infinity and NaN go their way, as in the kernel
            while running := [sm for sm in running if sm.at < sm.end]:
                # A random draw may miss the only SM that can go on: then all are asked.
                if not self._round(self._draw(running), step) and not self._round(running, step):
                    raise self._stuck(running[0], step)
        if step.not_finite is not None:
            row, token = step.not_finite
            self.buffers["status"][:6] = (NOT_FINITE, 0, len(self.tasks) - 1, row, token, 0)
            raise MachineError(
                f"logits: row {row} is not finite; the weights or the KV cache hold NaN or infinity"
            )

    def ends(self, rows: int, launch_step: int, stop_after: int) -> bool:
        """Does the launch end after this step, before `n_steps`? As every SM decides in SAMPLE.

        Args:
            rows: active rows.
            launch_step: that of the `run` that is just done.
            stop_after: stopped rows that end the launch; 0 is never.
        """
        tokens = self.buffers["tokens_out"][: launch_step + 1, :rows]
        cancelled = bool(self.buffers["control"][0])
        return launch_ends(tokens, self.buffers["stop_ids"][:rows], stop_after, cancelled)

    def _draw(self, running: list[_Sm]) -> list[_Sm]:
        """The SMs that are asked next: all in turn, or as many at random."""
        if self.random is None:
            return running
        return [running[i] for i in self.random.integers(len(running), size=len(running))]

    def _round(self, sms: Iterable[_Sm], step: ops.Step) -> bool:
        """Let each SM run one task if it can; was there one?"""
        moved = False
        for sm in sms:
            if sm.at < sm.end and self._blocked(sm, step) is None:
                self._run_task(sm, step)
                moved = True
        return moved

    def _blocked(self, sm: _Sm, step: ops.Step) -> _Blocked | None:
        """What the SM's next task lacks; finds its experts, as the loader does, if it can."""
        task = self.tasks[sm.at]
        if task.op in ROUTED and task.layer != sm.routed_layer:
            if sm.route is not None:
                return _Blocked(WAIT_ROUTE, task.layer, 0, 1)  # never released
            if task.flags & Flag.DENSE:
                sm.route = dense_route(task.layer, step.rows)
            else:
                short = self._short(task.route_wait, task.route_count, step)
                if short is not None:
                    return short
                logits = step.router_logits(task.layer)
                sm.route = find_experts(task.layer, logits, self.config)
            sm.routed_layer = task.layer
            if sm.index == 0:  # the same on every SM: one counts
                self.buffers["active_experts"][task.layer] += len(sm.route.experts)
        return self._short(task.wait, task.wait_count, step)

    def _short(self, counter: int, arrivals: int, step: ops.Step) -> _Blocked | None:
        """Compare a counter with its target as the kernel does: 32 bits that wrap."""
        if counter == NO_COUNTER:
            return None
        have = int(self.buffers["counters"][counter, 0])
        want = _int32(arrivals * (step.index + 1))
        return _Blocked(WAIT_COUNTER, counter, have, want) if _int32(have - want) < 0 else None

    def _run_task(self, sm: _Sm, step: ops.Step) -> None:
        record = sm.at
        task = self.tasks[record]
        ready_ns = time.perf_counter_ns()
        if task.op in PLAIN:
            PLAIN[task.op](step, task)
        elif task.op in TOKENS:
            TOKENS[task.op](step, task, sm.sampled)
        elif sm.route is None:
            raise PlanError(f"plan: {self._place(sm)} uses its experts after it released them")
        else:
            ROUTED[task.op](step, task, sm.route)
        if task.signal != NO_COUNTER:
            counter = self.buffers["counters"][task.signal]
            counter[0] = _int32(int(counter[0]) + 1)
        if task.flags & Flag.RELEASE:
            sm.route = None
        sm.at += 1
        now = time.perf_counter_ns()
        if self.trace:
            self.buffers["trace"][record] = (sm.taken_ns, ready_ns, now, ready_ns)
        sm.taken_ns = now

    def _place(self, sm: _Sm) -> str:
        task = self.tasks[sm.at]
        at = sm.at - self.offsets[sm.index]
        return f"SM {sm.index}, task {at} ({Op(task.op).name} of layer {task.layer})"

    def _stuck(self, sm: _Sm, step: ops.Step) -> PlanError:
        """The report of the first SM that waits, in words and in `status`."""
        why = self._blocked(sm, step)
        assert why is not None, "only asked when nobody can go on"
        self.buffers["status"][:6] = (why.code, sm.index, sm.at, why.what, why.have, why.want)
        if why.code == WAIT_ROUTE:
            return PlanError(
                f"plan: nobody can go on: {self._place(sm)} needs the place of its experts, "
                f"but layer {sm.routed_layer} never released it (Flag.RELEASE)"
            )
        return PlanError(
            f"plan: nobody can go on: {self._place(sm)} waits for counter "
            f"{self.counters[why.what]!r}: it has {why.have}, wants {why.want}"
        )


def _int32(value: int) -> int:
    """The low 32 bits as a signed number."""
    return (value + (1 << 31)) % (1 << 32) - (1 << 31)
