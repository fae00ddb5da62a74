"""`mkref doctor`: what this computer can run, and why not, one line each.

It reports and repairs nothing; the exit status is always 0.
"""

from __future__ import annotations

import argparse
import importlib
import json
import platform
import re
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version
from typing import Any, NamedTuple

from mkref.cli.arguments import add_json

__all__ = ["Check", "add_commands", "checks"]

PACKAGES = {
    "numpy": "needed",
    "torch": "needed",
    "safetensors": "needed",
    "tokenizers": "text in and out; token ids work without it: pip install tokenizers",
    "jupyterlab": "the workbook: `make lab` installs it",
}


class Check(NamedTuple):
    """One line: what was looked at, whether it is fine, and the detail."""

    name: str
    ok: bool
    detail: str


def add_commands(commands: Any) -> None:
    """Add `doctor` to the parser."""
    parser = commands.add_parser("doctor", help="what this computer can run, and why not")
    add_json(parser, "all lines")
    parser.set_defaults(run=run)


def checks() -> Iterator[Check]:
    """Look at everything, in the order of the report."""
    from mkref.machine import available, resolve

    yield Check("python", True, f"{platform.python_version()} on {platform.platform()}")
    for name, use in PACKAGES.items():
        yield _package(name, use)
    yield _compiler()
    yield _cupy()
    yield from _gpu()
    for machine in available():
        yield Check(f"machine {machine.name}", machine.ok, _short(machine.reason))
    yield Check("machine auto", True, f"means {resolve('auto')}")


def _short(reason: str) -> str:
    """Without the driver's own words at the end, which make a line of 130 characters.

    >>> _short("no usable NVIDIA driver (cudaErrorNoDevice: no CUDA-capable device is detected)")
    'no usable NVIDIA driver'
    """
    return re.sub(r" \(cuda[A-Z]\w*: .*\)$", "", reason)


def _package(name: str, use: str) -> Check:
    try:
        if name != "jupyterlab":  # large, and nothing here needs it
            importlib.import_module(name)
        return Check(name, True, version(name))
    except (ImportError, PackageNotFoundError):
        return Check(name, False, f"not installed ({use})")


def _compiler() -> Check:
    from mkref.errors import MachineError
    from mkref.machine.compiler import find_compiler

    try:
        return Check("C++ compiler", True, find_compiler().version)
    except MachineError as error:
        return Check("C++ compiler", False, str(error))


def _cupy() -> Check:
    found = next((n for n in ("cupy-cuda13x", "cupy-cuda12x", "cupy") if _version(n)), None)
    if found is None:
        return Check("CuPy", False, "not installed (`make lab` installs it where there is a GPU)")
    return Check("CuPy", True, f"{_version(found)} ({found})")


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _gpu() -> Iterator[Check]:
    from mkref.machine.gpu import driver_version, find_gpus

    driver = driver_version()
    if driver is None:
        yield Check("NVIDIA driver", False, "none on this computer")
    else:
        yield Check("NVIDIA driver", True, f"runs CUDA up to {driver}")
    gpus = find_gpus()
    if not gpus:
        yield Check("GPU", False, "none")
    for gpu in gpus:
        major, minor = gpu.capability
        detail = (
            f"{gpu.name}: {gpu.n_sm} SMs, compute capability {major}.{minor}, "
            f"{gpu.shared_bytes // 1024} KB of shared memory a block"
        )
        yield Check("GPU", major >= 8, detail if major >= 8 else f"{detail}; the kernel needs 8.0")


def run(options: argparse.Namespace) -> int:
    """Print the report."""
    found = list(checks())
    if options.json:
        machines = {
            check.name.removeprefix("machine "): {"ok": check.ok, "reason": check.detail}
            for check in found
            if check.name.startswith("machine ") and check.name != "machine auto"
        }
        report = {
            "checks": [check._asdict() for check in found],
            "machines": machines,
            "auto": found[-1].detail.removeprefix("means "),
        }
        print(json.dumps(report))
        return 0
    width = max(len(check.name) for check in found)
    for check in found:
        print(
            f"{'ok' if check.ok else '--'}  {check.name:{width}}  {' '.join(check.detail.split())}"
        )
    return 0
