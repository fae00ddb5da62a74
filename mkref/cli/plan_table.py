"""What a plan asks of its SMs: per operation tasks, bytes to stream, counters.

Bytes are those of `mkref.plan.balance`: weights and KV pages that the loaders copy in one step of a
stated batch, every row with experts of its own.

What it does not do: know times (`mkref trace` does), or write anything.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from mkref.plan.balance import balance
from mkref.plan.task import NO_COUNTER, Op

if TYPE_CHECKING:
    from mkref.plan.build import Plan

__all__ = ["OpRow", "format_rows", "op_rows"]


@dataclass(frozen=True)
class OpRow:
    """One operation of a plan, all layers together.

    Attributes:
        tasks: on all SMs.
        min_bytes, max_bytes: streamed in one step by the SM with the least and with the most.
        total_bytes: streamed by all SMs.
        counters: distinct counters that it signals.
        arrivals: signals in one step.
    """

    op: str
    tasks: int
    min_bytes: int
    max_bytes: int
    total_bytes: int
    counters: int
    arrivals: int

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self)


def op_rows(plan: Plan, *, rows: int = 1, context: int = 1) -> list[OpRow]:
    """One row per operation in the order of a step, and "all" as the last.

    Args:
        plan: a plan that `verify` accepts.
        rows, context: the batch for which bytes are counted.
    """
    streamed = balance(plan, rows=rows, context=context)
    nothing = [0] * plan.n_sm
    signals: dict[int, list[int]] = {op: [] for op in Op}
    tasks = dict.fromkeys(Op, 0)
    for _, _, task in plan:
        op = Op(task.op)
        tasks[op] += 1
        if task.signal != NO_COUNTER:
            signals[op].append(task.signal)

    def row(name: str, n_tasks: int, per_sm: Any, signalled: list[int]) -> OpRow:
        loads = [int(b) for b in per_sm]
        n_counters, n_arrivals = len(set(signalled)), len(signalled)
        return OpRow(name, n_tasks, min(loads), max(loads), sum(loads), n_counters, n_arrivals)

    table = [
        row(op.name, tasks[op], streamed.bytes.get(op.name, nothing), signals[op]) for op in Op
    ]
    everything = [counter for op in Op for counter in signals[op]]
    return [*table, row("all", plan.n_tasks, streamed.total(), everything)]


def format_rows(rows: list[OpRow]) -> str:
    """The rows as a text table."""
    widths = (10, 8, 18, 14, 16, 10, 10)
    names = ("operation", "tasks", "bytes per SM: min", "max", "all SMs", "counters", "arrivals")
    lines = ["".join([names[0].ljust(widths[0]), *map(str.rjust, names[1:], widths[1:])])]
    for row in rows:
        values = [f"{value:,}" for value in list(row.to_dict().values())[1:]]
        lines.append("".join([row.op.ljust(widths[0]), *map(str.rjust, values, widths[1:])]))
    return "\n".join(lines)
