"""Fit the simulator's table of times to the records of the H200, and write it.

    python bench/fit_simulator.py [--trace FILE]

Three kinds of constants, in this order: what the stamps of the trace show directly
(`bench/simulator_trace.py`); bandwidth, latency and chance of the memory, with which a simulated
trace is as long and as uneven as the recorded one; and one constant for each case of `FITTED_ON`, found from
that case alone. Writes `mkref/simulate/h200.json`. `bench/validate_simulator.py` then says how far
predictions are off.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from bench.simulator_cases import FITTED_ON, cases, plan_for
from bench.simulator_trace import Statistics, hop_times
from mkref.config import NORTH_MINI_CODE
from mkref.machine.source import Ring
from mkref.plan.runtime import chunk_counts
from mkref.plan.task import Op
from mkref.simulate.compare import OpDifference, compare
from mkref.simulate.costs import FILE, Costs
from mkref.simulate.program import Part
from mkref.simulate.run import end_of, simulate, simulate_parts
from mkref.simulate.situation import Situation
from mkref.simulate.switches import Switches
from mkref.simulate.work import Shapes
from mkref.trace.storage import load_trace

if TYPE_CHECKING:
    from mkref.trace.events import Trace

TRACE = "notebooks/data/trace_north_h200.json.gz"
CONTEXT = 8192
TRACED = Switches(traced=True)
SITUATION = Situation.uniform(NORTH_MINI_CODE, [CONTEXT - 1])
SIGNALS = (Op.QKV, Op.ATTENTION, Op.MERGE, Op.GATE_UP, Op.DOWN)
ROUNDS = 4
PRODUCTS = (Op.QKV, Op.GATE_UP, Op.O_PROJ, Op.DOWN, Op.HEAD)
ASSUMED: dict[str, Any] = {
    "link": 110.0,  # 64 bytes a clock
    "find_row": 1000.0,
    "norm_rows": 600.0,
    "dense": 300.0,
    "merge_unit": 0.5,  # of a panel; scaled with it
}
"""What no record shows. Their influence is small: `bench/validate_simulator.py --halve NAME`."""
START = {
    "bandwidth": 4500.0, "latency": 300.0, "jitter": 200.0, "stamp": 25.0, "merge_pass": 600.0,
    "merge_panel": 1000.0, "tile": 50.0, "host": 1e5,
    "launch": {"stream": 3000.0, "graph": 2000.0, "dependent": 700.0, "early": 2500.0},
}  # fmt: skip
BOUNDS = {
    "bandwidth": (4000.0, 5200.0), "latency": (0.0, 1000.0), "jitter": (20.0, 800.0),
    "stamp": (0.0, 80.0), "merge_pass": (50.0, 1400.0), "merge_panel": (100.0, 4000.0),
    "tile": (5.0, 200.0), "host": (0.0, 3e5), "launch": (0.0, 8000.0),
}  # fmt: skip
CLOSE = 3e-4
"""An error that is small enough."""


def shown(real: Statistics) -> dict[str, Any]:
    """What the stamps show directly."""
    ops = {op.name: op for op in PRODUCTS}
    norm = _norm(real)
    head = {name: real.head(op) for name, op in ops.items()} | {"ATTENTION": real.head(Op.ATTENTION)}
    head |= {name: max(head[name] - norm, 0.0) for name in ("QKV", "HEAD")}
    stage = {name: real.stage(op) for name, op in ops.items()}
    gap = {name: real.gap(op, new_block=False) for name, op in ops.items()}
    block = {name: real.gap(ops[name], new_block=True) for name in ("QKV", "GATE_UP", "HEAD")}
    block |= {name: block["QKV"] for name in ("O_PROJ", "DOWN")}  # there is one at most here
    tail = {name: real.tail(op) for name, op in ops.items()} | {"ATTENTION": real.tail(Op.ATTENTION)}
    for table in (head, stage, gap, block, tail):
        table["ROUTER"] = table["QKV"]
    out: dict[str, Any] = {
        "begin": real.between(), "ready": real.at_once(), "norm": norm, "head": head,
        "stage": stage, "gap": gap, "block": block, "tail": tail, "tile_l2": real.slow_tile(),
        "after_land": real.asks_after("landed"), "after_release": real.asks_after("released"),
        "after_issue": real.asks_after("copy"), "next_task": real.asks_after("task"),
        "embed": real.work(real.tasks_of(Op.EMBED)), "sample": real.work(real.tasks_of(Op.SAMPLE)),
    }  # fmt: skip
    return out | _by_items(real) | _hand_overs(real, out)


def _norm(real: Statistics) -> float:
    """QKV without and with ROUTER before it, which then has normed x; both have two blocks."""
    behind = np.zeros(len(real.op), dtype=bool)
    behind[1:] = real.op[:-1] == Op.ROUTER
    two = real.tasks_of(Op.QKV) & (real.trace.columns["count"] == 2)
    return real.work(two & ~behind) - real.work(two & behind)


def _by_items(real: Statistics) -> dict[str, float]:
    """Attention and its merge: work of SMs with no, one, two chunks; with the row's last chunk."""
    slots, first = int(real.trace.columns["count"][real.op == Op.MERGE][0]), real.trace.columns["first"]
    position = np.array(SITUATION.positions)
    window = np.array([task.window for task in real.tasks])
    heads = NORTH_MINI_CODE.num_key_value_heads
    n = np.zeros(len(real.op), dtype=np.int64)
    last = np.zeros(len(real.op), dtype=bool)
    for width in np.unique(window):
        total = int(chunk_counts(position, int(width))[0]) * heads
        here = window == width
        n[here] = (total - first[here] + slots - 1) // slots
        last |= here & ((total - 1 - first) % slots < heads)
    attention = real.tasks_of(Op.ATTENTION)
    none, one, two = (real.work(attention & (n == k) & ~last) for k in range(3))
    with_last = real.work(attention & (n == 1) & last)
    item = one - real.head(Op.ATTENTION) - real.tail(Op.ATTENTION)
    units = NORTH_MINI_CODE.q_width // 32
    merge = real.tasks_of(Op.MERGE)
    return {
        "no_item": none, "item": item, "item_gap": two - one - item, "fresh": with_last - one,
        "merge": real.work(merge & (first < units)) - START["merge_pass"],  # type: ignore[operator]
        "no_merge": real.work(merge & (first >= units)),
    }  # fmt: skip


