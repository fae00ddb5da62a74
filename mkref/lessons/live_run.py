"""Measurements of `mkref.lessons.live` that `mkref bench` does not have, in a process of their own.

    python -m mkref.lessons.live_run trace|draw|read --geometry north --context 8192 --json FILE

    trace   work and waiting per operation: a step with time stamps, the median of some
    draw    time per token, drawn by the kernel and by the sampler, in turns
    read    bytes per second: the data sheet's, and those of a plain read

The record has the form of those of `mkref bench`. It needs a GPU; an error is one line on stderr.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from mkref.config import NORTH_MINI_CODE
from mkref.engine.load import load_geometry, model_folder
from mkref.errors import MkrefError
from mkref.machine.draw import Draw
from mkref.machine.inputs import StepInputs
from mkref.measure.bandwidth import datasheet_bandwidth, measured_bandwidth
from mkref.measure.decode import Case, load
from mkref.measure.record import provenance, spread, write_record
from mkref.measure.session import READ_BYTES, Session
from mkref.plan.buffers import Buffer
from mkref.trace.record import take_trace
from mkref.trace.summary import by_op

if TYPE_CHECKING:
    from mkref.machine.base import KernelMachine

__all__ = ["MEASUREMENTS", "draw_rows", "main", "read_rows", "trace_rows"]

Rows = list[dict[str, Any]]
WARM_UP, TRACED = 8, 5
STEPS, TURNS = 32, 6


def trace_rows(machine: KernelMachine, context: int, table: np.ndarray) -> Rows:
    """One row: the step's span, and per operation the work and the waiting of the mean SM, in us.

    Args:
        machine: takes stamps; loaded.
        context: tokens at the end.
        table: page table of one row.
    """
    rng, seen = np.random.default_rng(0), []
    for at in range(context - WARM_UP - TRACED, context):
        token = rng.integers(0, machine.plan.config.vocab_size, 1).astype(np.int32)
        machine.step(StepInputs(token, np.array([at], np.int32), table))
        if at >= context - TRACED:
            seen.append(take_trace(machine))
    spans = [trace.span_ns / 1e3 for trace in seen]
    sums = [{row.op: row for row in by_op(trace)} for trace in seen]
    each = 1e3 * seen[0].n_sm
    ops = {
        op: {
            "work_us": statistics.median(one[op].work_ns / each for one in sums),
            "wait_us": statistics.median(one[op].wait_ns / each for one in sums),
        }
        for op in sums[0]
    }
    return [{"span_us": statistics.median(spans), "ops": ops}]


def draw_rows(machine: KernelMachine, context: int, table: np.ndarray) -> Rows:
    """A row per way to draw: by the kernel, by the sampler as it would, by the sampler with top_p.

    Args:
        machine: loaded.
        context: tokens at the end.
        table: page table of one row.
    """
    nucleus = Draw.neutral(1)
    nucleus.top_p[:] = 0.95
    ways: dict[str, Draw | None] = {
        "kernel": None, "sampler": Draw.neutral(1), "sampler, top_p 0.95": nucleus,
    }  # fmt: skip
    inputs = StepInputs(
        np.array([17], np.int32),
        np.array([context - STEPS], np.int32),
        table,
        np.ones(1, np.float32),
        np.zeros(1, np.uint64),
    )
    samples: dict[str, list[float]] = {way: [] for way in ways}
    for turn in range(TURNS + 1):
        for way, draw in ways.items():
            begin = time.perf_counter()
            machine.decode(inputs, STEPS, draw=draw)
            if turn:  # the first one warms up
                samples[way].append((time.perf_counter() - begin) * 1e3 / STEPS)
    return [{"name": way, **spread(times)} for way, times in samples.items()]


def read_rows() -> Rows:
    """Bytes per second of the data sheet, where the driver knows them, and of a plain read."""
    from mkref.machine.cuda import CudaMachine, device_sms

    machine: Any = CudaMachine()
    n_bytes = min(READ_BYTES, machine.cupy.cuda.runtime.memGetInfo()[0] // 2)
    # All that the test asks of a machine: memory to read, and how many SMs read it.
    machine.plan = SimpleNamespace(n_sm=device_sms())
    machine.buffers = {"weights": machine.allocate(Buffer("uint32", (n_bytes // 4,)), 0)}
    row = {"measured_bytes_per_s": measured_bandwidth(machine, n_bytes)}
    return [{**row, "datasheet_bytes_per_s": datasheet_bandwidth()}]


def _in_session(what: str, geometry: str, context: int) -> Rows:
    whole = geometry == "north"
    config = NORTH_MINI_CODE if whole else load_geometry(geometry)
    session = Session.begin(config, None if whole else model_folder(geometry), "cuda", None)
    machine = session.machine_for(trace=what == "trace")
    try:
        table = load(machine, session.weights, Case(1, context), session.n_sm)
        return (trace_rows if what == "trace" else draw_rows)(machine, context, table)
    finally:
        machine.close()


MEASUREMENTS = ("trace", "draw", "read")


def main(arguments: Sequence[str] | None = None) -> int:
    """Entry point."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("what", choices=MEASUREMENTS)
    parser.add_argument("--geometry", required=True)
    parser.add_argument("--context", type=int, required=True)
    parser.add_argument("--json", type=Path, required=True)
    given = parser.parse_args(arguments)
    what, context = cast(str, given.what), cast(int, given.context)
    try:
        rows = read_rows() if what == "read" else _in_session(what, given.geometry, context)
    except MkrefError as error:
        print(str(error).partition("\n")[0], file=sys.stderr)
        return 1
    made = provenance("cuda", geometry=given.geometry, context=context)
    write_record(str(given.json), made, rows)
    return 0


if __name__ == "__main__":
    sys.exit(main())
