"""Which rings of a trace a picture shows, over which stretch of time, as means of small cells.

The whole machine has thousands of stages a step; a page holds a few SMs and some microseconds, and
`RingView.scope` says which.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from mkref.errors import RequestError
from mkref.trace.events import BEGIN, READY, Trace
from mkref.trace.stages import Stages, bytes_in_flight, occupancy
from mkref.trace.summary import format_ns, n_sms

__all__ = ["RingView", "ring_view"]

MAX_LANES = 6
MAX_STAGES = 150
"""Stages of one SM that a picture can tell apart."""
CELLS = 270


@dataclass(frozen=True)
class RingView:
    """The rings of some SMs between two times.

    Attributes:
        trace: the whole trace; it has stages.
        sms: the SMs shown, ascending.
        begin, end: ns since the start of the trace.
    """

    trace: Trace
    sms: tuple[int, ...]
    begin: int
    end: int

    @property
    def stages(self) -> Stages:
        """The stages of the trace."""
        assert self.trace.stages is not None
        return self.trace.stages

    @property
    def edges(self) -> np.ndarray:
        """float64 [n + 1], edges of the cells in ns."""
        return np.linspace(self.begin, self.end, min(CELLS, self.end - self.begin) + 1)

    def held(self, sm: int) -> np.ndarray:
        """float64 [n], mean number of stages that a ring holds, cell by cell."""
        return occupancy(self.stages, sm).means(self.edges)

    def in_flight(self, sm: int) -> np.ndarray:
        """float64 [n], those of them whose bytes are not known to have landed."""
        return bytes_in_flight(self.stages, sm).means(self.edges) / self.stages.ring.stage_bytes

    def in_flight_of_all(self) -> np.ndarray:
        """float64 [n], bytes in flight of all SMs of the trace that have stages, at most."""
        return bytes_in_flight(self.stages).means(self.edges)

    def waits(self, sm: int) -> list[tuple[int, int]]:
        """When the consumers of an SM waited for inputs, begin and end, as far as shown."""
        trace = self.trace
        tasks = trace.tasks_of(sm)
        times = trace.times[tasks[trace.complete[tasks] & ~trace.beside[tasks]]]
        shown = (times[:, READY] > self.begin) & (times[:, BEGIN] < self.end)
        return [(int(begin), int(ready)) for begin, ready in times[shown, : READY + 1]]

    @property
    def scope(self) -> str:
        """What is shown, in words."""
        return (
            f"Shown: {len(self.sms)} of {n_sms(self.trace.n_sm)}, {format_ns(self.begin)} to "
            f"{format_ns(self.end)} of {format_ns(self.trace.span_ns)}."
        )


def ring_view(
    trace: Trace, *, sms: Sequence[int] | None = None, window: tuple[int, int] | None = None
) -> RingView:
    """Choose what to show.

    Args:
        trace: with stages.
        sms: SMs to show; None: six, spread over those that have stages.
        window: begin and end in ns; None: from when on all stages are there, as long as gives
            about 150 stages an SM.

    Raises:
        RequestError: a trace without stages, an SM without them, or a window that is empty or
            begins before the stages do.
    """
    stages = trace.stages
    if stages is None or not stages.sms or not trace.span_ns:
        raise RequestError(
            "ring: the trace has no stages; record one with a kernel that stamps them"
        )
    if sms is None:
        step = max(len(stages.sms) / MAX_LANES, 1)
        sms = [stages.sms[int(i * step)] for i in range(min(len(stages.sms), MAX_LANES))]
    if not sms or not set(sms) <= set(stages.sms):
        raise RequestError(f"ring: SMs {list(sms)} of a trace with stages of {list(stages.sms)}")
    if window is None:
        issued = np.sort(stages.times[np.isin(stages.sm, sms), 0])
        issued = issued[issued >= stages.begin]
        n_shown = MAX_STAGES * len(sms)
        end = int(issued[n_shown]) if len(issued) > n_shown else trace.span_ns
        window = (stages.begin, max(end, stages.begin + 1))
    if not stages.begin <= window[0] < window[1]:
        raise RequestError(
            f"ring: window {window}; give begin < end in ns, from {stages.begin} on, where the "
            "record of the stages begins"
        )
    return RingView(trace, tuple(sorted(sms)), *window)
