"""docs/glossary.md and docs/prerequisites.md: sorted, complete, and true to code and lessons."""

from __future__ import annotations

import ast
import re
from functools import cache
from typing import Any

import nbformat
import numpy as np

from mkref.lessons.check import exercises
from mkref.reference.scalars import from_bf16, to_bf16
from tests.tree import ROOT, files, name, parsed

PAGE = (ROOT / "docs" / "glossary.md").read_text(encoding="utf-8")
PREREQUISITES = (ROOT / "docs" / "prerequisites.md").read_text(encoding="utf-8")
NUMERICS = (ROOT / "docs" / "numerics.md").read_text(encoding="utf-8")
TERMS = [
    (term, " ".join(text.split()), " ".join(tail.split()))
    for term, text, tail in re.findall(
        r"^### (.+)\n\n((?:.+\n)+)\n((?:.+\n)+)", PAGE.rstrip() + "\n", re.M
    )
]
NAMES = [term for term, _, _ in TERMS]
SOURCES = files("mkref", "cuda", suffixes={".py", ".cu", ".h"})


@cache
def words_of_the_code() -> set[str]:
    """Every identifier in the package and the kernels, and the names of their files."""
    found = {path.name for path in SOURCES}
    for path in SOURCES:
        found |= set(re.findall(r"[A-Za-z_]\w*", path.read_text(encoding="utf-8")))
    return found


@cache
def lesson_text(file: str) -> str:
    """Prose and code of a notebook in lower case."""
    cells: list[Any] = nbformat.read(ROOT / "notebooks" / file, as_version=4).cells
    return "\n".join(cell.source for cell in cells).lower()


def names_of(tail: str) -> list[str]:
    """The names of the code after "Code:"."""
    found = re.search(r"Code: (`.*?`)\.(?= )", tail)
    return re.findall(r"`([^`]+)`", found[1]) if found else []


def notation() -> dict[str, tuple[str, str]]:
    """Meaning and code column by sign."""
    part = PAGE[PAGE.index("## Notation") : PAGE.index("## Terms")]
    rows = re.findall(r"^\| (`.+?) \| (.+?) \| (.*?) ?\|$", part, re.M)
    return {sign: row[1:] for row in rows for sign in re.findall(r"`([^`]+)`", row[0])}


def test_terms_are_many_sorted_and_unique() -> None:
    """A reader finds a word by the alphabet; each heading below "Terms" has text and a tail."""
    assert len(NAMES) >= 70
    assert sorted(set(NAMES), key=str.lower) == NAMES
    assert PAGE.count("\n### ") == len(TERMS)


def test_terms_are_explained_in_a_few_sentences() -> None:
    """One to four sentences, the last of which ends."""
    for term, text, _ in TERMS:
        assert text[-1] in ".)", term
        assert 1 <= len(re.findall(r"[.?)](?= [A-Z(]|$)", text)) <= 4, term
        assert len(text.split()) <= 75, term


def test_lessons_of_a_term_use_it() -> None:
    """The first of the linked lessons has the word, one of "Also" or a name of the code."""
    for term, _, tail in TERMS:
        links = re.findall(r"\[(\d\d)\]\(\.\./notebooks/(\d\d_\w+\.ipynb)\)", tail)
        assert links, term
        assert all(file.startswith(number) for number, file in links), term
        also = re.match(r"Also: (.*?)\.(?= |$)", tail)
        ways = [term, *(also[1].split(", ") if also else []), *names_of(tail)]
        told = lesson_text(links[0][1])
        assert any(re.search(rf"\b{re.escape(way.lower())}", told) for way in ways), ways


def test_names_of_terms_are_in_the_code() -> None:
    """A name that was changed in the code is changed here."""
    names = [one for _, _, tail in TERMS for one in names_of(tail)]
    assert len(names) > 100
    assert [] == [one for one in names if one not in words_of_the_code()]


def test_names_of_the_notation_are_in_the_code() -> None:
    """The third column."""
    names = [one for _, code in notation().values() for one in re.findall(r"`(\w+)`", code)]
    assert len(names) > 20
    assert [] == [one for one in names if one not in words_of_the_code()]


