"""The plans of the ladder: proved like the real one, and the same bits in every form."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest

from mkref.errors import MachineError
from mkref.machine.base import KernelMachine, StepInputs
from mkref.machine.host import HostMachine
from mkref.measure.launches import SplitHost, changed_kernel
from mkref.measure.pages import fill_kv, page_table
from mkref.measure.rungs import FEW, FOUR, ORDER, SINGLE, barriers, plain, split
from mkref.plan import NO_COUNTER, Interpreter, Op, Plan, Task, build_plan, verify
from tests.decode import small_model
from tests.plans import plan_of
from tests.steps import REQUESTS, feed, model, plan_for

GROUPS = {"single": SINGLE, "four": FOUR, "few": FEW}
N_SMS = (1, 3, 7, 45)
Groups = Sequence[Sequence[Op]]


def with_real_index(plan: Plan, real: Plan) -> Plan:
    """The word that the shares of GATE_UP leave out in `plain`, and that `verify` insists on."""
    index = {t.layer: t.index for _, _, t in real if t.op == Op.GATE_UP}

    def put(task: Task) -> Task:
        return replace(task, index=index[task.layer]) if task.op == Op.GATE_UP else task

    return replace(plan, tasks=tuple(tuple(map(put, tasks)) for tasks in plan.tasks))


@pytest.mark.parametrize("n_sm", N_SMS)
def test_plain_and_barriers_are_proved(n_sm: int) -> None:
    """No hang, no race, everything written once: as for the real plan."""
    real = plan_of(n_sm)
    for plan in (plain(real), barriers(plain(real))):
        verify(with_real_index(plan, real), 512)


def test_plain_order() -> None:
    """Every SM goes through the operations of a layer in the order of the model."""
    for tasks in plain(plan_of(3)).tasks:
        order = [(task.layer, ORDER.index(Op(task.op))) for task in tasks]
        assert sorted(order) == order


def test_barriers_hold_back_everybody() -> None:
    """Each task waits for all tasks of the operation before it, on all SMs."""
    plan = barriers(plain(plan_of(3)))
    assert len(plan.counters) == 2 + 5 * 7 - 1  # EMBED, HEAD, and layers; the dense one: no router
    for _, _, task in plan:
        if task.op == Op.EMBED:
            assert task.wait == NO_COUNTER
            continue
        before = [t for _, _, t in plan if t.signal == task.wait]
        assert len(before) == task.wait_count == plan.counters[task.wait].target
        assert len({(t.op, t.layer) for t in before}) == 1
        assert task.wait == task.signal - 1 or task.op == Op.SAMPLE


@pytest.mark.parametrize("name", GROUPS)
def test_split_keeps_every_task(name: str) -> None:
    """Each task of the plan is in one launch, on its SM; a launch ends with a consumer's task."""
    plan = plain(plan_of(3))
    launches = split(plan, GROUPS[name])
    words = ("op", "layer", "first", "count")
    for sm, tasks in enumerate(plan.tasks):
        parts = [t for launch in launches for t in launch.tasks[sm] if t.count]
        have, want = ([tuple(getattr(t, w) for w in words) for t in ts] for ts in (parts, tasks))
        assert sorted(want) == sorted(have)
        for launch in launches:
            assert not launch.tasks[sm] or launch.tasks[sm][-1].op != Op.MERGE


@pytest.mark.parametrize("name", GROUPS)
def test_split_waits_for_its_own_launch_only(name: str) -> None:
    """What another launch signals is there already; within a launch all arrivals are awaited."""
    for launch in split(plain(plan_of(3)), GROUPS[name]):
        signals = [t.signal for _, _, t in launch if t.signal != NO_COUNTER]
        waits = {(t.wait, t.wait_count) for _, _, t in launch} - {(NO_COUNTER, 0)}
        assert waits == {(c, signals.count(c)) for c in signals}


