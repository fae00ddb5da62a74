"""Typical wrong answers of lesson 10, as functions, and what to say to somebody who made one."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

from mkref.lessons.exercise import Answer, Mistake
from mkref.plan.share import share

__all__ = ["BACK_FILL", "BESIDE"]

ORDER = ("ROUTER", "QKV", "ATTENTION", "GATE_UP.0", "MERGE", "GATE_UP.1", "O_PROJ", "DOWN")
"""A right order of an SM that has all tasks."""


def _edge(total: int, other: int, n_slots: int, slot: int) -> int:
    """The first granule of a slot if `total` makes up for `other`, however few there are."""
    return (total + other) * slot // n_slots - other * slot // n_slots


def _rounded_up(total: int, other: int, n_slots: int, slot: int) -> tuple[int, int]:
    each = -(-total // n_slots)
    return min(total, slot * each), min(total, (slot + 1) * each)


def _no_case(total: int, other: int, n_slots: int, slot: int) -> tuple[int, int]:
    return _edge(total, other, n_slots, slot), _edge(total, other, n_slots, slot + 1)


def _of_both(total: int, other: int, n_slots: int, slot: int) -> tuple[int, int]:
    return share(total + other, n_slots, slot)


def _of_both_unless_few(total: int, other: int, n_slots: int, slot: int) -> tuple[int, int]:
    return share(total + (other if total >= n_slots else 0), n_slots, slot)


def _backwards(total: int, other: int, n_slots: int, slot: int) -> tuple[int, int]:
    begin, end = share(total, n_slots, n_slots - 1 - slot)
    return total - end, total - begin


def _few_of_both(total: int, other: int, n_slots: int, slot: int) -> tuple[int, int]:
    few = total + other < n_slots
    return _no_case(total, 0 if few else other, n_slots, slot)


def _few_of_either(total: int, other: int, n_slots: int, slot: int) -> tuple[int, int]:
    few = total < n_slots or other < n_slots
    return _no_case(total, 0 if few else other, n_slots, slot)


def _one_too_few(total: int, other: int, n_slots: int, slot: int) -> tuple[int, int]:
    return _no_case(total, 0 if total < n_slots - 1 else other, n_slots, slot)


def _clamped(total: int, other: int, n_slots: int, slot: int) -> tuple[int, int]:
    begin, end = _no_case(total, other, n_slots, slot)
    return begin, max(begin, end)


def _clamped_at_the_edge_before(total: int, other: int, n_slots: int, slot: int) -> tuple[int, int]:
    edges = [*accumulate((_edge(total, other, n_slots, s) for s in range(n_slots + 1)), max)]
    return edges[slot], edges[slot + 1]


def _order(*order: str) -> Answer:
    return lambda names: sorted(names, key=order.index)


def _at_places(names: Sequence[str]) -> list[str]:
    """Right for eight names."""
    moved = list(names)
    first, second = moved.pop(5), moved.pop(5)
    moved.insert(3, first)
    moved.insert(5, second)
    return moved


def _by_number(names: Sequence[str]) -> list[str]:
    """The same."""
    return [names[i] for i in (0, 1, 2, 5, 3, 6, 4, 7)]


BESIDE = (
    Mistake(
        lambda total, other, n_slots, slot: share(total, n_slots, slot),
        "this divides the operation for itself. Whoever got one more of the other should get "
        "one less here.",
    ),
    Mistake(
        _no_case,
        "right as long as there are enough granules. A slot that already has one too many "
        "cannot give granules back: what if `total` is less than `n_slots`?",
    ),
    Mistake(
        _rounded_up,
        "this rounds up, so the last slots get little or nothing. Round the edges of the "
        "ranges, not their length.",
    ),
    Mistake(
        _of_both,
        "this is the range among the granules of both. How many of those before `slot` belong "
        "to the other operation?",
    ),
    Mistake(
        _backwards,
        "giving the long shares from the other end only helps if long and short shares lie at "
        "the ends. In `share` they are spread evenly.",
    ),
    Mistake(
        _of_both_unless_few,
        "the case of few granules is right. In the other one this is the range among the "
        "granules of both: take away those of the other operation that lie before it.",
    ),
    Mistake(
        _few_of_both,
        "this asks whether *both together* are fewer than the slots. The trap is a small "
        "`total`: it must make up for the other and has too little to do so.",
    ),
    Mistake(
        _few_of_either,
        "few granules of the *other* operation are no reason for a plain share: there are "
        "enough of `total` to make up for them.",
    ),
    Mistake(
        _one_too_few,
        "almost: with one granule less than slots it must be the plain share already.",
    ),
    Mistake(
        _clamped,
        "a range that would run backwards is made empty here, but the next one still begins "
        "before its end: a granule belongs to two slots. Decide by `total` alone, for all "
        "slots alike.",
    ),
    Mistake(
        _clamped_at_the_edge_before,
        "the ranges meet, but they are not the kernel's: with few granules it does not make "
        "up for anything, instead of as much as it can.",
    ),
)

BACK_FILL = (
    Mistake(
        lambda names: list(names),
        "this is the order of the model. Which tasks wait for neither attention nor merge?",
    ),
    Mistake(
        _order(
            *("ROUTER", "QKV", "ATTENTION", "GATE_UP.0", "GATE_UP.1", "MERGE", "O_PROJ"),
            "DOWN",
        ),
        "both halves hide the slowest attention, and nothing is left to hide the way from "
        "MERGE to O_PROJ.",
    ),
    Mistake(
        _order(
            *("ROUTER", "QKV", "ATTENTION", "MERGE", "GATE_UP.0", "GATE_UP.1", "O_PROJ"),
            "DOWN",
        ),
        "MERGE follows ATTENTION at once, so every SM waits for the slowest attention.",
    ),
    Mistake(
        _order(
            *("ROUTER", "QKV", "GATE_UP.0", "ATTENTION", "MERGE", "GATE_UP.1", "O_PROJ"),
            "DOWN",
        ),
        "before ATTENTION there is a wait, too, but it is the wrong hole: just behind ROUTER "
        "the experts are not known yet, so GATE_UP would wait as well. And it would make "
        "attention late, for which everybody waits. Put it behind ATTENTION.",
    ),
    Mistake(
        _order(
            *("ROUTER", "QKV", "GATE_UP.0", "GATE_UP.1", "ATTENTION", "MERGE", "O_PROJ"),
            "DOWN",
        ),
        "all of GATE_UP stands before ATTENTION, where its experts are hardly known, and "
        "attention, for which everybody waits, begins late. Nothing is left for the two holes "
        "behind it.",
    ),
    Mistake(
        _order(
            *("GATE_UP.0", "ROUTER", "QKV", "ATTENTION", "MERGE", "GATE_UP.1", "O_PROJ"),
            "DOWN",
        ),
        "GATE_UP needs the experts, and so all rows of ROUTER, also those of its own SM, which "
        "now come later in the list: nobody can begin.",
    ),
    Mistake(
        _order(
            *("ROUTER", "QKV", "ATTENTION", "GATE_UP.0", "MERGE", "O_PROJ", "DOWN"),
            "GATE_UP.1",
        ),
        "DOWN needs all of GATE_UP. A filling must end before what needs it.",
    ),
    Mistake(
        _order(
            *("QKV", "ATTENTION", "GATE_UP.0", "MERGE", "GATE_UP.1", "O_PROJ", "ROUTER"),
            "DOWN",
        ),
        "ROUTER looks cheap and unimportant, but GATE_UP waits for it: it must come before.",
    ),
    Mistake(
        _at_places,
        "this takes tasks from fixed places of the list. An SM without ROUTER has seven names, "
        "and there the places are others: find tasks by name.",
    ),
    Mistake(
        _by_number,
        "a list with fixed numbers has eight places. An SM without ROUTER has seven names: put "
        "names in order, not places.",
    ),
    Mistake(
        lambda names: list(ORDER),
        "these are always the same eight names. Return those that `names` has, in your order; "
        "hint 3 shows how.",
    ),
    Mistake(
        _order(
            *("ROUTER", "QKV", "ATTENTION", "GATE_UP.0", "MERGE", "GATE_UP.1", "DOWN"),
            "O_PROJ",
        ),
        "the holes are filled, but DOWN adds to the rows that O_PROJ leaves in x_mid: it comes "
        "last.",
    ),
    Mistake(
        _order(
            *("ROUTER", "QKV", "ATTENTION", "GATE_UP.0", "O_PROJ", "GATE_UP.1", "MERGE"),
            "DOWN",
        ),
        "O_PROJ multiplies what MERGE has put together, on this SM and all others. Only "
        "GATE_UP may stand anywhere between ROUTER and DOWN.",
    ),
)
