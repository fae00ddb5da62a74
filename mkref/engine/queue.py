"""The line of those who wait: first come, first served, with two bounded exceptions.

A priority moves a request by a fixed number of places for each level, so it competes as if it had
come so many requests earlier or later, and no stream of urgent requests can hold back another for
ever. And while the first in line waits for pages that are not there, a few who need fewer may begin
before it, up to a limit that is counted for each who waits (`OVERTAKERS`).

Who was preempted keeps its place, which is in front of all who came later.

What it does not do: know pages or rows.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator
from operator import attrgetter
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mkref.engine.sequence import Sequence

__all__ = ["OVERTAKERS", "PLACES", "Line"]

PLACES = 64
"""Places in line by which one level of priority moves a request."""
OVERTAKERS = 16
"""How many later ones may begin before one that waits for pages."""

_ORDER = attrgetter("order")


class Line:
    """Sequences in the order in which they are to begin."""

    def __init__(self) -> None:
        self._line: list[Sequence] = []
        self._n_tickets = 0

    def __len__(self) -> int:
        return len(self._line)

    def __iter__(self) -> Iterator[Sequence]:
        return iter(self._line)

    def __contains__(self, sequence: Sequence) -> bool:
        at = bisect_left(self._line, sequence.order, key=_ORDER)
        return at < len(self._line) and self._line[at] is sequence

    def join(self, sequence: Sequence) -> None:
        """Come new: behind all who came before, but for priorities."""
        ticket = self._n_tickets
        self._n_tickets += 1
        sequence.order = (ticket + PLACES * sequence.request.priority, ticket)
        insort(self._line, sequence, key=_ORDER)

    def rejoin(self, sequence: Sequence) -> None:
        """Come back to the place that one had."""
        insort(self._line, sequence, key=_ORDER)

    def leave(self, sequence: Sequence) -> None:
        """Begin, or give up. One must be in the line."""
        at = bisect_left(self._line, sequence.order, key=_ORDER)
        assert self._line[at] is sequence
        del self._line[at]