def test_one_launch_per_operation_needs_no_counters() -> None:
    """Then a launch's end is all the order there is."""
    for launch in split(plain(plan_of(3)), SINGLE):
        for _, _, task in launch:
            assert (NO_COUNTER,) * 3 == (task.wait, task.route_wait, task.signal)


def interpret(launches: Sequence[Plan], whole: Interpreter, rows: int) -> tuple[bytes, bytes]:
    """One step of several launches on the buffers of an interpreter; bits of logits, and tokens."""
    for launch in launches:
        own = {"tasks": launch.words(), "task_offsets": launch.offsets()}
        names = [counter.name for counter in launch.counters]
        Interpreter(whole.config, {**whole.buffers, **own}, names).run(rows, 0)
    b = whole.buffers
    return b["logits"][:rows].tobytes(), b["tokens_out"][0, :rows].tobytes()


def test_interpreter_has_the_same_bits() -> None:
    """Six rows of different lengths and temperatures, 4 SMs."""
    weights, rows = model(), len(REQUESTS)
    real = plan_for(weights, 4)
    want = interpret([real], feed(weights, REQUESTS, real), rows)
    flat = plain(real)
    forms = [[flat], [barriers(flat)], *(split(flat, groups) for groups in GROUPS.values())]
    for launches in forms:
        assert want == interpret(launches, feed(weights, REQUESTS, launches[0]), rows)


def three_steps(machine: KernelMachine, plan: Plan, table: np.ndarray) -> list[bytes]:
    """Tokens and logits of three steps with lengths that the table has room for."""
    weights = small_model()[1]
    machine.timeout_s = 20
    machine.load(plan, weights, 300)
    fill_kv(machine)
    tokens, at = np.array([5, 77, 300], np.int32), np.array([190, 130, 290], np.int32)
    out = []
    for step in range(3):
        inputs = StepInputs(tokens, (at + step).astype(np.int32), table)
        tokens = machine.step(inputs)
        out += [tokens.tobytes(), machine.logits(3).tobytes()]
    machine.close()
    return out


def test_kernel_has_the_same_bits() -> None:
    """The kernel itself on the CPU: one launch in three orders, many launches."""
    config, _ = small_model()
    table, (full, sliding) = page_table(config, [200, 140, 300])
    real = build_plan(config, 3, full_pages=full, sliding_pages=sliding)
    flat = plain(real)
    want = three_steps(HostMachine(), real, table)
    for plan in (flat, barriers(flat)):
        assert want == three_steps(HostMachine(), plan, table)
    for groups in GROUPS.values():
        assert want == three_steps(SplitHost(split(flat, groups)), flat, table)
    with changed_kernel({}, {"run_ahead": False}):
        for plan in (real, flat, barriers(flat)):
            assert want == three_steps(HostMachine(), plan, table)
    with changed_kernel({}, {"dependent_launch": True}):
        assert want == three_steps(SplitHost(split(flat, FEW)), flat, table)


def test_several_steps_of_several_launches() -> None:
    """A step that is many launches cannot be one of many steps in a launch."""
    config, weights = small_model()
    table, (full, sliding) = page_table(config, [100])
    plan = plain(build_plan(config, 2, full_pages=full, sliding_pages=sliding))
    machine = SplitHost(split(plan, SINGLE))
    machine.load(plan, weights, 100)
    inputs = StepInputs(np.array([5], np.int32), np.array([0], np.int32), table)
    with pytest.raises(MachineError, match="n_steps: a step of several launches"):
        machine.decode(inputs, 2)
    machine.close()


def test_changed_kernel_must_have_the_text() -> None:
    """A change that does not apply is an error, and the source is itself again afterwards."""
    _, weights = small_model()
    plan = plan_of(1)
    changed = HostMachine()
    with changed_kernel({"no such text": ""}, {}):
        changed.load(plan, weights, 100)
    with pytest.raises(MachineError, match="the kernel has no text 'no such text'"):
        changed.build_for(1)
    machine = HostMachine()
    machine.load(plan, weights, 100)
    machine.build_for(1)
    machine.close()
