"""Lesson 11: its exercises, when the loader may ask for a stage, and how much must be in flight.

The first rule is tried on stages played here and on the stages of the recorded step.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import numpy as np

from mkref.lessons.exercise import (
    EMPTY,
    Answer,
    Mistake,
    Property,
    PythonExercise,
    WrongAnswerError,
    expect,
)
from mkref.lessons.recorded import recorded_trace

__all__ = ["EXERCISES", "RECORD", "may_issue", "stages_needed"]

RECORD = "trace_north_h200.json.gz"
IN_FLIGHT = 2
"""Of the recorded step, which had one row."""
Times = Sequence[float]


def may_issue(
    i: int, slots: int, most: int, issued: Times, landed: Times, released: Times
) -> float:
    """The earliest time at which the loader may ask for stage number `i`, counted from 0.

    The ring has `slots` slots, used in turn. At most `most` stages may be asked for and not landed;
    they land in order. `issued`, `landed` and `released` are lists of the times of stages 0 to
    i - 1: asked for, in shared memory, read by all consumer warps; they stay as they are. Nothing
    before time 0.
    """
    # BEGIN SOLUTION
    at = issued[i - 1] if i > 0 else 0  # in order
    if i >= slots:
        at = max(at, released[i - slots])  # the stage that had this slot has been read
    if i >= most:
        at = max(at, landed[i - most])  # then at most most - 1 are still on their way
    return at
    # END SOLUTION


def stages_needed(bytes_per_s: float, latency_ns: float, n_sm: int, stage_bytes: int) -> int:
    """How many stages each SM must have in flight to keep the memory busy.

    The memory delivers `bytes_per_s` to `n_sm` SMs together. Every copy takes `latency_ns` from the
    question to the answer, however many are on their way. A stage has `stage_bytes`.
    """
    # BEGIN SOLUTION
    in_flight = bytes_per_s * latency_ns * 1e-9  # of all SMs: what arrives within one latency
    return int(-(-in_flight // (n_sm * stage_bytes)))  # rounded up
    # END SOLUTION


Stage = tuple[int, int, int, list[float], list[float], list[float]]


def _play(slots: int, most: int, n: int, seed: int, *, slow: float) -> list[Stage]:
    """Arguments for stages 0 to n - 1 of a run in which copies and consumers take random times."""
    rng = np.random.default_rng([seed, slots, most])
    issued: list[float] = []
    landed: list[float] = []
    released: list[float] = []
    cases = []
    for i in range(n):
        cases.append((i, slots, most, [*issued], [*landed], [*released]))
        at = float(may_issue(*cases[-1]) + rng.integers(1, 9))
        issued.append(at)
        landed.append(max([at + float(rng.integers(20, 90)), *landed[-1:]]))
        released.append(max([landed[-1], *released[-1:]]) + float(rng.integers(5, 40)) * slow)
    return cases


def _number(answer: Answer, case: Stage) -> Any:
    handed = [[*times] for times in case[3:]]
    try:
        given = answer(*case[:3], *handed)
    except IndexError:
        raise WrongAnswerError(
            "an index is beyond the end of a list: the lists end with stage i - 1, stage i itself "
            "has no times yet, and for the first stages there is nobody before them"
        ) from None
    if given is None:
        raise WrongAnswerError(f"it returns None, {EMPTY}")
    if handed != [[*times] for times in case[3:]]:
        raise WrongAnswerError("it changes a list that it is given; the loader keeps those itself")
    return given


def _first(answer: Answer) -> None:
    for slots, most in ((5, 2), (1, 1)):
        case: Stage = (0, slots, most, [], [], [])
        expect(0, _number(answer, case), f"stage 0, {slots} slots, {most} in flight")


def _played(slots: int, most: int, *, slow: float) -> Callable[[Answer], None]:
    def trial(answer: Answer) -> None:
        for case in _play(slots, most, 24, 0, slow=slow):
            where = f"stage {case[0]}, {slots} slots, {most} in flight"
            expect(may_issue(*case), _number(answer, case), where)

    return trial


@cache
def _recorded(sm: int) -> tuple[int, list[list[float]]]:
    stages = recorded_trace(RECORD).stages
    assert stages is not None
    mine = stages.sm == sm
    times = stages.times[mine]
    columns = (times[:, 0], stages.landed()[mine], times[:, 3])
    return stages.ring.stages, [column.astype(float).tolist() for column in columns]


def _record(answer: Answer) -> None:
    """The loader of the recorded step never asked earlier, and often as soon as it might."""
    slots, columns = _recorded(22)
    late = []
    for i in range(200, 700):
        issued, landed, released = (column[:i] for column in columns)
        case = (i, slots, IN_FLIGHT, issued, landed, released)
        at, asked = float(_number(answer, case)), columns[0][i]
        if not at <= asked:
            raise WrongAnswerError(
                f"SM 22, stage {i}: the kernel asked at {asked:.0f} ns, you allow it from "
                f"{at:.0f} ns"
            )
        late.append(asked - at)
    typical = float(np.median(late))
    if typical > 500:
        raise WrongAnswerError(
            f"SM 22: you would have allowed a typical stage {typical:.0f} ns before the kernel "
            "asked for it; something else held it back"
        )


def _rule(
    *,
    ring: str = "released",
    cap: str = "landed",
    cap_less: int = 0,
    ring_less: int = 0,
    turn: bool = False,
    later: int = 0,
    one_only: bool = False,
    least: str = "",
    in_order: bool = True,
) -> Answer:
    """The rule with other lists or other stages, or without one of its parts.

    Args:
        ring, cap: the lists of the slot and of the stages in flight; "" leaves the limit out.
        ring_less, cap_less: how much earlier the stage is that they look at.
        turn: the slot's number is taken for a stage's.
        later: from how many stages later on the limits hold.
        one_only: the second limit holds only where the first does not.
        least: of "all" times, or of the two "limits", the earliest counts.
        in_order: stage i - 1 counts.
    """

    def answer(
        i: int, slots: int, most: int, issued: Times, landed: Times, released: Times
    ) -> float:
        lists = {"issued": issued, "landed": landed, "released": released}
        before = issued[i - 1] if i and in_order else 0.0
        at = []
        if ring and i >= slots + later:
            at.append(lists[ring][i % slots if turn else i - slots - ring_less])
        if cap and i >= most + cap_less + later and most + cap_less >= 1:
            at.append(lists[cap][i - most - cap_less])
        if one_only:
            at = at[:1]
        if least == "limits" and at:
            at = [min(at)]
        return min([before, *at]) if least == "all" else max([before, *at])

    return answer


_ISSUE = PythonExercise(
    id="11.1",
    solution=may_issue,
    properties=(
        Property("the first stage at once", _first),
        Property("the slot decides", _played(3, 3, slow=4.0)),
        Property("the stages in flight decide", _played(9, 2, slow=0.1)),
        Property("one at a time", _played(4, 1, slow=1.0)),
        Property("both", _played(5, 3, slow=1.5)),
        Property("a ring shorter than what may be in flight", _played(2, 4, slow=0.5)),
        Property("500 recorded stages", _record),
    ),
    mistakes=(
        Mistake(
            _rule(ring=""),
            "nothing keeps this from a slot that a slow warp still reads. Which stage had the slot "
            "of stage i before, and which of the three lists says that it has been read?",
        ),
        Mistake(
            _rule(cap=""),
            "more than `most` are on the way. Which stage must have landed before stage i, and "
            "which of the three lists says that it has?",
        ),
        Mistake(
            _rule(ring="landed"),
            "that the old stage has landed does not free its slot. Who must be done with it?",
        ),
        Mistake(
            _rule(cap="released"),
            "a stage is in flight until it has landed, not until it has been read. The slots and "
            "the stages in flight are two limits with two lists, they cannot be made one.",
        ),
        Mistake(
            _rule(cap_less=-1),
            "one too few in flight: with `most` = 1 stage i may be asked for as soon as stage "
            "i - 1 has landed.",
        ),
        Mistake(
            _rule(in_order=False),
            "both limits are there, and the order is not: one loader asks for one stage after "
            "another. So when is stage i asked for at the earliest, seen from stage i - 1?",
        ),
        Mistake(
            _rule(least="all"),
            "all conditions must hold, so the latest of the times counts.",
        ),
        Mistake(
            _rule(least="limits"),
            "slot *and* stages in flight must allow it. The earlier of both times is too early.",
        ),
        Mistake(
            _rule(one_only=True),
            "where the slot is looked at, the stages in flight are not. Both limits hold at once: "
            "`if` twice, and not `elif`.",
        ),
        Mistake(
            _rule(turn=True),
            "`i % slots` is the number of the slot. The lists are numbered by stages: which stage "
            "was in that slot last?",
        ),
        Mistake(
            _rule(ring_less=-1),
            "this waits for the stage after the one that had the slot, so one slot is never used. "
            "With 3 slots, which stage had the slot of stage 3?",
        ),
        Mistake(
            _rule(later=1),
            "the limits begin one stage too late: stage number `slots` is the first that needs a "
            "used slot, stage number `most` the first that has `most` before it.",
        ),
    ),
    samples=tuple(
        (*case[:3], *(tuple(times) for times in case[3:]))  # no answer may change them
        for slots, most, slow in ((3, 3, 4.0), (9, 2, 0.1), (4, 1, 1.0), (5, 3, 1.5), (2, 4, 0.5))
        for case in _play(slots, most, 16, 1, slow=slow)
    ),
    then="Now find the same two conditions in `Stream::run`. Which one is the `empty` barrier?",
)

_LITTLE = (
    (4.8e12, 1000, 132, 32768),
    (2e12, 650, 108, 16384),
    (1e9, 5000, 1, 512),
    (4e9, 750, 1, 1000),
)


def _little(case: tuple[float, float, int, int]) -> Callable[[Answer], None]:
    bytes_per_s, latency, n_sm, stage = case

    def trial(answer: Answer) -> None:
        given = answer(*case)
        if isinstance(given, float) and not given.is_integer():
            raise WrongAnswerError(
                f"{given:.4g} stages: give a whole number, enough to keep the memory busy"
            )
        where = (
            f"{bytes_per_s / 1e9:,.0f} GB/s, {latency} ns, {n_sm} SM{'s' if n_sm > 1 else ''}, "
            f"stages of {stage} bytes"
        )
        expect(stages_needed(*case), given, where)

    return trial


def _longer(answer: Answer) -> None:
    """Stages in proportion to the latency, as long as they are many."""
    few, many = (answer(3e12, latency, 132, 64) for latency in (700, 7000))
    expect(stages_needed(3e12, 700, 132, 64), few, "700 ns, stages of 64 bytes")
    expect(stages_needed(3e12, 7000, 132, 64), many, "7,000 ns, stages of 64 bytes")


def _bytes(bytes_per_s: float, latency_ns: float) -> float:
    return bytes_per_s * latency_ns * 1e-9


_NEEDED = PythonExercise(
    id="11.2",
    solution=stages_needed,
    properties=(
        Property("a GPU like the H200", _little(_LITTLE[0])),
        Property("another GPU, smaller stages", _little(_LITTLE[1])),
        Property("one SM and a slow memory", _little(_LITTLE[2])),
        Property("exactly three stages", _little(_LITTLE[3])),
        Property("more latency needs more in flight", _longer),
    ),
    mistakes=(
        Mistake(
            lambda b, t, n, s: _bytes(b, t) / n // s,
            "rounded down, the memory idles for a part of every latency. Round up.",
        ),
        Mistake(
            lambda b, t, n, s: round(_bytes(b, t) / n / s),
            "`round` goes to the nearest whole number, and so sometimes down: 1.1 stages become "
            "one. What is needed is the next whole number above.",
        ),
        Mistake(
            lambda b, t, n, s: math.ceil(_bytes(b, t) / s),
            "this is what all SMs need together. Each has its own ring: divide by n_sm.",
        ),
        Mistake(
            lambda b, t, n, s: math.ceil(b * t / n / s),
            "latency_ns is in nanoseconds, bytes_per_s is per second.",
        ),
        Mistake(
            lambda b, t, n, s: math.ceil(_bytes(b, t) / n),
            "these are bytes. How many stages are they?",
        ),
        Mistake(
            lambda b, t, n, s: math.ceil(_bytes(b, t) / n / s) + 1,
            "one more does no work: it waits in the memory's queue behind the others.",
        ),
        Mistake(
            lambda b, t, n, s: int(_bytes(b, t) / n / s) + 1,
            "cutting off and adding one is rounding up, except where the number is whole already.",
        ),
        Mistake(
            lambda b, t, n, s: max(2, math.ceil(_bytes(b, t) / n / s)),
            "where one is enough, one is the answer. This is no rule of two, but what arrives "
            "within a latency.",
        ),
        Mistake(
            lambda b, t, n, s: math.ceil(b * t * 1e-6 / n / s),
            "a nanosecond is 1e-9 of a second, not 1e-6.",
        ),
        Mistake(
            lambda b, t, n, s: math.ceil(_bytes(b, t) * n / s),
            "the rate is that of all SMs together, so each has a part of it: divide by n_sm, do "
            "not multiply.",
        ),
        Mistake(
            lambda b, t, n, s: math.ceil(b / (t * 1e-9) / n / s),
            "the longer a copy takes, the more must be on its way: rate *times* latency.",
        ),
        Mistake(
            lambda b, t, n, s: math.ceil(_bytes(b, t) / n / (s * 1024)),
            "`stage_bytes` is in bytes already.",
        ),
    ),
    samples=(*_LITTLE, (3e12, 7000, 132, 64)),
    then="Now put in what the recorded copies needed, below.",
)

EXERCISES = (_ISSUE, _NEEDED)
