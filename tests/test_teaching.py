"""Pages for instructors and slides: true to the notebooks, and whole."""

from __future__ import annotations

import re
import subprocess
import sys
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import nbformat
import pytest
from export_slides import figures, main, page, slides_of

from mkref.lessons.check import exercise, exercises
from tests.tree import ROOT, files, name, pyproject

FOLDER = ROOT / "docs" / "teaching"
NOTEBOOKS = files("notebooks", suffixes={".ipynb"})
PARTS = (
    "Aims", "Two minutes to begin with", "Board", "Predictions", "Typical mistakes",
    "Three questions to yourself", "Discussion", "When time is short",
)  # fmt: skip
LINES = (40, 95)
LEAST_SOLUTION = 30  # characters of a line of a solution that nobody writes by chance
ROW = r"^\| (\d):(\d\d) \| (\d+) \| (.+?) \|(.*)$"

every_lesson = pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)


@cache
def notebook(path: Path) -> Any:
    """A notebook as stored."""
    return nbformat.read(path, as_version=4)


def lesson_page(path: Path) -> str:
    """The instructor's page of a notebook."""
    return (FOLDER / f"lesson_{path.stem[:2]}.md").read_text(encoding="utf-8")


def code(path: Path) -> str:
    """All code of a notebook."""
    return "\n".join(cell.source for cell in notebook(path).cells if cell.cell_type == "code")


def part(text: str, heading: str) -> str:
    """What stands under a heading, up to the next one of its level or above."""
    level = heading.split()[0]
    body = text[text.index(f"\n{heading}") + len(heading) + 1 :]
    return re.split(rf"^#{{1,{len(level)}}} ", body, maxsplit=1, flags=re.MULTILINE)[0]


def syllabi() -> dict[int, str]:
    """The tables of the syllabi by the minutes that they promise."""
    text = (FOLDER / "README.md").read_text(encoding="utf-8")
    found = re.findall(r"<!-- syllabus: (\d+) -->\n(.+?)\n\n", text, re.DOTALL)
    return {int(minutes): table for minutes, table in found}


def test_every_lesson_has_a_page() -> None:
    """One page per notebook, no page without one, and the overview names all."""
    pages = {path.name for path in FOLDER.glob("lesson_*.md")}
    assert {f"lesson_{path.stem[:2]}.md" for path in NOTEBOOKS} == pages
    overview = (FOLDER / "README.md").read_text(encoding="utf-8")
    assert pages == set(re.findall(r"\((lesson_\d\d\.md)\)", overview))


@every_lesson
def test_page_has_its_parts(path: Path) -> None:
    """Title and link, all parts in order, neither a stub nor a book."""
    text = lesson_page(path)
    title = notebook(path).cells[0].source.splitlines()[0][5:]
    assert text.startswith(f"# Lesson {path.stem[:2]} for instructors: {title[0].lower()}")
    assert f"(../../notebooks/{path.name})" in text
    assert list(PARTS) == re.findall(r"^## (.+)$", text, re.MULTILINE)
    assert LINES[0] <= len(text.splitlines()) <= LINES[1]


@every_lesson
def test_minutes_are_those_of_the_notebook(path: Path) -> None:
    """The page states the notebook's minutes, and its parts of the hour add up to them."""
    wanted = re.search(r"About (\d+) minutes", notebook(path).cells[0].source)
    stated = re.search(r"^Notebook: .+\. About (\d+) minutes\.$", lesson_page(path), re.MULTILINE)
    assert wanted is not None
    assert stated is not None
    assert wanted[1] == stated[1]
    room = re.search(r"^In the room: (.+?)\.\n\n", lesson_page(path), re.MULTILINE | re.DOTALL)
    assert room is not None
    parts = re.split(r",\s+", room[1].replace("\n", " "))
    assert int(wanted[1]) == sum(int(one.split()[-1]) for one in parts)


@every_lesson
def test_every_exercise_is_named(path: Path) -> None:
    """Each exercise of the lesson has its mistakes on the page, and a time in the room."""
    ids = list(exercises(path.stem[:2]))
    text = lesson_page(path)
    assert ids == re.findall(r"^### Exercise (\d\d\.\d)\b", text, re.MULTILINE)
    room = text[text.index("In the room:") : text.index("## Aims")]
    assert [] == [one for one in ids if one not in room]


