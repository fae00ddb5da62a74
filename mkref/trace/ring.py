"""What the rings of a trace add up to: how full they were, and how much the memory had to do.

While nothing is in flight for an SM, its share of the memory's bandwidth is lost. A ring that is
full then could not take more: the consumers are late. One that is not full had nothing to ask for:
the loader waited, for the experts of a layer or because it held back.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from mkref.trace.events import BEGIN, END, READY, Trace
from mkref.trace.stages import bytes_in_flight, occupancy
from mkref.trace.summary import n_sms

if TYPE_CHECKING:
    from mkref.trace.stages import Stages

__all__ = ["OpRing", "RingUse", "describe_ring", "kilobytes", "ring_by_op", "ring_use"]


@dataclass(frozen=True)
class RingUse:
    """Means over the SMs and the time that the record covers.

    Attributes:
        held: stages that a ring holds: issued and not released.
        full: share of the time, 0 to 1, that it holds as many as there are.
        empty: share of the time that it holds none.
        idle: share of the time that nothing is in flight for an SM.
        in_flight: bytes in flight for one SM, at most.
    """

    held: float
    full: float
    empty: float
    idle: float
    in_flight: float


@dataclass(frozen=True)
class OpRing:
    """Mean stages held and bytes in flight of an SM while it waits for an operation or does it."""

    op: str
    held_waiting: float
    in_flight_waiting: float
    held_working: float
    in_flight_working: float


def _window(trace: Trace, stages: Stages) -> tuple[int, int]:
    """What of the step is covered: nothing of it if the record begins after its end."""
    return min(stages.begin, trace.span_ns - 1), trace.span_ns


def ring_use(trace: Trace) -> RingUse | None:
    """How the rings were used; None if the trace has no stages."""
    stages = trace.stages
    if stages is None or not stages.sms or not trace.span_ns:
        return None
    begin, end = _window(trace, stages)
    parts = []
    for sm in stages.sms:
        held, flying = occupancy(stages, sm), bytes_in_flight(stages, sm)
        parts.append(
            (
                held.mean(begin, end),
                held.share_at(stages.ring.stages, begin, end),
                held.share_at(0, begin, end),
                flying.share_at(0, begin, end),
                flying.mean(begin, end),
            )
        )
    return RingUse(*(float(mean) for mean in np.mean(parts, axis=0)))


def ring_by_op(trace: Trace) -> list[OpRing]:
    """The rings during each operation of the consumers, in the order of the operations in a step.

    Returns:
        NaN where no time went by; nothing if the trace has no stages.
    """
    stages = trace.stages
    if stages is None:
        return []
    begin = stages.begin
    covered = trace.complete & ~trace.beside & (trace.times[:, BEGIN] >= begin)
    covered &= np.isin(trace.columns["sm"], stages.sms)
    sums = np.zeros((len(trace.ops), 2, 3))  # op; waiting, working; time, stages held, bytes
    for sm in stages.sms:
        tasks = np.flatnonzero(covered & (trace.columns["sm"] == sm))
        curves = (occupancy(stages, sm), bytes_in_flight(stages, sm))
        for part, (first, last) in enumerate(((BEGIN, READY), (READY, END))):
            a, b = trace.times[tasks, first], trace.times[tasks, last]
            areas = [b - a, *(curve.integral(b) - curve.integral(a) for curve in curves)]
            np.add.at(sums[:, part], trace.columns["op"][tasks], np.column_stack(areas))
    with np.errstate(invalid="ignore"):
        means = sums[:, :, 1:] / sums[:, :, :1]
    return [
        OpRing(op, *(float(v) for v in means[k].ravel()))
        for k, op in enumerate(trace.ops)
        if sums[k, :, 0].any()
    ]


def kilobytes(n_bytes: float) -> str:
    """Bytes of one ring as text; NaN is no time at all.

    >>> kilobytes(65536), kilobytes(float("nan"))
    ('65.5 KB', '-')
    """
    return "-" if np.isnan(n_bytes) else f"{n_bytes / 1e3:.1f} KB"


def describe_ring(trace: Trace) -> str:
    """One sentence, or that nothing was stamped."""
    use, stages = ring_use(trace), trace.stages
    if use is None or stages is None:
        return "Ring: its stages were not stamped."
    begin, end = _window(trace, stages)
    part = f", last {(end - begin) / end:.0%} of the step" if begin else ""
    return (
        f"Ring of {stages.ring.stages} stages of {stages.ring.stage_bytes / 1024:g} KB, mean of "
        f"{n_sms(len(stages.sms))}{part}: {use.held:.1f} stages held, full {use.full:.0%} and "
        f"empty {use.empty:.0%} of the time; at most {kilobytes(use.in_flight)} in flight per SM, "
        f"nothing {use.idle:.0%} of the time."
    )
