"""The SM timeline in JupyterLab: edges of a task, the critical path, two runs, the file it saves.

The page is that of `tests/widgets_lab.py`; without a Chromium there are no tests here, which
`tests/test_widgets_browser.py` tells.
"""

from __future__ import annotations

import json
from pathlib import Path

from mkref.trace.path import describe_path
from mkref.widgets.timeline.compare import counterparts
from mkref.widgets.timeline.edges import Edges, describe_edges
from tests.example_traces import example_trace
from tests.lab import BROWSERS
from tests.widgets_lab import BOTH, Lab, run_last_cell, shot, timeline, window

TRACE = example_trace()
OTHER = example_trace(seed=3)

if BROWSERS:

    def press(lab: Lab, *keys: str) -> None:
        """One key after another."""
        for key in keys:
            lab.page.keyboard.press(key)

    def root(lab: Lab, which: int) -> object:
        """All of a timeline: the stage, and what is folded away under it."""
        return lab.page.locator(".mkref-timeline").nth(which)

    def test_edges_in_words_are_those_of_python(widgets: Lab) -> None:
        """For every task of SM 0 the browser says what `describe_edges` says."""
        stage, edges = timeline(widgets), Edges(TRACE)
        press(widgets, "Escape", "0")
        assert "" == stage.locator(".edges").inner_text()
        for task in TRACE.tasks_of(0):
            press(widgets, ".")
            assert str(task) == stage.get_attribute("data-selected")
            assert describe_edges(edges, int(task)) == stage.locator(".edges").inner_text()
        merge = next(i for i in TRACE.tasks_of(0) if TRACE.event(int(i)).op == "MERGE")
        press(
            widgets, *("," for _ in range(len(TRACE.tasks_of(0)) - 1 - int(merge))), "f", "s", "s"
        )
        shot(widgets.page, "timeline_edges")

    def test_edges_as_a_table(widgets: Lab) -> None:
        """Opened, it has a row per edge, and follows the selection."""
        from playwright.sync_api import expect

        timeline(widgets)
        press(widgets, "Escape", ".", ".")
        box = widgets.page.locator(".mkref-timeline").first.locator("details").nth(1)
        box.locator("summary").click()
        edges = Edges(TRACE)
        for task in (1, 2):
            n_edges = len(edges.waits_for(task)) + len(edges.needed_by(task))
            expect(box.locator("tbody tr")).to_have_count(n_edges)  # once it has been drawn
            timeline(widgets)
            press(widgets, ".")
        box.locator("summary").click()

    def test_keys_follow_the_critical_path(widgets: Lab) -> None:
        """From its first task ] walks to its last, [ back; C makes it stand out, and says it."""
        stage, path = timeline(widgets), [link.task for link in Edges(TRACE).path]
        press(widgets, "Escape", "0", "c", "]")
        seen = [stage.get_attribute("data-selected")]
        for _ in path[1:]:
            press(widgets, "]")
            seen.append(stage.get_attribute("data-selected"))
        assert [str(task) for task in path] == seen
        assert describe_path(TRACE) == stage.locator(".path").inner_text()
        shot(widgets.page, "timeline_path")
        for task in path[-2::-1]:
            press(widgets, "[")
            assert str(task) == stage.get_attribute("data-selected")
        press(widgets, "c")
        assert "" == stage.locator(".path").inner_text()

    def test_two_runs_over_one_another(widgets: Lab) -> None:
        """O goes to the same task of the other run and back; the words compare both."""
        stage = timeline(widgets, BOTH)
        press(widgets, "Escape", "0", ".", ".", ".")
        said = stage.locator(".detail").inner_text()
        event, twin = TRACE.event(2), OTHER.event(int(counterparts(TRACE, OTHER)[2]))
        assert said.startswith(f"A, SM 0, {event.op}")
        assert f"In B it waited {twin.wait_ns} ns" in said or "In B it waited" in said
        shot(widgets.page, "timeline_two")
        press(widgets, "o")
        assert str(TRACE.n_tasks + 2) == stage.get_attribute("data-selected")
        assert stage.locator(".detail").inner_text().startswith(f"B, SM 0, {event.op}")
        press(widgets, "ArrowDown")
        assert stage.locator(".detail").inner_text().startswith("B, SM 1")

    def test_two_runs_in_two_panels(widgets: Lab) -> None:
        """B takes them apart; a click in the lower panel selects a task of the second run."""
        stage = timeline(widgets, BOTH)
        press(widgets, "Escape", "0", "b", "c")
        canvas = stage.locator("canvas.rows")
        box = canvas.bounding_box()
        # Two titles of 18 and two panels of four rows of 26; the last row is SM 3 of B.
        y = box["y"] + 2 * 18 + 7 * 26 + 8
        widgets.page.mouse.click(box["x"] + box["width"] / 2, y)
        assert stage.locator(".detail").inner_text().startswith("B, SM 3")
        shot(widgets.page, "timeline_panels")
        press(widgets, "w")
        assert window(widgets, BOTH)[1] < TRACE.span_ns
        selected = stage.get_attribute("data-selected")
        said = run_last_cell(widgets)
        assert (selected, "True") == (said["both.selected"], said["both.path"])
        timeline(widgets, BOTH)
        press(widgets, "b", "c", "0", "Escape")

    def test_saves_a_file_for_perfetto(widgets: Lab, tmp_path: Path) -> None:
        """The button saves Chrome JSON with a process per run."""
        stage = timeline(widgets, BOTH)
        with widgets.page.expect_download() as download:
            stage.get_by_role("button", name="save a file for ui.perfetto.dev").click()
        download.value.save_as(tmp_path / "saved.json")
        assert "timeline.json" == download.value.suggested_filename
        events = json.loads((tmp_path / "saved.json").read_text())["traceEvents"]
        tasks = [event for event in events if event.get("cat") == "task"]
        assert {1, 2} == {event["pid"] for event in events}
        assert TRACE.n_tasks + OTHER.n_tasks == len(tasks)

    def test_help_tells_of_two_runs_where_there_are_two(widgets: Lab) -> None:
        """The list of keys names B and O there, and only there."""
        for which in (0, BOTH):
            stage = timeline(widgets, which)
            press(widgets, "?")
            keys = stage.locator(".help kbd").all_inner_texts()
            assert (which == BOTH) == ("O" in keys)
            press(widgets, "?")

    def test_no_script_error_and_no_other_machine(widgets: Lab) -> None:
        """In all of the above no script failed and nothing was asked of another machine."""
        assert [] == widgets.errors
