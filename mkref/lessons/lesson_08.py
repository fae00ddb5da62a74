"""Lesson 08: its exercises, a barrier of the whole grid and the walk through a list of tasks.

Both are parts of a small persistent kernel, `mkref/lessons/cuda/08_loop.cu`. Its tasks read what
other blocks wrote in the phase before, so whoever goes on too early computes something else.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import numpy.typing as npt

from mkref.lessons.cuda_exercise import CudaExercise, Patch
from mkref.lessons.exercise import Property, WrongAnswerError
from mkref.lessons.program import HANGS, Program, same
from mkref.lessons.source import Code, code
from mkref.plan.share import share

__all__ = ["EXERCISES", "end_of_step", "run_lists"]

FILE = "08_loop.cu"
THREADS = 96
TIME_S = 1.5
Record = tuple[int, int, int]
"""phase, first value, number of values."""


def end_of_step() -> Code:
    """The second half of the kernel's `sample`, behind what exercise 07.1 asks for."""
    whole = code("sample")
    lines = whole.text.splitlines()
    first = next(i for i, line in enumerate(lines) if "consumers_sync()" in line)
    return replace(whole, line=whole.line + first, text="\n".join(lines[first:]))


def run_lists(
    program: Program, lists: Sequence[Sequence[Record]], *, n: int, n_phases: int, n_steps: int,
    seed: int, where: str, counted: bool = False,
) -> None:  # fmt: skip
    """Walk lists of tasks and compare the values of both buffers with what must come out.

    Args:
        program: the compiled answer.
        lists: records of every block; together they cover all values in every phase.
        n, n_phases, n_steps: sizes.
        seed: of the inputs, and of the CPU's scheduler.
        where: the case, in words.
        counted: look at the number of arrivals, too.

    Raises:
        WrongAnswerError: something else came out, or the kernel hung.
    """
    x0 = np.random.default_rng([seed, n]).integers(0, 1 << 32, n, dtype=np.uint32)
    # What lies behind the last list belongs to nobody: whoever reads on writes beside x.
    behind = (n_phases - 1, n, 1)
    x, arrivals = program.poisoned((2, n), np.uint32), program.array(np.zeros(1, np.int32))
    x[0] = x0
    records = np.array([*(record for tasks in lists for record in tasks), behind], np.int32)
    offsets = np.cumsum([0, *map(len, lists)]).astype(np.int32)
    args = (
        x, program.array(records), program.array(offsets), arrivals, n, n_phases, n_steps
    )  # fmt: skip
    try:
        program.launch("steps", (len(lists),), (THREADS,), args, seed=seed, timeout_s=TIME_S)
    except WrongAnswerError as error:
        hung = str(error).startswith((HANGS, "deadlock"))
        came = "nobody has arrived" if not arrivals[0] else "some or all blocks have arrived"
        got = f"; {came}" if hung and counted else ""
        raise WrongAnswerError(f"{error}{got}") from error
    rounds = n_phases * n_steps
    right, before = _result(x0, n_phases, rounds)
    try:
        same(right, x[rounds % 2], where, "x")
        same(before, x[(rounds + 1) % 2], f"{where}: the phase before", "x")
    except WrongAnswerError as error:
        if counted or arrivals[0] == rounds * len(lists):
            raise
        raise WrongAnswerError(
            f"{error}; {arrivals[0]} arrivals at barriers, must be {rounds * len(lists)}"
        ) from error
    if counted:
        same(np.array([rounds * len(lists)], np.int32), arrivals, where, "arrivals")


def _result(
    x: npt.NDArray[np.uint32], n_phases: int, rounds: int
) -> tuple[npt.NDArray[np.uint32], npt.NDArray[np.uint32]]:
    """x after all rounds, and before the last."""
    i, before = np.arange(len(x)), x
    for number in range(rounds):
        phase = number % n_phases
        other = x[(7 * i + 5 + phase) % len(x)]
        x, before = np.uint32(3) * x + other + np.uint32(phase), x
    return x, before


def _even(n_sm: int, n: int, n_phases: int) -> list[list[Record]]:
    """A task per phase and block; blocks take their shares backwards."""
    return [
        [(phase, begin, end - begin) for phase in range(n_phases)]
        for begin, end in (share(n, n_sm, n_sm - 1 - sm) for sm in range(n_sm))
    ]


