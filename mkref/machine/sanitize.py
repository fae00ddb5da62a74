"""Run one kernel launch under ThreadSanitizer or AddressSanitizer.

A library built with a sanitizer cannot be loaded into an ordinary Python, so the launch becomes a
program of its own: the arrays go into a folder, the program (`cuda/host/program.h`) loads them,
runs the kernel and writes them back, and what the sanitizer said is returned as text. A sanitizer
looks at one schedule; several seeds look at several.

It decides nothing: a return code and a text are the whole result.

Sources: https://clang.llvm.org/docs/ThreadSanitizer.html, .../AddressSanitizer.html.
"""

from __future__ import annotations

import ctypes
import os
import platform
import shutil
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from mkref.errors import MachineError
from mkref.machine.compiler import Sanitizer, compile_unit, find_compiler
from mkref.machine.hostcc import BAD_LAUNCH, TIMEOUT, kernel_names, three_sizes

__all__ = ["ASAN_EXIT", "TSAN_EXIT", "build_program", "run_sanitized"]

TSAN_EXIT = 66
"""Return code when ThreadSanitizer reported a race."""

ASAN_EXIT = 67
"""Return code when AddressSanitizer or UndefinedBehaviorSanitizer stopped the program."""


def build_program(
    source: str,
    *,
    name: str,
    defines: Mapping[str, str | int] | None = None,
    sanitize: Sanitizer = None,
    cache_dir: Path | None = None,
) -> Path:
    """Compile a CUDA source text into a program that runs one launch from a folder.

    Args: as for `mkref.machine.hostcc.build`.

    Returns:
        The executable; its only argument is the folder. It exits with the launch's code, or with
        the sanitizer's.
    """
    kernels = kernel_names(source)
    exports = "\n".join(f"HOST_EXPORT({k})" for k in kernels)
    table = ", ".join(f'{{"{k}", host_launch_{k}}}' for k in kernels)
    text = (
        f'#include "program.h"\n#include "cuda_host.h"\n#line 1 "{name}.cu"\n{source}\n{exports}\n'
        f"int main(int argc, char** argv) {{\n"
        f"  const host::ProgramKernel kernels[] = {{{table}}};\n"
        f"  return host::run_program(kernels, {len(kernels)}, argc, argv);\n}}\n"
    )
    return compile_unit(
        text, name=name, defines=defines, sanitize=sanitize, cache_dir=cache_dir, shared=False
    )


def _merge(arrays: Sequence[np.ndarray]) -> list[tuple[int, int]]:
    """Address ranges [first, end) of the arrays; overlapping ones become one."""
    ranges = sorted(np.lib.array_utils.byte_bounds(a) for a in arrays if a.nbytes)
    merged: list[tuple[int, int]] = []
    for first, end in ranges:
        if merged and first < merged[-1][1]:
            merged[-1] = (merged[-1][0], max(end, merged[-1][1]))
        else:
            merged.append((int(first), int(end)))
    return merged


def _find(ranges: Sequence[tuple[int, int]], address: int) -> tuple[int, int] | None:
    """Index of the range that holds an address, and the offset in it."""
    for i, (first, end) in enumerate(ranges):
        if first <= address < end:
            return i, address - first
    return None


def _write_launch(
    folder: Path, lines: list[str], args: Sequence[Any], ranges: Sequence[tuple[int, int]]
) -> None:
    for i, (first, end) in enumerate(ranges):
        (folder / f"buffer{i}.bin").write_bytes(ctypes.string_at(first, end - first))
        lines.append(f"buffer {end - first} {first % 64}")
    for i, arg in enumerate(args):
        if isinstance(arg, np.ndarray):
            raw = arg.ctypes.data.to_bytes(8, "little")
        elif isinstance(arg, np.generic):
            raw = arg.tobytes()
        else:
            raise MachineError(f"argument {i} is a {type(arg).__name__}; give NumPy values")
        (folder / f"value{i}.bin").write_bytes(raw)
        lines.append(f"value {len(raw)}")
        for at in range(0, len(raw) - 7, 8):
            address = int.from_bytes(raw[at : at + 8], "little")
            if (found := _find(ranges, address)) is not None:
                lines.append(f"pointer {i} {at} {found[0]} {found[1]}")
    (folder / "launch.txt").write_text("\n".join(lines) + "\n")


