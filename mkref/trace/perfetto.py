"""Traces for Perfetto: the Chrome JSON format that https://ui.perfetto.dev opens.

One process is the machine, three threads are one SM: its consumers, whose slices are tasks (the
wait for inputs nests inside), its helper, if it ran tasks beside them, and its loader, whose slices
end when all copies of a task are issued. If the ring was stamped, counters show the stages that it
holds and the bytes in flight. Perfetto only opens what is given to it; nothing is sent anywhere by
writing the file.

Source: "Trace Event Format" (Google, 2016): complete events "X", counters "C", times in
microseconds; slices of one thread nest or are apart.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from mkref.errors import MkrefError
from mkref.trace.stages import ABSENT, bytes_in_flight, occupancy
from mkref.trace.summary import n_sms

if TYPE_CHECKING:
    from mkref.trace.events import Event, Trace
    from mkref.trace.stages import Curve

__all__ = ["STREAMING", "chrome_trace", "write_perfetto"]

PID = 1
LANES = ("consumers", "helper", "loader")
CONSUMERS, HELPER, LOADER = range(3)
COUNTER_SMS = 16
"""Most SMs with counters of their own; there is one for all together besides."""
COUNTER_POINTS = 4096
"""Most points of a counter; of a longer curve it shows means."""
STREAMING = frozenset({"ROUTER", "QKV", "ATTENTION", "GATE_UP", "O_PROJ", "DOWN", "HEAD"})
"""Operations for which the loader copies something."""


def chrome_trace(trace: Trace) -> dict[str, Any]:
    """The JSON object of a trace.

    Returns:
        "traceEvents", "displayTimeUnit", and the provenance under "otherData".
    """
    machine = trace.where or "machine"
    events = [_name("process_name", 0, f"{machine}: {n_sms(trace.n_sm)}")]
    lanes = (CONSUMERS, HELPER, LOADER) if trace.beside.any() else (CONSUMERS, LOADER)
    for sm in range(trace.n_sm):
        for lane in lanes:
            tid = _thread(sm, lane)
            events.append(_name("thread_name", tid, f"SM {sm} {LANES[lane]}"))
            events.append(_sorted_at(tid))
    loaded_until = [0] * trace.n_sm
    for event in trace:
        args = _args(event)
        tid = _thread(event.sm, HELPER if event.beside else CONSUMERS)
        events.append(_slice(event.op, "task", tid, event.begin, event.end, args))
        if event.wait and event.wait_ns > 0:
            waits = {"counter": event.wait}
            events.append(_slice("wait", "wait", tid, event.begin, event.ready, waits))
        if event.issued != ABSENT and not event.beside:
            if event.op in STREAMING:
                begin, thread = loaded_until[event.sm], _thread(event.sm, LOADER)
                events.append(_slice(event.op, "load", thread, begin, event.issued, args))
            loaded_until[event.sm] = event.issued
    events.extend(_counters(trace))
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


def _thread(sm: int, lane: int) -> int:
    return sm * len(LANES) + lane


def _counters(trace: Trace) -> Iterator[dict[str, Any]]:
    """Ring and memory of all SMs together, and the rings of some SMs."""
    stages = trace.stages
    if stages is None:
        return
    for name, unit, curve in (
        ("bytes in flight, all SMs", "bytes", bytes_in_flight(stages)),
        ("ring stages held, all SMs", "stages", occupancy(stages)),
    ):
        yield from _counter(name, unit, curve, stages.begin, trace.span_ns)
    step = max(len(stages.sms) / COUNTER_SMS, 1)
    for sm in (stages.sms[int(i * step)] for i in range(min(len(stages.sms), COUNTER_SMS))):
        since = int(stages.since[sm])
        name, curve = f"SM {sm} ring stages held", occupancy(stages, sm)
        yield from _counter(name, "stages", curve, since, trace.span_ns)


def _counter(name: str, unit: str, curve: Curve, begin: int, end: int) -> Iterator[dict[str, Any]]:
    inside = (curve.times > begin) & (curve.times < end)
    if begin >= end:
        return
    if inside.sum() < COUNTER_POINTS:
        times = np.concatenate([[begin], curve.times[inside]])
        values = curve.at(times)
    else:
        edges = np.linspace(begin, end, COUNTER_POINTS + 1)
        times, values = edges[:-1], curve.means(edges)
    for time, value in zip(times.tolist(), values.tolist(), strict=True):
        shown = round(value, 2)
        yield {
            "name": name, "cat": "ring", "ph": "C", "pid": PID, "tid": 0,
            "ts": time / 1_000, "args": {unit: shown},
        }  # fmt: skip


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
