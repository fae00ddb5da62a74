"""The sampler compiles for every architecture, without spills, and its limits are stated once."""

from __future__ import annotations

import re

import numpy as np
import pytest

from mkref.lessons import code
from mkref.machine.hostcc import build, kernel_names
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


FILES = ("megakernel.cu", "sampler/1_common.cu")


@pytest.mark.parametrize("name", ["negative_infinity", "exp_", "log_", "st_release_host"])
def test_copies_are_those_of_the_megakernel(name: str) -> None:
    """Sources have no headers, so both need their own; the same noise needs the same text."""
    theirs, ours = (code(name, file).text for file in FILES)
    assert re.sub(r"^//.*\n", "", theirs, flags=re.M) == re.sub(r"^//.*\n", "", ours, flags=re.M)


def test_both_exponentials_have_the_same_bits() -> None:
    """That of the megakernel has no branch, since several run side by side; the sampler's has."""
    theirs, ours = (code("exp2_", file).text for file in FILES)
    source = f"""
#ifdef __CUDACC__
typedef unsigned int uint32_t;
#endif
namespace theirs {{ {theirs} }}
namespace ours {{ {ours} }}
extern "C" __global__ void both(const uint32_t* x, uint32_t* y, int n) {{
  for (int i = threadIdx.x; i < n; i += blockDim.x) {{
    const float v = __uint_as_float(x[i]);
    y[2 * i] = __float_as_uint(theirs::exp2_(v));
    y[2 * i + 1] = __float_as_uint(ours::exp2_(v));
  }}
}}
"""
    bits = np.arange(0, 1 << 32, 4099, dtype=np.uint64).astype(np.uint32)
    bits = bits[(bits & 0x7FFFFFFF) <= 0x7F800000]  # of the NaN one is enough
    edges = [-126, np.nextafter(np.float32(-126), -np.inf), 127, 128, np.inf, -np.inf, np.nan]
    bits = np.concatenate([bits, np.array(edges, np.float32).view(np.uint32)])
    out = np.full((len(bits), 2), 0xDEADBEEF, np.uint32)
    build(source, name="exponentials").get_function("both")(
        (1,), (32,), (bits, out, np.int32(len(bits)))
    )
    assert len(bits) > 1_000_000
    np.testing.assert_array_equal(out[:, 0], out[:, 1])


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
