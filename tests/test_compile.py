"""The kernel compiles for every supported architecture, without spills, and within the instruction
cache's reach.
"""

from __future__ import annotations

import struct

import pytest

from bench import probe_mma
from mkref.config import NORTH_MINI_CODE
from mkref.errors import MachineError
from mkref.machine.nvrtc import ARCHITECTURES, compile_cubin, resources
from mkref.machine.source import THREADS, kernel_source, ring_for, shared_bytes
from mkref.plan.build import ROWS
from tests.decode import small_config

SHARED_PER_BLOCK = {"sm_80": 166912, "sm_90a": 232448, "sm_100": 232448}
"""Most dynamic shared memory of one block in bytes (CUDA programming guide, technical
specifications).
"""
OTHER_SHARED = 101376
MOST_CODE = {1: 97_000, 2: 108_000, 4: 111_000, 8: 111_000, 16: 103_000, 32: 112_000}
"""Bytes of machine code, by rows of the build."""


def north_source(most_rows: int, capacity: int) -> str:
    """The build for so many rows, with the ring that such a GPU gets."""
    ring = ring_for(NORTH_MINI_CODE, capacity, most_rows)
    return kernel_source(NORTH_MINI_CODE, ring, max(most_rows, ROWS), most_rows)


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


def machine_code_bytes(image: bytes) -> int:
    """Size of the kernel's section in a cubin, which is a 64-bit ELF file."""
    (table,) = struct.unpack_from("<Q", image, 0x28)
    size, count, names_at = struct.unpack_from("<HHH", image, 0x3A)
    heads = [struct.unpack_from("<IIQQQQIIQQ", image, table + i * size) for i in range(count)]
    names = heads[names_at][4]
    sizes = {image[names + h[0] :].split(b"\0", 1)[0]: h[5] for h in heads}
    return int(sizes[b".text.megakernel"])


@pytest.mark.parametrize("most_rows", [1, 2, 4, 8, 16, 32])
def test_machine_code_does_not_grow(most_rows: int) -> None:
    """The aim is 64 KB, the reach of the instruction cache; until then it may only shrink."""
    image, report = compile_cubin(north_source(most_rows, SHARED_PER_BLOCK["sm_90a"]), "sm_90a")
    assert 32_000 < machine_code_bytes(image) <= MOST_CODE[most_rows]
    assert resources(report).spill_bytes == 0


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