def _hand_overs(real: Statistics, so_far: Mapping[str, float]) -> dict[str, Any]:
    """Hops: with nothing in flight, by a line through those of QKV; what load adds to each, a first
    guess; and the search for experts, which begins after one."""
    hops, ends = hop_times(real.trace, Op.QKV)
    hop = float(np.polyfit(real.in_flight(ends), hops, 1)[1])
    load = {}
    for op in SIGNALS:
        hops, ends = hop_times(real.trace, op)
        load[op.name] = (float(hops.mean()) - hop) / float(real.in_flight(ends).mean())
    route, flying_then = real.route()
    find = route - hop - load["QKV"] * flying_then - so_far["after_land"]
    # Hops that this trace does not show: as those of an operation that stores as much.
    load |= dict.fromkeys(("EMBED", "ROUTER", "HEAD"), load["QKV"]) | {"O_PROJ": load["DOWN"]}
    return {"hop": hop, "hop_load": load, "find": find}


def as_late(costs: Costs, real: Trace, simulated: Trace) -> Costs:
    """Load on hops as it must be for those of a simulated trace to take as long as the recorded."""
    load = dict(costs.hop_load)
    for op in SIGNALS:
        wanted, now = (float(hop_times(t, op)[0].mean()) - costs.hop for t in (real, simulated))
        load[op.name] *= min(max(wanted / max(now, 1.0), 0.5), 2.0)
    return replace(costs, hop_load=load | {"O_PROJ": load["DOWN"]})


def solve(
    costs: Costs, name: str, error: Callable[[Costs], float], turns: int = 7
) -> tuple[Costs, float]:
    """The value within `BOUNDS` at which an error vanishes; the better end if it does not."""
    set_to = setter(name)
    low, high = BOUNDS[name.partition(".")[0]]
    at_low, at_high = (error(set_to(costs, value)) for value in (low, high))
    best = min((abs(at_low), low), (abs(at_high), high))
    for _ in range(turns if at_low * at_high < 0 else 0):
        now = (low * at_high - high * at_low) / (at_high - at_low)
        is_now = error(set_to(costs, now))
        best = min(best, (abs(is_now), now))
        if abs(is_now) < CLOSE:
            break
        # The end that stays counts half: so neither end stays for ever.
        if is_now * at_low > 0:
            low, at_low, at_high = now, is_now, at_high / 2
        else:
            high, at_high, at_low = now, is_now, at_low / 2
    return set_to(costs, best[1]), best[1]


