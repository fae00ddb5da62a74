"""The common half of the machines that run `cuda/megakernel.cu`.

`KernelMachine` keeps the buffers, fills in a launch's inputs and turns the kernel's status words
into errors. It knows neither CuPy nor a compiler; `mkref.machine.cuda` and `mkref.machine.host` add
those.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import numpy as np

from mkref.errors import HangError, MachineError
from mkref.machine.draw import check_draw, effective_bans
from mkref.machine.draw_launch import DrawLaunch
from mkref.machine.inputs import StepInputs, check_launch, check_stops
from mkref.machine.interface import Machine
from mkref.machine.launch import KernelLaunch, Launch
from mkref.machine.sampler import Sampler
from mkref.machine.source import build_rows, kernel_source
from mkref.plan.buffers import BUFFERS, SCALARS, Buffer, buffer_table
from mkref.plan.task import Op
from mkref.reference.scalars import rotary_table

if TYPE_CHECKING:
    from numpy.typing import ArrayLike

    from mkref.machine.draw import Draw, LogProbs
    from mkref.plan.build import Plan
    from mkref.weights.packed import PackedWeights

__all__ = ["PARAMS_DTYPE", "KernelMachine", "Launch", "Machine", "StepInputs", "rope_table"]

PARAMS_DTYPE = np.dtype([(name, np.int64) for name in (*BUFFERS, *SCALARS)])
"""`struct Params` of the kernel: every member, pointer or integer, has eight bytes."""

FED = ("tokens", "positions", "earlier", "temperatures", "seeds", "stop_ids", "page_table")
"""Inputs of a launch lie in one block, those that change most often first: one copy sends them."""
ALWAYS_SENT = 3
BLANK = {**dict.fromkeys(FED, 0), "stop_ids": -1, "page_table": -1}
"""Values of rows that are not active, and of what a launch does not give."""
SHARED = ("tokens_out", "progress")
"""Buffers that host and kernel see at the same time."""
CLEAN = ("counters", "trace", "stage_trace", "status", "control", "active_experts")
ANNOUNCED = ("x", "router_logits")
"""Words that tell by themselves whether they have been written in this step."""
NOT_FINITE = 5
WAITS = {
    1: "counter",
    2: "bytes of ring stage",
    3: "free ring stage",
    4: "experts of layer",
    6: "task record in slot",
    7: "x of layer",
}


def rope_table(plan: Plan, max_context: int) -> np.ndarray:
    """cos and sin for all positions: float32 [max_context, D/2, 2]."""
    cos, sin = rotary_table(np.arange(max_context), plan.config.head_dim, plan.config.rope_theta)
    return np.stack([cos, sin], axis=-1)


def _equal(a: np.ndarray, b: np.ndarray) -> bool:
    """The same type and values; of small arrays, much faster than NumPy's comparison."""
    return a.dtype == b.dtype and a.tobytes() == b.tobytes()


