"""Every launch of the CPU emulator ends, and says who waited where."""

from __future__ import annotations

import time
from pathlib import Path

import numpy as np
import pytest

from mkref.errors import HangError, MachineError
from mkref.machine.hostcc import DEADLOCK, TIMEOUT, HostModule, LaunchHangError, build

SOURCE = (Path(__file__).parent / "host_kernels" / "hangs.cu").read_text()


def line_of(text: str) -> int:
    """The line of the source that holds a text, counted from 1."""
    return next(i for i, line in enumerate(SOURCE.splitlines(), 1) if text in line)


@pytest.fixture(scope="module")
def module(tmp_path_factory: pytest.TempPathFactory) -> HostModule:
    """The wrong kernels."""
    return build(SOURCE, name="hangs", cache_dir=tmp_path_factory.mktemp("cache"))


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_deadlock(module: HostModule, seed: int) -> None:
    """Two warps at two barriers: found at once, without waiting for the time limit."""
    start = time.monotonic()
    with pytest.raises(LaunchHangError) as caught:
        module.get_function("deadlock")((2,), (64,), (np.zeros(1, np.int32),), seed=seed)
    assert DEADLOCK == caught.value.code
    text = caught.value.report
    assert "deadlock: every thread of block" in text
    assert (
        f"barrier 1 at hangs.cu:{line_of('bar_sync(1, 64)')} (32 of 64 threads are there)" in text
    )
    assert f"threads 32-63 wait in barrier 2 at hangs.cu:{line_of('bar_sync(2, 64)')}" in text
    assert time.monotonic() - start < 5


@pytest.mark.parametrize("seed", [0, 1, 2])
@pytest.mark.parametrize(
    ("kernel", "threads", "words"),
    [
        ("two_sites", 64, ["__syncthreads", "hangs.cu:13", "hangs.cu:15"]),
        ("half_warp_barrier", 64, ["__syncwarp"]),
        ("half_warp_exit", 64, ["exit", "lanes", "barrier 0"]),
        ("two_collectives", 64, ["__shfl_sync"]),
        ("wrong_count", 96, ["barrier 3 expects", "64 threads", "96 threads"]),
    ],
)
def test_divergence(
    module: HostModule, kernel: str, threads: int, words: list[str], seed: int
) -> None:
    """Threads that should meet and do not: reported under every schedule."""
    assert 13 == line_of("    __syncthreads();")
    with pytest.raises(MachineError, match="divergence") as caught:
        module.get_function(kernel)((1,), (threads,), (np.zeros(64, np.int32),), seed=seed)
    assert not isinstance(caught.value, HangError)
    assert [] == [w for w in words if w not in str(caught.value)]


@pytest.mark.parametrize("kernel", ["never_signalled", "never_paused"])
def test_time_limit(module: HostModule, kernel: str) -> None:
    """A poll that never succeeds ends with the launch's time, with every thread's place."""
    start = time.monotonic()
    with pytest.raises(
        LaunchHangError, match="timeout: the kernel still ran after 0.3 s"
    ) as caught:
        module.get_function(kernel)((2,), (64,), (np.zeros(1, np.int32),), timeout_s=0.3)
    assert TIMEOUT == caught.value.code
    assert "threads 0 poll at hangs.cu" in caught.value.report
    assert "last loaded 0" in caught.value.report
    assert "threads 1-63 wait in __syncthreads" in caught.value.report
    assert "block (1,0,0)" in caught.value.report
    assert 0.3 <= time.monotonic() - start < 5


def test_loop_without_scheduling_point(module: HostModule) -> None:
    """Even a plain endless loop is left, and named; the next launch works."""
    flag = np.zeros(1, np.int32)
    with pytest.raises(LaunchHangError, match="threads 5 run in a loop that meets no barrier"):
        module.get_function("blind_loop")((1,), (64,), (flag,), timeout_s=0.2)
    flag[0] = 1
    module.get_function("blind_loop")((1,), (64,), (flag,), timeout_s=10)


def test_mbarrier_wait(module: HostModule) -> None:
    """A wait for a copy that nobody started names the mbarrier and what is missing."""
    with pytest.raises(LaunchHangError) as caught:
        module.get_function("no_copy_comes")(
            (1,), (32,), (np.zeros(1, np.int32),), 64, timeout_s=0.3
        )
    assert "threads 0-31 wait for the mbarrier at shared memory offset 0" in caught.value.report
    assert "1 of 1 arrivals and 0 bytes are missing" in caught.value.report


@pytest.mark.parametrize(
    ("size", "to", "source", "message"),
    [
        (24, 0, 0, "size 24 is not a positive multiple of 16"),
        (0, 0, 0, "size 0 is not"),
        (32, 8, 0, "shared address .* is not aligned to 16"),
        (32, 0, 4, "global address .* is not aligned to 16"),
        (208, 0, 0, "208 bytes at .* are not inside the block's 256 bytes"),
    ],
)
def test_copy_rules(module: HostModule, size: int, to: int, source: int, message: str) -> None:
    """What cp.async.bulk demands is checked, and the error says which rule was broken."""
    memory = np.zeros(256, np.int64)
    skew = -memory.ctypes.data % 16 // 8
    args = (memory[skew:], np.int32(size), np.int32(to), np.int32(source))
    with pytest.raises(MachineError, match=f"copy_async \\(hangs.cu:\\d+\\): {message}"):
        module.get_function("misaligned")((1,), (32,), args, 256)


def test_mbarrier_misuse(module: HostModule) -> None:
    """An mbarrier that was never initialised, and one arrival too many."""
    with pytest.raises(MachineError, match="mbarrier at shared memory offset 0 was never init"):
        module.get_function("uninitialised")((1,), (32,), (np.zeros(1, np.int32),), 64)
    memory = np.zeros(8, np.int64)
    skew = -memory.ctypes.data % 16 // 8
    with pytest.raises(MachineError, match="more arrivals in one phase than the mbarrier's count"):
        module.get_function("too_many_arrivals")((1,), (32,), (memory[skew:],), 128)


@pytest.mark.parametrize(
    ("kernel", "args", "message"),
    [
        ("null_pointer", (), "thread 37 of block 0 accessed memory that is not there: 0x10"),
        (
            "deep_recursion",
            (100000,),
            r"thread 0 of block 0 needs more than its \d+ bytes of stack",
        ),
        ("large_frame", (5,), r"needs more than its \d+ bytes of stack \(set stack_bytes\)"),
    ],
)
def test_faults(module: HostModule, kernel: str, args: tuple[int, ...], message: str) -> None:
    """A wild pointer or an exhausted stack ends the launch, not the process; the next one works."""
    out = np.zeros(64, np.int32)
    values = [np.int32(a) for a in args]
    with pytest.raises(MachineError, match=message):
        module.get_function(kernel)((1,), (64,), (out, *values), workers=1)
    if kernel == "large_frame":
        module.get_function(kernel)((1,), (64,), (out, *values), stack_bytes=1 << 18)
