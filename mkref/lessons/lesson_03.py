"""Lesson 03: its exercises, the port of RMSNorm into a task and the signal of a task.

Both are parts of a small persistent kernel, `mkref/lessons/cuda/03_tasks.cu`. The inputs are such
that a wrong row, a wrong number of threads, another order of additions, a missing barrier or an
early signal shows. Whether an arrival is a release shows in no run on a CPU: that is read from the
answer's text.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt

from mkref.lessons.cuda_exercise import CudaExercise
from mkref.lessons.exercise import Property, WrongAnswerError, finding
from mkref.lessons.lesson_03_mistakes import NORM_TASK, SIGNALLER
from mkref.lessons.lesson_03_ties import near_ties
from mkref.lessons.program import YOURS, Program, same
from mkref.reference.scalars import rmsnorm, to_bf16

__all__ = ["ADD", "EXERCISES", "NORM", "block_barrier", "norm_bits", "run_tasks"]

FILE = "03_tasks.cu"
ADD, NORM = 0, 1
"""Operations of the small kernel."""
EPS = 1e-5
THREADS, SHARED = 320, 1024
TIME_S = 3.0
LATE = 10
"""Pauses of a warp that is late: enough for all others to go as far as they can."""
RELEASES = ("red_release_add", "add_acq_rel")
"""Additions that make visible what came before."""
Floats = npt.NDArray[np.float32]
Record = tuple[int, int, int, int, int]
"""op, row, counter to wait for (-1: none), arrivals per step, counter to signal (-1: none)."""


def run_tasks(
    program: Program, lists: Sequence[Sequence[Record]], *, hidden: int, rows: int, n_counters: int,
    n_steps: int = 1, seed: int = 0, late: int = 0, where: str,
    inputs: tuple[Floats, npt.NDArray[np.uint16]] | None = None,
) -> None:  # fmt: skip
    """Run lists of tasks and compare x, y and the counters with what must come out.

    Every step adds `delta` once to each row that an ADD names; every NORM must see x of its step.

    Args:
        program: the compiled answer.
        lists: records of every SM.
        hidden, rows, n_counters: sizes.
        n_steps: how often the lists are walked.
        seed: of the inputs, and of the CPU's scheduler.
        late: pauses of the warps of SM 0 after each arrival and before each task.
        where: the case, in words.
        inputs: x and gamma; default: random.

    Raises:
        WrongAnswerError: something else came out, or the kernel hung.
    """
    rng = np.random.default_rng([seed, hidden])
    x0 = rng.normal(0, 3, (rows, hidden)).astype(np.float32)
    delta = rng.normal(0, 1, hidden).astype(np.float32)
    gamma = to_bf16(rng.normal(0, 1, hidden).astype(np.float32))
    if inputs is not None:
        x0, gamma = inputs
    x, y = program.array(x0), program.poisoned((rows, hidden))
    counters = program.array(np.zeros(max(1, n_counters), np.int32))
    records = [record for tasks in lists for record in tasks]
    offsets = np.cumsum([0, *map(len, lists)]).astype(np.int32)
    args = (
        y, x, program.array(gamma), program.array(delta),
        program.array(np.array(records, np.int32)), program.array(offsets), counters, hidden, EPS,
        n_steps, late,
    )  # fmt: skip
    program.launch(
        "tasks", (len(lists),), (THREADS,), args, shared=SHARED, seed=seed, timeout_s=TIME_S
    )
    right = _result(x0, delta, gamma, records, n_steps)
    if n_counters:
        arrivals = np.bincount([r[4] for r in records if r[4] >= 0], minlength=n_counters)
        same((arrivals * n_steps).astype(np.int32), counters, where, "counters")
    normed = sorted({record[1] for record in records if record[0] == NORM})
    same(right[normed], y[normed], where, "y")
    others = [row for row in range(rows) if row not in normed]
    same(np.full_like(y[others], 0xFFFF), y[others], f"{where}: a row without NORM", "y", bf16=True)


def _result(
    x: Floats, delta: Floats, gamma: npt.NDArray[np.uint16],
    records: Sequence[Record], n_steps: int,
) -> npt.NDArray[np.uint16]:  # fmt: skip
    """y of all rows: the norm of x after all additions, in the order of docs/numerics.md."""
    x = x.copy()
    for _ in range(n_steps):
        for op, row, *_ in records:
            if op == ADD:
                x[row] = x[row] + delta
    return rmsnorm(x, gamma, EPS)


def _norms(rows: int, hidden: int, seed: int, n_sm: int = 1) -> Callable[[Program], None]:
    """Rows dealt to SMs backwards, so that a row is never the number of its SM or task."""
    order = list(range(rows))[::-1]
    lists = [[(NORM, row, -1, 0, -1) for row in order[sm::n_sm]] for sm in range(n_sm)]

    def trial(program: Program) -> None:
        where = f"{rows} rows of {hidden} on {n_sm} SM{'s' if n_sm > 1 else ''}"
        run_tasks(
            program, lists, hidden=hidden, rows=rows + 1, n_counters=0, seed=seed, where=where
        )

    return trial


def _exact(rows: int, hidden: int, seed: int) -> Callable[[Program], None]:
    """NORM of rows that tell whether r has the very bits."""
    lists = [[(NORM, row, -1, 0, -1) for row in range(rows)]]

    def trial(program: Program) -> None:
        run_tasks(
            program, lists, hidden=hidden, rows=rows, n_counters=0, seed=seed,
            inputs=near_ties(rows, hidden, EPS, seed),
            where=f"{rows} rows of {hidden}, values beside ties of bf16",
        )  # fmt: skip

    return trial


def _free(n_tasks: int, seed: int) -> Callable[[Program], None]:
    """Tasks of one SM that wait for nobody, each with a counter of its own."""
    lists = [[(ADD, row, -1, 0, n_tasks - 1 - row) for row in range(n_tasks)]]

    def trial(program: Program) -> None:
        run_tasks(
            program, lists, hidden=96, rows=n_tasks, n_counters=n_tasks, seed=seed,
            where=f"{n_tasks} tasks that wait for nobody" if n_tasks > 1 else "one task",
        )  # fmt: skip

    return trial


def _chain(n_steps: int, seed: int, late: int = 0) -> Callable[[Program], None]:
    """SM 0 moves x on, SM 1 norms it when its counter says so; SM 0 waits before it goes on."""
    rows = 3
    first = [(ADD, row, rows + row, 0, row) for row in range(rows)]
    second = [(NORM, row, row, 1, rows + row) for row in range(rows)]
    slow = ", SM 0 is slow" if late else ""

    def trial(program: Program) -> None:
        run_tasks(
            program, [first, second], hidden=96, rows=rows, n_counters=2 * rows, n_steps=n_steps,
            seed=seed, late=late, where=f"ADD on SM 0, NORM on SM 1, {n_steps} steps{slow}",
        )  # fmt: skip

    return trial


def _released(program: Program) -> None:
    """The arrival is a release: no run on a CPU can tell, so this reads the text."""
    mine = program.source.split(f'"{YOURS}"\n', 1)[1].split("\n#line", 1)[0]
    mine = re.sub(r"//[^\n]*|/\*.*?\*/", "", mine, flags=re.S)
    if not any(one in mine for one in RELEASES):
        if "red_relaxed_add" in mine:
            raise WrongAnswerError(
                "read from your text: ptx::red_relaxed_add counts, but does not make the outputs "
                "visible before the arrival"
            )
        raise WrongAnswerError(
            "read from your text: it never calls ptx::red_release_add, so nothing makes the "
            "outputs visible before the arrival"
        )


def _all(*trials: Callable[[Program], None]) -> Callable[[Program], None]:
    def trial(program: Program) -> None:
        for one in trials:
            one(program)

    return trial


def _program(text: str) -> Program:
    """The small kernel with a text in the place of `norm_task`."""
    return EXERCISES[0].program(EXERCISES[0].as_answer(text))


def block_barrier() -> str:
    """What happens if a task joins its threads with `__syncthreads()`; in words."""
    text = EXERCISES[0].solution_text.replace("consumers_sync()", "__syncthreads()")
    said = finding(_norms(3, 96, seed=0), _program(text))
    return re.sub(r" at line \d+", "", said) or "all rows are right"


def norm_bits(rows: int = 4, hidden: int = 2048) -> dict[str, bool]:
    """Have ordinary kernel and task the bits of NumPy, which adds as docs/numerics.md says?"""
    from mkref.machine.ops import Ops, host_functions

    rng = np.random.default_rng(1)
    x = rng.normal(0, 3, (rows, hidden)).astype(np.float32)
    gamma = to_bf16(rng.normal(0, 1, hidden).astype(np.float32))
    y = np.full((rows, hidden), 0xFFFF, np.uint16)
    Ops(host_functions()).rmsnorm(y, x, gamma, EPS)
    task = finding(_norms(rows, hidden, seed=0), _program(EXERCISES[0].solution_text))
    return {
        "ordinary kernel": bool(np.array_equal(rmsnorm(x, gamma, EPS), y)),
        "task": not task,
    }


EXERCISES = (
    CudaExercise(
        id="03.1",
        answer="norm_task",
        file=FILE,
        properties=(
            Property("one row", _norms(1, 96, seed=0)),
            Property("more values than 4 x 256", _norms(2, 1500, seed=0)),
            Property("a width that is no multiple of 4", _norms(3, 257, seed=0)),
            Property("several rows on two SMs", _norms(5, 96, seed=0, n_sm=2)),
            Property("sums in the order of the ordinary kernel", _exact(16, 1500, seed=0)),
            Property(
                "six tasks in a row, warps in any order",
                _all(*(_norms(6, 300, seed=n) for n in (0, 3, 4))),
            ),
        ),
        mistakes=NORM_TASK,
        then="Now find the same lines in `load_normed` of the kernel that runs.",
    ),
    CudaExercise(
        id="03.2",
        answer="signaller",
        file=FILE,
        properties=(
            Property("a task alone", _free(1, seed=0)),
            Property("five tasks that wait for nobody", _free(5, seed=0)),
            Property("one step of two SMs", _chain(1, seed=0)),
            Property("counters go on in the next steps", _chain(3, seed=0)),
            Property("warps in any order", _all(_chain(3, seed=3), _chain(3, seed=4))),
            Property("tasks that signal nobody", _norms(6, 96, seed=1, n_sm=2)),
            Property("the arrival is a release", _released),
            Property("an SM whose warps are late", _chain(3, seed=0, late=LATE)),
        ),
        mistakes=SIGNALLER,
        then="Now compare with `signaller` in cuda/megakernel.cu: what else does it look at?",
    ),
)
