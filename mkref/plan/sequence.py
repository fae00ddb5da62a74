"""Checks of each SM's list by itself: its layers, and the flags that say which task is the last.

What it does not do: look at other SMs (`mkref.plan.hazards`).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import numpy as np

from mkref.plan.effects import ROUTED
from mkref.plan.task import Flag, Op

if TYPE_CHECKING:
    from mkref.plan.table import TaskTable

__all__ = ["check_layers", "check_release"]


def check_release(table: TaskTable) -> Iterator[str]:
    """Flag.RELEASE stands on the SM's last routed task of each layer and nowhere else."""
    routed = np.flatnonzero(np.isin(table["op"], list(ROUTED)))
    sm, layer = table.sm[routed], table["layer"][routed]
    # The next routed task of the same SM belongs to another layer, or there is none.
    last = np.ones(len(routed), dtype=bool)
    last[:-1] = (sm[1:] != sm[:-1]) | (layer[1:] != layer[:-1])
    has = (table["flags"][routed] & Flag.RELEASE) != 0
    for record in routed[last & ~has]:
        yield (
            f"{table.place(record)}: Flag.RELEASE is missing; it is the SM's last task that uses "
            "the layer's experts, and the loader would wait for ever"
        )
    for record in routed[~last & has]:
        yield (
            f"{table.place(record)}: Flag.RELEASE, but a later task of this SM still uses the "
            "layer's experts"
        )


def check_layers(table: TaskTable) -> Iterator[str]:
    """Every SM goes layer by layer to its SAMPLE; its consumers' last has Flag.LAST_OF_LAYER."""
    sm, layer, op = table.sm, table["layer"], table["op"]
    n = len(table)
    ends = np.ones(n, dtype=bool)
    ends[:-1] = sm[1:] != sm[:-1]
    begins = np.roll(ends, 1)
    for record in np.flatnonzero(begins & (layer != 0)):
        yield f"{table.place(record)}: the first task of an SM, must be of layer 0"
    for record in np.flatnonzero(ends & (op != Op.SAMPLE)):
        yield f"{table.place(record)}: the last task of an SM, must be its SAMPLE"
    step = np.zeros_like(layer)
    step[1:] = np.where(begins[1:], 0, layer[1:] - layer[:-1])
    for record in np.flatnonzero((step < 0) | (step > 1)):
        yield f"{table.place(record)}: comes after a task of layer {layer[record - 1]}"
    # The helper divides the work of GATE_UP once per layer.
    shares = np.flatnonzero(op == Op.GATE_UP)
    slot = table["first"][shares] // 2
    other = (np.diff(sm[shares]) == 0) & (np.diff(layer[shares]) == 0) & (np.diff(slot) != 0)
    for record in shares[1:][other]:
        yield f"{table.place(record)}: is of another share than the SM's GATE_UP before it"
    # The helper does not look at the flag.
    seen = np.flatnonzero(~table.by_helper())
    next_layer = np.diff(layer[seen]) != 0
    last = np.zeros(n, dtype=bool)
    last[seen] = np.append((np.diff(sm[seen]) != 0) | next_layer, True)
    for record in np.flatnonzero(last != ((table["flags"] & Flag.LAST_OF_LAYER) != 0)):
        what = " is missing at" if last[record] else ", but this is not"
        yield (
            f"{table.place(record)}: Flag.LAST_OF_LAYER{what} the consumers' last task of "
            "the layer; after that, they fetch the gamma of the next"
        )
