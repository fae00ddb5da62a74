"""The kernel at the geometry of North Mini Code, on a GPU with 80 GB or more: accuracy, memory,
time, no hangs.

    python bench/full_geometry.py [--contexts 1024,8192,32768] [--batches 1,2,4,8] [--steps 256]

Synthetic weights. For every case the logits are compared with `mkref.reference` on the same
weights: in bf16, as transformers would run it, and in the kernel's numeric contract; and the bf16
reference is compared with float32 activations, which is the noise that bf16 itself brings. The KV
cache is filled with random keys and values that all of them share. Results go to $OUT (or
bench/results/h200) as `full_geometry.json`, with their provenance.
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

from bench.provenance import provenance
from mkref.config import NORTH_MINI_CODE, NorthConfig
from mkref.machine.base import StepInputs
from mkref.machine.cuda import CudaMachine, device_sms
from mkref.plan.build import PAGE, build_plan
from mkref.plan.verify import verify
from mkref.reference.model import KVCache, Reference
from mkref.weights.packed import PackedWeights, pack_into
from mkref.weights.synthetic import synthetic_weights

BOUND_BYTES_PER_S = 4.814e12


def fill_cache(
    machine: CudaMachine, config: NorthConfig, rows: int, length: int, table: np.ndarray, seed: int
) -> list[KVCache]:
    """Random keys and values for positions 0..length-1 of every row: into the pool, and as
    reference caches.
    """
    generator = torch.Generator("cuda").manual_seed(seed)
    caches = [KVCache() for _ in range(rows)]
    pool = torch.as_tensor(machine.buffers["kv"], device="cuda")
    pool = pool[: machine.table["kv"].n_bytes].view(torch.bfloat16).view(-1, 256)
    heads, dim, n_pages = config.num_key_value_heads, config.head_dim, -(-length // PAGE)
    per_head = dim // 2
    for layer in range(config.num_hidden_layers):
        base = machine.plan.pool.base(config, layer)
        kind = int(config.is_sliding(layer))
        for row in range(rows):
            k = torch.randn(heads, n_pages * PAGE, dim, generator=generator, device="cuda").to(
                torch.bfloat16
            )
            v = torch.randn(heads, n_pages * PAGE, dim, generator=generator, device="cuda").to(
                torch.bfloat16
            )
            caches[row].keys.append(k[None, :, :length].clone())
            caches[row].values.append(v[None, :, :length].clone())
            caches[row].length = length
            first = max(0, length - config.sliding_window) // PAGE if kind else 0
            packed = torch.empty(n_pages, heads, per_head, 256, dtype=torch.bfloat16, device="cuda")
            keys = k.view(heads, n_pages, PAGE, dim).transpose(0, 1).reshape(-1, dim)
            values = v.view(heads, n_pages, PAGE, dim).permute(1, 0, 3, 2).reshape(-1, PAGE)
            halves = torch.empty(
                2, n_pages * heads * per_head // 2, 256, dtype=torch.bfloat16, device="cuda"
            )
            pack_into(halves[0], keys)
            pack_into(halves[1], values)
            packed[:, :, : per_head // 2] = halves[0].view(n_pages, heads, per_head // 2, 256)
            packed[:, :, per_head // 2 :] = halves[1].view(n_pages, heads, per_head // 2, 256)
            where = torch.as_tensor(table[kind, row, first:n_pages].astype(np.int64), device="cuda")
            view = pool[base : base + machine.plan.pool.layer_tiles(config, layer)].view(
                -1, heads, per_head, 256
            )
            view[where] = packed[first:]
    return caches


def page_tables(config: NorthConfig, rows: int, context: int) -> tuple[np.ndarray, tuple[int, int]]:
    """Page tables int32 [2, rows, pages] for `context` tokens, and the pages that both kinds need.

    Sliding pages of a row are used in turn, so the pool need not hold the whole context.
    """
    pages = -(-context // PAGE)
    window_pages = min(pages, config.sliding_window // PAGE + 6)
    table = np.zeros((2, rows, pages), np.int32)
    for row in range(rows):
        table[0, row] = row * pages + np.arange(pages)
        table[1, row] = row * window_pages + np.arange(pages) % window_pages
    return table, (rows * pages, rows * window_pages)


def distances(ours: torch.Tensor, theirs: torch.Tensor) -> dict[str, float]:
    """Relative error, KL and greedy agreement of two float tensors [n, V]."""
    ours, theirs = ours.double(), theirs.double()
    kl = torch.nn.functional.kl_div(
        ours.log_softmax(-1), theirs.log_softmax(-1), log_target=True, reduction="none"
    ).sum(-1)
    return {
        "relative_error": float((ours - theirs).norm() / theirs.norm()),
        "kl_median": float(kl.median()),
        "kl_p90": float(kl.quantile(0.9)),
        "kl_max": float(kl.max()),
        "greedy_agreement": float((ours.argmax(-1) == theirs.argmax(-1)).double().mean()),
    }


def one_case(
    machine: CudaMachine, weights: PackedWeights, rows: int, context: int, steps: int, compare: int
) -> dict[str, Any]:
    """Fill `context - steps` tokens, run `steps` steps, compare the first `compare` of them."""
    config = weights.config
    start = context - steps
    table, (full_pages, sliding_pages) = page_tables(config, rows, context)
    plan = build_plan(config, device_sms(), full_pages=full_pages, sliding_pages=sliding_pages)
    machine.load(plan, weights, context)
    caches = fill_cache(machine, config, rows, start, table, seed=rows * 1000 + context)
    tokens = (
        np.random.default_rng(context + rows)
        .integers(0, config.vocab_size, (steps, rows))
        .astype(np.int32)
    )
    ours, times = [], []
    for step in range(steps):
        inputs = StepInputs(tokens[step], np.full(rows, start + step, np.int32), table)
        begin = time.perf_counter()
        machine.step(inputs)
        times.append((time.perf_counter() - begin) * 1e3)
        if step < compare:
            ours.append(machine.logits(rows))
    result: dict[str, Any] = {"batch": rows, "context": context, "steps": steps, "hangs": 0}
    # Bytes with the number of experts that independent uniform routing hits (derived, not counted).
    experts = config.expected_distinct_experts(rows)
    result["bytes"] = round(
        config.weight_bytes_per_token(experts) + rows * config.kv_bytes(context)
    )
    result["ms_per_step"] = float(np.median(times[8:]))
    result["ms_p10_p90"] = [float(v) for v in np.percentile(times[8:], [10, 90])]
    result["tokens_per_s"] = rows * 1e3 / result["ms_per_step"]
    result["samples_ms"] = [round(t, 4) for t in times]
    if compare:
        result.update(
            accuracy(
                weights, caches, tokens[:compare], torch.as_tensor(np.stack(ours), device="cuda")
            )
        )
    return result


def accuracy(
    weights: PackedWeights, caches: list[KVCache], tokens: np.ndarray, ours: torch.Tensor
) -> dict[str, Any]:
    """Compare logits [compare, rows, V] with three references that start from the same caches."""

    def run(reference: Reference, dtype: torch.dtype) -> torch.Tensor:
        rows = []
        for row, cache in enumerate(caches):
            own = KVCache(
                cache.length, [k.to(dtype) for k in cache.keys], [v.to(dtype) for v in cache.values]
            )
            fed = torch.as_tensor(tokens[:, row].astype(np.int64), device="cuda")
            rows.append(torch.cat([reference.forward(t[None, None], own)[0].float() for t in fed]))
        return torch.stack(rows, 1)

    config = weights.config
    bf16 = run(Reference(config, weights, dtype=torch.bfloat16), torch.bfloat16)
    f32 = run(Reference(config, weights, dtype=torch.float32), torch.float32)
    flat = lambda t: t.reshape(-1, t.shape[-1])  # noqa: E731
    return {
        "kernel_vs_float32": distances(flat(ours), flat(f32)),
        "kernel_vs_bf16": distances(flat(ours), flat(bf16)),
        "bf16_vs_float32": distances(flat(bf16), flat(f32)),
    }


def main() -> int:
    """Run all cases and write the record."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--contexts", default="1024,8192,32768")
    parser.add_argument("--batches", default="1,2,4,8")
    parser.add_argument("--steps", type=int, default=256)
    parser.add_argument("--compare", type=int, default=4)
    args = parser.parse_args()
    folder = Path(os.environ.get("OUT", "bench/results/h200"))
    config = NORTH_MINI_CODE
    begin = time.perf_counter()
    weights = synthetic_weights(config, seed=0, device="cuda")
    torch.cuda.synchronize()
    made = time.perf_counter() - begin
    plan = build_plan(config, device_sms(), full_pages=16, sliding_pages=16)
    report = verify(plan)
    print(f"weights {made:.1f} s, plan of {report.n_tasks} tasks verified", flush=True)
    machine, rows = CudaMachine(), []
    for context in map(int, args.contexts.split(",")):
        for batch in map(int, args.batches.split(",")):
            free, total = torch.cuda.mem_get_info()
            case = one_case(machine, weights, batch, context, args.steps, args.compare)
            free, total = torch.cuda.mem_get_info()
            case["device_memory_used_gb"] = (total - free) / 1e9
            rows.append(case)
            print({k: v for k, v in case.items() if k != "samples_ms"}, flush=True)
            record = {"provenance": provenance(), "weights_s": made, "rows": rows}
            (folder / "full_geometry.json").write_text(json.dumps(record, indent=1))
            machine.close()
            torch.cuda.empty_cache()
    return 0


if __name__ == "__main__":
    sys.exit(main())
