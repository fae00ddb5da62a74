"""Prompts at the full geometry: through the kernel, and through torch in chunks; speed, what a
running sequence notices of it, memory, and how far the two ways are apart.

    python bench/prefill.py [--prompts 2048,8192,32768] [--chunks 512,1024,2048,4096]
        [--geometry FOLDER --machine host] [--seconds 220]

Synthetic weights of North Mini Code unless a folder is given. Parts:

    kernel    prompt tokens per second with 8 rows, and with 7 beside a row that generates; of a
              long prompt groups of steps all along it are timed, and `seconds` follows from them
    torch     whole prompts, chunk by chunk, after a warm-up
    latency   time between two tokens of a running row while the longest prompt comes in
    parts     what a chunk's time consists of, each part alone
    distance  keys, values and next logits of both ways for the same prompt

A part that fails is recorded as an error and the next one runs; after `--seconds` no new part
begins. Writes $OUT/prefill.json (or bench/results/h200) after every part.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from bench.prefill_desk import Desk
from bench.prefill_parts import distance, parts
from bench.provenance import provenance
from mkref.config import NORTH_MINI_CODE, NorthConfig
from mkref.engine.prefill import Prefill
from mkref.errors import MkrefError
from mkref.machine import create, default_n_sm
from mkref.machine.base import KernelMachine
from mkref.weights.checkpoint import load_checkpoint
from mkref.weights.synthetic import synthetic_weights

ROWS = 8
WARM_UP = 8
ALL_STEPS = 300
"""A prompt of at most so many steps is run as a whole."""
GROUPS, GROUP_STEPS = 8, 24


def kernel_case(desk: Desk, length: int, rows: int) -> dict[str, Any]:
    """A prompt through the kernel with `rows` rows, beside a running row if that is less than 8."""
    n_steps = length // rows
    if n_steps <= ALL_STEPS:
        groups = [range(n_steps)]
    else:
        begins = np.linspace(0, n_steps - GROUP_STEPS, GROUPS).astype(int).tolist()
        groups = [range(begin, begin + GROUP_STEPS) for begin in begins]
    times: list[list[float]] = []
    for step in range(WARM_UP):
        desk.prompt_step(step * rows, rows)
    for group in groups:
        times.append([])
        for step in group:
            begin = time.perf_counter()
            desk.prompt_step(step * rows, rows)
            times[-1].append((time.perf_counter() - begin) * 1e3)
    mean = float(np.mean([np.mean(group) for group in times]))
    return {
        "prompt": length,
        "rows": rows,
        "beside": ROWS - rows,
        "tokens_per_s": round(rows / mean * 1e3, 1),
        "seconds": round(n_steps * mean / 1e3, 3),
        "ms_per_step": round(mean, 4),
        "steps": n_steps,
        "steps_timed": sum(map(len, times)),
        "ms_first_and_last_group": [round(float(np.median(times[i])), 4) for i in (0, -1)],
    }


def torch_case(desk: Desk, prefill: Prefill, length: int) -> dict[str, Any]:
    """A prompt in chunks, all of it but the last token, which the kernel takes."""
    best: list[float] = []
    for _ in range(1 if length > 16384 else 3):
        times = []
        for begin in range(0, length, prefill.chunk):
            start = time.perf_counter()
            desk.chunk(prefill, begin, min(prefill.chunk, length - begin))
            times.append((time.perf_counter() - start) * 1e3)
        if not best or sum(times) < sum(best):
            best = times
    return {
        "prompt": length,
        "chunk": prefill.chunk,
        "tokens_per_s": round(length / sum(best) * 1e3, 1),
        "seconds": round(sum(best) / 1e3, 4),
        "ms_per_chunk": [round(ms, 2) for ms in best],
    }


def latency_case(desk: Desk, prefill: Prefill, length: int) -> dict[str, Any]:
    """One row generates, a step between any two chunks; time from token to token, in ms."""
    gaps, begin, first = [], 0, time.perf_counter()
    desk.decode_step()
    last = time.perf_counter()
    while begin < length:
        count = min(prefill.chunk, length - begin)
        desk.chunk(prefill, begin, count)
        desk.decode_step()
        now = time.perf_counter()
        gaps.append((now - last) * 1e3)
        begin, last = begin + count, now
    return {"chunk": prefill.chunk, **summary(gaps), "prompt_s": round(last - first, 3)}


def kernel_latency(desk: Desk, length: int) -> list[dict[str, Any]]:
    """The same with the prompt in seven rows beside it, and without a prompt at all."""
    riding = []
    for begin in np.linspace(0, length - 7 * 16, 8).astype(int).tolist():
        for step in range(16):
            start = time.perf_counter()
            desk.prompt_step(begin + 7 * step, 7)
            riding.append((time.perf_counter() - start) * 1e3)
    alone = []
    for _ in range(64):
        start = time.perf_counter()
        desk.decode_step()
        alone.append((time.perf_counter() - start) * 1e3)
    seconds = round(length / 7 * float(np.mean(riding)) / 1e3, 3)
    return [
        {"chunk": "7 rows", **summary(riding), "prompt_s": seconds},
        {"chunk": "no prompt", **summary(alone[WARM_UP:]), "prompt_s": None},
    ]


def summary(gaps: list[float]) -> dict[str, Any]:
    """Median, 90th percentile and maximum."""
    return {
        "ms_median": round(float(np.median(gaps)), 3),
        "ms_p90": round(float(np.percentile(gaps, 90)), 3),
        "ms_max": round(float(np.max(gaps)), 3),
        "tokens": len(gaps),
    }


class Record:
    """The record, written after every part; and the clock."""

    def __init__(self, folder: Path, seconds: float) -> None:
        self.file, self.end = folder / "prefill.json", time.perf_counter() + seconds
        self.content: dict[str, Any] = {"provenance": provenance(), "rows": [], "errors": []}

    def add(self, part: str, call: Callable[[], dict[str, Any] | list[dict[str, Any]]]) -> None:
        """One part: its rows, or its error."""
        if time.perf_counter() > self.end:
            self.content["errors"].append({"part": part, "error": "no time left"})
        else:
            try:
                made = call()
                for row in made if isinstance(made, list) else [made]:
                    self.content["rows"].append({"part": part, **row})
                    print(part, {k: v for k, v in row.items() if k != "ms_per_chunk"}, flush=True)
            except (MkrefError, RuntimeError) as error:
                line = f"{type(error).__name__}: {error}".partition("\n")[0]
                self.content["errors"].append({"part": part, "error": line})
                print(f"{part}: {line}", flush=True)
        self.file.write_text(json.dumps(self.content, indent=1) + "\n")


def warm_up(desk: Desk, chunk: int, longest: int, made: list[Prefill]) -> dict[str, Any]:
    """Make a `Prefill` and run it: cuBLAS chooses, the allocator learns. Its memory."""
    before = 0
    if desk.on_gpu:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
    prefill = Prefill(desk.machine, chunk)
    for position in (0, longest - chunk):
        desk.chunk(prefill, max(0, position), min(chunk, longest))
    made.append(prefill)
    peak = torch.cuda.max_memory_allocated() - before if desk.on_gpu else None
    return {"chunk": chunk, "workspace_bytes": prefill.workspace_bytes, "peak_bytes": peak}


def measure(desk: Desk, prompts: list[int], chunks: list[int], record: Record) -> None:
    """All parts."""
    for length in prompts:
        for rows in (ROWS, ROWS - 1):
            record.add("kernel", partial(kernel_case, desk, length, rows))
    longest = max(prompts)
    record.add("latency", partial(kernel_latency, desk, longest))
    for chunk in chunks:
        made: list[Prefill] = []  # and the last one's memory is free again
        record.add("memory", partial(warm_up, desk, chunk, longest, made))
        if not made:
            continue
        for length in prompts:
            record.add("torch", partial(torch_case, desk, made[0], length))
        record.add("latency", partial(latency_case, desk, made[0], longest))
        if chunk == chunks[len(chunks) // 2]:
            record.add("parts", partial(parts, desk, made[0], longest))
            record.add("distance", partial(distance, desk, made[0]))


def main(arguments: list[str] | None = None) -> int:
    """Entry point; the exit status is 1 if a part failed."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--prompts", default="2048,8192,32768")
    parser.add_argument("--chunks", default="512,1024,2048,4096")
    parser.add_argument("--geometry", help="folder of a checkpoint; default: North, synthetic")
    parser.add_argument("--machine", default="cuda")
    parser.add_argument("--seconds", type=float, default=220)
    args = parser.parse_args(arguments)
    prompts, chunks = ([int(n) for n in text.split(",")] for text in (args.prompts, args.chunks))
    folder = Path(os.environ.get("OUT", Path(__file__).resolve().parent / "results" / "h200"))
    record = Record(folder, args.seconds)
    begin = time.perf_counter()
    device = "cuda" if args.machine == "cuda" else "cpu"
    if args.geometry is None:
        config = NORTH_MINI_CODE
        weights = synthetic_weights(config, seed=0, device=device)
    else:
        config = NorthConfig.load(args.geometry)
        weights = load_checkpoint(args.geometry, device)
    machine = cast(KernelMachine, create(args.machine))
    desk = Desk(machine, weights, max(prompts), max(chunks), default_n_sm(args.machine))
    record.content["provenance"]["seconds_to_load"] = round(time.perf_counter() - begin, 1)
    measure(desk, prompts, chunks, record)
    machine.close()
    return 1 if record.content["errors"] else 0


if __name__ == "__main__":
    sys.exit(main())
