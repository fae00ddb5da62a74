"""Pictures of lesson 03: three roles instead of one, and the tasks of one SM as recorded."""

from __future__ import annotations

from typing import TYPE_CHECKING

from mkref.lessons.lanes import IDLE, Look, Span, lanes_figure
from mkref.lessons.recorded import recorded_trace
from mkref.widgets.palette import style_of

if TYPE_CHECKING:
    from mkref.widgets.figure import Figure

__all__ = ["recorded_tasks", "roles_figure"]

FETCH, POLL, WORK, SIGNAL = 2.0, 3.0, 6.0, 2.5
LOOKS = {
    "fetch": Look("fetches a record", "#F0E442", "dots"),
    "poll": Look("polls a counter", "#CC79A7", "horizontal"),
    "work": Look("computes", "#56B4E9"),
    "signal": Look("fence and signal", "#E69F00", "vertical"),
    "idle": IDLE,
}


def roles_figure(n_tasks: int = 3) -> Figure:
    """The same tasks by eight warps that do everything, and by three roles side by side."""
    alone, at = [], 0.0
    for number in range(n_tasks):
        for kind, long in (("fetch", FETCH), ("poll", POLL), ("work", WORK), ("signal", SIGNAL)):
            alone.append(Span(at, at + long, kind, str(number)))
            at += long
    waiter, consumers, signaller = [], [], []
    ready = free = told = 0.0
    for number in range(n_tasks):
        waiter.append(Span(ready, ready + FETCH, "fetch", str(number)))
        waiter.append(Span(ready + FETCH, ready + FETCH + POLL, "poll", str(number)))
        ready += FETCH + POLL
        begin = max(ready, free)
        if begin > free:
            consumers.append(Span(free, begin, "idle"))
        free = begin + WORK
        consumers.append(Span(begin, free, "work", str(number)))
        signaller.append(Span(told, free, "idle"))
        told = free + SIGNAL
        signaller.append(Span(free, told, "signal", str(number)))
    lanes = [
        ("eight warps do everything", []),
        ("all", alone),
        ("three roles", []),
        ("waiter", waiter),
        ("consumers", consumers),
        ("signaller", signaller),
    ]
    sentence = (
        f"Scheme, not to scale: {n_tasks} tasks. Warps that do everything fetch, poll, compute and "
        "signal one after another; with three roles the consumers go from task to task, while the "
        "waiter is ahead of them and the signaller behind."
    )
    return lanes_figure("Who is in whose way", sentence, lanes, LOOKS)


def recorded_tasks(sm: int = 5, layer: int = 10) -> Figure:
    """What the consumers of one SM did in one layer of the recorded step, to scale."""
    trace = recorded_trace("trace_north_h200.json.gz")
    tasks = [
        event for event in trace if (event.sm, event.layer) == (sm, layer) and not event.beside
    ]
    start = min(task.begin for task in tasks)
    looks = {"idle": IDLE}
    lanes: list[tuple[str, list[Span]]] = []
    waited = worked = 0
    for task in tasks:
        style = style_of(task.op)
        looks.setdefault(task.op, Look(task.op, style.fill, style.pattern, style.ink))
        begin, ready, end = (time - start for time in (task.begin, task.ready, task.end))
        spans = [Span(begin, ready, "idle")] if ready > begin else []
        label = f"{(end - ready) / 1000:.1f} us"  # at the row: some bars are too narrow for it
        lanes.append((f"{task.op}, {label}", [*spans, Span(ready, end, task.op, label)]))
        waited, worked = waited + ready - begin, worked + end - ready
    sentence = (
        f"The consumers of SM {sm} in layer {layer}, {trace.where} [measured]: "
        f"{len(tasks)} tasks, {worked / 1000:.1f} us of work and {waited / 1000:.1f} us of waiting."
    )
    return lanes_figure(f"One layer on SM {sm}, with the time of work", sentence, lanes, looks)
