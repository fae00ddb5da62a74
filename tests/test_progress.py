"""The learner's progress file: what is noted and shown, and that it never disturbs a lesson."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import nbformat
import pytest
import run_notebooks
import try_lesson

from mkref.cli import main
from mkref.lessons import check, compare, predict, progress, progress_note
from mkref.lessons import progress_file as store
from mkref.lessons.check import exercise
from mkref.lessons.predictions import forget
from mkref.lessons.progress_file import Guess, Solved, progress_path, read_kept
from tests.tree import ROOT

AT_START = os.environ.get("MKREF_PROGRESS")
DAMAGED = {
    "cut off": b'{"format": "mkref-progress-1", "exercises": {"01.',
    "of a later version": b'{"format": "mkref-progress-2", "exercises": {}, "predictions": {}}',
    "a list": b"[1]",
    "no text": b"mkref-progress-\xff\x00",
    "deep": b"[" * 200_000,
    "a number for a day": b'{"format": "mkref-progress-1", "exercises": '
    b'{"01.1": {"edition": "a", "day": 3}}, "predictions": {}}',
    "a list for a guess": b'{"format": "mkref-progress-1", "exercises": {}, "predictions": '
    b'{"01.a": {"said": [], "was": 1, "unit": "", "day": ""}}}',
    "other fields": b'{"format": "mkref-progress-1", "exercises": {"01.1": {}}, "predictions": {}}',
}


@pytest.fixture(name="file")
def file_fixture(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A learner's own file, not there yet, in a folder that is not there either."""
    path = tmp_path / "state" / "progress.json"
    monkeypatch.setenv("MKREF_PROGRESS", str(path))
    monkeypatch.setattr(progress_note, "_warned", [])
    forget()
    yield path
    forget()


def solve(exercise_id: str) -> None:
    """What a learner's cell and the one below it do."""
    task, namespace = exercise(exercise_id), dict[str, Any]()
    exec(task.solution_cell, namespace)
    assert check(exercise_id, namespace[task.name]).passed


def guess(question: str, said: float | str, was: float | str, unit: str = "") -> None:
    """A prediction and its comparison."""
    predict(question, said, unit)
    compare(question, was)


def test_tests_keep_nothing() -> None:
    """tests/conftest.py and the Makefile turn it off for tests, notebooks among them."""
    assert "off" == AT_START
    assert "\ntest: export MKREF_PROGRESS := off\n" in (ROOT / "Makefile").read_text()


