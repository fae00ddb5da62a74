"""The constants of the simulator's table that the stamps of a trace show directly.

They are medians and means of `bench/simulator_trace.py`, named as in `mkref.simulate.costs.Costs`.
The trace is one of the large geometry, one row at 8,192 tokens of context, with stages.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from bench.simulator_kernels import VERSION_TWO
from bench.simulator_trace import Statistics, hop_times
from mkref.config import NORTH_MINI_CODE
from mkref.machine.source import Ring
from mkref.plan.runtime import attention_items
from mkref.plan.task import Op
from mkref.simulate.costs import H200
from mkref.simulate.situation import Situation
from mkref.simulate.work import CHUNK, TILE_BYTES, Shapes
from mkref.trace.storage import load_trace

if TYPE_CHECKING:
    from bench.simulator_kernels import Kernel
    from mkref.simulate.switches import Switches
    from mkref.trace.events import Trace

__all__ = ["OWN", "SIGNALS", "SITUATION", "read_trace", "shown"]

ROOT = Path(__file__).resolve().parent.parent
SITUATION = Situation.uniform(NORTH_MINI_CODE, [8191])
OWN = (
    "begin", "ready", "announced", "announced_load", "hop_load", "find", "head", "norm", "stage",
    "gap", "block", "tail", "tile_l2", "item", "item_gap", "fresh", "no_item", "merge", "no_merge",
    "embed", "sample",
)  # fmt: skip
"""Times of the kernel's own instructions and hand-overs. All others are of the GPU and of what the
kernels have in common: they are taken from one trace."""
PRODUCTS = (Op.QKV, Op.GATE_UP, Op.O_PROJ, Op.DOWN, Op.HEAD)
SIGNALS = (Op.QKV, Op.ATTENTION, Op.MERGE, Op.GATE_UP, Op.DOWN)


def read_trace(kernel: Kernel = VERSION_TWO) -> tuple[Trace, Kernel, Switches]:
    """A kernel's trace, the kernel, and the switches to simulate it."""
    return load_trace(ROOT / kernel.trace), kernel, replace(kernel.switches_for(8), traced=True)


