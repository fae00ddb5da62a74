"""Threads, barriers, warp collectives and the Python call of the CPU emulator."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from mkref.errors import MachineError
from mkref.machine.hostcc import HostModule, build

SOURCE = (Path(__file__).parent / "host_kernels" / "barriers.cu").read_text()
SCHEDULES = [(1, 0), (2, 0), (1, 1), (1, 2), (2, 3)]
"""(workers, seed)"""


@pytest.fixture(scope="module", params=["native", "ucontext"])
def module(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> HostModule:
    """The kernels with the assembly switch of this CPU, and with the portable one."""
    defines = {"HOST_UCONTEXT": 1} if request.param == "ucontext" else None
    return build(SOURCE, name="barriers", defines=defines, cache_dir=tmp_path_factory.mktemp("c"))


@pytest.mark.parametrize(("workers", "seed"), SCHEDULES)
@pytest.mark.parametrize("threads", [1, 32, 80, 288])
def test_syncthreads(module: HostModule, threads: int, workers: int, seed: int) -> None:
    """A value travels round the block, one thread per barrier."""
    blocks, rounds = 3, 7
    out = np.full((blocks, threads), -1, np.int32)
    module.get_function("ring")(
        (blocks,), (threads,), (out, np.int32(rounds)), 4 * threads, workers=workers, seed=seed
    )
    expected = (np.arange(threads) + rounds) % threads + rounds
    assert np.array_equal(np.tile(expected, (blocks, 1)), out)


@pytest.mark.parametrize(("workers", "seed"), SCHEDULES)
def test_named_barriers(module: HostModule, workers: int, seed: int) -> None:
    """Two named barriers work side by side, each for half of the block."""
    out = np.full(128, -1, np.int32)
    module.get_function("pairs")((1,), (128,), (out,), 512, workers=workers, seed=seed)
    t = np.arange(128)
    assert np.array_equal((t ^ 32) + np.where(t < 64, 9, 14), out)


def test_indices(module: HostModule) -> None:
    """threadIdx, blockIdx, blockDim and gridDim in three dimensions."""
    out = np.full((24, 40), -1, np.int32)
    module.get_function("indices")((2, 3, 4), (5, 4, 2), (out,))
    assert np.array_equal(np.arange(24)[:, None] * 1000 + np.arange(40), out)


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_collectives(module: HostModule, seed: int) -> None:
    """Butterfly sum, arbitrary source lane, 8-byte values and ballot."""
    n = 64
    total, votes = np.full(n, np.nan, np.float32), np.zeros(n, np.uint32)
    source, pair = np.zeros(n, np.uint64), np.full(n, np.nan)
    module.get_function("shuffles")((1,), (n,), (total, source, votes, pair), seed=seed)
    t = np.arange(n)
    warp, lane = t & ~31, t & 31
    squares = (t * t).astype(np.float32).reshape(2, 32).sum(axis=1)
    assert np.array_equal(np.repeat(squares, 32), total)
    assert np.array_equal(((warp + lane * 7 % 32).astype(np.uint64) << 33) | 1, source)
    assert np.array_equal((t ^ 1).astype(np.float64), pair)
    words = [sum(1 << i for i in range(32) if (32 * w + i) % 3 == 0) for w in (0, 1)]
    assert np.array_equal(np.repeat(words, 32).astype(np.uint32), votes)


def test_exited_threads_are_not_waited_for(module: HostModule) -> None:
    """A whole warp that returned early does not hold up __syncthreads."""
    out = np.zeros(96, np.int32)
    module.get_function("early_exit")((2,), (96,), (out,))
    assert np.array_equal(np.repeat([0, 1], [32, 64]), out)


def test_arguments(module: HostModule) -> None:
    """Arrays by pointer, scalars and structures by value."""
    n = 100
    x, y = np.arange(n, dtype=np.float32), np.full(n, np.nan, np.float32)
    fields = np.dtype([("n", np.int32), ("scale", np.float32), ("y", np.uint64)], align=True)
    mixed = np.array((n, 2.0, y.ctypes.data), fields)[()]
    module.get_function("mixed")((2,), (64,), (mixed, x, np.float64(0.5)))
    assert np.array_equal(2 * x + np.float32(0.5), y)


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ((), "takes 1 arguments, 0 were given"),
        ((np.int32(1),), "argument 0 of indices has 4 bytes, the kernel takes 8"),
        (([1, 2],), "argument 0 of indices is a list"),
        ((np.zeros(1), 3), "takes 1 arguments, 2 were given"),
    ],
)
def test_wrong_arguments(module: HostModule, args: tuple[object, ...], message: str) -> None:
    """The message names the kernel, the argument and what it should be."""
    with pytest.raises(MachineError, match=message):
        module.get_function("indices")((1,), (1,), args)


def test_wrong_shapes(module: HostModule) -> None:
    """Grids and blocks that no GPU takes either."""
    kernel, out = module.get_function("indices"), np.zeros(1, np.int32)
    with pytest.raises(MachineError, match="block=\\(0,\\)"):
        kernel((1,), (0,), (out,))
    with pytest.raises(MachineError, match="1..1024 threads, not 1 of 1025"):
        kernel((1,), (1025,), (out,))
    with pytest.raises(MachineError, match="no kernel 'nothing' in .*; it has: ring, pairs"):
        module.get_function("nothing")


def test_stack_size(module: HostModule) -> None:
    """A thread may use more stack when it is asked for."""
    out = np.zeros(32, np.int32)
    kernel = module.get_function("recurse")
    kernel((1,), (32,), (out, np.int32(60)))  # about 40 KiB
    shallow = out.copy()
    kernel((1,), (32,), (out, np.int32(60)), stack_bytes=1 << 20)
    assert np.array_equal(shallow, out)
    kernel((1,), (32,), (out, np.int32(1000)), stack_bytes=1 << 20)  # about 600 KiB


def test_seeds_shuffle_and_repeat(module: HostModule) -> None:
    """One worker: the schedule is a function of the seed, and seeds differ."""
    kernel = module.get_function("tickets")

    def order(seed: int) -> bytes:
        drawn, out = np.zeros(1, np.int32), np.full(64 * 6, -1, np.int32)
        kernel((1,), (64,), (drawn, out, np.int32(6)), workers=1, seed=seed)
        assert np.array_equal(np.repeat(np.arange(64), 6), np.sort(out))
        return out.tobytes()

    orders = [order(seed) for seed in range(6)]
    assert orders == [order(seed) for seed in range(6)]
    assert 6 == len(set(orders))
