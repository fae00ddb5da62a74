"""Lessons as a reader meets them: their anatomy, their exercises, and a learner who solves them.

That a notebook prints what it shows is nbval's part, its form as a file that of
test_notebook_files.py.
"""

from __future__ import annotations

import os
import platform
import re
from pathlib import Path
from typing import Any

import nbformat
import pytest
from nbclient import NotebookClient
from run_notebooks import WANTED_SECONDS, WIDGET, complaints, normalise, slow

from mkref.lessons.check import exercise, exercises
from tests.tree import ROOT, files

NOTEBOOKS = files("notebooks", suffixes={".ipynb"})
LESSON = pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
PARTS = ("Predict", "Exercise", "Recap", "Three questions to yourself", "Further reading")
LABELS = r"\[(measured|derived|simulated|quoted)\]"
UNIT = r"\d (bytes|ms per token|tokens per second|milliseconds)\b"
MAX_BYTES = 200_000
WORDS_PER_CODE_CELL = (30, 80)


def cells(path: Path, kind: str = "") -> list[Any]:
    """Cells of a notebook, of one kind if it is named."""
    found: list[Any] = nbformat.read(path, as_version=4).cells
    return [cell for cell in found if kind in ("", cell.cell_type)]


def tags(cell: Any) -> list[str]:
    """Tags of a cell."""
    return list(cell.metadata.get("tags", []))


def prose(path: Path) -> str:
    """All Markdown of a notebook."""
    return "\n\n".join(cell.source for cell in cells(path, "markdown"))


def outputs(path: Path) -> list[Any]:
    """All stored outputs."""
    return [output for cell in cells(path, "code") for output in cell.outputs]


@LESSON
def test_opening(path: Path) -> None:
    """Number and title, the question, why it matters, and how long it takes: 30 to 60 minutes."""
    first = cells(path)[0].source
    assert first.startswith(f"# {path.stem[:2]} ")
    assert "**Question.**" in first
    assert "**Why it matters.**" in first
    minutes = re.search(r"About (\d+) minutes", first)
    assert minutes is not None
    assert 30 <= int(minutes[1]) <= 60


@LESSON
def test_anatomy(path: Path) -> None:
    """The parts that every lesson has, in their order."""
    headings = re.findall(r"^## (.*)$", prose(path), re.M)
    at = [
        next((i for i, heading in enumerate(headings) if heading.startswith(part)), -1)
        for part in PARTS
    ]
    assert -1 not in at
    assert sorted(at) == at


@LESSON
def test_three_questions_with_answers(path: Path) -> None:
    """Each folds an answer of its own."""
    text = prose(path)
    part = text[text.index("## Three questions") : text.index("## Further reading")]
    folded = re.findall(r"<details><summary>(\d)\. .*?</summary>\n\n(.+?)\n\n</details>", part)
    assert ["1", "2", "3"] == [number for number, _ in folded]


@LESSON
def test_further_reading_is_short(path: Path) -> None:
    """Three to six things, not thirty."""
    text = prose(path)
    links = re.findall(r"\]\([^)]+\)", text[text.index("## Further reading") :])
    assert 3 <= len(links) <= 6


@LESSON
def test_exercises_are_those_of_the_package(path: Path) -> None:
    """Starter and folded solution are generated: they equal what mkref.lessons makes now."""
    tagged = {tag: cell for cell in cells(path) for tag in tags(cell) if ":" in tag}
    ids = [one for one in exercises() if one.startswith(path.stem[:2])]
    assert {f"{kind}:{one}" for kind in ("starter", "solution") for one in ids} == tagged.keys()
    for one in ids:
        assert exercise(one).starter == tagged[f"starter:{one}"].source
        text = f"```{exercise(one).language}\n{exercise(one).solution_text}\n```"
        assert text in tagged[f"solution:{one}"].source
        assert tagged[f"solution:{one}"].source.startswith("<details><summary>")