def test_notation_is_that_of_the_docstrings() -> None:
    """What a module of the engine declares after "Notation:", the table says in the same words."""
    table, seen = notation(), 0
    for path in files("mkref", suffixes={".py"}):
        if "lessons" in path.parts:  # a world of their own, which says so
            continue
        docstring = ast.get_docstring(parsed(path)) or ""
        told = re.search(r"Notation: (.*?)\.(?:\s|$)", docstring, re.S)
        plain = re.sub(r"\([^)]*\)", "", told[1]) if told else ""
        for one in filter(None, re.split(r",\s+|\band (?=[A-Z] )", plain)):
            signs, _, meaning = one.replace("\n", " ").partition(" ")
            assert signs in table, f"{name(path)}: {one}"
            words = [word for word in re.findall(r"[a-z/]+", meaning) if len(word) > 3]
            missing = [word for word in words if word not in table[signs][0]]
            assert [] == missing, f"{name(path)}: {one}"
            seen += 1
    assert seen > 30


def test_notation_has_the_letters_of_shapes_and_of_the_contract() -> None:
    """Single capital letters in shapes of docstrings and in formulas of numerics.md."""
    letters = set(re.findall(r"(?<![\w.])[A-Z](?!\w)", " ".join(re.findall(r"`(.+?)`", NUMERICS))))
    for path in files("mkref", suffixes={".py"}):
        if "lessons" not in path.parts:
            for node in ast.walk(parsed(path)):
                if isinstance(node, ast.FunctionDef | ast.ClassDef | ast.Module):
                    for shape in re.findall(r"\[([^\[\]\n>]*)\]", ast.get_docstring(node) or ""):
                        letters |= set(re.findall(r"(?<![\w.])[A-Z](?!\w)", shape))
    assert {"H", "D", "T", "K", "E"} <= letters
    assert set() == letters - notation().keys()
    for written in ("depth K", "depth H", "D/16", "logit / T", "E[token]"):
        assert written in NUMERICS


def test_self_test_has_twelve_questions_in_three_groups() -> None:
    """Numbered through, each with an answer that is folded away."""
    part = PREREQUISITES[PREREQUISITES.index("## Twelve") : PREREQUISITES.index("## How to read")]
    groups = re.split(r"^### [ABC]\. .*$", part, flags=re.M)[1:]
    fold = re.compile(r"<details><summary>(\d+)\. .+?\?.*?</summary>\n\n(.+?)\n\n</details>", re.S)
    numbers = [[int(number) for number, _ in fold.findall(group)] for group in groups]
    assert [[1, 2, 3, 4], [5, 6, 7, 8], [9, 10, 11, 12]] == numbers


def test_answers_that_can_be_computed_are_right() -> None:
    """Questions 1, 5, 6, 7 and 8."""
    big, one = np.float32(1e8), np.float32(1)
    assert [0, 1] == [float((big + one) - big), float(one + (big - big))]
    assert 256 == from_bf16(to_bf16(np.array([257], np.float32)))[0]
    for told in (f"{2048 * 4096 * 2:,} bytes", f"{1000 // 4 * 12:,} operations", "2 milliseconds"):
        assert told in " ".join(PREREQUISITES.split())


def test_sources_are_few() -> None:
    """Three to six, by name and with a secure link."""
    links = re.findall(r"\]\((http[^)]+)\)", PREREQUISITES)
    assert 3 <= len(links) <= 6
    assert all(link.startswith("https://") for link in links)


def test_table_of_exercises_is_that_of_the_lessons() -> None:
    """Which exercises ask for CUDA, and so which lessons can be done without."""
    rows = re.findall(r"^\| (\d\d) \| ([\d., ]*)\| ([\d., ]*)\|$", PREREQUISITES, re.M)
    told = {number: [re.findall(r"[\d.]+", cell) for cell in cells] for number, *cells in rows}
    wanted: dict[str, list[list[str]]] = {}
    for one, task in exercises().items():
        wanted.setdefault(one[:2], [[], []])[task.language == "cpp"].append(one)
    assert wanted == told
    python_only = [number for number, (_, cuda) in wanted.items() if not cuda]
    sentence = f"lessons {', '.join(python_only[:-1])} and {python_only[-1]} whole"
    assert sentence in " ".join(PREREQUISITES.split())
