"""Exercises, predictions and code in lessons: what a learner meets beside prose."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from mkref.errors import RequestError
from mkref.lessons import check, code, compare, evidence, predict, recorded_trace
from mkref.lessons.check import exercise, exercises
from mkref.lessons.exercise import WrongAnswerError, expect
from mkref.lessons.predictions import forget
from mkref.paths import cuda_root

IDS = sorted(exercises())
EXERCISE = pytest.mark.parametrize("exercise_id", IDS)
TRIVIAL: dict[str, Callable[..., Any]] = {
    "nothing": lambda *_: None,
    "zero": lambda *_: 0,
    "one": lambda *_: 1,
    "not a number": lambda *_: math.nan,
    "infinity": lambda *_: math.inf,
    "a text": lambda *_: "0.3",
    "the first argument": lambda first, *_: first,
    "the last argument": lambda *arguments: arguments[-1],
    "an error": lambda *_: 1 // 0,
}


@pytest.fixture(autouse=True)
def _fresh() -> Iterator[None]:
    """Every test starts without commitments, as a fresh kernel does."""
    forget()
    yield
    forget()


def defined(source: str, name: str) -> Callable[..., Any]:
    """The function that a cell with this source defines in an empty notebook."""
    namespace: dict[str, Any] = {}
    exec(source, namespace)
    function: Callable[..., Any] = namespace[name]
    return function


def test_every_lesson_module_has_exercises() -> None:
    """Ids are lesson.number and unique."""
    assert ["00.1", "01.1"] == IDS


@EXERCISE
def test_solution_passes(exercise_id: str) -> None:
    """The solution, as the folded cell shows it, has every property and gets no hint."""
    task = exercise(exercise_id)
    report = check(exercise_id, defined(task.solution_text, task.name))
    assert report.passed, report
    assert "" == report.hint
    assert "solved" in repr(report)


@EXERCISE
def test_starter_fails_and_says_that_it_is_empty(exercise_id: str) -> None:
    """The unfilled starter runs in an empty notebook and fails every property, in one line."""
    task = exercise(exercise_id)
    report = check(exercise_id, defined(task.starter, task.name))
    assert all(wrong for _, wrong in report.results)
    assert "nothing has been written" in repr(report)
    assert 2 == len(repr(report).splitlines())


@EXERCISE
def test_starter_is_the_solution_without_its_body(exercise_id: str) -> None:
    """Solving only adds lines: but for the placeholder, the starter begins the solution."""
    task = exercise(exercise_id)
    starter = [line for line in task.starter.splitlines() if line.strip() != "# Your code here."]
    solution = task.solution_text.splitlines()
    assert solution[: len(starter)] == starter
    assert len(solution) > len(starter)
    assert 1 == task.starter.count("# Your code here.")
    assert "SOLUTION" not in task.starter + task.solution_text


@EXERCISE
@pytest.mark.parametrize("answer", TRIVIAL.values(), ids=TRIVIAL)
def test_trivial_answer_fails(exercise_id: str, answer: Callable[..., Any]) -> None:
    """Constants, an argument handed back, NaN and errors fail, and do not stop the lesson."""
    assert not check(exercise_id, answer).passed


@pytest.mark.parametrize(
    ("exercise_id", "number"), [(i, n) for i in IDS for n in range(len(exercise(i).mistakes))]
)
def test_typical_mistake_is_recognised(exercise_id: str, number: int) -> None:
    """Each known mistake fails, and the report says what it is."""
    mistake = exercise(exercise_id).mistakes[number]
    report = check(exercise_id, mistake.answer)
    assert not report.passed
    assert mistake.says == report.hint
    assert f"Hint: {mistake.says}" in repr(report)


@EXERCISE
def test_constant_of_one_case_fails(exercise_id: str) -> None:
    """The right result of any one sample, returned always, does not pass."""
    task = exercise(exercise_id)
    for sample in task.samples:
        right = task.solution(*sample)
        assert not check(exercise_id, lambda *_, right=right: right).passed


@EXERCISE
def test_report_is_the_same_twice(exercise_id: str) -> None:
    """nbval compares reports as texts: they hold no address, time or random number."""
    wrong = exercise(exercise_id).mistakes[0].answer
    assert repr(check(exercise_id, wrong)) == repr(check(exercise_id, wrong))
    assert "0x" not in repr(check(exercise_id, wrong))


def test_check_refuses_what_is_no_exercise_or_function() -> None:
    """Both messages say what would be right."""
    with pytest.raises(RequestError, match="there is no '99.9'; there are 00.1, 01.1"):
        check("99.9", len)
    with pytest.raises(RequestError, match="give the function kv_bytes itself"):
        check("01.1", 7)  # type: ignore[arg-type]


def test_expect_never_lets_nan_pass() -> None:
    """A comparison that is false for NaN would."""
    with pytest.raises(WrongAnswerError):
        expect(1.0, math.nan, "here", tolerance=1e9)
    expect(1.0, 1.0 + 1e-12, "here", tolerance=1e-9)


def test_prediction_is_kept_and_compared(capsys: pytest.CaptureFixture[str]) -> None:
    """A number is committed, compared with a distance, and stands after that."""
    predict("q", 100, "tokens per second")
    compare("q", 469.8)
    predict("q", 470, "tokens per second")
    lines = capsys.readouterr().out.splitlines()
    assert [
        "Committed: 100 tokens per second.",
        "You said 100 tokens per second, it is 469.8 tokens per second: off by a factor of 4.7.",
        "You committed to 100 tokens per second before; that stands.",
    ] == lines


def test_prediction_may_change_until_compared(capsys: pytest.CaptureFixture[str]) -> None:
    """The last commitment before the comparison counts; None takes it back."""
    predict("q", 100)
    predict("q", 450)
    compare("q", 469.8)
    assert "You said 450, it is 469.8: within 10 %." == capsys.readouterr().out.splitlines()[-1]
    predict("r", 1)
    predict("r", None)
    compare("r", 2)
    assert "no prediction" in capsys.readouterr().out.splitlines()[-1]


@pytest.mark.parametrize(
    ("said", "is_"), [("b", "You said (b): right."), (" B ", "right."), ("a", "it is (b).")]
)
def test_choice(said: str, is_: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Letters are compared without case and spaces."""
    predict("q", said)
    compare("q", "b")
    assert capsys.readouterr().out.splitlines()[-1].endswith(is_)