@LESSON
def test_every_exercise_is_checked_and_has_hints(path: Path) -> None:
    """After a starter come the check, hints that open one by one, and the solution."""
    found = cells(path)
    for i, cell in enumerate(found):
        starter = next((t.split(":")[1] for t in tags(cell) if t.startswith("starter:")), "")
        if starter:
            assert found[i + 1].source == f'check("{starter}", {exercise(starter).name})'
            hints = re.findall(r"<summary>Hint (\d)", found[i + 2].source)
            assert ["1", "2", "3"] == hints
            assert [f"solution:{starter}"] == tags(found[i + 3])


@LESSON
def test_every_prediction_is_compared(path: Path) -> None:
    """The learner commits before, compares after; the stored notebook has no answer filled in."""
    code = "\n".join(cell.source for cell in cells(path, "code"))
    asked = re.findall(r'predict\("([^"]+)", None', code)
    compared = re.findall(r'compare\("([^"]+)"', code)
    assert asked
    assert sorted(asked) == sorted(compared)
    assert code.count("predict(") == len(asked)
    for question in asked:
        assert question.startswith(path.stem[:2])
        assert code.index(f'predict("{question}"') < code.index(f'compare("{question}"')


@LESSON
def test_prose_is_neither_thin_nor_long(path: Path) -> None:
    """Words of explanation per code cell; folded hints and answers and tables do not count."""
    open_text = re.sub(r"<details>.*?</details>|^\|.*?$", "", prose(path), flags=re.S | re.M)
    words = len(open_text.split()) / len(cells(path, "code"))
    assert WORDS_PER_CODE_CELL[0] <= words <= WORDS_PER_CODE_CELL[1]


@LESSON
def test_numbers_carry_a_label(path: Path) -> None:
    """A printed line with bytes, times or speeds says whether it is measured, derived, ..."""
    lines = [
        line
        for output in outputs(path)
        if output.output_type == "stream"
        for line in output.text.splitlines()
    ]
    unlabelled = [line for line in lines if re.search(UNIT, line) and not re.search(LABELS, line)]
    assert [] == unlabelled


@LESSON
def test_stored_outputs_are_static(path: Path) -> None:
    """No reference to a live widget; every HTML output has a text twin and a described picture."""
    pictures = 0
    for output in outputs(path):
        data = output.get("data", {})
        assert not [mime for mime in data if "widget" in mime or "javascript" in mime]
        if "text/html" in data:
            pictures += 1
            assert len(data["text/plain"]) > 60
            assert re.search(r'<img alt="[^"]{60,}" src="data:image/svg', data["text/html"])
    assert pictures >= 2


@LESSON
def test_most_outputs_are_compared(path: Path) -> None:
    """Cells whose output nbval ignores, because it differs between computers, are the minority."""
    with_output = [cell for cell in cells(path, "code") if cell.outputs]
    ignored = [cell for cell in with_output if "nbval-ignore-output" in tags(cell)]
    assert len(ignored) < len(with_output) / 2


@LESSON
def test_form(path: Path) -> None:
    """Small, cell ids unique, only tags that mean something, nothing else in cell metadata."""
    assert path.stat().st_size <= MAX_BYTES
    ids = [cell.id for cell in cells(path)]
    assert len(ids) == len(set(ids))
    for cell in cells(path):
        assert set(cell.metadata) <= {"tags"}
        for tag in tags(cell):
            assert re.fullmatch(r"nbval-ignore-output|(starter|solution):\d\d\.\d", tag)


def test_ladder_names_the_lessons_that_exist() -> None:
    """Lesson 00 lists lessons 01 to 16 in order, with their titles, and links to each."""
    ladder = re.findall(r"^\| \[(\d\d [^]|]+)\]\(([^)]+)\) +\|", prose(NOTEBOOKS[0]), re.M)
    assert [path.name for path in NOTEBOOKS[1:]] == [name for _, name in ladder]
    assert [f"{n:02d}" for n in range(1, 17)] == [title[:2] for title, _ in ladder]
    titles = [cells(path)[0].source.splitlines()[0].lower() for path in NOTEBOOKS[1:]]
    assert titles == [f"# {title}".lower() for title, _ in ladder]


