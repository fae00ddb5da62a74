"""The sampler on a GPU: its kernels by themselves, and whole steps with and without it.

    python bench/sampler.py [--rows 1,2,4,8] [--vocab 262144] [--blocks 0] [--repeats 100]
        [--context 8192] [--steps 32] [--rounds 6] [--kernels-only]

Kernels: their tokens are first compared with NumPy's. Then the sequence that follows a step is
queued many times behind a kernel that keeps the GPU busy meanwhile, so that the time between two
events is the GPU's and not the host's; a prefix of the sequence tells what each kernel adds.
Steps: North Mini Code with synthetic weights, the same launches with the kernel's own draw and with
the sampler's, in turns. Writes $OUT/sampler.json (or bench/results/h200) with every sample.
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

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from bench.provenance import provenance
from mkref.machine.cuda import CudaMachine, device_sms
from mkref.machine.draw import Draw
from mkref.machine.inputs import StepInputs
from mkref.machine.sampler import Sampler
from tests.draws import Rig, Settings, likely, same_told

BUSY = r"""
extern "C" __global__ void busy(long long ns) {
  long long begin, now;
  asm volatile("mov.u64 %0, %globaltimer;" : "=l"(begin));
  do asm volatile("mov.u64 %0, %globaltimer;" : "=l"(now));
  while (now - begin < ns);
}
"""
SETTINGS: dict[str, dict[str, Any]] = {
    "greedy": {"temperatures": 0},
    "temperature": {"temperatures": 1},
    "top_p 0.95": {"top_p": 0.95},
    "top_p 0.95, temperature 0.6": {"top_p": 0.95, "temperatures": 0.6},
    "top_k 50": {"top_k": 50},
    "top_k 50, top_p 0.95, min_p 0.05": {"top_k": 50, "top_p": 0.95, "min_p": 0.05},
    "top_p 0.95, penalties": {"top_p": 0.95, "presence": 0.5, "repetition": 1.1},
    "top_p 0.95, logprobs 0": {"top_p": 0.95, "logprobs": 0},
    "top_p 0.95, logprobs 20": {"top_p": 0.95, "logprobs": 20},
}
QUEUE_NS = 200_000
"""What the host needs to queue one kernel, at most; the GPU is kept busy as long."""


class Prefix(Sampler):
    """A sampler of which only the first kernels run."""

    n_kernels = 4

    def kernels(self) -> list[str]:
        """The first of them."""
        return super().kernels()[: self.n_kernels]


def time_kernels(rig: Rig, repeats: int, rounds: int) -> list[float]:
    """Microseconds of one sequence on the GPU, one number per round."""
    machine = rig.machine
    cupy = machine.cupy
    busy = cupy.RawModule(code=BUSY, backend="nvrtc").get_function("busy")
    n_kernels, samples = len(rig.sampler.kernels()), []
    for turn in range(rounds + 1):
        begin, end = cupy.cuda.Event(), cupy.cuda.Event()
        busy((1,), (1,), (np.int64(repeats * n_kernels * QUEUE_NS),))
        begin.record()
        for _ in range(repeats):
            machine.begin_draw(rig.sampler, 0)
        ran_dry = begin.done
        end.record()
        end.synchronize()
        if ran_dry:
            raise SystemExit("the GPU was done before the host: raise QUEUE_NS")
        if turn:
            samples.append(cupy.cuda.get_elapsed_time(begin, end) * 1e3 / repeats)
    return samples


def bench_kernels(args: argparse.Namespace) -> list[dict[str, Any]]:
    """Every kind of settings, for every number of rows."""
    out = []
    for rows in map(int, args.rows.split(",")):
        machine = CudaMachine()
        machine.draw_blocks = args.blocks
        rig = Rig(machine, rows, args.vocab)
        rig.sampler = Prefix(machine)
        logits = likely(rows, args.vocab)
        for name, changes in SETTINGS.items():
            settings, counts = Settings(rows, **changes), np.zeros((rows, args.vocab), np.uint16)
            rig.put("counts", counts)
            tokens, told = rig.step(logits, settings)
            expected, expected_told = settings.oracle(logits, counts)
            same = tokens.tolist() == expected.tolist()
            same = same and (told is None or same_told(expected_told, told))
            if not same:
                raise SystemExit(f"{name}, {rows} rows: tokens {tokens}, NumPy has {expected}")
            samples: dict[str, list[float]] = {}
            whole = len(rig.sampler.kernels())
            for n in range(1, whole + 1):
                Prefix.n_kernels = n
                label = rig.sampler.kernels()[-1]
                samples[label] = time_kernels(rig, args.repeats, args.rounds)
            Prefix.n_kernels = 4
            medians = [float(np.median(values)) for values in samples.values()]
            parts = np.diff([0, *medians]).round(2).tolist()
            each = ", ".join(f"{k[5:]} {v}" for k, v in zip(samples, parts, strict=True))
            print(f"{rows:2} rows  {name:34} {medians[-1]:7.2f} us  ({each})", flush=True)
            out.append({"rows": rows, "settings": name, "until_us": samples})
        machine.close()
    return out


def bench_steps(args: argparse.Namespace) -> list[dict[str, Any]]:
    """Milliseconds per step of North Mini Code, with the kernel's draw and with the sampler's."""
    import torch

    from bench.full_geometry import page_tables
    from mkref.config import NORTH_MINI_CODE
    from mkref.plan.build import build_plan
    from mkref.weights.synthetic import synthetic_weights

    config = NORTH_MINI_CODE
    weights = synthetic_weights(config, seed=0, device="cuda")
    out = []
    for rows in map(int, args.rows.split(",")):
        table, budgets = page_tables(config, rows, args.context)
        plan = build_plan(config, device_sms(), full_pages=budgets[0], sliding_pages=budgets[1])
        machine = CudaMachine()
        machine.draw_blocks = args.blocks
        machine.load(plan, weights, args.context)
        flat = torch.as_tensor(machine.buffers["kv"], device="cuda").view(torch.bfloat16)
        for part in flat.split(1 << 28):
            part.normal_()
        inputs = StepInputs(
            np.arange(rows, dtype=np.int32) * 1000 + 17,
            np.full(rows, args.context - args.steps, np.int32),
            table,
            np.ones(rows, np.float32),
            np.arange(rows, dtype=np.uint64),
        )
        neutral, default = Draw.neutral(rows), Draw.neutral(rows)
        default.top_p[:] = 0.95
        draws: dict[str, Draw | None] = {
            "kernel": None, "sampler": neutral, "sampler, top_p 0.95": default,
        }  # fmt: skip
        samples: dict[str, list[float]] = {name: [] for name in draws}
        tokens = {}
        for turn in range(args.rounds + 1):
            for name, draw in draws.items():
                begin = time.perf_counter()
                tokens[name] = machine.decode(inputs, args.steps, draw=draw)
                if turn:
                    ms = (time.perf_counter() - begin) * 1e3 / args.steps
                    samples[name].append(ms)
        if tokens["kernel"].tolist() != tokens["sampler"].tolist():
            raise SystemExit(f"{rows} rows: the sampler's tokens are not the kernel's")
        medians = {name: float(np.median(values)) for name, values in samples.items()}
        for name, ms in medians.items():
            more = (ms - medians["kernel"]) * 1e3
            print(f"{rows:2} rows  {name:20} {ms:8.4f} ms per step  ({more:+.1f} us)", flush=True)
        out.append({"rows": rows, "context": args.context, "ms_per_step": samples})
        del flat, part
        machine.close()
        torch.cuda.empty_cache()
    return out


def main() -> int:
    """Entry point."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rows", default="1,2,4,8")
    parser.add_argument("--vocab", type=int, default=262144)
    parser.add_argument("--blocks", type=int, default=0, help="of a row; 0: as many as are good")
    parser.add_argument("--repeats", type=int, default=100)
    parser.add_argument("--context", type=int, default=8192)
    parser.add_argument("--steps", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--kernels-only", action="store_true")
    args = parser.parse_args()
    record: dict[str, Any] = {
        "provenance": provenance(),
        "vocab": args.vocab,
        "blocks": args.blocks,
        "repeats": args.repeats,
        "steps_per_launch": args.steps,
        "kernels": bench_kernels(args),
    }
    if not args.kernels_only:
        record["steps"] = bench_steps(args)
    folder = Path(os.environ.get("OUT", "bench/results/h200"))
    (folder / "sampler.json").write_text(json.dumps(record, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
