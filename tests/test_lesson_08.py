"""Lesson 08: the model of a barrier whose counter is set back."""

from __future__ import annotations

import pytest

from mkref.lessons.lesson_08_figures import barrier_orders


@pytest.mark.parametrize(("blocks", "barriers"), [(1, 3), (2, 2), (4, 3)])
def test_counter_that_grows_is_right_in_every_order(blocks: int, barriers: int) -> None:
    """The barrier that exercise 08.1 asks for."""
    endings = barrier_orders(set_back=False, blocks=blocks, barriers=barriers, orders=100)
    assert endings == {"right": 100, "too early": 0, "for ever": 0}


def test_counter_that_is_set_back_goes_wrong_in_two_ways() -> None:
    """One block alone is safe; one barrier cannot be passed too early; two can."""
    assert barrier_orders(set_back=True, blocks=1, orders=50)["right"] == 50
    one = barrier_orders(set_back=True, barriers=1)
    assert one["too early"] == 0
    assert one["for ever"] > 0
    assert min(barrier_orders(set_back=True).values()) > 0
