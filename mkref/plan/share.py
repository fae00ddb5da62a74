"""How work is divided among SMs: one function for every operator and any SM count.

It knows nothing about tasks or operators.
"""

from __future__ import annotations

__all__ = ["share"]


def share(total: int, n_slots: int, slot: int) -> tuple[int, int]:
    """The contiguous range `[begin, end)` of `total` equal granules that belongs to `slot`.

    Ranges of all slots cover `0..total` without overlap, and their lengths differ by at most one
    granule.

    >>> [share(10, 4, s) for s in range(4)]
    [(0, 2), (2, 5), (5, 7), (7, 10)]
    """
    return total * slot // n_slots, total * (slot + 1) // n_slots