def _uneven(n_sm: int, n: int, n_phases: int) -> list[list[Record]]:
    """In every phase one block has nothing, and another has two tasks."""
    lists: list[list[Record]] = [[] for _ in range(n_sm)]
    for phase in range(n_phases):
        for part in range(n_sm):
            begin, end = share(n, n_sm, part)
            sm = (part + phase) % n_sm
            lists[(sm + 1) % n_sm if part == 0 else sm].append((phase, begin, end - begin))
    return lists


def _halves(n_sm: int, n: int, n_phases: int) -> list[list[Record]]:
    """In every phase each block has a task, and the first one two."""
    lists: list[list[Record]] = [[] for _ in range(n_sm)]
    for phase in range(n_phases):
        for part in range(n_sm + 1):
            begin, end = share(n, n_sm + 1, part)
            lists[part % n_sm].append((phase, begin, end - begin))
    return lists


def _idle(n_sm: int, n: int, n_phases: int) -> list[list[Record]]:
    """The second block has no task at all."""
    first, *others = _even(n_sm - 1, n, n_phases)
    return [first, [], *others]


def _trial(
    deal: Callable[[int, int, int], list[list[Record]]], n_sm: int, n: int, n_phases: int,
    n_steps: int, *, seed: int = 0, counted: bool = False,
) -> Callable[[Program], None]:  # fmt: skip
    blocks = f"{n_sm} block{'s' if n_sm > 1 else ''}"
    steps = f"{n_steps} step{'s' if n_steps > 1 else ''} of {n_phases}"
    where = f"{blocks}, {steps} phase{'s' if n_phases > 1 else ''}"

    def trial(program: Program) -> None:
        lists = deal(n_sm, n, n_phases)
        run_lists(
            program, lists, n=n, n_phases=n_phases, n_steps=n_steps, seed=seed, where=where,
            counted=counted,
        )  # fmt: skip

    return trial


_BARRIER = (
    Patch(
        "  __syncthreads();  // all threads of this block have stored\n",
        "",
        "thread 0 arrives for the whole block, and other warps of it may still be storing. What "
        "must all of them have done before?",
    ),
    Patch(
        "  __syncthreads();  // thread 0 has seen all blocks\n",
        "",
        "only thread 0 waits for the other blocks; the rest of its block goes on at once. How do "
        "they learn that it has seen all?",
    ),
    Patch(
        "(int)gridDim.x * (round + 1)",
        "(int)gridDim.x",
        "the counter is never set back. From the second barrier on it is full before anybody has "
        "arrived: how many arrivals are there after barrier number `round`?",
    ),
    Patch(
        "(int)gridDim.x * (round + 1)",
        "(int)gridDim.x * round",
        "`round` counts from 0, so this barrier waits for the arrivals of the one before.",
    ),
    Patch(
        "    ptx::red_release_add(arrivals, 1);\n"
        "    wait_counter(arrivals, (int)gridDim.x * (round + 1));\n",
        "    wait_counter(arrivals, (int)gridDim.x * (round + 1));\n"
        "    ptx::red_release_add(arrivals, 1);\n",
        "this wait is never over. Does a block arrive before it waits? And does it wait for as "
        "many arrivals as there are blocks (gridDim.x), not threads?",
    ),
    Patch(
        "  if (threadIdx.x == 0) {\n    ptx::red_release_add(arrivals, 1);\n",
        "  ptx::red_release_add(arrivals, 1);\n  if (threadIdx.x == 0) {\n",
        "all threads arrive. A block is one arrival, or the counter is full too early.",
    ),
    Patch(
        "  if (threadIdx.x == 0) {\n",
        "  {\n",
        "all 96 threads arrive and poll, so the counter is full when the first block has come. One "
        "thread of a block speaks for all of it.",
    ),
    Patch(
        "  if (threadIdx.x == 0) {\n",
        "  {\n",
        "it holds, but every thread arrives and polls, 96 times the traffic at one address. Here a "
        "block is one arrival: let thread 0 do it.",
        more=(("(int)gridDim.x *", "(int)(gridDim.x * blockDim.x) *"),),
    ),
    Patch(
        "  if (threadIdx.x == 0) {\n",
        "  if (threadIdx.x % 32 == 0) {\n",
        "one lane of each warp arrives, three of a block. The `__syncthreads()` before has brought "
        "all warps together already: one arrival of the block is enough.",
    ),
    Patch(
        "  }\n  __syncthreads();  // thread 0 has seen all blocks\n",
        "    __syncthreads();\n  }\n",
        "the second `__syncthreads()` is inside the `if`, so thread 0 alone comes to it. All "
        "threads of a block must come to the same one.",
    ),
    Patch(
        "    wait_counter(arrivals, (int)gridDim.x * (round + 1));\n",
        "    wait_counter(arrivals, (int)gridDim.x);\n    *arrivals = 0;\n",
        "the counter is set back to 0. Who has not looked yet waits for a number that is gone. Let "
        "it grow, and wait for more each time.",
    ),
    Patch(
        "    ptx::red_release_add(arrivals, 1);\n",
        "    if (blockIdx.x == 0) ptx::red_release_add(arrivals, 1);\n",
        "only block 0 arrives, and the others are waited for. Every block arrives, by its own "
        "thread 0.",
    ),
)