@every_lesson
def test_what_the_check_says_is_what_it_says(path: Path) -> None:
    """Every quotation in a table of mistakes is part of a hint of that exercise."""
    for one in exercises(path.stem[:2]):
        task = exercise(one)
        hints = [task.mistake(number)[1] for number in range(task.n_mistakes)]
        rows = re.findall(
            r"^\| .+ \| (.+) \| .+ \|$", part(lesson_page(path), f"### Exercise {one}"), re.M
        )
        quoted = [row.strip("“”") for row in rows if row.startswith("“")]
        assert len(quoted) >= 3
        assert len(quoted) == len(rows) - 1  # the head
        unknown = [text for text in quoted if not any(text in hint for hint in hints)]
        assert [] == unknown, hints


@every_lesson
def test_predictions_are_answered(path: Path) -> None:
    """Every prediction has its answer and a source; a letter is the notebook's."""
    table = part(lesson_page(path), "## Predictions")
    rows = dict(re.findall(r"^\| (\d\d\.\w) \| (.+)$", table, re.MULTILINE))
    assert re.findall(r'predict\("([^"]+)"', code(path)) == list(rows)
    for one, letter in re.findall(r'compare\("([^"]+)", "(\w)"\)', code(path)):
        assert rows[one].startswith(f"({letter})")
    for row in rows.values():
        assert re.search(r"measured|derived|simulated|computed|shown|run on|output of", row)


@every_lesson
def test_no_solution_is_given_away(path: Path) -> None:
    """Pages point to the folded solutions and do not copy them."""
    text = lesson_page(path)
    for one in exercises(path.stem[:2]):
        starter = exercise(one).starter
        lines = {line.strip() for line in exercise(one).solution_text.splitlines()}
        own = [line for line in lines if len(line) >= LEAST_SOLUTION and line not in starter]
        assert [] == [line for line in own if line in text]


@pytest.mark.parametrize("minutes", [210, 390])
def test_syllabus_adds_up(minutes: int) -> None:
    """Each block begins where the one before ends, and the last one ends in time."""
    at = 0
    for hour, minute, takes, *_ in re.findall(ROW, syllabi()[minutes], re.MULTILINE):
        assert at == 60 * int(hour) + int(minute)
        at += int(takes)
    assert minutes == at


@pytest.mark.parametrize("minutes", [210, 390])
def test_syllabus_names_what_exists(minutes: int) -> None:
    """Lessons in order; exercises and predictions are those of the lesson of their row."""
    asked = {one for path in NOTEBOOKS for one in re.findall(r'predict\("([^"]+)"', code(path))}
    numbers = []
    for _, _, takes, what, rest in re.findall(ROW, syllabi()[minutes], re.MULTILINE):
        link = re.fullmatch(r"\[(\d\d)\]\(\.\./\.\./notebooks/(.+)\)", what)
        if link is None:
            assert what in ("break", "lunch")
            continue
        assert (ROOT / "notebooks" / link[2]).is_file()
        assert link[2].startswith(link[1])
        numbers.append(link[1])
        for one in re.findall(r"\b\d\d\.\w\b", rest):
            assert one[:2] == link[1]
            assert one in asked or one in exercises(one[:2])
        cells = [cell.strip() for cell in rest.strip("|").split("|")]
        assert 4 == len(cells)
        assert all(cells)
        full = re.search(r"About (\d+)", notebook(ROOT / "notebooks" / link[2]).cells[0].source)
        assert full is not None
        assert int(takes) <= int(full[1])
    assert sorted(numbers) == numbers


def test_links_resolve() -> None:
    """Every relative link of these pages leads to a file."""
    broken = [
        f"{name(page)}: {link}"
        for page in sorted(FOLDER.glob("*.md"))
        for link in re.findall(r"\]\((?!https?://)([^)#\s]+)", page.read_text(encoding="utf-8"))
        if not (FOLDER / link).exists()
    ]
    assert [] == broken


def test_files_that_pages_name_exist() -> None:
    """Records and sources in code font are files of the repository."""
    pattern = r"`((?:bench|notebooks|mkref|scripts)/[\w./]+\.\w+)`"
    missing = [
        f"{page.name}: {file}"
        for page in FOLDER.glob("*.md")
        for file in re.findall(pattern, page.read_text(encoding="utf-8"))
        if not (ROOT / file).is_file()
    ]
    assert [] == missing


