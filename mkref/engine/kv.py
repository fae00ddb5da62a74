"""Pages of the KV cache: who owns which, with exact accounting.

A page holds 64 tokens of one sequence in every layer of its kind. Full layers keep all tokens, so a
sequence takes a new page every 64 tokens. Sliding layers keep the window only: a page that no later
token sees goes back to the pool. Each kind numbers its own pages.

A sequence reserves the most that it can ever hold when it is opened. So an admitted request never
runs out of pages half way, and nothing has to be taken away from it. A launch that moves a sequence
on by several tokens has its pages before it starts, which is why the window is counted larger.

What it does not do: touch a key or a value, share pages between sequences, or preempt.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from mkref.plan.build import PAGE

if TYPE_CHECKING:
    from mkref.config import NorthConfig

__all__ = ["AHEAD", "FULL", "KINDS", "SLIDING", "KvPages", "KvSequence", "pages_for"]
__all__ += ["window_pages"]

AHEAD = 32
"""Most tokens by which one launch moves a sequence on: its steps, or rows of its prompt."""
FULL, SLIDING = 0, 1
KINDS = ("full", "sliding")


def pages_for(n_tokens: int) -> int:
    """Pages that hold tokens 0 .. n_tokens - 1.

    >>> pages_for(64), pages_for(65)
    (1, 2)
    """
    return -(-n_tokens // PAGE)


def window_pages(window: int) -> int:
    """The most pages that `window` neighbouring tokens can lie in.

    >>> window_pages(1), window_pages(64), window_pages(66)
    (1, 2, 3)
    """
    return (window + PAGE - 2) // PAGE + 1


@dataclass(eq=False)
class KvSequence:
    """Pages of one sequence; made by `KvPages.open`, changed only by `KvPages`.

    Attributes:
        table: int32 [2, pages]; entry `p` is the page with tokens 64 p ..., or -1.
        n_tokens: tokens that it may grow to.
        reserved: pages of each kind that are set aside for it.
        begin, end: per kind, the range of `table` that holds pages.
    """

    table: np.ndarray
    n_tokens: int
    reserved: tuple[int, int]
    begin: list[int]
    end: list[int]

    def held(self, kind: int) -> int:
        """Pages of a kind that it owns."""
        return self.end[kind] - self.begin[kind]


class KvPages:
    """All pages of a pool.

    Args:
        config: which kinds of layers there are, and the window.
        full_pages, sliding_pages: budgets, as in `mkref.plan.build.KvPool`.
        max_context: longest sequence, in tokens.
        ahead: most tokens of a sequence that one `advance` makes ready.
    """

    def __init__(
        self,
        config: NorthConfig,
        full_pages: int,
        sliding_pages: int,
        max_context: int,
        ahead: int = 1,
    ) -> None:
        kinds = {config.is_sliding(layer) for layer in range(config.num_hidden_layers)}
        self.uses = (False in kinds, True in kinds)
        self.window = config.sliding_window
        self.ahead = ahead
        self.budget = (full_pages, sliding_pages)
        self.width = pages_for(max_context)
        # The last one given back is taken first: its bytes may still be in a cache.
        self._free = tuple(list(range(n - 1, -1, -1)) for n in self.budget)
        self._reserved = [0, 0]
        self._live: list[KvSequence] = []

    def needs(self, n_tokens: int) -> tuple[int, int]:
        """The most pages of each kind that a sequence of `n_tokens` holds at any time."""
        full = pages_for(n_tokens)
        sliding = min(full, window_pages(self.window + self.ahead - 1))
        return (full if self.uses[FULL] else 0, sliding if self.uses[SLIDING] else 0)

    def free(self, kind: int) -> int:
        """Pages of a kind that nobody owns."""
        return len(self._free[kind])

    def unreserved(self, kind: int) -> int:
        """Pages of a kind that are not set aside for a sequence."""
        return self.budget[kind] - self._reserved[kind]

    def has_room(self, n_tokens: int) -> bool:
        """Can a sequence of `n_tokens` be opened right now?"""
        return all(need <= self.unreserved(kind) for kind, need in enumerate(self.needs(n_tokens)))

    def open(self, n_tokens: int) -> KvSequence | None:
        """A new sequence that may grow to `n_tokens`; None if too little is left right now."""
        if not self.has_room(n_tokens):
            return None
        needs = self.needs(n_tokens)
        table = np.full((2, self.width), -1, np.int32)
        sequence = KvSequence(table, n_tokens, needs, [0, 0], [0, 0])
        for kind, need in enumerate(needs):
            self._reserved[kind] += need
        self._live.append(sequence)
        return sequence

    def advance(self, sequence: KvSequence, position: int, count: int = 1) -> bool:
        """Make ready for the tokens at `position`, `position + 1` ...: their pages exist, pages
        that none of them sees are given back.

        Args:
            sequence: an open sequence.
            position: not below that of earlier calls. It may jump: pages in between are taken too,
                those of sliding layers only as far as the window of `position` reaches.
            count: tokens, 1 to `ahead`. They need not come: the next call may begin among them.

        Returns:
            Whether the table changed.
        """
        if not 0 <= position <= position + count - 1 < sequence.n_tokens:
            wanted = f"position {position}" if count == 1 else f"positions {position} + {count}"
            raise ValueError(f"{wanted} of a sequence opened for {sequence.n_tokens}")
        if count > self.ahead:
            raise ValueError(f"{count} tokens at once, pages were reserved for {self.ahead}")
        end = (position + count - 1) // PAGE + 1
        changed = False
        for kind in (FULL, SLIDING):
            if not self.uses[kind]:
                continue
            seen = max(0, position - self.window + 1) // PAGE if kind == SLIDING else 0
            if seen > sequence.begin[kind] or end > sequence.end[kind]:
                self._move(sequence, kind, seen, max(end, sequence.end[kind]))
                changed = True
        return changed

    def _move(self, sequence: KvSequence, kind: int, begin: int, end: int) -> None:
        """Hold exactly the entries `begin .. end - 1` of one kind."""
        table, free = sequence.table[kind], self._free[kind]
        # Give back before taking: the reservation covers one window, not one window and a page.
        for entry in range(sequence.begin[kind], min(begin, sequence.end[kind])):
            free.append(int(table[entry]))
            table[entry] = -1
        for entry in range(max(begin, sequence.end[kind]), end):
            table[entry] = free.pop()
        sequence.begin[kind], sequence.end[kind] = begin, end

    def close(self, sequence: KvSequence) -> None:
        """Give everything back."""
        self._live.remove(sequence)
        for kind in (FULL, SLIDING):
            last = sequence.end[kind]
            self._move(sequence, kind, last, last)
            self._reserved[kind] -= sequence.reserved[kind]

    def check(self) -> None:
        """Prove that every page is free once or owned once, and that reservations add up.

        Raises:
            RuntimeError: the accounting is wrong, which is a bug; names the kind and the pages.
        """
        for kind, name in enumerate(KINDS):
            owned = Counter(self._free[kind])
            for sequence in self._live:
                entries = np.flatnonzero(sequence.table[kind] != -1)
                if entries.tolist() != list(range(sequence.begin[kind], sequence.end[kind])):
                    raise RuntimeError(f"kv: {name} entries {entries} are not one range")
                if sequence.held(kind) > sequence.reserved[kind]:
                    held, reserved = sequence.held(kind), sequence.reserved[kind]
                    raise RuntimeError(f"kv: {held} {name} pages held, {reserved} reserved")
                owned.update(sequence.table[kind, entries].tolist())
            twice = [page for page, n in owned.items() if n > 1]
            lost = set(range(self.budget[kind])) - owned.keys()
            strange = owned.keys() - set(range(self.budget[kind]))
            if twice or lost or strange:
                raise RuntimeError(
                    f"kv: {name} pages owned twice {twice}, lost {sorted(lost)}, "
                    f"unknown {sorted(strange)}"
                )
            reserved = sum(sequence.reserved[kind] for sequence in self._live)
            if reserved != self._reserved[kind] or reserved > self.budget[kind]:
                raise RuntimeError(
                    f"kv: {self._reserved[kind]} {name} pages reserved, not {reserved}"
                )