def test_place(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """MKREF_PROGRESS, else the state folder of the user, as the standard has it."""
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("XDG_STATE_HOME", raising=False)
    usual = tmp_path / ".local" / "state" / "mkref" / "progress.json"
    for explicit, place in (
        ("", usual), ("~/mine.json", tmp_path / "mine.json"), ("off", None), (" OFF ", None),
    ):  # fmt: skip
        monkeypatch.setenv("MKREF_PROGRESS", explicit)
        assert place == progress_path()
    monkeypatch.delenv("MKREF_PROGRESS")
    for state, place in ((str(tmp_path / "s"), tmp_path / "s" / "mkref"), ("s", usual.parent)):
        monkeypatch.setenv("XDG_STATE_HOME", state)
        assert place / "progress.json" == progress_path()


def test_solved_exercise_is_noted(file: Path) -> None:
    """A failed try leaves no trace; a solved one its edition and day, once."""
    assert not check("01.1", lambda *_: 0).passed
    assert not file.exists()
    solve("01.1")
    first = read_kept(file)
    assert ["01.1"] == list(first.exercises)
    assert exercise("01.1").edition == first.exercises["01.1"].edition
    stamp = file.stat().st_mtime_ns
    solve("01.1")
    assert stamp == file.stat().st_mtime_ns
    assert ["progress.json"] == [path.name for path in file.parent.iterdir()]


def test_prediction_is_noted_when_it_is_compared(file: Path) -> None:
    """The first one stands, also in a fresh kernel."""
    predict("01.a", 100, "tokens per second")
    compare("01.b", "b")  # no guess was made
    assert not file.exists()
    compare("01.a", 469.8)
    forget()
    guess("01.a", 469.8, 469.8, "tokens per second")
    noted = read_kept(file).predictions
    assert ["01.a"] == list(noted)
    assert (100, 469.8, "tokens per second") == (
        noted["01.a"].said, noted["01.a"].was, noted["01.a"].unit,
    )  # fmt: skip


def test_a_lesson_prints_the_same_with_and_without(
    file: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """nbval compares outputs, so keeping says nothing."""
    said = []
    for place in (str(file), "off"):
        monkeypatch.setenv("MKREF_PROGRESS", place)
        forget()
        solve("01.1")
        guess("01.b", "b", "b")
        said.append(capsys.readouterr().out)
    assert said[0] == said[1]
    assert "You said (b): right." in said[0]
    assert 1 == len(read_kept(file).exercises)


def test_table(file: Path) -> None:
    """Who has solved what, how far off, what is next; the same as Markdown and for programs."""
    solve("00.1")
    guess("00.a", 10, 47, "tokens per second")
    guess("00.b", "A", "a")
    guess("00.c", 30, 31, "percent")
    guess("01.b", "c", "b")
    told = progress()
    lines = {line[:2]: line for line in repr(told).splitlines()}
    assert re.fullmatch("00 start here +1 +a x4.7, b right, c near", lines["00"])
    assert re.fullmatch("01 speed of light +- +a -, b wrong, c -", lines["01"])
    assert re.match("06 router and experts +- - - +a -", lines["06"])
    n = sum(len(lesson.exercises) for lesson in told.lessons)
    assert f"1 of {n} exercises solved, 4 of " in repr(told)
    assert "2 of them right or near." in repr(told)
    assert "near: within 10 %; x4.7: off by a factor of 4.7" in repr(told)
    assert "*" not in repr(told)
    assert "Next: lesson 01, speed of light." in repr(told)
    assert f"Kept in {file} on this computer, and nowhere else." in repr(told)
    assert max(map(len, repr(told).splitlines())) <= 100 + len(str(file))
    markdown = told._repr_markdown_()
    assert "| 00 start here | 1 | a x4.7, b right, c near |" in markdown
    assert "Next: [lesson 01, speed of light](01_speed_of_light.ipynb)." in markdown
    first = told.to_json()["lessons"][0]
    assert {"00.1": "solved"} == first["exercises"]
    assert 47 == first["predictions"]["00.a"]["was"]


def test_all_lessons_are_in_the_table(file: Path) -> None:
    """Every notebook, with the questions that it asks."""
    told = {lesson.file: lesson for lesson in progress().lessons}
    assert sorted(told) == sorted(path.name for path in (ROOT / "notebooks").glob("*.ipynb"))
    for name, lesson in told.items():
        text = (ROOT / "notebooks" / name).read_text(encoding="utf-8")
        assert lesson.guesses
        assert all(f'predict(\\"{question}\\"' in text for question in lesson.guesses)


def test_changed_exercise_is_of_an_earlier_edition(file: Path) -> None:
    """It is neither open nor solved; solving it again makes it solved."""
    kept = store.Kept({"00.1": Solved("0123", "2026-01-01")})
    file.parent.mkdir()
    store.write_kept(file, kept)
    told = progress()
    assert {"00.1": "solved in an earlier edition"} == told.lessons[0].exercises
    assert "1*" in told.lessons[0].cells()[1]
    assert "*: solved in an earlier edition; the exercise has changed since" in repr(told)
    assert r"1\*" in told._repr_markdown_()
    solve("00.1")
    assert {"00.1": "solved"} == progress().lessons[0].exercises


def test_edition_follows_what_is_asked() -> None:
    """Editions of all exercises differ; a text is short and stable."""
    editions = [exercise(one).edition for one in ("00.1", "01.1", "02.1", "02.2")]
    assert len({*editions}) == 4
    assert editions[2] == exercise("02.1").edition
    assert {12} == {len(one) for one in editions}


@pytest.mark.parametrize("content", DAMAGED.values(), ids=DAMAGED)
def test_damaged_file_is_told_once_and_left_alone(
    file: Path, content: bytes, capsys: pytest.CaptureFixture[str]
) -> None:
    """The lesson goes on, the file stays as it is, the command is one line and status 2."""
    file.parent.mkdir()
    file.write_bytes(content)
    solve("01.1")
    guess("01.b", "b", "b")
    said = capsys.readouterr().out
    assert 1 == said.count("Progress is not kept (")
    assert "mkref progress --reset" in said
    assert content == file.read_bytes()
    assert repr(progress()) == progress()._repr_markdown_()
    assert re.fullmatch(".* is damaged or no progress file; .* deletes it", repr(progress()))
    assert 2 == main(["progress"])
    assert 1 == capsys.readouterr().err.count("\n")


@pytest.mark.parametrize("place", ["a file/progress.json", "folder"])
def test_place_that_cannot_be_written(
    tmp_path: Path, file: Path, place: str, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    """Below a file, or a folder itself: one line for all of it."""
    (tmp_path / "a file").touch()
    (tmp_path / "folder").mkdir()
    monkeypatch.setenv("MKREF_PROGRESS", str(tmp_path / place))
    guess("01.b", "b", "b")
    guess("01.c", "b", "b")
    assert 1 == capsys.readouterr().out.count("Progress is not kept (")


def test_full_disk_leaves_the_old_file(
    file: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """What was kept before is not touched, and nothing is left lying about."""
    guess("01.b", "b", "b")
    before = file.read_bytes()

    def full(number: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    guess("01.c", "b", "b")
    assert "Progress is not kept (No space left on device)." in capsys.readouterr().out
    assert before == file.read_bytes()
    assert [file] == list(file.parent.iterdir())


def test_empty_file_is_a_fresh_one(file: Path) -> None:
    """Whoever was interrupted between making and filling it has lost nothing."""
    file.parent.mkdir()
    file.touch()
    assert not read_kept(file).exercises
    guess("01.b", "b", "b")
    assert ["01.b"] == list(read_kept(file).predictions)


def test_link_stays_a_link(file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever keeps settings elsewhere finds the file there."""
    link = tmp_path / "link.json"
    link.symlink_to(file)
    monkeypatch.setenv("MKREF_PROGRESS", str(link))
    guess("01.b", "b", "b")
    assert link.is_symlink()
    assert ["01.b"] == list(read_kept(file).predictions)


WRITER = """
import sys
from mkref.lessons.progress_note import note_guess
for n in range(25):
    note_guess(f"{sys.argv[1]}.{n}", 1.0, 2.0, "")
"""


def test_two_notebooks_at_once_lose_nothing(file: Path) -> None:
    """Three processes write 25 predictions each, as fast as they can."""
    command = [sys.executable, "-c", WRITER]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    running = [subprocess.Popen([*command, name], env=environment) for name in "abc"]
    assert [0, 0, 0] == [process.wait(timeout=60) for process in running]
    assert 75 == len(read_kept(file).predictions)
    assert [file] == list(file.parent.iterdir())


def test_file_that_is_deleted_while_somebody_waits(file: Path) -> None:
    """Who gets the lock of a file that has lost its name begins again with the new one."""
    guess("01.b", "b", "b")
    with store.locked(file):
        other = threading.Thread(target=progress_note.note_guess, args=("01.c", "b", "b", ""))
        other.start()
        time.sleep(0.1)
        file.unlink()
    other.join()
    assert ["01.c"] == list(read_kept(file).predictions)


def test_lock_that_is_never_given_back(
    file: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A stopped program that holds it costs a moment and one line."""
    monkeypatch.setattr(store, "PATIENCE_S", 0.05)
    guess("01.b", "b", "b")
    with store.locked(file):
        progress_note.note_guess("01.c", "b", "b", "")
    assert "another program holds it" in capsys.readouterr().out


def test_command(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The table, the same as JSON, and the end of it."""
    guess("01.b", "b", "b")
    capsys.readouterr()
    assert 0 == main(["progress"])
    assert "01 speed of light" in capsys.readouterr().out
    assert 0 == main(["progress", "--json"])
    report = json.loads(capsys.readouterr().out)
    assert ("00", str(file)) == (report["next"], report["file"])
    for says in (f"deleting {file} (exercises: 0, predictions: 1)\n",
                 f"nothing to delete: there is no {file}\n"):  # fmt: skip
        assert 0 == main(["progress", "--reset"])
        assert says == capsys.readouterr().out
        assert not file.exists()


def test_command_with_nothing_kept(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """An empty table, and why."""
    monkeypatch.setenv("MKREF_PROGRESS", "off")
    assert 0 == main(["progress"])
    assert "Nothing is kept: MKREF_PROGRESS is off." in capsys.readouterr().out
    assert 0 == main(["progress", "--reset"])
    assert "nothing to delete: MKREF_PROGRESS is off\n" == capsys.readouterr().out


def test_reset_deletes_a_damaged_file_and_nobody_elses(
    file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A variable that names the wrong file costs nobody a thesis."""
    file.parent.mkdir()
    file.write_bytes(DAMAGED["cut off"])
    assert 0 == main(["progress", "--reset"])
    assert f"deleting {file} (damaged)\n" == capsys.readouterr().out
    file.write_text("my thesis")
    assert 2 == main(["progress", "--reset"])
    assert "is no progress file of mkref, so it stays" in capsys.readouterr().err
    assert "my thesis" == file.read_text()


def test_home_is_written_short(file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The name of the user is nobody's business on a projector."""
    monkeypatch.setenv("HOME", str(tmp_path))
    assert "Kept in ~/state/progress.json on" in repr(progress())


def test_scripts_of_authors_keep_nothing(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Trying a lesson and running a notebook are no progress of anybody."""
    monkeypatch.setattr(sys, "argv", ["try_lesson.py", "00.1"])
    try_lesson.main()
    assert "off" == os.environ["MKREF_PROGRESS"]
    monkeypatch.setenv("MKREF_PROGRESS", str(file))
    cell = nbformat.v4.new_code_cell('import os\nprint(os.environ["MKREF_PROGRESS"])')
    path = file.parent.parent / "one.ipynb"
    nbformat.write(nbformat.v4.new_notebook(cells=[cell]), path)
    run_notebooks.run(path)
    assert "off\n" == nbformat.read(path, as_version=4).cells[0].outputs[0].text
    assert not file.exists()


def test_guess_fields_are_what_the_file_has(file: Path) -> None:
    """The form of the file is documented by its content: plain, small, readable."""
    guess("01.a", 100, 200, "ms")
    data = json.loads(file.read_text())
    assert ["format", "exercises", "predictions"] == list(data)
    assert Guess(**data["predictions"]["01.a"]).said == 100
    assert file.stat().st_size < 400
