"""Compile CUDA source for the CPU and call its kernels with NumPy arrays.

`build` puts `cuda/host/cuda_host.h` in front of a source text, compiles it with the system's C++
compiler into a shared library that is cached by content, and returns a `HostModule` whose functions
are called like `cupy.RawKernel`: `module.get_function("k")(grid, block, args, shared_mem)`.
`mkref.machine.sanitize` runs such a launch in an instrumented program of its own.

It does not know what the kernels are for, and it never touches a GPU.

Sources: `cuda/host/*.h`; calling convention of https://docs.cupy.dev (RawKernel).
"""

from __future__ import annotations

import ctypes
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from mkref.errors import HangError, MachineError
from mkref.machine.compiler import Sanitizer, compile_unit, find_compiler

__all__ = [
    "HostFunction",
    "HostModule",
    "LaunchHangError",
    "build",
    "find_compiler",
    "kernel_names",
]

DEADLOCK, DIVERGENCE, TIMEOUT, MISUSE, BAD_LAUNCH = 1, 2, 3, 4, 5
"""Codes of `cuda/host/scheduler.h`."""

_KERNEL = re.compile(
    r'extern\s*"C"\s*__global__\s+(?:__launch_bounds__\s*\([^)]*\)\s*)?void\s+'
    r"(?:__launch_bounds__\s*\([^)]*\)\s*)?(\w+)\s*\("
)
_COMMENT = re.compile(r"//[^\n]*|/\*.*?\*/", re.DOTALL)
_REPORT_BYTES = 1 << 16


class LaunchHangError(HangError):
    """A launch on the CPU that did not end: a deadlock, or its time ran out.

    Args:
        report: which threads of which block waited where.
        code: 1 deadlock, 3 time limit.
    """

    def __init__(self, report: str, code: int) -> None:
        super().__init__(code=code, sm=-1, task=-1, counter=-1, have=-1, want=-1)
        self.args = (report,)
        self.report = report


def kernel_names(source: str) -> list[str]:
    """Names of the `extern "C" __global__` functions of a source text, in order."""
    return list(dict.fromkeys(_KERNEL.findall(_COMMENT.sub(" ", source))))


def _unit(source: str, name: str, tail: str) -> str:
    return f'#include "cuda_host.h"\n#line 1 "{name}.cu"\n{source}\n{tail}\n'


class HostFunction:
    """One kernel, called like a `cupy.RawKernel`."""

    def __init__(self, library: ctypes.CDLL, name: str) -> None:
        self.name = name
        self._launch = getattr(library, f"host_launch_{name}")
        self._launch.restype = ctypes.c_int
        sizes = (ctypes.c_int * 64)()
        n = getattr(library, f"host_parameters_{name}")(sizes, 64)
        self.parameters = tuple(sizes[:n])
        """Size of each parameter in bytes; a pointer's is negative."""

    def __call__(
        self,
        grid: tuple[int, ...],
        block: tuple[int, ...],
        args: Sequence[Any],
        shared_mem: int = 0,
        *,
        workers: int = 0,
        seed: int = 0,
        timeout_s: float = 60.0,
        stack_bytes: int = 0,
    ) -> None:
        """Run the kernel and wait for its end. Other Python threads run meanwhile.

        Args:
            grid, block: one to three sizes each.
            args: NumPy arrays (a pointer to their data), NumPy scalars or structured scalars
                (by value), or addresses as integers for pointer parameters.
            shared_mem: dynamic shared memory per block, bytes.
            workers: OS threads; 0 means one per core. With 1 the run is a function of the seed.
            seed: 0 runs lanes and warps in order, any other value shuffles them.
            timeout_s: time limit, seconds.
            stack_bytes: stack of one CUDA thread; 0 means 64 KiB.

        Raises:
            LaunchHangError: deadlock or time limit; the text says who waited where.
            MachineError: wrong arguments, divergence, or misuse of an mbarrier or copy.
        """
        values = pack_arguments(self.name, self.parameters, args)
        pointers = (ctypes.c_void_p * max(1, len(values)))(*(ctypes.addressof(v) for v in values))
        shape = (ctypes.c_uint * 6)(*three_sizes("grid", grid), *three_sizes("block", block))
        report = ctypes.create_string_buffer(_REPORT_BYTES)
        code = self._launch(
            shape,
            ctypes.c_ulonglong(shared_mem),
            pointers,
            ctypes.c_int(workers),
            ctypes.c_ulonglong(seed),
            ctypes.c_double(timeout_s),
            ctypes.c_ulonglong(stack_bytes),
            report,
            ctypes.c_ulonglong(_REPORT_BYTES),
        )
        if code:
            raise_report(self.name, code, report.value.decode(errors="replace"))


