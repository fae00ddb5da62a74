"""One JupyterLab for all tests that drive widgets: its notebook, and how to find things in it.

Screenshots go to the folder MKREF_SCREENSHOTS if it is set. No tests here; the fixtures are known
to every test module through conftest.py, which is why nothing of mkref is imported up here.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import nbformat
import pytest

from tests.lab import BROWSERS, ROOT, browser_page, jupyterlab, open_notebook, run_all

SETUP = """\
from mkref.engine import Engine
from mkref.trace.storage import load_trace
from mkref.widgets import *
from mkref.widgets.kv.history import load_history
SAID = {said}"""
CELLS = (
    SETUP,
    "light = speed_of_light()\nlight",
    "lanes = sm_timeline(load_trace('example.json.gz'))\nlanes",
    "ring_occupancy(load_trace('rings.json.gz'))",
    "example, other = load_trace('example.json.gz'), load_trace('other.json.gz')",
    "both = sm_timeline(example, other, title='first', other_title='second')\nboth",
    "engine = Engine.load('nano', 'interpreter', n_sm=3, max_context=128)",
    "_ = engine.generate([5, 77, 30], max_tokens=1)",
    "plan = plan_explorer(engine.plan, interpreter=engine.machine.interpreter)\nplan",
    "pages = paged_kv(load_history('session.json.gz'))\npages",
    "print(*(f'{name}={eval(name)};' for name in SAID))",
)
SAID = (
    "lanes.selected", "light.context.value", "both.selected", "both.path",
    "plan.walk.at", "plan.selected", "pages.at", "pages.selected",
)  # fmt: skip
"""What the last cell prints."""
LESSON = "01_speed_of_light.ipynb"
STORED = "stored.ipynb"
LANES, BOTH = 0, 1
"""Which timeline of the notebook."""


class Lab(NamedTuple):
    """A page of a browser at a running JupyterLab."""

    page: Any
    address: str
    errors: list[str]


def shot(page: Any, name: str) -> None:
    """Keep a picture of the page for somebody to look at."""
    folder = os.environ.get("MKREF_SCREENSHOTS")
    if folder:
        Path(folder).mkdir(parents=True, exist_ok=True)
        page.screenshot(path=str(Path(folder) / f"{name}.png"))


def write_notebook(path: Path, bundles: Sequence[Mapping[str, str]] = ()) -> None:
    """A notebook with the widgets, without outputs; or one cell with each of these outputs."""
    notebook = nbformat.v4.new_notebook()
    notebook.cells = [
        nbformat.v4.new_code_cell(source.replace("{said}", repr(SAID))) for source in CELLS
    ]
    if bundles:
        outputs = [
            nbformat.v4.new_output("execute_result", data=dict(bundle), execution_count=1)
            for bundle in bundles
        ]
        notebook.cells = [
            nbformat.v4.new_code_cell("...", outputs=[output], execution_count=1)
            for output in outputs
        ]
    notebook.metadata.kernelspec = {
        "name": "python3", "display_name": "Python 3 (ipykernel)", "language": "python",
    }  # fmt: skip
    nbformat.write(notebook, path)


def stored() -> list[dict[str, str]]:
    """What a notebook keeps of every widget: its outputs without references to live ones."""
    from mkref.widgets import paged_kv, plan_explorer, sm_timeline
    from tests.example_histories import recorded
    from tests.example_traces import example_trace, small_plan

    made = (
        sm_timeline(example_trace(), example_trace(seed=3), selected=20, path=True),
        plan_explorer(small_plan(), layer=1),
        paged_kv(recorded()),
    )
    return [widget.static.bundle() for widget in made]


class Server(NamedTuple):
    """A running JupyterLab: where it answers, and the folder that it shows."""

    address: str
    notebooks: Path


@pytest.fixture(scope="session")
def lab_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """JupyterLab with traces, a session of the KV cache, and the lesson as it is shipped."""
    from mkref.trace.storage import save_trace
    from mkref.widgets.kv.history import save_history
    from tests.example_histories import recorded
    from tests.example_traces import example_trace

    folder = tmp_path_factory.mktemp("lab")
    notebooks = folder / "notebooks"
    notebooks.mkdir()
    save_trace(example_trace(), notebooks / "example.json.gz")
    save_trace(example_trace(seed=3), notebooks / "other.json.gz")
    save_trace(example_trace(stages=True), notebooks / "rings.json.gz")
    save_history(recorded(), notebooks / "session.json.gz")
    write_notebook(notebooks / STORED, stored())
    shutil.copy(ROOT / "notebooks" / LESSON, notebooks)
    with jupyterlab(folder, notebooks) as address:
        yield Server(address, notebooks)


# A browser for each module: as long as one is open, its event loop counts as running, and no other
# test could run one.
@pytest.fixture(scope="module")
def lab(lab_server: Server) -> Iterator[Lab]:
    """A page of a browser at the server."""
    errors: list[str] = []
    with browser_page(BROWSERS[0], errors) as page:
        yield Lab(page, lab_server.address, errors)


@pytest.fixture(scope="module")
def widgets(lab: Lab, lab_server: Server, request: pytest.FixtureRequest) -> Lab:
    """A new notebook of widgets, run."""
    name = f"{request.module.__name__.rpartition('.')[2]}.ipynb"
    write_notebook(lab_server.notebooks / name)
    open_notebook(lab.page, lab.address, name)
    run_all(lab.page)
    lab.page.wait_for_selector(".mkref-timeline canvas.rows[data-t1]")
    return lab


def timeline(lab: Lab, which: int = LANES) -> Any:
    """A timeline, scrolled into sight and with the keyboard's focus."""
    stage = lab.page.locator(".mkref-timeline .stage").nth(which)
    stage.scroll_into_view_if_needed()
    stage.focus()
    return stage


