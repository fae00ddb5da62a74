"""Which part of a trace a picture shows: some SMs, some stretch of time, as bars.

A page holds some hundred bars, a step of the large model has tens of thousands of tasks; `timeline`
picks SMs spread over the machine and the beginning of the step, and says so in `scope`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from mkref.errors import RequestError
from mkref.trace.events import BEGIN, END, Event, Trace
from mkref.trace.summary import format_ns, n_sms

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
    """

    trace: Trace
    sms: tuple[int, ...]
    begin: int
    end: int

    def bars(self, sm: int) -> Iterator[Event]:
        """Tasks of one SM that overlap the time shown, in the order of its list."""
        tasks = self.trace.tasks_of(sm)
        times = self.trace.times[tasks]
        shown = self.trace.complete[tasks]
        shown = shown & (times[:, END] > self.begin) & (times[:, BEGIN] < self.end)
        return (self.trace.event(int(i)) for i in tasks[shown])

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
    trace: Trace, *, sms: Sequence[int] | None = None, window: tuple[int, int] | None = None
) -> Timeline:
    """Choose what to show.

    Args:
        trace: the trace.
        sms: SMs to show; None: all, or 16 spread over the machine.
        window: begin and end in ns; None: the whole step, or as much as gives about 600 bars.

    Raises:
        RequestError: an SM that the trace does not have, or an empty window.
    """
    n = trace.n_sm
    if sms is None:
        step = max(n / MAX_LANES, 1)
        sms = [int(i * step) for i in range(min(n, MAX_LANES))]
    if not sms or not all(0 <= sm < n for sm in sms):
        raise RequestError(f"timeline: SMs {list(sms)} of a trace with SMs 0 to {n - 1}")
    if window is None:
        shown = trace.complete & np.isin(trace.columns["sm"], np.array(sms))
        begins = np.sort(trace.times[shown & ~trace.beside, BEGIN])
        fits = len(begins) <= MAX_BARS
        window = (0, int(trace.times[shown, END].max(initial=1) if fits else begins[MAX_BARS]))
    if window[0] >= window[1]:
        raise RequestError(f"timeline: window {window} is empty; give begin < end in ns")
    return Timeline(trace, tuple(sorted(sms)), *window)
