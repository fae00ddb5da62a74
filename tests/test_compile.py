"""The kernel compiles for every supported architecture, without spills, and within the instruction
cache's reach.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from bench import code_size, probe_mma
from bench.code_size import machine_code_bytes, north_source
from bench.provenance import kernel_hash
from mkref.config import NORTH_MINI_CODE
from mkref.errors import MachineError
from mkref.machine.nvrtc import ARCHITECTURES, compile_cubin, resources
from mkref.machine.source import THREADS, kernel_source, ring_for, shared_bytes
from mkref.paths import cuda_root
from tests.decode import small_config

SHARED_PER_BLOCK = {"sm_80": 166912, "sm_90a": 232448, "sm_100": 232448}
"""Most dynamic shared memory of one block in bytes (CUDA programming guide, technical
specifications).
"""
OTHER_SHARED = 101376
RESULTS = Path(__file__).parent.parent / "bench" / "results"
MOST_CODE = {1: 97_000, 2: 108_000, 4: 111_000, 8: 111_000, 16: 103_000, 32: 112_000}
"""Bytes of machine code, by rows of the build."""


@pytest.mark.parametrize("most_rows", [1, 8])
@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_kernel_compiles_without_spills(arch: str, most_rows: int) -> None:
    """The geometry of North, for one architecture: registers fit all threads of a block, nothing
    goes to local memory.
    """
    source = north_source(most_rows, SHARED_PER_BLOCK.get(arch, OTHER_SHARED))
    image, report = compile_cubin(source, arch)
    found = resources(report)
    print(f"{arch}: {found.registers} registers, {found.spill_bytes} bytes spilled")
    assert image[:4] == b"\x7fELF"
    assert 32 < found.registers <= 65536 // THREADS
    assert found.spill_bytes == 0


@pytest.mark.parametrize("most_rows", [1, 2, 4, 8, 16, 32])
def test_machine_code_does_not_grow(most_rows: int) -> None:
    """The aim is 64 KB, the reach of the instruction cache; until then it may only shrink."""
    image, report = compile_cubin(north_source(most_rows, SHARED_PER_BLOCK["sm_90a"]), "sm_90a")
    assert 32_000 < machine_code_bytes(image) <= MOST_CODE[most_rows]
    assert resources(report).spill_bytes == 0


def test_record_of_sizes_is_of_this_kernel() -> None:
    """`python bench/code_size.py` has been run since the kernel changed, and takes out what it
    names.
    """
    record = json.loads((RESULTS / "code_size.json").read_text())
    assert kernel_hash() == record["provenance"]["kernel"], "run bench/code_size.py again"
    text = (cuda_root() / "megakernel.cu").read_text()
    assert code_size.lines_by_section(text) == record["lines"], "run bench/code_size.py again"
    for row in record["rows"]:
        assert row["bytes"] <= MOST_CODE[row["rows"]]
    source = north_source(1)
    for part in code_size.PARTS:
        assert source != code_size.without(source, part)
    with pytest.raises(ValueError, match="dense layers: 0 times in the kernel, not once: dense"):
        code_size.without("", "dense layers")


@pytest.mark.parametrize("head_dim", [32, 64, 128])
@pytest.mark.parametrize("trace", [False, True])
def test_every_head_dim_compiles(head_dim: int, trace: bool) -> None:
    """Small geometries, with and without time stamps."""
    config = small_config(head_dim=head_dim)
    ring = ring_for(config, OTHER_SHARED)
    _, report = compile_cubin(kernel_source(config, ring, trace=trace), "sm_90a")
    assert resources(report).spill_bytes == 0


def test_ring_is_as_large_as_the_gpu_allows() -> None:
    """Six stages of 32 KB on a Hopper up to four rows, five for eight, less where shared memory is
    smaller, an error where nothing fits.
    """
    stages = [ring_for(NORTH_MINI_CODE, 232448, rows).stages for rows in (1, 2, 4, 8)]
    assert stages == [6, 6, 6, 5]
    small = ring_for(NORTH_MINI_CODE, OTHER_SHARED)
    assert shared_bytes(NORTH_MINI_CODE, small) <= OTHER_SHARED
    with pytest.raises(MachineError, match="shared memory: 49152 bytes"):
        ring_for(NORTH_MINI_CODE, 49152)


def test_the_probe_compiles() -> None:
    """The kernel that asks a GPU how it adds, which the numeric contract cites."""
    image, _ = compile_cubin(probe_mma.SOURCE, "sm_90a")
    assert image[:4] == b"\x7fELF"


def test_compile_error_is_one_line() -> None:
    """NVRTC's first errors are in the message."""
    with pytest.raises(MachineError, match=r"NVRTC cannot compile for sm_90a: .*nonsense"):
        compile_cubin("int main() { return nonsense; }", "sm_90a")
