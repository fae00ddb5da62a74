"""Lesson 07: exercise 07.1, the winner among the SMs' candidates, and what the lesson computes: how
many sums eight numbers have, who owns x, the head's bytes, and whom a maximum without a tie rule
takes.

The other exercises are in `lesson_07_draw` and `lesson_07_nucleus`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import permutations
from typing import TYPE_CHECKING

import numpy as np

from mkref.config import NORTH_MINI_CODE
from mkref.lessons.cuda_exercise import Blank
from mkref.lessons.exercise import Property
from mkref.lessons.lesson_07_mistakes import SAMPLE
from mkref.lessons.lesson_07_trials import (
    Candidates,
    SampleExercise,
    alone,
    run_sample,
    second_sm_alone,
    smallest_values,
)
from mkref.lessons.recorded import bench_record, recorded_trace
from mkref.plan.share import share
from mkref.reference.scalars import F32

if TYPE_CHECKING:
    from mkref.lessons.program import Program

__all__ = ["EXERCISES", "RECORD", "first_taken", "head_rate", "head_share", "step_ms"]
__all__ += ["sums", "x_owners"]

RECORD = "trace_north_h200.json.gz"


def _sample(where: str, case: Candidates, **how: int) -> Callable[[Program], None]:
    return lambda program: run_sample(program, case, where, **how)


def _stopping(at: int | None) -> Candidates:
    """Row 1 draws its own stop id number `at`; None: a stop id of rows 0 and 2, in all places."""
    case = Candidates.drawn(2, 3, seed=11)
    token = int(case.winners[1])
    ids = [one for one in range(100, 120) if one not in case.tokens][:7]
    if at is None:
        return Candidates(case.values, case.tokens, ((token,) * 8, tuple(ids), (token,) * 8))
    ids.insert(at, token)
    return Candidates(case.values, case.tokens, ((), tuple(ids), ()))


_SAMPLE = SampleExercise(
    id="07.1",
    answer="sample_task",
    file="megakernel.cu",
    function="sample",
    blanks=(Blank("Best best = ", "    }"),),
    properties=(
        Property("two candidates, three rows", _sample("2 SMs, 3 rows", Candidates.drawn(2, 3))),
        Property(
            "candidates of 132 SMs", _sample("132 SMs, 2 rows", Candidates.drawn(132, 2, seed=22))
        ),
        Property(
            "all values are negative",
            _sample("negative values", Candidates.drawn(40, 2, mean=-90.0)),
        ),
        Property(
            "equal values: the lowest token",
            _sample("many equal values", Candidates.drawn(100, 6, levels=2)),
        ),
        Property(
            "the first stop id of a row ends the launch",
            _sample("row 1 draws a stop id", _stopping(0), n_steps=3, ends_after=1),
        ),
        Property(
            "so does the eighth, the last",
            _sample("row 1 draws its eighth stop id", _stopping(7), n_steps=3, ends_after=1),
        ),
        Property(
            "stop ids of other rows do not",
            _sample("stop ids of other rows", _stopping(None), n_steps=3),
        ),
        Property("only the first SM tells the host", second_sm_alone),
        Property("a row that has stopped counts once, and draws on", alone(0)),
        Property("so it does on all other SMs", alone(1)),
        Property("the best may be as small as a float can be", smallest_values),
    ),
    mistakes=SAMPLE,
    then="Now: SMs read the candidates at different times. Why do all find the same token? Nobody "
    "writes one before the next HEAD, and the order of comparisons does not matter.",
)

EXERCISES = (_SAMPLE,)


def sums(n_outputs: int = 64, n_parts: int = 8) -> list[int]:
    """For each of some outputs: how many different float32 sums its eight partial sums have, one
    per order in which they might arrive."""
    parts = np.random.default_rng(7).normal(0, 1, (n_outputs, n_parts)).astype(F32)
    orders = np.array(list(permutations(range(n_parts))))
    found = []
    for values in parts:
        total = values[orders[:, 0]]
        for k in range(1, n_parts):
            total = total + values[orders[:, k]]
        found.append(len(np.unique(total)))
    return sorted(found)


def x_owners(n_sm: int = 132) -> list[int]:
    """Elements of x that each SM owns in every layer of the real model's plan: the outputs of its
    O_PROJ, which are those of its DOWN.

    Raises:
        ValueError: they are not the same.
    """
    from mkref.plan import Op, build_plan

    plan = build_plan(NORTH_MINI_CODE, n_sm, full_pages=129, sliding_pages=70)
    owned = []
    for tasks in plan.tasks:
        shares = {(t.first, t.count) for t in tasks if t.op in (Op.O_PROJ, Op.DOWN)}
        if len(shares) != 1:
            raise ValueError(f"an SM owns {shares}")
        owned.append(16 * shares.pop()[1])
    return owned


def head_share(context: int = 8192, batch: int = 1) -> float:
    """Percent of a step's bytes that are the LM head's, with so many rows of this context."""
    from mkref.widgets.light.model import speed_of_light

    step = speed_of_light(NORTH_MINI_CODE, context=context, batch=batch)
    return 100 * next(part.n_bytes for part in step.parts if part.name == "LM head") / step.n_bytes


def head_rate() -> tuple[float, float]:
    """Microseconds of a HEAD task in the recorded step, mean of all SMs, and the bytes per second
    of all of them in that time."""
    us = np.mean([e.work_ns for e in recorded_trace(RECORD) if e.op == "HEAD"]) / 1e3
    n_bytes = 2 * NORTH_MINI_CODE.vocab_size * NORTH_MINI_CODE.hidden_size
    return float(us), float(n_bytes / us * 1e6)


def step_ms(drawn_by: str, rows: int = 1) -> float:
    """Milliseconds per step, measured on an H200: a median of several launches.

    Args:
        drawn_by: "kernel", with a temperature; "sampler", the same; "sampler, top_p 0.95".
        rows: of the step.
    """
    steps = bench_record("h200/sampler.json")["steps"]
    times = next(step["ms_per_step"] for step in steps if step["rows"] == rows)
    return float(np.median(times[drawn_by]))


def first_taken(equal: Sequence[int], n_sm: int, vocab_size: int = 517) -> int:
    """The token that wins among equal logits if the first one compared stays: what the order of
    comparisons in HEAD and SAMPLE would make of a maximum without a tie rule.

    Args:
        equal: token ids with the same, largest logit; one row.
        n_sm: SMs among which blocks of 16 tokens are divided.
        vocab_size: of the model.
    """
    blocks = -(-vocab_size // 16)

    def turn(token: int) -> tuple[int, ...]:
        """When it is compared: lane and turn in SAMPLE; half, thread and turn in HEAD."""
        block = token // 16
        sm = next(s for s in range(n_sm) if share(blocks, n_sm, s)[1] > block)
        local = block - share(blocks, n_sm, sm)[0]
        return sm % 32, sm, local % 2, token % 16, local

    return min(equal, key=turn)
