"""Verifier: x is read before its counter, by tasks with Flag.EARLY in launches of few rows."""

from __future__ import annotations

from dataclasses import replace

import pytest

from mkref.errors import PlanError
from mkref.plan import NO_COUNTER, Flag, Op, verify
from tests.plans import change, counter, plan_of, recount


def test_an_early_reader_waits_for_who_announces_x() -> None:
    """The word beside the counter counts only the DOWN tasks."""
    plan = plan_of()
    damaged = recount(change(plan, Op.QKV, 2, 1, wait=counter(plan, "h1")))
    with pytest.raises(PlanError, match="QKV of layer 2.: waits for counter 'h1'; must be"):
        verify(damaged)


def test_who_has_no_rows_announces_nothing() -> None:
    """An arrival by a DOWN without rows has no announcement beside it, and would be waited for."""
    plan = plan_of(7)
    sm = next(sm for sm, _, t in plan if (t.op, t.layer) == (Op.DOWN, 1) and t.count == 0)
    damaged = recount(change(plan, Op.DOWN, 1, sm, signal=counter(plan, "out1")))
    with pytest.raises(PlanError, match="layer 2.: waits for counter 'out1'; must be"):
        verify(damaged)


def test_an_early_reader_knows_that_the_layer_before_is_over() -> None:
    """x says nothing about q. An SM without rows must wait for h, or it writes over q too soon."""
    plan = plan_of(7)
    verify(plan)
    sm = next(sm for sm, _, t in plan if (t.op, t.layer) == (Op.DOWN, 1) and t.count == 0)
    for op in (Op.O_PROJ, Op.DOWN):
        plan = change(plan, op, 1, sm, wait=NO_COUNTER)
    message = (
        rf"where the helper does MERGE and x is read early: SM {sm}, task \d+ \(\w+ of layer 2\): "
        r"(writes|looks at)"
    )
    with pytest.raises(PlanError, match=message):
        verify(recount(plan))


def test_without_the_flag_nobody_reads_early() -> None:
    """Then the counter is waited for in every launch, and the same plan is right."""
    plan = plan_of(7)
    sm = next(sm for sm, _, t in plan if (t.op, t.layer) == (Op.DOWN, 1) and t.count == 0)
    for op in (Op.O_PROJ, Op.DOWN):
        plan = change(plan, op, 1, sm, wait=NO_COUNTER)
    tasks = tuple(
        tuple(replace(t, flags=t.flags & ~Flag.EARLY) for t in tasks) for tasks in plan.tasks
    )
    verify(recount(replace(plan, tasks=tasks)))
