"""The machine without a compiler: `mkref.plan.interpret` behind the same interface as the kernel.

Buffers, inputs and errors are those of `KernelMachine`; only the launch differs. It is exact and
slow: for models of a few million parameters, and for looking into every buffer.

What it does not do: overlap anything. Time stamps are those of the interpreter, one task at a time.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from mkref.errors import MachineError, PlanError
from mkref.machine.base import KernelMachine
from mkref.machine.draw_rows import draw_rows
from mkref.plan.interpret import Interpreter
from mkref.plan.runtime import launch_ends

if TYPE_CHECKING:
    from mkref.machine.sampler import Sampler
    from mkref.plan.buffers import Buffer
    from mkref.plan.build import Plan
    from mkref.weights.packed import PackedWeights

__all__ = ["InterpreterMachine"]

Bytes = npt.NDArray[np.uint8]


class InterpreterMachine(KernelMachine):
    """Runs a plan's tasks in NumPy, one at a time.

    Args:
        trace: stamp every task; one runs at a time, so this shows order and work, not overlap.
        order: None lets the SMs take turns; a number seeds a random order.
    """

    name = "interpreter"

    def __init__(self, *, trace: bool = False, order: int | None = None) -> None:
        super().__init__(trace=trace)
        self.order = order
        self.interpreter: Interpreter | None = None
        self._steps: Iterator[None] = iter(())

    def compile(self, most_rows: int) -> None:
        """Nothing to compile; the interpreter is made when the buffers are there (`load`)."""

    def build_sampler(self) -> None:
        """Nothing to compile."""

    def load(self, plan: Plan, weights: PackedWeights, max_context: int) -> None:
        """Allocate and poison the buffers, decode the tasks."""
        super().load(plan, weights, max_context)
        arrays = {
            name: memory.view(self.table[name].dtype).reshape(self.table[name].shape)
            for name, memory in self.buffers.items()
            if name in self.table
        }
        names = [counter.name for counter in plan.counters]
        self.interpreter = Interpreter(
            plan.config, arrays, names, order=self.order, trace=self.trace
        )

    def begin(self, params: np.ndarray) -> None:
        """Nothing runs yet: `wait` interprets one step at a time."""
        if self.interpreter is None:
            raise MachineError("interpreter: no plan is loaded")
        rows, step, n_steps, stop_after = (
            int(params[name][0]) for name in ("rows", "step", "n_steps", "stop_after")
        )
        self._steps = self._run(self.interpreter, rows, step, n_steps, stop_after)

    def _run(
        self, interpreter: Interpreter, rows: int, step: int, n_steps: int, stop_after: int
    ) -> Iterator[None]:
        """A launch; what went wrong is left in `status`, as the kernel leaves it."""
        progress = self.shared["progress"]
        for i in range(n_steps):
            if i and progress[1]:  # cancelled while nothing ran
                return
            try:
                interpreter.run(rows, step + i, i)
            except (PlanError, MachineError):
                progress[0] = i
                if not interpreter.buffers["status"][0]:
                    raise
                return
            yield
            if interpreter.ends(rows, i, stop_after):
                return

    def begin_draw(self, sampler: Sampler, step: int) -> None:
        """Interpret the step that `begin` has left to do, and draw in NumPy.

        What `cuda/sampler/` leaves for the next step and for the host is left here, too.
        """
        assert self.interpreter is not None, "begin has looked"
        b, rows = self.interpreter.buffers, sampler.draw.rows
        shared = {name: b[name] for name in ("tokens_out", "progress")}
        done = int(shared["progress"][0])
        b.update(tokens_out=np.zeros((1, self.plan.rows), np.int32), progress=np.zeros(2, np.int32))
        try:
            self.wait(0)
        finally:
            b.update(shared)
            shared["progress"][0] = done  # whatever happened
        if b["status"][0] or shared["progress"][1]:
            return
        tokens, told = draw_rows(
            b["logits"][:rows],
            sampler.draw,
            temperatures=b["temperatures"],
            seeds=b["seeds"].view(np.uint64)[:, 0],
            positions=b["positions"],
            stop_ids=b["stop_ids"],
            ban_until=sampler.ban_until,
            counts=self.buffers["counts"].view(np.uint16).reshape(self.plan.rows, -1),
        )
        shared["tokens_out"][step, :rows] = tokens
        host = sampler.host
        for name, array in (
            ("logprobs", told.token),
            ("logprob_ids", told.top_ids),
            ("logprob_tops", told.top),
        ):
            host[name][step, :rows] = array
        drawn = shared["tokens_out"][: step + 1, :rows]
        if launch_ends(drawn, b["stop_ids"][:rows], sampler.stop_after, cancelled=False):
            shared["progress"][1] = 1
        else:
            b["tokens"][:rows] = tokens
            b["positions"][:rows] += 1
        shared["progress"][0] = step + 1

    def wait(self, seen: int) -> bool:
        """Interpret the next step; True if there is none."""
        return next(self._steps, self) is self

    def write(self, name: str, array: np.ndarray) -> None:
        """Overwrite one buffer; tasks and weights are decoded again."""
        super().write(name, array)
        if self.interpreter is not None and name in ("weights", "tasks", "task_offsets"):
            self.interpreter.decode()

    def allocate(self, buffer: Buffer, fill: int) -> Bytes:
        """An array of bytes."""
        return np.full(buffer.n_bytes, fill, dtype=np.uint8)

    def put(self, memory: Bytes, array: np.ndarray) -> None:
        """Copy."""
        memory[: array.nbytes] = array.reshape(-1).view(np.uint8)

    def get(self, memory: Bytes, buffer: Buffer) -> np.ndarray:
        """Copy."""
        return memory[: buffer.n_bytes].copy().view(buffer.dtype).reshape(buffer.shape)

    def address(self, memory: Bytes) -> int:
        """Not used: the interpreter has the arrays themselves."""
        return int(memory.ctypes.data)

    def weights_memory(self, weights: PackedWeights) -> tuple[Bytes, Bytes]:
        """The weights in place; a copy if they are on a GPU."""
        tiles, gammas = weights.words()
        return tiles.reshape(-1).view(np.uint8), gammas.reshape(-1).view(np.uint8)

    def close(self) -> None:
        """Forget buffers and unpacked weights."""
        super().close()
        self.interpreter = None
