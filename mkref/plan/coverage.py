"""Check that the owners of every operation's work cover all of it, and each part once.

What it does not do: look at who waits for whom.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import numpy as np

from mkref.plan.effects import ROW_OPS, SLOT_OPS, layers_of, row_blocks
from mkref.plan.task import Op

if TYPE_CHECKING:
    from mkref.plan.table import Ints, TaskTable

__all__ = ["check_coverage"]


def check_coverage(table: TaskTable) -> Iterator[str]:
    """Row blocks and slots of every operation and layer are owned exactly once."""
    config = table.plan.config
    for op in Op:
        for layer in layers_of(config, op):
            mine = table.group(op, layer)
            if op in SLOT_OPS:
                yield from _cover_slots(table, mine, op, layer)
            elif op in ROW_OPS:
                yield from _cover_rows(table, mine, op, layer)
    heads = table.group(Op.HEAD, config.num_hidden_layers)
    yield from _cover_entries(table, heads, table["index"][heads], len(heads), "slot of the bests")
    samples = np.flatnonzero(table["op"] == Op.SAMPLE)
    times = np.bincount(table.sm[samples], minlength=table.plan.n_sm)
    for sm in np.flatnonzero(times != 1):
        yield (
            f"SM {sm}: {times[sm]} SAMPLE tasks, there must be one on every SM; it finds the "
            "tokens of this SM's next step, and whether there is one"
        )
    for record in samples[table["index"][samples] != len(heads)]:
        yield (
            f"{table.place(record)}: reads {table['index'][record]} slots of the bests, "
            f"{len(heads)} HEAD tasks fill them"
        )


def _cover_rows(table: TaskTable, mine: Ints, op: Op, layer: int) -> Iterator[str]:
    total = row_blocks(table.plan.config, op)
    mine = mine[table["count"][mine] > 0]
    order = mine[np.argsort(table["first"][mine], kind="stable")]
    begin = table["first"][order]
    end = begin + table["count"][order]
    expected = np.concatenate([[0], end])  # where each task must begin, and the total at the end
    for i in np.flatnonzero(expected != np.concatenate([begin, [total]])):
        missing = f"{op.name} of layer {layer}: row blocks {expected[i]}.."
        if i == len(order):
            yield f"{missing}{total - 1} belong to nobody"
        elif begin[i] > expected[i]:
            yield f"{missing}{begin[i] - 1} belong to nobody"
        else:
            yield (
                f"{table.place(order[i])}: row block {begin[i]} belongs to "
                f"{table.place(order[i - 1])} too"
            )


def _cover_slots(table: TaskTable, mine: Ints, op: Op, layer: int) -> Iterator[str]:
    if not len(mine):
        yield f"{op.name} of layer {layer}: there is no such task"
        return
    total = int(table["count"][mine[0]])
    for record in mine[table["count"][mine] != total]:
        yield (
            f"{table.place(record)}: one of {table['count'][record]} slots, "
            f"but {table.place(mine[0])} says {total}"
        )
        return
    yield from _cover_entries(table, mine, table["first"][mine], total, f"{op.name} slot")


def _cover_entries(
    table: TaskTable, mine: Ints, entries: Ints, total: int, what: str
) -> Iterator[str]:
    outside = (entries < 0) | (entries >= total)
    for record in mine[outside]:
        yield f"{table.place(record)}: {what} {entries[mine == record][0]} of {total}"
    times = np.bincount(entries[~outside], minlength=total)
    for entry in np.flatnonzero(times != 1):
        owners = mine[entries == entry]
        layer = f"layer {table['layer'][mine[0]]}"
        if len(owners):
            yield f"{table.place(owners[1])}: {what} {entry} is {table.place(owners[0])}'s too"
        else:
            yield f"{layer}: {what} {entry} of {total} belongs to nobody"