class KernelMachine(Machine):
    """Buffers and status of a machine that runs the CUDA kernel.

    A subclass provides `allocate`, `put`, `get`, `address` for its kind of memory, and `compile`,
    `build_sampler`, `begin`, `begin_draw` and `wait` to run the kernels. One that has
    a GPU also overrides `allocate_shared`, `send` and `status`, so that a launch costs the host one
    copy there and one back.
    """

    timeout_s: float = 2.0
    steps_ahead: int = 1
    """Steps of a launch that draws that are queued beyond those whose tokens have been taken."""

    def __init__(self, *, trace: bool = False) -> None:
        self.trace = trace
        self.buffers: dict[str, Any] = {}
        self.table: dict[str, Buffer] = {}
        self.shared: dict[str, np.ndarray] = {}  # int32 views of SHARED
        self.steps = 0  # that the counters have seen
        self.unfinished = False  # the last launch did not end as it should
        self.under_way: KernelLaunch | None = None
        self.draws = False  # does the sampler draw the tokens of the last launch?
        self._sampler: Sampler | None = None  # its memory is taken at the first draw
        self._builds: dict[int, Any] = {}  # by `build_rows`
        self._source: Callable[..., str] = kernel_source
        self._params = np.zeros(1, PARAMS_DTYPE)
        self._staging = np.zeros(0, np.uint8)  # the inputs' block as the kernel has it
        self._staged: dict[str, np.ndarray] = {}  # views of its members
        self._ends: list[int] = []  # of each member of FED, bytes
        self._blank: set[str] = set()  # members that hold what `BLANK` says
        self._staged_rows = -1

    def build(self, plan: Plan) -> None:
        """Forget other plans' builds. Nothing is compiled before a step needs it."""
        self._builds, self._source = {}, kernel_source

    def build_for(self, rows: int) -> Any:
        """The kernel for steps of so many rows; compiled when it is first asked for."""
        most_rows = build_rows(rows)
        if most_rows not in self._builds:
            self._builds[most_rows] = self.compile(most_rows)
        return self._builds[most_rows]

    @abstractmethod
    def compile(self, most_rows: int) -> Any:
        """The build for up to `most_rows` rows of this plan, or what was compiled before. Any
        thread may call it.
        """

    @abstractmethod
    def build_sampler(self) -> None:
        """Compile the sampler, or load what was compiled before."""

    def get_ready(self) -> None:
        """See `Machine.get_ready`; compilers run side by side."""
        sizes = sorted({build_rows(rows + 1) for rows in range(self.plan.rows)})
        with ThreadPoolExecutor() as pool:
            builds = [pool.submit(self.build_for, size) for size in sizes]
            for build in (pool.submit(self.build_sampler), *builds):
                build.result()

    @abstractmethod
    def begin(self, params: np.ndarray) -> None:
        """Start the kernel on one `PARAMS_DTYPE` record; it may also run it to the end."""

    @abstractmethod
    def begin_draw(self, sampler: Sampler, step: int) -> None:
        """Start the kernels of `cuda/sampler/` for this step behind what `begin` started."""

    @abstractmethod
    def wait(self, seen: int) -> bool:
        """Wait until more than `seen` steps are finished, or the kernel has ended: then True."""

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
        """Address of `memory` for the kernel; also of what `allocate_shared` gives."""

    @abstractmethod
    def weights_memory(self, weights: PackedWeights) -> tuple[Any, Any]:
        """Tiles and gammas as this machine's memory, in place if possible."""

    def allocate_shared(self, n_bytes: int) -> np.ndarray:
        """Bytes that NumPy and the kernel see at the same address, all 0xFF."""
        return np.full(n_bytes, 0xFF, np.uint8)

    def send(self, staging: np.ndarray, n_bytes: int, name: str = "inputs") -> None:
        """Copy the first bytes of a staged block to the block that the kernel reads."""
        self.put(self.buffers[name], staging[:n_bytes])

    def status(self) -> np.ndarray:
        """The status words after a launch."""
        return self.get(self.buffers["status"], self.table["status"])

    def load(self, plan: Plan, weights: PackedWeights, max_context: int) -> None:
        """Build, allocate, poison, and write what never changes."""
        self.settle()
        self.plan, self.max_context, self.steps, self.unfinished = plan, max_context, 0, False
        self._sampler = None
        self.build(plan)
        self.table = buffer_table(plan, max_context)
        self.buffers = dict(zip(("weights", "gammas"), self.weights_memory(weights), strict=True))
        if not self.trace:
            self.table["trace"] = Buffer("uint64", (1, 4))
            self.table["stage_trace"] = Buffer("uint64", (1, 1, 4))
        self._allocate_inputs()
        for name in SHARED:
            memory = self.allocate_shared(self.table[name].n_bytes)
            self.buffers[name] = memory
            self.shared[name] = memory.view(np.int32).reshape(self.table[name].shape)
        for name, buffer in self.table.items():
            if name not in self.buffers:
                # Poison: bytes 0xFF are NaN for every float type, so what nobody wrote shows.
                self.buffers[name] = self.allocate(buffer, 0 if name in CLEAN else 0xFF)
        self.write("rope", rope_table(plan, max_context))
        self.write("tasks", plan.words())
        self.write("task_offsets", plan.offsets())
        self._params = np.zeros(1, PARAMS_DTYPE)
        for name, memory in self.buffers.items():
            if name in BUFFERS:
                self._params[name] = self.address(memory)
        self._params["max_pages"] = self.table["page_table"].shape[2]
        self._params["max_splits"] = self.table["part_o"].shape[2]

    def _allocate_inputs(self) -> None:
        """The inputs' block, and its image on the host."""
        self._ends = np.cumsum([self.table[name].n_bytes for name in FED]).tolist()
        begins = [0, *self._ends]
        block = self.allocate(Buffer("int32", (self._ends[-1] // 4,)), 0xFF)
        self._staging = self.allocate_shared(self._ends[-1])
        self.buffers["inputs"] = block
        for name, begin, end in zip(FED, begins, self._ends, strict=False):
            buffer = self.table[name]
            self.buffers[name] = block[begin:end]
            self._staged[name] = self._staging[begin:end].view(buffer.dtype).reshape(buffer.shape)
        self._staged["seeds"] = self._staged["seeds"].view(np.uint64)[:, 0]  # low word first
        self._staged_rows = -1

    def start(
        self,
        inputs: StepInputs,
        n_steps: int = 1,
        *,
        stop_ids: np.ndarray | None = None,
        stop_after: int = 0,
        draw: Draw | None = None,
    ) -> KernelLaunch:
        """Send the inputs that changed in one copy, and start the kernel."""
        if not self.buffers:
            raise MachineError(f"machine {self.name!r}: it is closed; load the model again")
        check_launch(inputs, self.plan, self.max_context, n_steps)
        check_stops(stop_ids, stop_after, inputs.rows)
        if draw is not None:
            known = None if self._sampler is None else self._sampler.known
            check_draw(draw, inputs, n_steps, self.plan.config.vocab_size, known)
        self.settle()
        self.build_for(inputs.rows)  # may fail, while nothing is under way
        if self.unfinished:
            # A hang, Ctrl-C or an error left the counters half way, and perhaps a report; the
            # counters must agree with `steps` again.
            for name in ("counters", "status", "control"):
                self.write(name, np.zeros(self.table[name].shape, np.int32))
            for name in ANNOUNCED:
                self.put(self.buffers[name], np.full(self.table[name].n_bytes, 0xFF, np.uint8))
            self.steps = 0
        self._put_inputs(inputs, stop_ids)
        params = self._params
        params["rows"], params["step"] = inputs.rows, self.steps
        params["n_steps"], params["stop_after"] = n_steps, stop_after
        params["timeout_ns"] = int(self.timeout_s * 1e9)
        self.shared["progress"][:] = 0
        self.unfinished, self.draws = True, draw is not None
        if draw is None:
            self.under_way = KernelLaunch(self, inputs.rows, n_steps)
            self.begin(params)
            return self.under_way
        bans = effective_bans(draw, inputs, stop_ids, self.plan.config.vocab_size)
        self.sampler.send(draw, bans, stop_after)
        self.under_way = launch = DrawLaunch(self, inputs.rows, n_steps)
        launch.queue()
        return launch

    @property
    def sampler(self) -> Sampler:
        """The sampler, made when it is first asked for."""
        if self._sampler is None:
            self._sampler = Sampler(self)
        return self._sampler

    def queue_step(self, step: int) -> None:
        """Start the kernel for one step of a launch that draws, and the sampler behind it."""
        params = self._params.copy()
        params["step"], params["n_steps"], params["stop_after"] = self.steps + step, 1, 0
        self.sampler.redirect(params)
        self.begin(params)
        self.begin_draw(self.sampler, step)

    def told(self, step: int) -> LogProbs | None:
        """Log probabilities of a finished step of the launch under way, if asked for."""
        return self.sampler.told(step)

    def set_counts(self, row: int, prompt_ids: ArrayLike, output_ids: ArrayLike) -> None:
        """See `Machine.set_counts`."""
        self.settle()
        self.sampler.count(row, prompt_ids, output_ids)

    def settle(self) -> None:
        """End a launch that is under way; it keeps the tokens of its finished steps."""
        if self.under_way is not None:
            self.under_way.cancel()
            self.under_way.finish()

    def _put_inputs(self, inputs: StepInputs, stop_ids: np.ndarray | None) -> None:
        """Bring the image up to date, and send it as far as it changed."""
        n = inputs.rows
        last = ALWAYS_SENT
        if n != self._staged_rows:
            for name, staged in self._staged.items():
                staged[:] = BLANK[name]
            self._staged_rows, last = n, len(FED)
            self._blank = {*FED}
        for index, name in enumerate(FED):
            staged = self._staged[name]
            given = stop_ids if name == "stop_ids" else getattr(inputs, name)
            if name == "page_table":
                width = min(staged.shape[2], inputs.page_table.shape[2])
                staged, given = staged[:, :n, :width], inputs.page_table[:, :, :width]
            elif given is not None and len(given):
                staged = staged[:n]
            elif name in self._blank:
                continue
            else:
                staged[:] = BLANK[name]
                self._blank.add(name)
                last = max(last, index + 1)
                continue
            if index < ALWAYS_SENT or not _equal(staged, given):
                staged[:] = given
                self._blank.discard(name)
                last = max(last, index + 1)
        self.send(self._staging, self._ends[last - 1])

    def check_status(self) -> None:
        """Raise what the kernel reported, if it did."""
        status = self.status()
        code, sm, task, what, have, want = status[:6].tolist()
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
        self.settle()
        if name in self.shared:
            return self.shared[name].copy()
        return self.get(self.buffers[name], self.table[name])

    def write(self, name: str, array: np.ndarray) -> None:
        """Copy an array into one buffer."""
        self.settle()
        values = np.ascontiguousarray(array, np.dtype(self.table[name].dtype))
        if name in self.shared:
            self.shared[name][...] = values
            return
        if name in self._staged:
            staged = self._staged[name]
            self._blank.discard(name)
            staged[...] = values.view(staged.dtype).reshape(staged.shape)
        self.put(self.buffers[name], values)

    def stamps(self) -> np.ndarray | None:
        """The `trace` buffer, if the kernel was built with time stamps."""
        return self.read("trace") if self.trace else None

    def close(self) -> None:
        """Drop all buffers."""
        self.settle()
        self.buffers.clear()
        self.shared.clear()
        self._staged.clear()
        self._sampler = None
