"""Whole decode steps in the interpreter: against the reference; the same bits in every order,
batch and launch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import pytest
import torch

from mkref.errors import MachineError, PlanError
from mkref.machine.interpreter import InterpreterMachine
from mkref.plan import NO_COUNTER, Plan, verify
from mkref.plan.interpret_ops import NO_TOKEN
from mkref.reference.model import Reference
from mkref.reference.sampling import sample
from tests.decode import drive
from tests.steps import (
    REQUESTS,
    Outcome,
    Request,
    feed,
    fresh,
    model,
    plan_for,
    some_steps,
    two_steps,
)

if TYPE_CHECKING:
    from mkref.weights.packed import PackedWeights

# Against the reference


@pytest.mark.parametrize(
    ("seed", "changes"),
    [
        (1, {"sliding_window": 20}),
        (2, {"norm_topk_prob": True, "first_k_dense_replace": 0, "logit_scale": 0.25}),
        (3, {"num_attention_heads": 3, "num_key_value_heads": 3, "head_dim": 64}),
        (4, {"num_attention_heads": 8, "num_key_value_heads": 1, "head_dim": 128}),
    ],
)
def test_logits_are_those_of_the_reference(seed: int, changes: dict[str, object]) -> None:
    """Token by token through the paged cache against all at once in PyTorch, rounded alike.

    Sums are ordered differently there, so now and then a value rounds to the neighbouring bfloat16:
    2^-8 of one activation of many. Logits have a standard deviation of 2 (times the scale). Where
    the router's choice hangs on less than that, the two may take different experts.
    """
    weights = model(seed, **changes)
    k = weights.config.num_experts_per_tok
    prompt = np.random.default_rng(seed).integers(0, weights.config.vocab_size, 72).tolist()
    run = drive(InterpreterMachine(), weights, [prompt], len(prompt), n_sm=3, max_context=128)
    margins = []

    def probe(name: str, value: torch.Tensor) -> None:
        if name.endswith("router"):
            ordered = value.sort(dim=-1, descending=True).values
            margins.append(ordered[:, k - 1] - ordered[:, k])

    reference = Reference(weights.config, weights, numerics="contract", probe=probe)
    expected = reference(torch.tensor(prompt)).numpy()
    tie = (torch.stack(margins).amin(0) < 2e-4).numpy()
    error = np.abs(expected - run.logits[:, 0]).max(axis=1)
    assert np.all(error[~tie] < 0.03 * weights.config.logit_scale)
    assert tie.sum() <= 2


# The same bits


def test_bits_depend_on_the_request_alone() -> None:
    """SM counts, orders, neighbours, the place in the batch, its size and pages change nothing."""
    weights = model()
    alone = [two_steps(weights, [r], plan_for(weights, 1)) for r in REQUESTS]
    for n_sm, order, names, rows in (
        (1, None, [0, 1, 2, 3, 4, 5], 8),
        (2, 1, [5, 4, 3, 2, 1, 0], 16),
        (4, None, [3, 0, 5, 1], 8),
        (7, 3, [4, 4, 0, 1, 2, 5, 3, 3], 8),
        (5, 4, [4, 1, 0, 5, 2, 5, 3, 3, 1, 0, 2, 4, 5], 16),
        (3, None, 5 * [5, 3, 0, 1, 4, 2], 32),
        (40, 5, [2, 4], 32),
    ):
        plan = plan_for(weights, n_sm, rows)
        requests = [REQUESTS[i] for i in names]
        got = two_steps(weights, requests, plan, order=order, page_seed=n_sm)
        for row, i in enumerate(names):
            assert alone[i].bits[0] == got.bits[row], (n_sm, i)
            assert alone[i].tokens[0] == got.tokens[row], (n_sm, i)


@pytest.mark.parametrize(
    "changes",
    [
        {"num_experts": 40, "num_experts_per_tok": 8, "norm_topk_prob": True},
        {"first_k_dense_replace": 5, "hidden_size": 48, "head_dim": 64},
        {"num_hidden_layers": 1, "first_k_dense_replace": 0, "num_key_value_heads": 1},
    ],
)
def test_bits_are_the_same_for_other_geometries(changes: dict[str, object]) -> None:
    """A random order on seven SMs against one SM."""
    weights = model(**changes)
    one = two_steps(weights, REQUESTS, plan_for(weights, 1))
    seven = two_steps(weights, REQUESTS, plan_for(weights, 7), order=0, page_seed=9)
    assert one == seven


def test_steps_of_one_launch_are_those_of_many() -> None:
    """Each SM feeds what it sampled itself, at positions that move on; over the end of a page."""
    weights = model()
    plan = plan_for(weights, 3)
    many = some_steps(feed(weights, REQUESTS, plan), 6, 5, one_launch=False)
    interpreter = feed(weights, REQUESTS, plan, order=2)
    b = interpreter.buffers
    b["progress"][0] = 0
    assert many == some_steps(interpreter, 6, 5, one_launch=True)
    assert [5, 0] == b["progress"].tolist()
    assert [request.position for request in REQUESTS] == b["positions"][:6].tolist()
    last = [tokens[-1] for tokens in many.tokens]
    assert 3 * [[*last, NO_TOKEN, NO_TOKEN]] == interpreter.sampled.tolist()


def test_distinct_experts_are_counted_once_per_layer_and_step() -> None:
    """By one SM for all: at least those of one row, at most those of every row; dense is one."""
    weights = model()
    one = feed(weights, REQUESTS[:1], plan_for(weights, 3))
    some_steps(one, 1, 3, one_launch=True)
    assert [3 * 1, *4 * [3 * 3]] == one.buffers["active_experts"].tolist()
    six = feed(weights, REQUESTS, plan_for(weights, 3), order=0)
    six.run(6, 0)
    words = six.buffers["router_logits"][:6]  # of the last layer
    logits = words.astype(np.uint32).view(np.float32)
    distinct = np.unique(np.argsort(-logits, axis=1, kind="stable")[:, :3])
    assert [1, len(distinct)] == six.buffers["active_experts"][[0, 4]].tolist()
    assert 3 < len(distinct) <= 12


def test_a_launch_ends_by_stop_ids_or_by_a_wish_of_the_host() -> None:
    """As the buffers say after a step; the wish is seen in the step in which it is there."""
    weights = model(num_hidden_layers=1)
    plan = plan_for(weights, 2)
    tokens = some_steps(feed(weights, REQUESTS, plan), 6, 3, one_launch=True).tokens
    interpreter = feed(weights, REQUESTS, plan)
    b = interpreter.buffers
    b["stop_ids"][2, 5] = tokens[2][1]
    b["stop_ids"][4, 0] = tokens[4][2]
    first = [
        list(row).index(stop)
        for row, stop in ((tokens[2], tokens[2][1]), (tokens[4], tokens[4][2]))
    ]
    for step in range(3):
        interpreter.run(6, step, step)
        stopped = sum(step >= at for at in first)
        assert [False, stopped >= 1, stopped >= 2, False] == [
            interpreter.ends(6, step, n) for n in range(4)
        ]
    interpreter = fresh(plan, weights)
    b = interpreter.buffers
    interpreter.run(1, 0, 0)
    b["progress"][1] = 1
    assert not interpreter.ends(1, 0, 0)
    interpreter.run(1, 1, 1)
    assert interpreter.ends(1, 1, 0)


def test_tokens_are_sampled_as_the_reference_samples() -> None:
    """From the interpreter's own logits, with each request's temperature, seed and position."""
    weights = model()
    outcome = two_steps(weights, REQUESTS, plan_for(weights, 3))
    vocab = weights.config.vocab_size
    for request, tokens, bits in zip(REQUESTS, outcome.tokens, outcome.bits, strict=True):
        logits = np.frombuffer(bits, dtype=np.float32).reshape(2, vocab)
        for step, token in enumerate(tokens):
            settings = (request.temperature, request.seed, request.position + step)
            assert sample(logits[step], *settings) == token


def test_a_saved_plan_computes_the_same() -> None:
    """The words are the plan."""
    weights = model()
    plan = plan_for(weights, 4)
    again = Plan.from_dict(plan.to_dict())
    assert two_steps(weights, REQUESTS, plan) == two_steps(weights, REQUESTS, again)


def without_wait(plan: Plan, sm: int, at: int) -> Plan:
    """The plan in which one task waits for nothing."""
    tasks = [*plan.tasks[sm]]
    tasks[at] = replace(tasks[at], wait=NO_COUNTER, wait_count=0)
    lists = [*plan.tasks]
    lists[sm] = tuple(tasks)
    return replace(plan, tasks=tuple(lists))


def test_what_the_verifier_lets_pass_is_right_in_every_order() -> None:
    """Each wait is dropped in turn. Accepted: the same bits in any order. Refused: not always."""
    weights = model(num_hidden_layers=2)
    plan = plan_for(weights, 3)
    requests = [REQUESTS[0], REQUESTS[4]]
    expected = two_steps(weights, requests, plan)
    accepted, harmed = 0, 0
    for sm, at, task in plan:
        if task.wait == NO_COUNTER:
            continue
        damaged = without_wait(plan, sm, at)
        try:
            verify(damaged)
        except PlanError:
            if harmed < 3:
                harmed += any(
                    differs(weights, requests, damaged, expected, order) for order in (None, 1, 2)
                )
            continue
        accepted += 1
        for order in (None, 1):
            assert expected == two_steps(weights, requests, damaged, order=order), (sm, at)
    assert accepted >= 2 * 3  # the waits of GATE_UP and DOWN are implied by others
    assert harmed == 3


def differs(
    weights: PackedWeights,
    requests: Sequence[Request],
    plan: Plan,
    expected: Outcome,
    order: int | None,
) -> bool:
    """Does a plan with a missing wait compute something else, or stumble over poison?"""
    try:
        return two_steps(weights, requests, plan, order=order) != expected
    except (MachineError, PlanError):
        return True