def raise_report(name: str, code: int, text: str) -> None:
    """Raise what a launch's code means."""
    message = f"{name}: {text.strip()}"
    if code in (DEADLOCK, TIMEOUT):
        raise LaunchHangError(message, code)
    raise MachineError(message)


def three_sizes(what: str, sizes: Sequence[int]) -> tuple[int, int, int]:
    if not 1 <= len(sizes) <= 3 or any(int(s) < 1 for s in sizes):
        raise MachineError(f"{what}={tuple(sizes)!r} must be one to three positive sizes")
    x, y, z = (*(int(s) for s in sizes), 1, 1)[:3]
    return x, y, z


def pack_arguments(name: str, parameters: Sequence[int], args: Sequence[Any]) -> list[Any]:
    """Every argument as a ctypes buffer that holds its value, checked against the parameters."""
    if len(args) != len(parameters):
        raise MachineError(f"{name} takes {len(parameters)} arguments, {len(args)} were given")
    values = []
    for i, (size, arg) in enumerate(zip(parameters, args, strict=True)):
        if isinstance(arg, np.ndarray):
            raw = arg.ctypes.data.to_bytes(8, "little")
            if size > 0:
                raise MachineError(f"argument {i} of {name} is by value, an array was given")
        elif isinstance(arg, np.generic):
            raw = arg.tobytes()
        elif isinstance(arg, int) and size < 0:
            raw = arg.to_bytes(8, "little")
        else:
            raise MachineError(
                f"argument {i} of {name} is a {type(arg).__name__}; "
                "give a NumPy array or a NumPy scalar such as np.int32(1)"
            )
        if len(raw) != abs(size):
            raise MachineError(
                f"argument {i} of {name} has {len(raw)} bytes, the kernel takes {abs(size)}"
            )
        values.append((ctypes.c_char * max(1, len(raw))).from_buffer_copy(raw or b"\0"))
    return values


class HostModule:
    """A compiled source: `get_function` gives its kernels by name."""

    def __init__(self, path: Path, kernels: Sequence[str]) -> None:
        self.path = path
        self.kernels = tuple(kernels)
        try:
            self._library = ctypes.CDLL(str(path))
        except OSError as error:
            raise MachineError(f"cannot load {path}: {error}") from error

    def get_function(self, name: str) -> HostFunction:
        """The kernel `name`.

        Raises:
            MachineError: the source has no such `extern "C" __global__` function.
        """
        if name not in self.kernels:
            known = ", ".join(self.kernels) or "none"
            raise MachineError(f"no kernel {name!r} in {self.path.name}; it has: {known}")
        return HostFunction(self._library, name)


def build(
    source: str,
    *,
    name: str,
    defines: Mapping[str, str | int] | None = None,
    sanitize: Sanitizer = None,
    cache_dir: Path | None = None,
) -> HostModule:
    """Compile a CUDA source text for the CPU and load it.

    Args:
        source: the text of a `.cu` file.
        name: used in messages ("name.cu:12") and in the name of the cached file.
        defines: macros, as `-Dkey=value`.
        sanitize: instrument; loading such a library needs the sanitizer's runtime preloaded, so
            `run_sanitized` is what you usually want.
        cache_dir: default `$MKREF_CACHE/host` or `$XDG_CACHE_HOME/mkref/host` (`~/.cache`).

    Raises:
        MachineError: no compiler, or the source does not compile.
    """
    kernels = kernel_names(source)
    tail = "\n".join(f"HOST_EXPORT({kernel})" for kernel in kernels)
    path = compile_unit(
        _unit(source, name, tail),
        name=name,
        defines=defines,
        sanitize=sanitize,
        cache_dir=cache_dir,
        shared=True,
    )
    return HostModule(path, kernels)
