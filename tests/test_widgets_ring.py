"""The picture of the rings: what it chooses to show, what it draws, what the controls do."""

from __future__ import annotations

import re

import numpy as np
import pytest

from mkref.errors import RequestError
from mkref.trace.events import Trace
from mkref.trace.ring import describe_ring
from mkref.trace.stages import occupancy
from mkref.widgets import ring_occupancy
from mkref.widgets.ring import model
from mkref.widgets.ring.model import ring_view
from mkref.widgets.ring.render import area, figure
from tests.example_traces import RING, example_trace, played, played_stages, small_plan

TRACE = example_trace(8, stages=True)


def test_view_is_cut_to_a_page(monkeypatch: pytest.MonkeyPatch) -> None:
    """Six SMs spread over the machine, about as many stages as asked for, and it says so."""
    monkeypatch.setattr(model, "MAX_STAGES", 20)
    view = ring_view(TRACE)
    assert (0, 1, 2, 4, 5, 6) == view.sms
    issued = view.stages.times[np.isin(view.stages.sm, view.sms), 0]
    assert 20 * 6 == int((issued < view.end).sum())
    assert re.search(r"Shown: 6 of 8 SMs, 0 ns to .* of ", figure(view).summary)
    assert describe_ring(TRACE) in figure(view).summary


def test_view_begins_where_the_record_is_whole() -> None:
    """A record of the step's end is shown from there on, and not before."""
    plan = small_plan(2)
    stamps = played(plan)
    stages = played_stages(plan, stamps, rows=16)
    trace = Trace.from_plan(plan, stamps, stage_stamps=stages, ring=RING)
    view = ring_view(trace)
    assert view.begin == view.stages.begin > 0
    with pytest.raises(RequestError, match="where the record of the stages begins"):
        ring_view(trace, window=(0, 100))


@pytest.mark.parametrize("wrong", [{"sms": [8]}, {"sms": []}, {"window": (5, 5)}])
def test_refuses_what_is_not_there(wrong: dict[str, object]) -> None:
    """An SM beyond the last, no SM, an empty window; and a trace without stages."""
    with pytest.raises(RequestError, match="ring"):
        ring_view(TRACE, **wrong)  # type: ignore[arg-type]
    with pytest.raises(RequestError, match="has no stages"):
        ring_occupancy(example_trace(2))


def test_cells_hold_the_means() -> None:
    """Cells of 1 ns are the curve itself; the sum over cells is the curve's."""
    view = ring_view(TRACE, sms=[3], window=(1000, 1100))
    assert 101 == len(view.edges)
    curve = occupancy(view.stages, 3)
    assert curve.at(np.arange(1000, 1100)).tolist() == pytest.approx(view.held(3).tolist())
    wide = ring_view(TRACE, sms=[3], window=(0, 50_000))
    assert curve.mean(0, 50_000) == pytest.approx(wide.held(3).mean())
    assert (wide.in_flight(3) <= wide.held(3) + 1e-9).all()


def test_waits_are_those_of_the_consumers() -> None:
    """Begin and ready of the tasks in the window, without the helper's."""
    view = ring_view(TRACE, sms=[2])
    expected = [
        (e.begin, e.ready)
        for e in TRACE
        if e.sm == 2 and not e.beside and e.ready > view.begin and e.begin < view.end
    ]
    assert expected == view.waits(2)


def test_area_joins_equal_cells() -> None:
    """Two cells of one height are one step; the lower curve runs back."""
    data = area(np.zeros(3), np.array([1, 1, 2]), np.array([0.0, 5, 10, 15]), 20, 4)
    assert "M0 16L10 16L10 12L15 12L15 20L0 20z" == data


def test_picture_has_a_row_per_sm() -> None:
    """Labels of the SMs, one of all; two areas each and one of all; small enough for a page."""
    made = figure(ring_view(TRACE))
    assert [f"SM {sm}" for sm in (0, 1, 2, 4, 5, 6)] == re.findall(r">(SM \d)<", made.svg)
    assert 1 == made.svg.count(">8 SMs<")
    assert 6 * 2 + 1 == len(re.findall(r'<path d="M[^"]*L[^"]*z"', made.svg))
    assert len(made.svg) < 100_000
    assert made == figure(ring_view(example_trace(8, stages=True)))


def test_table_has_a_row_per_operation() -> None:
    """Of the consumers; what never happened is a dash."""
    rows = {row[0]: row[1:] for row in figure(ring_view(TRACE)).table.rows}
    assert "MERGE" not in rows
    assert re.fullmatch(r"\d\.\d\d", rows["QKV"][2])
    assert all(re.fullmatch(r"-|[\d.]+( KB)?", cell) for row in rows.values() for cell in row)


def test_widget_follows_its_controls() -> None:
    """The figure is that of the chosen SM and time; the output carries it as text and HTML."""
    widget = ring_occupancy(TRACE, title="Mine")
    assert widget.figure == figure(ring_view(TRACE), "Mine")
    widget.sm.value = 3
    widget.window.value = (10.0, 20.0)
    (begin, end) = (round(us * 1e3) for us in widget.window.value)
    assert figure(ring_view(TRACE, sms=[3], window=(begin, end)), "Mine") == widget.figure
    assert widget.figure.html() == widget.view.value
    data = widget._repr_mimebundle_()
    assert widget.figure.text() == data["text/plain"] == repr(widget)
    assert "text/html" in data