def test_runner_keeps_what_nbval_compares() -> None:
    """`make notebooks` drops live views, state, timings and this computer's name, nothing else."""
    output = nbformat.v4.new_output(
        "display_data", {WIDGET: {"model_id": "1"}, "text/plain": "a figure"}
    )
    told = nbformat.v4.new_output("stream", name="stdout", text=f"on {platform.platform()}\n")
    cell = nbformat.v4.new_code_cell("figure", outputs=[output, told], execution_count=3)
    cell.metadata = nbformat.from_dict({"execution": {"iopub.status.busy": "now"}, "tags": ["a"]})
    notebook = nbformat.v4.new_notebook(cells=[cell], metadata={"widgets": {"state": {}}})
    normalise(notebook)
    assert {"kernelspec", "language_info"} == notebook.metadata.keys()
    assert ({"tags": ["a"]}, 3) == (cell.metadata, cell.execution_count)
    assert {"text/plain": "a figure"} == output.data
    assert f"on {platform.system()} {platform.machine()}\n" == told.text
    assert [] == complaints(notebook)
    told.name = "stderr"
    assert 1 == len(complaints(notebook))


def test_runner_only_tells_that_a_notebook_is_slow() -> None:
    """On a busy computer a time says nothing about the notebook, so it is no reason to refuse."""
    assert "" == slow(WANTED_SECONDS)
    assert "warning: slow" in slow(WANTED_SECONDS + 1)


def test_recorded_step_is_guessed_before_it_is_seen() -> None:
    """Lesson 00 asks how much waits above the figure whose caption tells it."""
    code = [cell.source for cell in cells(NOTEBOOKS[0], "code")]
    asked = next(i for i, source in enumerate(code) if source.startswith('predict("00.c"'))
    shown = next(i for i, source in enumerate(code) if "recorded_trace(" in source and i > 1)
    assert shown == asked + 1
    assert 'recorded_trace("trace_north_h200.json.gz")' in code[shown]


def test_lessons_do_not_point_to_lessons_that_do_not_exist() -> None:
    """Whoever names a later lesson says that it is to come."""
    exist = {path.stem[:2] for path in NOTEBOOKS}
    for path in NOTEBOOKS:
        for sentence in re.split(r"(?<=[.:])\s", re.sub(r"^\|.*$", "", prose(path), flags=re.M)):
            later = set(re.findall(r"lessons? (\d\d)", sentence)) - exist
            assert not later or re.search(r"\bwill\b|not in this edition", sentence), sentence


def test_a_learner_solves_lesson_01() -> None:
    """With the folded solution pasted in and guesses made, the notebook says so, and goes on."""
    path = ROOT / "notebooks" / "01_speed_of_light.ipynb"
    notebook = nbformat.read(path, as_version=4)
    for cell in notebook.cells:
        if "starter:01.1" in tags(cell):
            cell.source = exercise("01.1").solution_text
        cell.source = cell.source.replace('predict("01.a", None', 'predict("01.a", 100')
        cell.source = cell.source.replace('predict("01.b", None', 'predict("01.b", "b"')
        cell.source = cell.source.replace('predict("01.c", None', 'predict("01.c", "a"')
    resources = {"metadata": {"path": str(path.parent)}}
    client = NotebookClient(notebook, timeout=60, kernel_name="python3", resources=resources)
    client.execute(env=dict(os.environ) | {"PYTHONPATH": str(ROOT)})
    said = "".join(
        output.get("text", "") + output.get("data", {}).get("text/plain", "")
        for cell in notebook.cells
        for output in cell.get("outputs", [])
    )
    assert "Exercise 01.1 (kv_bytes): solved, 6 of 6 properties hold" in said
    assert "You said 100 tokens per second, it is 469.8 tokens per second" in said
    assert "You said (b): right." in said
    assert "You said (a): it is (b)." in said
