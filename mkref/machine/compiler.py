"""The system's C++ compiler: find it, run it on one translation unit, keep the result.

`compile_unit` puts the program or library into the cache of `mkref.machine.cache`, under a name
that is a hash of everything it depends on: the text, the headers in `cuda/host/`, the flags, the
compiler and what `-march=native` means on this CPU.

It does not know what a kernel is, and loads nothing; `mkref.machine.hostcc` does.
"""

from __future__ import annotations

import functools
import hashlib
import os
import platform
import shlex
import shutil
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from mkref.errors import MachineError
from mkref.machine.cache import cache_dir as default_cache
from mkref.machine.cache import cached
from mkref.paths import cuda_root

__all__ = ["Compiler", "Sanitizer", "compile_unit", "find_compiler"]

Sanitizer = Literal["address", "thread"] | None
"""None, or what to instrument for: "address" includes undefined behaviour."""

_COMMON = (
    *("-x", "c++", "-std=c++20", "-pthread", "-w"),
    "-ffp-contract=off",  # docs/numerics.md: one rounding per operation
    "-fno-strict-aliasing",  # CUDA code reads bytes as what it likes
    "-fstack-clash-protection",  # a large frame must touch the guard page, not jump over it
)
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


@dataclass(frozen=True)
class Compiler:
    """A C++ compiler: its command and the first line of its `--version`."""

    command: tuple[str, ...]
    version: str

    @property
    def is_clang(self) -> bool:
        """Whether it is clang (whose ThreadSanitizer is ten times faster than gcc's)."""
        return "clang" in self.version


def _compiler_at(command: str) -> Compiler | None:
    try:
        words = tuple(shlex.split(command))
    except ValueError:  # a quotation that does not end
        return None
    path = shutil.which(words[0]) if words else None
    version = _version((path, *words[1:])) if path else None
    return Compiler(words, version) if version else None


@functools.cache
def _version(command: tuple[str, ...]) -> str | None:
    done = subprocess.run([*command, "--version"], capture_output=True, text=True, check=False)
    return done.stdout.splitlines()[0].strip() if done.returncode == 0 and done.stdout else None


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

    def run_compiler(product: Path) -> None:
        unit = product.with_name(f"{name}.cpp")
        unit.write_text(text)
        command = [*compiler.command, *flags, f"-I{headers}", "-o", str(product), str(unit)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode != 0:
            raise MachineError(_first_error(name, compiler, done.stderr))

    file = f"{name}-{digest.hexdigest()[:20]}{'.so' if shared else ''}"
    return cached(file, run_compiler, cache_dir or default_cache() / "host")


def _first_error(name: str, compiler: Compiler, stderr: str) -> str:
    lines = [s.strip() for s in stderr.splitlines()]
    errors = [s for s in lines if "error:" in s] or [s for s in lines if s] or ["no message"]
    more = f" (and {len(errors) - 1} more)" if len(errors) > 1 else ""
    return f"compiling {name} with {compiler.command[0]} failed: {errors[0]}{more}"
