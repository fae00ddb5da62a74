"""Pictures of lesson 10: granules of a layer on the SMs, and what was waited for in a real step."""

from __future__ import annotations

from collections import Counter

import numpy as np

from mkref.config import NORTH_MINI_CODE
from mkref.lessons.lanes import IDLE
from mkref.lessons.recorded import bench_record, recorded_trace
from mkref.plan.share import share, share_beside
from mkref.trace.events import BEGIN, END, READY
from mkref.widgets.bars import Bar, bar_chart
from mkref.widgets.figure import Figure, Table

__all__ = ["KB", "granules", "ladder_ms", "slowest", "spread", "waits_by_op", "way"]

N_SM = 132
KB = NORTH_MINI_CODE.hidden_size * 16 * 2 // 1024
"""Of a row block of the router or of q, k, v, and of a granule of gate and up: they are equal."""
RECORD = "trace_north_h200.json.gz"
SHOWN = ("QKV", "ATTENTION", "GATE_UP", "MERGE", "O_PROJ", "DOWN")


def granules(way: str, n_sm: int = N_SM) -> list[int]:
    """Granules of router, q, k, v, gate and up that every SM has in a layer, one row.

    Args:
        way: "each for itself" or "beside".
        n_sm: SMs.
    """
    c = NORTH_MINI_CODE
    router, qkv = c.num_experts // 16, (c.q_width + 2 * c.kv_width) // 16
    gate_up = c.num_experts_per_tok * c.intermediate_size // 8
    counts = []
    for sm in range(n_sm):
        if way == "beside":
            ranges = [
                share(router + qkv, n_sm, sm),
                share_beside(gate_up, router + qkv, n_sm, sm),
            ]
        else:
            ranges = [share(total, n_sm, sm) for total in (router, qkv, gate_up)]
        counts.append(sum(end - begin for begin, end in ranges))
    return counts


def spread() -> Figure:
    """How many SMs have how many granules, with shares each for itself and beside each other."""
    bars, rows, said = [], [], []
    for way, color, pattern in (
        ("each for itself", "#E69F00", "diagonal"),
        ("beside", "#009E73", "plain"),
    ):
        counts = granules(way)
        for number, sms in sorted(Counter(counts).items()):
            text = f"{sms} SMs, {number * KB} KB each [derived]"
            bars.append(Bar(f"{way}: {number} granules", sms, text, color, pattern))
            rows.append((way, str(number), str(sms)))
        mean = sum(counts) / len(counts)
        said.append(f"{way} {min(counts)} to {max(counts)}, mean {mean:.1f}")
    sentence = (
        f"Granules of {KB} KB per SM, router, q, k, v, gate and up of one layer, one row on {N_SM} "
        f"SMs [derived]: {'; '.join(said)}."
    )
    chart = bar_chart(bars, title=sentence, head="SMs by what they have to read")
    return Figure(chart, sentence, Table(("shares", "granules", "SMs"), tuple(rows)))


def slowest(op: str) -> tuple[float, float]:
    """Mean and longest work of an operation in the recorded step, us; means over layers."""
    trace = recorded_trace(RECORD)
    chosen = trace.complete & (trace.columns["op"] == trace.ops.index(op))
    work = (trace.times[chosen, END] - trace.times[chosen, READY]) / 1e3
    layer = trace.columns["layer"][chosen]
    each = [work[layer == number] for number in np.unique(layer)]
    return float(work.mean()), float(np.mean([one.max() for one in each]))


def way(before: str, after: str) -> tuple[float, float]:
    """What lies between two operations in the recorded step, us; means over layers.

    Args:
        before: an operation that all SMs must have ended.
        after: the one that waits for it.

    Returns:
        How much later the slowest SM ends `before` than the mean one, and from then until the
        first SM may begin `after`: the hop. (Others may still be at work when it arrives.)
    """
    trace = recorded_trace(RECORD)
    chosen = [
        trace.complete & (trace.columns["op"] == trace.ops.index(op)) for op in (before, after)
    ]
    late, hop = [], []
    for layer in np.unique(trace.columns["layer"][chosen[0]]):
        here = trace.columns["layer"] == layer
        ends, starts = (
            trace.times[rows & here, stamp] / 1e3
            for rows, stamp in zip(chosen, (END, READY), strict=True)
        )
        late.append(ends.max() - ends.mean())
        hop.append(starts.min() - ends.max())
    return float(np.mean(late)), float(np.mean(hop))


def waits_by_op() -> Figure:
    """How long an SM's consumers waited in a layer of the recorded step, by operation."""
    trace = recorded_trace(RECORD)
    layers = NORTH_MINI_CODE.num_hidden_layers
    bars, rows, said = [], [], []
    for op in SHOWN:
        chosen = trace.complete & ~trace.beside & (trace.columns["op"] == trace.ops.index(op))
        times = trace.times[chosen] / 1e3 / (layers * trace.n_sm)
        waited = float((times[:, READY] - times[:, BEGIN]).sum())
        worked = float((times[:, END] - times[:, READY]).sum())
        text = f"{waited:.1f} us, then {worked:.1f} us of work [measured]"
        bars.append(Bar(op, waited, text, IDLE.color, IDLE.pattern))
        rows.append((op, f"{waited:.2f}", f"{worked:.2f}"))
        said.append(f"{op} {waited:.1f}")
    sentence = (
        f"Waiting before each operation, us per layer, mean of {trace.n_sm} SMs, {trace.where} "
        f"[measured]: {', '.join(said)}."
    )
    chart = bar_chart(bars, title=sentence, head="what the consumers waited for")
    return Figure(chart, sentence, Table(("operation", "waits, us", "work, us"), tuple(rows)))


def ladder_ms(batch: int) -> dict[str, float]:
    """Milliseconds per step of the best variant of every rung, by its letter."""
    rows = bench_record("h200/ladder.json")["rows"]
    return {
        row["rung"]: row["ms_per_step"] for row in rows if row["batch"] == batch and row["best"]
    }
