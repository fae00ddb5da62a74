"""The critical path of a step: what each task on it was bound by."""

from __future__ import annotations

import numpy as np
import pytest

from mkref.plan.task import NO_COUNTER, Op
from mkref.trace.events import COLUMNS, END, READY, Trace
from mkref.trace.path import Link, critical_path, describe_path, path_report, totals
from mkref.trace.storage import load_trace
from tests.example_traces import example_trace
from tests.tree import ROOT


def trace_of(*tasks: tuple[int, str, int, int, tuple[int, int, int]]) -> Trace:
    """A trace of tasks (SM, operation, counter it waits for, one it signals, times)."""
    ops = tuple(op.name for op in sorted(Op))
    columns = {name: np.zeros(len(tasks), np.int32) for name in COLUMNS}
    for i, (sm, op, wait, signal, _) in enumerate(tasks):
        columns["sm"][i], columns["op"][i] = sm, ops.index(op)
        columns["wait"][i], columns["signal"][i] = wait, signal
    times = np.array([[*times, times[2]] for *_, times in tasks], np.int64)
    return Trace(ops, ("a", "b", "c"), columns, times)


NO = NO_COUNTER
TRACE = trace_of(
    (0, "EMBED", NO, 0, (0, 5, 50)),
    (0, "QKV", 0, 1, (52, 95, 130)),  # waits for SM 1
    (0, "ATTENTION", 1, 2, (131, 135, 300)),  # its inputs were there: bound by its turn
    (1, "EMBED", NO, 0, (0, 5, 90)),
    (1, "QKV", 0, 1, (91, 96, 120)),
    (1, "ATTENTION", 1, 2, (121, 138, 200)),
    (1, "SAMPLE", 2, NO, (201, 310, 350)),
)


def test_path_goes_to_what_came_last() -> None:
    """From the last end back: another SM's signal, the task before, another SM's again."""
    assert [
        Link(3, -1, "", 5, 85),
        Link(1, 3, "from another SM", 5, 35),
        Link(2, 1, "in turn", 5, 165),
        Link(6, 2, "from another SM", 10, 40),
    ] == critical_path(TRACE)


def test_totals_add_up_to_the_step() -> None:
    """Per operation and per pair of operations, largest first."""
    work, waits = totals(TRACE, critical_path(TRACE))
    named = {row.name: (row.n, row.ns) for row in (*work, *waits)}
    assert 350 == sum(ns for _, ns in named.values())
    assert (1, 165) == named["ATTENTION"]
    assert (1, 10) == named["ATTENTION -> SAMPLE from another SM"]
    assert (1, 5) == named["start -> EMBED"]
    assert ["ATTENTION", "EMBED", "SAMPLE", "QKV"] == [row.name for row in work]


def test_a_merge_beside_is_no_turn() -> None:
    """It waits for its counter and for the merge before, never for the consumers of its SM; and
    who waits for a merge of the own SM waits for it as for another's."""
    trace = trace_of(
        (0, "ATTENTION", NO, 0, (0, 5, 50)),
        (0, "GATE_UP", NO, NO, (51, 55, 100)),
        (0, "MERGE", 0, 1, (0, 60, 140)),
        (0, "O_PROJ", 1, NO, (101, 150, 180)),
    )
    assert trace.beside.tolist() == [False, False, True, False]
    found = [(link.task, link.how, link.wait_ns) for link in critical_path(trace)]
    assert [(0, "", 5), (2, "from beside", 10), (3, "from beside", 10)] == found


def test_experts_come_from_the_router() -> None:
    """GATE_UP waits for no counter of the router's, but its loader does."""
    trace = trace_of(
        (0, "QKV", NO, 0, (0, 5, 50)),
        (0, "GATE_UP", NO, NO, (51, 120, 200)),
        (1, "ROUTER", NO, 1, (0, 5, 110)),
    )
    assert [2, 1] == [link.task for link in critical_path(trace)]


@pytest.mark.parametrize("early", [0, 40])
def test_a_stamp_that_comes_late_costs_nothing(early: int) -> None:
    """A consumer may start a moment before its producer's last stamp: no time counts twice."""
    trace = trace_of(
        (0, "EMBED", NO, 0, (0, 5, 100)),
        (1, "QKV", 0, 1, (0, 100 - early, 150)),
    )
    links = critical_path(trace)
    assert 150 == sum(link.wait_ns + link.work_ns for link in links)
    assert min(link.wait_ns for link in links) >= 0


@pytest.mark.parametrize("seed", range(3))
def test_every_link_is_a_dependency(seed: int) -> None:
    """On a played step: the sum is its time, each cause is one that the task needs, and no task
    that it needs ended later."""
    trace = example_trace(4, seed)
    path = critical_path(trace)
    assert trace.span_ns == sum(link.wait_ns + link.work_ns for link in path)
    assert [link.task for link in path[:-1]] == [link.cause for link in path[1:]]
    column = trace.columns
    for link in path[1:]:
        signals = column["signal"][link.cause] == column["wait"][link.task]
        same = column["sm"][link.cause] == column["sm"][link.task]
        assert signals or (same and link.cause < link.task)
        needed = (column["signal"] == column["wait"][link.task]) & (column["signal"] >= 0)
        assert trace.times[needed, END].max(initial=0) <= trace.times[link.cause, END]
        assert trace.times[link.cause, END] <= trace.times[link.task, READY]


def test_report_of_a_recorded_step() -> None:
    """The sentence, and a table of work and of hand-overs, with shares of the step."""
    trace = load_trace(ROOT / "notebooks" / "data" / "trace_north_h200.json.gz")
    text = path_report(trace)
    assert text.startswith(describe_path(trace))
    assert "hops between SMs" in text
    tables = text.split("\n\n")[1:]
    heads = [table.split("  ")[0] for table in tables]
    assert ["work on the path", "hand-overs on the path"] == heads
    shares = [float(line.split("%")[0].split()[-1]) for t in tables for line in t.splitlines()[1:]]
    assert 100 == pytest.approx(sum(shares), abs=1)


def test_no_stamps_no_path() -> None:
    """A trace in which nothing is complete says so."""
    trace = trace_of((0, "EMBED", NO, NO, (-1, -1, -1)))
    assert [] == critical_path(trace)
    assert "no task was stamped" in path_report(trace)
