"""Who waits for whom in a trace, the critical path in the picture, two runs in one picture."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from mkref.errors import MkrefError, RequestError
from mkref.plan.task import Op
from mkref.trace.events import COLUMNS, END, READY, Trace
from mkref.trace.path import critical_path
from mkref.trace.storage import load_trace
from mkref.widgets import sm_timeline
from mkref.widgets.timeline.compare import counterparts, describe_pair, pair
from mkref.widgets.timeline.edges import NOBODY, Edges, describe_edges
from mkref.widgets.timeline.export import chrome_of_runs, write_runs
from mkref.widgets.timeline.model import timeline
from mkref.widgets.timeline.render import figure, figure_of_pair, pair_table, path_table
from mkref.widgets.timeline.widget import FIELDS, pack
from tests.example_traces import example_trace, played, small_plan
from tests.tree import ROOT

TRACE, OTHER = example_trace(4), example_trace(4, seed=3)
RECORDED = load_trace(ROOT / "notebooks" / "data" / "trace_north_h200.json.gz")


def find(trace: Trace, op: str, layer: int, sm: int) -> int:
    """Number of the first such task."""
    return next(i for i, e in enumerate(trace) if (e.op, e.layer, e.sm) == (op, layer, sm))


@pytest.mark.parametrize("trace", [TRACE, OTHER, RECORDED], ids=["small", "other", "recorded"])
def test_causes_make_up_the_critical_path(trace: Trace) -> None:
    """Followed from the task that ended last, they are the path of `mkref.trace.path`."""
    cause = Edges(trace).cause
    task = int(np.where(trace.complete, trace.times[:, END], -1).argmax())
    found = []
    while task != NOBODY:
        found.append(task)
        task = int(cause[task])
    assert [link.task for link in critical_path(trace)] == found[::-1]


def by_hand(*tasks: tuple[int, str, int, int, int, int]) -> Trace:
    """A trace of tasks (SM, operation, wait, signal, ready, end), all of layer 0."""
    ops = ("ROUTER", "QKV", "GATE_UP")
    sm, op, wait, signal, ready, end = zip(*tasks, strict=True)
    values = (sm, [ops.index(name) for name in op], [0] * len(sm), sm, sm, wait, signal)
    columns = {name: np.array(v, np.int32) for name, v in zip(COLUMNS, values, strict=True)}
    return Trace(ops, ("a", "b"), columns, np.array([ready, ready, end, ready]).T)


def test_router_holds_up_experts() -> None:
    """Who ends last of counter, router and turn is the cause; experts alone need the router."""
    trace = by_hand(
        (0, "QKV", -1, 0, 0, 40), (0, "ROUTER", -1, 1, 40, 100),
        (1, "QKV", -1, 0, 0, 50), (1, "GATE_UP", 0, -1, 101, 150),
        (2, "QKV", 0, -1, 60, 70), (2, "GATE_UP", 0, -1, 110, 120), (2, "QKV", 0, -1, 130, 140),
    )  # fmt: skip
    assert [NOBODY, 0, NOBODY, 1, 2, 1, 5] == Edges(trace).cause.tolist()
    assert [3, 5] == sorted(Edges(trace).needed_by(1))
    assert [0, 2, 1] == Edges(trace).waits_for(3)


def test_turn_comes_before_others_of_the_same_time() -> None:
    """Of two that end at once the one before it in its list is the cause."""
    trace = by_hand(
        (0, "QKV", -1, 0, 0, 100), (1, "QKV", -1, 0, 0, 100), (1, "QKV", 0, -1, 120, 130)
    )
    assert [NOBODY, NOBODY, 1] == Edges(trace).cause.tolist()


@pytest.mark.parametrize("task", range(TRACE.n_tasks))
def test_edges_are_those_of_the_plan(task: int) -> None:
    """Every task that signals the counter that a plan's task waits for; the router of its experts;
    and the same the other way round.
    """
    tasks = [(sm, t) for sm, _, t in small_plan(4)]
    mine = tasks[task][1]
    edges = Edges(TRACE)
    expected = {
        i for i, (_, t) in enumerate(tasks)
        if mine.wait == t.signal >= 0 or (mine.route_wait == t.signal >= 0 and t.op == Op.ROUTER)
    }  # fmt: skip
    waiting = {
        i for i, (_, t) in enumerate(tasks)
        if t.wait == mine.signal >= 0 or (mine.op == Op.ROUTER and t.route_wait == mine.signal >= 0)
    }  # fmt: skip
    assert expected == set(edges.waits_for(task))
    assert waiting == set(edges.needed_by(task))
    ends = TRACE.times[edges.waits_for(task), END]
    starts = TRACE.times[edges.needed_by(task), READY]
    assert (np.diff(ends) >= 0).all()
    assert (np.diff(starts) >= 0).all()


def test_words_name_the_last_and_the_first() -> None:
    """Counts by operation, who came last, who held it up, who was first to start."""
    edges, task = Edges(TRACE), find(TRACE, "ATTENTION", 1, 2)
    last, first = edges.waits_for(task)[-1], edges.needed_by(task)[0]
    said = describe_edges(edges, task)
    assert "It waited for 4 QKV; the last was QKV on SM " in said
    assert f"the last was QKV on SM {TRACE.event(last).sm}, at " in said
    assert (
        f"Waiting for it: 4 MERGE; the first to start was MERGE on SM {TRACE.event(first).sm}"
        in said
    )
    embed = describe_edges(edges, 0)
    assert embed.startswith("It waited for no other task. Nothing held it up. Waiting for it: ")
    sample = find(TRACE, "SAMPLE", 3, 0)
    assert describe_edges(edges, sample).endswith("No other SM waits for it.")
    turn = find(TRACE, "O_PROJ", 0, 0) + 1
    assert NOBODY != edges.before[turn]


def test_tasks_without_stamps_have_no_edges() -> None:
    """What was not stamped neither waits nor is waited for."""
    plan = small_plan(2)
    stamps = played(plan)
    stamps[3] = 0
    edges = Edges(Trace.from_plan(plan, stamps))
    assert NOBODY == edges.cause[3]
    assert all(3 not in edges.waits_for(task) for task in range(plan.n_tasks))
    assert all(3 not in edges.needed_by(task) for task in range(plan.n_tasks))


def test_selected_task_is_in_the_middle_of_its_edges() -> None:
    """The view shows its SM, what held it up and who waits first, and tells of them."""
    task = find(RECORDED, "ATTENTION", 3, 50)
    view = timeline(RECORDED, selected=task)
    cause, first = int(view.edges.cause[task]), view.edges.needed_by(task)[0]
    assert {50, RECORDED.event(cause).sm, RECORDED.event(first).sm} <= set(view.sms)
    assert view.begin <= RECORDED.event(cause).end <= RECORDED.event(first).ready <= view.end
    assert view.end - view.begin < RECORDED.span_ns / 50
    made = figure(view)
    assert "Selected: ATTENTION of layer 3 on SM 50. It waited for 132 QKV" in made.summary
    assert made.svg.count('stroke-dasharray="4 3"') >= 5
    with pytest.raises(RequestError, match="selected task 99999999"):
        timeline(RECORDED, selected=99999999)


def test_critical_path_stands_out() -> None:
    """Its tasks keep their colour and get a frame, the others fade; its SMs are shown."""
    view = timeline(TRACE, path=True)
    svg = figure(view).svg
    frames = re.findall(r'fill="none" stroke="#1a1a1a" stroke-width="2"', svg)
    assert len(view.edges.path) == len(frames)
    faded = re.findall(r'<path d="([^"]*)"[^>]*opacity="0.3"', svg)
    assert TRACE.n_tasks - len(view.edges.path) == sum(path.count("M") for path in faded)
    large = timeline(RECORDED, path=True)
    on_path = {RECORDED.event(k.task).sm for k in large.edges.path
               if RECORDED.event(k.task).ready < large.end}  # fmt: skip
    assert on_path <= set(large.sms)
    left = next(k.task for k in large.edges.path if RECORDED.event(k.task).sm not in large.sms)
    assert (0, RECORDED.event(left).ready) == (large.begin, large.end)
    sms = {RECORDED.event(k.task).sm for k in large.edges.path}
    said = f"Critical path: {len(large.edges.path)} tasks on {len(sms)} SMs"
    assert said in figure(large).summary
    assert len(figure(large).svg) < 150_000


def test_path_table_adds_up() -> None:
    """Work and hand-overs are the whole step."""
    rows = path_table(Edges(TRACE)).rows
    assert {"work", "hand-over"} == {row[1] for row in rows}
    assert 100 == pytest.approx(sum(float(row[4].rstrip("%")) for row in rows), abs=1)


def test_counterparts_are_the_same_tasks() -> None:
    """Of one plan each finds itself; a task that the other run lacks has none; names decide."""
    assert list(range(TRACE.n_tasks)) == counterparts(TRACE, OTHER).tolist()
    fewer = counterparts(TRACE, example_trace(3))
    assert (fewer[TRACE.columns["sm"] == 3] == NOBODY).all()
    ops = tuple(reversed(OTHER.ops))
    columns = OTHER.columns | {"op": len(ops) - 1 - OTHER.columns["op"]}
    renumbered = replace(OTHER, ops=ops, columns=columns)
    assert list(range(TRACE.n_tasks)) == counterparts(TRACE, renumbered).tolist()


def test_pair_shows_the_same_part_of_both() -> None:
    """Two rows per SM, A over B; the longer run sets the axis; equal twice."""
    both = pair(TRACE, OTHER)
    made = figure_of_pair(both, ("one", ""))
    labels = [f"SM {sm} {letter}" for sm in range(4) for letter in "AB"]
    assert labels == re.findall(r">(SM \d [AB])<", made.svg)
    assert max(TRACE.span_ns, OTHER.span_ns) == both.a.end == both.b.end
    assert made == figure_of_pair(pair(example_trace(4), example_trace(4, seed=3)), ("one", ""))
    assert made.summary.startswith("A, one [simulated]: 78.1 us, the SMs wait ")
    assert "B, example [simulated]: 73.7 us (-5.6%)" in made.summary
    same = figure_of_pair(pair(TRACE, TRACE))
    assert 8 == len(re.findall(r">(SM \d [AB])<", same.svg))
    assert "differs most" not in same.summary
    with pytest.raises(RequestError, match="SM 3 of runs on 4 and 3 SMs"):
        pair(TRACE, example_trace(3), sms=[3])
    assert (0, 1, 2) == pair(TRACE, example_trace(3)).a.sms


def test_pair_table_compares() -> None:
    """A row per operation and one for the step, with signed changes."""
    rows = {row[0]: row for row in pair_table(TRACE, OTHER).rows}
    assert ("78.1 us", "73.7 us", "-5.6%") == rows["whole step"][1:4]
    assert {*TRACE.ops} == rows.keys() - {"whole step"}
    assert all(re.fullmatch(r"[+-]\d+\.\d%|-", row[3]) for row in rows.values())
    assert "HEAD differs most: -" in describe_pair(TRACE, OTHER)


def test_selected_task_is_shown_in_both() -> None:
    """Its counterpart is selected in the other run."""
    both = pair(TRACE, OTHER, selected=20)
    assert (20, 20) == (both.a.selected, both.b.selected)
    assert both.a.begin == both.b.begin
    assert 2 == figure_of_pair(both).summary.count("Selected: ")


def test_pack_numbers_both_runs() -> None:
    """Twins point at each other, causes stay in their run, tasks count on."""
    packed, _ = pack(TRACE, OTHER)
    columns = dict(zip(FIELDS, packed.T, strict=True))
    n = TRACE.n_tasks
    assert [*range(n, 2 * n), *range(n)] == columns["twin"].tolist()
    assert list(range(2 * n)) == columns["task"].tolist()
    causes = columns["cause"]
    assert (columns["run"][causes[causes >= 0]] == columns["run"][causes >= 0]).all()
    assert (Edges(OTHER).cause + n == causes[n:])[causes[n:] >= 0].all()


def test_pack_leaves_out_what_was_not_stamped() -> None:
    """Causes and twins are rows of the array, tasks the numbers that Python knows."""
    plan = small_plan(4)
    stamps = played(plan)
    stamps[3] = 0
    holed = Trace.from_plan(plan, stamps)
    packed, _ = pack(TRACE, holed)
    columns = dict(zip(FIELDS, packed.T, strict=True))
    n = plan.n_tasks
    assert 2 * n - 1 == len(packed)
    assert NOBODY == columns["twin"][3]
    assert n + 4 == columns["task"][n + 3]
    assert n + 3 == columns["twin"][4]
    for row in np.flatnonzero(columns["twin"] >= 0):
        twin = columns["twin"][row]
        assert row == columns["twin"][twin]


def test_widget_starts_as_it_is_told() -> None:
    """Selection and path are traits; the static form shows the same."""
    widget = sm_timeline(TRACE, selected=20, path=True)
    assert (20, True) == (widget.selected, widget.path)
    assert figure(timeline(TRACE, selected=20, path=True)).text() == repr(widget)
    both = sm_timeline(TRACE, OTHER, title="one", other_title="two")
    assert figure_of_pair(pair(TRACE, OTHER), ("one", "two")) == both.figure
    meta = json.loads(json.dumps(both.meta))
    assert ["A", "B"] == [run["letter"] for run in meta["runs"]]
    assert [link.task for link in Edges(TRACE).path] == meta["runs"][0]["path"]
    assert [n + TRACE.n_tasks for n in (link.task for link in Edges(OTHER).path)] == (
        meta["runs"][1]["path"]
    )


def test_perfetto_has_a_process_per_run(tmp_path: Path) -> None:
    """The critical path is a track whose slices follow one another; arrows leave and arrive."""
    events = chrome_of_runs([TRACE, OTHER])["traceEvents"]
    for pid, trace in enumerate((TRACE, OTHER), 1):
        own = [event for event in events if event["pid"] == pid]
        assert trace.n_tasks == sum(event.get("cat") == "task" for event in own)
        path = [event for event in own if event.get("cat") == "path" and event["ph"] == "X"]
        assert len(critical_path(trace)) == len(path)
        assert path[-1]["ts"] + path[-1]["dur"] == pytest.approx(trace.span_ns / 1000)
        arrows = [[e for e in own if e["ph"] == phase] for phase in "sf"]
        assert sorted(e["id"] for e in arrows[0]) == sorted(e["id"] for e in arrows[1])
        tasks = [e for e in own if e.get("cat") == "task"]
        for arrow in [*arrows[0], *arrows[1]]:
            assert any(
                t["tid"] == arrow["tid"] and t["ts"] <= arrow["ts"] <= t["ts"] + t["dur"]
                for t in tasks
            )
    written = write_runs([TRACE], tmp_path / "one.json")
    assert written == sm_timeline(TRACE).write_perfetto(tmp_path / "one.json")
    assert chrome_of_runs([TRACE]) == json.loads(written.read_text())
    with pytest.raises(MkrefError, match="cannot write"):
        write_runs([TRACE], tmp_path / "no" / "folder.json")
