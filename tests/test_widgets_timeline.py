"""The SM timeline: what it chooses to show, its static picture, what it hands to the browser."""

from __future__ import annotations

import json
import re
from dataclasses import replace

import numpy as np
import pytest

from mkref.config import NORTH_MINI_CODE
from mkref.errors import RequestError
from mkref.plan.build import build_plan
from mkref.trace.events import Trace
from mkref.trace.storage import load_trace
from mkref.widgets import sm_timeline
from mkref.widgets.timeline.model import MAX_BARS, timeline
from mkref.widgets.timeline.render import figure, ticks
from mkref.widgets.timeline.widget import FIELDS, pack
from tests.example_traces import example_trace, played, small_plan
from tests.tree import ROOT

TRACE = example_trace(4)


@pytest.fixture(scope="module")
def large() -> Trace:
    """A trace of the large model on 132 SMs, played with made-up durations."""
    plan = build_plan(NORTH_MINI_CODE, 132, full_pages=8, sliding_pages=8)
    return Trace.from_plan(plan, played(plan), {"machine": "made up", "label": "simulated"})


def test_small_trace_is_shown_whole() -> None:
    """All SMs, the whole step, and it says so."""
    view = timeline(TRACE)
    assert view.is_whole
    assert list(TRACE) == [event for sm in view.sms for event in view.bars(sm)]
    assert "all 4 SMs, the whole step" in view.scope


def test_large_trace_is_cut_to_a_page(large: Trace) -> None:
    """Sixteen SMs over the whole machine, about 600 bars, and the sentence says so."""
    view = timeline(large)
    n_bars = sum(1 for sm in view.sms for bar in view.bars(sm) if not bar.beside)
    assert 16 == len(view.sms)
    assert (0, True) == (view.sms[0], view.sms[-1] > 120)
    assert MAX_BARS - 16 <= n_bars <= MAX_BARS + 16
    assert re.search(r"Shown: 16 of 132 SMs, 0 ns to .* of ", figure(view).summary)
    assert len(figure(view).svg) < 100_000


def test_axis_labels_are_on_the_page(large: Trace) -> None:
    """No label is cut at the right edge, wherever the last tick stands."""
    for end in range(100_000, 200_001, 20_000):
        svg = figure(timeline(large, sms=range(4), window=(0, end))).svg
        labels = re.findall(r'x="([\d.]+)"[^>]*font-size="11"[^>]*>([\d.e+]+ \w+)<', svg)
        assert len(labels) >= 3
        assert all(float(x) + 3.5 * len(text) <= 900 for x, text in labels)


def test_live_view_says_nothing_about_a_part(large: Trace) -> None:
    """It shows every SM and the whole step; only the static picture is cut to a page."""
    summary = sm_timeline(large).meta["summary"]
    assert "Shown:" not in summary
    assert figure(timeline(large)).summary.startswith(f"{summary} Shown: 16 of 132 SMs")


def test_window_and_sms_can_be_chosen() -> None:
    """Bars that reach into the window are shown, others are not."""
    middle = TRACE.span_ns // 2
    view = timeline(TRACE, sms=[2, 0], window=(middle, middle + 5000))
    assert (0, 2) == view.sms
    shown = [event for sm in view.sms for event in view.bars(sm)]
    expected = [e for e in TRACE if e.sm in (0, 2) and e.end > middle and e.begin < middle + 5000]
    assert expected == shown
    assert expected


@pytest.mark.parametrize("wrong", [{"sms": [4]}, {"sms": []}, {"window": (5, 5)}])
def test_refuses_what_is_not_there(wrong: dict[str, object]) -> None:
    """An SM beyond the last, no SM, and an empty window."""
    with pytest.raises(RequestError, match="timeline"):
        timeline(TRACE, **wrong)  # type: ignore[arg-type]


def test_picture_has_one_bar_per_task() -> None:
    """Rectangles of each operation are counted in the SVG; every SM has its label."""
    svg = figure(timeline(TRACE)).svg
    paths = re.findall(r'<path d="([^"]*)" fill="[^"]*" stroke="#333333"', svg)
    legend = len({event.op for event in TRACE}) + 1
    assert TRACE.n_tasks + legend == sum(path.count("M") for path in paths)
    assert [f"SM {sm}" for sm in range(4)] == re.findall(r">(SM \d)<", svg)


def test_picture_has_one_hatched_bar_per_wait() -> None:
    """Waits that are wide enough to be seen are drawn, from begin to ready."""
    view = timeline(TRACE)
    path = re.findall(r'<path d="([^"]*)" fill="[^"]*" stroke="#8a8a8a"', figure(view).svg)
    scale = 828 / (view.end - view.begin)
    waits = [e.wait_ns * scale for e in TRACE if not e.beside]
    seen = [wait for wait in waits if wait >= 0.4]
    widths = [float(width) for width in re.findall(r"h(\d[\d.]*)v", "".join(path))]
    assert seen == pytest.approx(widths, abs=0.06)


