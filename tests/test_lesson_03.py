"""Lesson 03: what the build for CPUs does not have is said in words, with what to use instead."""

from __future__ import annotations

import pytest

from mkref.errors import MachineError
from mkref.lessons import check
from mkref.lessons.check import exercise
from mkref.lessons.cuda_exercise import CudaExercise
from mkref.lessons.trials import INSTEAD, compile_error

BEGINS = "  float squares = 0.0f;"


def with_line(line: str) -> str:
    """The solution of 03.1 with a line in front, as an answer."""
    task = exercise("03.1")
    assert isinstance(task, CudaExercise)
    return task.as_answer(task.solution_text.replace(BEGINS, f"{line}\n{BEGINS}", 1))


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("  const float r0 = rsqrtf(p.eps);", "has no rsqrtf; use 1.0f / sqrtf(v)"),
        ("  atomicAdd(&s.squares[0], 1.0f);", "has atomicAdd of integers only"),
        ("  __shared__ float sums[8];", "use ptx::shared_memory(), not __shared__"),
    ],
    ids=["rsqrtf", "atomicAdd", "shared"],
)
def test_missing_built_in_is_named(line: str, says: str) -> None:
    """One line that names what to write instead."""
    report = check("03.1", with_line(line))
    assert all(says in wrong for _, wrong in report.results), report
    assert 2 == len(repr(report).splitlines())


@pytest.mark.parametrize("name", sorted(INSTEAD))
@pytest.mark.parametrize(
    "error",
    ["‘{}’ was not declared in this scope", "use of undeclared identifier '{}'"],
    ids=["g++", "clang++"],
)
def test_every_compiler_is_read(error: str, name: str) -> None:
    """Both compilers' words for an unknown name lead to the same sentence."""
    text = f"compiling x failed: your code:2:3: error: {error.format(name)}"
    said = compile_error(text, f"\n  {name}(1);\n")
    assert f"line 2 `{name}(1);`: the build for CPUs has no {name}; use {INSTEAD[name]}" in said


def test_other_unknown_names_stay_as_they_are() -> None:
    """A slip of the pen is no built-in; what is not about the code is an error."""
    text = "compiling x failed: your code:1:1: error: ‘summ’ was not declared in this scope"
    assert compile_error(text, "summ").endswith("‘summ’ was not declared in this scope")
    with pytest.raises(MachineError, match="no space"):
        compile_error("no space left", "summ")
