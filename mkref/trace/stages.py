"""The ring of each SM over time: which stages were asked for, landed, were taken and given back.

A stage is one filling of one slot of the ring in shared memory: the loader issues a copy into it,
the bytes land, a consumer takes it and gives it back. From the four times of every stage follow two
curves: how many stages the ring holds (issued and not released), and how many bytes are on their
way (issued and not landed). The second is what keeps a memory busy.

What it does not do: know which task a stage belongs to, or how full it is: the last stage of a run
of tiles may be smaller, so bytes are an upper bound. So is the time of landing, which is when the
loader, or else the consumer, came to look.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from mkref.errors import MachineError, PlanError

__all__ = ["ABSENT", "Curve", "RingShape", "Stages", "bytes_in_flight", "is_written", "occupancy"]

ISSUED, LANDED, TAKEN, RELEASED = range(4)
"""Columns of the stamps."""
ABSENT = -1
"""A time that was not stamped."""


def is_written(raw: np.ndarray) -> np.ndarray:
    """Whether each uint64 stamp is one: memory that nobody wrote holds 0, or all ones (poison)."""
    return np.asarray((raw != 0) & (raw != np.uint64(2**64 - 1)))


@dataclass(frozen=True)
class RingShape:
    """Slots of the ring of one SM, and bytes that one of them holds."""

    stages: int
    stage_bytes: int


@dataclass(frozen=True, eq=False)
class Stages:
    """Stages of the rings during one step, SM after SM in the order in which they were issued.

    Attributes:
        ring: shape of each SM's ring.
        sm: int32 [n].
        times: int64 [n, 4], ns since the step began, 0 for what came before: issued, landed, taken,
            released; `ABSENT` for what was not seen.
        since: int64 [n_sm], from when on the stages of each SM are all here: 0, unless the record
            had no room for the whole step. `ABSENT` for an SM that has no stages here.
    """

    ring: RingShape
    sm: np.ndarray
    times: np.ndarray
    since: np.ndarray

    def __post_init__(self) -> None:
        if self.times.shape != (len(self.sm), 4):
            raise PlanError(
                f"trace: stages of {len(self.sm)} SM numbers do not fit times of shape "
                f"{self.times.shape}; four times per stage are needed"
            )
        same_sm = np.diff(self.sm) == 0
        wrong = np.zeros(len(self.sm), dtype=bool)
        wrong[1:] = same_sm & (np.diff(self.times[:, ISSUED]) < 0)
        released = self.times[:, RELEASED]
        wrong |= (released != ABSENT) & (released < self.times[:, TAKEN])
        if wrong.any():
            i = int(np.flatnonzero(wrong)[0])
            raise MachineError(
                f"trace: stage {i} on SM {int(self.sm[i])} has times {self.times[i].tolist()}, "
                f"which run backwards; the clock of the machine is broken"
            )

    @classmethod
    def from_stamps(cls, stamps: np.ndarray, ring: RingShape, *, zero: int) -> Stages | None:
        """The stages of the step that began at `zero`, out of what the kernel wrote.

        Stage `n` of a launch is in row `n % rows`, so a record may hold the end of a step only, or
        earlier steps, or rests of an earlier launch.

        Args:
            stamps: uint64 [n_sm, rows, 4] ns.
            ring: shape of the ring.
            zero: when the first task of the step was seen.

        Returns:
            The stages, None if none was stamped.

        Raises:
            PlanError: stamps of another shape.
        """
        if stamps.ndim != 3 or stamps.shape[2] != 4:
            raise PlanError(
                f"trace: stage stamps have shape {stamps.shape}, must be [n_sm, rows, 4]"
            )
        raw = stamps.astype(np.uint64)
        issued = raw[:, :, ISSUED]
        # What is older than the issue is of the stage that had the row before.
        seen = is_written(raw) & (raw >= issued[:, :, None])
        released = np.where(seen[:, :, RELEASED], raw[:, :, RELEASED], issued)
        # A step takes all that was issued before it; what is older and was never released is none
        # of this launch.
        here = seen[:, :, ISSUED] & (released >= np.uint64(zero))
        sm, row = np.nonzero(here)
        if not len(sm):
            return None
        order = np.lexsort((row, issued[sm, row], sm))
        sm, row = sm[order], row[order]
        raw, seen = raw[sm, row], seen[sm, row]
        after = np.maximum(raw, np.uint64(zero)) - np.uint64(zero)
        times = np.where(seen, after.astype(np.int64), ABSENT)
        whole_from = np.zeros(len(stamps), dtype=np.int64)
        for each in np.flatnonzero(here.all(axis=1)):
            # Nothing is left of earlier stages. When the ring has gone round once, they are over.
            mine = times[sm == each, ISSUED]
            whole_from[each] = mine[min(ring.stages, len(mine)) - 1]
        return cls(ring, sm.astype(np.int32), times, whole_from)

    def __len__(self) -> int:
        return len(self.sm)

    @cached_property
    def sms(self) -> tuple[int, ...]:
        """SMs whose stages are here."""
        return tuple(int(sm) for sm in np.flatnonzero(self.since != ABSENT))

    @property
    def begin(self) -> int:
        """From when on the stages of all these SMs are here."""
        return int(self.since.max(initial=0))

    def only(self, sms: Sequence[int]) -> Stages:
        """The stages of some SMs."""
        keep = np.isin(self.sm, np.array(sms))
        named = np.isin(np.arange(len(self.since)), np.array(sms))
        since = np.where(named, self.since, ABSENT)
        return Stages(self.ring, self.sm[keep], self.times[keep], since)

    def landed(self) -> np.ndarray:
        """int64 [n], when each is known to have landed, `ABSENT` if never."""
        landed, taken, released = self.times[:, LANDED:].T
        known = np.where(released == ABSENT, np.iinfo(np.int64).max, released)
        for column in (taken, landed):
            known = np.where(column == ABSENT, known, np.minimum(known, column))
        return np.where(known == np.iinfo(np.int64).max, ABSENT, known)


@dataclass(frozen=True, eq=False)
class Curve:
    """A number that changes at some times: `values[i]` from `times[i]` until `times[i + 1]`.

    Attributes:
        times: int64 [n], ascending; the first is 0.
        values: int64 [n]; the last holds for ever.
    """

    times: np.ndarray
    values: np.ndarray

    def at(self, t: np.ndarray) -> np.ndarray:
        """Values at times from 0 on."""
        return np.asarray(self.values[np.searchsorted(self.times, t, side="right") - 1])

    def integral(self, t: np.ndarray) -> np.ndarray:
        """float64, value times ns from 0 until each of `t`."""
        areas = np.concatenate([[0.0], np.cumsum(np.diff(self.times) * self.values[:-1])])
        at = np.searchsorted(self.times, t, side="right") - 1
        return np.asarray(areas[at] + (t - self.times[at]) * self.values[at])

    def means(self, edges: np.ndarray) -> np.ndarray:
        """float64 [n - 1], the mean between each two of `n` ascending times."""
        return np.diff(self.integral(edges)) / np.diff(edges)

    def mean(self, begin: int, end: int) -> float:
        """The mean between two times."""
        return float(self.means(np.array([begin, end]))[0])

    def share_at(self, value: int, begin: int, end: int) -> float:
        """The part of the time between `begin` and `end`, 0 to 1, that it has this value."""
        return Curve(self.times, (self.values == value).astype(np.int64)).mean(begin, end)


def _count(begins: np.ndarray, ends: np.ndarray) -> Curve:
    """How many have begun and not ended; an `ABSENT` end is none."""
    ends = ends[ends != ABSENT]
    times = np.concatenate([[0], begins, ends])
    steps = np.repeat([0, 1, -1], [1, len(begins), len(ends)])
    at, which = np.unique(times, return_inverse=True)
    changes = np.zeros(len(at), dtype=np.int64)
    np.add.at(changes, which, steps)
    return Curve(at, np.cumsum(changes))


def occupancy(stages: Stages, sm: int | None = None) -> Curve:
    """Stages that were issued and not released, of one SM or of all together."""
    mine = stages.times[stages.sm == sm] if sm is not None else stages.times
    return _count(mine[:, ISSUED], mine[:, RELEASED])


def bytes_in_flight(stages: Stages, sm: int | None = None) -> Curve:
    """Bytes that were asked for and are not known to have landed, of one SM or of all: at most."""
    mine = stages.sm == sm if sm is not None else np.ones(len(stages), dtype=bool)
    counted = _count(stages.times[mine, ISSUED], stages.landed()[mine])
    return Curve(counted.times, counted.values * stages.ring.stage_bytes)
