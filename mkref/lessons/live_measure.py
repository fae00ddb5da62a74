"""Run a benchmark in a process of its own, and read its record: for `mkref.lessons.live`.

It has a limit of time, and an error is one line. A measurement is made once in a session of the
notebook, and kept in memory only.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import mkref
from mkref.errors import MachineError

__all__ = ["WHOLE_BYTES", "Record", "command_of", "forget", "free_bytes", "geometry_for"]
__all__ += ["measured", "one_line", "run"]

WHOLE_BYTES = 80_000_000_000
"""Free memory that the full geometry wants: 61 GB of weights, up to 5 of keys and values, the rest
for PyTorch and CuPy."""
CONTEXT = {"north": 8192, "nano": 2048}
LIMIT_S = 300.0

Record = dict[str, Any]
_made: dict[tuple[str, str], Record] = {}


def geometry_for(free: int) -> tuple[str, str]:
    """What is measured on a GPU with `free` bytes left, and how far that can be compared.

    >>> geometry_for(140_000_000_000)
    ('north', '')
    """
    if free >= WHOLE_BYTES:
        return "north", ""
    return "nano", (
        f"The record is of the full geometry, with {CONTEXT['north']:,} tokens of context. Here "
        f"the small model nano was measured, with {CONTEXT['nano']:,}, because the full one wants "
        f"{WHOLE_BYTES / 1e9:.0f} GB of free memory and {free / 1e9:.0f} are there. So ratios can "
        "be compared, times cannot; and in a small model waits and launches weigh more."
    )


def free_bytes() -> int:
    """Of the current GPU's memory.

    Raises:
        MachineError: the GPU does not answer.
    """
    from mkref.machine.cuda import import_cupy  # late: only where a GPU is

    try:
        return int(import_cupy().cuda.runtime.memGetInfo()[0])
    except RuntimeError as error:  # of the driver, for instance a GPU that somebody else holds
        raise MachineError(f"the GPU does not answer ({error})") from error


def command_of(what: str, geometry: str) -> list[str]:
    """The program that makes a measurement; the file of its record is added to it."""
    size = ["--geometry", geometry, "--context", str(CONTEXT[geometry])]
    program = {
        "ladder": ["mkref", "bench", "ladder", *size, "--batch", "1", "--rounds", "6"],
        "decode": ["mkref", "bench", "decode", *size, "--machine", "cuda"],
    }.get(what, ["mkref.lessons.live_run", what, *size])
    return [sys.executable, "-m", *program]


def measured(what: str, geometry: str) -> Record:
    """The record of a measurement, made once in a session.

    Raises:
        MachineError: there is none; says why.
    """
    if (what, geometry) not in _made:
        _made[what, geometry] = run(command_of(what, geometry))
    return _made[what, geometry]


def forget() -> None:
    """The next cell measures again."""
    _made.clear()


def run(command: Sequence[str]) -> Record:
    """The record that a program writes into the file that follows its arguments.

    Raises:
        MachineError: it writes none, or takes too long; one line, its own last one if it has some.
    """
    package = str(Path(mkref.__file__).resolve().parent.parent)
    paths = [package, *filter(None, [os.environ.get("PYTHONPATH")])]
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "record.json"
        try:
            done = subprocess.run(
                [*command, "--json", str(file)], capture_output=True, text=True,
                stdin=subprocess.DEVNULL, timeout=LIMIT_S,
                env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
            )  # fmt: skip
        except subprocess.TimeoutExpired as error:
            raise MachineError(f"no result after {LIMIT_S:.0f} seconds") from error
        except OSError as error:
            raise MachineError(f"cannot start {command[0]} ({error})") from error
        try:
            record = json.loads(file.read_text(encoding="utf-8"))
        except FileNotFoundError as error:
            said = done.stderr.strip() or f"exit status {done.returncode}, and no word"
            raise MachineError(said.splitlines()[-1]) from error
        except ValueError as error:
            raise MachineError(f"a record that cannot be read ({error})") from error
    if not isinstance(record, dict) or not record.get("rows"):
        raise MachineError("a record without rows")
    return record


def one_line(text: str) -> str:
    """A message as a part of one line."""
    return textwrap.shorten(text, 160, placeholder=" ...").rstrip(".")