PLAN, PAGES = 0, 1
"""Which stage of the notebook: the plan explorer, the KV view."""


def stage(lab: Lab, which: int) -> Any:
    """A stage, scrolled into sight and with the keyboard's focus."""
    found = lab.page.locator(".mkref-stage .stage").nth(which)
    found.scroll_into_view_if_needed()
    found.focus()
    return found


def press(lab: Lab, which: int, *keys: str) -> str:
    """Keys on a stage, one after another; what it says when Python has answered each."""
    found = stage(lab, which)
    for key in keys:
        shown = int(found.get_attribute("data-shown"))
        lab.page.keyboard.press(key)
        lab.page.wait_for_function(
            "([stage, shown]) => Number(stage.dataset.shown) > shown",
            arg=[found.element_handle(), shown],
        )
    return str(lab.page.locator(".mkref-stage .said").nth(which).inner_text())


def window(lab: Lab, which: int = LANES) -> tuple[int, int]:
    """The stretch of time that a timeline shows."""
    canvas = lab.page.locator(".mkref-timeline canvas.rows").nth(which)
    return int(canvas.get_attribute("data-t0")), int(canvas.get_attribute("data-t1"))


def run_last_cell(lab: Lab) -> dict[str, str]:
    """What Python says after all that was done in the browser: values by name."""
    cell = lab.page.locator(".jp-CodeCell").last
    cell.locator(".cm-content").click()
    before = cell.locator(".jp-InputPrompt").inner_text()
    lab.page.keyboard.press("Control+Enter")
    lab.page.wait_for_function(
        """(before) => {
            const prompts = [...document.querySelectorAll('.jp-CodeCell .jp-InputPrompt')];
            const now = prompts.at(-1).textContent;
            return now !== before && /\\[\\d+\\]/.test(now);
        }""",
        arg=before,
    )
    text = cell.locator(".jp-OutputArea-output").inner_text()
    return dict(part.strip().split("=", 1) for part in text.split(";") if "=" in part)
