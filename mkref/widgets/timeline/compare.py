"""Two runs over one another: the same SMs and the same stretch of time, and where they differ.

For instance a measured step over the simulated one of the same plan, or one step before and after a
change. Both may come from different plans; a task has a counterpart if the other run has one with
the same SM, operation, layer and first row block or slot.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from mkref.errors import RequestError
from mkref.trace.summary import by_op, format_ns, shares
from mkref.widgets.timeline.edges import NOBODY
from mkref.widgets.timeline.model import MAX_LANES, Timeline, timeline

if TYPE_CHECKING:
    from mkref.trace.events import Trace

__all__ = ["LETTERS", "Pair", "counterparts", "describe_pair", "label_of", "pair", "signed"]

LETTERS = ("A", "B")
"""What the two runs are called where there is no room for more."""
SAME = ("sm", "op", "layer", "first")


@dataclass(frozen=True)
class Pair:
    """Two timelines with the same SMs and the same window."""

    a: Timeline
    b: Timeline

    @property
    def traces(self) -> tuple[Trace, Trace]:
        """Both traces."""
        return self.a.trace, self.b.trace


def pair(
    a: Trace,
    b: Trace,
    *,
    sms: Sequence[int] | None = None,
    window: tuple[int, int] | None = None,
    selected: int = NOBODY,
    path: bool = False,
) -> Pair:
    """Choose what to show of two runs.

    Args:
        a, b: the runs.
        sms, window, selected, path: as in `timeline`, chosen by the first run; `selected` is a task
            of it. Without a window the longer of both is shown whole, if it fits.

    Raises:
        RequestError: as `timeline`, or an SM that one of the runs does not have.
    """
    lanes = MAX_LANES // 2
    first = timeline(a, sms=sms, window=window, selected=selected, path=path, lanes=lanes)
    both = min(a.n_sm, b.n_sm)
    shown = [sm for sm in first.sms if sm < both] if sms is None else list(first.sms)
    if max(shown) >= both:
        raise RequestError(
            f"timeline: SM {max(shown)} of runs on {a.n_sm} and {b.n_sm} SMs; "
            f"both have SMs 0 to {both - 1}"
        )
    if window is None:
        whole = first.end >= a.span_ns and selected == NOBODY
        window = (first.begin, max(first.end, b.span_ns) if whole else first.end)
    twin = NOBODY if selected == NOBODY else int(counterparts(a, b)[selected])
    return Pair(
        timeline(a, sms=shown, window=window, selected=selected, path=path),
        timeline(b, sms=shown, window=window, selected=twin, path=path),
    )


def counterparts(a: Trace, b: Trace) -> np.ndarray:
    """int64 [n_tasks of a]: the same task in the other run, `NOBODY` if there is none stamped."""
    numbers = {op: k for k, op in enumerate(a.ops)}
    ops = np.array([numbers.get(op, len(numbers) + k) for k, op in enumerate(b.ops)])

    def keys(trace: Trace, op: np.ndarray) -> list[tuple[int, ...]]:
        columns = [op if name == "op" else trace.columns[name] for name in SAME]
        return list(zip(*(column.tolist() for column in columns), strict=True))

    of_b = keys(b, ops[b.columns["op"]] if len(ops) else b.columns["op"])
    at = {key: i for i, key in enumerate(of_b) if b.complete[i]}
    return np.array([at.get(key, NOBODY) for key in keys(a, a.columns["op"])], dtype=np.int64)


def label_of(trace: Trace) -> str:
    """How its times are known: measured, simulated, ..."""
    return trace.provenance.get("label", "measured")


def signed(new: float, old: float) -> str:
    """A change in percent with its sign.

    >>> signed(110, 100), signed(95, 100), signed(1, 0)
    ('+10.0%', '-5.0%', '-')
    """
    return f"{new / old - 1:+.1%}" if old else "-"


def describe_pair(a: Trace, b: Trace, titles: tuple[str, str] = ("", "")) -> str:
    """Two sentences: how long both took, and which operation's work differs most."""
    names = [
        f"{letter}, {title or trace.where or 'run'} [{label_of(trace)}]"
        for letter, title, trace in zip(LETTERS, titles, (a, b), strict=True)
    ]
    spans = [format_ns(trace.span_ns) for trace in (a, b)]
    waits = [shares(trace).wait for trace in (a, b)]
    text = (
        f"{names[0]}: {spans[0]}, the SMs wait {waits[0]:.0%} of the time. "
        f"{names[1]}: {spans[1]} ({signed(b.span_ns, a.span_ns)}), they wait {waits[1]:.0%}."
    )
    rows_a, rows_b = ({row.op: row.work_ns for row in by_op(trace)} for trace in (a, b))
    both = [op for op in rows_a if op in rows_b]
    if both:
        op = max(both, key=lambda name: abs(rows_b[name] - rows_a[name]))
        if rows_a[op] != rows_b[op]:
            change = signed(rows_b[op], rows_a[op])
            text += f" The work of {op} differs most: {change} from A to B."
    return text
