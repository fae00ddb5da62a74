"""Machines that run a decode step, chosen by name.

    cuda         the kernel on an NVIDIA GPU (CuPy)
    host         the same kernel file on the CPU (a C++ compiler)
    interpreter  the same tasks in NumPy, one at a time
    torch        `mkref.reference` in PyTorch: no plan, no kernel

What it does not do: import any of them before it is asked for; each has its own module.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any, NamedTuple

from mkref.errors import MachineError

if TYPE_CHECKING:
    from mkref.machine.base import Machine

__all__ = ["MACHINES", "Availability", "available", "create", "default_n_sm", "resolve"]

MACHINES = ("cuda", "host", "interpreter", "torch")
"""Names in the order in which "auto" tries them; it never takes "torch", which runs no plan."""

TRACED = ("cuda", "host", "interpreter")
"""Machines that take time stamps."""
MAX_HOST_SMS = 4
"""More emulated SMs than this are no faster on any laptop."""


class Availability(NamedTuple):
    """Whether a machine can run here; `reason` says why not, or what it will run on."""

    name: str
    ok: bool
    reason: str


def _cuda() -> tuple[bool, str]:
    from mkref.machine.cuda import device_sms, why_no_gpu

    missing = why_no_gpu()
    if missing:
        return False, missing.removeprefix("cuda: ")
    return True, f"the kernel on {device_sms()} SMs"


def _host() -> tuple[bool, str]:
    from mkref.machine.compiler import find_compiler

    try:
        return True, f"the kernel on {n_cores()} CPU cores, by {find_compiler().version}"
    except MachineError as error:
        return False, str(error)


def available() -> list[Availability]:
    """What can run on this computer, in the order of `MACHINES`.

    >>> [machine.name for machine in available() if machine.ok][-2:]
    ['interpreter', 'torch']
    """
    return [
        Availability("cuda", *_cuda()),
        Availability("host", *_host()),
        Availability("interpreter", True, "the tasks in NumPy, one at a time: exact"),
        Availability("torch", True, "the reference model: no plan, no kernel"),
    ]


def resolve(name: str) -> str:
    """The machine that `name` means here; "auto" is the first of cuda, host, interpreter that runs.

    Raises:
        MachineError: unknown name, or a machine that cannot run here.
    """
    if name not in ("auto", *MACHINES):
        raise MachineError(
            f"machine: {name!r} is unknown; it is one of auto, {', '.join(MACHINES)}"
        )
    for machine, check in (("cuda", _cuda), ("host", _host)):
        if name not in ("auto", machine):
            continue
        ok, reason = check()
        if ok:
            return machine
        if name == machine:
            raise MachineError(
                f"machine: {name!r} cannot run here: {reason}; 'auto' takes one that can"
            )
    return "interpreter" if name == "auto" else name


def n_cores() -> int:
    """CPU cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def default_n_sm(name: str) -> int:
    """SMs to plan for on a machine: all of a GPU, up to four cores of a CPU, else one."""
    if name == "cuda":
        from mkref.machine.cuda import device_sms

        return device_sms()
    return min(n_cores(), MAX_HOST_SMS) if name == "host" else 1


def create(
    name: str = "auto", *, n_sm: int | None = None, trace: bool = False, **options: Any
) -> Machine:
    """A machine, ready for `load`.

    Args:
        name: "auto" or one of `MACHINES`.
        n_sm: SMs of the plan that it will be given; refused here if it has fewer.
        trace: take time stamps of every task.
        options: of the machine: `ring` (cuda, host), `workers` and `seed` (host), `order`
            (interpreter), `device`, `numerics` and `dtype` (torch).

    Raises:
        MachineError: unknown, cannot run here, has too few SMs, or cannot be traced.
    """
    name = resolve(name)
    if trace and name not in TRACED:
        raise MachineError(
            f"trace: machine {name!r} takes no time stamps; those that do: {', '.join(TRACED)}"
        )
    if name == "cuda":
        from mkref.machine.cuda import CudaMachine, device_sms

        if n_sm is not None and n_sm > device_sms():
            raise MachineError(
                f"n_sm: {n_sm} SMs, but this GPU has {device_sms()}, and all blocks of the kernel "
                "must be resident at once"
            )
        return CudaMachine(trace=trace, **options)
    if name == "host":
        from mkref.machine.host import HostMachine

        return HostMachine(trace=trace, **options)
    if name == "interpreter":
        from mkref.machine.interpreter import InterpreterMachine

        return InterpreterMachine(trace=trace, **options)
    from mkref.machine.torch_machine import TorchMachine

    return TorchMachine(**options)
