"""The trials of exercise 07.1: EMBED and SAMPLE of the real kernel, with candidates made up here.

A launch has the list EMBED, SAMPLE on each of two SMs, for several steps. So a token that SAMPLE
draws is embedded by the next step, and a stop id ends the launch; no other part of a step runs. The
candidates of HEAD lie in memory, as many and as strange as a case wants; behind the last one lies a
larger value, which is nobody's.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from functools import cache
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from mkref.lessons.exercise import WrongAnswerError
from mkref.lessons.program import YOURS, Program, same
from mkref.lessons.steps import MAX_CONTEXT, launch, lesson_plan
from mkref.lessons.whole import LESSON_CONFIG
from mkref.machine.host import HOST_RING
from mkref.machine.source import shared_bytes
from mkref.plan import NO_COUNTER, Interpreter, Op, Plan, build_plan
from mkref.plan.buffers import BUFFERS
from mkref.reference.sampling import order_key
from mkref.reference.scalars import to_bf16

if TYPE_CHECKING:
    from mkref.plan.task import Task

__all__ = ["Candidates", "in_a_larger_build", "run_sample", "second_sm_alone", "stop_one_by_one"]
__all__ += ["stop_twice"]

N_SM = 2
PLACES = 160
"""Candidates that there is room for: more than any case has, and than any GPU of today has SMs."""
BEHIND = LESSON_CONFIG.vocab_size - 1
"""Token of what lies behind the last candidate; no candidate has it."""
LARGER, LARGER_ROWS = 32, 16
"""ROWS and MOST_ROWS of the second build. In the first both are 8, so nothing tells them apart, and
a warp never has a second row."""
Array = npt.NDArray[Any]
CHANGING = np.array([5, 1, -1, -2], np.float32)
"""Values of the candidates over which `tokens_out` of four steps lies."""


@dataclass(frozen=True)
class Candidates:
    """What HEAD has left of each row: float32 and int32 [n, rows], n the number of SMs that HEAD
    ran on, and the stop ids of each row."""

    values: Array
    tokens: Array
    stop_ids: tuple[tuple[int, ...], ...] = ()

    @classmethod
    def drawn(
        cls, n: int, rows: int, *, mean: float = 0.0, levels: int = 0, seed: int = 7
    ) -> Candidates:
        """Random ones.

        Args:
            n, rows: how many.
            mean: of the values; -90 makes all of them negative.
            levels: so many different values only, so that many are equal; 0 for no limit.
            seed: of the values.
        """
        rng = np.random.default_rng([seed, n, rows])
        values = rng.normal(mean, 3, (n, rows)).astype(np.float32)
        if levels:
            values = rng.integers(0, levels, (n, rows)).astype(np.float32)
        tokens = np.stack([rng.permutation(LESSON_CONFIG.vocab_size - 2)[:n] for _ in range(rows)])
        return cls(values, tokens.T.astype(np.int32))

    @property
    def winners(self) -> Array:
        """The right token of each row, int32 [rows]."""
        best = np.argmax(order_key(self.values, self.tokens), axis=0)
        return self.tokens[best, np.arange(self.values.shape[1])]


def _part(n: int, *ops: Op, n_sm: int = N_SM, plan: Plan | None = None, first: int = 0) -> Plan:
    """Tasks of some operations, SAMPLE among n candidates; nobody waits for anybody.

    Args:
        n: candidates.
        ops: that run.
        n_sm: of the plan.
        plan: another one than the lessons'.
        first: number of the first SM.
    """
    plan = plan or lesson_plan(n_sm)

    def alone(task: Task) -> Task:
        task = replace(task, wait=NO_COUNTER, wait_count=0, signal=NO_COUNTER, flags=0)
        if task.op == Op.SAMPLE:
            task = replace(task, index=n, first=task.first + first)
        return task

    lists = ([alone(task) for task in tasks if task.op in ops] for tasks in plan.tasks)
    return replace(plan, tasks=tuple(map(tuple, lists)))


@cache
def _weights(shape: tuple[int, ...]) -> Array:
    """Any will do; these need no PyTorch, whose import takes longer than all trials."""
    return to_bf16(np.random.default_rng(3).standard_normal(shape, np.float32))


def _begin(buffers: dict[str, Array]) -> None:
    """Inputs of a step that only embeds and draws."""
    buffers["weights"][...] = _weights(buffers["weights"].shape)
    for name in ("gammas", "positions", "earlier", "temperatures", "seeds", "page_table"):
        buffers[name][...] = 0
    buffers["stop_ids"][...] = -1
    buffers["tokens"][...] = LESSON_CONFIG.vocab_size - 2


@cache
def _embedded(tokens: tuple[int, ...]) -> Array:
    """x after EMBED of these tokens, float32 [rows, H]."""
    part = _part(1, Op.EMBED)
    interpreter = Interpreter.of(part, MAX_CONTEXT)
    _begin(interpreter.buffers)
    interpreter.buffers["tokens"][: len(tokens)] = tokens
    interpreter.decode()
    interpreter.run(len(tokens), 0)
    return np.array(interpreter.buffers["x"][0, : len(tokens)])


def run_sample(
    program: Program, case: Candidates, where: str, *, n_steps: int = 2, ends_after: int = 0
) -> None:
    """Launch the learner's kernel and look at what it leaves.

    Args:
        program: the kernel with the learner's `sample` in it.
        case: candidates, the same in each step.
        where: the case, in words.
        n_steps: most steps of the launch.
        ends_after: steps after which stop ids end it; 0 if they do not.

    Raises:
        WrongAnswerError: a hang, a wrong token, a wrong x of the next step, a wrong number of
            steps.
    """
    n, rows = case.values.shape
    right, steps = case.winners, ends_after or n_steps
    # Without EMBED first, which would read far outside if a token is none.
    own = _launch(program, _part(n, Op.SAMPLE), case, 1, where)
    same(right, own["tokens_out"][0, :rows], where, "tokens_out of step 0")
    own = _launch(program, _part(n, Op.EMBED, Op.SAMPLE), case, n_steps, where)
    if own["progress"][0] != steps:
        raise WrongAnswerError(
            f"{where}: the launch must end after {steps} steps, it ends after {own['progress'][0]}"
        )
    if steps > 1:
        # Of step 0 x says nothing: nobody waits between EMBED and SAMPLE here, so a fast warp may
        # draw a token before a slow one has embedded the old one.
        x = own["x"][0, :rows]
        same(_embedded(tuple(map(int, right))), x, f"{where}, step {steps - 1}", "x after EMBED")
    same(right, own["tokens_out"][steps - 1, :rows], where, f"tokens_out of step {steps - 1}")


def _changing(program: Program, ids: tuple[tuple[int, ...], ...], where: str) -> dict[str, Array]:
    """At most four steps of three rows, of which each draws another token than the one before;
    two rows that have stopped end it.

    HEAD does not run: `tokens_out` of step 0 lies over the values of the first candidate. So that
    one wins once, and its value becomes a token, which as a float is next to 0. The second wins
    then, and from there on, for its number is the higher one. With one SM nobody else still reads.
    """
    tokens = np.arange(300, 312, dtype=np.int32).reshape(4, 3)
    values = np.repeat(CHANGING[:, None], 3, axis=1)
    case = Candidates(values, tokens, ids)
    part = _part(2, Op.SAMPLE, n_sm=1)
    return _launch(program, part, case, 4, where, stop_after=2, changing=True)


def stop_one_by_one(program: Program) -> None:
    """Three rows of which the first draws its stop id in step 0 and the second in step 1.

    Raises:
        WrongAnswerError: the launch does not end after the second of four steps.
    """
    where = "row 0 draws a stop id in step 0, row 1 in step 1; two such rows end the launch"
    own = _changing(program, ((300,), (400, 401, 304), ()), where)
    if own["progress"][0] != 2:
        raise WrongAnswerError(
            f"{where}: it must end after 2 steps, it ends after {own['progress'][0]}"
        )


def stop_twice(program: Program) -> None:
    """Row 0 draws its stop id number 4, and another in each step after that. It is one row, so the
    launch goes on, and the row has a token in each step.

    Raises:
        WrongAnswerError: the launch ends early, or the row gets no more tokens.
    """
    where = "row 0 draws a stop id in each of 4 steps; two such rows would end the launch"
    own = _changing(program, ((400, 401, 402, 403, 300, 303), (), ()), where)
    if own["progress"][0] != 4:
        raise WrongAnswerError(
            f"{where}: it must go on for 4 steps, it ends after {own['progress'][0]}"
        )
    drawn = own["best_values"].view(np.int32)[:4, 0].tolist()
    for step, right in enumerate((300, 303, 303, 303)):
        if drawn[step] != right:
            untouched = drawn[step] == int(CHANGING[step].view(np.int32))
            what = "is not written" if untouched else f"is {drawn[step]}"
            raise WrongAnswerError(
                f"{where}: tokens_out of step {step}, row 0, must be {right}, and {what}"
            )


def second_sm_alone(program: Program) -> None:
    """SAMPLE of an SM that is not the first.

    Raises:
        WrongAnswerError: it writes `tokens_out`.
    """
    case = Candidates.drawn(40, 3, seed=5)
    where = "an SM with task.first == 1"
    own = _launch(program, _part(40, Op.SAMPLE, n_sm=1, first=1), case, 1, where)
    if (own["tokens_out"] != -1).any():
        raise WrongAnswerError(f"{where}: tokens_out must stay as it is, and has been written")


def _written(source: str) -> str:
    """The body of the learner's loop."""
    text = source.partition(f'"{YOURS}"')[2].partition("// tokens of all rows")[0]
    return re.sub(r"//[^\n]*", "", text.partition("+= CONSUMERS)")[2])


