"""The notebook files as they are committed: readable, reviewable, and really compared by nbval.

That they run and print what they show is nbval's part (`make test`).
"""

from __future__ import annotations

import json
import re
import statistics
from pathlib import Path
from typing import Any

import nbformat
import pytest

from tests.tree import ROOT, files

NOTEBOOKS = files("notebooks", suffixes={".ipynb"})
MAX_BYTES = 500_000
MAX_CELL_WIDTH = 88  # wider code scrolls in a rendered cell and on a projector
MAX_STARTER_WIDTH = 100  # a part of a file, whose lines are that wide
CELL_LINES = {"median": 5, "ninetieth percentile": 20, "longest": 40}
MIN_COMPARED = 3  # cells whose stored output nbval compares; stripped notebooks pass vacuously

every_notebook = pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)


def notebook(path: Path) -> Any:
    """A notebook as stored."""
    return json.loads(path.read_text(encoding="utf-8"))


def code_cells(path: Path) -> list[Any]:
    """The code cells that have any source."""
    cells = notebook(path)["cells"]
    return [cell for cell in cells if cell["cell_type"] == "code" and source(cell).strip()]


def source(cell: Any) -> str:
    """The text of a cell."""
    text = cell["source"]
    return text if isinstance(text, str) else "".join(text)


def tags(cell: Any) -> list[str]:
    """The tags of a cell."""
    return list(cell["metadata"].get("tags", []))


def test_numbers_are_those_of_the_lessons() -> None:
    """NN_name.ipynb, and each number once."""
    numbers = [re.fullmatch(r"(\d\d)_[a-z0-9_]+", path.stem) for path in NOTEBOOKS]
    assert None not in numbers
    assert len(NOTEBOOKS) == len({found[1] for found in numbers if found})


@every_notebook
def test_metadata(path: Path) -> None:
    """Valid, format 4.5, the kernel is called python3, and no widget state is saved."""
    content = notebook(path)
    nbformat.validate(content)
    assert (4, 5) == (content["nbformat"], content["nbformat_minor"])
    assert "python3" == content["metadata"]["kernelspec"]["name"]
    assert "widgets" not in content["metadata"]


@every_notebook
def test_written_as_jupyter_writes(path: Path) -> None:
    """Saving the notebook unchanged gives no difference to review."""
    text = path.read_text(encoding="utf-8")
    assert text.rstrip("\n") == nbformat.writes(nbformat.reads(text, as_version=4)).rstrip("\n")
    assert len(text.encode()) <= MAX_BYTES


@every_notebook
def test_counts_are_kept_and_in_order(path: Path) -> None:
    """Every code cell was run once, from top to bottom, in a fresh kernel."""
    counts = [cell["execution_count"] for cell in code_cells(path)]
    assert list(range(1, len(counts) + 1)) == counts


@every_notebook
def test_outputs_are_compared(path: Path) -> None:
    """Enough cells have outputs that nbval compares; errors are stored only where meant."""
    compared = [
        cell
        for cell in code_cells(path)
        if cell["outputs"]
        and "nbval-ignore-output" not in tags(cell)
        and "NBVAL_IGNORE_OUTPUT" not in source(cell)
    ]
    assert len(compared) >= MIN_COMPARED
    for cell in code_cells(path):
        kinds = {output["output_type"] for output in cell["outputs"]}
        assert "error" not in kinds or "raises-exception" in tags(cell)
        assert "stderr" not in {output.get("name") for output in cell["outputs"]}


@every_notebook
def test_cells_are_short(path: Path) -> None:
    """Short cells, narrow lines: longer functions live in mkref, where they are tested."""
    lines = [source(cell).splitlines() for cell in code_cells(path)]
    lengths = sorted(map(len, lines))
    assert statistics.median(lengths) <= CELL_LINES["median"]
    assert lengths[int(0.9 * (len(lengths) - 1))] <= CELL_LINES["ninetieth percentile"]
    assert lengths[-1] <= CELL_LINES["longest"]
    for cell in code_cells(path):
        starter = any(tag.startswith("starter:") for tag in tags(cell))
        limit = MAX_STARTER_WIDTH if starter else MAX_CELL_WIDTH
        assert max(map(len, source(cell).splitlines())) <= limit


@every_notebook
def test_links_resolve(path: Path) -> None:
    """Every relative link in the prose leads to a file of the repository."""
    prose = [source(cell) for cell in notebook(path)["cells"] if cell["cell_type"] == "markdown"]
    links = re.findall(r"\]\((?!https?://|#|attachment:)([^)#\s]+)", "\n".join(prose))
    assert [] == [link for link in links if not (path.parent / link).exists()]


def test_notebooks_lie_in_one_folder() -> None:
    """No notebook lies elsewhere, where neither nbval nor this file would look at it."""
    folders = [path.name for path in ROOT.iterdir() if path.is_dir() and path.name[0] != "."]
    assert NOTEBOOKS == files(*folders, suffixes={".ipynb"})
