"""Which part of a trace a picture shows: some SMs, some stretch of time, as bars.

A page holds some hundred bars, a step of the large model has tens of thousands of tasks; `timeline`
picks SMs spread over the machine and the beginning of the step, or the surroundings of one task, or
the SMs of the critical path, and says so in `scope`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from mkref.errors import RequestError
from mkref.trace.events import BEGIN, END, READY, Event, Trace
from mkref.trace.summary import format_ns, n_sms
from mkref.widgets.timeline.edges import NOBODY, Edges

__all__ = ["Timeline", "timeline"]

MAX_BARS = 600
MAX_LANES = 16


@dataclass(frozen=True)
class Timeline:
    """Some SMs of a trace between two times.

    Attributes:
        trace: the whole trace.
        sms: the SMs shown, ascending.
        begin, end: ns since the start of the trace.
        selected: a task whose dependencies are shown; `NOBODY` for none.
        path: whether the critical path stands out.
    """

    trace: Trace
    sms: tuple[int, ...]
    begin: int
    end: int
    selected: int = NOBODY
    path: bool = False

    @cached_property
    def edges(self) -> Edges:
        """Who waits for whom."""
        return Edges(self.trace)

    def tasks(self, sm: int) -> list[int]:
        """Numbers of the tasks of one SM that overlap the time shown, in the order of its list."""
        tasks = self.trace.tasks_of(sm)
        times = self.trace.times[tasks]
        shown = self.trace.complete[tasks]
        shown = shown & (times[:, END] > self.begin) & (times[:, BEGIN] < self.end)
        return [int(i) for i in tasks[shown]]

    def bars(self, sm: int) -> Iterator[Event]:
        """The same tasks with names and times."""
        return (self.trace.event(i) for i in self.tasks(sm))

    @property
    def is_whole(self) -> bool:
        """Does it show everything?"""
        return len(self.sms) == self.trace.n_sm and self.end - self.begin >= self.trace.span_ns

    @property
    def scope(self) -> str:
        """What is shown, in words."""
        if self.is_whole:
            return f"Shown: all {n_sms(self.trace.n_sm)}, the whole step."
        return (
            f"Shown: {len(self.sms)} of {n_sms(self.trace.n_sm)}, {format_ns(self.begin)} to "
            f"{format_ns(self.end)} of {format_ns(self.trace.span_ns)}."
        )


def timeline(
    trace: Trace,
    *,
    sms: Sequence[int] | None = None,
    window: tuple[int, int] | None = None,
    selected: int = NOBODY,
    path: bool = False,
    lanes: int = MAX_LANES,
) -> Timeline:
    """Choose what to show.

    Args:
        trace: the trace.
        sms: SMs to show; None: all, or as many as `lanes`: those that have to do with the selected
            task, those of the critical path, or some spread over the machine.
        window: begin and end in ns; None: around the selected task; as far as the critical path
            stays on the SMs shown; the whole step, or as much as gives about 600 bars.
        selected: number of a task whose dependencies are shown.
        path: show the critical path.
        lanes: most SMs that are chosen.

    Raises:
        RequestError: an SM or a task that the trace does not have, or an empty window.
    """
    n = trace.n_sm
    if selected != NOBODY and not (0 <= selected < trace.n_tasks and trace.complete[selected]):
        raise RequestError(
            f"timeline: selected task {selected} of a trace with {trace.n_tasks} tasks; "
            "give the number of one that was stamped"
        )
    edges = Edges(trace)
    if window is None and selected != NOBODY:
        window = _around(edges, selected)
    if sms is None:
        wanted = _related(edges, selected) if selected != NOBODY else []
        if path:
            wanted = [*wanted, *_on_path(edges, window)]
        step = max(n / lanes, 1)
        spread = [int(i * step) for i in range(min(n, lanes))]
        sms = [*dict.fromkeys([*wanted, *spread])][:lanes]
        if path and window is None and n > lanes:
            window = _while_on(edges, sms)
    if not sms or not all(0 <= sm < n for sm in sms):
        raise RequestError(f"timeline: SMs {list(sms)} of a trace with SMs 0 to {n - 1}")
    if window is None:
        shown = trace.complete & np.isin(trace.columns["sm"], np.array(sms))
        begins = np.sort(trace.times[shown & ~trace.beside, BEGIN])
        fits = len(begins) <= MAX_BARS
        window = (0, int(trace.times[shown, END].max(initial=1) if fits else begins[MAX_BARS]))
    if window[0] >= window[1]:
        raise RequestError(f"timeline: window {window} is empty; give begin < end in ns")
    return Timeline(trace, tuple(sorted(sms)), *window, selected, path)


def _sms_of(trace: Trace, tasks: Iterable[int]) -> list[int]:
    return [*dict.fromkeys(int(trace.columns["sm"][task]) for task in tasks)]


def _related(edges: Edges, task: int) -> list[int]:
    """SMs of a task, of what held it up, of the last it waited for, of the first that wait."""
    cause = int(edges.cause[task])
    close = [task] if cause == NOBODY else [task, cause]
    others = zip(edges.waits_for(task)[::-1], edges.needed_by(task), strict=False)
    return _sms_of(edges.trace, [*close, *(each for pair in others for each in pair)])


def _on_path(edges: Edges, window: tuple[int, int] | None) -> list[int]:
    """SMs of the critical path in the order of time, from the window's begin on."""
    since = 0 if window is None else window[0]
    times = edges.trace.times
    return _sms_of(edges.trace, (k.task for k in edges.path if times[k.task, END] > since))


def _while_on(edges: Edges, sms: Sequence[int]) -> tuple[int, int]:
    """From the start until the critical path goes to an SM that is not among these."""
    trace = edges.trace
    away = (k.task for k in edges.path if int(trace.columns["sm"][k.task]) not in sms)
    first = next(away, None)
    return (0, trace.span_ns if first is None else max(int(trace.times[first, READY]), 1))


def _around(edges: Edges, task: int) -> tuple[int, int]:
    """From what held a task up until those that wait for it have started, with some air."""
    times, cause = edges.trace.times, int(edges.cause[task])
    begin, end = int(times[task, BEGIN]), int(times[task, END])
    if cause != NOBODY:
        begin = min(begin, int(times[cause, READY]))
    for waiting in edges.needed_by(task)[:1]:
        end = max(end, int(times[waiting, END]))
    air = max((end - begin) // 8, 1)
    return max(begin - air, 0), end + air
