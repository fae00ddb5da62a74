"""The pages of one kind: which are free, which are used and by how many, which are only cached.

A page holds 64 tokens of one sequence in every layer of its kind. It is exactly one of

    free     nobody knows what is in it; the next one who needs a page gets it
    used     in the table of one or more sequences
    cached   in nobody's table, but in the prefix index, so that a later sequence can use it again

What it does not do: take anything out of the index (`mkref.engine.kv_store`), or know tokens
(`mkref.engine.kv_index`).
"""

from __future__ import annotations

from collections import OrderedDict
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mkref.engine.kv_index import Node

__all__ = ["PagePool"]

PASSED = 0.25
"""Part of the cached pages from which on those in the middle of sequences are evicted first."""


class PagePool:
    """All pages of one kind, numbered from 0.

    Attributes:
        total: how many there are.
        free: pages that hold nothing.
        cached: pages of the index that nobody uses, the one that is evicted first in front.
        passed: more of them, of which a sequence has let go because its window moved on.
        refs: per page, in how many tables it is.
        nodes: per page, the place in the index that it belongs to; None if it is not published.
        evictions: cached pages that were given up for the sake of somebody else.
    """

    def __init__(self, total: int) -> None:
        self.total = total
        # The last one given back is taken first: its bytes may still be in a cache.
        self.free = list(range(total - 1, -1, -1))
        self.cached: OrderedDict[int, None] = OrderedDict()
        self.passed: OrderedDict[int, None] = OrderedDict()
        self.refs = [0] * total
        self.nodes: list[Node | None] = [None] * total
        self.evictions = 0

    @property
    def n_cached(self) -> int:
        """Pages of the index that nobody uses."""
        return len(self.cached) + len(self.passed)

    @property
    def available(self) -> int:
        """Pages that a sequence could get: free ones, and cached ones, which can be evicted."""
        return len(self.free) + self.n_cached

    def victim(self) -> int:
        """The cached page that is to be evicted next. There must be one.

        A long prompt moves its window over many pages, more than the pool has, and all of them are
        younger than what other sequences need to go on. So they may take a part of the room only.
        """
        passed = len(self.passed)
        queue = self.passed if passed and passed >= PASSED * self.n_cached else self.cached
        return next(iter(queue))

    def take(self) -> int:
        """A free page, from now on used once. There must be one."""
        page = self.free.pop()
        self.refs[page] = 1
        return page

    def share(self, page: int) -> None:
        """One more sequence uses a published page."""
        if not self.refs[page]:
            self._uncache(page)
        self.refs[page] += 1

    def release(self, page: int, passed: bool = False) -> None:
        """One sequence less uses a page. The last one leaves it cached, or free.

        Args:
            page: a used page.
            passed: the window has moved on; it is not at the end of anything.
        """
        self.refs[page] -= 1
        if self.refs[page]:
            return
        if self.nodes[page] is None:
            self.free.append(page)
        elif passed:
            self.passed[page] = None
        else:
            self.cached[page] = None

    def _uncache(self, page: int) -> None:
        del (self.passed if page in self.passed else self.cached)[page]

    def withdraw(self, page: int) -> None:
        """The index forgets a page: free if it was cached, else only its users know it now."""
        self.nodes[page] = None
        if not self.refs[page]:
            self._uncache(page)
            self.free.append(page)

    def touch(self, page: int) -> None:
        """If a page is cached, evict it after all others."""
        if page in self.cached:
            self.cached.move_to_end(page)
