"""CUDA source to machine code through NVRTC: no toolkit, no headers, no GPU needed to compile.

Uses the low-level binding that CuPy ships, because the architecture suffix of `sm_90a` and the
exact option list matter. It loads and launches nothing (`mkref.machine.cuda`).
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from types import ModuleType

from mkref.errors import MachineError

__all__ = ["ARCHITECTURES", "OPTIONS", "Resources", "architecture", "compile_cubin", "resources"]

ARCHITECTURES = ("sm_80", "sm_86", "sm_89", "sm_90a", "sm_100", "sm_120")
"""Architectures that the kernel is compiled for in the tests."""

OPTIONS = ("--std=c++17", "--fmad=false", "--ptxas-options=-v", "-lineinfo")
"""Compile options: no contraction, so that sums round as docs/numerics.md says."""


@dataclass(frozen=True)
class Resources:
    """What ptxas reports for the kernel: registers per thread, and bytes of stack and of spills."""

    registers: int
    stack_bytes: int
    spill_bytes: int


def architecture(major: int, minor: int) -> str:
    """The `sm_` name for a compute capability; Hopper gets the `a` of its own instructions.

    >>> architecture(9, 0), architecture(8, 6)
    ('sm_90a', 'sm_86')
    """
    return f"sm_{major}{minor}" + ("a" if (major, minor) == (9, 0) else "")


def _nvrtc() -> ModuleType:
    try:
        from cupy.cuda import nvrtc
    except ImportError as error:
        raise MachineError(
            "CuPy, which brings the CUDA compiler, is not installed; "
            "`make lab` installs it where there is a GPU"
        ) from error
    return nvrtc


def compile_cubin(source: str, arch: str, options: Sequence[str] = OPTIONS) -> tuple[bytes, str]:
    """Compile for one architecture.

    Returns:
        The ELF image and ptxas' report.

    Raises:
        MachineError: no CuPy, or the compiler's first errors.
    """
    nvrtc = _nvrtc()
    program = nvrtc.createProgram(source, "megakernel.cu", (), ())
    try:
        nvrtc.compileProgram(program, (*options, f"--gpu-architecture={arch}"))
        # The binding drops the last byte of the image, which is padding of a section.
        return nvrtc.getCUBIN(program) + b"\0", nvrtc.getProgramLog(program)
    except nvrtc.NVRTCError as error:
        log = nvrtc.getProgramLog(program)
        first = [line for line in log.splitlines() if "error" in line][:3]
        raise MachineError(
            f"NVRTC cannot compile for {arch}: {'; '.join(first) or error}"
        ) from error
    finally:
        nvrtc.destroyProgram(program)


def resources(report: str) -> Resources:
    """Read registers, stack and spills out of a ptxas report."""

    def number(pattern: str) -> int:
        return sum(int(n) for n in re.findall(pattern, report))

    return Resources(
        number(r"Used (\d+) registers"),
        number(r"(\d+) bytes stack frame"),
        number(r"(\d+) bytes spill (?:stores|loads)"),
    )
