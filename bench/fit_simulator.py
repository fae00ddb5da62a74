"""Fit the simulator's table of times to the records of the H200, and write it.

    python bench/fit_simulator.py [--traces]

Three kinds of constants, in this order: what the stamps of version two's trace show directly
(`bench/simulator_direct.py`); what load adds to hops, and bandwidth, latency and chance of the
memory, with which a simulated trace is as late, as long and as uneven as the recorded one; and one
constant for each case of `FITTED_ON`, found from that case alone. For every later kernel then what
the stamps of its own trace show of its instructions and hand-overs (`OWN`): with it nothing is
fitted to the trace as a whole or to a record. With `--traces` only those of later kernels are found
anew, and version two's are taken from the table as it is. Writes `mkref/simulate/h200.json`; then
run `bench/validate_simulator.py`, which says how far predictions are off. It needs no GPU, and some
minutes.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from bench.simulator_cases import FITTED_ON, Case, cases
from bench.simulator_direct import OWN, SIGNALS, SITUATION, read_trace, shown
from bench.simulator_kernels import (
    KERNELS,
    PRESENT,
    VERSION_FOUR,
    VERSION_THREE,
    VERSION_TWO,
)
from bench.simulator_trace import hop_times
from mkref.simulate.compare import OpDifference, compare
from mkref.simulate.costs import FILE, Costs
from mkref.simulate.program import Part
from mkref.simulate.run import end_of, simulate, simulate_parts

if TYPE_CHECKING:
    from bench.simulator_kernels import Kernel
    from mkref.trace.events import Trace

ROUNDS = 2
"""More follow the chance of single copies and settle nowhere else."""
ASSUMED: dict[str, Any] = {
    "link": 110.0,  # 64 bytes a clock
    "announced": 750.0,  # signal and poll, without the fence: bench/LOG.md, section 8
    "announced_load": 0.0,
    "find_row": 1000.0,
    "norm_row": 0.0,  # until all kernels are there
    "norm_rows": 600.0,
    "dense": 300.0,
    "merge_chunk": 3.0,  # 128 bytes; L2 gives all SMs together about 5.5 TB/s
    "merge_unit": 0.5,  # of a panel; scaled with it
}
"""What no record shows; how much it matters is in bench/results/simulator.json."""
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


def as_late(costs: Costs, real: Trace, simulated: Trace) -> Costs:
    """Load on hops as it must be for those of a simulated trace to take as long as the recorded;
    of a kernel in which nothing announces itself."""
    load = dict(costs.hop_load)
    for op in SIGNALS:
        wanted, now = (float(hop_times(t, op)[0].mean()) - costs.hop for t in (real, simulated))
        load[op.name] *= min(max(wanted / max(now, 1.0), 0.5), 2.0)
    load["O_PROJ"] = load["DOWN"]
    return replace(costs, hop_load=load)


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
        changes: dict[str, Any] = {name: value}
        if key:
            changes = {group: {**getattr(costs, group), key: value}}
        elif name == "merge_pass":  # one pass and what is around it take what the trace shows
            changes[name] = value = min(value, costs.merge + costs.merge_pass)
            changes["merge"] = costs.merge + costs.merge_pass - value
        elif name == "merge_panel":
            changes["merge_unit"] = ASSUMED["merge_unit"] * value
        return replace(costs, **changes)

    return set_to


def main() -> int:
    """Entry point."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--traces", action="store_true", help="only what later traces show")
    args = parser.parse_args()
    recorded, kernel, switches = read_trace(VERSION_TWO)
    plan = kernel.plan(8)
    direct = shown(recorded, kernel, switches)
    if args.traces:
        costs = VERSION_TWO.costs
        side = VERSION_TWO.switches.least_normed - 1
        write(in_kernels(replace(costs, norm=costs.norm + costs.norm_row * side), direct), direct)
        return 0
    start = {**START, **ASSUMED, **direct}
    start["merge_unit"] *= start["merge_panel"]
    start["merge"] -= start["merge_pass"]
    costs = Costs(**start)

    ends = (Part(end_of(plan)),)

    def head(costs: Costs) -> OpDifference:
        run = simulate_parts(ends, SITUATION, costs=costs, switches=switches)
        return next(row for row in compare(recorded, run.trace).by_op() if row.op == "HEAD")

    def slow(costs: Costs) -> float:
        work = head(costs).work
        return work[1] / work[0] - 1

    def uneven(costs: Costs) -> float:
        spread = head(costs).spread
        return spread[1] / spread[0] - 1

    def step(costs: Costs) -> Trace:
        return simulate(plan, SITUATION, costs=costs, switches=switches, alone=True).trace

    def long(costs: Costs) -> float:
        a, b = compare(recorded, step(costs)).layers().sum(axis=0)
        return float(b / a - 1)

    for _ in range(ROUNDS):
        costs = as_late(costs, recorded, step(costs))
        for name, error in (("bandwidth", slow), ("jitter", uneven), ("latency", long)):
            costs, value = solve(costs, name, error)
            print(f"{name}: {value:.4g}, from the trace as a whole", flush=True)
    measured = {case.fits: case for case in cases() if case.fits}
    for name, of in FITTED_ON.items():
        case = measured[name]

        def off(costs: Costs, case: Case = case) -> float:
            return case.simulate(costs).ms / case.measured_ms - 1

        costs, value = solve(costs, name, off)
        print(f"{name}: {value:.4g} ns, from {of}", flush=True)
    write(in_kernels(costs, direct), direct)
    return 0