def _environment(sanitize: Sanitizer) -> dict[str, str]:
    """Sanitizer options: our exit codes, source lines in reports, no leak search."""
    tsan = f"exitcode={TSAN_EXIT}:halt_on_error=0:history_size=4:report_signal_unsafe=0"
    asan = f"exitcode={ASAN_EXIT}:detect_leaks=0:detect_stack_use_after_return=0"
    ubsan = f"exitcode={ASAN_EXIT}:print_stacktrace=1"
    names = ["llvm-symbolizer", *(f"llvm-symbolizer-{n}" for n in range(24, 13, -1))]
    if symbolizer := next((p for n in names if (p := shutil.which(n))), None):
        tsan, asan, ubsan = (
            f"{o}:external_symbolizer_path={symbolizer}" for o in (tsan, asan, ubsan)
        )
    if sanitize == "thread":  # its runtime would also read UBSAN_OPTIONS
        return {**os.environ, "TSAN_OPTIONS": tsan}
    return {**os.environ, "ASAN_OPTIONS": asan, "UBSAN_OPTIONS": ubsan}


def _run(command: list[str], limit_s: float, environment: dict[str, str]) -> tuple[int, str]:
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, errors="replace", check=False,
            timeout=limit_s, env=environment,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        return TIMEOUT, f"the program did not end within {limit_s:g} s"
    return done.returncode, done.stdout + done.stderr


def run_sanitized(
    source: str,
    name: str,
    grid: tuple[int, ...],
    block: tuple[int, ...],
    args: Sequence[Any],
    shared_mem: int = 0,
    *,
    sanitize: Sanitizer,
    buffers: Sequence[np.ndarray] = (),
    defines: Mapping[str, str | int] | None = None,
    workers: int = 0,
    seed: int = 0,
    timeout_s: float = 300.0,
    stack_bytes: int = 0,
    cache_dir: Path | None = None,
    unit: str = "",
) -> tuple[int, str]:
    """Launch kernel `name` of a source text once, in an instrumented program.

    Args:
        source: the text of a `.cu` file.
        name: a kernel in it.
        grid, block, args, shared_mem: as for a `HostFunction`. Arrays are written back.
        workers, seed, timeout_s, stack_bytes: likewise.
        sanitize: "thread", "address" (with undefined behaviour), or None for a plain program.
        buffers: arrays whose addresses stand in structured arguments. Every 8-byte word of an
            argument that points into one of them, or into an array argument, is adjusted.
        unit: name of the source text, so that its kernels share a program; else the kernel's.

    Returns:
        Return code and text: 0 clean; `TSAN_EXIT` or `ASAN_EXIT`; or a launch's code (1 deadlock,
        2 divergence, 3 time limit, 4 misuse, 5 bad launch).
    """
    program = build_program(
        source, name=unit or name, defines=defines, sanitize=sanitize, cache_dir=cache_dir
    )
    arrays = [a for a in (*args, *buffers) if isinstance(a, np.ndarray)]
    ranges = _merge(arrays)
    lines = [
        f"kernel {name}",
        "shape " + " ".join(map(str, (*three_sizes("grid", grid), *three_sizes("block", block)))),
        f"shared {shared_mem}",
        f"options {workers} {seed} {timeout_s} {stack_bytes}",
    ]
    environment = _environment(sanitize)
    with tempfile.TemporaryDirectory(prefix="mkref-launch-") as scratch:
        folder = Path(scratch)
        _write_launch(folder, lines, args, ranges)
        command = [str(program), str(folder)]
        code, text = _run(command, timeout_s + 30, environment)
        if "unexpected memory mapping" in text and shutil.which("setarch"):
            # Older runtimes cannot place their shadow when addresses are randomised widely.
            command = ["setarch", platform.machine(), "-R", *command]
            code, text = _run(command, timeout_s + 30, environment)
        for i, (first, end) in enumerate(ranges):
            data = (folder / f"buffer{i}.bin").read_bytes()
            if ctypes.string_at(first, end - first) != data:
                ctypes.memmove(first, data, len(data))
    if code not in range(BAD_LAUNCH + 1) and not text:
        text = f"the program of {find_compiler(sanitize).command[0]} ended with code {code}"
    return code, text
