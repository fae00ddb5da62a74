"""The form of the repository: which files there are, how large, how wide, what is not in them."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from size_table import PARTS, sizes

from tests.tree import ROOT, all_text_files, files, name, parsed

PYTHON = files("mkref", "scripts", "tests", "bench", suffixes={".py"})
CODE = [*PYTHON, *files("cuda", "scripts", suffixes={".cu", ".h", ".hpp", ".cpp"})]
MAX_LINES = 400
MAX_WIDTH = 100
# Character classes keep this file from finding itself.
UNFINISHED = re.compile(r"\b(TOD[O]|FIXM[E]|XX[X]|NotImplementedErro[r])\b")
NOT_RUN = re.compile(r"pytest\.(ski[p]|importorski[p]|xfai[l])|mark\.(ski[p]|skipi[f]|xfai[l])")
LINK = re.compile(r"\]\((?!https?://|mailto:)([^)\s]+)\)")


@pytest.mark.parametrize(
    "path",
    [
        "README.md", "LICENSE", "NOTICE", "Makefile", "pyproject.toml", "requirements.lock",
        "environment.yml", ".ci/run", ".clang-format", ".gitignore", "cuda/megakernel.cu",
        "docs/architecture.md", "docs/numerics.md", "docs/licences.md", "mkref/py.typed",
        "bench/LOG.md",
        "notebooks/00_start_here.ipynb", "notebooks/01_speed_of_light.ipynb",
    ],
)  # fmt: skip
def test_file_is_there(path: str) -> None:
    """What the design and the README promise exists under its name."""
    assert (ROOT / path).is_file()


def test_ci_runs_make_test() -> None:
    """.ci/run is executable, stops at the first failure, does nothing cleverer than `make test`."""
    script = ROOT / ".ci" / "run"
    lines = [line for line in script.read_text().splitlines() if not line.startswith("#")]
    assert os.access(script, os.X_OK)
    assert ["set -e", 'cd "$(dirname "$0")/.."', "make test"] == lines


@pytest.mark.parametrize("part", PARTS)
def test_no_file_is_too_long(part: str) -> None:
    """One concept a file: 400 lines is the end, except for the kernel, a single file by design."""
    long = {size.path: size.lines for size in sizes(part) if size.lines > MAX_LINES}
    long.pop("cuda/megakernel.cu", None)
    assert {} == long


def test_no_line_is_too_wide() -> None:
    """At most 100 columns in Python, C++ and CUDA."""
    wide = [
        f"{name(path)}:{number}"
        for path in CODE
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1)
        if len(line) > MAX_WIDTH
    ]
    assert [] == wide


def test_nothing_is_unfinished() -> None:
    """No marker of work left over anywhere, and no test that does not run."""
    found = [
        f"{name(path)}:{number}: {line.strip()[:80]}"
        for path in all_text_files()
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1)
        if UNFINISHED.search(line) or ("tests" in path.parts and NOT_RUN.search(line))
    ]
    assert [] == found


def test_no_path_of_this_machine() -> None:
    """No text names the folder of this checkout or of its user, nor do outputs of notebooks."""
    here = [f"{path}/" for path in (ROOT, Path.home()) if len(path.parts) > 1]
    found = [
        f"{name(path)}: {own}"
        for path in all_text_files()
        for own in here
        if own in path.read_text(encoding="utf-8")
    ]
    assert [] == found


@pytest.mark.parametrize("path", PYTHON, ids=name)
def test_module_says_what_it_is(path: Path) -> None:
    """Every module opens with a docstring, and postpones annotations if it has any code."""
    tree = parsed(path)
    assert ast.get_docstring(tree)
    code = [node for node in tree.body if not isinstance(node, ast.Expr)]
    postponed = any(
        isinstance(node, ast.ImportFrom) and node.module == "__future__" for node in tree.body
    )
    assert postponed or not code


def test_every_test_says_what_it_tests() -> None:
    """Each test function has a docstring."""
    silent = [
        f"{name(path)}::{node.name}"
        for path in files("tests", suffixes={".py"})
        for node in ast.walk(parsed(path))
        if isinstance(node, ast.FunctionDef)
        and node.name.startswith("test_")
        and not ast.get_docstring(node)
    ]
    assert [] == silent


def anchors(text: str) -> set[str]:
    """The anchors of a Markdown text as code hosts make them from its headings."""
    headings = re.findall(r"^#+ +(.+?)\s*$", re.sub(r"```.*?```", "", text, flags=re.DOTALL), re.M)
    plain = (re.sub(r"[^\w\- ]", "", heading.lower()) for heading in headings)
    return {heading.replace(" ", "-") for heading in plain}


def test_links_resolve() -> None:
    """Every relative link in a Markdown file leads to a file, and to a heading if it names one."""
    broken = []
    for page in [*ROOT.glob("*.md"), *files("docs", "mkref", "bench", "cuda", suffixes={".md"})]:
        for link in LINK.findall(page.read_text(encoding="utf-8")):
            target, _, anchor = link.partition("#")
            path = (page.parent / target).resolve() if target else page
            ok = path.exists()
            if ok and anchor and path.suffix == ".md":
                ok = anchor in anchors(path.read_text(encoding="utf-8"))
            if not ok:
                broken.append(f"{name(page)}: {link}")
    assert [] == broken


@pytest.mark.parametrize(
    "command",
    [
        ["ruff", "check", "--no-cache", "--output-format=concise", "."],
        ["ruff", "format", "--no-cache", "--check", "--output-format=concise", "."],
        ["mypy", "--no-error-summary"],
    ],
    ids=["lint", "format", "types"],
)
def test_check(command: list[str]) -> None:
    """Linter, formatter and type checker have nothing to say: what `make check` runs."""
    done = subprocess.run(
        [sys.executable, "-m", *command], cwd=ROOT, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stdout + done.stderr