@pytest.mark.parametrize("number", [0, -5])
def test_impossible_prediction(number: float, capsys: pytest.CaptureFixture[str]) -> None:
    """A guess without a ratio to the truth is told so, and nothing divides by zero."""
    predict("q", number)
    compare("q", 3.0)
    assert "cannot be 0 or less" in capsys.readouterr().out


@pytest.mark.parametrize("name", ["consumer", "stream", "wait_counter", "share", "megakernel"])
def test_code_is_a_whole_function_of_the_file(name: str) -> None:
    """It is found in the file word for word, from its comment to its last brace."""
    found = code(name)
    text = (cuda_root() / "megakernel.cu").read_text()
    assert found.text in text
    assert f"{name}(" in found.text
    assert found.text.endswith("}")
    assert found.text.count("{") == found.text.count("}")
    assert found.text.splitlines()[0] == text.splitlines()[found.line - 1]
    assert "```cpp" in found._repr_markdown_()


def test_code_refuses_an_unknown_function() -> None:
    """A lesson that shows code which is gone fails."""
    with pytest.raises(RequestError, match="no function 'gone'"):
        code("gone")


def test_evidence_says_where_it_comes_from() -> None:
    """Recorded numbers have a provenance with hardware and date."""
    recorded = evidence("decode_speed.json")
    assert "H200" in recorded["provenance"]["gpu"]
    assert recorded["provenance"]["date"]
    assert {"measured", "quoted"} == {row["label"] for row in recorded["rows"]}


def test_unknown_evidence_is_one_error() -> None:
    """The messages name what was asked for."""
    with pytest.raises(RequestError, match="no 'nothing.json' in notebooks/data; there are"):
        evidence("nothing.json")
    with pytest.raises(RequestError, match=r"none of a\.json\.gz, b\.json\.gz"):
        recorded_trace("a.json.gz", "b.json.gz")


def test_recorded_trace_takes_the_first_that_is_there() -> None:
    """A missing recording falls back to the next; each says what it was made on."""
    trace = recorded_trace("not_there.json.gz", "trace_nano_host.json.gz")
    assert {"machine", "date", "label", "model", "context"} <= trace.provenance.keys()
    assert "measured" == trace.provenance["label"]
    assert trace.complete.all()
