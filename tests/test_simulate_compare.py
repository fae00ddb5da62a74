"""Two records side by side, and simulated ones in the pictures that recorded ones have."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from mkref.errors import RequestError
from mkref.machine.source import Ring
from mkref.simulate.compare import compare
from mkref.simulate.run import simulate
from mkref.simulate.situation import Situation
from mkref.simulate.switches import Switches
from mkref.trace.events import BEGIN, END, READY
from mkref.widgets import sm_timeline
from mkref.widgets.ring.model import ring_view
from mkref.widgets.ring.render import figure as rings
from mkref.widgets.timeline.model import timeline
from mkref.widgets.timeline.render import figure as lanes
from tests.example_traces import SMALL, example_trace, small_plan

MEASURED = replace(example_trace(), provenance={"label": "measured", "machine": "example"})
SIMULATED = simulate(
    small_plan(),
    Situation.uniform(SMALL, [299] * 3),
    switches=Switches(ring=Ring(5, 16)),
    stages_of=range(4),
).trace


def test_every_task_has_its_counterpart() -> None:
    """Records of one plan have all tasks in common, each with the same name in both."""
    both = compare(MEASURED, SIMULATED)
    assert len(both.pairs) == MEASURED.n_tasks == SIMULATED.n_tasks
    for a, b in both.pairs[::7].tolist():
        one, other = MEASURED.event(a), SIMULATED.event(b)
        assert (one.sm, one.op, one.layer) == (other.sm, other.op, other.layer)
        assert one.first == other.first


def test_a_record_is_equal_to_itself() -> None:
    """No error, all work at the same time, equal means."""
    both = compare(MEASURED, MEASURED)
    assert (0.0, 1.0) == (both.span_error, both.overlap())
    for row in both.by_op():
        assert row.wait[0] == row.wait[1]
        assert row.work[0] == row.work[1]
    layers = both.layers()
    assert (SMALL.num_hidden_layers - 1, 2) == layers.shape
    assert (layers[:, 0] == layers[:, 1]).all()


def test_differences_are_those_that_were_made() -> None:
    """A record that runs twice as slowly: twice the span, the work and the layers."""
    slow = replace(MEASURED, times=np.where(MEASURED.times < 0, -1, 2 * MEASURED.times))
    both = compare(MEASURED, slow)
    assert 1.0 == pytest.approx(both.span_error)
    assert (both.layers()[:, 1] == 2 * both.layers()[:, 0]).all()
    for row in both.by_op():
        assert 2 * row.work[0] == pytest.approx(row.work[1])
        assert 2 * row.spread[0] == pytest.approx(row.spread[1])
    assert both.overlap() < 0.2
    assert "+100.0%" in both.describe()
    assert "[measured]" in both.describe()


def test_means_are_over_the_pairs() -> None:
    """Of a record with fewer SMs only what both have counts."""
    part = MEASURED.only(range(2))
    both = compare(MEASURED, part)
    assert len(both.pairs) == part.n_tasks
    times = part.times[[part.ops[op] == "QKV" for op in part.columns["op"]]]
    row = next(row for row in both.by_op() if row.op == "QKV")
    assert (times[:, END] - times[:, READY]).mean() == pytest.approx(row.work[0])
    assert (times[:, READY] - times[:, BEGIN]).mean() == pytest.approx(row.wait[1])


def test_report_is_a_sentence_and_a_table() -> None:
    """It names both records with their labels, and every operation."""
    said = compare(MEASURED, SIMULATED).report()
    assert "[simulated]" in said.splitlines()[0]
    for op in MEASURED.ops:
        assert f"\n{op} " in said


def test_records_without_a_common_task_are_refused() -> None:
    """One line says what is wrong."""
    moved = MEASURED.columns | {"first": MEASURED.columns["first"] + 9999}
    other = replace(MEASURED, columns=moved)
    with pytest.raises(RequestError, match="no task of one record is in the other"):
        compare(MEASURED, other)


def test_pictures_show_simulated_records() -> None:
    """Timeline, rings and measured over simulated: all of them say which is which."""
    for drawn in (lanes(timeline(SIMULATED)), rings(ring_view(SIMULATED))):
        assert "[simulated]" in drawn.summary
        assert "[measured]" not in drawn.summary
    shown = sm_timeline(MEASURED, SIMULATED)
    assert "[measured]" in repr(shown)
    assert "[simulated]" in repr(shown)
