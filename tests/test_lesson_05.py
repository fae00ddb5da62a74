"""Lesson 05: parts of `attention` as the lesson shows them, the counts of splits and results that
it derives, and numbers that look different."""

from __future__ import annotations

import numpy as np
import pytest

from mkref.config import NORTH_MINI_CODE
from mkref.lessons.check import exercise
from mkref.lessons.lesson_05_figures import PARTS, attention_part
from mkref.lessons.lesson_05_merge import merge
from mkref.lessons.lesson_05_splits import items_of, result_bytes, results_of, split_sizes
from mkref.lessons.source import code
from mkref.plan.buffers import buffer_table
from mkref.plan.build import build_plan


def test_parts_are_pieces_of_the_kernel_in_order() -> None:
    """Word for word, one behind the other, none empty, and the last one to the end."""
    whole, lines = code("attention"), 0
    for name in PARTS:
        part = attention_part(name)
        assert part.text in whole.text
        assert part.line > lines
        lines = part.line + len(part.text.splitlines()) - 1
        assert len(part.text.splitlines()) > 10
    assert lines == whole.line + len(whole.text.splitlines()) - 1


@pytest.mark.parametrize("n_chunks", [1, 5, 33, 34, 66, 2048])
def test_splits_hold_all_chunks(n_chunks: int) -> None:
    """At most 33, which differ by one chunk at most; four KV heads make the items."""
    sizes = split_sizes(n_chunks)
    assert sum(sizes) == n_chunks
    assert len(sizes) == min(n_chunks, 33)
    assert max(sizes) - min(sizes) <= 1
    assert items_of(n_chunks * 128) == 4 * len(sizes)
    assert results_of(n_chunks * 128).splits == len(sizes)


def test_results_are_those_of_the_buffers() -> None:
    """What the lesson says a layer leaves for MERGE is what the kernel has room for."""
    context = 262_144
    plan = build_plan(NORTH_MINI_CODE, n_sm=132, full_pages=4096, sliding_pages=66)
    table = buffer_table(plan, context)
    room = sum(table[name].n_bytes for name in ("part_o", "part_ml"))
    assert room == plan.rows * result_bytes(results_of(context).splits)


@pytest.mark.parametrize("name", ["min", "mean"])
def test_merge_that_is_not_safe_fails(name: str) -> None:
    """Whatever is subtracted, it must be the largest maximum."""

    def unsafe(m: np.ndarray, s: np.ndarray, o: np.ndarray) -> np.ndarray:
        w = 2.0 ** (m - getattr(m, name)())
        return np.asarray((o * w[:, None]).sum(axis=0) / (s * w).sum())

    results, hint = exercise("05.2").judge(unsafe)
    assert any(wrong for _, wrong in results)
    assert "overflows" in hint


def test_rounded_answer_is_told_apart() -> None:
    """Float32 is named; a small error is shown with enough digits to be seen."""
    results, _ = exercise("05.2").judge(lambda m, s, o: merge(m, s, o).astype(np.float32))
    assert {wrong.split(": ")[1] for _, wrong in results} == {"it returns float32, must be float64"}
    results, _ = exercise("05.2").judge(lambda m, s, o: merge(m, s, o) * (1 + 1e-6))
    for _, wrong in results:
        has, must = wrong.split(" is ")[1].split(", must be ")
        assert has != must


def test_rescaling_between_chunks_is_no_merge() -> None:
    """The kernel's lines for two chunks, in a loop that begins with nothing, get their own hint."""

    def copied(m: np.ndarray, s: np.ndarray, o: np.ndarray) -> np.ndarray:
        top, total, out = -np.inf, 0.0, np.zeros(o.shape[1])
        for i in range(len(m)):
            running, top = top, max(top, m[i])
            scale = np.exp2(running - top)
            total, out = total * scale + s[i], out * scale + o[i]
        return out / total

    results, hint = exercise("05.2").judge(copied)
    assert any(wrong for _, wrong in results)
    assert "between two chunks" in hint
