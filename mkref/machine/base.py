"""What every machine offers: load a plan and weights, run one decode step, read any buffer.

`Machine` is the interface that the engine uses. `KernelMachine` is the common half of the machines
that run `cuda/megakernel.cu`: it keeps the buffers, fills in the step's inputs and turns the
kernel's status words into errors. It knows neither CuPy nor a compiler; `mkref.machine.cuda` and
`mkref.machine.host` add those.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from mkref.errors import HangError, MachineError
from mkref.plan.buffers import BUFFERS, SCALARS, STATUS_WORDS, Buffer, buffer_table
from mkref.plan.build import PAGE, ROWS, Plan
from mkref.plan.task import Op
from mkref.reference.scalars import rotary_table

if TYPE_CHECKING:
    from mkref.weights.packed import PackedWeights

__all__ = ["PARAMS_DTYPE", "KernelMachine", "Machine", "StepInputs", "rope_table"]

PARAMS_DTYPE = np.dtype([(name, np.int64) for name in (*BUFFERS, *SCALARS)])
"""`struct Params` of the kernel: every member, pointer or integer, has eight bytes."""

FED = ("tokens", "positions")
RESULTS = ("status", "next_tokens")
"""Buffers that change in every step; each group is one block and travels in one copy."""
NOT_FINITE = 5
WAITS = {1: "counter", 2: "bytes of ring stage", 3: "free ring stage", 4: "experts of layer"}


@dataclass(frozen=True)
class StepInputs:
    """Inputs of one decode step for `n` active rows, 1 to 8.

    Attributes:
        tokens: int32 [n], the token that each row feeds.
        positions: int32 [n], its position, counted from 0.
        page_table: int32 [2, n, pages]; kind 0 for full layers, 1 for sliding layers; page `p` of a
            row is the number of the page that holds its tokens 64 p .. 64 p + 63 in the pool of
            that kind.
        temperatures: float32 [n]; 0 is greedy.
        seeds: uint64 [n], of the row's noise.
    """

    tokens: np.ndarray
    positions: np.ndarray
    page_table: np.ndarray
    temperatures: np.ndarray = field(default_factory=lambda: np.zeros(0, np.float32))
    seeds: np.ndarray = field(default_factory=lambda: np.zeros(0, np.uint64))

    @property
    def rows(self) -> int:
        """Number of active rows."""
        return len(self.tokens)

    def check(self, plan: Plan, max_context: int) -> None:
        """Refuse what would make the kernel read outside its buffers.

        Raises:
            MachineError: names the input, the row and the value.
        """
        n, c = self.rows, plan.config
        if not 1 <= n <= ROWS:
            raise MachineError(f"batch: {n} rows; a step takes 1 to {ROWS}")
        for name, array in (
            ("positions", self.positions),
            ("temperatures", self.temperatures),
            ("seeds", self.seeds),
        ):
            if len(array) not in ((n,) if name == "positions" else (0, n)):
                raise MachineError(f"{name}: {len(array)} values for {n} tokens")
        for name, array, limit in (
            ("tokens", self.tokens, c.vocab_size),
            ("positions", self.positions, max_context),
        ):
            for row, value in enumerate(array):
                if not 0 <= value < limit:
                    raise MachineError(f"{name}: row {row} has {value}; must be in 0..{limit - 1}")
        for row, value in enumerate(self.temperatures):
            if not 0 <= value < np.inf:
                raise MachineError(
                    f"temperatures: row {row} has {value}; must be 0 or a positive number"
                )
        self._check_pages(plan)

    def _check_pages(self, plan: Plan) -> None:
        c = plan.config
        if self.page_table.shape[:2] != (2, self.rows):
            raise MachineError(
                f"page_table: shape {self.page_table.shape}; must be (2, {self.rows}, pages)"
            )
        kinds = [c.is_sliding(layer) for layer in range(c.num_hidden_layers)]
        for kind, budget in ((0, plan.pool.full_pages), (1, plan.pool.sliding_pages)):
            if bool(kind) not in kinds:
                continue
            for row, position in enumerate(self.positions):
                first = max(0, int(position) - c.sliding_window + 1) if kind else 0
                pages = self.page_table[kind, row, first // PAGE : int(position) // PAGE + 1]
                n_pages = int(position) // PAGE + 1 - first // PAGE
                if len(pages) < n_pages or ((pages < 0) | (pages >= budget)).any():
                    raise MachineError(
                        f"page_table: row {row} at position {position} needs {n_pages} "
                        f"{'sliding' if kind else 'full'} pages numbered 0..{budget - 1}, "
                        f"has {pages.tolist()}"
                    )


class Machine(ABC):
    """Runs decode steps of one loaded plan."""

    name: str
    plan: Plan
    max_context: int

    @abstractmethod
    def load(self, plan: Plan, weights: PackedWeights, max_context: int) -> None:
        """Make the machine ready: build the kernel, allocate and poison the buffers.

        Args:
            plan: verified by the caller.
            weights: packed weights; kept by reference where the machine can read them in place.
            max_context: longest sequence in tokens.
        """

    @abstractmethod
    def step(self, inputs: StepInputs) -> np.ndarray:
        """Run one decode step; int32 [rows], the next token of each row.

        Raises:
            HangError: a wait inside the kernel ran out.
            MachineError: bad inputs, or logits that are not finite.
        """

    @abstractmethod
    def read(self, name: str) -> np.ndarray:
        """A copy of one buffer of `mkref.plan.buffers`."""

    @abstractmethod
    def write(self, name: str, array: np.ndarray) -> None:
        """Overwrite one buffer."""

    def logits(self, rows: int) -> np.ndarray:
        """Logits of the last step: float32 [rows, V]."""
        return self.read("logits")[:rows]

    def stamps(self) -> np.ndarray | None:
        """Time stamps of the last step, uint64 [n_tasks, 4] in ns, or None if not traced.

        Columns: consumers took the task; its inputs were ready; its outputs were signalled; the
        loader had issued its last copy.
        """
        return None

    def close(self) -> None:  # noqa: B027 - a machine without memory of its own has nothing to do
        """Give memory back."""


def rope_table(plan: Plan, max_context: int) -> np.ndarray:
    """cos and sin for all positions: float32 [max_context, D/2, 2]."""
    cos, sin = rotary_table(np.arange(max_context), plan.config.head_dim, plan.config.rope_theta)
    return np.stack([cos, sin], axis=-1)


class KernelMachine(Machine):
    """Buffers and status of a machine that runs the CUDA kernel.

    A subclass provides `allocate`, `put`, `get`, `address` for its kind of memory, and `build` and
    `launch`.
    """

    timeout_s: float = 2.0

    def __init__(self, *, trace: bool = False) -> None:
        self.trace = trace
        self.buffers: dict[str, Any] = {}
        self.table: dict[str, Buffer] = {}
        self.steps = 0
        self._sent: dict[str, np.ndarray] = {}
        self._params = np.zeros(1, PARAMS_DTYPE)
        self.unfinished = False  # the last launch did not end as it should

    @abstractmethod
    def build(self, plan: Plan) -> None:
        """Compile and load the kernel for the plan's geometry."""

    @abstractmethod
    def launch(self, params: np.ndarray) -> None:
        """Run the kernel on one `PARAMS_DTYPE` record and wait for it."""

    @abstractmethod
    def allocate(self, buffer: Buffer, fill: int) -> Any:
        """Memory for one buffer, every byte set to `fill`."""

    @abstractmethod
    def put(self, memory: Any, array: np.ndarray) -> None:
        """Copy an array into the first bytes of `memory`."""

    @abstractmethod
    def get(self, memory: Any, buffer: Buffer) -> np.ndarray:
        """Copy `memory` into a new array."""

    @abstractmethod
    def address(self, memory: Any) -> int:
        """Address of `memory` for the kernel."""

    @abstractmethod
    def weights_memory(self, weights: PackedWeights) -> tuple[Any, Any]:
        """Tiles and gammas as this machine's memory, in place if possible."""

    def load(self, plan: Plan, weights: PackedWeights, max_context: int) -> None:
        """Build, allocate, poison, and write what never changes."""
        self.plan, self.max_context, self.steps, self.unfinished = plan, max_context, 0, False
        self.build(plan)
        self.table = buffer_table(plan, max_context)
        self._sent.clear()
        self.buffers = dict(zip(("weights", "gammas"), self.weights_memory(weights), strict=True))
        if not self.trace:
            self.table["trace"] = Buffer("uint64", (1, 4))
        for group in (FED, RESULTS):
            self._allocate_together(group)
        for name, buffer in self.table.items():
            if name not in self.buffers:
                # Poison: bytes 0xFF are NaN for every float type, so what nobody wrote shows.
                clean = name in ("counters", "trace", "page_table", "temperatures", "seeds")
                self.buffers[name] = self.allocate(buffer, 0 if clean else 0xFF)
        self.write("status", np.zeros(self.table["status"].shape, np.int32))
        self.write("rope", rope_table(plan, max_context))
        self.write("tasks", plan.words())
        self.write("task_offsets", plan.offsets())
        self._params = np.zeros(1, PARAMS_DTYPE)
        for name, memory in self.buffers.items():
            if name in BUFFERS:
                self._params[name] = self.address(memory)
        self._params["max_pages"] = self.table["page_table"].shape[2]
        self._params["max_chunks"] = self.table["part_o"].shape[2]

    def _allocate_together(self, group: tuple[str, ...]) -> None:
        """One block of memory for small buffers that travel in one copy."""
        sizes = [self.table[name].n_bytes for name in group]
        block = self.allocate(Buffer("int32", (sum(sizes) // 4,)), 0xFF)
        self.buffers["+".join(group)] = block
        for name, size in zip(group, sizes, strict=True):
            self.buffers[name], block = block[:size], block[size:]

    def step(self, inputs: StepInputs) -> np.ndarray:
        """Send the inputs that changed, launch, read status and tokens in one copy."""
        inputs.check(self.plan, self.max_context)
        if self.unfinished:
            # A hang, Ctrl-C or an error left the counters half way, and perhaps a report; the
            # counters must agree with `steps` again.
            for name in ("counters", "status"):
                self.write(name, np.zeros(self.table[name].shape, np.int32))
            self.steps = 0
        self._put_inputs(inputs)
        self._params["rows"], self._params["step"] = inputs.rows, self.steps
        self._params["timeout_ns"] = int(self.timeout_s * 1e9)
        self.unfinished = True
        self.launch(self._params)
        self.steps += 1
        results = self.get(self.buffers["+".join(RESULTS)], Buffer("int32", (STATUS_WORDS + ROWS,)))
        self._check_status(results[:STATUS_WORDS])
        self.unfinished = False
        return results[STATUS_WORDS : STATUS_WORDS + inputs.rows]

    def _put_inputs(self, inputs: StepInputs) -> None:
        n = inputs.rows
        fed = np.zeros((2, ROWS), np.int32)
        fed[0, :n], fed[1, :n] = inputs.tokens, inputs.positions
        self.put(self.buffers["+".join(FED)], fed)
        temperatures = np.zeros(ROWS, np.float32)
        temperatures[: len(inputs.temperatures)] = inputs.temperatures
        seeds = np.zeros(ROWS, np.uint64)
        seeds[: len(inputs.seeds)] = inputs.seeds
        table = np.full(self.table["page_table"].shape, -1, np.int32)
        width = min(table.shape[2], inputs.page_table.shape[2])
        table[:, :n, :width] = inputs.page_table[:, :, :width]
        self._send("temperatures", temperatures)
        self._send("seeds", seeds.view(np.uint32).reshape(ROWS, 2))
        self._send("page_table", table)

    def _send(self, name: str, array: np.ndarray) -> None:
        """Write a buffer unless it holds this already: most steps change only tokens, positions."""
        known = self._sent.get(name)
        if known is None or not np.array_equal(known, array):
            self.write(name, array)
            self._sent[name] = array

    def _check_status(self, status: np.ndarray) -> None:
        code, sm, task, what, have, want = (int(v) for v in status[:6])
        if code == 0:
            return
        if code == NOT_FINITE:
            raise MachineError(
                f"logits: row {what} is not finite; "
                "the weights or the KV cache hold NaN or infinity"
            )
        record = self.plan.tasks[sm][task - int(self.plan.offsets()[sm])]
        name = self.plan.counters[what].name if code == 1 else str(what)
        raise HangError(
            code=code,
            sm=sm,
            task=task,
            counter=what,
            have=have,
            want=want,
            detail=f"{Op(record.op).name} of layer {record.layer} waits for {WAITS[code]} {name}",
        )

    def read(self, name: str) -> np.ndarray:
        """Copy one buffer out."""
        return self.get(self.buffers[name], self.table[name])

    def write(self, name: str, array: np.ndarray) -> None:
        """Copy an array into one buffer."""
        dtype = np.dtype(self.table[name].dtype)
        self._sent.pop(name, None)
        self.put(self.buffers[name], np.ascontiguousarray(array, dtype))

    def stamps(self) -> np.ndarray | None:
        """The `trace` buffer, if the kernel was built with time stamps."""
        return self.read("trace") if self.trace else None

    def close(self) -> None:
        """Drop all buffers."""
        self.buffers.clear()
