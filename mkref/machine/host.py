"""The CPU machine: the same CUDA file, compiled by the system's C++ compiler through `cuda/host/`.

It emulates; it does not simulate time. See `mkref.machine.hostcc` for how the source is built.
"""

from __future__ import annotations

from threading import Event, Thread
from typing import TYPE_CHECKING, Any

import numpy as np

from mkref.errors import MkrefError
from mkref.machine.base import KernelMachine
from mkref.machine.hostcc import HostModule, build
from mkref.machine.sampler import SHARED_BYTES, Sampler, sampler_source
from mkref.machine.source import THREADS, Ring, build_rows, shared_bytes
from mkref.plan.buffers import Buffer

if TYPE_CHECKING:
    from mkref.weights.packed import PackedWeights

__all__ = ["HOST_RING", "HostMachine"]

POLL_S = 0.001

HOST_RING = Ring(stages=4, stage_tiles=32)
"""A small ring: a CPU has no memory latency to hide, but the protocol shall go round often."""


class HostMachine(KernelMachine):
    """Runs `cuda/megakernel.cu` on the CPU: a CUDA thread is a fiber, SMs share the worker threads.

    Args:
        trace: build the kernel with time stamps.
        ring: shape of the shared-memory ring.
        workers: OS threads; 0 means one per core.
        seed: of the scheduler; the same seed with one worker is the same schedule.

    Raises:
        MachineError: no C++ compiler.
    """

    name = "host"
    timeout_s = 60.0
    draw_shape = (2, 64)
    """Blocks of a row, and threads of a block, of the sampler's kernels."""

    def __init__(
        self, *, trace: bool = False, ring: Ring = HOST_RING, workers: int = 0, seed: int = 0
    ) -> None:
        super().__init__(trace=trace)
        self.ring, self.workers, self.seed = ring, workers, seed
        self._draw_module: HostModule | None = None
        self._over: Event | None = None
        self._failure: MkrefError | None = None

    def compile(self, most_rows: int) -> Any:
        """A build of the kernel: from the system's compiler, or out of the cache."""
        plan = self.plan
        source = self._source(plan.config, self.ring, plan.rows, most_rows, trace=self.trace)
        return build(source, name="megakernel").get_function("megakernel")

    def begin(self, params: np.ndarray) -> None:
        """Run a single step at once; several in a thread, so that their tokens can be read."""
        self._failure = None
        self._over = None
        if params["n_steps"][0] == 1:
            self._run(params, Event())
        else:
            self._over = Event()
            Thread(target=self._run, args=(params.copy(), self._over)).start()

    def _run(self, params: np.ndarray, over: Event) -> None:
        try:
            self.launch(params)
        except MkrefError as error:
            self._failure = error
        finally:
            over.set()

    def build_sampler(self) -> None:
        """Compile the sampler, or load what was compiled before."""
        if self._draw_module is None:
            self._draw_module = build(sampler_source(), name="sampler")

    def begin_draw(self, sampler: Sampler, step: int) -> None:
        """Run the sampler, unless the kernel before it has failed."""
        if self._failure is not None:
            return
        self.build_sampler()
        for name in sampler.kernels():
            self.launch_draw(name, sampler.draw.rows, sampler.record(step))

    def launch_draw(self, name: str, rows: int, record: np.ndarray) -> None:
        """Run one kernel of the sampler, to its end."""
        assert self._draw_module is not None, "begin_draw has built it"
        blocks, threads = self.draw_shape
        self._draw_module.get_function(name)(
            (blocks, rows),
            (threads,),
            (record[0],),
            shared_mem=SHARED_BYTES,
            workers=self.workers,
            seed=self.seed,
            timeout_s=self.timeout_s,
        )

    def launch(self, params: np.ndarray) -> None:
        """Run the grid on the worker threads, to its end."""
        rows = int(params["rows"][0])
        self.build_for(rows)(
            (self.plan.n_sm,),
            (THREADS,),
            (params[0],),
            shared_mem=shared_bytes(self.plan.config, self.ring, build_rows(rows)),
            workers=self.workers,
            seed=self.seed + self.steps if self.seed else 0,
            timeout_s=2 * self.timeout_s * int(params["n_steps"][0]),
        )

    def wait(self, seen: int) -> bool:
        """Look for news again and again: waking up costs less than a step.

        The kernel itself says that it is over: a thread whose `join` Ctrl-C has interrupted counts
        as stopped in CPython 3.11, also while it runs.
        """
        progress, over = self.shared["progress"], self._over
        if over is not None:
            while progress[0] <= seen and not over.wait(POLL_S):  # Ctrl-C comes through
                pass
            if not over.is_set():
                return False
            self._over = None
        failure, self._failure = self._failure, None
        if failure is not None:
            raise failure
        return True

    def allocate(self, buffer: Buffer, fill: int) -> np.ndarray:
        """Aligned host memory, as bulk copies want it."""
        # 16-byte alignment for bulk copies: over-allocate and cut.
        raw = np.full(buffer.n_bytes + 64, fill, np.uint8)
        offset = -raw.ctypes.data % 64
        return raw[offset : offset + buffer.n_bytes]

    def put(self, memory: np.ndarray, array: np.ndarray) -> None:
        """Copy in."""
        memory[: array.nbytes] = array.reshape(-1).view(np.uint8)

    def get(self, memory: np.ndarray, buffer: Buffer) -> np.ndarray:
        """Copy out."""
        return memory[: buffer.n_bytes].copy().view(np.dtype(buffer.dtype)).reshape(buffer.shape)

    def address(self, memory: np.ndarray) -> int:
        """Address of the first byte."""
        return int(memory.ctypes.data)

    def weights_memory(self, weights: PackedWeights) -> tuple[np.ndarray, np.ndarray]:
        """The weights in place if they are aligned, else a copy."""
        tiles, gammas = (words.reshape(-1).view(np.uint8) for words in weights.words())
        if tiles.ctypes.data % 16 == 0:  # what a bulk copy needs; torch aligns to 64
            return tiles, gammas
        memory = self.allocate(Buffer("uint16", weights.tiles.shape), 0)
        self.put(memory, tiles)
        return memory, gammas
