"""Lesson 05: parts of `attention` as the lesson shows them, and numbers that look different."""

from __future__ import annotations

import numpy as np
import pytest

from mkref.lessons.check import exercise
from mkref.lessons.lesson_05 import merge
from mkref.lessons.lesson_05_figures import PARTS, attention_part
from mkref.lessons.source import code


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
