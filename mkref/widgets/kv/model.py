"""What a picture shows of a history: one moment, the steps around it, and perhaps one request."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from functools import cached_property

from mkref.errors import RequestError
from mkref.widgets.kv.changes import Changes, changes
from mkref.widgets.kv.history import KINDS, Held, History, Moment

__all__ = ["STEPS", "KvView", "Sums", "kv_view"]

STEPS = 64
"""Most steps beside each other."""


@dataclass(frozen=True)
class Sums:
    """Pages of one kind; a shared page is used, and counts once."""

    total: int
    free: int
    cached: int
    used: int
    shared: int


@dataclass(frozen=True, eq=False)
class KvView:
    """One moment of a history.

    Attributes:
        history: all of it.
        at: which moment.
        selected: a request that stands out; "" for none.
    """

    history: History
    at: int
    selected: str = ""

    @property
    def moment(self) -> Moment:
        """The moment that is shown."""
        return self.history.moments[self.at]

    @cached_property
    def changes(self) -> Changes:
        """What happened since the moment before."""
        before = self.history.moments[self.at - 1] if self.at else None
        return changes(before, self.moment, self.history.page_tokens)

    @property
    def steps(self) -> range:
        """The moments that are drawn beside each other, this one among them."""
        n = len(self.history.moments)
        first = min(max(self.at - STEPS // 2, 0), max(n - STEPS, 0))
        return range(first, min(first + STEPS, n))

    def sums(self, kind: int) -> Sums:
        """Pages by what they are."""
        owners, cached = self.moment.owners(kind), len(self.moment.cached[kind])
        total = self.history.n_pages[kind]
        shared = sum(len(names) > 1 for names in owners.values())
        return Sums(total, total - cached - len(owners), cached, len(owners), shared)

    def rows_of(self, name: str) -> str:
        """What a request does in this step, in words."""
        uses = [use for use in self.moment.rows if use.name == name]
        kinds = Counter(use.is_prompt for use in uses)
        parts = []
        if kinds[True]:
            parts.append(f"{kinds[True]} of its prompt")
        if kinds[False]:
            parts.append(f"{kinds[False]} of its answer")
        return " and ".join(parts) or "nothing"

    def freed(self, held: Held, kind: int) -> int:
        """Entries of a table whose pages were given back."""
        return held.begin[kind] if KINDS[kind] == "sliding" else 0


def _load(moment: Moment) -> tuple[int, int]:
    pages = sum(len(moment.owners(kind)) for kind in range(len(KINDS)))
    return len(moment.running), pages


def kv_view(history: History, at: int | None = None, selected: str = "") -> KvView:
    """Choose what to show.

    Args:
        history: of a session.
        at: number of the moment; below 0 counts from the end; None: the first of those in which
            most requests run and most pages are used.
        selected: a request that stands out.

    Raises:
        RequestError: no such moment, or no such request.
    """
    n = len(history.moments)
    if at is None:
        at = max(range(n), key=lambda i: _load(history.moments[i]))
    if not -n <= at < n:
        raise RequestError(f"kv: step {at} of a history with steps 0 to {n - 1}")
    if selected and selected not in history.names:
        raise RequestError(
            f"kv: request {selected!r}; the history has {', '.join(history.names) or 'none'}"
        )
    return KvView(history, at % n, selected)
