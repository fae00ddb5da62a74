"""Do all machines write the same tokens? nano, 50 prompts, 64 greedy tokens each.

    python bench/agreement.py                       every machine that needs no GPU
    python bench/agreement.py --machines cuda       the GPU, against the record of the CPU

The kernel's machines (host with several SM counts, interpreter, cuda) must give equal logits, bit
for bit: each record holds one hash per prompt over all of its logits. PyTorch and transformers sum
in another order, so they are fed the kernel's own tokens and must choose the same next token
everywhere, except where the kernel's two best logits lie closer than `NEAR_TIE`; those places are
listed. Records: bench/results/agreement.json, bench/results/h200/agreement.json.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from bench.provenance import provenance
from mkref.engine import Engine
from mkref.paths import models_root
from mkref.reference.model import Reference

if TYPE_CHECKING:
    from collections.abc import Callable

RECORD = ROOT / "bench" / "results" / "agreement.json"
N_PROMPTS, N_TOKENS = 50, 64
NEAR_TIE = 0.25
"""Logits; those of nano spread over about 20. From torch's float32 the kernel differs by 0.030
(root mean square) and torch's bfloat16 by 0.052; where an expert changes, single logits differ by
up to 3.1 and 3.3.
"""
CPU_MACHINES = "host:1,host:2,host:4,host:7,interpreter:1,torch,transformers"


def prompts() -> list[str]:
    """The first lines of 50 functions of modules that nano never saw, spread evenly."""
    found = []
    for path in sorted((ROOT / "tests" / "data" / "nano" / "Lib").rglob("*.txt")):
        lines = path.read_text().splitlines()
        found += [
            "\n".join(lines[max(0, i - 3) : i + 1]) + "\n"
            for i, line in enumerate(lines)
            if "def " in line
        ]
    return [found[i * len(found) // N_PROMPTS] for i in range(N_PROMPTS)]


def run_kernel(name: str, n_sm: int | None) -> dict[str, Any]:
    """Generate on a machine that runs the task list; logits are kept for the near-ties."""
    begin = time.perf_counter()
    with Engine.load("nano", machine=name, n_sm=n_sm, max_context=512) as engine:
        done = engine.generate_batch(
            prompts(), max_tokens=N_TOKENS, ignore_eos=True, return_logits=True
        )
    logits = [np.asarray(c.logits) for c in done]
    return {
        "seconds": round(time.perf_counter() - begin, 1),
        "prompt_ids": [list(c.prompt_token_ids) for c in done],
        "token_ids": [list(c.token_ids) for c in done],
        "logits_sha256": [hashlib.sha256(x.tobytes()).hexdigest()[:16] for x in logits],
        "gaps": [np.diff(np.sort(x, axis=1)[:, -2:], axis=1)[:, 0].tolist() for x in logits],
    }


def run_oracle(name: str, kernel: dict[str, Any]) -> dict[str, Any]:
    """Feed the kernel's tokens to PyTorch or transformers and list where another token is best."""
    forward = _oracle(name)
    differ = []
    for row, (prompt, answer) in enumerate(
        zip(kernel["prompt_ids"], kernel["token_ids"], strict=True)
    ):
        logits = forward(torch.tensor([prompt + answer]))[0]
        best = logits[len(prompt) - 1 : -1].argmax(-1).tolist()
        for at, (ours, theirs) in enumerate(zip(answer, best, strict=True)):
            if ours != theirs:
                gap = kernel["gaps"][row][at]
                differ.append(
                    {"prompt": row, "token": at, "kernel": ours, name: theirs, "gap": round(gap, 4)}
                )
    wrong = [d for d in differ if d["gap"] > NEAR_TIE]
    return {"compared": N_PROMPTS * N_TOKENS, "near_ties": differ, "beyond_tolerance": len(wrong)}


def _oracle(name: str) -> Callable[[torch.Tensor], torch.Tensor]:
    folder = models_root() / "nano"
    if name == "transformers":
        from transformers import AutoModelForCausalLM

        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        return lambda tokens: model(tokens).logits
    from mkref.weights.checkpoint import load_checkpoint

    weights = load_checkpoint(folder)
    reference = Reference(weights.config, weights, dtype=torch.float32)
    return lambda tokens: reference.forward(tokens)


def main() -> int:
    """Run the machines, compare, write the record; exit status 1 if they disagree."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--machines", default=CPU_MACHINES)
    args = parser.parse_args()
    torch.set_grad_enabled(False)
    on_gpu = "cuda" in args.machines
    first: dict[str, Any] | None = json.loads(RECORD.read_text())["kernel"] if on_gpu else None
    machines: dict[str, Any] = {}
    for spec in args.machines.split(","):
        name, _, n_sm = spec.partition(":")
        if name in ("torch", "transformers"):
            assert first is not None, "list a kernel machine before the oracles"
            machines[spec] = run_oracle(name, first)
            ok = not machines[spec]["beyond_tolerance"]
        else:
            result = run_kernel(name, int(n_sm) if n_sm else None)
            first = first or result
            machines[spec] = {
                "seconds": result["seconds"],
                "tokens_equal": result["token_ids"] == first["token_ids"],
                "logits_bitwise_equal": result["logits_sha256"] == first["logits_sha256"],
            }
            ok = machines[spec]["tokens_equal"] and machines[spec]["logits_bitwise_equal"]
        print(
            spec,
            "ok" if ok else "DIFFERS",
            {k: v for k, v in machines[spec].items() if k != "near_ties"},
            flush=True,
        )
    target = (
        Path(os.environ.get("OUT", ROOT / "bench/results/h200")) / "agreement.json"
        if on_gpu
        else RECORD
    )
    kernel = {} if on_gpu else {"kernel": first}
    record = {"provenance": provenance(), "near_tie": NEAR_TIE, "machines": machines, **kernel}
    target.write_text(json.dumps(record, indent=None if first and not on_gpu else 1) + "\n")
    bad = [
        m
        for m in machines.values()
        if m.get("beyond_tolerance") or m.get("logits_bitwise_equal") is False
    ]
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
