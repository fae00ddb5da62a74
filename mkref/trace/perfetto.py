"""Traces for Perfetto: the Chrome JSON format that https://ui.perfetto.dev opens.

One process is the machine, two threads are one SM: its consumers, whose slices are tasks (the wait
for inputs nests inside), and its loader, whose slices end when all copies of a task are issued.
Perfetto only opens what is given to it; nothing is sent anywhere by writing the file.

Source: "Trace Event Format" (Google, 2016): complete events "X", times in microseconds; slices of
one thread nest or are apart.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from mkref.errors import MkrefError
from mkref.trace.events import ABSENT, Event, Trace
from mkref.trace.summary import n_sms

__all__ = ["STREAMING", "chrome_trace", "write_perfetto"]

PID = 1
STREAMING = frozenset({"ROUTER", "QKV", "ATTENTION", "GATE_UP", "O_PROJ", "DOWN", "HEAD"})
"""Operations for which the loader copies something."""


def chrome_trace(trace: Trace) -> dict[str, Any]:
    """The JSON object of a trace.

    Returns:
        "traceEvents", "displayTimeUnit", and the provenance under "otherData".
    """
    machine = trace.where or "machine"
    events = [_name("process_name", 0, f"{machine}: {n_sms(trace.n_sm)}")]
    for sm in range(trace.n_sm):
        for tid, who in ((2 * sm, "consumers"), (2 * sm + 1, "loader")):
            events.append(_name("thread_name", tid, f"SM {sm} {who}"))
            events.append(_sorted_at(tid))
    loaded_until = [0] * trace.n_sm
    for event in trace:
        args = _args(event)
        tid = 2 * event.sm
        events.append(_slice(event.op, "task", tid, event.begin, event.end, args))
        if event.wait and event.wait_ns > 0:
            waits = {"counter": event.wait}
            events.append(_slice("wait", "wait", tid, event.begin, event.ready, waits))
        if event.issued != ABSENT:
            if event.op in STREAMING:
                begin = loaded_until[event.sm]
                events.append(_slice(event.op, "load", tid + 1, begin, event.issued, args))
            loaded_until[event.sm] = event.issued
    return {"traceEvents": events, "displayTimeUnit": "ns", "otherData": trace.provenance}


def write_perfetto(trace: Trace, path: str | Path) -> Path:
    """Write the Chrome JSON of a trace.

    Returns:
        The path that was written; drag the file onto https://ui.perfetto.dev to see it.

    Raises:
        MkrefError: the file cannot be written.
    """
    path = Path(path)
    try:
        path.write_text(json.dumps(chrome_trace(trace), separators=(",", ":")) + "\n")
    except OSError as error:
        raise MkrefError(f"perfetto: cannot write {path}: {error.strerror or error}") from error
    return path


def _args(event: Event) -> dict[str, Any]:
    return {
        "layer": event.layer,
        "first": event.first,
        "count": event.count,
        "wait": event.wait,
        "signal": event.signal,
        "wait_ns": event.wait_ns,
        "work_ns": event.work_ns,
    }


def _slice(
    name: str, category: str, tid: int, begin: int, end: int, args: dict[str, Any]
) -> dict[str, Any]:
    return {
        "name": name,
        "cat": category,
        "ph": "X",
        "pid": PID,
        "tid": tid,
        "ts": begin / 1_000,  # microseconds
        "dur": (end - begin) / 1_000,
        "args": args,
    }


def _name(kind: str, tid: int, name: str) -> dict[str, Any]:
    return {"name": kind, "ph": "M", "pid": PID, "tid": tid, "args": {"name": name}}


def _sorted_at(tid: int) -> dict[str, Any]:
    return {
        "name": "thread_sort_index", "ph": "M", "pid": PID, "tid": tid, "args": {"sort_index": tid},
    }  # fmt: skip
