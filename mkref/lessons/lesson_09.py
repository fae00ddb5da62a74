"""Lesson 09: its exercises, the counters of a plan and the comparison of a counter that wraps.

The first is tried on real plans: the learner names counters, the verifier and the interpreter say
what comes of it. Waits for what a task does not read are found, too.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from mkref.lessons.exercise import (
    EMPTY,
    Answer,
    Mistake,
    Property,
    PythonExercise,
    WrongAnswerError,
)
from mkref.lessons.lesson_09_trials import PROPERTIES, Names, producers, unread, with_barriers

__all__ = ["EXERCISES", "counters_of", "producers", "reached", "unread", "with_barriers"]

WRAP = 1 << 32


def counters_of(op: str, layer: int) -> tuple[str | None, str | None]:
    """The counters of a task: the name of the one it waits for, and of the one it signals.

    `op` is "EMBED", "ROUTER", "QKV", "ATTENTION", "MERGE", "O_PROJ", "GATE_UP", "DOWN", "HEAD" or
    "SAMPLE". You choose the names; None is no counter. A counter is full when all tasks that signal
    it are done. The same name is the same counter, so names must differ from layer to layer.

    HEAD and SAMPLE have the number after the last layer. DOWN of a layer makes the x of the next.
    Layer 0 is dense: it has no ROUTER.
    """
    # BEGIN SOLUTION
    waits = {
        "ROUTER": "x",
        "QKV": "x",
        "ATTENTION": "qkv",
        "MERGE": "attention",
        "O_PROJ": "merge",
        "GATE_UP": "x",
        "DOWN": "h",
        "HEAD": "x",
        "SAMPLE": "head",
    }
    signals = {
        "EMBED": "x",
        "ROUTER": "router",
        "QKV": "qkv",
        "ATTENTION": "attention",
        "MERGE": "merge",
        "GATE_UP": "h",
        "DOWN": "x",
        "HEAD": "head",
    }
    wait = f"{waits[op]}{layer}" if op in waits else None
    made = layer + 1 if op == "DOWN" else layer
    signal = f"{signals[op]}{made}" if op in signals else None
    return wait, signal
    # END SOLUTION


def reached(have: int, want: int) -> bool:
    """Whether a counter that shows `have` has got as far as `want`.

    Both are what a signed number of 32 bits shows: after 2147483647 comes -2147483648. The two are
    never further apart than a few thousand arrivals.
    """
    # BEGIN SOLUTION
    ahead = (have - want) % 2**32  # how far it is, on a circle of 2^32 numbers
    return ahead < 2**31
    # END SOLUTION


# ---- 09.1


def _but(**other: Names) -> Answer:
    """The solution, but for some operations with these names; `{}` is the layer, `{+}` the next."""

    def answer(op: str, layer: int) -> Names:
        if op not in other:
            return counters_of(op, layer)
        names = [
            name and name.replace("{+}", str(layer + 1)).replace("{}", str(layer))
            for name in other[op]
        ]
        return names[0], names[1]

    return answer


def _in_order(op: str, layer: int) -> Names:
    """The barriers again: each operation waits for the one before."""
    order = ["QKV", "ATTENTION", "MERGE", "O_PROJ", "GATE_UP", "DOWN"]
    if op in ("EMBED", "HEAD", "SAMPLE", "ROUTER"):
        return counters_of(op, layer)
    at = order.index(op)
    before = f"{order[at - 1]}{layer}" if at else f"x{layer}"
    return before, f"x{layer + 1}" if op == "DOWN" else f"{op}{layer}"


def _behind_router(op: str, layer: int) -> Names:
    """QKV waits for ROUTER where there is one, as with barriers."""
    own = counters_of(op, layer)
    return (f"router{layer}", own[1]) if op == "QKV" and layer else own


def _head_behind_h(op: str, layer: int) -> Names:
    """HEAD waits for the last GATE_UP."""
    return (f"h{layer - 1}", f"head{layer}") if op == "HEAD" else counters_of(op, layer)


def _one_layer(op: str, layer: int) -> Names:
    """Names without a layer: all layers share their counters."""
    wait, signal = counters_of(op, layer)
    return wait and wait.rstrip("0123456789"), signal and signal.rstrip("0123456789")


_COUNTERS = PythonExercise(
    id="09.1",
    solution=counters_of,
    properties=PROPERTIES,
    mistakes=(
        Mistake(
            _in_order,
            "these are the barriers under other names, and right. Which operations read nothing "
            "that the one before them writes?",
        ),
        Mistake(
            _but(DOWN=("h{}", "x{}")),
            "DOWN makes the x of the *next* layer. If it signals the counter that its own layer "
            "began with, who waits for whom?",
        ),
        Mistake(
            _but(GATE_UP=("merge{}", "h{}")),
            "GATE_UP comes after MERGE in the list, but does it read what MERGE makes? In this "
            "model attention and experts begin with the same x.",
        ),
        Mistake(
            _but(GATE_UP=("router{}", "h{}")),
            "GATE_UP does need the experts, but layer 0 is dense and has no ROUTER. The experts "
            "are waited for elsewhere, by the helper. What else does GATE_UP read, in every layer?",
        ),
        Mistake(
            _one_layer,
            "a name is one counter for the whole step. Here it has arrivals of all layers, so it "
            "is full only when the last layer is done: put the number of the layer into the name.",
        ),
        Mistake(
            _but(O_PROJ=("merge{}", "o{}")),
            "right, and with arrivals for nothing: DOWN adds to the rows of O_PROJ, but both are "
            "done by the same threads of the same SM.",
        ),
        Mistake(
            _but(O_PROJ=("merge{}", "h{}")),
            "right, and dearer: each O_PROJ pays a release, and DOWN waits for the O_PROJ of all "
            "SMs. Whose rows does DOWN add to?",
        ),
        Mistake(
            _but(EMBED=("tokens", "x0"), SAMPLE=("head{}", "tokens")),
            "EMBED reads the tokens of the step *before*, and the SAMPLE of its own SM has found "
            "them. A wait is for tasks of the same step, and here SAMPLE is its end.",
        ),
        Mistake(
            _head_behind_h,
            "h is not yet added to x. Who makes the x that HEAD reads, in the last layer?",
        ),
        Mistake(
            _behind_router,
            "QKV stands behind ROUTER in the list, but both begin with the same x.",
        ),
        Mistake(
            _but(QKV=("router{}", "qkv{}")),
            "layer 0 has no ROUTER to wait for; and does QKV read logits in any layer?",
        ),
        Mistake(
            _but(O_PROJ=("attention{}", None)),
            "O_PROJ reads the merged attention, and ATTENTION only leaves parts of it.",
        ),
        Mistake(
            _but(DOWN=(None, "x{+}")),
            "DOWN stands behind GATE_UP in the list of its own SM; but it reads the h of all SMs.",
        ),
        Mistake(
            _but(MERGE=("qkv{}", "merge{}")),
            "MERGE reads the parts that ATTENTION of all SMs has left; q, k and v are not enough.",
        ),
    ),
    then="Which tasks may now run at the same time that could not before?",
)


# ---- 09.2


def _wrapped(number: int) -> int:
    """What 32 bits with a sign show."""
    return (number + (1 << 31)) % WRAP - (1 << 31)


def _asked(answer: Answer, have: int, want: int) -> None:
    shown = (_wrapped(have), _wrapped(want))
    given: Any = answer(*shown)
    if given is None:
        raise WrongAnswerError(f"it returns None, {EMPTY}")
    if not isinstance(given, bool | np.bool_):
        raise WrongAnswerError(f"it returns {given!r:.60}, and neither True nor False")
    if given != (have >= want):
        raise WrongAnswerError(
            f"have {shown[0]}, want {shown[1]}: {have >= want} is right, it returns {given}"
        )


def _around(want: int, steps: Sequence[int]) -> Callable[[Answer], None]:
    def trial(answer: Answer) -> None:
        for step in steps:
            _asked(answer, want + step, want)

    return trial


NEAR = (0, 1, 132, 5000, -1, -132, -5000)
EDGE = 1 << 31

_REACHED = PythonExercise(
    id="09.2",
    solution=reached,
    properties=(
        Property("small numbers", _around(1000, (-1000, -1, 0, 1, 132))),
        Property("the counter may be further than asked", _around(10**9, NEAR)),
        Property("where the sign changes", _around(EDGE + 7, NEAR)),
        Property("want is the smallest number", _around(EDGE, NEAR)),
        Property("want is the last number before", _around(EDGE - 1, NEAR)),
        Property("where 32 bits are over", _around(WRAP + 9, NEAR)),
        Property("after many rounds", _around(5 * WRAP + EDGE - 66, NEAR)),
    ),
    mistakes=(
        Mistake(
            lambda have, want: have >= want,
            "right for hours. When `want` has passed the largest number and `have` has not, "
            "`have` looks larger. How far is the one from the other?",
        ),
        Mistake(
            lambda have, want: have == want,
            "the counter may have gone on: somebody arrives for the next step before you look.",
        ),
        Mistake(
            lambda have, want: have % WRAP >= want % WRAP,
            "without the sign the numbers go wrong elsewhere, where 32 bits are over. It is the "
            "difference that has to be taken on the circle.",
        ),
        Mistake(
            lambda have, want: (have - want) % WRAP <= 4096,
            "the counter may be a little further than that. Which half of the circle is ahead?",
        ),
        Mistake(
            lambda have, want: (want - have) % WRAP < EDGE,
            "this says when the counter has *not* passed `want`: take the other difference.",
        ),
        Mistake(
            lambda have, want: (have - want) % WRAP >= 0,
            "this is True for everything: after `%` the difference is never negative. Which half "
            "of the circle counts as ahead?",
        ),
        Mistake(
            lambda have, want: 0 < (have - want) % WRAP < EDGE,
            "a counter that shows `want` itself has got there: all arrivals asked for are in it.",
        ),
        Mistake(
            lambda have, want: have >= want or want - have > EDGE,
            "right where `have` has wrapped and `want` has not. And the other way round, when "
            "`want` has wrapped and `have` is still large?",
        ),
        Mistake(
            lambda have, want: (have - want) % (WRAP - 1) < EDGE,
            "the circle has 2^32 places, 0 to 2^32 - 1, and `%` takes the number of places.",
        ),
    ),
    then="Now look at `reached` in cuda/megakernel.cu: why is its difference unsigned?",
)

EXERCISES = (_COUNTERS, _REACHED)
