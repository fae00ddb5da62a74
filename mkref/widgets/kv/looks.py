"""How requests look: a colour, a pattern and a letter each, so that nothing hangs on colour."""

from __future__ import annotations

from mkref.widgets.palette import INK, OpStyle

__all__ = ["CACHED", "look_of"]

CACHED = "#e4e4e4"
"""Ground of a page that is kept as a cache; dots lie on it."""
_FILLS = (
    ("#0072B2", "#ffffff"), ("#E69F00", INK), ("#009E73", INK), ("#CC79A7", INK),
    ("#56B4E9", INK), ("#F0E442", INK), ("#D55E00", INK),
)  # fmt: skip
_PATTERNS = ("plain", "horizontal", "vertical", "diagonal")


def look_of(number: int, name: str) -> OpStyle:
    """The look of the request with this number.

    >>> look_of(0, "A").letter, look_of(7, "AB").pattern
    ('A', 'horizontal')
    """
    fill, ink = _FILLS[number % len(_FILLS)]
    pattern = _PATTERNS[number // len(_FILLS) % len(_PATTERNS)]
    return OpStyle(fill, pattern, name[:2], ink)
