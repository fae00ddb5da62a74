"""Exercise 14.1: the rows of a step, judged by what must hold, so that a report says what does not.

It is `Scheduler._share_rows` with admission, in small. What it does not do: the other exercises of
the lesson (`mkref.lessons.lesson_14`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from numbers import Integral
from random import Random
from typing import Any

from mkref.lessons.exercise import (
    EMPTY,
    Answer,
    Mistake,
    Property,
    PythonExercise,
    WrongAnswerError,
)

__all__ = ["SHARE", "next_rows"]

ROWS = 8


def next_rows(running: Sequence[int], waiting: Sequence[int], rows: int) -> list[int]:
    """How many rows of the next step each request gets.

    `running` and `waiting` have a number for each request, in order of arrival: tokens of
    its prompt that must go in before the one from which its next token is drawn. So who
    generates has 0, and a prompt of 12 tokens has 11. The step has `rows` rows, and never
    fewer than requests that run. The result is a list: rows of those who run, then rows of
    those who begin; whoever is not in the list waits on.
    """
    # BEGIN SOLUTION
    ahead = [*running, *waiting][:rows]  # whoever waits begins, in order, while there is a row
    counts = [1] * len(ahead)
    free = rows - len(ahead)
    while free and any(count <= n for count, n in zip(counts, ahead, strict=True)):
        for i, n in enumerate(ahead):
            if free and counts[i] <= n:  # it has another token
                counts[i] += 1
                free -= 1
    return counts
    # END SOLUTION


def _rows_of(answer: Answer, running: list[int], waiting: list[int], rows: int = ROWS) -> list[int]:
    """The answer for one step, after everything that must hold has been looked at."""
    given = answer([*running], [*waiting], rows)
    if given is None:
        raise WrongAnswerError(f"it returns None, {EMPTY}")
    if not isinstance(given, list | tuple) or not all(
        isinstance(n, Integral) and not isinstance(n, bool) for n in given
    ):
        raise WrongAnswerError(f"it returns {given!r:.60}, and not a list of whole numbers")
    ahead, counts = [*running, *waiting], [*given]
    where = f"running {running}, waiting {waiting}{_of(rows)}: {counts}"
    if len(counts) > len(ahead):
        raise WrongAnswerError(f"{where} has rows for {len(counts)} of {len(ahead)} requests")
    counts_of_running = [*counts, *[0] * len(running)][: len(running)]
    for number, (n, count) in enumerate(zip(running, counts_of_running, strict=True)):
        if count < 1:
            does = "takes its prompt in" if n else "generates"
            raise WrongAnswerError(f"{where}: request {number} {does}, and it stands still")
    if any(n < 1 for n in counts):
        raise WrongAnswerError(f"{where}: somebody begins with no row")
    if sum(counts) > rows:
        raise WrongAnswerError(f"{where} are {sum(counts)} rows, the step has {rows}")
    for number, (n, count) in enumerate(zip(ahead, counts, strict=False)):
        if count > n + 1:
            raise WrongAnswerError(
                f"{where}: request {number} has {n + 1} tokens to feed and gets {count} rows"
            )
    if len(counts) < min(rows, len(ahead)):
        raise WrongAnswerError(
            f"{where}: {len(ahead) - len(counts)} wait, though not every row has a request yet"
        )
    _well_used(where, ahead, counts, rows)
    return counts


def _of(rows: int) -> str:
    return "" if rows == ROWS else f", {rows} rows"


def _well_used(where: str, ahead: list[int], counts: list[int], rows: int) -> None:
    hungry = [i for i, count in enumerate(counts) if count <= ahead[i]]
    if sum(counts) < rows and hungry:
        raise WrongAnswerError(
            f"{where}: {rows - sum(counts)} rows are idle, and request {hungry[0]} has tokens left"
        )
    for i in hungry:
        if counts[i] + 1 < max(counts):
            raise WrongAnswerError(
                f"{where}: request {i} has tokens left and gets {counts[i]}, another "
                f"{max(counts)}: not in turns"
            )
        if counts[i] < max(counts[i:]):
            later = i + counts[i:].index(max(counts[i:]))
            raise WrongAnswerError(
                f"{where}: request {i} has tokens left, and request {later}, which came later, "
                "gets a row more"
            )


def _one_step(*steps: tuple[list[int], list[int]], rows: int = ROWS) -> Callable[[Answer], None]:
    def trial(answer: Answer) -> None:
        for running, waiting in steps:
            _rows_of(answer, running, waiting, rows)

    return trial


def _history(answer: Answer) -> None:
    """Sixty requests that come at random: everyone ends, in bounded time."""
    random = Random(14)
    coming = [(random.randrange(40), random.randint(1, 12)) for _ in range(60)]
    left: list[list[int]] = []  # of those who run: tokens ahead, tokens still to generate
    waiting: list[list[int]] = []
    for _ in range(600):
        while coming and len(waiting) < 3 and random.random() < 0.5:
            ahead, answer_tokens = coming.pop()
            waiting.append([ahead, answer_tokens])
        counts = _rows_of(answer, [r[0] for r in left], [w[0] for w in waiting])
        n_new = len(counts) - len(left)
        left, waiting = left + waiting[:n_new], waiting[n_new:]
        for request, count in zip(left, counts, strict=True):
            draws = request[0] < count
            request[0] = max(0, request[0] - count)
            request[1] -= draws
        left = [request for request in left if request[1]]
        if not (coming or waiting or left):
            return
    raise WrongAnswerError(f"after 600 steps {len(left) + len(waiting)} of 60 have not ended")


def _all_to_the_first(running: list[int], waiting: list[int], rows: int) -> list[int]:
    ahead = [*running, *waiting][:rows]
    counts, free = [1] * len(ahead), rows - len(ahead)
    for i, n in enumerate(ahead):
        more = min(n, free)
        counts[i], free = counts[i] + more, free - more
    return counts


def _one_each(running: list[int], waiting: list[int], rows: int) -> list[int]:
    return [1] * min(rows, len(running) + len(waiting))


def _prompts_first(running: list[int], waiting: list[int], rows: int) -> list[int]:
    ahead, free = [*running, *waiting][:rows], rows
    counts = [0] * len(ahead)
    for i in sorted(range(len(ahead)), key=lambda i: ahead[i] == 0):
        counts[i] = min(ahead[i] + 1, free)
        free -= counts[i]
    return counts


def _prompts_alone(running: list[int], waiting: list[int], rows: int) -> list[int]:
    return next_rows(running, [] if any(running) else waiting, rows)


def _nobody_begins(running: list[int], waiting: list[int], rows: int) -> list[int]:
    return next_rows(running, [], rows)


def _one_too_few(running: list[int], waiting: list[int], rows: int) -> list[int]:
    less = [max(0, n - 1) for n in running], [max(0, n - 1) for n in waiting]
    return next_rows(*less, rows)


def _no_end(running: list[int], waiting: list[int], rows: int) -> list[int]:
    ahead = [*running, *waiting][:rows]
    return next_rows([n and 99 for n in ahead], [], rows)


def _turns(first: Callable[[int, int, bool], Any]) -> Answer:
    """Turns in an order of their own: by `first` of (place, tokens ahead, does it begin?)."""

    def answer(running: list[int], waiting: list[int], rows: int) -> list[int]:
        ahead = [*running, *waiting][:rows]
        places = sorted(range(len(ahead)), key=lambda i: first(i, ahead[i], i >= len(running)))
        counts = next_rows([ahead[i] for i in places], [], rows)
        return [counts[places.index(i)] for i in range(len(ahead))]

    return answer


SHARE = PythonExercise(
    id="14.1",
    solution=next_rows,
    properties=(
        Property("everybody generates", _one_step(([0] * 8, []), ([0] * 3, []))),
        Property("a full step: who comes waits", _one_step(([0] * 8, [4, 9]))),
        Property("a long prompt beside three answers", _one_step(([0, 0, 500, 0], []))),
        Property("two prompts in turns", _one_step(([30, 0, 30], []), ([0, 7, 5], []))),
        Property("a prompt that ends in this step", _one_step(([0, 2], []), ([3, 0, 1], []))),
        Property("those who wait begin", _one_step(([0, 20], [6, 3]), ([], [40, 40, 2]))),
        Property(
            "they begin in order",
            _one_step(([], [9, 1, 9]), ([], [9, 1]), ([], [1, 9]), ([0, 3], [1, 9])),
        ),
        Property(
            "turns begin with the eldest",
            _one_step(([0, 5, 30], []), ([30, 5, 0], []), ([0, 20, 20], [20])),
        ),
        Property("a step of 4 rows", _one_step(([0, 9], [3]), ([0], [5] * 5), rows=4)),
        Property("a step of 16 rows", _one_step(([0, 40, 40], [2]), rows=16)),
        Property("sixty requests that come at random", _history),
    ),
    mistakes=(
        Mistake(
            _all_to_the_first,
            "the eldest prompt takes all rows that are left, and the others see one per step. Go "
            "round: one row each, again and again.",
        ),
        Mistake(
            _one_each,
            "one row each, and the rest of the step is idle. Each row of a step can take a further "
            "token of a prompt.",
        ),
        Mistake(
            _prompts_first,
            "a long prompt takes every row, and those who generate stand still until it is in. "
            "Everybody who runs gets a row first.",
        ),
        Mistake(
            _prompts_alone,
            "nobody begins while a prompt goes in, so rows stay without a request and the line "
            "grows. Who has a row may begin at once.",
        ),
        Mistake(
            _one_too_few,
            "the token from which the next is drawn takes a row, too: a request with n tokens "
            "ahead can use n + 1 rows.",
        ),
        Mistake(
            _nobody_begins,
            "`waiting` is not looked at, so nobody ever begins. Who waits gets a row, in order, as "
            "long as there is one.",
        ),
        Mistake(
            _no_end,
            "a prompt can end within the step. How many tokens has a request with n ahead?",
        ),
        Mistake(
            lambda running, waiting, rows: next_rows(running, waiting[::-1], rows),
            "the line is served from its end, so who has waited longest waits on. The first number "
            "of `waiting` came first.",
        ),
        Mistake(
            lambda running, waiting, rows: next_rows(running, sorted(waiting), rows),
            "the shortest prompt begins first, so a long one can wait for ever. `waiting` is in "
            "order already.",
        ),
        Mistake(
            _turns(lambda place, n, begins: -place),
            "the turns begin with the youngest. Who came first is first in every round.",
        ),
        Mistake(
            _turns(lambda place, n, begins: (not begins, place)),
            "those who begin get their turns before those who run. Everybody in the step came in "
            "one order, and takes turns in it.",
        ),
        Mistake(
            _turns(lambda place, n, begins: -n),
            "the longest prompt is first in every round. Turns go by order of arrival, whatever "
            "there is to feed.",
        ),
        Mistake(
            lambda running, waiting, rows: next_rows(running, waiting, ROWS),
            "it is right for steps of 8 rows only. How many there are is the third argument.",
        ),
    ),
    then="Further down is the engine's own, `Scheduler._share_rows`. Where does it say that a "
    "prompt may end?",
)