def test_image_is_made_like_every_environment() -> None:
    """The Containerfile uses setup.sh with extras that exist, and copies what git archive gives."""
    text = (FOLDER / "Containerfile").read_text(encoding="utf-8")
    extras = re.search(r"^ARG EXTRAS=([\w,]+)$", text, re.MULTILINE)
    assert extras is not None
    assert set(extras[1].split(",")) <= pyproject()["project"]["optional-dependencies"].keys()
    assert 'scripts/setup.sh .venv "$EXTRAS"' in text
    assert "FROM docker.io/library/debian:" in text
    assert "requirements.lock" in text
    assert "mkref generate" in text
    assert (ROOT / "scripts" / "setup.sh").is_file()


def test_hub_gives_what_the_room_page_says() -> None:
    """The hub's file runs, and its limits and first notebook are those of the pages."""
    made: dict[str, SimpleNamespace] = {}

    class Settings:
        """Keeps whatever is set: `c.Spawner.cpu_limit = 2`."""

        def __getattr__(self, group: str) -> SimpleNamespace:
            return made.setdefault(group, SimpleNamespace())

    source = (FOLDER / "jupyterhub_config.py").read_text(encoding="utf-8")
    exec(compile(source, "jupyterhub_config.py", "exec"), {"get_config": Settings})
    spawner = made["Spawner"]
    assert "with 2 cores and 2 GB" in (FOLDER / "room.md").read_text(encoding="utf-8")
    assert (2, "2G") == (spawner.cpu_limit, spawner.mem_limit)
    assert (ROOT / spawner.default_url.removeprefix("/lab/tree/")).is_file()
    assert spawner.notebook_dir in (FOLDER / "Containerfile").read_text(encoding="utf-8")


@every_lesson
def test_slides_have_every_figure(path: Path) -> None:
    """As many slides as stored figures, each with picture, alternative text and heading."""
    html = [
        output.get("data", {}).get("text/html", "")
        for cell in notebook(path).cells
        if cell.cell_type == "code"
        for output in cell.outputs
    ]
    slides = slides_of(notebook(path), path.stem[:2])
    assert [found for one in html for found in figures(one)] == [(s.alt, s.svg) for s in slides]
    assert sum(one.count("<img ") for one in html) == len(slides)
    for slide in slides:
        assert slide.title.startswith(path.stem[:2])
        assert len(slide.alt) >= 60
        assert slide.heading
        assert slide.svg.startswith("<svg")


def test_slides_need_nothing_from_outside() -> None:
    """One file: no address, no script or style elsewhere, and ids that do not collide."""
    slides = [s for path in NOTEBOOKS for s in slides_of(notebook(path), path.stem[:2])]
    html = page(slides)
    assert [] == re.findall(r"https?://|\bsrc=|@import|<link|<iframe|data:", html)
    assert len(slides) == html.count("<section ") == html.count("<figure ") == html.count("<svg ")
    ids = re.findall(r'\bid="([^"]+)"', html)
    assert len(ids) == len(set(ids))
    assert set(re.findall(r"url\(#([^)]+)\)", html)) <= set(ids)


def test_slides_of_some_lessons(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """`--lessons` chooses, `--out` names the file, and both say what they did."""
    out = tmp_path / "a" / "b.html"
    main(["--lessons", "02,5", "--out", str(out)])
    html = out.read_text(encoding="utf-8")
    assert {"02", "05"} == set(re.findall(r"<footer><span>lesson (\d\d)", html))
    assert f"{out}: {html.count('<section ')} slides\n" == capsys.readouterr().out
    with pytest.raises(SystemExit, match="there is no lesson 99; there are 00, 01"):
        main(["--lessons", "99"])


def test_slides_are_written_where_git_does_not_look() -> None:
    """The default place is ignored, and `--help` names the options."""
    ignored = (ROOT / ".gitignore").read_text(encoding="utf-8").splitlines()
    assert "/build/" in ignored
    script = ROOT / "scripts" / "export_slides.py"
    done = subprocess.run(
        [sys.executable, str(script), "--help"], capture_output=True, text=True, timeout=60
    )
    assert 0 == done.returncode
    assert "--lessons" in done.stdout
    assert "--out" in done.stdout
