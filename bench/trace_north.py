"""Where a step's time goes at the full geometry: a traced step and a table per operation.

    python bench/trace_north.py [--context 8192] [--batch 1] [--steps 40]

Prints, per operation and layer, how long the consumers waited for inputs and how long they worked,
and the same step without time stamps. Writes $OUT/trace_north_b<batch>.json.gz, a trace that
`mkref.trace` and the lessons read. A traced run explains; only the run without stamps gives the
time.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from bench.full_geometry import fill_cache, page_tables
from bench.provenance import provenance
from bench.variants import VARIANTS, machine_for
from mkref.config import NORTH_MINI_CODE
from mkref.machine.base import StepInputs
from mkref.machine.cuda import device_sms
from mkref.plan.build import build_plan
from mkref.plan.task import Op
from mkref.trace.path import path_report
from mkref.trace.record import take_trace
from mkref.trace.ring import describe_ring
from mkref.trace.storage import save_trace
from mkref.trace.summary import by_op
from mkref.weights.synthetic import synthetic_weights

if TYPE_CHECKING:
    from mkref.trace.events import Trace


def main() -> int:
    """Entry point."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--context", type=int, default=8192)
    parser.add_argument("--batch", default="1")
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--variant", default="base", help="a name of bench/variants.py")
    parser.add_argument("--untraced", action="store_true", help="no traced run, for a profiler")
    args = parser.parse_args()
    config = NORTH_MINI_CODE
    weights = synthetic_weights(config, seed=0, device="cuda")
    for rows in map(int, args.batch.split(",")):
        table, budgets = page_tables(config, rows, args.context)
        plan = build_plan(config, device_sms(), full_pages=budgets[0], sliding_pages=budgets[1])
        for trace in (False,) if args.untraced else (False, True):
            machine = machine_for(VARIANTS[args.variant], trace=trace)
            machine.load(plan, weights, args.context)
            start = args.context - args.steps
            fill_cache(machine, config, rows, start, table, seed=1)
            rng = np.random.default_rng(0)
            times = []
            for step in range(args.steps):
                tokens = rng.integers(0, config.vocab_size, rows).astype(np.int32)
                inputs = StepInputs(tokens, np.full(rows, start + step, np.int32), table)
                begin = time.perf_counter()
                machine.step(inputs)
                times.append((time.perf_counter() - begin) * 1e3)
            kind = "traced" if trace else "plain"
            print(f"batch {rows} {kind}: {np.median(times[8:]):.3f} ms per step")
            if trace:
                made = provenance()
                made["machine"] = (
                    f"North Mini Code geometry, synthetic weights, batch {rows}, "
                    f"{args.context} tokens of context, {made['gpu']}"
                )
                made["date"] = made["date"][:10]
                record = take_trace(machine, made)
                report(record, config.num_hidden_layers)
                print(path_report(record))
                print(describe_ring(record))
                folder = Path(os.environ.get("OUT", "."))
                few = record.with_stages_of(range(0, plan.n_sm, 22))
                save_trace(few, folder / f"trace_north_b{rows}.json.gz")
            machine.close()
            torch.cuda.empty_cache()
    return 0


def report(trace: Trace, n_layers: int) -> None:
    """Mean over SMs of waiting and working per operation, in us per layer."""
    print(f"step inside the kernel: {trace.span_ns / 1e3:.0f} us")
    print("op          wait us  work us  work max-SM  (per layer, mean of SMs)")
    for row in by_op(trace):
        once = row.op in (Op.EMBED.name, Op.HEAD.name, Op.SAMPLE.name)
        per = 1e3 * trace.n_sm * (1 if once else n_layers)
        wait, work = row.wait_ns / per, row.work_ns / per
        print(f"{row.op:10} {wait:8.2f} {work:8.2f} {row.longest_ns / 1e3:10.2f}")


if __name__ == "__main__":
    sys.exit(main())
