"""What a trace adds up to: time per operation, and how much of the machine waited.

Every share is a share of SM-time, that is of `n_sm * span`: an SM works, waits for inputs, or
stands outside any task (between tasks, before its first, after its last). Only the consumers count
for that; what ran beside them (`Trace.beside`) has a row among the operations, and no share.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from mkref.trace.events import BEGIN, END, READY, Trace

__all__ = [
    "OpTime", "Shares", "aligned", "by_op", "describe", "format_ns", "n_sms", "shares",
    "slowest_sm",
]  # fmt: skip


@dataclass(frozen=True)
class OpTime:
    """All tasks of one operation: how many, SM-time of work and of waiting, the longest work."""

    op: str
    n_tasks: int
    work_ns: int
    wait_ns: int
    longest_ns: int
    beside: bool = False


@dataclass(frozen=True)
class Shares:
    """Parts of SM-time between 0 and 1; they add up to 1."""

    work: float
    wait: float
    outside: float


def by_op(trace: Trace) -> list[OpTime]:
    """Time per operation, in the order of the operations in a step; unused ones are left out."""
    done = trace.complete
    work = trace.times[:, END] - trace.times[:, READY]
    wait = trace.times[:, READY] - trace.times[:, BEGIN]
    rows = []
    for number, op in enumerate(trace.ops):
        mine = done & (trace.columns["op"] == number)
        if mine.any():
            rows.append(
                OpTime(
                    op,
                    int(mine.sum()),
                    int(work[mine].sum()),
                    int(wait[mine].sum()),
                    int(work[mine].max()),
                    bool(trace.beside[mine].any()),
                )
            )
    return rows


def shares(trace: Trace) -> Shares:
    """Which part of the machine worked, waited, or was outside of any task."""
    total = trace.n_sm * trace.span_ns
    if total == 0:
        return Shares(0.0, 0.0, 1.0)
    rows = [row for row in by_op(trace) if not row.beside]
    work = sum(row.work_ns for row in rows) / total
    wait = sum(row.wait_ns for row in rows) / total
    return Shares(work, wait, 1.0 - work - wait)


def slowest_sm(trace: Trace) -> int:
    """The SM that worked longest: the one that the others wait for, most of the time."""
    done = trace.complete & ~trace.beside
    work = np.where(done, trace.times[:, END] - trace.times[:, READY], 0)
    return int(np.bincount(trace.columns["sm"], weights=work).argmax())


def format_ns(ns: float) -> str:
    """A duration with a fitting unit.

    >>> format_ns(912), format_ns(56_780), format_ns(1_481_000)
    ('912 ns', '56.8 us', '1.48 ms')
    """
    for unit, size in (("s", 1e9), ("ms", 1e6), ("us", 1e3)):
        if ns >= 0.9995 * size:  # 999.6 us would otherwise be rounded to 1e+03 us
            return f"{ns / size:.3g} {unit}"
    return f"{ns:.0f} ns"


def n_sms(n: int) -> str:
    """A number of SMs in words.

    >>> n_sms(1), n_sms(132)
    ('1 SM', '132 SMs')
    """
    return f"{n:,} SM{'' if n == 1 else 's'}"


def aligned(rows: Sequence[Sequence[str]]) -> str:
    """Rows of cells as columns of text: the first to the left, the others to the right.

    >>> print(aligned([("operation", "work"), ("QKV", "56.8 us")]))
    operation     work
    QKV        56.8 us
    """
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join(
        "  ".join(
            cell.ljust(width) if i == 0 else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    )


def describe(trace: Trace) -> str:
    """One sentence that says the same as the picture."""
    part = shares(trace)
    rows = sorted((r for r in by_op(trace) if not r.beside), key=lambda row: -row.work_ns)
    total = sum(row.work_ns for row in rows) or 1
    largest = ", ".join(f"{row.op} {row.work_ns / total:.0%}" for row in rows[:3])
    return (
        f"{trace.n_tasks:,} tasks on {n_sms(trace.n_sm)} in {format_ns(trace.span_ns)}: the SMs "
        f"work {part.work:.0%} of the time and wait {part.wait:.0%}; most work: {largest}."
    )
