"""The paged KV cache: pages of running sequences, and of finished ones as long as there is room.

A page holds 64 tokens of one sequence in every layer of its kind. Full layers keep all tokens, so a
sequence takes a new page every 64 tokens. Sliding layers keep the window only: a page that no later
token sees is let go. Each kind numbers its own pages.

Nothing is reserved. `advance` makes the pages for the next tokens or says that there are none, and
then it is for the caller to wait or to take another sequence's pages away.

Complete pages, of prompts and of answers, are published in a prefix index. A sequence that begins
with the same tokens takes them into its table without a copy; the same page may be in many tables.
It is never written again: a sequence writes behind its published pages only. What nobody uses stays
as a cache until its page is needed, what was let go longest ago first, and the end of a prefix
before its beginning, so that what is left can still be found.

What it does not do: touch a key or a value, decide who runs, or lock: one thread uses it.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import numpy as np

from mkref.engine.kv_check import check_cache, check_tokens
from mkref.engine.kv_index import page_keys
from mkref.engine.kv_sequence import KindStats, KvSequence, KvStats
from mkref.engine.kv_sizes import (
    AHEAD,
    FULL,
    KINDS,
    SLIDING,
    first_seen,
    pages_for,
    window_pages,
)
from mkref.engine.kv_store import PageStore
from mkref.plan.build import PAGE

if TYPE_CHECKING:
    from mkref.config import NorthConfig
    from mkref.engine.kv_index import Node, Tokens

__all__ = ["AHEAD", "FULL", "KINDS", "SLIDING", "KindStats", "KvCache", "KvSequence", "KvStats"]
__all__ += ["pages_for", "window_pages"]

DEBUG = "MKREF_DEBUG_KV"
"""Environment variable: 1 runs `KvCache.check` after every operation."""


class KvCache:
    """All pages of a machine's pool.

    Args:
        config: which kinds of layers there are, and the window.
        full_pages, sliding_pages: budgets, as in `mkref.plan.build.KvPool`.
        max_context: longest sequence, in tokens.
        ahead: most tokens by which a sequence that runs alone may move on in one `advance` and be
            sure of its pages (`fits`).
        reuse: publish pages and find them again.
        debug: prove after every operation that no page is lost or has two owners; None: if the
            environment variable MKREF_DEBUG_KV is 1.
    """

    def __init__(
        self,
        config: NorthConfig,
        full_pages: int,
        sliding_pages: int,
        max_context: int,
        ahead: int = AHEAD,
        *,
        reuse: bool = True,
        debug: bool | None = None,
    ) -> None:
        layers = {config.is_sliding(layer) for layer in range(config.num_hidden_layers)}
        self.kinds = tuple(
            kind for kind, slides in ((FULL, False), (SLIDING, True)) if slides in layers
        )
        self.window = config.sliding_window if SLIDING in self.kinds else 0
        self.ahead = ahead
        self.reuse = reuse
        self.max_context = max_context
        self.budget = (full_pages, sliding_pages)
        self.width = pages_for(max_context)
        self.store = PageStore(self.kinds, self.budget)
        self.pools, self.index = self.store.pools, self.store.index
        self.live: dict[KvSequence, None] = {}  # a set that keeps its order
        self._debug = os.environ.get(DEBUG) == "1" if debug is None else debug
        self._queries = self._hits = 0

    def needs(self, n_tokens: int) -> tuple[int, int]:
        """The most pages of each kind that a sequence of `n_tokens` holds at any time."""
        full = pages_for(n_tokens)
        sliding = min(full, window_pages(self.window + self.ahead - 1))
        return (full if FULL in self.kinds else 0, sliding if SLIDING in self.kinds else 0)

    def fits(self, n_tokens: int) -> bool:
        """Could a sequence of `n_tokens` ever run, if it had the pool for itself?"""
        enough = all(
            need <= has for need, has in zip(self.needs(n_tokens), self.budget, strict=True)
        )
        return enough and n_tokens <= self.max_context

    def free(self, kind: int) -> int:
        """Pages of a kind that hold nothing."""
        return len(self.pools[kind].free)

    def available(self, kind: int) -> int:
        """Pages of a kind that a sequence could get now: free, or cached and used by nobody."""
        return self.pools[kind].available

    def match(self, tokens: Tokens) -> int:
        """Tokens that `open` would find in the cache; changes nothing."""
        return len(self._find(tokens)) * PAGE

    def _find(self, tokens: Tokens) -> list[Node]:
        # One token at least must be fed, or there would be no logits.
        limit = min((len(tokens) - 1) // PAGE, self.width)
        return self.index.longest(tokens, limit, self.window)

    def open(self, tokens: Tokens) -> KvSequence:
        """A new sequence that begins with `tokens`; takes no new page.

        Its table has the longest prefix that is in the cache, `n_cached` tokens; the rest is to be
        fed, in order. At least one token always is.
        """
        nodes = self._find(tokens)
        n = len(nodes)
        table = np.full((2, self.width), -1, np.int32)
        begin, end = [0, 0], [0, 0]
        for kind in self.kinds:
            share = self.pools[kind].share
            first = first_seen(n * PAGE, self.window) if kind == SLIDING else 0
            pages = [node.pages[kind] for node in nodes[first:]]
            for page in pages:
                share(page)
            table[kind, first:n] = pages
            begin[kind], end[kind] = first, n
        node = nodes[-1] if nodes else self.index.root
        sequence = KvSequence(table, len(tokens), n * PAGE, n * PAGE, begin, end, node)
        self.live[sequence] = None
        self._proved()
        return sequence

    def advance(self, sequence: KvSequence, position: int, count: int = 1) -> bool:
        """Make ready for the tokens at `position`, `position + 1` ...: their pages exist, and
        sliding pages that none of them sees are let go.

        Args:
            sequence: an open sequence.
            position: not below that of earlier calls, nor in published pages. It may jump: pages in
                between are taken too, those of sliding layers only as far as the window of
                `position` reaches.
            count: tokens. They need not come: the next call may begin among them.

        Returns:
            False if the pool is short of pages; then nothing has changed.
        """
        last = position + count - 1
        if not sequence.n_published <= position <= last < self.max_context or not sequence.is_open:
            self._refuse(sequence, position, count)
        end = last // PAGE + 1
        begin = (0, first_seen(position, self.window))
        moved = [
            kind
            for kind in self.kinds
            if end > sequence.end[kind] or begin[kind] > sequence.begin[kind]
        ]
        if not moved:
            return True
        if any(self._is_short(sequence, kind, begin[kind], end) for kind in moved):
            return False
        for kind in moved:
            self._move(sequence, kind, begin[kind], max(end, sequence.end[kind]))
        sequence.n_moves += 1
        if sequence.n_moves == 1:  # who opens only to see how much room there is does not count
            self._queries += sequence.n_tokens
            self._hits += sequence.n_cached
        self._proved()
        return True

    def _refuse(self, sequence: KvSequence, position: int, count: int) -> None:
        """Say what is wrong with a call of `advance`, which is a bug of the caller."""
        wanted = f"position {position}" if count == 1 else f"positions {position} + {count}"
        if not sequence.is_open:
            raise ValueError(f"kv: {wanted} of a sequence that is closed")
        if position < sequence.n_published:
            raise ValueError(
                f"kv: {wanted} of a sequence with {sequence.n_published} published tokens, whose "
                "pages others may read"
            )
        raise ValueError(f"kv: {wanted} of a sequence of at most {self.max_context} tokens")

    def _is_short(self, sequence: KvSequence, kind: int, begin: int, end: int) -> bool:
        """Are there too few pages for the entries `begin .. end - 1` of a kind?"""
        pool, old = self.pools[kind], (sequence.begin[kind], sequence.end[kind])
        let_go = sequence.table[kind, old[0] : min(begin, old[1])].tolist()
        gained = sum(pool.refs[page] == 1 for page in let_go)
        return end - max(begin, old[1]) > pool.available + gained

    def _move(self, sequence: KvSequence, kind: int, begin: int, end: int) -> None:
        """Hold exactly the entries `begin .. end - 1` of one kind."""
        table, pool = sequence.table[kind], self.pools[kind]
        # Let go before taking: `fits` counts one window, not one window and a page.
        for entry in range(sequence.begin[kind], min(begin, sequence.end[kind])):
            # What was found in the cache is likely to be looked for again.
            pool.release(int(table[entry]), passed=entry * PAGE >= sequence.n_cached)
            table[entry] = -1
        for entry in range(max(begin, sequence.end[kind]), end):
            table[entry] = self.store.take(kind)
        sequence.begin[kind], sequence.end[kind] = begin, end

    def publish(self, sequence: KvSequence, tokens: Tokens) -> None:
        """Enter the complete pages of a sequence into the index. Cheap if there is nothing new.

        A page that is there already with the same tokens stays; the sequence keeps its own, too,
        unpublished. (They are equal in every bit only if the same kernel computed both.) But if
        nobody uses the one in the index, the sequence's own replaces it, and a page becomes free.

        Args:
            sequence: an open sequence.
            tokens: all tokens from the first one on whose keys and values are in the cache.
        """
        n, first, node = len(tokens) // PAGE, sequence.n_published // PAGE, sequence.node
        if n < first or (n == first and node.alive) or not self.reuse:
            return
        if self._debug:
            check_tokens(sequence, tokens)
        if not sequence.is_open or n > max(sequence.end):
            state = "has no pages for" if sequence.is_open else "is closed"
            raise ValueError(f"kv: publish {len(tokens)} tokens: the sequence {state} them")
        if FULL not in self.kinds and n <= sequence.begin[SLIDING]:
            return  # the last page has left the window: nothing to find at the end of these nodes
        if not node.alive:  # a page before it was evicted; all that is held is published again
            first, node = 0, self.index.root
        for entry, key in enumerate(page_keys(tokens, first, n), first):
            node = node.children.get(key) or self.index.add(node, key)
            for kind in self.kinds:
                if sequence.begin[kind] <= entry < sequence.end[kind]:
                    self.store.offer(node, kind, int(sequence.table[kind, entry]))
        sequence.node, sequence.n_published = node, n * PAGE
        self._proved()

    def close(self, sequence: KvSequence) -> None:
        """Let all pages go. Published ones stay as a cache, as long as nobody needs the room."""
        if not sequence.is_open:
            raise ValueError("kv: close of a sequence that is closed")
        sequence.is_open = False
        del self.live[sequence]
        for kind in self.kinds:
            release = self.pools[kind].release
            held = sequence.table[kind, sequence.begin[kind] : sequence.end[kind]].tolist()
            # The last page first: it is evicted first, and what is left is still a prefix.
            for page in reversed(held):
                release(page)
            sequence.begin[kind] = sequence.end[kind]
        sequence.table.fill(-1)
        if FULL in self.kinds:
            # A page in the index of which this sequence had a copy of its own may be older than the
            # pages behind it now are; it must not be evicted before them.
            node: Node | None = sequence.node
            while node:
                if node.alive and node.parent:
                    self.pools[FULL].touch(node.pages[FULL])
                node = node.parent
        self._proved()

    def forget(self) -> None:
        """Make every page free that nobody uses: what it holds is in doubt, as after a failure."""
        for kind in self.kinds:
            while self.pools[kind].cached:
                self.store.evict(kind)
        self._proved()

    def stats(self) -> KvStats:
        """Pages now, and tokens found so far."""
        full, sliding = (
            KindStats(
                total=pool.total,
                free=len(pool.free),
                cached=pool.n_cached,
                used=pool.total - pool.available,
                evictions=pool.evictions,
            )
            for pool in self.pools
        )
        return KvStats(full, sliding, self._queries, self._hits)

    def check(self) -> None:
        """Prove that every page is free, used or cached, and that all counts and places agree.

        Raises:
            RuntimeError: the accounting is wrong, which is a bug; names the kind and the page.
        """
        check_cache(self.store, self.live)

    def _proved(self) -> None:
        if self._debug:
            check_cache(self.store, self.live)
