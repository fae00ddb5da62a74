"""What a GPU's memory can do: by its data sheet, and read by copies such as the loader's.

The test reads an array once, 16 KB at a time, into shared memory: one block per SM, one thread that
issues bulk copies, a ring of stages, no arithmetic. The kernel cannot stream faster than that.

What it does not do: measure before Hopper, which has no bulk copies.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import numpy as np

from mkref.errors import MachineError
from mkref.machine.nvrtc import compile_cubin
from mkref.measure.driver import Driver, Launch

if TYPE_CHECKING:
    from mkref.machine.cuda import CudaMachine

__all__ = ["READ_SOURCE", "datasheet_bandwidth", "measured_bandwidth"]

PIECE, STAGES = 16384, 12
TURNS = 9

READ_SOURCE = """\
// Block b copies the pieces b, b + gridDim.x, ... into a ring in its shared memory.
struct Params { const char* data; long long n_pieces; };

__device__ unsigned shared_address(const void* p) {
  return (unsigned)__cvta_generic_to_shared(p);
}
__device__ void wait(unsigned long long* bar, unsigned parity) {
  unsigned done = 0;
  while (!done)
    asm volatile(
        "{ .reg .pred p; mbarrier.try_wait.parity.shared.b64 p, [%1], %2; selp.u32 %0, 1, 0, p; }"
        : "=r"(done) : "r"(shared_address(bar)), "r"(parity) : "memory");
}
extern "C" __global__ void __launch_bounds__(32, 1) read(const __grid_constant__ Params p) {
  extern __shared__ __align__(1024) unsigned char ring[];
  __shared__ unsigned long long full[STAGES];
  if (threadIdx.x != 0) return;
  for (int i = 0; i < STAGES; i++)
    asm volatile("mbarrier.init.shared.b64 [%0], 1;" ::"r"(shared_address(&full[i])) : "memory");
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
  long long issued = 0, landed = 0;
  for (long long piece = blockIdx.x; piece < p.n_pieces; piece += gridDim.x, issued++) {
    if (issued - landed == STAGES) {
      wait(&full[landed % STAGES], (unsigned)(landed / STAGES & 1));
      landed++;
    }
    const unsigned bar = shared_address(&full[issued % STAGES]);
    asm volatile("mbarrier.arrive.expect_tx.shared.b64 _, [%0], %1;" ::"r"(bar), "r"(PIECE)
                 : "memory");
    asm volatile(
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];"
        ::"r"(shared_address(ring + issued % STAGES * PIECE)), "l"(p.data + piece * PIECE),
        "r"(PIECE), "r"(bar)
        : "memory");
  }
  for (; landed < issued; landed++)
    wait(&full[landed % STAGES], (unsigned)(landed / STAGES & 1));
}
""".replace("STAGES", str(STAGES)).replace("PIECE", str(PIECE))


def datasheet_bandwidth() -> float | None:
    """Bytes per second: memory clock times bus width, as the driver has them; None without one."""
    try:
        return Driver().datasheet_bandwidth()
    except MachineError:
        return None


def measured_bandwidth(machine: CudaMachine, n_bytes: int) -> float:
    """Bytes per second of reading the first `n_bytes` of the weights; median of some runs.

    Args:
        machine: has a plan loaded.
        n_bytes: much more than the GPU's L2 holds.

    Raises:
        MachineError: the GPU has no bulk copies.
    """
    driver = Driver()
    image, _ = compile_cubin(READ_SOURCE, "sm_90a")
    function = driver.load(image, "read", STAGES * PIECE)
    n_pieces = n_bytes // PIECE
    params = np.array([machine.address(machine.buffers["weights"]), n_pieces], np.int64)
    launch = Launch(
        driver, function, machine.plan.n_sm, 32, STAGES * PIECE, int(params.ctypes.data)
    )
    stream = machine.cupy.cuda.get_current_stream()
    seconds = []
    for _ in range(TURNS):
        stream.synchronize()
        begin = time.perf_counter()
        launch(stream.ptr)
        stream.synchronize()
        seconds.append(time.perf_counter() - begin)
    return n_pieces * PIECE / float(np.median(seconds[1:]))
