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
from mkref.lessons.cuda_exercise import Blank, CudaExercise, Patch
from mkref.lessons.exercise import Property
from mkref.lessons.lesson_07_trials import (
    Candidates,
    in_a_larger_build,
    run_sample,
    second_sm_alone,
    stop_one_by_one,
    stop_twice,
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


_SAMPLE_MISTAKES = (
    Patch(
        "    best = best_of_lanes(best, 1);\n",
        "",
        "each lane has the best of its own candidates only, every 32nd. Somebody must compare the "
        "lanes: which function does that?",
    ),
    Patch(
        "ROLL for (int i = c.lane; i < task.index; i += 32)",
        "if (const int i = c.lane; i < task.index)",
        "there are more candidates than lanes: a lane takes every 32nd of them.",
    ),
    Patch(
        "{negative_infinity(), 0x7fffffff}",
        "{0.0f, 0x7fffffff}",
        "a logit may be negative, and so may all of them. What is smaller than every logit?",
    ),
    Patch(
        "best.offer(c.p.best_values[i * ROWS + row], c.p.best_tokens[i * ROWS + row]);",
        "best.offer(c.p.best_values[i * ROWS + row], i);",
        "that is the number of the SM which has the best token, and not the token.",
    ),
    Patch(
        "c.p.best_values[i * ROWS + row]",
        "c.p.best_values[row * task.index + i]",
        "the candidates lie SM by SM: those of all rows of an SM are neighbours, so a step from SM "
        "to SM is ROWS words.",
        (("c.p.best_tokens[i * ROWS + row]", "c.p.best_tokens[row * task.index + i]"),),
    ),
    Patch(
        "best.offer(c.p.best_values[i * ROWS + row], c.p.best_tokens[i * ROWS + row]);",
        "if (c.p.best_values[i * ROWS + row] > best.value)\n"
        "          best = Best{c.p.best_values[i * ROWS + row], c.p.best_tokens[i * ROWS + row]};",
        "of two equal values this keeps the one that was seen first. The lower token must win, "
        "whoever has it: `offer` knows that rule.",
    ),
    Patch(
        "const bool any = __ballot_sync(ALL, stops) != 0;",
        "const bool any = stops;",
        "each lane looks at one stop id, and lane 0 tells. Lane 0 must learn what the others have "
        "found.",
    ),
    Patch(
        "c.lane < STOP_IDS && ",
        "",
        "a row has STOP_IDS stop ids. The lanes behind that look at those of the next rows.",
    ),
    Patch(
        "      c.s.tokens[row] = best.token;\n",
        "",
        "the host is told, and the SM itself is not: EMBED of the next step takes its tokens from "
        "`c.s.tokens`.",
    ),
    Patch(
        "      if (any) c.s.row_stopped[row] = 1;\n",
        "",
        "no stop id has ended anything. What do the lines behind yours count, and who writes it?",
    ),
    Patch(
        "best_of_lanes(best, 1)",
        "best_of_lanes(best, MOST_ROWS)",
        "MOST_ROWS is the distance of HEAD, where neighbouring lanes have different rows. Here all "
        "of them have the same row: lanes at distance 1 must be compared, too.",
    ),
    Patch(
        "if (any) c.s.row_stopped[row] = 1;",
        "c.s.row_stopped[row] = any;",
        "a row that has stopped before counts no longer when it draws another token. Once 1, it "
        "stays 1: nobody sets it back during a launch.",
    ),
    Patch(
        "i < task.index; i += 32",
        "i <= task.index; i += 32",
        "one candidate too many: what lies behind the last one is nobody's. They are numbers 0 to "
        "task.index - 1.",
    ),
    Patch(
        "i < task.index; i += 32",
        "i < task.index - 1; i += 32",
        "the last candidate is never looked at. They are numbers 0 to task.index - 1.",
    ),
    Patch(
        "i < task.index; i += 32",
        "i < 132; i += 32",
        "132 is the number of SMs of one GPU. `task.index` says how many candidates there are.",
    ),
    Patch(
        "c.p.best_values[i * ROWS + row]",
        "c.p.best_values[i * MOST_ROWS + row]",
        "candidates are ROWS words apart: memory has places for ROWS rows in every build. "
        "MOST_ROWS is what this build can run, and a build for one row has MOST_ROWS 1.",
        (("c.p.best_tokens[i * ROWS + row]", "c.p.best_tokens[i * MOST_ROWS + row]"),),
    ),
    Patch(
        "c.p.tokens_out[c.step * ROWS + row]",
        "c.p.tokens_out[c.step * MOST_ROWS + row]",
        "steps of tokens_out are ROWS words apart in every build, as the host reads them. "
        "MOST_ROWS is for arrays in shared memory.",
    ),
    Patch(
        "c.p.best_values[i * ROWS + row]",
        "c.p.best_values[i * rows_in_use(c.p) + row]",
        "each SM has left room for ROWS candidates, whether so many rows are in use or not.",
        (("c.p.best_tokens[i * ROWS + row]", "c.p.best_tokens[i * rows_in_use(c.p) + row]"),),
    ),
    Patch(
        "c.p.tokens_out[c.step * ROWS + row]",
        "c.p.tokens_out[row]",
        "every step writes the place of step 0, over the token before it. The host wants the "
        "tokens of all steps.",
    ),
    Patch(
        "c.p.tokens_out[c.step * ROWS + row]",
        "c.p.tokens_out[c.step * rows_in_use(c.p) + row]",
        "the host looks for step 1 behind ROWS places of step 0, used or not.",
    ),
    Patch(
        "if (c.lane == 0) {",
        "if (c.thread == 0) {",
        "c.thread counts all 256 consumers, so it is 0 in warp 0 only. Each warp has a row of its "
        "own: its lane 0 stores.",
    ),
    Patch(
        "c.s.tokens[row] = best.token;",
        "if (task.first == 0) c.s.tokens[row] = best.token;",
        "c.s is the shared memory of *this* SM. EMBED runs on every SM, and each takes its own "
        "c.s.tokens: only tokens_out is for the first SM alone.",
    ),
    Patch(
        "if (task.first == 0) c.p.tokens_out",
        "c.p.tokens_out",
        "every SM writes tokens_out: the same value, but 132 times, into memory of the host. Only "
        "the first SM, task.first == 0, tells it.",
    ),
    Patch(
        "    const bool any = ",
        "    consumers_sync();\n    const bool any = ",
        "consumers_sync waits for all eight warps, and a warp without a row never comes into the "
        "loop. Warps need nothing of each other here; the line behind the loop is enough.",
    ),
    Patch(
        "if (any) c.s.row_stopped[row] = 1;",
        "if (any) c.s.row_stopped[row] += 1;",
        "this counts how often a row has stopped, and the lines behind yours count rows: set it to "
        "1, and a second time to 1.",
    ),
    Patch(
        "const bool any = __ballot_sync(ALL, stops) != 0;",
        "const uint32_t any = __ballot_sync(ALL, stops);",
        "the mask of a ballot has bit k for lane k: stop id number 4 makes it 16, which the lines "
        "behind yours take for 16 rows. A row counts 1.",
        (("if (any) c.s.row_stopped[row] = 1;", "c.s.row_stopped[row] |= any;"),),
    ),
    Patch(
        "    Best best = {",
        "    if (c.s.row_stopped[row]) continue;\n    Best best = {",
        "a row that has stopped draws on until the launch ends: its tokens are written in each "
        "step, and whoever reads them cuts them off.",
    ),
    Patch(
        "c.p.stop_ids[row * STOP_IDS + c.lane]",
        "c.p.stop_ids[c.lane * ROWS + row]",
        "stop ids lie row by row, not as the candidates do: number k of the row is "
        "`c.p.stop_ids[row * STOP_IDS + k]`.",
    ),
    Patch(
        "c.lane < STOP_IDS && ",
        "c.lane < 5 && ",
        "a row has STOP_IDS stop ids, 8. The last ones are never looked at.",
    ),
    Patch(
        "= best.token;\n    }\n",
        "= best.token;\n    }\n    if (any) break;\n",
        "in a build for more than eight rows a warp has several of them. One that stops must not "
        "keep the next from its token.",
    ),
)

_SAMPLE = CudaExercise(
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
        Property("a row that has stopped stays stopped", stop_one_by_one),
        Property("it counts once, and draws on", stop_twice),
        Property("only the first SM tells the host", second_sm_alone),
        Property("right in a build for more rows, too", in_a_larger_build),
    ),
    mistakes=_SAMPLE_MISTAKES,
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
