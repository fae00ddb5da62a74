"""Exercises whose answer is CUDA source: solutions, starters, mistakes, and answers that crash."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from mkref.errors import MachineError, RequestError
from mkref.lessons import check, code, cuda_exercise
from mkref.lessons.check import exercise, exercises
from mkref.lessons.cuda_exercise import CudaExercise, fingerprint, known_mistakes
from mkref.lessons.exercise import WrongAnswerError, blanked
from mkref.lessons.program import YOURS, Program, close, same
from mkref.lessons.whole import Blank, expanded, find_part
from mkref.machine.hostcc import build
from mkref.machine.nvrtc import compile_cubin
from mkref.paths import lessons_root
from tests.tree import ROOT

TASKS = [task for task in exercises().values() if isinstance(task, CudaExercise)]
EVERY = pytest.mark.parametrize("task", TASKS, ids=lambda task: task.id)
FILES = sorted(lessons_root().glob("*.cu"))
TRIED = 4
"""Most mistakes of an exercise that `make test` tries."""


def port() -> CudaExercise:
    """The exercise that the wrong answers below are made of."""
    task = exercise("03.1")
    assert isinstance(task, CudaExercise)
    return task


def changed(old: str, new: str) -> str:
    """The solution with a change, as an answer."""
    text = port().solution_text
    assert 1 == text.count(old)
    return port().as_answer(text.replace(old, new))


@EVERY
def test_solution_passes(task: CudaExercise) -> None:
    """What the folded solution shows has every property."""
    report = check(task.id, task.as_answer(task.solution_text))
    assert report.passed, report
    assert "" == report.hint


@EVERY
def test_starter_compiles_and_fails(task: CudaExercise) -> None:
    """The unfilled starter is valid CUDA, so that the first error is the learner's own."""
    starter = task.as_answer(blanked(task.part.marked))
    report = check(task.id, starter)
    assert all("nothing has been written" in wrong for _, wrong in report.results)
    assert 2 == len(repr(report).splitlines())
    build(task.whole(starter), name="starter")


@EVERY
def test_commented_starter_is_no_answer(task: CudaExercise) -> None:
    """Nor is an empty text, or the starter in another layout."""
    starter = blanked(task.part.marked)
    for answer in ("", "\n// nothing\n", "  " + starter.replace("\n", "\n  ") + "// I tried"):
        assert not check(task.id, answer).passed


@EVERY
def test_starter_fits_into_a_cell(task: CudaExercise) -> None:
    """At most 40 lines, as wide as files may be; the first line of code is the cell's second."""
    lines = task.starter.splitlines()
    assert len(lines) <= 40
    assert max(map(len, lines)) <= 100
    assert f'{task.answer} = r"""' == lines[0]
    assert task.starter.count('"""') == 2