def in_a_larger_build(program: Program) -> None:
    """Ten rows in a build for 16, with memory for 32: warps 0 and 1 have a second row.

    It takes another compilation. So it is left out if nothing in the answer can tell the builds
    apart: neither MOST_ROWS nor a number of rows, nor a jump out of the loop.

    Raises:
        WrongAnswerError: a wrong token.
    """
    if not re.search(r"\b(MOST_ROWS|break|return|continue|goto|8|16)\b", _written(program.source)):
        return
    source = program.source
    size = shared_bytes(LESSON_CONFIG, HOST_RING, LARGER)
    for name, value in (("ROWS", LARGER), ("MOST_ROWS", LARGER_ROWS), ("SHARED_BYTES", size)):
        source = re.sub(rf"\bint {name} = \d+;", f"int {name} = {value};", source, count=1)
    larger = Program(source, name=f"{program.name}_larger")
    plan = build_plan(LESSON_CONFIG, 1, full_pages=48, sliding_pages=48, rows=LARGER)
    drawn = Candidates.drawn(40, 10, seed=6)
    ids = tuple((int(token),) if row == 0 else () for row, token in enumerate(drawn.winners))
    case = Candidates(drawn.values, drawn.tokens, ids)
    where = f"10 rows in a build with MOST_ROWS {LARGER_ROWS} and ROWS {LARGER}"
    part = _part(40, Op.SAMPLE, plan=plan)
    own = _launch(larger, part, case, 2, where, stop_after=2)
    for step in range(2):
        same(case.winners, own["tokens_out"][step, :10], where, f"tokens_out of step {step}")


