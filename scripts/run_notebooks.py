"""Execute the notebooks in place and store them in one canonical form: `make notebooks`.

    python scripts/run_notebooks.py                        all of notebooks/
    python scripts/run_notebooks.py notebooks/01_*.ipynb   some

Cells tagged `starter:ID` and `solution:ID` are written anew from the exercise in mkref.lessons, so
a learner's answer in them is lost: this is for whoever changes a lesson. Outputs and execution
counts are stored, because `pytest --nbval` compares them; widget state and references to live
widgets are not, so that every reader shows the static figure that stands beside them.

It stops at the first notebook that raises, warns or grows too large. One that takes long it only
tells: on a busy computer that says nothing about the notebook.
"""

from __future__ import annotations

import argparse
import os
import platform
import time
from pathlib import Path
from typing import Any

import nbformat
from nbclient import NotebookClient

from mkref.lessons.check import exercise

ROOT = Path(__file__).resolve().parent.parent
WIDGET = "application/vnd.jupyter.widget-view+json"
WANTED_SECONDS = 40
MAX_BYTES = 200_000
METADATA = {
    "kernelspec": {"display_name": "Python 3 (ipykernel)", "language": "python", "name": "python3"},
    "language_info": {"name": "python"},
}


def tagged(cell: Any, kind: str) -> str:
    """The exercise that a tag such as `starter:01.1` names, or ""."""
    tags = cell.metadata.get("tags", [])
    return next((tag.split(":")[1] for tag in tags if tag.startswith(f"{kind}:")), "")


def folded_solution(exercise_id: str) -> str:
    """The Markdown of a solution that opens on a click."""
    task = exercise(exercise_id)
    return (
        f"<details><summary>Solution of {exercise_id}</summary>\n\n"
        f"```{task.language}\n{task.solution_text}\n```\n\n</details>"
    )


def fill(notebook: Any) -> None:
    """Write starters and solutions from their one source."""
    for cell in notebook.cells:
        if starter := tagged(cell, "starter"):
            cell.source = exercise(starter).starter
        if solution := tagged(cell, "solution"):
            cell.source = folded_solution(solution)


def normalise(notebook: Any) -> None:
    """Drop what differs between runs and what no reader needs, such as this computer's kernel."""
    own, general = platform.platform(), f"{platform.system()} {platform.machine()}"
    notebook.metadata = nbformat.from_dict(METADATA)
    for cell in notebook.cells:
        tags = cell.metadata.get("tags")
        cell.metadata = nbformat.from_dict({"tags": tags} if tags else {})
        for output in cell.get("outputs", []):
            output.get("data", {}).pop(WIDGET, None)
            if "text" in output:
                output.text = output.text.replace(own, general)
            if "metadata" in output:
                output.metadata = nbformat.from_dict({})


def complaints(notebook: Any) -> list[str]:
    """What must not be stored: warnings and other text on standard error, in any cell."""
    return [
        f"cell {number} writes to standard error: {output.text.strip()[:200]}"
        for number, cell in enumerate(notebook.cells)
        for output in cell.get("outputs", [])
        if output.output_type == "stream" and output.name == "stderr"
    ]


def slow(seconds: float) -> str:
    """What to add about a notebook that took long; else ""."""
    if seconds <= WANTED_SECONDS:
        return ""
    return f" (warning: slow; a computer with nothing else to do needs {WANTED_SECONDS} s at most)"


def run(path: Path) -> str:
    """Execute one notebook and store it.

    Returns:
        A line about it, which also says if it took long.

    Raises:
        SystemExit: it must not be stored as it is; the file is unchanged.
    """
    notebook = nbformat.read(path, as_version=4)
    fill(notebook)
    os.environ["MKREF_PROGRESS"] = "off"  # for the notebook's kernel, which inherits it
    os.environ["MKREF_MEASURE"] = "off"  # what is stored is the same on a computer with a GPU
    begin = time.monotonic()
    NotebookClient(
        notebook,
        timeout=120,
        kernel_name="python3",
        coalesce_streams=True,
        resources={"metadata": {"path": str(path.parent)}},
    ).execute()
    seconds = time.monotonic() - begin
    normalise(notebook)
    found = complaints(notebook)
    nbformat.validate(notebook)
    text = nbformat.writes(notebook, version=4) + "\n"
    if len(text.encode()) > MAX_BYTES:
        found.append(f"is {len(text.encode())} bytes large; at most {MAX_BYTES}")
    if found:
        raise SystemExit(f"{path.name}: " + "; ".join(found))
    path.write_text(text, encoding="utf-8")
    return f"{path.name}: {seconds:.1f} s, {len(text.encode()) / 1000:.0f} KB{slow(seconds)}"


def main() -> None:
    """Run what the command line names."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("notebooks", nargs="*", type=Path, help="default: all of notebooks/")
    chosen = parser.parse_args().notebooks or sorted((ROOT / "notebooks").glob("*.ipynb"))
    for path in chosen:
        print(run(path), flush=True)


if __name__ == "__main__":
    main()
