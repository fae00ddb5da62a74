"""Counters between SMs, and who is to go on when one is full.

A run has the counters of several parts of work, each with targets of its own; `key` numbers them
through. A counter that nobody arrives at is full from the start.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from heapq import heappushpop

__all__ = ["NOTHING", "Counters"]

NOTHING = -1
"""Key of no counter: there is nothing to wait for."""


class Counters:
    """Arrivals with their times.

    Attributes:
        wake: what is to be called next, because what it waited for is known now.
    """

    def __init__(
        self, n: int, arrivals: Iterable[int], may_miss: Mapping[int, int] | None = None
    ) -> None:
        """`n` counters; `arrivals` names one for each arrival that will come; `may_miss` says which
        count as full when so many are still missing."""
        self._missing = [0] * n
        for key in arrivals:
            self._missing[key] += 1
        self._time = [0.0] * n
        # Of those that may miss some: the last ones, one more than may miss.
        self._last = {key: [0.0] * (m + 1) for key, m in (may_miss or {}).items() if m}
        self._waiting: list[dict[Callable[[], None], None]] = [{} for _ in range(n)]
        self.wake: list[Callable[[], None]] = []

    def arrive(self, key: int, at: float, *, not_before: float = 0.0) -> None:
        """One arrival, seen by everybody at time `at`; before `not_before` the counter is not full
        even if this arrival may miss."""
        if key in self._last:
            last = self._last[key]
            heappushpop(last, at)
            at = max(last[0], not_before)
        if at > self._time[key]:
            self._time[key] = at
        self._missing[key] -= 1
        if not self._missing[key]:
            self.wake += self._waiting[key]
            self._waiting[key].clear()

    def full_at(self, key: int, then: Callable[[], None]) -> float | None:
        """When the counter is full; None if that is not known yet: `then` is called when it is."""
        if key == NOTHING:
            return 0.0
        if not self._missing[key]:
            return self._time[key]
        self._waiting[key][then] = None
        return None

    def drain(self) -> None:
        """Call everybody who is to go on, and those whom they wake."""
        wake = self.wake
        while wake:
            wake.pop()()