_WALK = (
    Patch(
        "      for (; at < n_tasks && list[at].phase == phase; at++)\n"
        "        run_task(p, list[at], round);\n"
        "      grid_barrier(p.arrivals, round);\n",
        "      const int first = at;\n"
        "      for (; at < n_tasks && list[at].phase == phase; at++)\n"
        "        run_task(p, list[at], round);\n"
        "      if (at > first) grid_barrier(p.arrivals, round);\n",
        "a block without tasks in a phase does not arrive, and all others wait for it. Who must "
        "come to a barrier?",
    ),
    Patch(
        "        run_task(p, list[at], round);\n      grid_barrier(p.arrivals, round);\n",
        "      {\n        run_task(p, list[at], round);\n"
        "        grid_barrier(p.arrivals, round);\n      }\n",
        "a barrier after each task: blocks with two tasks in a phase come twice, those without "
        "never. A barrier belongs to a phase.",
    ),
    Patch(
        "  int round = 0;\n  for (int step = 0; step < p.n_steps; step++) {\n",
        "  for (int step = 0; step < p.n_steps; step++) {\n    int round = 0;\n",
        "the number of the barrier begins again with each step, but the counter goes on: from the "
        "second step on no barrier holds anybody.",
    ),
    Patch(
        "  for (int step = 0; step < p.n_steps; step++) {\n    int at = 0;\n",
        "  int at = 0;\n  for (int step = 0; step < p.n_steps; step++) {\n",
        "the list is walked in the first step only. Where does `at` have to be when the next step "
        "begins?",
    ),
    Patch(
        "      for (; at < n_tasks && list[at].phase == phase; at++)\n",
        "      if (at < n_tasks && list[at].phase == phase)\n",
        "a phase may have several tasks in one list; this does one of them, and never the next.",
        more=(("run_task(p, list[at], round);", "run_task(p, list[at++], round);"),),
    ),
    Patch(
        "      grid_barrier(p.arrivals, round);\n      round++;\n    }\n",
        "      round++;\n    }\n    grid_barrier(p.arrivals, step);\n",
        "one barrier per step: the second phase reads what others are still writing in the first.",
    ),
    Patch(
        "at < n_tasks && list[at].phase == phase",
        "list[at].phase == phase",
        "nobody looks where the list ends. Behind it lies the list of the next block, or nothing: "
        "look at n_tasks before you look at list[at].",
    ),
    Patch(
        "run_task(p, list[at], round);",
        "run_task(p, list[at], phase);",
        "the phase begins again with each step, but the two buffers go on in turns. run_task wants "
        "the number that counts the phases of all steps.",
    ),
    Patch(
        "        run_task(p, list[at], round);\n      grid_barrier(p.arrivals, round);\n"
        "      round++;\n",
        "      {\n        run_task(p, list[at], round);\n"
        "        grid_barrier(p.arrivals, round);\n        round++;\n      }\n",
        "each task has a barrier with a number of its own, so blocks with fewer tasks are counted "
        "too seldom, and the others wait for them. Count phases, not tasks.",
    ),
    Patch(
        "        run_task(p, list[at], round);\n      grid_barrier(p.arrivals, round);\n"
        "      round++;\n",
        "        run_task(p, list[at], round);\n"
        "      if (at > first) grid_barrier(p.arrivals, round++);\n",
        "a phase without tasks here is left out, barrier and number. The other blocks count it: "
        "every block must come to every barrier, with the same number.",
        more=(("      for (;", "      const int first = at;\n      for (;"),),
    ),
    Patch(
        "      round++;\n",
        "",
        "all barriers have number 0, so only the first of them holds anybody. What must grow with "
        "every phase?",
    ),
    Patch(
        "  int round = 0;\n",
        "  if (n_tasks == 0) return;\n  int round = 0;\n",
        "a block without any task leaves, and all others wait for it at the first barrier. Who "
        "must come to a barrier?",
    ),
    Patch(
        "      grid_barrier(p.arrivals, round);\n",
        "",
        "there is no barrier: each phase reads what other blocks may not have written yet. When "
        "has a phase ended?",
    ),
    Patch(
        "      grid_barrier(p.arrivals, round);\n      round++;\n    }\n",
        "    }\n    grid_barrier(p.arrivals, round);\n    round++;\n",
        "barriers and `round` count steps here. Both belong to the phase: its results go to the "
        "other buffer, and all must be there before the next phase reads them.",
    ),
    Patch(
        "      grid_barrier(p.arrivals, round);\n      round++;\n",
        "      round++;\n      grid_barrier(p.arrivals, round);\n",
        "`round` has grown before the barrier gets it. The first barrier has number 0: with number "
        "1 it waits for twice as many arrivals as there are blocks.",
    ),
    Patch(
        "        run_task(p, list[at], round);\n",
        "        if (threadIdx.x == 0) run_task(p, list[at], round);\n",
        "one thread calls run_task, which shares its values among all threads of the block: thread "
        "0 does its own part, and nobody the others'.",
    ),
    Patch(
        "  for (int step = 0; step < p.n_steps; step++) {\n",
        "  {\n",
        "the list is walked once, whatever p.n_steps says, and there are as few arrivals. What is "
        "around the loop over phases?",
    ),
)

