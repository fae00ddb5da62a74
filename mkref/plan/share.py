"""How work is divided among SMs, for every operator and any SM count.

It knows nothing about tasks or operators.
"""

from __future__ import annotations

__all__ = ["share", "share_beside", "share_half"]


def share(total: int, n_slots: int, slot: int) -> tuple[int, int]:
    """The contiguous range `[begin, end)` of `total` equal granules that belongs to `slot`.

    Ranges of all slots cover `0..total` without overlap, and their lengths differ by at most one
    granule.

    >>> [share(10, 4, s) for s in range(4)]
    [(0, 2), (2, 5), (5, 7), (7, 10)]
    """
    return total * slot // n_slots, total * (slot + 1) // n_slots


def share_beside(total: int, other: int, n_slots: int, slot: int) -> tuple[int, int]:
    """The range of `total` granules for a slot that has `share(other, ...)` of another operator.

    Of both together, all slots get as many, give or take one. With fewer granules than slots there
    is nothing to make up for.

    >>> [share_beside(10, 2, 4, s) for s in range(4)]
    [(0, 3), (3, 5), (5, 8), (8, 10)]
    """
    if total < n_slots:
        return share(total, n_slots, slot)
    (begin, end), (other_begin, other_end) = (
        share(n, n_slots, slot) for n in (total + other, other)
    )
    return begin - other_begin, end - other_end


def share_half(total: int, other: int, n_halves: int, half: int) -> tuple[int, int]:
    """The range of one half of a slot's `share_beside`: halves 2 s and 2 s + 1 are slot s.

    >>> [share_half(10, 2, 8, s) for s in range(4)]
    [(0, 2), (2, 3), (3, 4), (4, 5)]
    """
    begin, end = share_beside(total, other, n_halves // 2, half // 2)
    middle = begin + (end - begin + 1) // 2
    return (middle, end) if half % 2 else (begin, middle)
