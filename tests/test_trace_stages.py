"""The ring of a trace: which stamps count, occupancy and bytes in flight over time, their sums."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from mkref.errors import MachineError, PlanError
from mkref.trace.events import ABSENT, Trace
from mkref.trace.ring import describe_ring, ring_by_op, ring_use
from mkref.trace.stages import Curve, RingShape, Stages, bytes_in_flight, occupancy
from mkref.trace.storage import load_trace, save_trace, trace_from_dict, trace_to_dict
from tests.example_traces import (
    RING,
    example_trace,
    played,
    played_stages,
    small_plan,
)
from tests.test_trace import equal

SHAPE = RingShape(stages=2, stage_bytes=100)


def made(rows: list[list[int]]) -> Stages:
    """Stages of one SM from stamps in ns, 0 for none, of a step that begins at 100."""
    stages = Stages.from_stamps(np.array([rows], np.uint64), SHAPE, zero=100)
    assert stages is not None
    return stages


# Issued, landed, taken, released.
TWO = [[200, 240, 260, 300], [210, 0, 300, 330], [0, 0, 0, 0], [0, 0, 0, 0]]


def test_curves_of_two_stages() -> None:
    """Held from issue to release; in flight until known to have landed, here when it was taken."""
    held, flying = occupancy(made(TWO)), bytes_in_flight(made(TWO))
    assert ([0, 100, 110, 200, 230], [0, 1, 2, 1, 0]) == (held.times.tolist(), held.values.tolist())
    assert [0, 100, 110, 140, 200] == flying.times.tolist()
    assert [0, 100, 200, 100, 0] == flying.values.tolist()
    assert [0, 2, 1, 0] == held.at(np.array([99, 110, 229, 230])).tolist()
    assert (10 + 2 * 90 + 30) / 130 == held.mean(100, 230)
    assert 90 / 130 == pytest.approx(held.share_at(2, 100, 230))
    assert [5 * 100 / 105, 100.0] == flying.means(np.array([0, 105, 110])).tolist()
    assert 0.0 == flying.mean(200, 1000)


def test_what_was_never_released_stays() -> None:
    """A stage that the loader issued for a step that did not come holds its place to the end."""
    stages = made([*TWO[:2], [340, 0, 0, 0], [0, 0, 0, 0]])
    assert 1 == occupancy(stages).values[-1]
    assert SHAPE.stage_bytes == bytes_in_flight(stages).values[-1]
    assert [ABSENT] * 3 == stages.times[2, 1:].tolist()


def test_rests_of_earlier_launches_are_left_out() -> None:
    """What was over, or never released, before the step; and later stamps that are older than the
    issue, because the row has been used again."""
    rests = [[11, 21, 31, 41], [51, 0, 0, 0], [210, 42, 43, 44], [200, 240, 260, 300]]
    assert [[100, 140, 160, 200], [110, ABSENT, ABSENT, ABSENT]] == made(rests).times.tolist()
    poison = 2**64 - 1
    assert 2 == len(made([*TWO[:2], [poison] * 4]))
    assert Stages.from_stamps(np.zeros((1, 4, 4), np.uint64), SHAPE, zero=100) is None


def test_a_wrapped_record_says_since_when_it_is_whole() -> None:
    """Rows are sorted by issue; the record counts from when the ring has gone round once."""
    wrapped = [[400, 0, 410, 420], [430, 0, 440, 450], [300, 0, 310, 320], [330, 0, 340, 350]]
    stages = made(wrapped)
    assert [200, 230, 300, 330] == stages.times[:, 0].tolist()
    assert [230] == stages.since.tolist()
    assert 230 == stages.begin
    assert 0 == made(TWO).begin


def test_what_came_before_the_step_is_at_its_beginning() -> None:
    """The loader was ahead of the first task: its stage is held from 0 on, landed already."""
    stages = made([[60, 90, 105, 115], [95, 110, 120, 130]])
    assert [[0, 0, 5, 15], [0, 10, 20, 30]] == stages.times.tolist()
    assert [2, 1, 0] == occupancy(stages).values.tolist()
    assert [100, 0] == bytes_in_flight(stages).values.tolist()


@pytest.mark.parametrize(
    ("row", "says"),
    [([200, 0, 260, 250], "run backwards"), ([200, 270, 260, 300], "")],
)
def test_refuses_a_release_before_the_taking(row: list[int], says: str) -> None:
    """But the loader may come to look for a landing after the consumer did."""
    if says:
        with pytest.raises(MachineError, match=says):
            made([row])
    else:
        assert [160] == made([row]).landed().tolist()


def test_refuses_stamps_of_another_shape() -> None:
    """The message gives both."""
    with pytest.raises(PlanError, match=r"\(3, 4\), must be \[n_sm, rows, 4\]"):
        Stages.from_stamps(np.zeros((3, 4), np.uint64), SHAPE, zero=0)


def test_made_up_rings_keep_their_bounds() -> None:
    """Never more stages than there are, per SM and in all; what is in flight is held."""
    trace = example_trace(3, stages=True)
    stages = trace.stages
    assert stages is not None
    every = np.unique(stages.times[stages.times >= 0])
    total = np.zeros(len(every))
    for sm in stages.sms:
        held, flying = occupancy(stages, sm).at(every), bytes_in_flight(stages, sm).at(every)
        assert RING.stages == held.max()
        assert held.min() >= 0
        assert (flying <= held * RING.stage_bytes).all()
        total += held
    assert np.array_equal(total, occupancy(stages).at(every))


def test_a_short_record_agrees_where_it_is_whole() -> None:
    """With room for 16 stages the curves of the end of the step are those of the whole record."""
    plan = small_plan(3)
    stamps = played(plan)
    whole, part = (
        Trace.from_plan(
            plan, stamps, stage_stamps=played_stages(plan, stamps, rows=rows), ring=RING
        ).stages
        for rows in (256, 16)
    )
    assert whole is not None
    assert part is not None
    assert [16] * 3 == np.bincount(part.sm).tolist()
    assert 0 == whole.begin < part.begin
    for sm in range(3):
        at = np.arange(int(part.since[sm]), int(whole.times.max()), 7)
        for curve in (occupancy, bytes_in_flight):
            assert np.array_equal(curve(whole, sm).at(at), curve(part, sm).at(at))


def test_use_is_the_mean_over_sms() -> None:
    """It agrees with a plain sum over nanoseconds."""
    trace = example_trace(2, stages=True)
    use = ring_use(trace)
    assert use is not None
    assert trace.stages is not None
    at = np.arange(trace.span_ns)
    held = np.stack([occupancy(trace.stages, sm).at(at) for sm in range(2)])
    flying = np.stack([bytes_in_flight(trace.stages, sm).at(at) for sm in range(2)])
    assert held.mean() == pytest.approx(use.held)
    assert flying.mean() == pytest.approx(use.in_flight)
    shares = ((held == RING.stages).mean(), (held == 0).mean(), (flying == 0).mean())
    assert shares == pytest.approx((use.full, use.empty, use.idle))
    assert f"{use.held:.1f} stages held, full {use.full:.0%}" in describe_ring(trace)
    assert "not stamped" in describe_ring(example_trace(2))
    assert ring_use(example_trace(2)) is None


def test_by_op_looks_at_each_task_of_the_consumers() -> None:
    """Means while an SM waits for an operation and while it does it; nothing of what is beside."""
    trace = example_trace(2, stages=True)
    assert trace.stages is not None
    rows = {row.op: row for row in ring_by_op(trace)}
    assert {op for op in trace.ops if op != "MERGE"} == rows.keys()
    head = [event for event in trace if event.op == "HEAD"]
    held = [occupancy(trace.stages, e.sm).at(np.arange(e.ready, e.end)) for e in head]
    assert np.concatenate(held).mean() == pytest.approx(rows["HEAD"].held_working)
    assert [] == ring_by_op(example_trace(2))


@pytest.mark.parametrize("name", ["t.json", "t.json.gz"])
def test_file_round_trip(tmp_path: Path, name: str) -> None:
    """Stages come back as they were; a file without them is one of before."""
    trace = example_trace(3, stages=True)
    assert equal(trace, load_trace(save_trace(trace, tmp_path / name)))
    assert "stages" not in trace_to_dict(example_trace(3))
    damaged = trace_to_dict(trace)
    damaged["stages"] = {**damaged["stages"], "issued": damaged["stages"]["issued"][:-1]}
    with pytest.raises(PlanError, match="damaged"):
        trace_from_dict(json.loads(json.dumps(damaged)))


def test_stages_of_some_sms() -> None:
    """A file may keep the tasks of all SMs and the stages of a few."""
    trace = example_trace(4, stages=True).with_stages_of([1, 3])
    assert trace.stages is not None
    assert (1, 3) == trace.stages.sms
    assert {1, 3} == set(trace.stages.sm.tolist())
    assert 4 == trace.n_sm
    assert "mean of 2 SMs" in describe_ring(trace)
    assert (1,) == (example_trace(4, stages=True).only(range(1, 2)).stages or trace.stages).sms


def test_a_curve_without_changes_is_zero() -> None:
    """An SM without stages."""
    curve = occupancy(made(TWO), 5)
    assert ([0], [0]) == (curve.times.tolist(), curve.values.tolist())
    assert 0.0 == curve.mean(10, 20)
    assert 3.0 == Curve(np.array([0]), np.array([3])).mean(5, 6)
