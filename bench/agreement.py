"""Do all machines write the same tokens? nano, 50 prompts, 64 greedy tokens each.

    python bench/agreement.py                       every machine that needs no GPU
    python bench/agreement.py --machines cuda       the GPU, against the record of the CPU

The kernel's machines (host with several SM counts, interpreter, cuda) must give equal logits, bit
for bit: each record holds one hash per prompt over all of its logits. PyTorch and transformers sum
in another order, so they are fed the kernel's own tokens and must choose the same next token
everywhere, except at near-ties, of which there are two kinds:

    tokens    in the kernel's logits their token lies at most `NEAR_TIE` below ours
    router    it lies further below, but float32 takes other experts for this token than the
              contract's roundings do, and in the first layer where it does the margin between the
              last expert taken and the next is at most `ROUTER_TIE`

Every place is listed with its kind; any other is beyond tolerance. That the router explains a place
says that an honest rounding can have made it, not that none but the router did. Records:
bench/results/agreement.json, bench/results/h200/agreement.json.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import sys
import time
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from bench.provenance import provenance
from mkref.engine import Engine
from mkref.paths import models_root
from mkref.reference.model import Reference
from mkref.reference.routing import OtherExperts, Routers, other_experts
from mkref.weights.checkpoint import load_checkpoint

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from mkref.config import NorthConfig

RECORD = ROOT / "bench" / "results" / "agreement.json"
N_PROMPTS, N_TOKENS = 50, 64
Logits = npt.NDArray[np.float32]
NEAR_TIE = 0.25
"""Logits; those of nano spread over about 20. From torch's float32 the kernel differs by 0.030
(root mean square) and torch's bfloat16 by 0.052; where an expert changes, single logits differ by
up to 3.1 and 3.3.
"""
ROUTER_TIE = 0.02
"""Router logits; the margin of nano's routers is 0.14 to 0.42 in the median, by layer. By roundings
alone, a router logit of the contract differs from float32 by 0.0049 (root mean square;
`router_noise`, in the record), so a margin, the difference of two, by 0.0049 * sqrt(2) = 0.0069.
This is three times that, rounded down.
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


def run_kernel(name: str, n_sm: int | None) -> tuple[dict[str, Any], list[Logits]]:
    """Generate on a machine that runs the task list: the record, and per prompt the logits."""
    begin = time.perf_counter()
    with Engine.load("nano", machine=name, n_sm=n_sm, max_context=512) as engine:
        done = engine.generate_batch(
            prompts(), max_tokens=N_TOKENS, ignore_eos=True, return_logits=True
        )
    logits = [np.asarray(c.logits) for c in done]
    record = {
        "seconds": round(time.perf_counter() - begin, 1),
        "prompt_ids": [list(c.prompt_token_ids) for c in done],
        "token_ids": [list(c.token_ids) for c in done],
        "logits_sha256": [hashlib.sha256(x.tobytes()).hexdigest()[:16] for x in logits],
        "gaps": [np.diff(np.sort(x, axis=1)[:, -2:], axis=1)[:, 0].tolist() for x in logits],
    }
    return record, logits


def run_oracle(name: str, kernel: dict[str, Any], logits: list[Logits]) -> dict[str, Any]:
    """Feed the kernel's tokens to PyTorch or transformers and list where another token is best.

    Args:
        name: "torch" or "transformers".
        kernel: record of a kernel's run.
        logits: of the same run.
    """
    forward = _oracle(name)
    differ = []
    for row, (prompt, answer) in enumerate(
        zip(kernel["prompt_ids"], kernel["token_ids"], strict=True)
    ):
        theirs = forward(torch.tensor([prompt + answer]))[0, len(prompt) - 1 : -1]
        assert theirs.isfinite().all(), f"{name}, prompt {row}: logits that are not finite"
        for at, (own, best) in enumerate(zip(answer, theirs.argmax(-1).tolist(), strict=True)):
            if own != best:
                gap = float(logits[row][at][own] - logits[row][at][best])
                place = {"prompt": row, "token": at, "kernel": own, name: best}
                differ.append({**place, **_judge(gap, prompt + answer[:at])})
    wrong = sum(place["tie"] is None for place in differ)
    return {"compared": N_PROMPTS * N_TOKENS, "differ": differ, "beyond_tolerance": wrong}


