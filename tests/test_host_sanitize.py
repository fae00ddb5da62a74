"""Sanitizers see planted faults in a kernel and nothing in the same kernel without them.

ThreadSanitizer takes every CUDA thread for a thread of its own (every warp, in large launches), so
it finds an order that is missing even where the numbers come out right.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pytest

from mkref.machine.sanitize import ASAN_EXIT, TSAN_EXIT, run_sanitized

if TYPE_CHECKING:
    from mkref.machine.compiler import Sanitizer

SOURCE = (Path(__file__).parent / "host_kernels" / "handover.cu").read_text()
BUGS = (
    *("NONE", "NO_RELEASE", "NO_ACQUIRE", "NO_BARRIER", "NO_FULL_WAIT", "NO_EMPTY_WAIT"),
    *("LANES_RACE", "PAST_GLOBAL", "PAST_SHARED", "PAST_SOURCE", "MISALIGNED"),
)
BLOCKS, PER_BLOCK, ROUNDS = 3, 128, 2
SHARED_BYTES = 64 * 4 * 2 + 16
FIELDS = np.dtype(
    [
        *((name, np.uint64) for name in ("x", "part", "total", "arrived", "flag")),
        *((name, np.int32) for name in ("per_block", "rounds", "bug")),
    ],
    align=True,
)


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One build per sanitizer for all tests."""
    return tmp_path_factory.mktemp("cache")


def aligned(values: np.ndarray) -> np.ndarray:
    """A float32 copy at a 64-byte boundary."""
    memory = np.empty(len(values) + 16, np.float32)
    start = -memory.ctypes.data % 64 // 4
    memory[start : start + len(values)] = values
    return memory[start : start + len(values)]


def handover(cache: Path, sanitize: Sanitizer, bug: str, seed: int) -> tuple[int, str, bool]:
    """Return code, report and whether the totals are right."""
    x = aligned(np.arange(BLOCKS * PER_BLOCK) % 97 * 0.25)
    part, total = np.full(BLOCKS, np.nan, np.float32), np.full(ROUNDS, np.nan, np.float32)
    arrived, flag = np.zeros(1, np.int32), np.zeros(1, np.int32)
    expected = [float(x.sum())]
    expected.append(expected[0] * 0.5 + expected[0])
    arrays = (x, part, total, arrived, flag)
    addresses = tuple(a.ctypes.data for a in arrays)
    arguments = np.array((*addresses, PER_BLOCK, ROUNDS, BUGS.index(bug)), FIELDS)[()]
    code, text = run_sanitized(
        SOURCE,
        "handover",
        (BLOCKS,),
        (64,),
        (arguments,),
        SHARED_BYTES,
        sanitize=sanitize,
        buffers=arrays,
        workers=1,
        seed=seed,
        timeout_s=20 if bug == "NONE" else 1,  # without a wait it may hang
        cache_dir=cache,
    )
    return code, text, bool(np.allclose(expected, total, rtol=1e-6))


def test_plain_program(cache: Path) -> None:
    """Without a sanitizer the program is just the launch; arrays come back."""
    assert (0, "", True) == handover(cache, None, "NONE", 0)


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_threads_clean(cache: Path, seed: int) -> None:
    """No false alarm from the emulator itself."""
    assert (0, "", True) == handover(cache, "thread", "NONE", seed)


@pytest.mark.parametrize("bug", BUGS[1:7])
def test_threads_fault(cache: Path, bug: str) -> None:
    """Every missing order is reported, under at least two of three schedules."""
    results = [handover(cache, "thread", bug, seed) for seed in range(3)]
    assert sum(code == TSAN_EXIT for code, _, _ in results) >= 2
    reports = [text for code, text, _ in results if code == TSAN_EXIT]
    assert all("ThreadSanitizer: data race" in text for text in reports)
    assert any("handover.cu:" in text for text in reports)


def test_addresses_clean(cache: Path) -> None:
    """AddressSanitizer follows the fibers from stack to stack."""
    assert (0, "", True) == handover(cache, "address", "NONE", 1)


@pytest.mark.parametrize(
    ("bug", "words"),
    [
        ("PAST_GLOBAL", "heap-buffer-overflow"),
        ("PAST_SHARED", "heap-buffer-overflow"),
        ("MISALIGNED", "misaligned address"),
    ],
)
def test_addresses_fault(cache: Path, bug: str, words: str) -> None:
    """One element past global or dynamic shared memory, and a 16-byte load at 4 bytes."""
    code, text, _ = handover(cache, "address", bug, 0)
    assert ASAN_EXIT == code
    assert words in text
    assert "handover.cu:" in text


def test_copy_past_the_source(cache: Path) -> None:
    """A bulk copy that reads beyond its source is named where it is started."""
    code, text, _ = handover(cache, "address", "PAST_SOURCE", 0)
    assert code != 0
    assert "copy_async" in text
    assert "leave the source buffer" in text
