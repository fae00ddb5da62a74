"""One or two runs for Perfetto, with their critical paths as a track of their own.

Each run is a process, so that both stand under one another on one axis of time.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mkref.errors import MkrefError
from mkref.trace.events import END, READY
from mkref.trace.perfetto import chrome_trace
from mkref.widgets.timeline.edges import NOBODY, Edges

if TYPE_CHECKING:
    from mkref.trace.events import Trace

__all__ = ["chrome_json", "chrome_of_runs", "write_runs"]

PATH_THREAD = 1_000_000
"""Thread number of the critical path: above those of all SMs."""


def chrome_of_runs(traces: Sequence[Trace]) -> dict[str, Any]:
    """The JSON object of Chrome's trace format.

    Args:
        traces: one run or several; process 1 is the first.
    """
    events: list[dict[str, Any]] = []
    for pid, trace in enumerate(traces, 1):
        own = chrome_trace(trace)["traceEvents"]
        events += [{**event, "pid": pid} for event in own]
        events += _path(Edges(trace), pid)
    about = {f"run {pid}": trace.provenance for pid, trace in enumerate(traces, 1)}
    return {"traceEvents": events, "displayTimeUnit": "ns", "otherData": about}


def _path(edges: Edges, pid: int) -> Iterator[dict[str, Any]]:
    """Its tasks one after another, and an arrow for each hop between SMs."""
    common = {"pid": pid, "tid": PATH_THREAD}
    yield {**common, "ph": "M", "name": "thread_name", "args": {"name": "critical path"}}
    yield {**common, "ph": "M", "name": "thread_sort_index", "args": {"sort_index": -1}}
    times, at = edges.trace.times, 0
    for link in edges.path:
        event = edges.trace.event(link.task)
        args = {"sm": event.sm, "layer": event.layer, "how": link.how, "wait_ns": link.wait_ns}
        at += link.wait_ns
        yield {
            **common, "ph": "X", "cat": "path", "name": event.op, "ts": at / 1_000,
            "dur": link.work_ns / 1_000, "args": args,
        }  # fmt: skip
        at += link.work_ns
        if link.cause == NOBODY or edges.trace.columns["sm"][link.cause] == event.sm:
            continue
        # An arrow hangs on slices: it leaves just before the end of one, enters where one works.
        arrow = {"cat": "path", "name": "waited for", "id": link.task + 1, "pid": pid}
        ended = max(int(times[link.cause, END]) - 1, int(times[link.cause, READY]))
        starts = (("s", link.cause, ended), ("f", link.task, int(times[link.task, READY])))
        for phase, task, ns in starts:
            tid = _thread(edges, task)
            bound = {"bp": "e"} if phase == "f" else {}
            yield {**arrow, "ph": phase, "tid": tid, "ts": ns / 1_000, **bound}


def _thread(edges: Edges, task: int) -> int:
    """The thread that `chrome_trace` gives a task's slice."""
    from mkref.trace.perfetto import CONSUMERS, HELPER, LANES

    sm = int(edges.trace.columns["sm"][task])
    return sm * len(LANES) + (HELPER if edges.trace.beside[task] else CONSUMERS)


def chrome_json(traces: Sequence[Trace]) -> bytes:
    """The same as the bytes of a file."""
    return json.dumps(chrome_of_runs(traces), separators=(",", ":")).encode() + b"\n"


def write_runs(traces: Sequence[Trace], path: str | Path) -> Path:
    """Write it; drag the file onto https://ui.perfetto.dev to see it.

    Raises:
        MkrefError: the file cannot be written.
    """
    path = Path(path)
    try:
        path.write_bytes(chrome_json(traces))
    except OSError as error:
        raise MkrefError(f"perfetto: cannot write {path}: {error.strerror or error}") from error
    return path