@EVERY
def test_typical_mistakes_are_recognised(task: CudaExercise) -> None:
    """Each fails in the way that is kept in mistakes_NN.json. Some of each exercise, for time: all
    are tried by scripts/try_lesson.py, which writes that file, and here with MKREF_ALL_MISTAKES=1.
    """
    every = 1 if os.environ.get("MKREF_ALL_MISTAKES") == "1" else -(-task.n_mistakes // TRIED)
    numbers = range(0, task.n_mistakes, every)
    for number, (results, hint) in zip(numbers, task.judge_mistakes(numbers), strict=True):
        assert any(wrong for _, wrong in results), f"mistake {number} passes"
        assert "0x" not in repr(results)
        assert task.mistakes[number].says == hint, results


@pytest.mark.parametrize("exercise_id", ["03.1", "04.2"])
def test_answers_compile_together(exercise_id: str) -> None:
    """Several answers in one unit, each with kernels of its own; else every mistake would cost a
    compilation.
    """
    task = exercises()[exercise_id]
    assert isinstance(task, CudaExercise)
    answers = [task.as_answer(task.solution_text), task.mistake(0)[0]]
    for answer in answers:
        assert task.program(answer, among=answers).kernels is not None


def test_kept_mistakes_are_those_of_the_exercises() -> None:
    """No fingerprints of exercises that are gone, none twice, and as many as there are mistakes."""
    for path in lessons_root().glob("mistakes_*.json"):
        lesson = path.stem[-2:]
        for one, marks in known_mistakes(lesson).items():
            assert exercise(one).n_mistakes == len(marks) == len(set(marks))


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_file_of_a_lesson_compiles_for_a_gpu(path: Path) -> None:
    """With all solutions in place, by NVRTC; it says what it is, how it is launched, and takes
    kernel code from the running file."""
    assert re.fullmatch(r"\d\d_[a-z0-9_]+", path.stem)
    text = path.read_text()
    assert text.startswith(f"// {path.name} - ")
    assert "// Launch." in text
    first = next((task for task in TASKS if task.file == path.name), None)
    if first is None:  # shown by a lesson, no exercise
        source = expanded(path.name)
    else:
        source = first.whole(first.as_answer(first.solution_text))
    for arch in ("sm_80", "sm_90a"):
        compile_cubin(source, arch)


@pytest.mark.parametrize(
    ("old", "new", "says"),
    [
        (
            "float squares = 0.0f;", "float squares = nothing;",
            "it does not compile, line 8 `float squares = nothing;`: ",
        ),
        ("  float total", "  for (volatile int i = 0; i < 1;) {}\n  float total", "it hangs: it"),
        ("y[i] = float", "y[i + (1ll << 40)] = float", "line 20 writes outside of every array"),
        ("x[i] * x[i]", "x[i] * x[i - (1ll << 40)]", "line 11 reads outside of every array"),
        ("y[i] = float", "y[i + 3000] = float", "192 bytes after the last element of y"),
        ("y[i] = float", "y[i - 30000] = float", "192 bytes before the first element of y"),
        ("float total", "*(int*)0 = 1;\n  float total", "line 16: store to null pointer"),
        ("squares = warp_sum(squares)", "if (thread < 40) squares = warp_sum(squares)", "diverg"),
        ("float squares = 0.0f;", "__shared__ float squares;", "use ptx::shared_memory(), not"),
        ("if (thread % 32 == 0) s.", "if (thread % 32 == 0) { s.", "the code around yours does"),
    ],
    ids=["compile", "loop", "write", "read", "after", "before", "null", "diverge", "shared", "{"],
)  # fmt: skip
def test_bad_answer_is_one_line_in_words(old: str, new: str, says: str) -> None:
    """Whatever the code does, the check ends soon and says what and where."""
    begin = time.monotonic()
    report = check("03.1", changed(old, new))
    assert time.monotonic() - begin < 60
    wrong = report.results[0][1]
    assert says in wrong
    assert "\n" not in wrong
    assert len(wrong) < 300


def test_one_mistake_alone_is_recognised() -> None:
    """As a learner's own answer, with other lines, comments and layout."""
    answer = changed("  consumers_sync();  // the next task may write `squares` again", "\n// done")
    report = check("03.1", f"\n\n// mine{answer}")
    assert port().mistakes[3].says == report.hint


def test_hang_is_not_repeated() -> None:
    """Where one property hangs the others are not tried, so the check ends in seconds."""
    answer = changed(
        "  float total", "  while (ptx::ld_relaxed(p.counters) < 99) {}\n  float total"
    )
    results = check("03.1", answer).results
    assert results[0][1].startswith("it hangs: ")
    assert {"not tried after that"} == {wrong for _, wrong in results[1:]}


def test_process_that_dies_is_a_finding(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that ends by a signal or takes too long ends no notebook."""
    begins = [{"begin": 0}, {"wrong": ""}, {"begin": 1}]
    died = ["ended by signal SIGKILL", "it did not end within 150 s"]
    for way in died:
        monkeypatch.setattr(cuda_exercise, "ask", lambda *_, way=way, **__: (begins, way))
        results = check("03.1", changed("0.0f", "1.0f")).results
        assert "" == results[0][1]
        assert way in results[1][1]
        assert "not tried after that" == results[2][1]
    monkeypatch.setattr(cuda_exercise, "ask", lambda *_, **__: ([], "no memory"))
    with pytest.raises(MachineError, match="the process of the trials ended: no memory"):
        check("03.1", changed("0.0f", "1.0f"))


def test_missing_compiler_is_no_wrong_answer() -> None:
    """It is an error that says what to install, whatever the answer is."""
    text = f"from mkref.lessons import check; check('03.1', {changed('0.0f', '2.0f')!r})"
    done = subprocess.run(
        [sys.executable, "-c", text], capture_output=True, text=True, check=False, cwd=ROOT,
        env={"PATH": "/nowhere", "CXX": "no-such-compiler"},
    )  # fmt: skip
    assert 1 == done.returncode
    assert "MachineError: CXX='no-such-compiler' is not a C++ compiler" in done.stderr


def test_check_wants_a_text() -> None:
    """The message names what the cell defines."""
    with pytest.raises(RequestError, match="check: give the text norm_task, not function"):
        check("03.1", lambda: None)


def test_fingerprint_does_not_depend_on_layout() -> None:
    """Lines of the learner and who polls where at the end do not count; what is wrong does."""
    marks = [
        fingerprint((("a", wrong),))
        for wrong in (
            "it hangs: it was stopped after 3 s; threads wait at x.cu:3",
            "it hangs: it was stopped after 3 s; threads wait at line 9",
            "line 3 writes 4 bytes outside of every array",
            "line 4 writes 4 bytes outside of every array",
            "line 4 reads 4 bytes outside of every array",
        )
    ]
    assert marks[0] == marks[1] != marks[2] == marks[3] != marks[4]


SIMPLE = """
extern "C" __global__ void twice(float* y, const float* x, int n) {
  for (int i = threadIdx.x; i < n; i += blockDim.x) y[i] = 2.0f * x[i];
}
"""


def test_program_watches_arrays() -> None:
    """Poison shows what nobody wrote; a write beside an array is seen and named."""
    program = Program(SIMPLE, name="simple")
    x = program.array(np.arange(40, dtype=np.float32))
    y = program.poisoned((40,), np.float32)
    program.launch("twice", (1,), (32,), (y, x, 39))
    with pytest.raises(WrongAnswerError, match=r"^here: y\[39\] is never written \(1 of 40 are"):
        same(2 * x, y, "here", "y")
    close(2.0 * x[:39].astype(np.float64), y[:39], 0.0, "here", "y")
    with pytest.raises(WrongAnswerError, match=r"^here: y\[3\] must be 7, it is 6 \(1 of 4 "):
        close(np.array([0.0, 2.0, 4.0, 7.0]), y[:4], 0.5, "here", "y")
    with pytest.raises(WrongAnswerError, match="arrays: 8 bytes after the last element of y"):
        program.launch("twice", (1,), (32,), (y, program.array(np.ones(42, np.float32)), 42))


def test_nan_is_never_close() -> None:
    """Not even with a tolerance without bounds."""
    got = np.array([np.nan], np.float32)
    with pytest.raises(WrongAnswerError, match="it is nan"):
        close(np.zeros(1), got, np.inf, "here", "y")


def test_parts_of_running_files() -> None:
    """A function of a file in cuda/ is the solution; texts in its lines name what is blanked."""
    part = find_part("ops/03_rmsnorm.cu", "x", "warp_sum", ())
    assert blanked(part.marked).splitlines()[-2:] == ["  // Your code here.", "}"]
    blank = Blank("float squares = 0.0f;", "squares = squares")
    text = blanked(find_part("ops/03_rmsnorm.cu", "x", "rmsnorm", (blank,)).marked)
    assert "squares = warp_sum(squares);" in text
    assert "float squares" not in text
    for function, blanks in (("gone", ()), ("rmsnorm", (Blank("float squares", "gone"),))):
        with pytest.raises(RequestError, match="gone"):
            find_part("ops/03_rmsnorm.cu", "x", function, blanks)


def test_whole_counts_lines_as_the_files_do() -> None:
    """A compiler's message about the text after the learner's names the line of the file."""
    task = port()
    text = task.whole(task.as_answer(task.solution_text))
    assert "// USE" not in text
    assert code("float_to_bf16").text in text
    after = text[text.index(f'#line 1 "{YOURS}"') :]
    number = int(re.findall(r'#line (\d+) "03_tasks.cu"', after)[0])
    line = after.splitlines()[after.splitlines().index(f'#line {number} "03_tasks.cu"') + 1]
    assert line == (lessons_root() / task.file).read_text().splitlines()[number - 1]


def test_worker_tells_everything_as_json() -> None:
    """What it prints is for one reader; a crash leaves whole lines."""
    task = port()
    request = {"exercise": task.id, "answer": task.as_answer(task.solution_text), "first": 4}
    done = subprocess.run(
        [sys.executable, "-m", "mkref.lessons.worker"], capture_output=True, text=True, check=True,
        cwd=ROOT, input=json.dumps(request | {"machine": "host", "sanitize": False, "among": []}),
    )  # fmt: skip
    events = [json.loads(line) for line in done.stdout.splitlines()]
    assert [{"begin": 4}, {"wrong": ""}, {"begin": 5}, {"wrong": ""}] == events