def setter(name: str) -> Callable[[Costs, float], Costs]:
    """How a constant is set; what goes with it goes along."""
    group, _, key = name.partition(".")

    def set_to(costs: Costs, value: float) -> Costs:
        if key:
            return replace(costs, **{group: {**getattr(costs, group), key: value}})
        if name == "merge_pass":  # one pass and what is around it take what the trace shows
            value = min(value, costs.merge + costs.merge_pass)
            return replace(costs, merge_pass=value, merge=costs.merge + costs.merge_pass - value)
        if name == "merge_panel":
            return replace(costs, merge_panel=value, merge_unit=ASSUMED["merge_unit"] * value)
        return replace(costs, **{name: value})

    return set_to


def main() -> int:
    """Entry point."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--trace", default=TRACE)
    args = parser.parse_args()
    recorded = load_trace(args.trace)
    plan = plan_for(8)
    shapes = Shapes(plan.config, plan.rows, Ring(5, 64), SITUATION, _anything(), TRACED)
    direct = shown(Statistics(recorded, plan, shapes))
    start = {**START, **ASSUMED, **direct}
    start["merge_unit"] *= start["merge_panel"]
    costs = Costs(**start)

    ends = (Part(end_of(plan)),)

    def head(costs: Costs) -> OpDifference:
        run = simulate_parts(ends, SITUATION, costs=costs, switches=TRACED)
        return next(row for row in compare(recorded, run.trace).by_op() if row.op == "HEAD")

    def slow(costs: Costs) -> float:
        work = head(costs).work
        return work[1] / work[0] - 1

    def uneven(costs: Costs) -> float:
        spread = head(costs).spread
        return spread[1] / spread[0] - 1

    def step(costs: Costs) -> Trace:
        return simulate(plan, SITUATION, costs=costs, switches=TRACED, alone=True).trace

    def long(costs: Costs) -> float:
        a, b = compare(recorded, step(costs)).layers().sum(axis=0)
        return float(b / a - 1)

    for _ in range(ROUNDS):
        costs = as_late(costs, recorded, step(costs))
        for name, error in (("bandwidth", slow), ("jitter", uneven), ("latency", long)):
            costs, value = solve(costs, name, error)
            print(f"{name}: {value:.4g}, from the trace as a whole", flush=True)
    measured = {case.fits: case for case in cases()}
    for name, of in FITTED_ON.items():
        case = measured[name]
        costs, value = solve(costs, name, lambda c, m=case: m.predict(c).ms / m.measured_ms - 1)
        print(f"{name}: {value:.4g} ns, from {of}", flush=True)
    write(costs, direct, args.trace, dict(recorded.provenance))
    return 0


def _anything() -> Costs:
    """Costs of which only the shapes matter."""
    from mkref.simulate.costs import H200

    return H200


def write(costs: Costs, direct: Mapping[str, Any], trace: str, made: Mapping[str, str]) -> None:
    """The table with the source of each constant."""
    sources = {name: f"shown by {trace}" for name in direct}
    sources |= {name: "assumed" for name in ASSUMED}
    fitted = ("bandwidth", "latency", "jitter", "hop_load")
    sources |= {name: f"fitted to {trace}" for name in fitted}
    for name, case in FITTED_ON.items():
        group = name.partition(".")[0]
        sources[group] = f"fitted to {case}" if group == name else "fitted: see fitted_on"
    sources["merge"] = f"shown by {trace}, less merge_pass"
    sources["merge_unit"] = f"assumed: {ASSUMED['merge_unit']} of merge_panel"

    def short(value: Any) -> Any:
        if isinstance(value, dict):
            return {name: short(each) for name, each in sorted(value.items())}
        return float(f"{value:.5g}")

    table = {
        "gpu": made.get("gpu", ""),
        "units": "ns; bytes per ns; ns per byte (hop_load)",
        "fitted_on": FITTED_ON,
        "constants": {
            name: {"value": short(value), "from": sources[name]}
            for name, value in asdict(costs).items()
        },
    }
    FILE.write_text(json.dumps(table, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main())
