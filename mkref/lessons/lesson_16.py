"""Lesson 16: a port of an operation that the kernel does not have, run and compared.

The shared expert is a diff, `mkref/lessons/cuda/16_shared_expert.diff`, on private copies of what
it changes (`mkref.lessons.port`). Exercises: the ordinary kernels and the task's body are in
`lesson_16_cuda`, its entry in the plan in `lesson_16_plan`.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import numpy as np

from mkref.errors import PlanError
from mkref.lessons.lesson_16_oracle import model_logits
from mkref.lessons.port import Change, Port

__all__ = ["DIFF", "NEW", "TOLERANCE", "Run", "on_gpu", "refused", "run_step", "shared_port"]
__all__ += ["kernel_changes", "violation"]

DIFF = "16_shared_expert.diff"
NEW = ("SHARED_UP", "SHARED_DOWN")
"""Operations of the port."""
TOLERANCE = 0.06
"""Of a logit. A value that is rounded to bfloat16 is off by up to 1/512 of itself, and some twenty
are rounded one after another in each of five layers. Errors that add like noise make
sqrt(100) / 512, 0.02 of a logit of about 2, and so 0.04; this is half as much again.
"""
STEPS, CONTEXT = 4, 128
TOKENS = (12, 5, 77, 516, 300, 9)


@cache
def shared_port() -> Port:
    """The port of the shared expert."""
    return Port.read(DIFF)


def kernel_changes() -> Change:
    """What the port changes in the kernel, without the body that exercise 16.2 asks for."""
    change = shared_port()["cuda/megakernel.cu"]
    hunks = (replace(hunk, lines=_without_body(hunk.lines)) for hunk in change.hunks)
    return replace(change, hunks=tuple(hunks))


def _without_body(lines: tuple[str, ...]) -> tuple[str, ...]:
    heads = [i for i, line in enumerate(lines) if "void shared_down(" in line]
    if not heads:
        return lines
    first = heads[0] + 1
    return (*lines[:first], "+  // exercise 16.2", *lines[lines.index("+}", first) :])


@dataclass(frozen=True)
class Run:
    """Some steps of the ported kernel, compared.

    Attributes:
        tokens: int [steps, rows] that it drew.
        same_bits: x, h_shared, x_mid and the logits of the last step are those of the interpreter.
        off: largest difference of a logit of the last step to the float64 oracle.
        off_without: the same to an oracle without the shared expert.
    """

    tokens: np.ndarray
    same_bits: bool
    off: float
    off_without: float


@cache
def run_step(n_sm: int, rows: int, *, machine: str = "host") -> Run:
    """Run four steps of the port from the beginning of `rows` sequences.

    Args:
        n_sm: of the plan.
        rows: 1 to 6.
        machine: "host" or "cuda".
    """
    port = shared_port()
    steps, verify = port.module("lessons.steps"), port.module("plan.verify").verify
    plan, weights = steps.lesson_plan(n_sm), steps.lesson_weights()
    verify(plan, CONTEXT)
    name = {"host": "HostMachine", "cuda": "CudaMachine"}[machine]
    kernel = getattr(port.module(f"machine.{machine}"), name)()
    numpy = port.module("machine.interpreter").InterpreterMachine()
    pages = np.arange(2 * rows * 2, dtype=np.int32).reshape(2, rows, 2) % (rows * 2)
    inputs = port.module("machine.inputs").StepInputs(
        np.array(TOKENS[:rows], np.int32), np.zeros(rows, np.int32), pages
    )
    found = []
    for one in (kernel, numpy):
        one.load(plan, weights, CONTEXT)
        found.append((one.decode(inputs, STEPS), _buffers(one, rows)))
    (tokens, mine), (right, theirs) = found
    off = []
    for shared in (True, False):
        fed = [[TOKENS[row], *tokens[:-1, row].tolist()] for row in range(rows)]
        logits = [model_logits(weights, plan.config, row, shared=shared)[-1] for row in fed]
        off.append(float(np.abs(np.array(logits) - kernel.logits(rows)).max()))
    same = np.array_equal(tokens, right) and mine == theirs
    kernel.close()
    return Run(tokens, same, *off)


def _buffers(machine: Any, rows: int) -> list[bytes]:
    """What active rows have in the buffers that the port is about."""
    parts = [machine.logits(rows), machine.read("x_mid")[:rows], machine.read("h_shared")[:, :rows]]
    return [part.tobytes() for part in [*parts, machine.read("x")[:, :rows]]]


def violation(plan: Any, port: Port | None = None) -> str:
    """The first sentence of a port's verifier, or "" if it proves the plan.

    Args:
        plan: made by the port.
        port: default: that of the shared expert.
    """
    try:
        (port or shared_port()).module("plan.verify").verify(plan, CONTEXT)
    except PlanError as error:
        return str(error).removeprefix("plan: ").splitlines()[0]
    return ""


def refused() -> str:
    """What the verifier says of the port if its model has not learnt of tasks that add in place."""
    diff = shared_port().diff
    parts = re.split(r"(?=^diff --git )", diff, flags=re.MULTILINE)
    rest = "".join(part for part in parts if "plan/hazards.py" not in part.partition("\n")[0])
    port = Port(rest, "port_without_model")
    said = violation(port.module("lessons.steps").lesson_plan(2), port)
    return said.replace(": reads", ":\n  reads").replace(" without", "\n  without")


def on_gpu(n_sm: int = 4, rows: int = 3) -> str:
    """The same on a GPU, if there is one; in words."""
    from mkref.machine.kernels import usable_gpu

    if not usable_gpu():
        return "no GPU here: the port was run on the CPU only"
    run = run_step(n_sm, rows, machine="cuda")
    return f"on the GPU: same bits {run.same_bits}, off by {run.off:.3f} [measured here]"
