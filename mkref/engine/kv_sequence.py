"""What a KV cache tells about itself: the pages of a sequence, and how full the pool is.

What it does not do: change anything (`mkref.engine.kv` does).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np

    from mkref.engine.kv_index import Node

__all__ = ["KindStats", "KvSequence", "KvStats"]


@dataclass(eq=False)
class KvSequence:
    """Pages of one sequence; made by `KvCache.open`, changed only by `KvCache`.

    Attributes:
        table: int32 [2, pages]; entry `p` is the page with tokens 64 p ..., or -1.
        n_tokens: tokens that it was opened with.
        n_cached: those of them that were in the cache already, a multiple of 64. The caller feeds
            the others.
        n_published: tokens of it that the index knows. Nothing is new to publish until 64 more are
            in the cache.
        begin, end: per kind, the range of `table` that holds pages.
        node: of the index, for the last published page.
        n_moves: how often `table` has changed.
        is_open: not closed yet.
    """

    table: np.ndarray
    n_tokens: int
    n_cached: int
    n_published: int
    begin: list[int]
    end: list[int]
    node: Node
    n_moves: int = 0
    is_open: bool = True

    def held(self, kind: int) -> int:
        """Pages of a kind in its table."""
        return self.end[kind] - self.begin[kind]


@dataclass(frozen=True)
class KindStats:
    """Pages of one kind: `total` = `free` + `cached` + `used`; a shared page counts once.

    Attributes:
        total: all of them.
        free: hold nothing.
        cached: hold tokens that a later sequence can use; nobody uses them now.
        used: in the table of one or more sequences.
        evictions: how often a cached page made room for another, so far.
    """

    total: int
    free: int
    cached: int
    used: int
    evictions: int


@dataclass(frozen=True)
class KvStats:
    """What a cache holds now, and what it found so far.

    Attributes:
        full, sliding: pages of each kind.
        queries: tokens of all sequences that were opened, as soon as they get a page.
        hits: those of them that were in the cache.
    """

    full: KindStats
    sliding: KindStats
    queries: int
    hits: int
