"""The memory that all SMs share: when a copy that is asked for now will have landed.

Copies are served in the order in which they were asked for, at the total bandwidth: SMs that keep
equally much in flight get equal shares. Copies of one SM also follow one another on its own link,
and each takes a latency on top, part of which is a chance of the moment. That chance comes from a
table of random numbers with a fixed seed, so a simulation repeats bit for bit.

What it does not do: banks, pages, channels or caches.
"""

from __future__ import annotations

from heapq import heappop, heappush
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from mkref.simulate.costs import Costs

__all__ = ["Memory"]

DRAWS = 8191


class Memory:
    """Keeps until when the memory and each link are busy; times in ns."""

    def __init__(self, costs: Costs, n_sm: int, *, copies: bool = True, seed: int = 1) -> None:
        rng = np.random.default_rng(seed)
        self._extra: list[float] = (costs.latency + rng.exponential(costs.jitter, DRAWS)).tolist()
        self._per_byte, self._per_byte_of_link = 1 / costs.bandwidth, 1 / costs.link
        self._free = 0.0
        self._links = [0.0] * n_sm
        self._drawn = 0
        self._copies = copies
        self._flying: list[tuple[float, int]] = []  # a heap: when each lands, and its bytes
        self._n_flying = 0

    def copy(self, sm: int, at: float, n_bytes: int) -> float:
        """A copy to `sm` is asked for at time `at`, not before any other; when has it landed?"""
        if not self._copies:
            return at
        begin = at if at > self._free else self._free
        self._free = free = begin + n_bytes * self._per_byte
        last = self._links[sm] + n_bytes * self._per_byte_of_link  # behind the copy before it
        self._links[sm] = last = last if last > free else free
        self._drawn = drawn = (self._drawn + 1) % DRAWS
        landed = last + self._extra[drawn]
        heappush(self._flying, (landed, n_bytes))
        self._n_flying += n_bytes
        return landed

    def in_flight(self, at: float) -> float:
        """Bytes on their way at a time that is not before that of any copy, per SM."""
        flying = self._flying
        while flying and flying[0][0] <= at:
            self._n_flying -= heappop(flying)[1]
        return self._n_flying / len(self._links)
