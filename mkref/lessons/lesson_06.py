"""Lesson 06: its exercises, the experts of a row, the runs of an SM, and the weighted sum in DOWN.

The first two, tried on numbers made here, have modules of their own, `lesson_06_choice` and
`lesson_06_runs`. The third is tried inside the kernel that runs.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from mkref.lessons.cuda_exercise import Blank, CudaExercise, Patch
from mkref.lessons.exercise import Property
from mkref.lessons.lesson_06_choice import ROUTE, route
from mkref.lessons.lesson_06_runs import RUNS

if TYPE_CHECKING:
    from collections.abc import Callable

    from mkref.lessons.program import Program

__all__ = ["EXERCISES", "route"]


LOW, INFINITY = np.uint64(0xFFFFFFFF), np.uint64(0x7F800000)
"""Bits of a float32 in a word, and of its infinity."""


def _down(layer: int, rows: int, n_sm: int, seed: int = 0) -> Callable[[Program], None]:
    def trial(program: Program) -> None:
        from mkref.lessons.steps import run_op
        from mkref.plan import Op

        run_op(program, Op.DOWN, layer=layer, rows=rows, n_sm=n_sm, seed=seed)

    return trial


def _not_a_number(program: Program) -> None:
    """An infinite logit: its expert's score is NaN, and so is the row."""
    from mkref.lessons.program import same
    from mkref.lessons.steps import interpret, launch, parts_of
    from mkref.plan import Op
    from mkref.plan.buffers import BUFFERS

    rows, where = 2, "two rows, one with a score that is NaN"
    for part, buffers in parts_of(2, rows, 0):
        task = next(task for tasks in part.tasks for task in tasks if task.count)
        if (task.op, task.layer) == (Op.DOWN, 1):
            own = {name: program.array(array) for name, array in buffers.items() if name in BUFFERS}
            launch(program, part, own, rows, 0, where)
            interpret(part, buffers, rows)
            same(np.isnan(buffers["x"][0, :rows]), np.isnan(own["x"][0, :rows]), where, "isnan(x)")
            return
        interpret(part, buffers, rows)
        if (task.op, task.layer) == (Op.ROUTER, 1):
            words = buffers["router_logits"]  # a float32 below the number of its layer
            best = int((words[0] & LOW).astype(np.uint32).view(np.float32).argmax())
            words[0, best] = words[0, best] & ~LOW | INFINITY
    raise AssertionError(where)


_LOW = "sums.v[t][i] = sums.v[t][i] + s * part.v[t][i];"
_SKIP = "if (s == 0.0f) continue;"
_HIGH = "sums.v[t][i + 2] = sums.v[t][i + 2] + s * part.v[t][i + 2];"
_SUM = CudaExercise(
    id="06.3",
    answer="add_expert",
    file="megakernel.cu",
    function="add_expert",
    blanks=(Blank("const int row =", "sums.v[t][i + 2] ="),),
    properties=(
        Property("a dense layer: one expert, score 1", _down(0, 3, 2)),
        Property("one row, three experts", _down(1, 1, 2)),
        Property("three rows", _down(2, 3, 2, seed=1)),
        Property("six rows on three SMs", _down(4, 6, 3)),
        Property("a score that is NaN", _not_a_number),
    ),
    mistakes=(
        Patch(
            "2 * c.quad + i;",
            "c.group;",
            "c.group is this lane's column of operand B. In the sums, a lane has the columns "
            "2 * c.quad and 2 * c.quad + 1.",
        ),
        Patch(
            _HIGH,
            "",
            "half of the outputs get nothing. A lane has four sums per n tile: outputs c.group and "
            "c.group + 8, two columns each.",
        ),
        Patch(
            _LOW,
            "sums.v[t][i] = sums.v[t][i] + part.v[t][i];",
            "all experts count the same. Where does the row's score come in?",
            more=((_HIGH, "sums.v[t][i + 2] = sums.v[t][i + 2] + part.v[t][i + 2];"),),
        ),
        Patch(
            _LOW,
            "sums.v[t][i] = s * part.v[t][i];",
            "each expert replaces the ones before it. Only the last one of a row is left.",
            more=((_HIGH, "sums.v[t][i + 2] = s * part.v[t][i + 2];"),),
        ),
        Patch(
            _LOW,
            "sums.v[t][2 * i] = sums.v[t][2 * i] + s * part.v[t][2 * i];",
            "registers 0 and 1 are two columns of one output; 2 and 3 are the same two columns, "
            "eight outputs further. So rows are told apart by i, outputs by + 2.",
            more=(
                (
                    _HIGH,
                    "sums.v[t][2 * i + 1] = sums.v[t][2 * i + 1] + s * part.v[t][2 * i + 1];",
                ),
            ),
        ),
        Patch(
            _LOW,
            "sums.v[t][i] = s * (sums.v[t][i] + part.v[t][i]);",
            "the score is applied to what was added before, too. It belongs to this expert alone.",
            more=((_HIGH, "sums.v[t][i + 2] = s * (sums.v[t][i + 2] + part.v[t][i + 2]);"),),
        ),
        Patch(
            _LOW,
            "sums.v[t][i] = fmaf(s, part.v[t][i], sums.v[t][i]);",
            "fmaf and double round once. The contract has two roundings in float32: multiply, "
            "round, then add. So the numbers look equal, and their last bits are not.",
            more=((_HIGH, "sums.v[t][i + 2] = fmaf(s, part.v[t][i + 2], sums.v[t][i + 2]);"),),
        ),
        Patch(
            _SKIP,
            "if (s == 0.0f) break;",
            "break and return skip the other row of this lane, too: `continue` skips one.",
        ),
        Patch(
            _SKIP,
            "if (!(s > 0.0f)) continue;",
            "s > 0 is false for NaN, so a broken row would look right. Only a score of 0 says that "
            "the row did not choose the expert.",
        ),
        Patch(
            _SKIP,
            "",
            "= instead of +=: an expert that the row did not choose sets its sums to 0.",
            more=(
                (_LOW, "sums.v[t][i] = s * part.v[t][i];"),
                (_HIGH, "sums.v[t][i + 2] = s * part.v[t][i + 2];"),
            ),
        ),
        Patch(
            "score[row]",
            "score[i]",
            "score is indexed by the row of the batch; i tells only the lane's two rows apart.",
        ),
        Patch(
            "2 * c.quad + i;",
            "2 * c.quad;",
            "both of the lane's rows get the score of the first. The second is one row further.",
        ),
        Patch(
            "2 * c.quad + i;",
            "c.quad + 4 * i;",
            "a lane's two rows are neighbours, 2 * c.quad and the next, not four rows apart.",
        ),
    ),
    then="Now: which two loops decide the order of this sum, and could another row change it?",
)

EXERCISES = (ROUTE, RUNS, _SUM)
