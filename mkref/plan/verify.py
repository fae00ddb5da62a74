"""Prove a plan before it is launched.

    words      opcodes, ranges, operands that the geometry fixes, weights inside the packed array
    counters   as many arrivals as every wait asks for
    coverage   every row block, slot and vocabulary row has exactly one owner
    release    the place of the experts is given back, and not too early
    layers     follow each other; the last task of each is marked
    progress   no cycle: the plan runs to its end
    order      every read after its writes, every reuse of memory after its last readers, within a
               step and from step to step, for the loaders too; no counter gets an arrival early
    buffers    everything fits

The number of rows of a launch chooses who does MERGE, the helper or the consumers, and whether x is
read before its counter or after it. What depends on it (layers, progress, order) is proved for each
of the three kinds.

A plan that passes computes the same in every order in which its SMs may run, and never hangs; also
when it is run again and again in one launch, with nothing between two steps but the order of each
SM's list.

What it does not do: check numbers, or the kernel. The model of the kernel is `mkref.plan.effects`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from itertools import islice
from typing import TYPE_CHECKING

import numpy as np

from mkref.errors import PlanError
from mkref.plan.balance import Balance, balance
from mkref.plan.buffers import Buffer, buffer_table
from mkref.plan.capacity import check_buffers, check_pool
from mkref.plan.checks import (
    check_counters,
    check_operands,
    check_words,
)
from mkref.plan.clocks import run_clocks
from mkref.plan.coverage import check_coverage
from mkref.plan.effects import KINDS
from mkref.plan.hazards import check_arrivals, check_order
from mkref.plan.sequence import check_layers, check_release
from mkref.plan.table import TaskTable
from mkref.plan.task import Op

if TYPE_CHECKING:
    from mkref.plan.build import Plan

__all__ = ["Report", "check_place", "check_places", "verify"]

SHOWN = 4
"""Violations that one error names."""


@dataclass(frozen=True)
class Report:
    """What a verified plan consists of.

    Attributes:
        n_sm, n_tasks, n_counters: sizes.
        tasks_per_op: operation name -> number of tasks.
        balance: bytes per SM and operation for one row.
        buffer_bytes: bytes of all buffers but weights and KV cache; 0 without a `max_context`.
    """

    n_sm: int
    n_tasks: int
    n_counters: int
    tasks_per_op: dict[str, int] = field(default_factory=dict)
    balance: Balance = field(default_factory=lambda: Balance(1, 1, {}))
    buffer_bytes: int = 0

    def lines(self) -> list[str]:
        """The report as text."""
        out = [
            f"{self.n_tasks} tasks on {self.n_sm} SMs, {self.n_counters} counters: no violation",
            ", ".join(f"{n} {name}" for name, n in self.tasks_per_op.items() if n),
        ]
        if self.buffer_bytes:
            out.append(f"buffers without weights and KV cache: {self.buffer_bytes / 1e6:.1f} MB")
        out.append(f"one step of one row, token {self.balance.context} of its sequence, streams:")
        return out + self.balance.lines()


def verify(
    plan: Plan, max_context: int | None = None, *, buffers: Mapping[str, Buffer] | None = None
) -> Report:
    """Check everything that can be checked before a launch.

    Args:
        plan: built or loaded.
        max_context: longest sequence in tokens; None leaves out what depends on it.
        buffers: what a machine has allocated; default: `mkref.plan.buffers.buffer_table`.

    Raises:
        PlanError: the first violations, each naming SM, task, operation, layer and what is wrong.
    """
    table = TaskTable(plan)
    _refuse(check_words(table))
    _refuse(check_operands(table))
    _refuse(check_counters(table))
    _refuse(check_coverage(table))
    _refuse(check_release(table))
    _refuse(check_places(table))
    _refuse(check_pool(table, max_context))
    n_bytes = 0
    if max_context is not None:
        given = buffer_table(plan, max_context) if buffers is None else buffers
        _refuse(check_buffers(table, max_context, given))
        n_bytes = sum(b.n_bytes for name, b in given.items() if name not in ("weights", "kv"))
    counts = np.bincount(table["op"], minlength=len(Op))
    return Report(
        n_sm=plan.n_sm,
        n_tasks=len(table),
        n_counters=len(plan.counters),
        tasks_per_op={op.name: int(counts[op]) for op in Op},
        balance=balance(table, rows=1, context=max_context or 1),
        buffer_bytes=n_bytes,
    )


def check_places(table: TaskTable) -> list[str]:
    """The violations in all kinds of launches; what is wrong in some only says in which."""
    found = {}
    for helped, early in KINDS:
        who = "the helper does" if Op.MERGE in helped else "the consumers do"
        kind = f"where {who} MERGE{' and x is read early' if early else ''}: "
        found[kind] = check_place(table.with_helped(helped, early))
    return list(
        dict.fromkeys(
            text if all(text in others for others in found.values()) else where + text
            for where, texts in found.items()
            for text in texts
        )
    )


def check_place(table: TaskTable) -> list[str]:
    """What depends on the kind of launch: layers, progress, order; the first violations found.

    Args:
        table: its words are those of a plan that has passed the checks before.
    """
    found = list(check_layers(table))
    if found:
        return found
    try:
        clocks = run_clocks(table)
    except PlanError as circle:
        return [str(circle)]
    return list(check_order(table, clocks)) or list(check_arrivals(table, clocks))


def _refuse(violations: Iterable[str]) -> None:
    found = list(islice(violations, SHOWN + 1))
    if found:
        more = ["..."] if len(found) > SHOWN else []
        raise PlanError("\n  ".join([f"plan: {found[0]}", *found[1:SHOWN], *more]))
