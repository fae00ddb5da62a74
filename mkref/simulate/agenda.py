"""What happens next: actions with their times, done in the order of time.

An action may add others, at its own time or later. After each, everybody goes on who waited for
something that is known now.
"""

from __future__ import annotations

from collections.abc import Callable
from heapq import heappop, heappush
from itertools import count
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mkref.simulate.counters import Counters

__all__ = ["Agenda"]

Action = Callable[[float], None]


class Agenda:
    """A queue of actions; each is called with its time in ns."""

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, Action]] = []
        self._numbers = count()  # of equal times, the one that was added first

    def add(self, at: float, action: Action) -> None:
        """Do something at a time."""
        heappush(self._heap, (at, next(self._numbers), action))

    def run(self, counters: Counters) -> None:
        """Until there is nothing left to do."""
        heap, wake = self._heap, counters.wake
        counters.drain()
        while heap:
            at, _, action = heappop(heap)
            action(at)
            if wake:
                counters.drain()
