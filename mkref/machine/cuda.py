"""The GPU machine: NVRTC through CuPy, one launch for several decode steps.

Tokens and progress lie in pinned memory that both sides see, so the host reads a step's tokens
while the kernel is at the next. A launch costs the host one copy of the inputs, one launch, and one
copy of the status that is queued behind the kernel; it waits for none of them in between.

CuPy is imported when a `CudaMachine` is made, never before. Needs no CUDA toolkit. It does not
decide what runs.
"""

from __future__ import annotations

import hashlib
from pathlib import Path
from time import sleep
from types import ModuleType
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from mkref.errors import MachineError
from mkref.machine.base import KernelMachine
from mkref.machine.cache import cached
from mkref.machine.nvrtc import OPTIONS, architecture, compile_cubin
from mkref.machine.sampler import SHARED_BYTES, Sampler, sampler_source
from mkref.machine.source import (
    THREADS,
    Ring,
    ring_for,
    shared_bytes,
)
from mkref.plan.buffers import STATUS_WORDS

if TYPE_CHECKING:
    from mkref.plan.buffers import Buffer
    from mkref.plan.build import Plan
    from mkref.weights.packed import PackedWeights

DRAW_THREADS = 512
DRAW_BLOCKS = (16, 128)
"""Threads of a block of the sampler; fewest and most blocks of a row."""
POLL_S = 20e-6
"""Pause between two looks at the progress; the system makes about 80 us of it."""

__all__ = ["Build", "CudaMachine", "device_sms", "import_cupy", "why_no_gpu"]


def import_cupy() -> ModuleType:
    """CuPy with a usable GPU.

    Raises:
        MachineError: CuPy is missing, there is no driver, or no GPU.
    """
    reason = why_no_gpu()
    if reason:
        raise MachineError(reason)
    import cupy

    return cupy


def why_no_gpu() -> str | None:
    """None if a GPU that can run the kernel is there, else one line that says what is missing."""
    try:
        import cupy
    except ImportError:
        return "cuda: CuPy is not installed; `make lab` installs it where there is a GPU"
    try:
        n_devices = cupy.cuda.runtime.getDeviceCount()
    except cupy.cuda.runtime.CUDARuntimeError as error:
        return f"cuda: no usable NVIDIA driver on this machine ({error})"
    if n_devices == 0:
        return "cuda: the NVIDIA driver is there, but no GPU"
    major, minor = _capability(cupy)
    if major < 8:
        return (
            f"cuda: this GPU has compute capability {major}.{minor}; the kernel needs 8.0 or newer"
        )
    return None


def _capability(cupy: ModuleType) -> tuple[int, int]:
    text = cupy.cuda.Device().compute_capability
    return int(text[:-1]), int(text[-1])


def device_sms() -> int:
    """Number of SMs of the current GPU."""
    return int(import_cupy().cuda.Device().attributes["MultiProcessorCount"])


class Build(NamedTuple):
    """Machine code for some number of rows, and the shared memory of its blocks."""

    kernel: Any
    block_bytes: int
    ring: Ring


