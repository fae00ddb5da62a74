"""The Chrome JSON of a trace: what Perfetto needs to show it right."""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from pathlib import Path
from typing import Any

import pytest

from mkref.errors import MkrefError
from mkref.trace import perfetto
from mkref.trace.events import ISSUED
from mkref.trace.perfetto import STREAMING, chrome_trace, write_perfetto
from mkref.trace.stages import occupancy
from mkref.trace.storage import load_trace
from tests.example_traces import example_trace
from tests.tree import ROOT

TRACE = example_trace(3)


@pytest.fixture(scope="module")
def events() -> list[dict[str, Any]]:
    """All events, through JSON as a viewer reads them."""
    loaded: dict[str, Any] = json.loads(json.dumps(chrome_trace(TRACE)))
    found: list[dict[str, Any]] = loaded["traceEvents"]
    return found


def slices(events: list[dict[str, Any]], *categories: str) -> list[dict[str, Any]]:
    """Complete events of some categories."""
    return [e for e in events if e["ph"] == "X" and e["cat"] in categories]


def test_every_event_has_the_required_keys(events: list[dict[str, Any]]) -> None:
    """Name, phase, process and thread; slices also a start and a duration, neither negative."""
    for event in events:
        assert {"name", "ph", "pid", "tid", "args"} <= event.keys()
        if event["ph"] == "X":
            assert event["ts"] >= 0
            assert event["dur"] >= 0


def test_one_process_and_three_threads_per_sm(events: list[dict[str, Any]]) -> None:
    """Threads are named after SM and role and sorted by number."""
    names = {e["tid"]: e["args"]["name"] for e in events if e["name"] == "thread_name"}
    expected = {
        3 * sm + k: f"SM {sm} {('consumers', 'helper', 'loader')[k]}"
        for sm in range(3)
        for k in range(3)
    }
    assert expected == names
    assert {1} == {e["pid"] for e in events}
    order = {e["tid"]: e["args"]["sort_index"] for e in events if e["name"] == "thread_sort_index"}
    assert {tid: tid for tid in expected} == order


def test_every_task_is_one_slice(events: list[dict[str, Any]]) -> None:
    """Named after its operation, with layer, range and counter among its arguments."""
    tasks = slices(events, "task")
    assert [e.op for e in TRACE] == [e["name"] for e in tasks]
    assert [e.layer for e in TRACE] == [e["args"]["layer"] for e in tasks]
    assert [(e.first, e.count, e.wait) for e in TRACE] == [
        (e["args"]["first"], e["args"]["count"], e["args"]["wait"]) for e in tasks
    ]
    assert [e.begin / 1000 for e in TRACE] == [e["ts"] for e in tasks]


def test_slices_of_a_thread_nest(events: list[dict[str, Any]]) -> None:
    """Two slices of one thread are apart, or one holds the other: waits lie inside their task."""
    threads = defaultdict(list)
    for event in slices(events, "task", "wait", "load"):
        begin = round(event["ts"] * 1000)
        threads[event["tid"]].append((begin, -(begin + round(event["dur"] * 1000)), event["name"]))
    assert 9 == len(threads)
    for found in threads.values():
        open_until: list[int] = []
        for begin, minus_end, name in sorted(found):
            while open_until and open_until[-1] <= begin:
                open_until.pop()
            assert not open_until or -minus_end <= open_until[-1], name
            open_until.append(-minus_end)


def test_tasks_of_a_thread_are_in_order(events: list[dict[str, Any]]) -> None:
    """Each task begins after the one before it has ended."""
    ended: dict[int, float] = defaultdict(float)
    for event in slices(events, "task"):
        assert event["ts"] >= ended[event["tid"]]
        ended[event["tid"]] = event["ts"] + event["dur"]


def test_waits_name_their_counter(events: list[dict[str, Any]]) -> None:
    """There is a slice for every wait that took time, from begin to ready, and it says for what."""
    waited = [e for e in TRACE if e.wait and e.wait_ns > 0]
    waits = slices(events, "wait")
    assert [e.wait for e in waited] == [e["args"]["counter"] for e in waits]
    assert [e.begin / 1000 for e in waited] == [e["ts"] for e in waits]
    assert [e.wait_ns / 1000 for e in waited] == [e["dur"] for e in waits]


def test_loader_has_only_operations_that_stream(events: list[dict[str, Any]]) -> None:
    """One slice for each streaming task, from the issue of the task before to its own."""
    streamed = [e for e in TRACE if e.op in STREAMING]
    loads = slices(events, "load")
    before = []
    for e in streamed:
        turns = [i for i in TRACE.tasks_of(e.sm)[: e.index] if not TRACE.beside[i]]
        before.append(TRACE.times[turns[-1], ISSUED])
    assert [int(t) for t in before] == [round(e["ts"] * 1000) for e in loads]
    assert [e.op for e in streamed] == [e["name"] for e in loads]
    assert [e.issued for e in streamed] == [round((e["ts"] + e["dur"]) * 1000) for e in loads]


def test_tasks_beside_are_on_the_helper(events: list[dict[str, Any]]) -> None:
    """Every MERGE, and nothing else; without any there is no such thread."""
    on_helper = [e["name"] for e in slices(events, "task") if e["tid"] % 3 == 1]
    assert [e.op for e in TRACE if e.beside] == on_helper
    older = load_trace(ROOT / "notebooks" / "data" / "trace_nano_host.json.gz")
    threads = [e for e in chrome_trace(older)["traceEvents"] if e["name"] == "thread_name"]
    assert threads
    assert not [e for e in threads if "helper" in e["args"]["name"]]


def test_rings_are_counters() -> None:
    """One of bytes and one of stages for all, one of stages per SM; points are the curve's."""
    trace = example_trace(3, stages=True)
    assert trace.stages is not None
    counters = [e for e in chrome_trace(trace)["traceEvents"] if e["ph"] == "C"]
    names = ["bytes in flight, all SMs", "ring stages held, all SMs"]
    names += [f"SM {sm} ring stages held" for sm in range(3)]
    assert names == list(dict.fromkeys(e["name"] for e in counters))
    curve = occupancy(trace.stages, 1)
    points = {round(e["ts"] * 1000): e["args"]["stages"] for e in counters if e["name"] == names[3]}
    assert dict(zip(curve.times.tolist(), curve.values.tolist(), strict=True)) == points
    assert [] == [e for e in chrome_trace(TRACE)["traceEvents"] if e["ph"] == "C"]


def test_long_counters_are_thinned(monkeypatch: pytest.MonkeyPatch) -> None:
    """A curve of many points becomes a few means."""
    monkeypatch.setattr(perfetto, "COUNTER_POINTS", 10)
    trace = example_trace(3, stages=True)
    counters = [e for e in chrome_trace(trace)["traceEvents"] if e["ph"] == "C"]
    assert [10] * 5 == list(Counter(e["name"] for e in counters).values())
    assert all(0 <= e["args"]["stages"] <= 12 for e in counters if "held" in e["name"])


def test_file_is_json(tmp_path: Path) -> None:
    """The file holds the same object, with the provenance."""
    path = write_perfetto(TRACE, tmp_path / "t.json")
    loaded = json.loads(path.read_text())
    assert TRACE.provenance == loaded["otherData"]
    assert "ns" == loaded["displayTimeUnit"]


def test_unwritable_file_is_one_error(tmp_path: Path) -> None:
    """The message names the path."""
    with pytest.raises(MkrefError, match=r"cannot write .*nowhere"):
        write_perfetto(TRACE, tmp_path / "nowhere" / "t.json")
