"""Lesson 09: right answers that differ from the solution, and hints whatever the names are."""

from __future__ import annotations

import pytest

from mkref.lessons.check import exercise
from mkref.lessons.lesson_09 import counters_of
from mkref.lessons.lesson_09_trials import Names, producers
from mkref.plan import Op


@pytest.mark.parametrize("wait", [None, "router", "x"])
def test_gate_up_may_wait_for_x_its_router_or_nothing(wait: str | None) -> None:
    """The notebook says that all of these are right."""

    def answer(op: str, layer: int) -> Names:
        if op != "GATE_UP":
            return counters_of(op, layer)
        source = wait if layer else "x"
        return source and f"{source}{layer}", f"h{layer}"

    results, _ = exercise("09.1").judge(answer)
    assert all(not wrong for _, wrong in results)


def test_hints_do_not_depend_on_names() -> None:
    """A known mistake under other names gets the same hint."""
    task = exercise("09.1")
    for number in range(task.n_mistakes):
        wrong, says = task.mistake(number)
        if says.startswith("DOWN makes the x"):
            continue  # its message has the name that nobody signals

        def renamed(op: str, layer: int, wrong=wrong) -> Names:  # type: ignore[no-untyped-def]
            wait, signal = wrong(op, layer)
            return wait and f"my_{wait}", signal and f"my_{signal}"

        assert task.judge(renamed)[1] == says


def test_what_is_found_on_the_own_sm() -> None:
    """DOWN finds the rows of O_PROJ there, and h of all SMs not."""
    assert (Op.O_PROJ, 2) in producers(Op.DOWN, 2)
    assert producers(Op.DOWN, 2, own=False) == {(Op.GATE_UP, 2), (Op.ROUTER, 2)}
