"""Simulate a step: put SMs, memory and counters together, let time go by, keep what happened.

    record = simulate(plan, situation)          # one step in the middle of a long launch
    record.ms, record.trace

What it does not do: say anything about tokens.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from mkref.errors import RequestError
from mkref.machine.source import Ring, build_rows, ring_for
from mkref.plan.task import Op
from mkref.simulate.agenda import Agenda
from mkref.simulate.consumers import Consumers
from mkref.simulate.core import Core
from mkref.simulate.costs import H200, Costs
from mkref.simulate.counters import Counters
from mkref.simulate.loader import Loader
from mkref.simulate.memory import Memory
from mkref.simulate.program import Part, Program, assemble
from mkref.simulate.record import make_trace
from mkref.simulate.switches import Switches
from mkref.simulate.warps import Helper, Waiter
from mkref.simulate.work import Shapes

if TYPE_CHECKING:
    from mkref.plan.build import Plan
    from mkref.simulate.situation import Situation
    from mkref.trace.events import Trace

__all__ = ["SHARED_BYTES", "Simulated", "end_of", "simulate", "simulate_parts"]

SHARED_BYTES = 232448
"""Shared memory that one block of an H200 can have: 227 KB (CUDA programming guide, 9.0)."""
DEFAULT = Switches()
LAST_OPS = (Op.HEAD, Op.SAMPLE)


@dataclass(frozen=True)
class Simulated:
    """What came out.

    Attributes:
        ms: of the step, from one step's end to the next, or with what the host does.
        kernel_ms: of the step inside of its launches.
        n_launches: of the step; 0 for a step in the middle of one.
        n_copies: that were asked for.
        trace: every task, as a recorded trace has them; its label is "simulated".
    """

    ms: float
    kernel_ms: float
    n_launches: int
    n_copies: int
    trace: Trace


def simulate(
    plan: Plan,
    situation: Situation,
    *,
    costs: Costs = H200,
    switches: Switches = DEFAULT,
    alone: bool = False,
    stages_of: Sequence[int] = (),
    provenance: Mapping[str, str] | None = None,
) -> Simulated:
    """One step in one launch.

    Args:
        plan: who does what.
        situation: rows, positions, experts that were hit.
        costs: of the GPU.
        switches: of the kernel.
        alone: the launch is this step only, begun by the host with empty rings; else the step is
            one of many in a launch.
        stages_of: SMs whose stages are wanted in the record too.
        provenance: more short texts for the record.

    Raises:
        RequestError: more rows than the plan has room for, or other layers.
    """
    parts = [Part(plan)]
    if not alone:
        parts.insert(0, Part(end_of(plan), shown=False))
    return simulate_parts(
        parts, situation, costs=costs, switches=switches, alone=alone, stages_of=stages_of,
        provenance=provenance,
    )  # fmt: skip


def simulate_parts(
    parts: Sequence[Part],
    situation: Situation,
    *,
    costs: Costs = H200,
    switches: Switches = DEFAULT,
    alone: bool = True,
    stages_of: Sequence[int] = (),
    provenance: Mapping[str, str] | None = None,
) -> Simulated:
    """One step in several launches; arguments as in `simulate`."""
    plan = parts[-1].plan
    _check(plan, situation)
    ring = switches.ring or ring_for(plan.config, SHARED_BYTES, build_rows(situation.rows))
    shapes = Shapes(plan.config, plan.rows, ring, situation, costs, switches)
    program = assemble(parts, shapes, switches)
    cores = _run(program, ring, situation.rows, costs, switches, stages_of)
    _check_ended(cores)
    shown = [work for core in cores for work in core.works if work.shown]
    hidden = [work.end for core in cores for work in core.works if not work.shown]
    kernel_ms = (max(work.end for work in shown) - max(hidden, default=0.0)) / 1e6
    trace = make_trace(
        plan, cores, ring, stages_of, {**_texts(plan, situation), **(provenance or {})}
    )
    return Simulated(
        ms=kernel_ms + alone * costs.host / 1e6,
        kernel_ms=kernel_ms,
        n_launches=len(program.follows) if alone else 0,
        n_copies=sum(core.issued for core in cores),
        trace=trace,
    )


def _check(plan: Plan, situation: Situation) -> None:
    if situation.rows > plan.rows or len(situation.experts) != plan.config.num_hidden_layers:
        raise RequestError(
            f"simulate: {situation.rows} rows and experts of {len(situation.experts)} layers; the "
            f"plan is for up to {plan.rows} rows and {plan.config.num_hidden_layers} layers"
        )


def end_of(plan: Plan) -> Plan:
    """The tasks with which a step ends; what they wait for is there."""
    return replace(
        plan, tasks=tuple(tuple(t for t in tasks if t.op in LAST_OPS) for tasks in plan.tasks)
    )


def _run(
    program: Program, ring: Ring, rows: int, costs: Costs, switches: Switches,
    stages_of: Sequence[int],
) -> list[Core]:  # fmt: skip
    """All SMs after everything has happened."""
    counters = Counters(program.n_counters, program.arrivals, program.may_miss(switches.may_miss))
    memory = Memory(costs, len(program.works), copies=switches.copies, seed=switches.seed)
    agenda = Agenda()
    most = switches.most_in_flight(rows, ring.stages)
    cores = []
    for sm, works in enumerate(program.works):
        core = Core(works, ring.stages, costs, counters, program, agenda, memory)
        Helper(core, rows)
        Waiter(core)
        Consumers(core)
        Loader(sm, core, memory, agenda, switches, most)
        if sm in stages_of:
            core.stamps = []
        core.start()
        cores.append(core)
    agenda.run(counters)
    return cores


def _check_ended(cores: Sequence[Core]) -> None:
    """A plan that `mkref.plan.verify` accepts comes to its end."""
    for sm, core in enumerate(cores):
        if core.turn < len(core.turns):
            task = core.turns[core.turn].task
            raise RequestError(
                f"simulate: SM {sm} waits for ever for {Op(task.op).name} of layer {task.layer}; "
                "the plan has a deadlock, or the ring is too short for a chunk of attention"
            )


def _texts(plan: Plan, situation: Situation) -> dict[str, str]:
    positions = sorted({p + 1 for p in situation.positions})
    context = f"{positions[0]:,}" if len(positions) == 1 else f"{positions[0]:,}-{positions[-1]:,}"
    return {
        "label": "simulated",
        "machine": f"model of an H200 with {plan.n_sm} SMs, batch {situation.rows}, "
        f"{context} tokens of context",
        "batch": str(situation.rows),
        "context": context,
    }