def _memory(program: Program, part: Plan, case: Candidates) -> dict[str, Array]:
    """Buffers of a launch, between guards."""
    n, rows = case.values.shape
    made = Interpreter.of(part, MAX_CONTEXT).buffers
    _begin(made)
    room = made["tokens"].shape[0]
    made["best_values"] = np.full((PLACES, room), np.nan, np.float32)
    made["best_tokens"] = np.full((PLACES, room), -1, np.int32)
    made["best_values"][n:, :rows] = 1e30
    made["best_tokens"][n:, :rows] = BEHIND
    made["best_values"][:n, :rows], made["best_tokens"][:n, :rows] = case.values, case.tokens
    made["tokens_out"][...] = -1
    for row, ids in enumerate(case.stop_ids):
        made["stop_ids"][row, : len(ids)] = ids
    return {name: program.array(array) for name, array in made.items() if name in BUFFERS}


def _launch(
    program: Program, part: Plan, case: Candidates, n_steps: int, where: str, *,
    stop_after: int = 1, changing: bool = False,
) -> dict[str, Array]:  # fmt: skip
    """Launch; `changing`: `tokens_out` lies over the candidates' values."""
    own = _memory(program, part, case)
    scalars = {"n_steps": n_steps, "stop_after": stop_after}
    if changing:
        scalars["tokens_out"] = own["best_values"].ctypes.data
    launch(program, part, own, case.values.shape[1], 0, where, **scalars)
    return own