class CudaMachine(KernelMachine):
    """Runs `cuda/megakernel.cu` on the current GPU.

    Args:
        trace: build the kernel with time stamps.
        ring: shape of the shared-memory ring; default: as large as the GPU allows, and as is good.
        checked: the build for a race checker, see `kernel_source`.

    Raises:
        MachineError: no CuPy, no driver, no GPU, or a GPU older than Ampere.
    """

    name = "cuda"
    steps_ahead = 2

    def __init__(
        self,
        *,
        trace: bool = False,
        ring: Ring | None = None,
        checked: bool = False,
    ) -> None:
        super().__init__(trace=trace)
        self.cupy = import_cupy()
        self.device: int = self.cupy.cuda.Device().id
        self.ring, self.checked = ring, checked
        self.ring_in_use: Ring | None = None  # of the last launch
        self.draw_blocks = 0  # of a row; 0: as many as are good
        self._draw_kernels: dict[str, Any] = {}
        self._stream: Any = None
        self._n_steps = 0
        self._status = np.zeros(0, np.uint8)  # pinned

    def build(self, plan: Plan) -> None:
        """Check that the plan fits; machine code is made when a step first needs it."""
        attributes = self.cupy.cuda.Device().attributes
        n_sm = attributes["MultiProcessorCount"]
        if plan.n_sm > n_sm:
            raise MachineError(
                f"n_sm: the plan has {plan.n_sm} SMs, this GPU has {n_sm}; "
                "all blocks of the kernel must be resident at once"
            )
        if self.ring is None:  # the build for most rows is the one that needs most
            ring_for(plan.config, attributes["MaxSharedMemoryPerBlockOptin"], plan.rows)
        super().build(plan)
        self._status = self.allocate_shared(STATUS_WORDS * 4)
        self._status.fill(0)

    def compile(self, most_rows: int) -> Build:
        """A build for this GPU: compiled, or out of the cache."""
        plan = self.plan
        with self.cupy.cuda.Device(self.device) as device:  # a new thread's would be the first GPU
            room = device.attributes["MaxSharedMemoryPerBlockOptin"]
            ring = self.ring or ring_for(plan.config, room, most_rows)
            source = self._source(
                plan.config, ring, plan.rows, most_rows, trace=self.trace, checked=self.checked
            )
            kernel = self._module("megakernel", source).get_function("megakernel")
            block_bytes = shared_bytes(plan.config, ring, most_rows)
            kernel.max_dynamic_shared_size_bytes = block_bytes
        return Build(kernel, block_bytes, ring)

    def _module(self, name: str, source: str) -> Any:
        """Machine code of a source, compiled for this GPU or out of the cache."""
        arch = architecture(*_capability(self.cupy))
        version = self.cupy.cuda.nvrtc.getVersion()
        key = hashlib.sha256(f"{source}{arch}{OPTIONS}{version}".encode()).hexdigest()

        def compile_into(file: Path) -> None:
            file.write_bytes(compile_cubin(source, arch)[0])

        path = cached(f"{name}-{arch}-{key[:20]}.cubin", compile_into)
        return self.cupy.RawModule(path=str(path))

    def begin(self, params: np.ndarray) -> None:
        """Queue the kernel and, behind it, the copy of its status."""
        self._stream = self.cupy.cuda.get_current_stream()
        self._n_steps = int(params["n_steps"][0])
        build = self.build_for(int(params["rows"][0]))
        self.ring_in_use = build.ring
        build.kernel((self.plan.n_sm,), (THREADS,), (params,), shared_mem=build.block_bytes)
        if self.draws:
            return  # the sampler tells, so that no copy stands between two steps
        self._copy(self._status.ctypes.data, self.address(self.buffers["status"]), STATUS_WORDS * 4)

    def build_sampler(self) -> None:
        """Compile the sampler, or load what was compiled before."""
        if self._draw_kernels:
            return
        names = ("draw_adjust", "draw_weigh", "draw_tops", "draw_choose")
        with self.cupy.cuda.Device(self.device):
            module = self._module("sampler", sampler_source())
            kernels = {name: module.get_function(name) for name in names}
            for kernel in kernels.values():
                kernel.max_dynamic_shared_size_bytes = SHARED_BYTES
        self._draw_kernels = kernels

    def begin_draw(self, sampler: Sampler, step: int) -> None:
        """Queue the sampler's kernels behind the kernel; each row gets its share of the SMs."""
        self.build_sampler()
        record = sampler.record(step)
        rows = sampler.draw.rows
        fewest, most = DRAW_BLOCKS
        blocks = self.draw_blocks or min(most, max(fewest, 2 * self.plan.n_sm // rows))
        for name in sampler.kernels():
            kernel = self._draw_kernels[name]
            kernel((blocks, rows), (DRAW_THREADS,), (record,), shared_mem=SHARED_BYTES)
        self._n_steps = step + 1

    def wait(self, seen: int) -> bool:
        """Look at the progress now and then; the end of the last step is waited for."""
        progress = self.shared["progress"]
        try:
            if seen >= self._n_steps - 1:
                self._stream.synchronize()
                return True
            while progress[0] <= seen:
                if self._stream.done:  # a kernel that died makes no more progress
                    return True
                sleep(POLL_S)
        except self.cupy.cuda.runtime.CUDARuntimeError as error:
            raise MachineError(f"cuda: the launch failed ({error})") from error
        return False

    def send(self, staging: np.ndarray, n_bytes: int, name: str = "inputs") -> None:
        """One copy that the host does not wait for; the kernel is queued behind it."""
        self._copy(self.address(self.buffers[name]), staging.ctypes.data, n_bytes)

    def _copy(self, to: int, source: int, n_bytes: int) -> None:
        """Queue a copy between pinned and device memory, in either direction."""
        runtime = self.cupy.cuda.runtime
        stream = self.cupy.cuda.get_current_stream().ptr
        runtime.memcpyAsync(to, source, n_bytes, runtime.memcpyDefault, stream)

    def status(self) -> np.ndarray:
        """What the copy behind the kernel brought, or the sampler."""
        return self.sampler.host["status_out"] if self.draws else self._status.view(np.int32)

    def allocate_shared(self, n_bytes: int) -> np.ndarray:
        """Pinned memory; host and device use the same address for it."""
        memory = self.cupy.cuda.alloc_pinned_memory(n_bytes)
        array = np.frombuffer(memory, np.uint8, n_bytes)
        array.fill(0xFF)
        return array

    def allocate(self, buffer: Buffer, fill: int) -> Any:
        """Device memory."""
        try:
            memory = self.cupy.empty(max(buffer.n_bytes, 16), self.cupy.uint8)
        except self.cupy.cuda.memory.OutOfMemoryError as error:
            raise MachineError(
                f"GPU memory: {buffer.n_bytes / 1e9:.2f} GB more do not fit ({error})"
            ) from error
        memory.fill(fill)
        return memory

    def put(self, memory: Any, array: np.ndarray) -> None:
        """Copy to the device."""
        memory[: array.nbytes].set(array.reshape(-1).view(np.uint8))

    def get(self, memory: Any, buffer: Buffer) -> np.ndarray:
        """Copy from the device."""
        flat = memory[: buffer.n_bytes].get()
        return flat.view(np.dtype(buffer.dtype)).reshape(buffer.shape)

    def address(self, memory: Any) -> int:
        """Device pointer."""
        if isinstance(memory, np.ndarray):
            return int(memory.ctypes.data)
        return int(memory.data.ptr)

    def weights_memory(self, weights: PackedWeights) -> tuple[Any, Any]:
        """The weights in place if they lie on the GPU, else a copy there."""
        if weights.tiles.is_cuda:
            import torch

            views = (weights.tiles.view(torch.uint8), weights.gammas.view(torch.uint8))
            return tuple(self.cupy.from_dlpack(v.reshape(-1)) for v in views)
        tiles, gammas = weights.words()
        return tuple(self.cupy.asarray(a.reshape(-1).view(np.uint8)) for a in (tiles, gammas))

    def close(self) -> None:
        """Give device memory back to the driver."""
        super().close()
        self._builds = {}
        self._draw_kernels = {}
        self.cupy.get_default_memory_pool().free_all_blocks()
