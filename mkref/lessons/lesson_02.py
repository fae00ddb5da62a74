"""Lesson 02: the step as ordinary kernels, what the ladder recorded about launches, two exercises.

Numbers come from `bench/results/h200/ladder.json`; nothing here measures (`mkref.lessons.live` does
where there is a GPU).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from mkref.errors import RequestError
from mkref.lessons.cuda_exercise import CudaExercise, Patch
from mkref.lessons.exercise import (
    EMPTY,
    Mistake,
    Property,
    PythonExercise,
    WrongAnswerError,
    expect,
)
from mkref.lessons.program import Program, close
from mkref.lessons.recorded import bench_record
from mkref.paths import models_root
from mkref.reference.scalars import from_bf16, to_bf16
from mkref.weights.layout import PAGE
from mkref.widgets.bars import Bar, bar_chart
from mkref.widgets.figure import Figure, Table

__all__ = ["EXERCISES", "LadderRow", "OrdinaryRun", "boundary_cost", "ladder", "ladder_figure"]
__all__ += ["line_of", "ordinary_run", "rung_color"]

RECORD = "h200/ladder.json"
COLORS = {"a": "#D55E00", "b": "#E69F00", "c": "#F0E442"}
"""By letter of the rung, of ways with launches; see `rung_color`."""


@dataclass(frozen=True)
class OrdinaryRun:
    """What a few steps of ordinary kernels made.

    Attributes:
        token_ids: tokens that came out, the largest logit each.
        launches_per_step: kernels that one step took.
    """

    token_ids: list[int]
    launches_per_step: int


def ordinary_run(prompt: Sequence[int], n_tokens: int) -> OrdinaryRun:
    """Run the model nano with a kernel per operation on this CPU, one token after another.

    Args:
        prompt: token ids to begin with.
        n_tokens: how many come out.
    """
    # Late: the trials of the exercises, in processes of their own, do without PyTorch.
    from mkref.machine.ops import Ops, OrdinaryStep
    from mkref.weights.checkpoint import load_checkpoint

    kernels = Ops.host()
    n_steps = len(prompt) + n_tokens - 1
    pages = -(-n_steps // PAGE)
    weights = load_checkpoint(models_root() / "nano")
    step = OrdinaryStep(kernels, weights, rows=1, pages=(pages, pages), context=n_steps)
    table = np.arange(pages, dtype=np.int32)[None]
    tokens = list(prompt)
    for position in range(n_steps):
        fed = np.array(tokens[position : position + 1], np.int32)
        step.run(fed, np.array([position], np.int32), [table, table])
        if position + 1 == len(tokens):
            tokens.append(int(step.following[0]))
    return OrdinaryRun(tokens[len(prompt) :], kernels.n_launches // n_steps)


@dataclass(frozen=True)
class LadderRow:
    """A way to run a step, as recorded on an H200.

    Attributes:
        letter, name: of the rung.
        launches: per step.
        ms: per step.
    """

    letter: str
    name: str
    launches: float
    ms: float


def ladder(letters: str = "abcdefgh", batch: int = 1, *, best: bool = False) -> list[LadderRow]:
    """Rows of the recorded ladder, in its order.

    Args:
        letters: of the rungs.
        batch: rows of the batch, 1, 4 or 8.
        best: of several ways with the same letter only the fastest.

    Raises:
        RequestError: nothing was recorded for these.
    """
    found = [
        LadderRow(row["letter"], row["name"], row["launches_per_step"], row["ms_per_step"])
        for row in ({"letter": r["rung"], **r} for r in bench_record(RECORD)["rows"])
        if row["batch"] == batch and row["letter"] in letters and (row["best"] or not best)
    ]
    if not found:
        raise RequestError(f"data: {RECORD} has no rung {letters!r} with batch {batch}")
    return found


def rung_color(letter: str) -> str:
    """The colour of a rung in the lessons: those of the persistent kernel are blue."""
    return COLORS.get(letter, "#56B4E9")


def ladder_figure(letters: str = "abcdefgh", batch: int = 1, *, best: bool = False) -> Figure:
    """Time per step of some rungs, each against the frame of the slowest."""
    rows = ladder(letters, batch, best=best)
    bars, lines = [], []
    for row in rows:
        times = "launch" if row.launches == 1 else "launches"
        launches = f"{row.launches:.0f} {times}" if row.launches >= 1 else "1 launch for 32 steps"
        text = f"{row.ms:.2f} ms, {launches} [measured]"
        pattern = "diagonal" if "2 per SM" in row.name else "plain"
        color = rung_color(row.letter)
        bars.append(Bar(f"{row.letter}  {row.name}", row.ms, text, color, pattern))
        lines.append((f"{row.letter}  {row.name}", f"{row.launches:g}", f"{row.ms:.3f}"))
    made = bench_record(RECORD)["provenance"]
    said = "; ".join(f"{row.name} {row.ms:.2f} ms" for row in rows)
    sentence = (
        f"Time per step, batch {batch}, 8,192 tokens of context, {made['gpu']}, "
        f"{made['date'][:10]} [measured]: {said}."
    )
    chart = bar_chart(bars, title=sentence, head="time per step")
    return Figure(chart, sentence, Table(("way", "launches per step", "ms per step"), tuple(lines)))


def line_of(letter: str, batch: int = 1) -> tuple[float, float]:
    """Cost of a launch in us, and the time in ms at no launches: the line through the groupings.

    Blocks of which two share an SM are another kernel, and are left out.
    """
    rows = [row for row in ladder(letter, batch) if "2 per SM" not in row.name]
    slope, rest = _line([row.launches for row in rows], [row.ms for row in rows])
    return slope, rest / 1000


# ---- exercise 02.1: an ordinary kernel -----------------------------------------------------------

U = 2.0**-24


def _projects(
    rows: int, hidden: int, width: int, grid: int, seed: int
) -> Callable[[Program], None]:
    some = [f"{n} {what}{'s' if n > 1 else ''}" for n, what in ((rows, "row"), (grid, "block"))]
    where = f"{some[0]}, {hidden} outputs of depth {width}, {some[1]}"

    def trial(program: Program) -> None:
        rng = np.random.default_rng(seed)
        x0 = rng.normal(0, 2, (rows, hidden)).astype(np.float32)
        attn = to_bf16(rng.normal(0, 1, (rows, width)).astype(np.float32))
        weight = to_bf16(rng.normal(0, 1, (hidden, width)).astype(np.float32))
        x = program.array(x0)
        args = (x, program.array(attn), program.array(weight), hidden, width)
        program.launch("o_proj", (grid, rows), (64,), args, seed=seed)
        a, w = (from_bf16(words).astype(np.float64) for words in (attn, weight))
        # width / 32 additions in a lane, five between lanes, one to x.
        size = np.abs(a) @ np.abs(w).T + np.abs(x0)
        close(x0 + a @ w.T, x, (width / 32 + 7) * U * size, where, "x")

    return trial


_WRITTEN = CudaExercise(
    id="02.1",
    answer="o_proj",
    file="ops/07_head.cu",
    function="o_proj",
    properties=(
        Property("a warp for every output", _projects(1, 8, 64, grid=4, seed=0)),
        Property("fewer warps than outputs", _projects(1, 37, 64, grid=2, seed=1)),
        Property("a depth that is no multiple of 32", _projects(1, 12, 75, grid=2, seed=2)),
        Property("three rows", _projects(3, 21, 96, grid=3, seed=3)),
        Property("one block does everything", _projects(2, 9, 33, grid=1, seed=4)),
    ),
    mistakes=(
        Patch(
            "    if (threadIdx.x % 32 == 0) x[out] += sum;",
            "    x[out] += sum;",
            "all 32 lanes of the warp hold the sum, and each of them adds it. Once is enough.",
        ),
        Patch(
            "x[out] += sum",
            "x[out] = sum",
            "x is the residual stream: what was there stays, and the projection is added to it.",
        ),
        Patch(
            "out += gridDim.x * n_warps",
            "out += n_warps",
            "the next output of a warp lies as far away as there are warps in all blocks together.",
        ),
        Patch(
            "warp = blockIdx.x * n_warps + threadIdx.x / 32;",
            "warp = threadIdx.x / 32;",
            "every block does the same outputs. Number the warps through all blocks in x.",
        ),
        Patch(
            "weight + (long long)out * q_width",
            "weight + (long long)out * hidden",
            "weight is [hidden, q_width]: how many values lie between two of its rows?",
        ),
        Patch(
            "  attn += (long long)blockIdx.y * q_width;\n",
            "",
            "every row of the batch has its own attention output, and blockIdx.y is the row.",
        ),
        Patch(
            "  x += (long long)blockIdx.y * hidden;\n",
            "",
            "every row of the batch has its own x, and blockIdx.y is the row.",
        ),
        Patch(
            "attn += (long long)blockIdx.y * q_width",
            "attn += (long long)blockIdx.y * hidden",
            "attn is [rows, q_width] and x is [rows, hidden]: their rows are not of one length.",
        ),
        Patch(
            "attn, q_width);",
            "attn, hidden);",
            "a sum has as many products as a row of `weight` has values: q_width, not hidden.",
        ),
        Patch(
            "x += (long long)blockIdx.y * hidden",
            "x += (long long)blockIdx.x * hidden",
            "in this kernel blockIdx.x counts blocks that share the outputs of a row; the row is "
            "blockIdx.y. In rmsnorm a block has a whole row, so there it is blockIdx.x.",
            more=(
                (
                    "attn += (long long)blockIdx.y * q_width",
                    "attn += (long long)blockIdx.x * q_width",
                ),
            ),
        ),
    ),
    then="So the whole step is written in cuda/ops/. Now: what happens between two of them?",
)

# ---- exercise 02.2: what a boundary costs --------------------------------------------------------


def boundary_cost(launches: Sequence[float], ms: Sequence[float]) -> float:
    """What one more launch adds to a step, in microseconds.

    `launches[i]` kernels per step took `ms[i]` milliseconds. Fit the line
    `ms = a + b * launches` with the least sum of squares, and return b in microseconds.
    """
    # BEGIN SOLUTION
    n = len(launches)
    mean_x = sum(launches) / n
    mean_y = sum(ms) / n
    up = sum((x - mean_x) * (y - mean_y) for x, y in zip(launches, ms, strict=True))
    down = sum((x - mean_x) ** 2 for x in launches)
    return 1000 * up / down
    # END SOLUTION


_LINE = ([10, 40, 70, 200], [1.03, 1.12, 1.21, 1.6])  # 1 ms and 3 us for each launch
_NOISY = ([345, 198, 149, 98], [3.5, 2.9, 2.6, 2.1])
_TWO = ([300, 100], [2.5, 2.1])
_FLAT = ([3, 50, 8], [0.7, 0.7, 0.7])


def _slope(sample: tuple[list[int], list[float]]) -> float:
    return _line(*sample)[0]


def _line(x: Sequence[float], y: Sequence[float]) -> tuple[float, float]:
    """Of `y = a + b x` with y in ms: b in us, and a in us."""
    mean_x, mean_y = sum(x) / len(x), sum(y) / len(y)
    up = sum((a - mean_x) * (b - mean_y) for a, b in zip(x, y, strict=True))
    slope = up / sum((a - mean_x) ** 2 for a in x)
    return 1000 * slope, 1000 * (mean_y - slope * mean_x)


def _fits(sample: tuple[list[int], list[float]], where: str) -> Callable[[Any], None]:
    def trial(answer: Any) -> None:
        got = answer(*sample)
        if got is None:
            raise WrongAnswerError(f"it returns None, {EMPTY}")
        if abs(_slope(sample)) < 1e-9:
            if not abs(float(got)) < 1e-9:
                raise WrongAnswerError(f"{where}: 0 is right, it returns {got!r}")
            return
        expect(_slope(sample), got, where, tolerance=1e-6)

    return trial


def _order(answer: Any) -> None:
    launches, ms = (list(reversed(part)) for part in _NOISY)
    expect(_slope(_NOISY), answer(launches, ms), "the same points backwards", tolerance=1e-6)


_FITTED = PythonExercise(
    id="02.2",
    solution=boundary_cost,
    properties=(
        Property("points on a line", _fits(_LINE, "1 ms, and 3 us a launch")),
        Property("two points", _fits(_TWO, "0.4 ms for 200 launches")),
        Property("points beside a line", _fits(_NOISY, "four points")),
        Property("launches that cost nothing", _fits(_FLAT, "always 0.7 ms")),
        Property("the order of the points does not matter", _order),
    ),
    mistakes=(
        Mistake(
            lambda x, y: _slope((x, y)) / 1000,
            "this is in milliseconds. How many microseconds is that?",
        ),
        Mistake(
            lambda x, y: 1000 * sum(y) / sum(x),
            "this divides all time by all launches. A step also has work, which no launch saves: "
            "that is `a` of the line.",
        ),
        Mistake(
            lambda x, y: 1000 * (y[0] - y[-1]) / (x[0] - x[-1]),
            "this looks at the first and the last point only. The line takes all of them.",
        ),
        Mistake(
            lambda x, y: _line(y, x)[0] / 1000,
            "this is launches per millisecond: the line the other way round.",
        ),
        Mistake(
            lambda x, y: (
                1000 * sum(a * b for a, b in zip(x, y, strict=True)) / sum(a * a for a in x)
            ),
            "this line goes through 0. A step without launches would still take time: subtract the "
            "means first.",
        ),
        Mistake(
            lambda x, y: _line(x, y)[1],
            "this is `a`, the time at no launches. Asked for is `b`.",
        ),
    ),
    samples=(_LINE, _NOISY, _TWO),
    then="Now use it on the record: what does a launch cost, and what is left without any?",
)

EXERCISES = (_WRITTEN, _FITTED)