def _judge(gap: float, tokens: list[int]) -> dict[str, Any]:
    found: dict[str, Any] = {"gap": round(gap, 4)}
    routed = OtherExperts((), None)
    if not gap <= NEAR_TIE:
        routed = other_experts(*_nano(), tokens)
        margin = None if routed.margin is None else round(routed.margin, 4)
        found |= {"other_experts": list(routed.layers), "router_margin": margin}
    return {**found, "tie": tie(gap, routed.margin)}


def tie(gap: float, router_margin: float | None) -> str | None:
    """Which near-tie explains another token: "tokens", "router", or None.

    Args:
        gap: by how much their token is below ours, in the kernel's logits.
        router_margin: of the first layer with other experts, None if there is none.
    """
    if gap <= NEAR_TIE:
        return "tokens"
    # A gap that is not a number is explained by nothing.
    if gap > NEAR_TIE and router_margin is not None and router_margin <= ROUTER_TIE:
        return "router"
    return None


def router_noise(kernel: dict[str, Any]) -> float:
    """How far roundings alone move a router logit: root mean square over all tokens and layers."""
    noise = [
        Routers.of(*_nano(), prompt + answer).noise().flatten()
        for prompt, answer in zip(kernel["prompt_ids"], kernel["token_ids"], strict=True)
    ]
    return float(torch.cat(noise).square().mean().sqrt())


@cache
def _nano() -> tuple[NorthConfig, Mapping[str, torch.Tensor]]:
    weights = load_checkpoint(models_root() / "nano")
    return weights.config, weights


def _oracle(name: str) -> Callable[[torch.Tensor], torch.Tensor]:
    if name == "transformers":
        from transformers import AutoModelForCausalLM

        model = AutoModelForCausalLM.from_pretrained(models_root() / "nano", dtype=torch.float32)
        return lambda tokens: model(tokens).logits
    reference = Reference(*_nano(), dtype=torch.float32)
    return lambda tokens: reference.forward(tokens)


def main() -> int:
    """Run the machines, compare, write the record; exit status 1 if they disagree."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--machines", default=CPU_MACHINES)
    args = parser.parse_args()
    torch.set_grad_enabled(False)
    on_gpu = "cuda" in args.machines
    first: dict[str, Any] | None = json.loads(RECORD.read_text())["kernel"] if on_gpu else None
    logits: list[Logits] = []
    machines: dict[str, Any] = {}
    bad = []
    for spec in args.machines.split(","):
        name, _, n_sm = spec.partition(":")
        if name in ("torch", "transformers"):
            assert first is not None, "list a kernel machine before the oracles"
            assert logits, "the oracles need the logits of a kernel machine of this run"
            found = run_oracle(name, first, logits)
            ok = not found["beyond_tolerance"]
        else:
            result, of_run = run_kernel(name, int(n_sm) if n_sm else None)
            if first is None:
                first, logits = result, of_run
            found = {
                "seconds": result["seconds"],
                "tokens_equal": result["token_ids"] == first["token_ids"],
                "logits_bitwise_equal": result["logits_sha256"] == first["logits_sha256"],
            }
            ok = found["tokens_equal"] and found["logits_bitwise_equal"]
        machines[spec] = found
        bad += [] if ok else [spec]
        said = {k: v for k, v in found.items() if k != "differ"}
        print(spec, "ok" if ok else "DIFFERS", said, flush=True)
        for place in found.get("differ", ()):
            print("   ", place, flush=True)
    record: dict[str, Any] = {"provenance": provenance(), "near_tie": NEAR_TIE}
    target = Path(os.environ.get("OUT", ROOT / "bench/results/h200")) / "agreement.json"
    if not on_gpu:
        assert first is not None, "list a kernel machine"
        target = RECORD
        record |= {"router_tie": ROUTER_TIE, "router_noise": round(router_noise(first), 5)}
        print(f"router noise {record['router_noise']}")
    record |= {"machines": machines} if on_gpu else {"machines": machines, "kernel": first}
    target.write_text(json.dumps(record, indent=1 if on_gpu else None) + "\n")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
