"""Exercises, predictions and code in lessons: what a learner meets beside prose."""

from __future__ import annotations

import json
import math
import re
import statistics
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from mkref.errors import RequestError
from mkref.lessons import (
    check,
    code,
    compare,
    evidence,
    lesson_01,
    predict,
    recorded,
    recorded_trace,
)
from mkref.lessons.check import exercise, exercises, lesson_modules
from mkref.lessons.exercise import BLANK, PythonExercise, WrongAnswerError, expect, finding
from mkref.lessons.predictions import forget
from mkref.lessons.recorded import bench_record
from mkref.paths import cuda_root
from mkref.widgets.palette import style_of

IDS = sorted(one for one, task in exercises().items() if isinstance(task, PythonExercise))
EXERCISE = pytest.mark.parametrize("exercise_id", IDS)
EVERY = pytest.mark.parametrize("exercise_id", sorted(exercises()))
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


def python(exercise_id: str) -> PythonExercise:
    """One exercise whose answer is a function."""
    task = exercise(exercise_id)
    assert isinstance(task, PythonExercise)
    return task


def test_exercises_are_found() -> None:
    """Ids are lesson.number, counted from 1 in every lesson; nobody lists the modules."""
    assert {"lesson_00", "lesson_01"} <= {*lesson_modules()}
    assert {"00.1", "01.1"} <= exercises().keys()
    for lesson in {one[:2] for one in exercises()}:
        numbers = [one[3:] for one in exercises() if one[:2] == lesson]
        assert [str(n + 1) for n in range(len(numbers))] == numbers


@EVERY
def test_exercise_has_what_a_learner_needs(exercise_id: str) -> None:
    """Several properties with names of their own, typical mistakes, and something to go on with."""
    task = exercise(exercise_id)
    names = [one.name for one in task.properties]
    assert len(names) == len(set(names)) >= 3
    assert task.n_mistakes >= 3
    assert task.then.endswith((".", "?"))
    hints = [task.mistake(n)[1] for n in range(task.n_mistakes)]
    assert len(set(hints)) == len(hints)
    assert all(hint.endswith((".", "?")) for hint in hints)


@EVERY
def test_starter_is_the_solution_without_its_parts(exercise_id: str) -> None:
    """Solving only adds lines; both are cells that a notebook can run."""
    task = exercise(exercise_id)
    starter = [line for line in task.starter.splitlines() if not line.strip().endswith(BLANK)]
    rest = iter(task.solution_cell.splitlines())
    assert all(line in rest for line in starter)  # in this order
    assert len(task.solution_cell.splitlines()) > len(starter) < len(task.starter.splitlines())
    assert "SOLUTION" not in task.starter + task.solution_text
    assert task.solution_text in task.solution_cell
    for source in (task.starter, task.solution_cell):
        defined(source, task.name)


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
@pytest.mark.parametrize("answer", TRIVIAL.values(), ids=TRIVIAL)
def test_trivial_answer_fails(exercise_id: str, answer: Callable[..., Any]) -> None:
    """Constants, an argument handed back, NaN and errors fail, and do not stop the lesson."""
    assert not check(exercise_id, answer).passed


@pytest.mark.parametrize(
    ("exercise_id", "number"), [(i, n) for i in IDS for n in range(exercise(i).n_mistakes)]
)
def test_typical_mistake_is_recognised(exercise_id: str, number: int) -> None:
    """Each known mistake fails, and the report says what it is."""
    answer, says = exercise(exercise_id).mistake(number)
    report = check(exercise_id, answer)
    assert not report.passed
    assert says == report.hint
    assert f"Hint: {says}" in repr(report)


@EXERCISE
def test_constant_of_one_case_fails(exercise_id: str) -> None:
    """The right result of any one sample, returned always, does not pass."""
    task = python(exercise_id)
    for sample in task.samples:
        right = task.solution(*sample)

        def constant(*_: Any, right: Any = right) -> Any:
            return right

        assert any(finding(one.trial, constant) for one in task.properties)


