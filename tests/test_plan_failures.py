"""What goes wrong in the interpreter is an error that names the place; then it goes on."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest

from mkref.errors import HangError, MachineError, PlanError
from mkref.machine.base import StepInputs
from mkref.machine.interpreter import InterpreterMachine
from mkref.plan import Counter, Flag, Interpreter, Op, Task
from mkref.plan.interpret import NOT_FINITE, WAIT_COUNTER, WAIT_ROUTE
from tests.plans import change, find
from tests.steps import fresh, model, plan_for


@pytest.mark.parametrize("order", [None, 1])
def test_a_wait_that_never_ends_is_reported(order: int | None) -> None:
    """PlanError in words, `status` in numbers, HangError from the machine."""
    weights = model()
    interpreter = fresh(change(plan_for(weights, 3), Op.MERGE, 2, 1, wait_count=4), weights)
    # SM 0 waits for SM 1 in turn, and it is asked first.
    with pytest.raises(PlanError, match=r"nobody can go on: SM 0, task \d+ \(O_PROJ of layer 2\)"):
        interpreter.run(1, 0)

    plan = change(plan_for(weights, 1), Op.MERGE, 2, 0, wait_count=4)
    at = find(plan, Op.MERGE, 2, 0)[0]
    counter = [c.name for c in plan.counters].index("attention2")
    interpreter = fresh(plan, weights, order=order)
    message = (
        rf"nobody can go on: SM 0, task {at} \(MERGE of layer 2\) waits for counter "
        r"'attention2': it has 1, wants 4"
    )
    with pytest.raises(PlanError, match=message):
        interpreter.run(1, 0)
    status = [WAIT_COUNTER, 0, at, counter, 1, 4]
    assert status == interpreter.buffers["status"][:6].tolist()

    machine = InterpreterMachine(order=order)
    machine.load(plan, weights, 64)
    inputs = StepInputs(np.array([5]), np.array([0]), np.zeros((2, 1, 1), np.int32))
    with pytest.raises(HangError, match="MERGE of layer 2 waits for counter attention2") as caught:
        machine.step(inputs)
    error = caught.value
    got = [error.code, error.sm, error.task, error.counter, error.have, error.want]
    assert status == got


def test_counters_go_on_from_step_to_step() -> None:
    """They are never reset: the second step wants twice as many; they may wrap around 2^31."""
    weights = model(num_hidden_layers=2)
    plan = plan_for(weights, 2)
    interpreter = fresh(plan, weights)
    interpreter.run(1, 0)
    first = interpreter.buffers["logits"][0].tobytes()
    interpreter.run(1, 1)
    targets = [2 * counter.target for counter in plan.counters]
    assert targets == interpreter.buffers["counters"][:, 0].tolist()
    # 2^30 steps of two arrivals: the counter stands at -2^31.
    far = 1 << 30
    for index, counter in enumerate(plan.counters):
        value = (counter.target * far + (1 << 31)) % (1 << 32) - (1 << 31)
        interpreter.buffers["counters"][index, 0] = value
    interpreter.run(1, far)
    assert first == interpreter.buffers["logits"][0].tobytes()
    with pytest.raises(PlanError, match="nobody can go on"):
        interpreter.run(1, far + 2)


def test_experts_that_are_never_released_stop_the_loader() -> None:
    """Without Flag.RELEASE the next layer's experts have no place."""
    weights = model()
    plan = change(plan_for(weights, 1), Op.DOWN, 2, 0, flags=0)
    interpreter = fresh(plan, weights)
    with pytest.raises(PlanError, match="GATE_UP of layer 3.* layer 2 never released it"):
        interpreter.run(1, 0)
    assert [WAIT_ROUTE, 0] == interpreter.buffers["status"][:2].tolist()
    assert 3 == interpreter.buffers["status"][3]


def test_experts_that_are_released_too_early_are_missed() -> None:
    """The second half of GATE_UP after the first gave them back."""
    weights = model()
    plan = change(plan_for(weights, 1), Op.GATE_UP, 2, 0, flags=Flag.RELEASE)
    with pytest.raises(PlanError, match="GATE_UP of layer 2.* after it released them"):
        fresh(plan, weights).run(1, 0)


def test_an_unknown_opcode_is_refused() -> None:
    """When the words are decoded, not in the middle of a step."""
    weights = model()
    plan = plan_for(weights, 1)
    at = find(plan, Op.HEAD, 5, 0)[0]
    plan = change(plan, Op.HEAD, 5, 0, op=77)
    with pytest.raises(PlanError, match=f"record {at} has opcode 77; 0..9 exist"):
        Interpreter.of(plan, 64)


def test_logits_that_are_not_finite_are_an_error() -> None:
    """The step ends, `status` names row and token, the machine raises, and can go on."""
    weights = model()
    weights.gammas[-1, 5] = float("nan")
    plan = plan_for(weights, 2)
    interpreter = fresh(plan, weights)
    with pytest.raises(MachineError, match="row 0 is not finite;"):
        interpreter.run(1, 0)
    status = interpreter.buffers["status"]
    assert [NOT_FINITE, 0, 0] == [status[0], status[3], status[4]]
    machine = InterpreterMachine()
    machine.load(plan, weights, 64)
    inputs = StepInputs(np.array([5]), np.array([0]), np.zeros((2, 1, 1), np.int32))
    for _ in range(2):
        with pytest.raises(MachineError, match="row 0 is not finite"):
            machine.step(inputs)
    gammas = machine.read("gammas")
    gammas[-1, 5] = 0x3F80
    machine.write("gammas", gammas)
    assert 0 <= machine.step(inputs)[0] < weights.config.vocab_size


def test_the_words_in_the_buffer_are_what_runs() -> None:
    """Not the plan's Python objects: a vocabulary cut short in memory is cut short."""
    weights = model(num_hidden_layers=1)
    interpreter = fresh(plan_for(weights, 1), weights)
    words = interpreter.buffers["tasks"]
    head = int(np.flatnonzero(words[:, 0] == Op.HEAD)[0])
    task = Task.from_words(words[head])
    words[head] = replace(task, count=2).words()
    interpreter.decode()
    interpreter.run(1, 0)
    logits = interpreter.buffers["logits"][0]
    assert np.isfinite(logits[:32]).all()
    assert np.isnan(logits[32:]).all()
    assert interpreter.buffers["tokens_out"][0, 0] == logits[:32].argmax()


def test_a_plan_without_tasks_is_over_at_once() -> None:
    """Nothing to do is no hang."""
    weights = model(num_hidden_layers=1)
    plan = replace(plan_for(weights, 1), tasks=((), ()), counters=(Counter("x", 0),))
    Interpreter.of(plan, 64).run(1, 0)


def test_time_stamps_follow_the_order_of_the_tasks() -> None:
    """Taken, ready, done; per SM one task after the other; none without `trace`."""
    weights = model(num_hidden_layers=2)
    plan = plan_for(weights, 3)
    machine = InterpreterMachine(trace=True)
    machine.load(plan, weights, 64)
    inputs = StepInputs(np.array([5]), np.array([0]), np.zeros((2, 1, 1), np.int32))
    machine.step(inputs)
    stamps, offsets = machine.stamps(), plan.offsets()
    assert stamps is not None
    assert stamps.shape == (plan.n_tasks, 4)
    assert np.all(stamps[:, 0] <= stamps[:, 1])
    assert np.all(stamps[:, 1] < stamps[:, 2])
    for begin, end in pairwise(offsets):
        assert np.all(stamps[begin : end - 1, 2] <= stamps[begin + 1 : end, 0])
    assert InterpreterMachine().stamps() is None
