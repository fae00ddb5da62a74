"""Variants of the kernel at the full geometry, side by side in one run: what does each choice cost?

    python bench/variants.py [--batch 1,8] [--context 8192] [--only NAME,...]
        [--steps 32] [--rounds 4]

A variant is the kernel's source with a few texts replaced (`VARIANTS`): tuning constants, or parts
taken out to see a limit, such as copies that do not happen. Those compute nonsense, and only their
time means anything. Variants are timed in turns, so that the clock of the GPU favours nobody.
Prints ms per step (median over launches, and the spread), and writes $OUT/variants.json.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from bench.full_geometry import page_tables
from bench.provenance import provenance
from mkref.config import NORTH_MINI_CODE
from mkref.errors import MkrefError
from mkref.machine import cuda
from mkref.machine.base import StepInputs
from mkref.machine.source import Ring
from mkref.measure.launches import changed_kernel
from mkref.plan.build import Plan, build_plan
from mkref.weights.synthetic import synthetic_weights

Change = tuple[str, str]

NO_COUNTERS: Change = (
    "  if (c.stopped || reached(ptx::ld_acquire(at), want)) return;",
    "  if (c.task >= 0) return;",
)
NO_COPIES: Change = (
    """\
      ptx::copy_async(c.s.ring[c.ring.slot], tiles,
                      (n_tiles < STAGE_TILES ? n_tiles : STAGE_TILES) * TILE_BYTES,
                      &c.s.full[c.ring.slot]);""",
    "      if (c.lane == 0) ptx::mbar_arrive(&c.s.full[c.ring.slot]);",
)
ANY_TOKEN: Change = (
    "const int token = c.s.tokens[row];",
    "const int token = (unsigned)c.s.tokens[row] % VOCAB;",
)
HOLD_BACK = "1 << OP_EMBED | 1 << OP_QKV | 1 << OP_GATE_UP | 1 << OP_O_PROJ | 1 << OP_DOWN;"
OPTIONS: dict[str, dict[str, Any]] = {
    "ring_3": {"ring": Ring(3, 64)},
    "ring_4": {"ring": Ring(4, 64)},
    "ring_5": {"ring": Ring(5, 64)},
}
VARIANTS: dict[str, tuple[Change, ...]] = {
    "base": (),
    "no_waits": (NO_COUNTERS, ANY_TOKEN),
    "no_copies": (NO_COPIES, ANY_TOKEN),
    "no_copies_no_waits": (NO_COPIES, NO_COUNTERS, ANY_TOKEN),
    "in_flight_1": (("IN_FLIGHT_FEW = 2;", "IN_FLIGHT_FEW = 1;"),),
    "in_flight_3": (("IN_FLIGHT_FEW = 2;", "IN_FLIGHT_FEW = 3;"),),
    "in_flight_4": (("IN_FLIGHT_FEW = 2;", "IN_FLIGHT_FEW = 4;"),),
    "batch_in_flight_4": (("IN_FLIGHT_BATCH = 3;", "IN_FLIGHT_BATCH = 4;"),),
    "no_hold_back": ((HOLD_BACK, "0;"),),
    "hold_back_xq": ((HOLD_BACK, "1 << OP_EMBED | 1 << OP_QKV | 1 << OP_DOWN;"),),
    "x_waited_for": (("EARLY_ROWS = 2;", "EARLY_ROWS = 0;"),),
    "x_early_always": (("EARLY_ROWS = 2;", "EARLY_ROWS = ROWS;"),),
    "ring_3": (),
    "ring_4": (),
    "ring_5": (),
    "waiting_2": (("IN_FLIGHT_WAITING = 1;", "IN_FLIGHT_WAITING = 2;"),),
    "helper_merges": (("MERGE_ROWS = 1;", "MERGE_ROWS = 0;"),),
    "consumers_merge": (("MERGE_ROWS = 1;", "MERGE_ROWS = 8;"),),
    "announced_by_all": (("(announced ? (uint32_t)arrivals / 32 : 0u)", "0u"),),
    "share_after_route": (
        (
            "if (MOST_ROWS == 1 && task.op == OP_GATE_UP) share_gate_up(",
            "if (MOST_ROWS < 1) share_gate_up(",
        ),
        (
            "if (MOST_ROWS > 1 && task.op == OP_GATE_UP) share_gate_up(",
            "if (task.op == OP_GATE_UP) share_gate_up(",
        ),
    ),
    "ahead_1": (("AHEAD = 2;", "AHEAD = 1;"),),
    "ahead_4": (("AHEAD = 2;", "AHEAD = 4;"),),
}


def machine_for(changes: tuple[Change, ...], **options: Any) -> cuda.CudaMachine:
    """A machine whose kernel has the changes; every one must apply."""

    class Changed(cuda.CudaMachine):
        def build(self, plan: Plan) -> None:
            with changed_kernel(dict(changes), {}):
                super().build(plan)

    return Changed(**options)


def main() -> int:
    """Entry point."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--batch", default="1,8")
    parser.add_argument("--context", type=int, default=8192)
    parser.add_argument("--only", default="")
    parser.add_argument("--steps", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=4)
    args = parser.parse_args()
    names = args.only.split(",") if args.only else list(VARIANTS)
    config = NORTH_MINI_CODE
    begin = time.perf_counter()
    weights = synthetic_weights(config, seed=0, device="cuda")
    torch.cuda.synchronize()
    print(f"weights {time.perf_counter() - begin:.1f} s", flush=True)
    rows_out = []
    for rows in map(int, args.batch.split(",")):
        table, budgets = page_tables(config, rows, args.context)
        plan = build_plan(
            config, cuda.device_sms(), full_pages=budgets[0], sliding_pages=budgets[1]
        )
        start = args.context - args.steps
        positions = np.full(rows, start, np.int32)
        tokens = np.arange(rows, dtype=np.int32) * 1000 + 17
        inputs = StepInputs(tokens, positions, table)
        machines: dict[str, cuda.CudaMachine] = {}
        times: dict[str, list[float]] = {}
        shared_kv = None
        for name in names:
            machine = machine_for(VARIANTS[name], **OPTIONS.get(name, {}))
            machine.timeout_s = 0.5
            machine.load(plan, weights, args.context)
            if shared_kv is None:
                shared_kv = machine.buffers["kv"]
                flat = torch.as_tensor(shared_kv, device="cuda").view(torch.bfloat16)
                for part in flat.split(1 << 28):
                    part.normal_()
            else:
                machine.buffers["kv"] = shared_kv
                machine._params["kv"] = machine.address(shared_kv)
                machine.cupy.get_default_memory_pool().free_all_blocks()
            machines[name], times[name] = machine, []
        distinct = {}
        for turn in range(args.rounds + 1):
            for name, machine in machines.items():
                try:
                    begin = time.perf_counter()
                    out = machine.decode(inputs, args.steps)
                    ms = (time.perf_counter() - begin) * 1e3 / args.steps
                except MkrefError as error:
                    print(name, "failed:", str(error)[:200], flush=True)
                    ms = float("nan")
                    out = np.zeros((1, rows))
                if turn:
                    times[name].append(ms)
                distinct[name] = hash(out.tobytes())
        base = float(np.median(times[names[0]]))
        for name in names:
            sample = times[name]
            median = float(np.median(sample))
            same = "same tokens" if distinct[name] == distinct[names[0]] else "other tokens"
            print(
                f"batch {rows} {name:22} {median:7.4f} ms  ({min(sample):.4f}-{max(sample):.4f})"
                f"  {median / base:6.3f}  {same}",
                flush=True,
            )
            rows_out.append(
                {"batch": rows, "context": args.context, "variant": name, "samples_ms": sample}
            )
        for machine in machines.values():
            machine.close()
        del machines, machine, shared_kv, flat, part
        torch.cuda.empty_cache()
    folder = Path(os.environ.get("OUT", "bench/results/h200"))
    record = {"provenance": provenance(), "steps": args.steps, "rows": rows_out}
    (folder / "variants.json").write_text(json.dumps(record, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
