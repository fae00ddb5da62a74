"""Pictures of lesson 11: what is asked for while consumers wait, and simulated kernels that differ
in how far their loader goes."""

from __future__ import annotations

from collections import Counter
from functools import cache

import numpy as np

from mkref.config import NORTH_MINI_CODE
from mkref.lessons.lesson_11 import RECORD
from mkref.lessons.recorded import recorded_trace
from mkref.machine.source import ring_for
from mkref.trace.events import BEGIN, ISSUED, READY
from mkref.widgets.bars import Bar, bar_chart
from mkref.widgets.figure import Figure, Table
from mkref.widgets.hardware import BANDWIDTHS

__all__ = ["asked_before_ready", "asked_while_waiting", "copy_ns", "last_of_qkv", "qkv_stages"]
__all__ += ["ring_stages", "simulated_ms", "stages_in_flight", "sweep"]

N_SM, CONTEXT, PAGES = 132, 8192, 200
CLOSE = 0.02
"""Steps that differ by less cannot be told apart by the simulator."""
SHOWN = ("QKV", "ATTENTION", "MERGE", "GATE_UP", "O_PROJ", "DOWN")


def asked_before_ready(op: str) -> float:
    """Share of an operation's tasks whose last byte was asked for before their inputs were there;
    in the recorded step."""
    trace = recorded_trace(RECORD)
    chosen = trace.complete & (trace.columns["op"] == trace.ops.index(op))
    times = trace.times[chosen]
    return float((times[:, ISSUED] < times[:, READY]).mean())


def copy_ns(percent: float) -> float:
    """ns from the question to the answer that so many percent of recorded copies do not exceed."""
    stages = recorded_trace(RECORD).stages
    assert stages is not None
    return float(np.percentile(stages.landed() - stages.times[:, 0], percent))


def stages_in_flight(latency_ns: float, n_sm: int = N_SM) -> float:
    """Stages that each SM must have in flight on an H200 at that latency; not rounded."""
    stages = recorded_trace(RECORD).stages
    assert stages is not None
    rate = BANDWIDTHS["h200"].bytes_per_s
    return rate * latency_ns * 1e-9 / n_sm / stages.ring.stage_bytes


def ring_stages(rows: int) -> int:
    """Stages of the ring in the kernel's build for a step of so many rows, on an H200."""
    from mkref.simulate.run import SHARED_BYTES

    return ring_for(NORTH_MINI_CODE, SHARED_BYTES, rows).stages


def qkv_stages() -> dict[int, int]:
    """How many SMs of the recorded step have so many stages of QKV in every layer."""
    trace = recorded_trace(RECORD)
    assert trace.stages is not None
    # Of one layer; the plan of all is the same.
    chosen = (trace.columns["op"] == trace.ops.index("QKV")) & (trace.columns["layer"] == 0)
    block_bytes = 16 * NORTH_MINI_CODE.hidden_size * 2
    each = block_bytes // trace.stages.ring.stage_bytes
    found = Counter((trace.columns["count"][chosen] * each).tolist())
    return dict(sorted(found.items()))


def last_of_qkv() -> tuple[float, float]:
    """When the last stage of QKV was asked for, and when the first of them was used up, in us after
    x was there: medians of the recorded SMs whose QKV takes the whole ring."""
    trace = recorded_trace(RECORD)
    stages = trace.stages
    assert stages is not None
    n = max(qkv_stages())
    qkv = trace.complete & (trace.columns["op"] == trace.ops.index("QKV"))
    most = trace.columns["count"] == trace.columns["count"][qkv].max()
    asked, used_up = [], []
    for sm in stages.sms:
        issued, released = (stages.times[stages.sm == sm, column] for column in (0, 3))
        tasks = trace.times[qkv & most & (trace.columns["sm"] == sm)]
        # The loader stamps a task after its last copy.
        last = np.searchsorted(issued, tasks[:, ISSUED], side="right") - 1
        inside = last >= n - 1
        last, ready = last[inside], tasks[inside, READY]
        asked += (issued[last] - ready).tolist()
        used_up += (released[last - n + 1] - ready).tolist()
    return float(np.median(asked)) / 1e3, float(np.median(used_up)) / 1e3


