"""What exercises on plans and on the running kernel are judged with; pictures of an order."""

from __future__ import annotations

import re
from dataclasses import replace
from functools import cache
from typing import TYPE_CHECKING

import pytest

from mkref.lessons.cuda_exercise import CudaExercise
from mkref.lessons.exercise import WrongAnswerError
from mkref.lessons.lanes import IDLE, Look, Span, lanes_figure
from mkref.lessons.steps import (
    lesson_plan,
    lesson_weights,
    lesson_words,
    proved,
    run_op,
    same_step,
)
from mkref.plan import Op
from tests.plans import change, find, with_list

if TYPE_CHECKING:
    from mkref.lessons.program import Program

NORM = CudaExercise("99.1", "load_normed", "megakernel.cu", (), function="load_normed")
LAYERS = {Op.EMBED: 0, Op.ATTENTION: 4, Op.HEAD: 5, Op.SAMPLE: 5}
"""Where an operation is tried; all others in layer 1."""


@cache
def kernel(old: str = "", new: str = "") -> Program:
    """The kernel with a change in `load_normed`."""
    text = NORM.solution_text
    assert not old or text.count(old) == 1
    return NORM.program(NORM.as_answer(text.replace(old, new) if old else text))


@pytest.mark.parametrize("op", Op, ids=lambda op: op.name)
def test_every_operation_alone_has_the_right_bits(op: Op) -> None:
    """Of the kernel as it is, with one row and with many, in plain and in shuffled order."""
    for rows, seed in ((1, 0), (6, 3)):
        run_op(kernel(), op, layer=LAYERS.get(op, 1), rows=rows, seed=seed)


@pytest.mark.parametrize(
    ("old", "new", "says"),
    [
        ("sqrtf(mean + RMS_EPS)", "sqrtf(mean)", r"must be .*, it is "),
        ("if (base + j < rows_in_use(c.p) && c", "if (base + j < 2 && c", r"3 rows, 2 SMs: q\[2, "),
        ("const float r = __shfl", "if (c.lane > 99) return;\n  const float r = __shfl", ""),
    ],
    ids=["no eps", "two rows only", "harmless"],
)
def test_changed_function_is_found_by_the_operation_that_uses_it(
    old: str, new: str, says: str
) -> None:
    """The message names operation, layer and buffer."""
    program = kernel(old, new)
    if not says:
        run_op(program, Op.QKV)
        return
    with pytest.raises(WrongAnswerError, match=r"^QKV of layer 1, 3 rows, 2 SMs: q\[.*") as wrong:
        run_op(program, Op.QKV)
    assert re.search(says, str(wrong.value))
    run_op(program, Op.O_PROJ)  # does not begin with the norm


def test_hang_in_the_kernel_ends_by_its_own_bound() -> None:
    """A consumer that never comes to the barrier: the launch ends, and says so in one line."""
    program = kernel(
        "consumers_sync();  // activations of all threads", "if (c.warp) ptx::bar_sync(1, 256);"
    )
    with pytest.raises(WrongAnswerError, match="it hangs|deadlock|divergence") as wrong:
        run_op(program, Op.QKV)
    assert "\n" not in str(wrong.value)


@pytest.mark.parametrize("n_sm", [1, 3])
def test_right_plan_is_proved_and_gives_the_right_bits(n_sm: int) -> None:
    """Whatever the number of SMs."""
    same_step(proved(lesson_plan(n_sm)))


def test_what_is_no_plan_is_no_answer() -> None:
    """None and other things get a message of their own."""
    with pytest.raises(WrongAnswerError, match="returns None, so nothing has been written"):
        proved(None)
    with pytest.raises(WrongAnswerError, match="returns a list, which is no plan"):
        proved([])


def test_plan_without_a_wait_is_refused_by_the_verifier() -> None:
    """The first violation, in one line."""
    plan = change(lesson_plan(3), Op.O_PROJ, 1, 0, wait=-1, wait_count=0)
    with pytest.raises(WrongAnswerError, match=r"^3 SMs, the verifier says: .*O_PROJ") as wrong:
        proved(plan)
    assert "\n" not in str(wrong.value)


def test_wrong_step_is_found_without_the_verifier() -> None:
    """A plan in which somebody waits for ever, and one that leaves rows out."""
    plan = lesson_plan(3)
    with pytest.raises(WrongAnswerError, match="nobody can go on"):
        same_step(change(plan, Op.QKV, 1, 0, wait_count=99))
    at, task = find(plan, Op.HEAD, 5, 1)
    tasks = [*plan.tasks[1]]
    tasks[at] = replace(task, count=task.count - 1)
    with pytest.raises(WrongAnswerError, match="a step on 3 SMs: logits"):
        same_step(with_list(plan, 1, tasks))


def test_lanes_are_a_picture_a_sentence_and_a_table() -> None:
    """Short spans lose their label in the picture, not in the table; the legend names each look."""
    looks = {"work": Look("works", "#56B4E9"), "idle": IDLE}
    spans = [Span(0, 100, "work", "long"), Span(100, 101, "work", "short"), Span(101, 120, "idle")]
    figure = lanes_figure("Head", "A scheme.", [("group", []), ("SM 0", spans)], looks)
    assert ">long<" in figure.svg
    assert ">short<" not in figure.svg
    for text in ("Head", "group", "works", "waits", "<title>A scheme.</title>"):
        assert text in figure.svg
    assert (("group", ""), ("SM 0", "long, short, waits")) == figure.table.rows


def test_words_on_disk_are_those_of_the_weights() -> None:
    """Once from PyTorch, then from the file."""
    for _ in range(2):
        lesson_words.cache_clear()
        for stored, made in zip(lesson_words(), lesson_weights().words(), strict=True):
            assert stored.tobytes() == made.tobytes()
