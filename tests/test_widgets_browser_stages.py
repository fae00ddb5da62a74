"""The plan explorer and the KV view in JupyterLab: keys, clicks, sliders, pictures.

The page is that of `tests/widgets_lab.py`; without a Chromium there are no tests here, which
`tests/test_widgets_browser.py` tells.
"""

from __future__ import annotations

from typing import Any

from mkref.widgets.kv.model import kv_view
from mkref.widgets.kv.picture import KvPicture
from mkref.widgets.kv.render import summary
from tests.example_histories import recorded
from tests.lab import BROWSERS, open_notebook
from tests.widgets_lab import PAGES, PLAN, STORED, Lab, press, run_last_cell, shot, stage

if BROWSERS:

    def click(lab: Lab, which: int, x: float, y: float) -> str:
        """A click at a place of the picture; what is said then."""
        found = stage(lab, which)
        image = found.locator("img.picture")
        scale = image.evaluate("(image) => image.clientWidth / image.naturalWidth")
        shown = int(found.get_attribute("data-shown"))
        image.click(position={"x": x * scale, "y": y * scale})
        lab.page.wait_for_function(
            "([stage, shown]) => Number(stage.dataset.shown) > shown",
            arg=[found.element_handle(), shown],
        )
        return str(lab.page.locator(".mkref-stage .said").nth(which).inner_text())

    def image_is_drawn(lab: Lab, which: int) -> bool:
        """The browser could read the picture, and it fills the stage."""
        image: Any = stage(lab, which).locator("img.picture")
        lab.page.wait_for_function("(image) => image.complete", arg=image.element_handle())
        return bool(image.evaluate("(image) => image.naturalWidth === 900 && image.width > 600"))

    def test_stored_outputs_show_without_a_kernel(lab: Lab) -> None:
        """In a notebook that is not trusted and never ran here, each view is a picture with words
        and a table.
        """
        page = lab.page.context.browser.new_page()
        open_notebook(page, lab.address, STORED)
        images = page.locator(".jp-OutputArea-output img")
        page.wait_for_function("() => document.querySelectorAll('.jp-OutputArea img').length > 2")
        page.wait_for_function(
            "() => [...document.querySelectorAll('.jp-OutputArea img')].every((i) => i.complete)"
        )
        widths = images.evaluate_all("(found) => found.map((image) => image.naturalWidth)")
        assert [900] * 3 == widths
        alts = images.evaluate_all("(found) => found.map((image) => image.alt)")
        assert all(alt in page.locator(".jp-OutputArea-output p").all_inner_texts() for alt in alts)
        assert 3 == page.locator(".jp-OutputArea-output details table").count()
        assert 0 == page.get_by_text("Error displaying widget").count()
        images.nth(1).scroll_into_view_if_needed()
        shot(page, "stored")
        page.close()

    def test_plan_walks_by_keyboard(widgets: Lab) -> None:
        """One task on, one back, a layer, the whole step: really computed, with a token."""
        said = press(widgets, PLAN, ".")
        assert image_is_drawn(widgets, PLAN)
        assert "1 task is done, the last: EMBED of layer 0 on SM 0." in said
        assert "SM 1: EMBED of layer 0 can start." in said
        said = press(widgets, PLAN, ".", ".", ".")
        assert (
            "SM 0: ATTENTION of layer 0 waits for counter qkv0 (1 of 3); still to come: "
            "2 QKV on SMs 1 to 2. SM 1: QKV of layer 0 can start."
        ) in said
        shot(widgets.page, "plan_start")
        press(widgets, PLAN, ",", "r", "d", ".", ".", ".", ".", ".")
        shot(widgets.page, "plan_layer")
        said = press(widgets, PLAN, "e")
        assert "The step is over. Next tokens: " in said
        shot(widgets.page, "plan_end")
        press(widgets, PLAN, "0")

    def test_plan_by_mouse(widgets: Lab) -> None:
        """A click on an SM lets it go, one on a task selects it and names who waits for whom."""
        press(widgets, PLAN, "0")
        # Lists begin below the graph; SM 1 is the second row.
        regions = {name: box for *box, name in _regions(widgets, PLAN)}
        x, y, w, h = regions["sm 1"]
        click(widgets, PLAN, x + w / 2, y + h / 2)
        first = min(n for n in (int(k.split()[1]) for k in regions if k.startswith("task")))
        x, y, w, h = regions[f"task {first + 2}"]
        said = click(widgets, PLAN, x + w / 2, y + h / 2)
        assert "Selected: ATTENTION of layer 0 on SM 0. It waits for qkv0 (0 of 3)" in said
        shot(widgets.page, "plan_selected")
        told = run_last_cell(widgets)
        assert str(first + 2) == told["plan.selected"]
        press(widgets, PLAN, "Escape")

    def _regions(lab: Lab, which: int) -> list[list[Any]]:
        """Places that can be clicked, as Python sent them: read from the picture that it draws."""
        from mkref.engine.load import model_folder
        from mkref.plan import build_plan
        from mkref.weights.checkpoint import Checkpoint
        from mkref.widgets import plan_explorer

        config = Checkpoint(model_folder("nano")).config
        plan = build_plan(config, 3, full_pages=2, sliding_pages=2)
        return list(plan_explorer(plan).view["regions"])

    def test_plan_tables_and_slider(widgets: Lab) -> None:
        """The slider chooses a layer; who waits for whom is a table that follows."""
        found = stage(widgets, PLAN)
        press(widgets, PLAN, "0")
        box = widgets.page.locator(".mkref-stage").nth(PLAN).locator("details").nth(1)
        box.locator("summary").click()
        assert 3 == box.locator("tbody tr").count()
        assert "EMBED of layer 0 can start" in box.inner_text()
        press(widgets, PLAN, "e")
        box.get_by_text("done", exact=True).first.wait_for()
        box.locator("summary").click()
        slider = found.locator("input[type=range]")
        slider.focus()
        widgets.page.keyboard.press("ArrowLeft")
        widgets.page.locator(".mkref-stage .said").nth(PLAN).get_by_text("Layer 4: ").wait_for()

    def test_pages_by_keyboard(widgets: Lab) -> None:
        """Steps and changes; the words are those of Python; JupyterLab's keys do nothing."""
        n_cells = widgets.page.locator(".jp-Cell").count()
        said = press(widgets, PAGES, "0")
        assert image_is_drawn(widgets, PAGES)
        assert summary(kv_view(recorded(), 0)) == said
        assert summary(kv_view(recorded(), 1)) == press(widgets, PAGES, ".")
        said = press(widgets, PAGES, "d", "d", "d", "d")
        assert "Since the step before: " in said
        shot(widgets.page, "pages")
        said = press(widgets, PAGES, "ArrowDown")
        assert "Selected: A holds " in said
        press(widgets, PAGES, "a", "a", "e")
        shot(widgets.page, "pages_end")
        assert n_cells == widgets.page.locator(".jp-Cell").count()
        told = run_last_cell(widgets)
        assert (str(len(recorded().moments) - 1), "A") == (told["pages.at"], told["pages.selected"])
        press(widgets, PAGES, "Escape")

    def test_pages_by_mouse_and_slider(widgets: Lab) -> None:
        """A click on a step goes there, one on a page selects its owner."""
        press(widgets, PAGES, "0")
        regions = KvPicture(kv_view(recorded(), 0), "").regions
        x, y, w, h, _ = next(r for r in regions if r[4] == "step 40")
        said = click(widgets, PAGES, x + w / 2, y + h / 2)
        assert summary(kv_view(recorded(), 40)) == said
        regions = KvPicture(kv_view(recorded(), 40), "").regions
        x, y, w, h, name = regions[0]
        owner = recorded().names[int(name.split()[1])]
        assert f"Selected: {owner} holds " in click(widgets, PAGES, x + w / 2, y + h / 2)
        shot(widgets.page, "pages_selected")
        found = stage(widgets, PAGES)
        found.locator("input[type=range]").focus()
        widgets.page.keyboard.press("ArrowRight")
        words = widgets.page.locator(".mkref-stage .said").nth(PAGES)
        words.get_by_text("step 41 feeds").wait_for()

    def test_stages_list_their_keys(widgets: Lab) -> None:
        """? shows and hides the list; buttons say what they do and which key does it, too."""
        for which, key in ((PLAN, "E"), (PAGES, "E")):
            found = stage(widgets, which)
            widgets.page.keyboard.press("?")
            assert found.locator(".help").is_visible()
            assert key in found.locator(".help kbd").all_inner_texts()
            if which == PLAN:
                shot(widgets.page, "plan_help")
            widgets.page.keyboard.press("?")
            assert not found.locator(".help").is_visible()
            labels = found.locator("button").evaluate_all(
                "(all) => all.map((button) => button.getAttribute('aria-label'))"
            )
            assert all(label.endswith(")") for label in labels)

    def test_no_script_error_and_no_other_machine(widgets: Lab) -> None:
        """In all of the above no script failed and nothing was asked of another machine."""
        assert [] == widgets.errors
