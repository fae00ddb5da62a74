"""Exercise 06.2: what an SM reads of the hit experts, in runs that lie within one expert each."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from numbers import Integral

from mkref.lessons.exercise import (
    EMPTY,
    Answer,
    Mistake,
    Property,
    PythonExercise,
    WrongAnswerError,
)

__all__ = ["RUNS", "runs"]

Run = tuple[int, int, int]
SPLITS: tuple[tuple[tuple[int, ...], int, int], ...] = (
    ((3,), 6, 2),
    ((2, 5, 11), 6, 4),
    ((0, 7, 8, 9, 40), 12, 7),
    (tuple(range(4, 128, 15)), 96, 132),
    ((1, 30), 4, 11),
    ((1, 5, 6, 20, 33), 4, 2),
)
"""Hit experts, granules of each, SMs."""


def runs(experts: Sequence[int], blocks: int, n_sm: int, sm: int) -> list[Run]:
    """What SM number `sm` of `n_sm` reads of gate and up: a list of (expert, first, count).

    `experts` are the ids of those that were hit, ascending. Each has `blocks` granules (the
    record's `task.blocks`), numbered from 0; in memory the granules of one expert lie one after
    another. A triple is `count` >= 1 of them, from `first` on, and ends where the share or the
    expert ends. The runs of all SMs, SM 0 first, are every granule once, in the order of the
    list, and no SM has more than one granule more than another.
    """
    # BEGIN SOLUTION
    total = len(experts) * blocks
    at, end = total * sm // n_sm, total * (sm + 1) // n_sm
    found = []
    while at < end:
        active, first = divmod(at, blocks)
        count = min(end - at, blocks - first)  # up to the end of this expert
        found.append((experts[active], first, count))
        at += count
    return found
    # END SOLUTION


def _all_runs(answer: Answer, case: tuple[tuple[int, ...], int, int]) -> list[list[Run]]:
    experts, blocks, n_sm = case
    found = []
    for sm in range(n_sm):
        given = answer([*experts], blocks, n_sm, sm)
        where = f"{_case(case)}, SM {sm}"
        if given is None:
            raise WrongAnswerError(f"it returns None, {EMPTY}")
        if not isinstance(given, list | tuple):
            raise WrongAnswerError(
                f"{where}: it must return a list of (expert, first, count), it returns a "
                f"{type(given).__name__}"
            )
        if not all(isinstance(run, list | tuple) and len(run) == 3 for run in given):
            raise WrongAnswerError(f"{where}: it must return a list of (expert, first, count)")
        if not all(isinstance(n, Integral) for run in given for n in run):
            raise WrongAnswerError(f"{where}: {given!r}: these are not whole numbers (use //)")
        found.append([(int(run[0]), int(run[1]), int(run[2])) for run in given])
    return found


def _case(case: tuple[tuple[int, ...], int, int]) -> str:
    experts, blocks, n_sm = case
    which = f"experts {', '.join(map(str, experts))}" if len(experts) < 6 else f"{len(experts)}"
    return f"{which}{'' if len(experts) < 6 else ' experts'} of {blocks} granules, {n_sm} SMs"


def _inside(answer: Answer) -> None:
    """Every run lies within one expert that was hit."""
    for case in SPLITS:
        for sm, found in enumerate(_all_runs(answer, case)):
            for run in found:
                expert, first, count = run
                where = f"{_case(case)}, SM {sm}: {run}"
                if expert not in case[0]:
                    raise WrongAnswerError(f"{where}: nobody has hit expert {expert}")
                if count < 1:
                    raise WrongAnswerError(f"{where} has no granules: leave it out")
                if first < 0 or first + count > case[1]:
                    raise WrongAnswerError(f"{where} is not within the expert's {case[1]} granules")


def _once(answer: Answer) -> None:
    """Every granule on one SM."""
    for case in SPLITS:
        owner: dict[tuple[int, int], int] = {}
        for sm, found in enumerate(_all_runs(answer, case)):
            for expert, first, count in found:
                for granule in range(first, first + count):
                    if (expert, granule) in owner:
                        raise WrongAnswerError(
                            f"{_case(case)}: granule {granule} of expert {expert} is on SM "
                            f"{owner[expert, granule]} and on SM {sm}"
                        )
                    owner[expert, granule] = sm
        missing = [(e, g) for e in case[0] for g in range(case[1]) if (e, g) not in owner]
        if missing:
            expert, granule = missing[0]
            raise WrongAnswerError(
                f"{_case(case)}: granule {granule} of expert {expert} is on no SM "
                f"({len(missing)} of {len(case[0]) * case[1]} are missing)"
            )


def _even(answer: Answer) -> None:
    """Shares differ by at most one granule."""
    for case in SPLITS:
        sums = [sum(count for _, _, count in found) for found in _all_runs(answer, case)]
        if max(sums) - min(sums) > 1:
            raise WrongAnswerError(
                f"{_case(case)}: SM {sums.index(max(sums))} has {max(sums)} granules and SM "
                f"{sums.index(min(sums))} has {min(sums)}"
            )


def _in_order(answer: Answer) -> None:
    """The runs of an SM follow one another, and none could be a part of the one before."""
    for case in SPLITS:
        experts, blocks, _ = case
        for sm, found in enumerate(_all_runs(answer, case)):
            where = f"{_case(case)}, SM {sm}: its runs"
            places = [(experts.index(e) if e in experts else -1, f, n) for e, f, n in found]
            for number, ((a, first, count), (b, other, _)) in enumerate(pairwise(places)):
                end = a * blocks + first + count
                if end != b * blocks + other:
                    raise WrongAnswerError(
                        f"{where} {found[:3]} are not one piece of the list; it would read here "
                        "and there"
                    )
                if a == b:
                    raise WrongAnswerError(
                        f"{where} {found[number : number + 2]} are one: cut only where the share "
                        "or the expert ends"
                    )


def _by_number(answer: Answer) -> None:
    """SM 0 has the begin of the list, and each SM goes on where the one before ends."""
    for case in SPLITS:
        experts, blocks, _ = case
        at = 0
        for sm, found in enumerate(_all_runs(answer, case)):
            for run in found[:1]:
                begin = (experts.index(run[0]) if run[0] in experts else -1) * blocks + run[1]
                if begin != at:
                    raise WrongAnswerError(
                        f"{_case(case)}, SM {sm} begins with {run}; SM 0 has the begin of the "
                        "list, and each SM goes on where the one before ends"
                    )
            at += sum(count for _, _, count in found)


def _whole_experts(experts: Sequence[int], blocks: int, n_sm: int, sm: int) -> list[Run]:
    return [(expert, 0, blocks) for expert in experts[sm::n_sm]]


def _dealt(experts: Sequence[int], blocks: int, n_sm: int, sm: int) -> list[Run]:
    return [(experts[i // blocks], i % blocks, 1) for i in range(sm, len(experts) * blocks, n_sm)]


def _each_apart(experts: Sequence[int], blocks: int, n_sm: int, sm: int) -> list[Run]:
    begin, end = blocks * sm // n_sm, blocks * (sm + 1) // n_sm
    return [(expert, begin, end - begin) for expert in experts if end > begin]


def _cut(
    experts: Sequence[int], blocks: int, at: int, end: int, *, ids: bool = True, cut: bool = True
) -> list[Run]:
    found = []
    while at < end:
        active, first = divmod(at, blocks)
        count = min(end - at, blocks - first) if cut else end - at
        found.append((experts[active] if ids else active, first, count))
        at += count
    return found


def _rounded_up(experts: Sequence[int], blocks: int, n_sm: int, sm: int) -> list[Run]:
    total = len(experts) * blocks
    each = -(-total // n_sm)
    return _cut(experts, blocks, min(total, sm * each), min(total, (sm + 1) * each))


def _rounded_down(experts: Sequence[int], blocks: int, n_sm: int, sm: int) -> list[Run]:
    each = len(experts) * blocks // n_sm
    return _cut(experts, blocks, sm * each, (sm + 1) * each)


def _rest_to_last(experts: Sequence[int], blocks: int, n_sm: int, sm: int) -> list[Run]:
    total = len(experts) * blocks
    each = total // n_sm
    return _cut(experts, blocks, sm * each, total if sm == n_sm - 1 else (sm + 1) * each)


def _share(*, ids: bool = True, cut: bool = True) -> Answer:
    def answer(experts: Sequence[int], blocks: int, n_sm: int, sm: int) -> list[Run]:
        total = len(experts) * blocks
        begin, end = total * sm // n_sm, total * (sm + 1) // n_sm
        return _cut(experts, blocks, begin, end, ids=ids, cut=cut)

    return answer


def _backwards(experts: Sequence[int], blocks: int, n_sm: int, sm: int) -> list[Run]:
    return runs(experts, blocks, n_sm, n_sm - 1 - sm)


def _halves(experts: Sequence[int], blocks: int, n_sm: int, sm: int) -> list[Run]:
    total = len(experts) * blocks
    begin, end = total * sm // n_sm, total * (sm + 1) // n_sm
    middle = begin + (end - begin + 1) // 2
    return _cut(experts, blocks, begin, middle) + _cut(experts, blocks, middle, end)


def _changed(change: Callable[[list[Run], Sequence[int], int], list[Run]]) -> Answer:
    """The right runs, told otherwise: `change` gets them, the experts and `blocks`."""

    def answer(experts: Sequence[int], blocks: int, n_sm: int, sm: int) -> list[Run]:
        return change(runs(experts, blocks, n_sm, sm), experts, blocks)

    return answer


RUNS = PythonExercise(
    id="06.2",
    solution=runs,
    properties=(
        Property("each run lies within one expert that was hit", _inside),
        Property("every granule once", _once),
        Property("shares differ by one granule at most", _even),
        Property("an SM's runs are one piece of the list", _in_order),
        Property("SM 0 first", _by_number),
    ),
    mistakes=(
        Mistake(
            _whole_experts,
            "whole experts are dealt out. With 8 experts 124 of 132 SMs would have nothing to do: "
            "divide granules, not experts.",
        ),
        Mistake(
            _dealt,
            "granules are dealt in turn. The shares are even, but neighbours in memory go to "
            "different SMs, and each granule becomes a run of its own.",
        ),
        Mistake(
            _each_apart,
            "each expert is divided for itself, so the same SMs get one granule more of every "
            "expert. Number the granules of all hit experts through, then divide once.",
        ),
        Mistake(
            _rounded_up,
            "shares are rounded up, so the last SMs get few granules or none. Round the edges, "
            "not the lengths: total * sm // n_sm.",
        ),
        Mistake(
            _share(ids=False),
            "that is the place of the expert in the list of those hit. Which expert stands there?",
        ),
        Mistake(
            _share(cut=False),
            "a run goes on beyond the end of its expert. What follows it in memory is the next "
            "expert of the model, not the next one that was hit.",
        ),
        Mistake(
            _changed(lambda found, _, blocks: found[:2]),
            "two runs at most. A share that is longer than an expert touches three or more.",
        ),
        Mistake(
            _changed(lambda found, _, blocks: [found[0], *found[1:][-1:]] if found else []),
            "only the first and the last expert of the share. Those between are read whole.",
        ),
        Mistake(
            _backwards,
            "the last SM has the begin of the list. In the kernel slot s of the records is SM s.",
        ),
        Mistake(
            _halves,
            "the shares are right, but each is cut into the halves of the picture. Those are two "
            "tasks of the kernel; here a run ends only with the share or the expert.",
        ),
        Mistake(
            _changed(lambda found, _, blocks: [(e, f, f + n) for e, f, n in found]),
            "the third number is where the run ends. It must be how many granules it has.",
        ),
        Mistake(
            _changed(lambda found, _, blocks: [(e, f, f + n - 1) for e, f, n in found]),
            "the third number is the last granule of the run. It must be how many there are.",
        ),
        Mistake(
            _changed(
                lambda found, hit, blocks: [(e, hit.index(e) * blocks + f, n) for e, f, n in found]
            ),
            "`first` is counted through all experts. Each expert's granules begin at 0.",
        ),
        Mistake(
            _rest_to_last,
            "the last SM takes what the division leaves: up to n_sm - 1 granules more than "
            "the others. Multiply first: total * sm // n_sm.",
        ),
        Mistake(
            _rounded_down,
            "each SM has total // n_sm granules, and the rest is on none. Multiply before you "
            "divide.",
        ),
    ),
    then="Now find in `share_gate_up` and `Segment`, below, the three parts of your function.",
)
