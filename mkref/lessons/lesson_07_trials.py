"""The trials of exercise 07.1: EMBED and SAMPLE of the real kernel, with candidates made up here.

A launch has the list EMBED, SAMPLE on each of two SMs, for several steps. So a token that SAMPLE
draws is embedded by the next step, and a stop id ends the launch; no other part of a step runs. The
candidates of HEAD lie in memory, as many and as strange as a case wants; behind the last one lies a
larger value, which is nobody's.

In such a launch all steps have the same candidates, and ROWS, MOST_ROWS, CONSUMERS and STOP_IDS are
all 8. So what `sample` needs of the kernel is compiled a second time, with the answer, for sizes
that differ, and a kernel of the trial calls it for several steps, each with candidates of its own.
It sees what the SM keeps, too.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from mkref.lessons.cuda_exercise import CudaExercise
from mkref.lessons.exercise import WrongAnswerError
from mkref.lessons.program import YOURS, Program, same
from mkref.lessons.source import code
from mkref.lessons.steps import MAX_CONTEXT, launch, lesson_plan
from mkref.lessons.whole import LESSON_CONFIG
from mkref.machine.host import HOST_RING
from mkref.machine.source import kernel_source, shared_bytes
from mkref.plan import NO_COUNTER, Interpreter, Op, Plan
from mkref.plan.buffers import BUFFERS
from mkref.reference.sampling import order_key
from mkref.reference.scalars import to_bf16

if TYPE_CHECKING:
    from mkref.plan.task import Task

__all__ = ["Candidates", "SampleExercise", "alone", "run_sample", "second_sm_alone"]
__all__ += ["smallest_values"]

N_SM = 2
PLACES = 160
"""Candidates that there is room for: more than any case has, and than any GPU of today has SMs."""
BEHIND = LESSON_CONFIG.vocab_size - 1
"""Token of what lies behind the last candidate; no candidate has it."""
OTHER = {"ROWS": 32, "MOST_ROWS": 16, "STOP_IDS": 12}
"""Sizes of the second build. CONSUMERS stays 8, so two of ten rows are second rows of a warp."""
ROWS_ALONE, CANDIDATES, STEPS = 10, 40, 5
BEFORE = 7
"""Token of each row before the first step of the second build; no candidate has it."""
THREADS = 256
PROBE = """
#line 1 "the trial"
extern "C" __global__ void sample_alone(int* tokens_out, int* tokens, int* row_stopped, int* ended,
                                        int* progress, const float* values, const int* candidates,
                                        const int* stop_ids, int* zeros, int places, int rows,
                                        int n, int first, int n_steps, int stop_after) {
  Shared& s = *(Shared*)ptx::shared_memory();
  const int thread = threadIdx.x;
  for (int i = thread; i < (int)(sizeof(Shared) / 4); i += blockDim.x) ((int*)&s)[i] = 0;
  Params p = {};
  p.tokens_out = tokens_out, p.stop_ids = stop_ids, p.status = (decltype(p.status))zeros;
  p.control = (decltype(p.control))(zeros + 16), p.progress = (decltype(p.progress))progress;
  p.rows = rows, p.n_steps = n_steps + 1, p.stop_after = stop_after;
  Task task = {};
  task.op = OP_SAMPLE, task.first = first, task.index = n;
  Context c{p, s, thread, thread / 32, thread % 32, thread % 32 / 4, thread % 4};
  __syncthreads();
  if (thread < MOST_ROWS) s.tokens[thread] = BEFORE;
  for (c.step = 0; c.step < n_steps; c.step++) {
    p.best_values = (decltype(p.best_values))(values + c.step * places * ROWS);
    p.best_tokens = (decltype(p.best_tokens))(candidates + c.step * places * ROWS);
    __syncthreads();
    const bool last = sample(c, task);
    __syncthreads();
    if (thread < MOST_ROWS) {
      tokens[c.step * MOST_ROWS + thread] = s.tokens[thread];
      row_stopped[c.step * MOST_ROWS + thread] = s.row_stopped[thread];
    }
    ended[c.step * blockDim.x + thread] = last;
  }
}
""".replace("BEFORE", str(BEFORE))
Array = npt.NDArray[Any]


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


class SampleExercise(CudaExercise):
    """The kernel, and before it what `sample` needs again, for the sizes `OTHER`."""

    def whole(self, answer: str) -> str:
        """The translation unit with an answer in it, twice."""
        source = kernel_source(LESSON_CONFIG, HOST_RING, OTHER["ROWS"], OTHER["MOST_ROWS"])
        for name, value in OTHER.items():
            source, n = re.subn(rf"\bint {name} = \d+;", f"int {name} = {value};", source)
            assert n == 1
        # The loader, the products and attention cost a second, and no `sample` needs them.
        before, _, _ = source.partition("\n// ---- 6 ")
        best = code("best_of_lanes").text
        assert best not in before
        again = f'{before}\n{best}\n#line 1 "{YOURS}"\n{answer}\n{PROBE}'
        # In front: calls with types of both builds in sight would be ambiguous behind the kernel.
        return (
            f"namespace other_build {{\n{again}}}\nusing other_build::sample_alone;\n"
            f'#line 1 "kernel"\n{super().whole(answer)}'
        )


@cache
def _several(smallest: bool) -> tuple[Array, Array, Array]:
    """Candidates of each step of the second build, [STEPS, PLACES, ROWS], and the right tokens,
    [STEPS, rows]. Behind the last candidate lies a larger value, in unused rows NaN.

    Args:
        smallest: of values near the smallest that a float32 can have; in step 0 near -2000.
    """
    shape = (STEPS, PLACES, OTHER["ROWS"])
    values, tokens = np.full(shape, np.nan, np.float32), np.full(shape, -1, np.int32)
    values[:, :, :ROWS_ALONE], tokens[:, :, :ROWS_ALONE] = 1e30, BEHIND
    right = np.zeros((STEPS, ROWS_ALONE), np.int32)
    # No token is drawn twice, so that each stop id belongs to one row and one step.
    own = np.random.default_rng(8).permutation(np.arange(BEFORE + 1, BEHIND))[: right.size]
    others = np.setdiff1d(np.arange(BEFORE + 1, BEHIND), own)
    for step in range(STEPS):
        case = Candidates.drawn(CANDIDATES, ROWS_ALONE, seed=30 + step)
        drawn = case.values
        if smallest:
            drawn = -2000 + drawn if step == 0 else np.float32(-3.35e38) + np.float32(1e36) * drawn
        at = drawn.argmax(axis=0), np.arange(ROWS_ALONE)
        chosen = np.random.default_rng([9, step]).choice(others, drawn.shape).astype(np.int32)
        right[step] = chosen[at] = own[step * ROWS_ALONE :][:ROWS_ALONE]
        values[step, :CANDIDATES, :ROWS_ALONE] = drawn
        tokens[step, :CANDIDATES, :ROWS_ALONE] = chosen
    return values, tokens, right


STOPS = {(0, 1): 11, (1, 1): 2, (2, 9): 9, (3, 9): 0, (4, 8): 8}
"""Step and row: number of the stop id that is drawn. Rows 1 and 9 do it twice."""


def _stop_ids(right: Array) -> Array:
    """Those of `STOPS`; all others are tokens that other rows draw."""
    ids = np.full((OTHER["ROWS"], OTHER["STOP_IDS"]), -1, np.int32)
    for row in range(ROWS_ALONE):
        near = [(row - i) % ROWS_ALONE for i in (1, 2, 3)]
        ids[row] = right[:4, near].ravel()
    for (step, row), number in STOPS.items():
        ids[row, number] = right[step, row]
    return ids


def _alone(program: Program, where: str, first: int, smallest: bool) -> None:
    values, candidates, right = _several(smallest)
    most = OTHER["MOST_ROWS"]
    tokens = np.full((STEPS, most), BEFORE, np.int32)
    tokens[:, :ROWS_ALONE] = right
    stopped, out = np.zeros_like(tokens), np.full((STEPS, OTHER["ROWS"]), -1, np.int32)
    for step, row in STOPS:
        stopped[step:, row] = 1
    if first == 0:
        out[:, :ROWS_ALONE] = right
    ended = np.zeros((STEPS, THREADS), np.int32)
    ended[-1] = 1  # three rows have stopped
    wanted = {"tokens_out": out, "c.s.tokens": tokens, "c.s.row_stopped": stopped, "ended": ended}
    own = {name: program.poisoned(words.shape, np.int32) for name, words in wanted.items()}
    given = [program.array(one) for one in (values, candidates, _stop_ids(right))]
    progress, zeros = program.array(np.zeros(16, np.int32)), program.array(np.zeros(64, np.int32))
    program.launch(
        "sample_alone", (1,), (THREADS,),
        (*own.values(), progress, *given, zeros, PLACES, ROWS_ALONE, CANDIDATES, first, STEPS, 3),
        shared=shared_bytes(LESSON_CONFIG, HOST_RING, most),
    )  # fmt: skip
    for name, words in wanted.items():
        same(words, own[name], where, name)


def alone(first: int) -> Callable[[Program], None]:
    """Ten rows, of which three draw stop ids, two of them twice, and go on.

    Args:
        first: `task.first`, 0 on the first SM.
    """
    sizes = ", ".join(f"{name} {size}" for name, size in OTHER.items())
    where = f"sample alone, {ROWS_ALONE} rows, {sizes}, task.first {first}"
    return lambda program: _alone(program, where, first, smallest=False)


def smallest_values(program: Program) -> None:
    """The same with values near -2000 in step 0, and near -3.4e38 in all others."""
    _alone(program, "sample alone, values near -2000 and near -3.4e38", 0, smallest=True)


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
    program: Program, part: Plan, case: Candidates, n_steps: int, where: str
) -> dict[str, Array]:
    """Launch; the first row that has stopped ends it."""
    own = _memory(program, part, case)
    scalars = {"n_steps": n_steps, "stop_after": 1}
    launch(program, part, own, case.values.shape[1], 0, where, **scalars)
    return own
