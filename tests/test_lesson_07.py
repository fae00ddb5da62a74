"""What lesson 07 tells: sums, owners, ties, noise and probabilities."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import numpy as np
import pytest

from mkref.lessons import lesson_07 as lesson
from mkref.lessons import lesson_07_model as model
from mkref.lessons.check import check, exercise
from mkref.lessons.cuda_exercise import CudaExercise
from mkref.lessons.lesson_07_draw import uniforms
from mkref.lessons.lesson_07_figures import next_figure, recorded_end
from mkref.lessons.lesson_07_trials import Candidates
from mkref.lessons.program import Program
from mkref.lessons.steps import MAX_CONTEXT, PARAMS, begin_step, lesson_plan
from mkref.lessons.whole import LESSON_CONFIG
from mkref.machine.host import HOST_RING
from mkref.machine.source import THREADS, shared_bytes
from mkref.plan import NO_COUNTER, Interpreter, Op
from mkref.plan.buffers import BUFFERS
from mkref.plan.memory import A_ORDER
from mkref.reference.sampling import gumbel
from mkref.reference.scalars import from_bf16, to_bf16
from mkref.weights.layout import PackedLayout

EQUAL = (104, 234, 272, 325)
SHOWN = (114, 132, 148)
"""SMs that the lesson names."""
EARLY = """    if (c.lane == 0) {
      c.s.tokens[row] = best.token;
      if (task.first == 0) c.p.tokens_out[c.step * ROWS + row] = best.token;
    }
    const bool stops = """
RULE = "if (v > value || (v == value && t < token)) {"


@cache
def kernel(rule: str) -> Program:
    """The kernel with another rule in `Best::offer`."""
    task = CudaExercise("99.1", "best", "megakernel.cu", (), function="Best")
    assert 1 == task.solution_text.count(RULE)
    source = task.whole(task.as_answer(task.solution_text.replace(RULE, rule)))
    return Program(source, name="tie_rule")


def winner(program: Program, n_sm: int) -> int:
    """HEAD and SAMPLE of one row on so many SMs; the tokens EQUAL have the same largest logit."""
    c, plan = LESSON_CONFIG, lesson_plan(n_sm)
    lists = [
        tuple(
            replace(t, wait=NO_COUNTER, wait_count=0, flags=0) if t.op == Op.HEAD else t
            for t in tasks
            if t.op in (Op.HEAD, Op.SAMPLE)
        )
        for tasks in plan.tasks
    ]
    part = replace(plan, tasks=tuple(lists))
    made = Interpreter.of(part, MAX_CONTEXT).buffers
    begin_step(made, part, 1, seed=0)
    made["x"][...] = 1.0
    gamma = from_bf16(made["gammas"][c.num_hidden_layers])
    row = to_bf16(np.where(gamma < 0, -1.0, 1.0).astype(np.float32)).reshape(-1, 16)
    made["weights"] = made["weights"].copy()
    for token in EQUAL:
        tile = PackedLayout(c).head + token // 16 * (c.hidden_size // 16)
        for k, words in enumerate(row):
            made["weights"][tile + k, A_ORDER[token % 16]] = words
    own = {name: program.array(array) for name, array in made.items() if name in BUFFERS}
    params = np.zeros(1, PARAMS)
    for name, array in own.items():
        params[name] = array.ctypes.data
    params["max_pages"], params["max_splits"] = own["page_table"].shape[2], own["part_o"].shape[2]
    params["rows"] = params["n_steps"] = 1
    params["timeout_ns"] = 3_000_000_000
    program.launch(
        "megakernel", (n_sm,), (THREADS,), (params[0],), timeout_s=20.0,
        shared=shared_bytes(c, HOST_RING, part.rows),
    )  # fmt: skip
    assert 0 == own["status"][0]
    return int(own["tokens_out"][0, 0])


@pytest.mark.parametrize("n_sm", [1, 8, 33, *SHOWN])
def test_without_a_tie_rule_the_number_of_sms_decides(n_sm: int) -> None:
    """The lesson derives whom the kernel would take; the kernel takes it. With the rule, the
    lowest."""
    assert lesson.first_taken(EQUAL, n_sm) == winner(kernel("if (v > value) {"), n_sm)
    assert min(EQUAL) == winner(kernel(RULE), n_sm)


def test_the_three_shown_are_different() -> None:
    """Or the prediction would be without a point."""
    assert 3 == len({lesson.first_taken(EQUAL, n_sm) for n_sm in SHOWN})


def test_sums_depend_on_the_order() -> None:
    """Of a few random numbers already; of two they do not."""
    assert {1} == set(lesson.sums(n_parts=2))
    found = lesson.sums(8)
    assert min(found) > 1
    assert sorted(found) == found


def test_an_sm_owns_a_block_of_x_or_none() -> None:
    """All elements have an owner."""
    owned = lesson.x_owners()
    assert (2048, {0, 16}, 4) == (sum(owned), set(owned), owned.count(0))


def test_uniforms_are_those_of_the_noise() -> None:
    """Within the rounding of float32 and of the contract's logarithm."""
    u = uniforms(9, 41, 1000)
    assert 0 < u.min()
    assert u.max() < 1
    right = gumbel(9, 41, np.arange(1000))
    np.testing.assert_allclose(-np.log(-np.log(u)), right, rtol=2e-5, atol=2e-6)


