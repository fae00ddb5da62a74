"""Two records of the same plan side by side: a measured step and a simulated one, or two runs.

Tasks that stand for the same work (equal SM, operation, layer and first row block or slot) are
pairs. Over the pairs: what waits and work are in each, per operation; how long a layer takes; and
how much of the time of each task lies where the other record has it too. To see them, give both to
`mkref.widgets.sm_timeline`.

What it does not do: decide which of the two is right.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np

from mkref.errors import RequestError
from mkref.trace.events import BEGIN, END, READY
from mkref.trace.summary import aligned, format_ns

if TYPE_CHECKING:
    from mkref.trace.events import Trace

__all__ = ["Comparison", "OpDifference", "compare"]

SAME = ("sm", "layer", "first")
OUTSIDE = ("EMBED", "HEAD", "SAMPLE")
"""Operations of no layer."""


@dataclass(frozen=True)
class OpDifference:
    """One operation in two records; means over the pairs, in ns.

    Attributes:
        op: its name.
        n: pairs.
        wait: in the first record and in the second.
        work: in the first record and in the second.
        spread: standard deviation of the work in each.
    """

    op: str
    n: int
    wait: tuple[float, float]
    work: tuple[float, float]
    spread: tuple[float, float]


@dataclass(frozen=True, eq=False)
class Comparison:
    """Two records and their pairs.

    Attributes:
        a, b: the records.
        pairs: int64 [n, 2], numbers of the tasks in each that are the same work.
    """

    a: Trace
    b: Trace
    pairs: np.ndarray

    @property
    def span_error(self) -> float:
        """How much longer the second step is than the first: 0.02 is 2 %."""
        return self.b.span_ns / self.a.span_ns - 1

    @cached_property
    def _times(self) -> tuple[np.ndarray, np.ndarray]:
        return self.a.times[self.pairs[:, 0]], self.b.times[self.pairs[:, 1]]

    def by_op(self) -> list[OpDifference]:
        """In the order of the operations in a step."""
        ops = self.a.columns["op"][self.pairs[:, 0]]
        rows = []
        for number, op in enumerate(self.a.ops):
            mine = ops == number
            if not mine.any():
                continue
            waits, works, spreads = [], [], []
            for times in self._times:
                work = (times[:, END] - times[:, READY])[mine]
                waits.append(float((times[:, READY] - times[:, BEGIN])[mine].mean()))
                works.append(float(work.mean()))
                spreads.append(float(work.std()))
            rows.append(
                OpDifference(
                    op, int(mine.sum()), (waits[0], waits[1]), (works[0], works[1]),
                    (spreads[0], spreads[1]),
                )
            )  # fmt: skip
        return rows

    def layers(self) -> np.ndarray:
        """float64 [n_layers - 1, 2], ns from the end of each layer to that of the next."""
        layer = self.a.columns["layer"][self.pairs[:, 0]]
        outside = [k for k, op in enumerate(self.a.ops) if op in OUTSIDE]
        layer = np.where(np.isin(self.a.columns["op"][self.pairs[:, 0]], outside), -1, layer)
        used = [k for k in np.unique(layer) if k >= 0]
        ends = [[times[layer == k, END].max() for times in self._times] for k in used]
        return np.diff(np.array(ends, dtype=np.float64).reshape(-1, 2), axis=0)

    def overlap(self) -> float:
        """The part of all work, 0 to 1, that is at the same time in both records."""
        first, second = self._times
        begin = np.maximum(first[:, READY], second[:, READY])
        both = np.maximum(np.minimum(first[:, END], second[:, END]) - begin, 0).sum()
        each = [(times[:, END] - times[:, READY]).sum() for times in (first, second)]
        return float(2 * both / max(sum(each), 1))

    def describe(self) -> str:
        """One sentence."""
        names = [t.where or t.provenance.get("label", "measured") for t in (self.a, self.b)]
        labels = [t.provenance.get("label", "measured") for t in (self.a, self.b)]
        first, second = (f"{n} [{label}]" for n, label in zip(names, labels, strict=True))
        return (
            f"{first}: {format_ns(self.a.span_ns)}; {second}: {format_ns(self.b.span_ns)}, "
            f"{self.span_error:+.1%}; {len(self.pairs):,} tasks are in both."
        )

    def report(self) -> str:
        """The sentence and a table: time per operation in both records."""
        cells = [
            (
                row.op, str(row.n), *(format_ns(ns) for ns in (*row.wait, *row.work)),
                f"{row.work[1] / row.work[0] - 1:+.1%}" if row.work[0] else "-",
            )
            for row in self.by_op()
        ]  # fmt: skip
        head = ("operation", "pairs", "wait a", "wait b", "work a", "work b", "work b to a")
        return f"{self.describe()}\n\n{aligned([head, *cells])}"


def compare(record_a: Trace, record_b: Trace) -> Comparison:
    """Pair the tasks of two records.

    Args:
        record_a: for instance the measured step.
        record_b: for instance the simulated one.

    Raises:
        RequestError: they have no task in common.
    """
    of_b = {key: i for i, key in _keys(record_b)}
    pairs = [(i, of_b[key]) for i, key in _keys(record_a) if key in of_b]
    if not pairs:
        raise RequestError(
            "compare: no task of one record is in the other; give two records of the same plan"
        )
    return Comparison(record_a, record_b, np.array(pairs, dtype=np.int64))


def _keys(trace: Trace) -> list[tuple[int, tuple[object, ...]]]:
    """Number and identity of every task that was stamped completely."""
    columns = [trace.columns[name].tolist() for name in SAME]
    names = [trace.ops[op] for op in trace.columns["op"].tolist()]
    identities = list(zip(names, *columns, strict=True))
    return [(int(i), identities[i]) for i in np.flatnonzero(trace.complete)]
