"""Lesson 10: its exercises, a share beside another and the order of a layer's tasks.

The second is tried on real plans: the learner orders names, the verifier proves what comes of it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from numbers import Integral
from typing import Any

from mkref.lessons.exercise import (
    EMPTY,
    Answer,
    Property,
    PythonExercise,
    WrongAnswerError,
)
from mkref.lessons.lesson_10_mistakes import BACK_FILL, BESIDE
from mkref.lessons.steps import lesson_plan, proved, same_step
from mkref.measure.rungs import ORDER
from mkref.plan import Op, Plan
from mkref.plan.share import share, share_beside
from mkref.plan.task import Flag, Task

__all__ = ["EXERCISES", "back_fill", "beside", "model_order"]

ALWAYS = (Op.EMBED, Op.HEAD, Op.SAMPLE)
"""Tasks that lie before and after all layers and stay where they are."""
CASES = (
    *((328, 0, 132), (768, 328, 132), (96, 24, 7), (40, 13, 8), (33, 100, 32), (9, 2, 9)),
    (768, 5, 132),
)
"""Granules, granules of the other operation, slots: never fewer granules than slots.

In the last one few are the *other's*, which is no reason for a plain share.
"""
FEW = ((1, 4, 8), (3, 5, 8), (1, 7, 4), (0, 3, 2), (130, 328, 132), (7, 5, 8))
"""The last one has just one granule too few."""
NEEDS = (
    *(("QKV", "ATTENTION"), ("ATTENTION", "MERGE"), ("MERGE", "O_PROJ"), ("O_PROJ", "DOWN")),
    *(("ROUTER", "GATE_UP.0"), ("ROUTER", "GATE_UP.1")),
    *(("GATE_UP.0", "DOWN"), ("GATE_UP.1", "DOWN")),
)
"""What must stand before what in the list of one SM."""


def beside(total: int, other: int, n_slots: int, slot: int) -> tuple[int, int]:
    """The range (begin, end) of `total` granules that belongs to `slot`, 0 to n_slots - 1.

    The slots have already got `other` granules of another operation, slot s those from
    other * s // n_slots to other * (s + 1) // n_slots. Of both together, every slot shall have
    as many as the next, give or take one, with edges rounded down as those are. If `total` is
    less than `n_slots`, the range is the plain share, as if `other` were 0.
    """
    # BEGIN SOLUTION
    if total < n_slots:  # nothing to make up with
        other = 0

    def edge(s):  # type: ignore[no-untyped-def]
        # The first granule of slot s among all of both, without those of the other.
        return (total + other) * s // n_slots - other * s // n_slots

    return edge(slot), edge(slot + 1)
    # END SOLUTION


def back_fill(names: Sequence[str]) -> list[str]:
    """The tasks of one layer on one SM, by name, in the order in which the SM should do them.

    `names` has them in the order of the model: ROUTER, QKV, ATTENTION, MERGE, O_PROJ, GATE_UP.0,
    GATE_UP.1, DOWN. An SM that has no rows of the router has no ROUTER. The list that you return
    has the same names.
    """
    # BEGIN SOLUTION
    order = ["ROUTER", "QKV", "ATTENTION", "GATE_UP.0", "MERGE", "GATE_UP.1", "O_PROJ", "DOWN"]
    return sorted(names, key=order.index)
    # END SOLUTION


def _pair(answer: Answer, total: int, other: int, n_slots: int, slot: int) -> tuple[int, int]:
    """What an answer says, if it is two whole numbers."""
    given = answer(total, other, n_slots, slot)
    where = f"{total} beside {other} on {n_slots} slots, slot {slot}"
    if given is None:
        raise WrongAnswerError(f"it returns None, {EMPTY}")
    if not isinstance(given, tuple | list) or len(given) != 2:
        raise WrongAnswerError(f"{where}: it returns {given!r}, and not a pair (begin, end)")
    if not all(isinstance(n, Integral) for n in given):
        raise WrongAnswerError(f"{where}: {given!r} are not whole numbers (use //)")
    return int(given[0]), int(given[1])


def _all(answer: Answer, case: tuple[int, int, int]) -> list[tuple[int, int]]:
    return [_pair(answer, *case, slot) for slot in range(case[2])]


def _said(case: tuple[int, int, int]) -> str:
    return f"{case[0]} granules beside {case[1]} on {case[2]} slots"


def _alone(answer: Answer) -> None:
    """Beside nothing it is the ordinary share."""
    for total, n_slots in ((10, 4), (144, 132), (17, 17)):
        case = (total, 0, n_slots)
        given = _all(answer, case)
        for slot, pair in enumerate(given):
            right = share(total, n_slots, slot)
            if pair != right:
                raise WrongAnswerError(f"{_said(case)}: slot {slot} has {right}, it returns {pair}")


def _covers(cases: Sequence[tuple[int, int, int]]) -> Callable[[Answer], None]:
    def trial(answer: Answer) -> None:
        for case in cases:
            at = 0
            for slot, (begin, end) in enumerate(_all(answer, case)):
                if begin != at:
                    raise WrongAnswerError(
                        f"{_said(case)}: slot {slot} begins at {begin}, the slots before it end at "
                        f"{at}"
                    )
                if end < begin:
                    raise WrongAnswerError(
                        f"{_said(case)}: the range of slot {slot}, ({begin}, {end}), runs backwards"
                    )
                at = end
            if at != case[0]:
                raise WrongAnswerError(f"{_said(case)}: the last slot ends at {at}")

    return trial


def _even(answer: Answer) -> None:
    """Of both together all slots have as many, give or take one."""
    for case in CASES:
        total, other, n_slots = case
        sums = []
        for slot, (begin, end) in enumerate(_all(answer, case)):
            first, last = share(other, n_slots, slot)
            sums.append(end - begin + last - first)
        if max(sums) - min(sums) > 1:
            raise WrongAnswerError(
                f"{_said(case)}: of both, slot {sums.index(max(sums))} has {max(sums)} and slot "
                f"{sums.index(min(sums))} has {min(sums)}; {(total + other) / n_slots:.1f} is the "
                "mean"
            )


def _kernel(answer: Answer) -> None:
    """Loader, consumers and verifier must agree to the last granule."""
    for case in (*CASES, *FEW):
        for slot, pair in enumerate(_all(answer, case)):
            right = share_beside(*case, slot)
            if pair != right:
                raise WrongAnswerError(
                    f"{_said(case)}: the kernel's slot {slot} has {right}, yours {pair}"
                )


def model_order(tasks: Sequence[Task], layer: int) -> dict[str, Task]:
    """The tasks of one layer in one list, by the names that the exercise uses, in this order."""
    mine = [task for task in tasks if task.layer == layer and task.op not in ALWAYS]
    mine.sort(key=lambda task: (ORDER.index(Op(task.op)), task.first))
    return {
        f"{Op(t.op).name}.{t.first % 2}" if t.op == Op.GATE_UP else Op(t.op).name: t for t in mine
    }


def _ordered(answer: Answer, n_sm: int) -> tuple[Plan, list[list[str]]]:
    """A plan in the order of an answer, and all lists of names that it gave."""
    plan = lesson_plan(n_sm)
    lists, orders = [], []
    for tasks in plan.tasks:
        mine = [task for task in tasks if task.op == Op.EMBED]
        for layer in range(plan.config.num_hidden_layers):
            named = model_order(tasks, layer)
            given = answer(list(named))
            orders.append(_names(given, list(named)))
            mine += [named[name] for name in orders[-1]]
        mine += [task for task in tasks if task.op in (Op.HEAD, Op.SAMPLE)]
        lists.append(tuple(_marked(mine)))
    return replace(plan, tasks=tuple(lists)), orders


def _names(given: Any, right: list[str]) -> list[str]:
    if given is None:
        raise WrongAnswerError(f"it returns None, {EMPTY}")
    if not isinstance(given, list | tuple):
        raise WrongAnswerError(f"it returns {given!r}, which is not a list of names")
    missing = [name for name in right if name not in given]
    more = [name for name in given if name not in right]
    twice = [name for name in right if given.count(name) > 1]
    wrong = (("missing", missing), ("not among them", more), ("there more than once", twice))
    if any(found for _, found in wrong):
        said = "; ".join(f"{what}: {', '.join(map(str, found))}" for what, found in wrong if found)
        raise WrongAnswerError(f"of the {len(right)} names {' '.join(right)}: {said}")
    return list(given)


def _marked(tasks: Sequence[Task]) -> list[Task]:
    """The flags of what is last in its layer, in this order."""
    last = {t.layer: i for i, t in enumerate(tasks)}
    users = {t.layer: i for i, t in enumerate(tasks) if t.op in (Op.GATE_UP, Op.DOWN)}
    own = Flag.RELEASE | Flag.LAST_OF_LAYER
    return [
        replace(
            task,
            flags=task.flags & ~own
            | (Flag.RELEASE if users.get(task.layer) == i else 0)
            | (Flag.LAST_OF_LAYER if last[task.layer] == i else 0),
        )
        for i, task in enumerate(tasks)
    ]


def _proved(answer: Answer) -> None:
    for n_sm in (1, 2, 3, 5):
        plan, orders = _ordered(answer, n_sm)
        try:
            proved(plan)
        except WrongAnswerError as wrong:
            raise WrongAnswerError(f"{wrong}{_too_early(orders)}") from None


def _too_early(orders: Sequence[Sequence[str]]) -> str:
    """The first task that stands before one that it needs, in the list where it does."""
    for names in orders:
        for first, then in NEEDS:
            if first in names and names.index(first) > names.index(then):
                return f" ({then} needs {first}, which comes later in {' '.join(names)})"
    return ""


def _same_bits(answer: Answer) -> None:
    plan, _ = _ordered(answer, 2)
    same_step(plan, orders=(1,), rows=2)


def _filled(before: str, after: str) -> Callable[[Answer], None]:
    """Between two tasks of a list lies work that waits for neither."""

    def trial(answer: Answer) -> None:
        for names in _ordered(answer, 3)[1]:
            first, last = names.index(before), names.index(after)
            if last < first:
                raise WrongAnswerError(
                    f"{' '.join(names)}: {after} stands before {before}, which it needs"
                )
            if not any(name.startswith("GATE_UP") for name in names[first:last]):
                early = any(
                    name.startswith("GATE_UP") for name in names[: names.index("ATTENTION")]
                )
                raise WrongAnswerError(
                    f"{' '.join(names)}: after {before}, {after} is next to wait, and nothing in "
                    "between gives the slowest SM time"
                    + early
                    * " (before ATTENTION the experts of GATE_UP are not known yet)"
                )

    return trial


def _early(answer: Answer) -> None:
    for names in _ordered(answer, 3)[1]:
        if "ROUTER" in names and names[0] != "ROUTER":
            raise WrongAnswerError(
                f"{' '.join(names)}: until all rows of ROUTER are done no loader knows its experts"
            )


_BESIDE = PythonExercise(
    id="10.1",
    solution=beside,
    properties=(
        Property("beside nothing it is the ordinary share", _alone),
        Property("every granule belongs to one slot", _covers(CASES)),
        Property("of both, all slots have as many, give or take one", _even),
        Property("with few granules no range runs backwards", _covers(FEW)),
        Property("the same ranges as the kernel", _kernel),
    ),
    mistakes=BESIDE,
    then="Now find the same three lines in `share_beside` of cuda/megakernel.cu.",
)

_BACK_FILL = PythonExercise(
    id="10.2",
    solution=back_fill,
    properties=(
        Property("the verifier proves the plans for 1, 2, 3 and 5 SMs", _proved),
        Property("work between ATTENTION and MERGE", _filled("ATTENTION", "MERGE")),
        Property("work between MERGE and O_PROJ", _filled("MERGE", "O_PROJ")),
        Property("the router comes first", _early),
        Property("a step has the same bits", _same_bits),
    ),
    mistakes=BACK_FILL,
    then="Now look for these tasks, in this order, in the recorded step below.",
)

EXERCISES = (_BESIDE, _BACK_FILL)