@EXERCISE
def test_report_is_the_same_twice(exercise_id: str) -> None:
    """nbval compares reports as texts: they hold no address, time or random number."""
    wrong, _ = exercise(exercise_id).mistake(0)
    assert repr(check(exercise_id, wrong)) == repr(check(exercise_id, wrong))
    assert "0x" not in repr(check(exercise_id, wrong))


def test_check_refuses_what_is_no_exercise_or_function() -> None:
    """Both messages say what would be right."""
    with pytest.raises(RequestError, match="there is no '99.9'; there are 00.1, 01.1"):
        check("99.9", len)
    with pytest.raises(RequestError, match="give the function kv_bytes itself"):
        check("01.1", 7)


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
    predict("q", 100, "us")
    predict("q", 450, "us")
    compare("q", 469.8)
    last = capsys.readouterr().out.splitlines()[-1]
    assert "You said 450 us, it is 469.8 us: within 10 %." == last
    predict("r", 1, "us")
    predict("r", None, "us")
    compare("r", 2)
    assert "no prediction" in capsys.readouterr().out.splitlines()[-1]


@pytest.mark.parametrize(
    ("said", "is_"),
    [
        ("b", "You said (b): right."),
        (" B ", "right."),
        ("(b)", "You said (b): right."),
        ("a", "it is (b)."),
    ],
)
def test_choice(said: str, is_: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Letters are compared without case, spaces and brackets."""
    predict("q", said)
    compare("q", "b")
    assert capsys.readouterr().out.splitlines()[-1].endswith(is_)


@pytest.mark.parametrize("number", [0, -5])
def test_impossible_prediction(number: float, capsys: pytest.CaptureFixture[str]) -> None:
    """A guess without a ratio to the truth is told so, and nothing divides by zero."""
    predict("q", number, "us")
    compare("q", 3.0)
    assert "cannot be 0 or less" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("said", "is_", "says"),
    [(0.1, 0.0, "off by 0.1."), (0, 0, "right."), (5, -5, "off by 10."), (-2, -2, "right.")],
)
def test_result_without_a_ratio(
    said: float, is_: float, says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """A result of 0 or less is compared by its difference."""
    predict("q", said, "us")
    compare("q", is_)
    assert capsys.readouterr().out.splitlines()[-1].endswith(says)


@pytest.mark.parametrize("answer", ["fifty", "", math.nan, math.inf, [50], "nan"])
def test_number_is_expected_where_there_is_a_unit(
    answer: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    """Anything else is no commitment, and the message says what would be one."""
    predict("q", answer, "percent")
    compare("q", 5)
    said, compared = capsys.readouterr().out.splitlines()
    assert f"{answer!r} is no prediction here: give a number (percent)" in said
    assert "no prediction" in compared


@pytest.mark.parametrize("answer", ["x", "many", "", "()", "ab", 5, 0.5, True])
def test_letter_is_expected_where_there_is_no_unit(
    answer: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    """One line says so, and nothing is committed."""
    predict("q", answer)
    compare("q", "b")
    said, compared = capsys.readouterr().out.splitlines()
    assert f"{answer!r} is no prediction here: give a letter in quotes, such as" in said
    assert "no prediction" in compared


def test_number_in_quotes_is_a_number(capsys: pytest.CaptureFixture[str]) -> None:
    """Where a unit is asked for."""
    predict("q", " 50 ", "percent")
    assert ["Committed: 50 percent."] == capsys.readouterr().out.splitlines()


@pytest.mark.parametrize("name", ["consumer", "run", "wait_counter", "signaller", "megakernel"])
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
    with pytest.raises(RequestError, match=r"neither cuda/ nor .* has a file 'gone.cu'"):
        code("consumer", "gone.cu")


def test_evidence_says_where_it_comes_from() -> None:
    """Recorded numbers have a provenance with hardware and date."""
    numbers = evidence("decode_speed.json")
    assert "H200" in numbers["provenance"]["gpu"]
    assert numbers["provenance"]["date"]
    assert {"measured", "quoted"} == {row["label"] for row in numbers["rows"]}


def test_unknown_evidence_is_one_error() -> None:
    """The messages name what was asked for."""
    with pytest.raises(RequestError, match="no 'nothing.json' in notebooks/data; there are"):
        evidence("nothing.json")
    with pytest.raises(RequestError, match="no 'a.json.gz' in notebooks/data; there are trace_"):
        recorded_trace("a.json.gz")
    with pytest.raises(RequestError, match="no 'nothing.json' in bench/results"):
        bench_record("nothing.json")


@pytest.mark.parametrize("name", ["trace_nano_host.json.gz", "trace_north_h200.json.gz"])
def test_recorded_trace_says_what_it_was_made_on(name: str) -> None:
    """Machine and a date that begins with a plain day; every task is stamped."""
    trace = recorded_trace(name)
    assert trace.where
    assert re.fullmatch(r"\d{4}-\d\d-\d\d", trace.provenance["date"][:10])
    assert "measured" == trace.provenance.get("label", "measured")
    assert trace.complete.all()


def test_lesson_00_describes_the_recorded_step() -> None:
    """What "How to read it" tells the reader to find is in the recording."""
    trace = recorded_trace("trace_north_h200.json.gz")
    events = list(trace)
    layers = {event.layer for event in events if event.op == "GATE_UP"}
    assert (132, list(range(49))) == (trace.n_sm, sorted(layers))
    orders = Counter(
        "".join(style_of(e.op).letter for e in events if (e.sm, e.layer) == (sm, 1))
        for sm in range(trace.n_sm)
    )
    assert {"QAGMGOD": 124, "RQAGMGOD": 8} == orders
    assert 1 == min(event.layer for event in events if event.op == "ROUTER")
    work: dict[int, list[int]] = {layer: [] for layer in range(9)}
    for event in events:
        if event.op == "ATTENTION" and event.layer in work:
            work[event.layer].append(event.work_ns)
    mean = {layer: statistics.mean(times) for layer, times in work.items()}
    assert min(mean[0], mean[4], mean[8]) > 1.4 * max(mean[n] for n in mean if n % 4)
    head = [event for event in events if event.op == "HEAD"]
    assert min(event.begin for event in head) > 0.8 * trace.span_ns


RECORD = {
    "provenance": {"gpu": "NVIDIA H200", "date": "2026-11-29T12:00:00+00:00"},
    "rows": [
        {"batch": 8, "context": 8192, "ms_per_step": 9.0},
        {"batch": 1, "context": 8192, "ms_per_step": 4.0},
    ],
}


def test_engines_begin_with_this_repository(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its row is that of batch 1 and 8K, with what it was measured on; the others follow."""
    monkeypatch.setattr(lesson_01, "bench_record", lambda name: RECORD)
    rows = lesson_01.engines().table.rows
    assert ("mkref, this repository (H200)", "250.0", "37.0%", "measured") == rows[0][:4]
    assert rows[0][4].endswith("NVIDIA H200, 2026-11-29")
    assert 5 == len(rows)
    with pytest.raises(RequestError, match="no row with context 1, batch 1"):
        lesson_01.engines(context=1)


def test_bench_record_has_a_provenance(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Read from the checkout; one that does not say where it comes from is refused."""
    folder = tmp_path / "bench" / "results"
    folder.mkdir(parents=True)
    (folder / "good.json").write_text(json.dumps(RECORD))
    (folder / "bad.json").write_text("{}")
    monkeypatch.setattr(recorded, "CHECKOUT", tmp_path)
    assert RECORD == bench_record("good.json")
    with pytest.raises(RequestError, match="bad.json does not say"):
        bench_record("bad.json")


def test_programs_that_are_not_here_are_said_to_be() -> None:
    """The data file names machine, date, and what nobody can run again from this repository."""
    provenance = evidence("decode_speed.json")["provenance"]
    assert "programs that are not in this repository" in provenance["programs"]
