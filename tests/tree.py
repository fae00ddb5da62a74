"""The repository as the tests of its form see it: root, files, parsed modules. No tests here."""

from __future__ import annotations

import ast
import tomllib
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
FOLDERS = ("mkref", "cuda", "notebooks", "tests", "scripts", "bench", "docs", ".ci")
TEXT = {
    ".py", ".cu", ".h", ".hpp", ".cpp", ".sh", ".md", ".ipynb", ".toml", ".yml", ".cfg", ".lock",
}  # fmt: skip


def files(*folders: str, suffixes: set[str]) -> list[Path]:
    """Files below the named folders, caches left out, sorted."""
    found = (path for folder in folders for path in (ROOT / folder).rglob("*"))
    return sorted(
        path
        for path in found
        if path.suffix in suffixes and not {"__pycache__", ".ipynb_checkpoints"} & {*path.parts}
    )


def all_text_files() -> list[Path]:
    """Every text file of the project: in its folders and at its root."""
    at_root = [path for path in ROOT.iterdir() if path.is_file() and path.name != ".git"]
    in_ci = [ROOT / ".ci" / "run"]
    chosen = [
        path for path in at_root if path.suffix in TEXT or path.name in ("Makefile", "NOTICE")
    ]
    return sorted(chosen) + in_ci + files(*FOLDERS, suffixes=TEXT)


def name(path: Path) -> str:
    """A path as the failure messages show it: below the root, with slashes."""
    return path.relative_to(ROOT).as_posix()


@cache
def parsed(path: Path) -> ast.Module:
    """The syntax tree of a Python file."""
    return ast.parse(path.read_text(encoding="utf-8"), filename=str(path))


@cache
def pyproject() -> dict[str, Any]:
    """pyproject.toml as a dictionary."""
    return tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))


def module_of(path: Path) -> str:
    """Dotted name of a file of the package: mkref/plan/task.py is `mkref.plan.task`."""
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imports_of(path: Path) -> Iterator[tuple[int, str]]:
    """Line and dotted name of every import in a file, also inside functions and `TYPE_CHECKING`.

    `from mkref import config` gives `mkref.config` if there is such a module, else `mkref`.
    """
    for node in ast.walk(parsed(path)):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield node.lineno, alias.name
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:  # relative: from the package that holds the file
                package = path.relative_to(ROOT).parent.parts
                package = package[: len(package) - node.level + 1]
                base = ".".join([*package, *filter(None, [base])])
            for alias in node.names:
                inner = ROOT.joinpath(*base.split("."), alias.name)
                is_module = inner.is_dir() or inner.with_suffix(".py").is_file()
                yield node.lineno, f"{base}.{alias.name}" if is_module else base
