"""Lesson 11: what an answer may not do to the lists that it is given."""

from __future__ import annotations

from typing import Any

from mkref.lessons.check import check
from mkref.lessons.lesson_11 import may_issue


def test_lists_stay_as_they_are() -> None:
    """A right time does not help who writes into the loader's lists."""

    def keeps(*case: Any) -> float:
        at = may_issue(*case)
        case[3].append(at)
        return at

    report = check("11.1", keeps)
    assert not report.passed
    assert {said for _, said in report.results} == {
        "it changes a list that it is given; the loader keeps those itself"
    }
    assert check("11.1", may_issue).passed, "nothing is left of it"
