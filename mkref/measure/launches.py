"""Machines that run a step as several launches, and kernels built with other switches.

`SplitHost` and `SplitCuda` take the launches of `mkref.measure.rungs.split` beside the plan that
`load` gets. They stay ordinary machines: inputs, tokens and errors go the same way as when one
launch does it all.

What it does not do: several steps per launch; the next token goes over the host.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from mkref.errors import MachineError
from mkref.machine import base
from mkref.machine.base import PARAMS_DTYPE, KernelMachine
from mkref.machine.cuda import Build, CudaMachine
from mkref.machine.host import HostMachine
from mkref.machine.source import THREADS, kernel_source
from mkref.measure.driver import Driver, Graph, Launch
from mkref.plan.buffers import STATUS_WORDS, Buffer
from mkref.plan.task import NO_COUNTER

if TYPE_CHECKING:
    from mkref.plan.build import Plan
    from mkref.weights.packed import PackedWeights

__all__ = ["Changes", "Mode", "SplitCuda", "SplitHost", "changed_kernel"]

Mode = Literal["stream", "graph", "dependent"]
"""How launches follow one another: one by one, in a graph, or in a graph with programmatic
dependent launch.
"""
Changes = Mapping[str, str]
"""Texts of the kernel's source, and what stands there instead."""


@contextmanager
def changed_kernel(changes: Changes, switches: Mapping[str, bool]) -> Iterator[None]:
    """Machines that are loaded within have texts of the kernel replaced and switches of
    `kernel_source` set.

    Raises:
        MachineError: the kernel has no such text.
    """

    plain: Callable[..., str] = kernel_source

    def source(*args: Any, **words: Any) -> str:
        text = plain(*args, **{**words, **switches})
        for old, new in changes.items():
            if old not in text:
                raise MachineError(f"measure: the kernel has no text {old!r} to replace")
            text = text.replace(old, new)
        return text

    base.kernel_source = source  # type: ignore[attr-defined]
    try:
        yield
    finally:
        base.kernel_source = kernel_source  # type: ignore[attr-defined]


class _Records:
    """The launches' task lists in a machine's memory, and their parameters."""

    def __init__(self, machine: KernelMachine, launches: Sequence[Plan]) -> None:
        words = np.concatenate([plan.words() for plan in launches])
        ends = np.cumsum([0, *(plan.n_tasks for plan in launches)])
        offsets = np.stack(
            [plan.offsets() + end for plan, end in zip(launches, ends, strict=False)]
        ).astype(np.int32)
        self.memory = []
        for array in (words, offsets):
            self.memory.append(machine.allocate(Buffer("int32", array.shape), 0))
            machine.put(self.memory[-1], array)
        tasks, first = map(machine.address, self.memory)
        self.fixed = {
            "tasks": np.full(len(launches), tasks),
            "task_offsets": first + np.arange(len(launches)) * offsets.shape[1] * 4,
        }
        self.params = np.zeros(len(launches), PARAMS_DTYPE)
        self.counted = any(
            counter != NO_COUNTER
            for plan in launches
            for _, _, task in plan
            for counter in (task.wait, task.route_wait)
        )

    def fill(self, params: np.ndarray) -> np.ndarray:
        """`Params` of every launch of a step."""
        self.params[:] = params
        for name, values in self.fixed.items():
            self.params[name] = values
        return self.params


class SplitHost(HostMachine):
    """A step as several launches on the CPU.

    Args:
        launches: of one step.
        options: of `HostMachine`.
    """

    def __init__(self, launches: Sequence[Plan], **options: Any) -> None:
        super().__init__(**options)
        self.launches = launches
        self._records: _Records | None = None

    def load(self, plan: Plan, weights: PackedWeights, max_context: int) -> None:
        """As ever, and the records of the launches."""
        super().load(plan, weights, max_context)
        self._records = _Records(self, self.launches)

    def launch(self, params: np.ndarray) -> None:
        """All launches of the step, one after another."""
        _refuse_steps(params)
        assert self._records is not None, "only after load"
        for each in self._records.fill(params):
            super().launch(np.array([each]))


class SplitCuda(CudaMachine):
    """A step as several launches on a GPU.

    Args:
        launches: of one step.
        mode: how they follow one another.
        options: of `CudaMachine`.
    """

    def __init__(self, launches: Sequence[Plan], mode: Mode, **options: Any) -> None:
        super().__init__(**options)
        self.launches, self.mode = launches, mode
        self.driver = Driver()
        self._records: _Records | None = None
        self._queue: list[Launch] = []
        self._queued: Build | None = None  # what the queue launches
        self._graph: Graph | None = None
        self._recorded = b""

    def load(self, plan: Plan, weights: PackedWeights, max_context: int) -> None:
        """As ever, and the records of the launches."""
        super().load(plan, weights, max_context)
        self._records = _Records(self, self.launches)
        self._queued = None

    def _use(self, build: Build) -> None:
        """Let the launches be of this build."""
        assert self._records is not None, "only after load"
        if build is self._queued:
            return
        params = self._records.params
        self._queue = [
            Launch(
                self.driver,
                int(build.kernel.kernel.ptr),
                self.plan.n_sm,
                THREADS,
                build.block_bytes,
                int(params.ctypes.data) + i * params.strides[0],
                dependent=self.mode == "dependent" and i > 0,
            )
            for i in range(len(self.launches))
        ]
        self._forget()
        self._queued, self.ring_in_use = build, build.ring

    def blocks_per_sm(self, rows: int) -> int:
        """Blocks that an SM has room for: with two, the next launch can begin to stream early."""
        build = self.build_for(rows)
        return self.driver.blocks_per_sm(int(build.kernel.kernel.ptr), THREADS, build.block_bytes)

    def begin(self, params: np.ndarray) -> None:
        """Queue the launches and, behind them, the copy of the status."""
        _refuse_steps(params)
        self._stream, self._n_steps = self.cupy.cuda.get_current_stream(), 1
        self._launch(params, self._stream.ptr)
        self._copy(self._status.ctypes.data, self.address(self.buffers["status"]), STATUS_WORDS * 4)

    def _launch(self, params: np.ndarray, stream: int) -> None:
        assert self._records is not None, "only after load"
        self._use(self.build_for(int(params["rows"][0])))
        if self.mode == "stream":
            self._records.fill(params)
            self._queue_all(stream)
            return
        # What is recorded is for any step: the counters begin at zero in each.
        params = params.copy()
        params["step"] = 0
        if self._graph is None or self._recorded != params.tobytes():
            self._forget()
            self._records.fill(params)
            self._graph = self.driver.record(self._queue_all)
            self._recorded = params.tobytes()
        self._graph(stream)

    def _queue_all(self, stream: int) -> None:
        assert self._records is not None, "only after load"
        if self.mode != "stream" and self._records.counted:
            n_words = self.table["counters"].n_bytes // 4
            self.driver.clear(self.address(self.buffers["counters"]), n_words, stream)
        for launch in self._queue:
            launch(stream)

    def _forget(self) -> None:
        if self._graph is not None:
            self._graph.close()
        self._graph = None

    def close(self) -> None:
        """Drop the graph and all buffers."""
        self._forget()
        self._records = None
        super().close()


def _refuse_steps(params: np.ndarray) -> None:
    if params["n_steps"][0] != 1:
        raise MachineError("n_steps: a step of several launches needs a launch of one step")
