"""The wave widget in JupyterLab, in a headless Chromium, by keyboard alone.

Where there is no Chromium there is no test here; `tests/test_widgets_browser.py` says so.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import nbformat
import pytest

from tests.lab import BROWSERS, browser_page, jupyterlab, open_notebook, run_all

NAME = "waves.ipynb"
CELL = "from mkref.widgets import wave_quantization\nwave = wave_quantization()\nwave"


def _write(path: Path) -> None:
    notebook = nbformat.v4.new_notebook()
    notebook.cells = [nbformat.v4.new_code_cell(CELL)]
    notebook.metadata.kernelspec = {
        "name": "python3", "display_name": "Python 3 (ipykernel)", "language": "python",
    }  # fmt: skip
    nbformat.write(notebook, path)


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Any, list[str]]]:
    """A page with the widget, and what went wrong on it so far."""
    folder = tmp_path_factory.mktemp("waves")
    notebooks = folder / "notebooks"
    notebooks.mkdir()
    _write(notebooks / NAME)
    errors: list[str] = []
    with jupyterlab(folder, notebooks) as address, browser_page(BROWSERS[0], errors) as shown:
        open_notebook(shown, address, NAME)
        run_all(shown)
        shown.get_by_text("Tiles on 8 SMs").first.wait_for()
        yield shown, errors


def _slider(page: Any, name: str) -> Any:
    box = page.locator(".widget-slider", has=page.get_by_text(name, exact=True))
    return box.locator(".noUi-handle")


if BROWSERS:

    def test_keys_change_the_picture(page: tuple[Any, list[str]]) -> None:
        """Arrow keys on the sliders: two SMs more and there is one wave less of each operation."""
        shown, _ = page
        assert 1 == shown.get_by_text("a grid per operation 14.00 us").count()
        _slider(shown, "SMs").focus()
        for n_sm in (9, 10):
            shown.keyboard.press("ArrowRight")
            shown.get_by_text(f"Tiles on {n_sm} SMs").first.wait_for()
        assert 1 == shown.get_by_text("a grid per operation 8.00 us, SMs 75% used").count()

    def test_keys_change_the_scene(page: tuple[Any, list[str]]) -> None:
        """The scenes by keyboard: the layer's tiles follow from the model."""
        shown, _ = page
        _slider(shown, "scene").focus()
        shown.keyboard.press("ArrowRight")
        shown.get_by_text("one queue 6.00 us").wait_for()
        shown.keyboard.press("ArrowRight")
        shown.get_by_text("GATE_UP 768").first.wait_for()
        assert 1 == shown.get_by_text("a layer of North Mini Code, one row").count()
        image = shown.locator(".widget-html-content img")
        assert image.get_attribute("alt").startswith("Tiles on 10 SMs (QKV 320")
        assert image.evaluate("(image) => image.naturalWidth") > 500
        folder = os.environ.get("MKREF_SCREENSHOTS")
        if folder:
            Path(folder).mkdir(parents=True, exist_ok=True)
            shown.screenshot(path=str(Path(folder) / "waves.png"))

    def test_nothing_failed_and_no_other_machine(page: tuple[Any, list[str]]) -> None:
        """No script failed, and nothing was asked of another machine."""
        assert [] == page[1]