def test_head_is_a_seventh_of_the_bytes() -> None:
    """And its rate is below what memory can do."""
    assert 15 == round(lesson.head_share())
    us, rate = lesson.head_rate()
    assert 200 < us < 260
    assert rate < 4.814e12


def test_draws_follow_the_probabilities() -> None:
    """Within five standard deviations, as the lesson shows them."""
    for _, p, share in model.draws(1.0):
        assert abs(share - p) < 5 * np.sqrt(p * (1 - p) / 1000)


def test_hotter_keeps_more() -> None:
    """The figure names the same numbers."""
    kept = [model.kept_by_top_p(t) for t in (0.5, 1.0, 2.0)]
    assert sorted(kept) == kept
    assert all(f"keeps {n} of" in next_figure().summary for n in kept)
    assert "[measured]" in recorded_end().summary


def test_candidates_of_the_trial_are_not_easy() -> None:
    """Many are equal where the tie rule is tried, and the lowest token is not the first seen."""
    case = Candidates.drawn(100, 6, levels=2)
    largest = case.values == case.values.max(axis=0)
    assert (largest.sum(axis=0) > 20).all()
    first = case.tokens[largest.argmax(axis=0), np.arange(6)]
    assert (first != case.winners).all()


def sampling(*changes: tuple[str, str]) -> str:
    """The solution of 07.1 with changes, as an answer."""
    task = exercise("07.1")
    assert isinstance(task, CudaExercise)
    text = task.solution_text
    for old, new in changes:
        assert 1 == text.count(old)
        text = text.replace(old, new)
    return task.as_answer(text)


def test_every_lane_may_scan_all_candidates() -> None:
    """Then lane 0 stores before others have looked: no store may change what they still read."""
    answer = sampling(
        ("int i = c.lane; i < task.index; i += 32", "int i = 0; i < task.index; i++"),
        ("    best = best_of_lanes(best, 1);\n", ""),
        ("      c.s.tokens[row] = best.token;\n", ""),
        ("      if (task.first == 0) c.p.tokens_out[c.step * ROWS + row] = best.token;\n", ""),
        ("    const bool stops = ", EARLY),
    )
    report = check("07.1", answer)
    assert report.passed, report


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("c.p.tokens_out[c.step * ROWS + row]", "c.p.tokens_out[c.step * ROWS + c.warp]"),
        ("c.p.stop_ids[row * STOP_IDS", "c.p.stop_ids[c.warp * STOP_IDS"),
        ("c.p.stop_ids[row * STOP_IDS", "c.p.stop_ids[row * CONSUMERS"),
        ("c.p.stop_ids[row * STOP_IDS", "c.p.stop_ids[row * MOST_ROWS"),
        ("c.lane < STOP_IDS", "c.lane < MOST_ROWS"),
        ("c.lane < STOP_IDS", "c.lane < CONSUMERS"),
    ],
)
def test_sizes_that_are_equal_in_the_lesson_model_are_told_apart(old: str, new: str) -> None:
    """ROWS, MOST_ROWS, CONSUMERS and STOP_IDS are 8 there, and a warp has one row."""
    assert not check("07.1", sampling((old, new))).passed
