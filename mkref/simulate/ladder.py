"""The rungs of the ladder, simulated: from a launch per operation to many steps in one launch.

They are the rungs of `mkref.measure.ladder`: the same plans, groups of operations and switches. A
rung that changes the kernel's text is left out, since its registers spill and nothing here knows
what that costs.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from mkref.measure.ladder import RUNGS, Rung
from mkref.measure.rungs import split
from mkref.simulate.costs import H200, Costs
from mkref.simulate.program import Part
from mkref.simulate.run import DEFAULT, Simulated, simulate, simulate_parts

if TYPE_CHECKING:
    from mkref.plan.build import Plan
    from mkref.simulate.situation import Situation
    from mkref.simulate.switches import Switches

__all__ = ["SIMULATED", "simulate_ladder", "simulate_rung"]

SIMULATED = tuple(rung for rung in RUNGS if not rung.changes)
"""From the lowest to the highest."""


def simulate_rung(
    rung: Rung,
    plan: Plan,
    situation: Situation,
    *,
    costs: Costs = H200,
    switches: Switches = DEFAULT,
    **options: Any,
) -> Simulated:
    """One step on a rung.

    Args:
        rung: one of `SIMULATED`.
        plan: of the real order; the rung makes its own of it.
        situation: rows, positions, experts that were hit.
        costs: of the GPU.
        switches: of the kernel; the rung changes what it is about.
        options: as in `mkref.simulate.run.simulate`.
    """
    own = rung.plan(plan)
    switches = replace(
        switches,
        ring=rung.ring or switches.ring,
        run_ahead=rung.switches.get("run_ahead", switches.run_ahead),
    )
    options.setdefault("provenance", {"rung": f"{rung.letter} {rung.name}"})
    if rung.steps > 1:
        return simulate(own, situation, costs=costs, switches=switches, **options)
    launches = [own] if rung.groups is None else split(own, rung.groups)
    parts = [Part(each, "same" if rung.groups is None else rung.mode) for each in launches]
    return simulate_parts(parts, situation, costs=costs, switches=switches, **options)


def simulate_ladder(
    plan: Plan, situation: Situation, *, costs: Costs = H200, rungs: Iterable[Rung] = SIMULATED
) -> Iterator[tuple[Rung, Simulated]]:
    """All rungs, from the lowest to the highest; arguments as in `simulate_rung`."""
    for rung in rungs:
        yield rung, simulate_rung(rung, plan, situation, costs=costs)
