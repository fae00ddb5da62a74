"""Take the trace of a machine's last step: the stamps of its tasks, and of its ring if it has them.

What it does not do: run a step.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from mkref.errors import MachineError
from mkref.machine.base import KernelMachine
from mkref.trace.events import Trace
from mkref.trace.stages import RingShape
from mkref.weights.layout import TILE

if TYPE_CHECKING:
    from mkref.machine.base import Machine

__all__ = ["take_trace"]

TILE_BYTES = TILE * TILE * 2
STAGE_TRACE = "stage_trace"


def take_trace(machine: Machine, provenance: Mapping[str, str] | None = None) -> Trace:
    """The trace of the last step that `machine` has run.

    Args:
        machine: loaded with `trace=True`; it has run a step.
        provenance: as in `Trace`.

    Raises:
        MachineError: it takes no stamps, or has not run yet.
    """
    stamps = machine.stamps()
    if stamps is None:
        raise MachineError(f"trace: machine {machine.name!r} took no time stamps")
    stages, ring = None, ring_of(machine)
    if ring is not None and isinstance(machine, KernelMachine) and STAGE_TRACE in machine.table:
        stages = machine.read(STAGE_TRACE)
    return Trace.from_plan(machine.plan, stamps, provenance, stage_stamps=stages, ring=ring)


def ring_of(machine: Machine) -> RingShape | None:
    """Shape of the ring that the machine's kernel was built with; None if it has none."""
    ring = getattr(machine, "ring_in_use", None) or getattr(machine, "ring", None)
    return None if ring is None else RingShape(ring.stages, ring.stage_tiles * TILE_BYTES)