EXERCISES = (
    CudaExercise(
        id="08.1",
        answer="grid_barrier",
        file=FILE,
        properties=(
            Property("one block waits for nobody else", _trial(_even, 1, 300, 2, 1, counted=True)),
            Property("one barrier of three blocks", _trial(_even, 3, 500, 1, 1, counted=True)),
            Property("many barriers", _trial(_even, 3, 500, 4, 2, counted=True)),
            Property("warps in any order", _trial(_even, 4, 700, 4, 2, seed=3, counted=True)),
            Property("warps in another order", _trial(_even, 4, 700, 4, 2, seed=4, counted=True)),
            Property("blocks that are late", _trial(_uneven, 5, 901, 5, 2, seed=5, counted=True)),
        ),
        mistakes=_BARRIER,
        then="What would happen if the grid had one block more than the GPU can run at a time?",
    ),
    CudaExercise(
        id="08.2",
        answer="walk",
        file=FILE,
        properties=(
            Property("one phase", _trial(_even, 3, 500, 1, 1)),
            Property("several phases", _trial(_even, 3, 500, 3, 1)),
            Property("several steps", _trial(_even, 3, 500, 3, 3)),
            Property("two tasks in a phase", _trial(_halves, 3, 500, 3, 2, seed=3)),
            Property("phases without tasks, and with two", _trial(_uneven, 4, 700, 4, 2)),
            Property("a block without any task", _trial(_idle, 4, 700, 3, 2)),
            Property("warps in any order", _trial(_uneven, 4, 700, 5, 2, seed=3)),
            Property("warps in another order", _trial(_uneven, 5, 901, 5, 2, seed=4)),
        ),
        mistakes=_WALK,
        then="Now compare with `consumer` in cuda/megakernel.cu: where has the barrier gone?",
    ),
)
