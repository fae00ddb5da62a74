"""The sampler compiles for every architecture, without spills, and its limits are stated once."""

from __future__ import annotations

import re

import pytest

from mkref.lessons import code
from mkref.machine.hostcc import kernel_names
from mkref.machine.nvrtc import ARCHITECTURES, compile_cubin
from mkref.machine.sampler import POINTERS, sampler_source, sampler_table

MAX_THREADS = 512


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_sampler_compiles_without_spills(arch: str) -> None:
    """Registers of two blocks of 512 threads fit an SM; nothing goes to local memory."""
    image, report = compile_cubin(sampler_source(), arch)
    registers = [int(n) for n in re.findall(r"Used (\d+) registers", report)]
    spills = [int(n) for n in re.findall(r"(\d+) bytes (?:stack frame|spill)", report)]
    print(f"{arch}: {registers} registers, {spills} bytes of stack and spills")
    assert image[:4] == b"\x7fELF"
    assert 4 == len(registers)
    assert max(registers) <= 65536 // (2 * MAX_THREADS)
    assert 0 == max(spills)


@pytest.mark.parametrize("name", ["negative_infinity", "exp2_", "exp_", "log_", "st_release_host"])
def test_copies_are_those_of_the_megakernel(name: str) -> None:
    """Sources have no headers, so both need their own; the same noise needs the same text."""
    theirs, ours = (code(name, file).text for file in ("megakernel.cu", "sampler/1_common.cu"))
    assert re.sub(r"^//.*\n", "", theirs, flags=re.M) == re.sub(r"^//.*\n", "", ours, flags=re.M)


def test_kernels_of_the_source() -> None:
    """The names that a machine asks for, in the order in which they run."""
    assert ["draw_adjust", "draw_weigh", "draw_tops", "draw_choose"] == kernel_names(
        sampler_source()
    )


def test_every_pointer_has_memory() -> None:
    """What `struct Draw` points to is of the machine, or of the sampler's own table."""
    ours = {*sampler_table(8, 100)}
    of_the_machine = {*POINTERS} - ours
    assert of_the_machine == {
        "logits", "tokens", "positions", "temperatures", "seeds", "stop_ids", "status",
        "tokens_out", "progress",
    }  # fmt: skip
    assert {"own_tokens", "own_progress"} == ours - {*POINTERS}