def test_what_ran_beside_has_a_thin_lane() -> None:
    """A MERGE is four high under its neighbours, which leave it the room; without any, they fill
    the row."""
    svg = figure(timeline(TRACE)).svg
    heights = re.findall(r"h[\d.]+v([\d.]+)h-", svg)
    merges = [e for e in TRACE if e.beside]
    assert merges
    assert len(merges) == heights.count("4")
    assert len(TRACE.times) - len(merges) <= heights.count("12")
    assert "17" not in heights
    older = load_trace(ROOT / "notebooks" / "data" / "trace_nano_host.json.gz")
    assert not {"4", "12"} & set(re.findall(r"h[\d.]+v([\d.]+)h-", figure(timeline(older)).svg))


def test_table_gives_no_share_to_what_ran_beside() -> None:
    """Shares of the others add up to all work."""
    cells = {row[0]: row[3] for row in figure(timeline(TRACE)).table.rows}
    assert "beside" == cells.pop("MERGE")
    assert 100 == pytest.approx(sum(float(cell.rstrip("%")) for cell in cells.values()), abs=0.5)


def test_figure_is_the_same_twice() -> None:
    """The notebook's comparison relies on it."""
    assert figure(timeline(TRACE)) == figure(timeline(example_trace(4)))


def test_figure_names_machine_and_label() -> None:
    """The sentence begins with what it was recorded on; a title replaces that."""
    assert figure(timeline(TRACE)).summary.startswith("example [simulated]: ")
    assert figure(timeline(TRACE), "My run").summary.startswith("My run [simulated]: ")


def test_ticks_are_round_and_inside() -> None:
    """Multiples of 1, 2 or 5, at most as many as asked for."""
    for begin, end in ((0, 71_234), (5_500, 5_560), (123, 9_876_543)):
        found = ticks(begin, end)
        assert 3 <= len(found) <= 9
        assert all(begin <= tick <= end for tick in found)
        digits = f"{found[1] - found[0]:.0e}"
        assert digits[0] in "125"


def test_pack_keeps_every_number() -> None:
    """The browser gets what the trace holds; long traces are given in us."""
    packed, unit = pack(TRACE)
    assert 1 == unit
    assert (TRACE.n_tasks, len(FIELDS)) == packed.shape
    assert np.array_equal(TRACE.times, packed[:, -4:])
    assert np.array_equal(TRACE.columns["layer"], packed[:, FIELDS.index("layer")])
    slow = replace(TRACE, times=TRACE.times * 100_000)
    packed, unit = pack(slow)
    assert 1000 == unit
    assert np.array_equal(slow.times // 1000, packed[:, -4:])


def test_tasks_without_stamps_are_not_packed() -> None:
    """The browser need not know what an absent stamp is, except of the loader."""
    plan = small_plan(2)
    stamps = played(plan)
    stamps[3] = 0
    stamps[4, 3] = 0
    packed, _ = pack(Trace.from_plan(plan, stamps))
    assert plan.n_tasks - 1 == len(packed)
    assert -1 == packed[3, -1]


def test_widget_shares_the_trace() -> None:
    """Its traits can travel: bytes, and JSON for the rest."""
    widget = sm_timeline(TRACE)
    assert TRACE.n_tasks * len(FIELDS) * 4 == len(widget.tasks)
    meta = json.loads(json.dumps(widget.meta))
    assert (4, list(TRACE.ops)) == (meta["n_sm"], [op["name"] for op in meta["ops"]])
    assert -1 == widget.selected
    columns = np.frombuffer(widget.tasks, "<i4").reshape(-1, len(FIELDS)).T
    beside = columns[FIELDS.index("op")][columns[FIELDS.index("beside")] == 1]
    assert {"MERGE"} == {meta["ops"][op]["name"] for op in beside}


def test_widget_output_carries_the_static_form() -> None:
    """Live view, HTML and text in one output; the text holds no address in memory."""
    widget = sm_timeline(TRACE)
    data, _ = widget._repr_mimebundle_()
    assert {"application/vnd.jupyter.widget-view+json", "text/html", "text/plain"} == data.keys()
    assert figure(timeline(TRACE)).text() == data["text/plain"] == repr(widget)
    assert "0x" not in data["text/plain"]


def test_script_loads_nothing() -> None:
    """One module without imports or addresses: it works without a network."""
    script, style = sm_timeline(TRACE)._esm, sm_timeline(TRACE)._css
    assert not re.search(r"\bimport\b|https?:|fetch\(|XMLHttpRequest", str(script) + str(style))
    assert 1 == str(script).count("export default")
