"""What a scheduler has done since it began, in numbers that only grow.

A histogram counts values by upper bounds, so its memory does not grow with the number of values.

What it does not do: know a metrics format.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from dataclasses import dataclass, field

__all__ = ["Counters", "Histogram"]

STEP_S = (0.001, 0.002, 0.003, 0.005, 0.0075, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0)
"""Bounds for what happens once a step."""
WAIT_S = (0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 20.0, 60.0, 180.0, 600.0)
"""Bounds for what happens once a request."""


@dataclass
class Histogram:
    """Seconds, counted by bounds.

    >>> histogram = Histogram((1.0, 2.0))
    >>> for value in (0.5, 2.0, 7.0): histogram.add(value)
    >>> histogram.counts, histogram.n, histogram.total
    ([1, 1, 1], 3, 9.5)

    Attributes:
        bounds: upper bounds, increasing; a value that equals a bound counts below it.
        counts: one per bound, and one for what is larger than all.
        total: sum of the values.
        n: number of values.
    """

    bounds: tuple[float, ...]
    counts: list[int] = field(default_factory=list)
    total: float = 0.0
    n: int = 0

    def __post_init__(self) -> None:
        self.counts = self.counts or [0] * (len(self.bounds) + 1)

    def add(self, value: float) -> None:
        """Count one value."""
        self.counts[bisect_left(self.bounds, value)] += 1
        self.total += value
        self.n += 1

    def copy(self) -> Histogram:
        """As it is now."""
        return Histogram(self.bounds, [*self.counts], self.total, self.n)


@dataclass
class Counters:
    """Of one scheduler.

    Attributes:
        steps: steps of the kernel whose tokens were taken.
        launches: launches of the kernel.
        chunks: pieces of prompts that went in by `Prefill`.
        prompt_tokens: tokens of prompts that begun requests brought.
        cached_tokens: those of them that were in the cache.
        fed_tokens: tokens that went into the cache, also again after a preemption.
        completion_tokens: tokens that were generated.
        preemptions: times that a sequence lost its pages.
        failures: launches that failed.
        finished: sequences that ended, by reason; "error" for those that a failure ended.
        queue_s: from submission to the first step, per request.
        ttft_s: from submission to the first token.
        itl_s: from token to token.
        e2e_s: from submission to the end.
    """

    steps: int = 0
    launches: int = 0
    chunks: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    fed_tokens: int = 0
    completion_tokens: int = 0
    preemptions: int = 0
    failures: int = 0
    finished: Counter[str] = field(default_factory=Counter)
    queue_s: Histogram = field(default_factory=lambda: Histogram(WAIT_S))
    ttft_s: Histogram = field(default_factory=lambda: Histogram(WAIT_S))
    itl_s: Histogram = field(default_factory=lambda: Histogram(STEP_S))
    e2e_s: Histogram = field(default_factory=lambda: Histogram(WAIT_S))
