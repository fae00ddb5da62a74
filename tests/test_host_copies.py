"""Bulk copies that land late and out of order, mbarrier phases, and counters between blocks."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from mkref.errors import MachineError
from mkref.machine.hostcc import HostModule, build

SOURCE = (Path(__file__).parent / "host_kernels" / "copies.cu").read_text()
STAGES, STAGE_INTS = 4, 64
RING_BYTES = STAGES * STAGE_INTS * 4 + 2 * STAGES * 8
N_COPIES = 21
SEEDS = range(20)


@pytest.fixture(scope="module")
def module(tmp_path_factory: pytest.TempPathFactory) -> HostModule:
    """The kernels."""
    return build(SOURCE, name="copies", cache_dir=tmp_path_factory.mktemp("cache"))


def source_ints(n: int) -> np.ndarray:
    """int32 [n] at a 16-byte boundary."""
    memory = np.arange(n + 4, dtype=np.int32)
    skew = -memory.ctypes.data % 16 // 4
    memory[skew : skew + n] = np.random.default_rng(n).integers(-1000, 1000, n)
    return memory[skew : skew + n]


def expected_sums(source: np.ndarray) -> np.ndarray:
    """What `stream` computes per lane: int64 arithmetic that wraps."""
    sums = np.zeros(32, np.int64)
    with np.errstate(over="ignore"):
        for stage in source.reshape(-1, 2, 32):
            for part in stage:
                sums = sums * 3 + part
    return sums


def stream(
    module: HostModule, seed: int, workers: int = 1, *, forget: int = 0, timeout_s: float = 20.0
) -> np.ndarray:
    """int64 [blocks, consumer warps, lanes]."""
    blocks = 2
    out = np.full((blocks, 2, 32), 7, np.int64)
    source = source_ints(N_COPIES * STAGE_INTS)
    args = (out, source, np.int32(N_COPIES), np.int32(forget))
    module.get_function("stream")(
        (blocks,), (96,), args, RING_BYTES, workers=workers, seed=seed, timeout_s=timeout_s
    )
    return out


def correct(out: np.ndarray) -> bool:
    """Whether both warps of both blocks have the right sums."""
    return bool((out == expected_sums(source_ints(N_COPIES * STAGE_INTS))).all())


@pytest.mark.parametrize("workers", [1, 2])
def test_ring(module: HostModule, workers: int) -> None:
    """A ring that waits for full and empty stages is right under every schedule."""
    assert [] == [s for s in SEEDS if not correct(stream(module, s, workers))]


@pytest.mark.parametrize("forget", [1, 2], ids=["full", "empty"])
def test_ring_without_a_wait(module: HostModule, forget: int) -> None:
    """Leave out either wait, and every schedule gives wrong sums, a misuse or a hang."""
    passed = []
    for seed in range(8):
        try:
            if correct(stream(module, seed, forget=forget, timeout_s=0.2)):
                passed.append(seed)
        except MachineError:  # a HangError is one, too
            continue
    assert [] == passed


def test_copies_land_in_any_order(module: HostModule) -> None:
    """Over the seeds, copies started in order 0, 1, 2, 3 land in other orders, too."""
    orders = set()
    for seed in range(30):
        out = np.full(STAGES, -1, np.int32)
        module.get_function("landing_order")(
            (1,), (32,), (out, source_ints(STAGE_INTS)), RING_BYTES, workers=1, seed=seed
        )
        assert [0, 1, 2, 3] == sorted(out.tolist())
        orders.add(tuple(out.tolist()))
    assert len(orders) >= 6


def test_bytes_are_not_there_at_once(module: HostModule) -> None:
    """Who reads without waiting sees poison."""
    seen = []
    for seed in SEEDS:
        out = np.full(32, -1, np.int32)
        module.get_function("impatient")(
            (1,), (32,), (out, source_ints(STAGE_INTS)), RING_BYTES, workers=1, seed=seed
        )
        seen.append(out.any())
    assert all(seen)


def test_phases(module: HostModule) -> None:
    """Parity and counts as the PTX manual describes mbarrier.try_wait.parity."""
    out = np.full(7, -1, np.int32)
    module.get_function("phases")((1,), (1,), (out,), 64)
    assert [1, 0, 0, 1, 0, 1, 0] == out.tolist()


@pytest.mark.parametrize("workers", [1, 2, 3])
@pytest.mark.parametrize("seed", [0, 1])
def test_relay_between_blocks(module: HostModule, workers: int, seed: int) -> None:
    """More blocks than workers, each waiting for the one before it."""
    blocks, rounds = 9, 12
    counter, order = np.zeros(1, np.int32), np.full(blocks * rounds, -1, np.int32)
    module.get_function("relay")(
        (blocks,), (64,), (counter, order, np.int32(rounds)), workers=workers, seed=seed
    )
    assert np.array_equal(np.arange(blocks * rounds), order)
