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
import functools
import hashlib
import os
import platform
import re
import shlex
import shutil
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np

from mkref.errors import HangError, MachineError
from mkref.machine.cache import cache_dir as default_cache
from mkref.paths import cuda_root

__all__ = [
    "Compiler",
    "HostFunction",
    "HostHang",
    "HostModule",
    "build",
    "build_program",
    "find_compiler",
    "run_sanitized",
]

Sanitizer = Literal["address", "thread"] | None

DEADLOCK, DIVERGENCE, TIMEOUT, MISUSE, BAD_LAUNCH = 1, 2, 3, 4, 5
"""Codes of `cuda/host/scheduler.h`."""

_COMMON = ("-x", "c++", "-std=c++20", "-ffp-contract=off", "-fno-strict-aliasing", "-pthread", "-w")
_SANITIZE: dict[Sanitizer, tuple[str, ...]] = {
    None: ("-O2", "-g1"),
    "address": (
        "-O1",
        "-g",
        "-fno-omit-frame-pointer",
        "-fsanitize=address,undefined",
        "-fno-sanitize-recover=undefined",
    ),
    "thread": ("-O1", "-g", "-fsanitize=thread"),
}
_KERNEL = re.compile(
    r'extern\s*"C"\s*__global__\s+(?:__launch_bounds__\s*\([^)]*\)\s*)?void\s+'
    r"(?:__launch_bounds__\s*\([^)]*\)\s*)?(\w+)\s*\("
)
_COMMENT = re.compile(r"//[^\n]*|/\*.*?\*/", re.DOTALL)
_REPORT_BYTES = 1 << 16


class HostHang(HangError):
    """A launch on the CPU that did not end: a deadlock, or its time ran out.

    Args:
        report: which threads of which block waited where.
        code: 1 deadlock, 3 time limit.
    """

    def __init__(self, report: str, code: int) -> None:
        super().__init__(code=code, sm=-1, task=-1, counter=-1, have=-1, want=-1)
        self.args = (report,)
        self.report = report


@dataclass(frozen=True)
class Compiler:
    """A C++ compiler: its command and the first line of its `--version`."""

    command: tuple[str, ...]
    version: str

    @property
    def is_clang(self) -> bool:
        """Whether it is clang (whose ThreadSanitizer is ten times faster than gcc's)."""
        return "clang" in self.version


@functools.cache
def _compiler_at(command: str) -> Compiler | None:
    words = shlex.split(command)
    if not words or shutil.which(words[0]) is None:
        return None
    done = subprocess.run([*words, "--version"], capture_output=True, text=True, check=False)
    if done.returncode != 0:
        return None
    return Compiler(tuple(words), done.stdout.splitlines()[0].strip())


def find_compiler(sanitize: Sanitizer = None) -> Compiler:
    """The C++ compiler to use: `$CXX`, then g++, then clang++ (for "thread" clang++ before g++).

    Raises:
        MachineError: none is installed, or `$CXX` does not run.
    """
    chosen = os.environ.get("CXX", "")
    clangs = ["clang++", *(f"clang++-{n}" for n in range(24, 13, -1))]
    names = [*clangs, "g++", "c++"] if sanitize == "thread" else ["g++", *clangs, "c++"]
    if chosen:
        found = _compiler_at(chosen)
        if found is None:
            raise MachineError(
                f"CXX={chosen!r} is not a C++ compiler that runs; unset it or fix it"
            )
        return found
    for name in names:
        if (found := _compiler_at(name)) is not None:
            return found
    raise MachineError(
        "no C++ compiler found: running kernels on the CPU needs g++ 12 or newer, or clang++ "
        "(for example: apt-get install g++), or CXX naming one"
    )


@functools.cache
def _tuning(command: tuple[str, ...]) -> tuple[tuple[str, ...], str]:
    """Flags for this CPU, and what they mean here (goes into the cache key)."""
    if platform.machine().lower() not in ("x86_64", "amd64"):
        return (), platform.machine()
    probe = [*command, "-march=native", "-x", "c++", "-E", "-v", os.devnull]
    done = subprocess.run(probe, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        return (), "generic"
    lines = [s for s in done.stderr.splitlines() if "cc1" in s]
    return ("-march=native",), "".join(lines)


def kernel_names(source: str) -> list[str]:
    """Names of the `extern "C" __global__` functions of a source text, in order."""
    return list(dict.fromkeys(_KERNEL.findall(_COMMENT.sub(" ", source))))


def compile_unit(
    text: str,
    *,
    name: str,
    defines: Mapping[str, str | int] | None,
    sanitize: Sanitizer,
    cache_dir: Path | None,
    shared: bool,
) -> Path:
    """Compile a whole translation unit, or find it in the cache."""
    compiler = find_compiler(sanitize)
    tuning, meaning = _tuning(compiler.command)
    macros = [f"-D{key}={value}" for key, value in (defines or {}).items()]
    kind = ("-shared", "-fPIC") if shared else ()
    flags = [*_COMMON, *_SANITIZE[sanitize], *tuning, *macros, *kind]
    headers = cuda_root() / "host"
    digest = hashlib.sha256()
    for part in (text, *flags, *compiler.command, compiler.version, meaning):
        digest.update(part.encode() + b"\0")
    for header in sorted(headers.glob("*.h")):
        digest.update(header.name.encode() + b"\0" + header.read_bytes() + b"\0")
    cache = cache_dir or default_cache() / "host"
    target = cache / f"{name}-{digest.hexdigest()[:20]}{'.so' if shared else ''}"
    if target.exists():
        return target
    try:
        cache.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=cache, prefix=".build-") as scratch:
            unit, product = Path(scratch) / f"{name}.cpp", Path(scratch) / "product"
            unit.write_text(text)
            command = [*compiler.command, *flags, f"-I{headers}", "-o", str(product), str(unit)]
            done = subprocess.run(command, capture_output=True, text=True, check=False)
            if done.returncode != 0:
                raise MachineError(_first_error(name, compiler, done.stderr))
            os.replace(product, target)  # atomic: others see the old state or a whole file
    except OSError as error:
        raise MachineError(f"cannot write the build cache {cache}: {error}") from error
    return target


def _first_error(name: str, compiler: Compiler, stderr: str) -> str:
    lines = [s.strip() for s in stderr.splitlines()]
    errors = [s for s in lines if "error:" in s] or [s for s in lines if s] or ["no message"]
    more = f" (and {len(errors) - 1} more)" if len(errors) > 1 else ""
    return f"compiling {name} with {compiler.command[0]} failed: {errors[0]}{more}"


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
            HostHang: deadlock or time limit; the text says who waited where.
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
        raise HostHang(message, code)
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
