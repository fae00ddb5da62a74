"""Which pages a chunk needs of a page table: those it reads and those it writes; on the host.

A full layer needs a page for every token. A sliding layer needs those that the window of the
chunk's first token still reaches, and those that a later token will see; tokens of a long chunk
that nobody sees any more may be without one.

What it does not do: touch a key. NumPy only.

Notation: W sliding window.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from mkref.errors import MachineError
from mkref.weights.layout import PAGE

if TYPE_CHECKING:
    from mkref.plan.build import Plan

__all__ = ["Span", "spans"]

Ints = npt.NDArray[np.int64]
KINDS = ("full", "sliding")


@dataclass(frozen=True, eq=False)
class Span:
    """Pages of one kind for `count` tokens from `position` on.

    Attributes:
        position, count: of the chunk.
        first: position of the first token of the first page that is read.
        low: the first position that a query of the chunk sees; `first` or up to 63 after it.
        read: pages with positions `first` .. `position - 1`.
        kept: which tokens of the chunk have a page.
        write, slots: page of each of those, and its place in the page.
    """

    position: int
    count: int
    first: int
    low: int
    read: Ints
    kept: Ints
    write: Ints
    slots: Ints


def spans(plan: Plan, table: np.ndarray, position: int, count: int) -> tuple[Span | None, ...]:
    """The spans of full and of sliding layers; None for a kind of which the model has no layer.

    Raises:
        MachineError: names the page table's entry that is wrong.
    """
    if not isinstance(table, np.ndarray) or table.dtype.kind not in "iu":
        found = table.dtype if isinstance(table, np.ndarray) else type(table).__name__
        raise MachineError(f"page_table: {found}; must be a NumPy array of whole numbers")
    if table.ndim != 2 or table.shape[0] != 2:
        raise MachineError(f"page_table: shape {table.shape}; must be (2, pages) of one sequence")
    config = plan.config
    kinds = {int(config.is_sliding(layer)) for layer in range(config.num_hidden_layers)}
    budgets = (plan.pool.full_pages, plan.pool.sliding_pages)
    window = (None, config.sliding_window)
    return tuple(
        _span(kind, table[kind].astype(np.int64), budgets[kind], window[kind], position, count)
        if kind in kinds
        else None
        for kind in (0, 1)
    )


def _span(kind: int, row: Ints, budget: int, window: int | None, position: int, count: int) -> Span:
    end = position + count
    low = seen = 0  # by the first token of the chunk; by the token after it
    if window is not None:
        low, seen = (max(0, at - window + 1) for at in (position, end))
    n_pages = -(-end // PAGE)
    begin = low // PAGE
    if len(row) < n_pages:
        row = np.concatenate([row, np.full(n_pages - len(row), -1)])
    held = row[begin:n_pages]
    entry = np.arange(begin, n_pages)
    # A page of the chunk that neither it reads from the cache nor anybody sees later is optional.
    needed = (entry * PAGE < position) | ((entry + 1) * PAGE > seen)
    bad = (held >= budget) | (held < 0) & (needed | (held < -1))
    if bad.any():
        at = int(entry[bad.argmax()])
        raise MachineError(
            f"page_table: {KINDS[kind]} layers need a page for tokens {at * PAGE}.."
            f"{at * PAGE + PAGE - 1} (tokens {position}..{end - 1} are fed), "
            f"numbered 0..{budget - 1}; entry {at} is {row[at]}"
        )
    numbers, places = np.unique(held[held >= 0], return_index=True)
    if len(numbers) < np.count_nonzero(held >= 0):
        given = held[held >= 0]
        twice = int(np.setdiff1d(np.arange(len(given)), places)[0])
        raise MachineError(
            f"page_table: {KINDS[kind]} page {given[twice]} is there twice; "
            "must be one page for each 64 tokens"
        )
    tokens = np.arange(position, end)
    pages = row[tokens // PAGE]
    kept = np.flatnonzero(pages >= 0)
    return Span(
        position=position,
        count=count,
        first=begin * PAGE,
        low=low,
        read=row[begin : max(begin, -(-position // PAGE))],
        kept=kept,
        write=pages[kept],
        slots=tokens[kept] % PAGE,
    )
