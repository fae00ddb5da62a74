"""Trials in a process of their own: where they run, how they are started, how they end.

A crash, an endless loop or a GPU that hangs ends the process and not the notebook. What an exercise
is, and what its results mean, `mkref.lessons.cuda_exercise` knows.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from mkref.errors import MachineError
from mkref.lessons.program import YOURS
from mkref.machine.compiler import find_compiler
from mkref.machine.kernels import usable_gpu

__all__ = ["ALL_S", "ask", "compile_error", "machines"]

ALL_S = 150
"""Time limit of compiling and all trials together, on a busy computer."""
INSTEAD = {
    "rsqrtf": "1.0f / sqrtf(v), which has the same bits everywhere",
    "min": "a < b ? a : b, or fminf for floats",
    "max": "a > b ? a : b, or fmaxf for floats",
    "__threadfence": "a release and an acquire, such as ptx::red_release_add and ptx::ld_acquire",
    "__ldg": "a plain load",
    "__any_sync": "__ballot_sync(0xffffffffu, condition) != 0",
    "__fmul_rn": "a * b, which is never fused with an addition here",
    "__fadd_rn": "a + b, which is never fused with a product here",
    "__expf": "expf",
    "__fdividef": "a / b",
    "__shfl_down": "__shfl_down_sync(0xffffffffu, v, n)",
    "__shfl_xor": "__shfl_xor_sync(0xffffffffu, v, n)",
}
"""Built-ins of CUDA that the build for CPUs does not have, and what does the same there."""
PACKAGE = Path(__file__).resolve().parents[2]


def machines() -> list[str]:
    """Where an answer is tried: on this CPU, which tells what went wrong best, then on a GPU.

    Raises:
        MachineError: there is neither a compiler nor a GPU.
    """
    found = []
    try:
        find_compiler()
        found.append("host")
    except MachineError:
        if not usable_gpu():
            raise
    if usable_gpu():
        found.append("cuda")
    return found


def ask(
    exercise_id: str,
    answer: str,
    machine: str,
    *,
    first: int = 0,
    sanitize: bool = False,
    among: Sequence[str] = (),
) -> tuple[Sequence[dict[str, Any]], str]:
    """Try an answer in a process of its own.

    Args:
        exercise_id, answer: what is tried.
        machine: "host" or "cuda".
        first: number of the property to begin with.
        sanitize: only that property, on the CPU, with AddressSanitizer.
        among: answers that are compiled together, this one among them.

    Returns:
        Events of the worker, and how it ended if that was not by itself.
    """
    request = {
        "exercise": exercise_id, "answer": answer, "machine": machine, "first": first,
        "sanitize": sanitize, "among": list(among),
    }  # fmt: skip
    paths = [str(PACKAGE), *filter(None, [os.environ.get("PYTHONPATH")])]
    worker = subprocess.Popen(
        [sys.executable, "-m", "mkref.lessons.worker"],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(paths)}, start_new_session=True,
    )  # fmt: skip
    died = ""
    try:
        out, errors = worker.communicate(json.dumps(request), timeout=ALL_S)
        if worker.returncode < 0:
            died = f"ended by signal {signal.Signals(-worker.returncode).name}"
        elif worker.returncode:
            died = (errors.strip().splitlines() or ["no message"])[-1]
    except subprocess.TimeoutExpired:
        worker.kill()
        out, _ = worker.communicate()
        died = f"it did not end within {ALL_S} s"
    except BaseException:  # Ctrl-C in the notebook ends the trial, too
        worker.kill()
        raise
    lines = [line for line in out.splitlines() if line.startswith("{")]
    return [json.loads(line) for line in lines], died


def compile_error(error: str, answer: str) -> str:
    """The first error of a compiler, with the line of the learner's cell.

    Raises:
        MachineError: it is not about the code: no compiler, a folder that cannot be written.
    """
    if not error.startswith(("compiling ", "NVRTC cannot compile")):
        raise MachineError(error)
    place = r"(?:failed|sm_\w+): (.+?)[:(](\d+)[:)](?:\d+:)?:?"  # of g++ and clang++, and of NVRTC
    found = re.search(rf"{place} (?:fatal )?error: (.*)", error)
    if found is None:
        return f"it does not compile: {error}"
    file, line, says = found[1], int(found[2]), re.sub(r" \(and \d+ more\)$", "", found[3])
    says = re.split(r"; .+?\(\d+\): error", says)[0]  # NVRTC's next one
    if file.endswith("cuda_host.h") and "atomic" in says:
        return (
            "it does not compile: the build for CPUs has atomicAdd of integers only. Floats are "
            "added in a fixed order here: by lanes of a warp, then through shared memory"
        )
    if file.endswith("cuda_host.h"):  # what the CPU build refuses on purpose
        return f"it does not compile: {says.removeprefix('static assertion failed: ')}"
    if file != YOURS:
        return (
            f"the code around yours does not compile with it ({file}, line {line}: {says}): is a "
            "bracket or a semicolon missing, or has a name changed?"
        )
    text = answer.splitlines()[line - 1].strip() if line <= len(answer.splitlines()) else "its end"
    unknown = re.search(r"[‘'](\w+)[’'] was not declared|undeclared identifier '(\w+)'", says)
    if unknown and (name := unknown[1] or unknown[2]) in INSTEAD:
        says = f"the build for CPUs has no {name}; use {INSTEAD[name]}"
    return f"it does not compile, line {line} `{text}`: {says}"