def asked_while_waiting() -> Figure:
    """KB that a loader asked for while its consumers waited for an operation, per layer."""
    trace = recorded_trace(RECORD)
    stages = trace.stages
    assert stages is not None
    per_layer = len(stages.sms) * NORTH_MINI_CODE.num_hidden_layers
    stage_kb = stages.ring.stage_bytes / 1e3
    bars, rows, said = [], [], []
    for op in SHOWN:
        n, us = 0, 0.0
        for sm in stages.sms:
            asked = stages.times[stages.sm == sm, 0]
            mine = trace.complete & (trace.columns["sm"] == sm)
            times = trace.times[mine & (trace.columns["op"] == trace.ops.index(op))]
            begin, ready = np.searchsorted(asked, times[:, BEGIN : READY + 1].T)
            n += int((ready - begin).sum())
            us += float((times[:, READY] - times[:, BEGIN]).sum()) / 1e3
        kb = n * stage_kb / per_layer
        text = f"{kb:.0f} KB in {us / per_layer:.1f} us of waiting [measured]"
        bars.append(Bar(op, kb, text, "#E69F00", "vertical"))
        rows.append((op, f"{us / per_layer:.2f}", f"{kb:.1f}"))
        said.append(f"{op} {kb:.0f}")
    sentence = (
        "KB, at most, that the loader of an SM asked for while its consumers waited for an "
        f"operation, per layer, {trace.where} [measured]: {', '.join(said)}."
    )
    chart = bar_chart(bars, title=sentence, head="the consumers wait, the loader asks")
    return Figure(chart, sentence, Table(("waits for", "waits, us", "asked for, KB"), tuple(rows)))


@cache
def simulated_ms(in_flight: int, *, run_ahead: bool = True) -> float:
    """Milliseconds of a simulated step with one row, with so many stages in flight at most."""
    from mkref.plan import build_plan
    from mkref.simulate.run import simulate
    from mkref.simulate.situation import Situation
    from mkref.simulate.switches import Switches

    config = NORTH_MINI_CODE
    plan = build_plan(config, N_SM, full_pages=PAGES, sliding_pages=PAGES)
    situation = Situation.uniform(config, [CONTEXT - 1])
    switches = Switches(in_flight=in_flight, run_ahead=run_ahead)
    return simulate(plan, situation, switches=switches).ms


def sweep(most: int = 4) -> Figure:
    """Simulated steps with one to `most` stages in flight, and with the whole ring."""
    ring = ring_stages(1)
    found = {n: simulated_ms(n) for n in (*range(1, most + 1), ring)}
    best = min(found, key=lambda n: found[n])
    bars, rows = [], []
    for n, ms in found.items():
        more = ms / found[best] - 1
        text = "the shortest [simulated]" if n == best else f"{more:.1%} longer [simulated]"
        color, pattern = ("#009E73", "plain") if more < CLOSE else ("#56B4E9", "diagonal")
        bars.append(Bar(f"{n} in flight", 1 + more, text, color, pattern))
        rows.append((str(n), f"{ms:.3f}", f"{more:.1%}"))
    said = ", ".join(f"{n}: {ms:.3f} ms" for n, ms in found.items())
    close = [str(n) for n, ms in found.items() if ms < (1 + CLOSE) * found[best]]
    sentence = (
        f"Step with one row and a ring of {ring} stages, by stages in flight at most [simulated]: "
        f"{said}. Within {CLOSE:.0%} of the shortest, and so within the simulator's error: "
        f"{', '.join(close)}."
    )
    chart = bar_chart(bars, title=sentence, head="time of a step, relative to the best")
    return Figure(chart, sentence, Table(("in flight", "ms", "longer by"), tuple(rows)))
