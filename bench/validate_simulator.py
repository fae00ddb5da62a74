"""How far the simulator's predictions are from what was measured on the H200.

    python bench/validate_simulator.py

Simulates every case of `bench/simulator_cases.py` with the table that is shipped, and writes
`bench/results/simulator.json`: prediction, measurement and error of each, which of them a constant
was fitted to, and the errors of those that are held out, by record. Beside it the recorded traces
against simulated ones, operation by operation; variants of the kernel that `bench/LOG.md` tells
of, as ratios; what the seed of the memory's chance and the assumed constants change; and how long a
simulation takes here. It needs no GPU.
"""

from __future__ import annotations

import hashlib
import json
import sys
import time
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import numpy as np

from bench.simulator_cases import FITTED_ON, ROOT, Case, cases
from bench.simulator_direct import SITUATION, read_trace
from bench.simulator_kernels import KERNELS, PRESENT, VERSION_TWO, Kernel
from mkref.config import NORTH_MINI_CODE
from mkref.machine.source import Ring
from mkref.simulate.compare import compare
from mkref.simulate.costs import FILE, H200, Costs
from mkref.simulate.run import simulate
from mkref.simulate.situation import Situation

if TYPE_CHECKING:
    from mkref.simulate.switches import Switches

OUT = ROOT / "bench" / "results" / "simulator.json"
BASE = VERSION_TWO.switches_for(8)
"""The kernel that the variants were made of."""
LOG = (
    ("ring of 3 stages", 1, replace(BASE, ring=Ring(3, 64)), 1.066),
    ("ring of 4 stages", 1, replace(BASE, ring=Ring(4, 64)), 1.027),
    ("ring of 6 stages", 1, replace(BASE, ring=Ring(6, 64)), 1.011),
    ("three stages in flight", 1, replace(BASE, in_flight=3), 1.029),
    ("no holding back", 1, replace(BASE, in_flight_waiting=9), 1 / 0.984),
)
"""Changes of the kernel, batch, and the ratio of the step's time to that without the change."""
ASSUMED = ("link", "find_row", "norm_rows", "dense", "merge_unit", "merge_chunk")


def row(case: Case) -> dict[str, Any]:
    """A case as the file has it."""
    simulated = case.predict().ms
    error = simulated / case.measured_ms - 1
    line = f"{case.version} {case.name:56} {case.measured_ms:8.3f} {simulated:8.3f} {error:+7.1%}"
    print(line, case.fits, flush=True)
    return {
        "kernel": case.version,
        "case": case.name,
        "file": f"bench/results/h200/{case.file}",
        "measured_ms": case.measured_ms,
        "measured_spread_ms": case.spread_ms,
        "simulated_ms": round(simulated, 5),
        "error": round(error, 5),
        "role": f"fitted: {case.fits}" if case.fits else "held out",
    }


def summary(rows: Iterable[dict[str, Any]]) -> dict[str, Any]:
    """Errors of the cases that are held out: of all, by kernel, and by record of each kernel."""
    held_out = [each for each in rows if each["role"] == "held out"]
    groups = {"all": held_out}
    for each in held_out:
        record = each["case"].partition(":")[0]
        for name in (each["kernel"], f"{each['kernel']} {record}"):
            groups.setdefault(name, []).append(each)
    return {
        name: {
            "n": len(group),
            "mean": round(float(np.mean([each["error"] for each in group])), 4),
            "mean_abs": round(float(np.mean([abs(each["error"]) for each in group])), 4),
            "max_abs": round(max(abs(each["error"]) for each in group), 4),
        }
        for name, group in groups.items()
    }


def against_trace(kernel: Kernel) -> dict[str, Any]:
    """A kernel's recorded step and a simulated one."""
    recorded, _, switches = read_trace(kernel)
    run = simulate(kernel.plan(8), SITUATION, costs=kernel.costs, switches=switches, alone=True)
    both = compare(recorded, run.trace)
    layers = both.layers()
    print(both.report())
    return {
        "file": kernel.trace,
        "note": "constants are from this trace; waits and spreads are not"
        + (", but that of HEAD; the mean layer is fitted" if kernel is VERSION_TWO else ""),
        "span_us": [recorded.span_ns / 1e3, run.trace.span_ns / 1e3],
        "layer_us": {
            "mean": [round(float(x) / 1e3, 3) for x in layers.mean(axis=0)],
            "spread": [round(float(x) / 1e3, 3) for x in layers.std(axis=0)],
        },
        "by_op_ns": {
            each.op: {
                name: [round(x) for x in getattr(each, name)] for name in ("wait", "work", "spread")
            }
            for each in both.by_op()
        },
    }


def ms(
    costs: Costs = H200, batch: int = 1, switches: Switches | None = None, kernel: Kernel = PRESENT
) -> float:
    """A step at 8,192 tokens."""
    now = Situation.uniform(NORTH_MINI_CODE, [8191 - 128] * batch)
    switches = switches or kernel.switches_for(8)
    return simulate(kernel.plan(8), now, costs=costs, switches=switches).ms


def variants() -> list[dict[str, Any]]:
    """What the log tells of."""
    costs = VERSION_TWO.costs
    base = ms(costs, switches=BASE, kernel=VERSION_TWO)
    out = []
    for name, batch, switches, measured in LOG:
        ratio = ms(costs, batch, switches, VERSION_TWO) / base
        print(f"{name:30} batch {batch}: measured {measured:.3f}, simulated {ratio:.3f}")
        out.append(
            {"change": name, "batch": batch, "measured": round(measured, 3),
             "simulated": round(ratio, 3), "file": "bench/LOG.md, section 8"}
        )  # fmt: skip
    return out


def sensitivity() -> dict[str, Any]:
    """The seed, and each assumed constant halved, for one row and for eight."""
    base = {batch: ms(batch=batch) for batch in (1, 8)}
    seeds = [
        ms(switches=replace(PRESENT.switches_for(8), seed=seed)) / base[1] - 1
        for seed in range(2, 6)
    ]
    halved = {
        name: {
            f"batch {batch}": round(
                ms(replace(H200, **{name: getattr(H200, name) / 2}), batch) / base[batch] - 1, 4
            )
            for batch in (1, 8)
        }
        for name in ASSUMED
    }
    return {
        "other seeds, batch 1": [round(x, 4) for x in seeds],
        "assumed constants halved": halved,
    }


def main() -> int:
    """Entry point."""
    ms()  # builds the plan
    begin = time.process_time()
    ms()
    seconds = time.process_time() - begin
    rows = [row(case) for case in cases()]
    record = {
        "label": "simulated, against measured",
        "kernels": {kernel.short: kernel.name for kernel in KERNELS},
        "table": "mkref/simulate/h200.json",
        "table_sha256": hashlib.sha256(FILE.read_bytes()).hexdigest(),
        "fitted_on": FITTED_ON,
        "held_out": summary(rows),
        "cases": rows,
        "traces": {kernel.short: against_trace(kernel) for kernel in KERNELS},
        "variants": variants(),
        "sensitivity": sensitivity(),
        "seconds_for_one_step": round(seconds, 1),  # of one core, batch 1
    }
    OUT.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    print(json.dumps(record["held_out"], indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
