"""Kinds of pages, and how many of them tokens and windows take.

What it does not do: know which pages there are.
"""

from __future__ import annotations

from mkref.plan.build import PAGE

__all__ = ["AHEAD", "FULL", "KINDS", "SLIDING", "first_seen", "pages_for", "window_pages"]

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


def first_seen(position: int, window: int) -> int:
    """The first page that the token at `position` sees in a sliding layer.

    >>> first_seen(10, 64), first_seen(64, 64), first_seen(127, 64), first_seen(128, 1)
    (0, 0, 1, 2)
    """
    return max(0, position - window + 1) // PAGE
