"""A notebook as one readable text, and back: for writing lessons. The notebook stays the source.

    python scripts/notebook_text.py notebooks/03_calling_convention.ipynb > 03.md
    python scripts/notebook_text.py 03.md notebooks/03_calling_convention.ipynb     then
    python scripts/run_notebooks.py notebooks/03_calling_convention.ipynb

A line that begins with `%%` begins a cell: its kind, its tags, and at the end `#id` if the cell has
one already.

    %% md
    %% code nbval-ignore-output
    %% starter 03.1            the learner's cell; left empty, because it is generated
    %% solution 03.1           the folded solution; likewise

The text holds no outputs: they come from running the notebook.
"""

from __future__ import annotations

import argparse
import re
import sys
from pathlib import Path
from typing import Any

import nbformat

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
sys.path.insert(0, str(ROOT / "scripts"))

from run_notebooks import METADATA, fill, normalise, tagged

KINDS = {"md": "markdown", "code": "code", "starter": "code", "solution": "markdown"}


def to_text(notebook: Any) -> str:
    """The text of a notebook."""
    parts = []
    for cell in notebook.cells:
        generated = next((k for k in ("starter", "solution") if tagged(cell, k)), "")
        if generated:
            head, source = f"{generated} {tagged(cell, generated)}", ""
        else:
            kind = "md" if cell.cell_type == "markdown" else "code"
            head, source = " ".join([kind, *cell.metadata.get("tags", [])]), cell.source
        parts.append(f"%% {head} #{cell.id}\n{source}".rstrip() + "\n")
    return "\n".join(parts)


def from_text(text: str) -> Any:
    """The notebook of a text, with generated cells filled in.

    Raises:
        SystemExit: a cell has an unknown kind, or an id twice.
    """
    cells: list[Any] = []
    for head, body in re.findall(r"^%% (.*)\n((?:(?!%% ).*\n?)*)", text, re.MULTILINE):
        found = re.fullmatch(r"(\w+)((?: [\w:.-]+)*)(?: #([\w-]+))?", head.strip())
        if found is None or found[1] not in KINDS:
            raise SystemExit(f"'%% {head}': give one of {', '.join(KINDS)}, tags, and #id")
        kind, tags = found[1], found[2].split()
        if kind in ("starter", "solution"):
            tags = [f"{kind}:{tags[0]}"]
        make = (
            nbformat.v4.new_markdown_cell
            if KINDS[kind] == "markdown"
            else nbformat.v4.new_code_cell
        )
        own = found[3] or f"{'code' if KINDS[kind] == 'code' else 'text'}-{len(cells):02d}"
        cells.append(make(body.strip("\n"), id=own, metadata={"tags": tags} if tags else {}))
    ids = [cell.id for cell in cells]
    if twice := {one for one in ids if ids.count(one) > 1}:
        raise SystemExit(f"ids that occur twice: {', '.join(sorted(twice))}")
    notebook = nbformat.v4.new_notebook(cells=cells, metadata=METADATA)
    fill(notebook)
    normalise(notebook)
    nbformat.validate(notebook)
    return notebook


def main() -> None:
    """Convert in the direction that the arguments say."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("source", type=Path, help="a notebook, or a text")
    parser.add_argument("notebook", nargs="?", type=Path, help="with a text: what is written")
    given = parser.parse_args()
    if given.source.suffix == ".ipynb":
        print(to_text(nbformat.read(given.source, as_version=4)), end="")
    elif given.notebook is None:
        raise SystemExit("with a text, name the notebook to be written as well")
    else:
        notebook = from_text(given.source.read_text(encoding="utf-8"))
        given.notebook.write_text(nbformat.writes(notebook, version=4) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
