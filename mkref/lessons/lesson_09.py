"""Lesson 09: its exercises, the counters of a plan and the comparison of a counter that wraps.

The first is tried on real plans: the learner names counters, the verifier and the interpreter say
what comes of it. Waits for what a task does not read are found, too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from mkref.lessons.exercise import (
    EMPTY,
    Answer,
    Mistake,
    Property,
    PythonExercise,
    WrongAnswerError,
)
from mkref.lessons.steps import lesson_plan, proved, same_step
from mkref.measure.rungs import barriers, plain
from mkref.plan import NO_COUNTER, Op, Plan
from mkref.plan.build import Counter
from mkref.plan.effects import READS, WRITES

if TYPE_CHECKING:
    from mkref.plan.task import Task

__all__ = ["EXERCISES", "counters_of", "producers", "reached", "unread", "with_barriers"]

SIZES = (1, 3, 5)
"""SMs of the plans that are tried."""
Names = tuple[str | None, str | None]
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


# ---- plans


def with_barriers(n_sm: int) -> Plan:
    """A plan of the lessons in the order of the model, with a counter per operation."""
    return barriers(_in_turn(n_sm))


def _in_turn(n_sm: int) -> Plan:
    """The order of the model, in the form that the verifier asks for."""
    plan = lesson_plan(n_sm)
    index = {task.layer: task.index for _, _, task in plan if task.op == Op.GATE_UP}
    return _each(
        plain(plan), lambda t: replace(t, index=index[t.layer]) if t.op == Op.GATE_UP else t
    )


def _each(plan: Plan, change: Callable[[Task], Task]) -> Plan:
    return replace(plan, tasks=tuple(tuple(map(change, tasks)) for tasks in plan.tasks))


def producers(op: Op, layer: int) -> set[tuple[Op, int]]:
    """Operations, with their layers, that write something which a task reads in the same step."""
    found = set()
    for read in READS[op]:
        for source in Op:
            for write in WRITES[source]:
                if read.of_step_before or write.buffer != read.buffer:
                    continue
                if source == Op.EMBED and layer:
                    continue
                found.add((source, layer - 1 if write.layer == "next" else layer))
    return {(source, at) for source, at in found if at >= 0}


def unread(plan: Plan, layer: int) -> Iterator[tuple[Op, Op]]:
    """Pairs (task, whom it waits for) of a layer in which nothing of the second is read."""
    makers: dict[int, set[tuple[Op, int]]] = {}
    for _, _, task in plan:
        makers.setdefault(task.signal, set()).add((Op(task.op), task.layer))
    seen = set()
    for _, _, task in plan:
        if task.layer != layer or task.wait == NO_COUNTER or task.op in seen:
            continue
        seen.add(task.op)
        for source in sorted(makers.get(task.wait, set())):
            if source not in producers(Op(task.op), layer):
                yield Op(task.op), source[0]


# ---- 09.1


def _names(answer: Answer, op: Op, layer: int) -> Names:
    given = answer(op.name, layer)
    where = f"{op.name} of layer {layer}"
    if given is None and all(answer(other.name, 1) is None for other in Op):
        raise WrongAnswerError(f"it returns None, {EMPTY}")
    if not isinstance(given, tuple | list) or len(given) != 2:
        raise WrongAnswerError(
            f"{where}: it returns {given!r:.60}, and not a pair (wait, signal); no counter is None "
            "in the pair"
        )
    for name in given:
        if name is not None and (not isinstance(name, str) or not name):
            raise WrongAnswerError(f"{where}: {name!r:.60} is no name of a counter")
    return given[0], given[1]


def _counted(answer: Answer, n_sm: int) -> Plan:
    """The plan with the counters of the answer."""
    plan = _in_turn(n_sm)
    kinds = dict.fromkeys((Op(t.op), t.layer) for _, _, t in plan)
    named = {kind: _names(answer, *kind) for kind in kinds}
    arrivals: dict[str, int] = {}
    for _, _, task in plan:
        signal = named[Op(task.op), task.layer][1]
        if signal is not None:
            arrivals[signal] = arrivals.get(signal, 0) + 1
    for (op, layer), (wait, _) in named.items():
        if wait is not None and wait not in arrivals:
            raise WrongAnswerError(
                f"{op.name} of layer {layer} waits for {wait!r}, which nobody signals"
            )
        if op == Op.ROUTER and named[op, layer][1] is None:
            raise WrongAnswerError(
                f"ROUTER of layer {layer} signals nobody; the helper waits for its counter"
            )
    number = {name: i for i, name in enumerate(arrivals)}

    def aim(task: Task) -> Task:
        wait, signal = named[Op(task.op), task.layer]
        route = NO_COUNTER
        if task.route_wait != NO_COUNTER:
            source = Op.MERGE if task.op == Op.ATTENTION else Op.ROUTER
            name = named[source, task.layer][1]
            route = NO_COUNTER if name is None else number[name]
        counters = list(arrivals.values())
        return replace(
            task,
            wait=NO_COUNTER if wait is None else number[wait],
            wait_count=0 if wait is None else arrivals[wait],
            route_wait=route,
            route_count=0 if route == NO_COUNTER else counters[route],
            signal=NO_COUNTER if signal is None else number[signal],
        )

    counters = tuple(Counter(name, target) for name, target in arrivals.items())
    return replace(_each(plan, aim), counters=counters)


def _pairs(answer: Answer) -> None:
    for op in Op:
        _names(answer, op, 0 if op == Op.EMBED else 3)
    _counted(answer, 3)


def _proved(answer: Answer) -> None:
    for n_sm in SIZES:
        proved(_counted(answer, n_sm))


def _same_bits(answer: Answer) -> None:
    for n_sm in SIZES[1:]:
        same_step(_counted(answer, n_sm), orders=(1, 2), rows=2)


def _nothing_unread(answer: Answer) -> None:
    plan = _counted(answer, 3)
    for layer in range(plan.config.num_hidden_layers + 1):
        for op, source in unread(plan, layer):
            raise WrongAnswerError(
                f"{op.name} of layer {layer} waits for {source.name}, and reads nothing of it"
            )


def _nobody_idle(answer: Answer) -> None:
    plan = _counted(answer, 3)
    waited = {c for _, _, t in plan for c in (t.wait, t.route_wait)}
    for _, _, task in plan:
        if task.signal != NO_COUNTER and task.signal not in waited:
            name = plan.counters[task.signal].name
            raise WrongAnswerError(
                f"{Op(task.op).name} of layer {task.layer} signals {name!r}, for which nobody waits"
            )


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


def _one_layer(op: str, layer: int) -> Names:
    """Names without a layer: all layers share their counters."""
    wait, signal = counters_of(op, layer)
    return wait and wait.rstrip("0123456789"), signal and signal.rstrip("0123456789")


_COUNTERS = PythonExercise(
    id="09.1",
    solution=counters_of,
    properties=(
        Property("every wait is for a counter that somebody signals", _pairs),
        Property("the verifier proves the plans for 1, 3 and 5 SMs", _proved),
        Property("a step has the same bits in other orders", _same_bits),
        Property("no task waits for what it does not read", _nothing_unread),
        Property("nobody signals what nobody waits for", _nobody_idle),
    ),
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
    if not isinstance(given, bool):
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


NEAR = (-5000, -132, -1, 0, 1, 132, 5000)
EDGE = 1 << 31

_REACHED = PythonExercise(
    id="09.2",
    solution=reached,
    properties=(
        Property("small numbers", _around(1000, (-1000, -1, 0, 1, 132))),
        Property("the counter may be further than asked", _around(10**9, NEAR)),
        Property("where the sign changes", _around(EDGE + 7, NEAR)),
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
    ),
    then="Now look at `reached` in cuda/megakernel.cu: why is its difference unsigned?",
)

EXERCISES = (_COUNTERS, _REACHED)