def in_kernels(costs: Costs, direct: Mapping[str, Any]) -> dict[Kernel, Costs]:
    """The costs of every kernel, from those of version two with what its trace shows."""
    found = {VERSION_TWO: costs}
    for kernel in KERNELS:
        if kernel is VERSION_TWO:
            continue
        recorded, _, switches = read_trace(kernel)
        own = shown(recorded, kernel, switches, direct)
        own["merge"] -= costs.merge_pass
        found[kernel] = replace(costs, **own)
    # Until version three four rows were normed where later kernels norm one.
    each = max(found[VERSION_THREE].norm - found[VERSION_FOUR].norm, 0.0) / 3
    return {
        kernel: replace(
            mine, norm=mine.norm - each * (kernel.switches.least_normed - 1), norm_row=each
        )
        for kernel, mine in found.items()
    }


def write(found: Mapping[Kernel, Costs], direct: Mapping[str, Any]) -> None:
    """The table with the source of each constant."""

    def short(value: Any) -> Any:
        if isinstance(value, dict):
            return {name: short(each) for name, each in sorted(value.items())}
        return float(f"{value:.5g}")

    table: dict[str, Any] = {
        "gpu": "NVIDIA H200",
        "kernel": PRESENT.name,
        "units": "ns; bytes per ns; ns per byte (names that end in _load)",
        "fitted_on": FITTED_ON,
        "constants": {},
        "older": {},
    }
    for kernel, costs in found.items():
        sources = sources_of(kernel, direct)
        entries = {
            name: {"value": short(value), "from": sources[name]}
            for name, value in asdict(costs).items()
        }
        if kernel is PRESENT:
            table["constants"] = entries
        else:
            own = (*OWN, "norm_row")
            table["older"][kernel.short] = {name: entries[name] for name in own}
    FILE.write_text(json.dumps(table, indent=1) + "\n", encoding="utf-8")


def sources_of(kernel: Kernel, direct: Mapping[str, Any]) -> dict[str, str]:
    """Where each constant of a kernel is from."""
    sources = dict.fromkeys(ASSUMED, "assumed")
    sources |= dict.fromkeys(direct, f"shown by {VERSION_TWO.trace}")
    fitted = ("bandwidth", "latency", "jitter", "hop_load")
    sources |= dict.fromkeys(fitted, f"fitted to {VERSION_TWO.trace}")
    for name, case in FITTED_ON.items():
        group = name.partition(".")[0]
        sources[group] = f"fitted to {case}" if group == name else "fitted: see fitted_on"
    if kernel is not VERSION_TWO:
        sources |= dict.fromkeys(OWN, f"shown by {kernel.trace}")
    sources["merge"] = f"shown by {kernel.trace}, less merge_pass"
    sources["merge_unit"] = f"assumed: {ASSUMED['merge_unit']} of merge_panel"
    sources["norm_row"] = f"shown by {VERSION_FOUR.trace}, one row, and {VERSION_THREE.trace}, four"
    return sources


if __name__ == "__main__":
    sys.exit(main())