def shown(
    trace: Trace, kernel: Kernel, switches: Switches, shared: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """What the stamps of a trace show directly; the first arguments as `read_trace` gives them.

    With the constants of another trace in `shared` only those of `OWN`, which differ from kernel to
    kernel.
    """
    plan = kernel.plan(8)
    assert trace.stages is not None, "the trace has no stages"
    ring = Ring(trace.stages.ring.stages, trace.stages.ring.stage_bytes // TILE_BYTES)
    # Of the shapes only the stages count, which do not depend on costs.
    real = Statistics(trace, plan, Shapes(plan.config, 8, ring, SITUATION, H200, switches))
    ops = {op.name: op for op in PRODUCTS}
    norm = _norm(real)
    attention = {"ATTENTION": Op.ATTENTION}
    head = {name: real.head(op) for name, op in (ops | attention).items()}
    head |= {name: max(head[name] - norm, 0.0) for name in ("QKV", "HEAD")}
    stage = {name: real.stage(op) for name, op in ops.items()}
    gap = {name: real.gap(op, new_block=False) for name, op in ops.items()}
    block = {name: real.gap(ops[name], new_block=True) for name in ("QKV", "GATE_UP", "HEAD")}
    block |= dict.fromkeys(("O_PROJ", "DOWN"), block["QKV"])  # there is one at most here
    tail = {name: real.tail(op) for name, op in (ops | attention).items()}
    for table in (head, stage, gap, block, tail):
        table["ROUTER"] = table["QKV"]
    out: dict[str, Any] = {
        "begin": real.between(), "ready": real.at_once(), "norm": norm, "head": head,
        "stage": stage, "gap": gap, "block": block, "tail": tail, "tile_l2": real.slow_tile(),
        "after_land": real.asks_after("landed"), "after_release": real.asks_after("released"),
        "after_issue": real.asks_after("copy"), "next_task": real.asks_after("task"),
        "embed": real.work(real.tasks_of(Op.EMBED)), "sample": real.work(real.tasks_of(Op.SAMPLE)),
    }  # fmt: skip
    out |= _by_items(real, switches.most_splits)
    out |= _hand_overs(real, switches, shared or out, early=kernel.early)
    return {name: out[name] for name in OWN if name in out} if shared else out


def _norm(real: Statistics) -> float:
    """QKV without and with ROUTER before it, which then has normed x; both have two blocks."""
    behind = np.zeros(len(real.op), dtype=bool)
    behind[1:] = real.op[:-1] == Op.ROUTER
    two = real.tasks_of(Op.QKV) & (real.trace.columns["count"] == 2)
    return real.work(two & ~behind) - real.work(two & behind)


def _by_items(real: Statistics, most_splits: int) -> dict[str, float]:
    """Attention and its merge: work of SMs with no, one, two chunks; with the row's last chunk."""
    attention = real.tasks_of(Op.ATTENTION)
    n, last = _chunks(real, attention, most_splits)
    none, one, two = (real.work(attention & (n == k) & ~last) for k in range(3))
    with_last = real.work(attention & (n == 1) & last)
    item = one - real.head(Op.ATTENTION) - real.tail(Op.ATTENTION)
    first, units = real.trace.columns["first"], NORTH_MINI_CODE.q_width // 32
    merge = real.tasks_of(Op.MERGE)
    return {
        "no_item": none, "item": item, "fresh": with_last - one,
        "item_gap": max(two - one - item, 0.0),
        "merge": real.work(merge & (first < units)),  # with one pass
        "no_merge": real.work(merge & (first >= units)),
    }  # fmt: skip


def _chunks(
    real: Statistics, attention: np.ndarray, most_splits: int
) -> tuple[np.ndarray, np.ndarray]:
    """Of every task of attention the number of chunks, and whether the row's last is among them."""
    position, heads = np.array(SITUATION.positions), NORTH_MINI_CODE.num_key_value_heads
    n = np.zeros(len(real.op), dtype=np.int64)
    last = np.zeros(len(real.op), dtype=bool)
    for k in np.flatnonzero(attention):
        task = real.tasks[k]
        items = attention_items(position, task.window, heads, task, most_splits)
        n[k] = len(items)
        last[k] = bool((items.last_key // CHUNK == items.first_key // CHUNK + items.chunk).any())
    return n, last


def _hand_overs(
    real: Statistics, switches: Switches, so_far: Mapping[str, Any], *, early: bool
) -> dict[str, Any]:
    """Hops: with nothing in flight, by a line through those of QKV; what load adds to each, a first
    guess; and the search for experts, which begins after one. In a kernel in which x and the router
    logits announce themselves, what DOWN and ROUTER show is that."""
    hops, ends = hop_times(real.trace, Op.QKV)
    hop = so_far.get("hop") or float(np.polyfit(real.in_flight(ends), hops, 1)[1])
    load = {}
    for op in SIGNALS:
        hops, ends = hop_times(real.trace, op)
        load[op.name] = max(float(hops.mean()) - hop, 0.0) / float(real.in_flight(ends).mean())
    route, flying_then = real.route()
    find = route - so_far["after_land"]
    out: dict[str, Any] = {}
    if early:
        hops, ends = hop_times(real.trace, Op.DOWN, switches.may_miss)
        out["announced"] = float(hops.min())
        flying = float(real.in_flight(ends).mean())
        out["announced_load"] = (float(hops.mean()) - out["announced"]) / flying
        load["DOWN"] = load["MERGE"]
        find -= out["announced"] + out["announced_load"] * flying_then
    else:
        find -= hop + load["QKV"] * flying_then
    # Hops that this trace does not show: as those of an operation that stores as much.
    load |= dict.fromkeys(("EMBED", "ROUTER", "HEAD"), load["QKV"]) | {"O_PROJ": load["DOWN"]}
    return out | {"hop": hop, "hop_load": load, "find": find}
