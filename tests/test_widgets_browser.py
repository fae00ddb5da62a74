"""Widgets in JupyterLab, in a headless Chromium, as a learner sees them and by keyboard.

The page is that of `tests/widgets_lab.py`. Where there is no Chromium only
`test_says_what_is_not_covered` runs, and says so.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from tests.example_traces import example_trace
from tests.lab import BROWSERS, open_notebook
from tests.widgets_lab import LESSON, Lab, run_last_cell, shot, timeline, window

if TYPE_CHECKING:
    import pytest


def test_says_what_is_not_covered(capsys: pytest.CaptureFixture[str]) -> None:
    """Without a browser the tests below do not exist; that is told, not passed over."""
    if not BROWSERS:
        with capsys.disabled():
            print("\nno Chromium here: widgets are not driven in JupyterLab, only drawn statically")
    assert len(BROWSERS) <= 1


if BROWSERS:

    def test_lesson_shows_static_figures_before_it_runs(lab: Lab) -> None:
        """In a notebook that is not trusted and has not run, every figure is a picture."""
        page = lab.page.context.browser.new_page()
        open_notebook(page, lab.address, LESSON)
        images = page.locator(".jp-OutputArea-output img")
        page.wait_for_function("() => document.querySelectorAll('.jp-OutputArea img').length > 2")
        assert 3 == images.count()
        widths = images.evaluate_all("(found) => found.map((image) => image.naturalWidth)")
        assert all(width > 500 for width in widths)
        assert 0 == page.get_by_text("Error displaying widget").count()
        images.first.scroll_into_view_if_needed()
        shot(page, "lesson_static")
        page.close()

    def test_calculator_by_keyboard(widgets: Lab) -> None:
        """Arrow keys on the slider change the number in the picture and its sentence."""
        area = widgets.page.locator(
            ".jp-OutputArea-output", has=widgets.page.locator(".widget-slider")
        )
        assert 1 == area.get_by_text("at most 469.8 tokens per second").count()
        area.locator(".noUi-handle").first.focus()
        for _ in range(2):
            widgets.page.keyboard.press("ArrowRight")
        area.get_by_text("at most 430.3 tokens per second").wait_for()
        shot(widgets.page, "calculator")

    def test_timeline_draws(widgets: Lab) -> None:
        """The canvas shows the whole step in more than ten colours; the legend names operations."""
        timeline(widgets)
        assert (0, True) == (window(widgets)[0], window(widgets)[1] >= example_trace().span_ns)
        colours = widgets.page.locator(".mkref-timeline canvas.rows").first.evaluate(
            """(canvas) => {
                const context = canvas.getContext("2d");
                const image = context.getImageData(0, 0, canvas.width, canvas.height);
                return new Set(new Uint32Array(image.data.buffer)).size;
            }"""
        )
        assert colours > 10
        legend = widgets.page.locator(".mkref-timeline .legend").first.locator("li")
        assert [*example_trace().ops, "waits for inputs"] == legend.all_inner_texts()
        shot(widgets.page, "timeline")

    def test_timeline_keys(widgets: Lab) -> None:
        """W zooms in, D pans right, 0 shows all; JupyterLab's own keys do nothing meanwhile."""
        stage = timeline(widgets)
        n_cells = widgets.page.locator(".jp-Cell").count()
        whole = window(widgets)
        for key in ("w", "w", "d", "a", "b", "x"):
            widgets.page.keyboard.press(key)
        zoomed = window(widgets)
        assert (zoomed[1] - zoomed[0]) < 0.6 * (whole[1] - whole[0])
        widgets.page.keyboard.press("d")
        assert window(widgets)[0] > zoomed[0]
        widgets.page.keyboard.press("0")
        assert whole == window(widgets)
        assert n_cells == widgets.page.locator(".jp-Cell").count()
        widgets.page.keyboard.press("?")
        assert stage.locator(".help").is_visible()
        shot(widgets.page, "timeline_help")
        widgets.page.keyboard.press("?")
        assert not stage.locator(".help").is_visible()

    def test_timeline_selects_and_tells(widgets: Lab) -> None:
        """The next-task key walks along the SM, arrows change it, and the words are the trace's."""
        stage = timeline(widgets)
        widgets.page.keyboard.press("Escape")
        for _ in range(3):
            widgets.page.keyboard.press(".")
        event = example_trace().event(2)
        said = stage.locator(".detail").inner_text()
        assert said.startswith(f"SM 0, {event.op}, layer {event.layer}, first {event.first}")
        assert f"for counter {event.wait}" in said
        widgets.page.keyboard.press("ArrowDown")
        assert stage.locator(".detail").inner_text().startswith("SM 1, ")
        widgets.page.keyboard.press("f")
        begin, end = window(widgets)
        chosen = example_trace().event(int(stage.get_attribute("data-selected")))
        assert begin <= chosen.begin < chosen.end <= end < begin + 3 * (chosen.end - chosen.begin)
        shot(widgets.page, "timeline_selected")

    def test_timeline_mouse(widgets: Lab) -> None:
        """A click selects a bar, a drag pans, the wheel with Ctrl zooms."""
        stage = timeline(widgets)
        for key in ("Escape", "0", "w", "w"):
            widgets.page.keyboard.press(key)
        box = widgets.page.locator(".mkref-timeline canvas.rows").first.bounding_box()
        x, y = box["x"] + box["width"] * 0.5, box["y"] + 30
        before = window(widgets)
        widgets.page.mouse.click(x, y)
        assert stage.locator(".detail").inner_text().startswith("SM 1, ")
        assert before == window(widgets)
        widgets.page.mouse.move(x, y)
        widgets.page.mouse.down()
        widgets.page.mouse.move(x - 80, y, steps=4)
        widgets.page.mouse.up()
        panned = window(widgets)
        assert panned[0] > before[0]
        widgets.page.keyboard.down("Control")
        widgets.page.mouse.wheel(0, -200)
        widgets.page.keyboard.up("Control")
        widgets.page.wait_for_timeout(200)
        assert window(widgets)[1] - window(widgets)[0] < panned[1] - panned[0]

    def test_timeline_lane_of_what_ran_beside(widgets: Lab) -> None:
        """A MERGE is drawn under its neighbours, and a click there finds it; above, another."""
        stage = timeline(widgets)
        trace = example_trace()
        for key in ("0", "Escape"):
            widgets.page.keyboard.press(key)
        merge = next(event for event in trace if event.beside)
        for _ in range(merge.index + 1):
            widgets.page.keyboard.press(".")
        widgets.page.keyboard.press("f")
        said = stage.locator(".detail").inner_text()
        assert said.startswith("SM 0, MERGE, layer 0")
        widgets.page.keyboard.press("Escape")
        begin, end = window(widgets)
        box = widgets.page.locator(".mkref-timeline canvas.rows").first.bounding_box()
        middle = ((merge.ready + merge.end) / 2 - begin) / (end - begin)
        x = box["x"] + 64 + middle * (box["width"] - 64 - 8)
        widgets.page.mouse.click(x, box["y"] + 16)
        assert said == stage.locator(".detail").inner_text()
        widgets.page.mouse.click(x, box["y"] + 6)
        assert "MERGE" not in stage.locator(".detail").inner_text()
        shot(widgets.page, "timeline_beside")

    def test_ring_by_keyboard(widgets: Lab) -> None:
        """Another SM in the list is another picture."""
        area = widgets.page.locator(".jp-OutputArea-output", has=widgets.page.get_by_text("SMs"))
        area = area.filter(has=widgets.page.locator("select")).last
        assert 1 == area.get_by_text("Shown: 4 of 4 SMs").count()
        area.locator("select").select_option(label="SM 2")
        area.get_by_text("Shown: 1 of 4 SMs").wait_for()
        shot(widgets.page, "ring")

    def test_python_sees_the_selection(widgets: Lab) -> None:
        """What is selected and set in the browser arrives in the kernel."""
        stage = timeline(widgets)
        widgets.page.keyboard.press("Escape")
        for _ in range(4):
            widgets.page.keyboard.press(".")
        said = run_last_cell(widgets)
        assert stage.get_attribute("data-selected") == said["lanes.selected"]
        assert "32768" == said["light.context.value"]

    def test_no_script_error_and_no_other_machine(widgets: Lab) -> None:
        """In all of the above no script failed and nothing was asked of another machine."""
        assert [] == widgets.errors
