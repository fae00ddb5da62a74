"""What lesson 13 runs: nano on several machines, alone and in company, against the records.

Prompts and recorded bits are those of `bench/agreement.py`. Nothing here draws.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import numpy.typing as npt

from mkref.lessons.recorded import CHECKOUT, bench_record
from mkref.machine.launch import Launch
from mkref.reference.mma import mma
from mkref.reference.scalars import to_bf16

__all__ = ["NEIGHBOURS", "PROMPT", "LaunchSeen", "Logits", "agreement", "answer", "differing"]
__all__ += ["digest", "full_size", "gpu_answer", "gpu_records", "launches", "nano_weights"]
__all__ += ["page_bits", "probe", "recorded_digest", "sequence", "small_terms", "torch_in_company"]

PROMPT = 40
"""Number of the prompt that the lesson follows; it has 31 tokens."""
NEIGHBOURS = (9, 14, 19, 24, 7, 29, 2)
MAX_CONTEXT = 512
Logits = npt.NDArray[np.float32]


@cache
def agreement() -> dict[str, Any]:
    """The record of the CPU."""
    return bench_record("agreement.json")


def answer(machine: str, n_sm: int, tokens: int, neighbours: Sequence[int] = ()) -> Logits:
    """Logits float32 [tokens, V] of prompt number `PROMPT`, greedily answered by nano.

    Args:
        machine: "host", "interpreter" or "cuda".
        n_sm: of the plan.
        tokens: to generate.
        neighbours: numbers of further prompts in the batch, with answers of other lengths.
    """
    from mkref.engine import Engine

    prompts = [agreement()["kernel"]["prompt_ids"][i] for i in (PROMPT, *neighbours)]
    lengths = [tokens, *(1 + 5 * i % tokens for i in range(1, len(prompts)))]
    with Engine.load("nano", machine, n_sm, max_context=MAX_CONTEXT) as engine:
        done = engine.generate_batch(
            prompts, max_tokens=lengths, ignore_eos=True, return_logits=True
        )
    return np.asarray(done[0].logits)


def differing(a: Logits, b: Logits) -> int:
    """How many words of the first tokens differ in any bit."""
    n = min(len(a), len(b))
    return int((a[:n].view(np.uint32) != b[:n].view(np.uint32)).sum())


def digest(logits: Logits) -> str:
    """Of all bits, as the record has it."""
    return hashlib.sha256(logits.tobytes()).hexdigest()[:16]


def recorded_digest() -> str:
    """Of the same answer, in the record."""
    return str(agreement()["kernel"]["logits_sha256"][PROMPT])


def gpu_answer(alone: Logits, tokens: int = 8) -> str:
    """The same answer by a GPU, if there is one that the kernel can use."""
    from mkref.machine.kernels import usable_gpu

    if not usable_gpu():
        return "no GPU here, so nothing was run; the records below are from one"
    got = answer("cuda", 8, tokens)
    return f"GPU, 8 SMs: {differing(alone, got)} of {got.size} logits have other bits [measured]"


def gpu_records() -> list[str]:
    """What was recorded on a GPU about equal bits, and of which commit."""
    tests, nano = bench_record("gpu-tests.json"), bench_record("h200/agreement.json")
    where = tests["provenance"]
    bits = [
        name
        for name in tests["tests"]
        if any(part in name for part in ("_equal", "blocks", "the_kernels", "deterministic"))
    ]
    passed = sum(tests["tests"][name] == "passed" for name in bits)
    equal, nano = nano["machines"]["cuda"]["logits_bitwise_equal"], nano["provenance"]
    return [
        f"GPU tests: {tests['passed']} passed, {tests['failed']} failed; {passed} compare bits",
        f"    {where['gpu']}, {where['date'][:10]}, commit {where['commit']} [measured]",
        f"nano, 50 prompts of 64 tokens, equal to the CPU's bits: {equal}",
        f"    {nano['gpu']}, {nano['date'][:10]}, commit {nano['commit']} [measured]",
    ]


@cache
def nano_weights() -> tuple[Any, Any]:
    """The weights of nano, and PyTorch's model of them in float32."""
    from mkref.paths import models_root
    from mkref.reference.model import Reference
    from mkref.weights.checkpoint import load_checkpoint

    weights = load_checkpoint(models_root() / "nano")
    return weights, Reference(weights.config, weights)


def sequence(prompt: int, tokens: int) -> list[int]:
    """A recorded prompt and the first tokens of its answer."""
    kernel = agreement()["kernel"]
    return [*kernel["prompt_ids"][prompt], *kernel["token_ids"][prompt][:tokens]]


def torch_in_company(rows: int = 8, length: int = 64) -> tuple[int, int]:
    """PyTorch's float32 logits of one sequence alone, and as the first of a batch.

    Returns:
        How many logits of its last token have other bits, and how many logits there are.
    """
    reference = nano_weights()[1]
    batch = [sequence(i, 64)[:length] for i in range(rows)]
    alone, first = reference.next_logits(batch[:1])[0], reference.next_logits(batch)[0]
    return differing(alone[None], first[None]), int(alone.size)


def page_bits(rows: int, length: int = 66) -> npt.NDArray[np.uint16]:
    """Keys and values of one sequence, fed through the kernel so many tokens a step.

    Returns:
        The whole pool as it lies in memory; what nobody wrote is 0xFFFF.
    """
    from mkref.machine import create
    from mkref.machine.base import KernelMachine, StepInputs
    from mkref.plan import build_plan

    tokens = np.array(sequence(PROMPT, 64)[:length], np.int32)
    machine = create("host")
    assert isinstance(machine, KernelMachine)
    weights = nano_weights()[0]
    machine.load(build_plan(weights.config, 2, full_pages=2, sliding_pages=2), weights, 128)
    table = np.tile(np.arange(2, dtype=np.int32), (2, rows, 1))
    for at in range(0, length, rows):
        here = np.arange(min(rows, length - at), dtype=np.int32)
        machine.step(StepInputs(tokens[at + here], at + here, table[:, : len(here)], earlier=here))
    pool = np.asarray(machine.read("kv"))
    machine.close()
    return pool


def full_size() -> list[str]:
    """The kernel at the geometry of the real model against PyTorch, one line per comparison."""
    record = bench_record("h200/full_geometry.json")
    names = {
        "kernel_vs_float32": "kernel, torch float32",
        "bf16_vs_float32": "torch bf16, torch float32",
        "kernel_vs_bf16": "kernel, torch bf16",
    }
    where = record["provenance"]
    lines = [f"{where['gpu']}, {where['date'][:10]}, commit {where['commit']}"]
    for row in record["rows"]:
        n = 4 * row["batch"]
        lines.append(f"batch {row['batch']}, {n} tokens [measured]")
        for key, name in names.items():
            one = row[key]
            lines.append(
                f"  {name:26} KL median {one['kl_median']:.5f}, largest {one['kl_max']:.2f}; "
                f"same best token {one['greedy_agreement'] * n:.0f}"
            )
    return lines


def small_terms(powers: Sequence[int] = (23, 24, 25, 26, 27)) -> list[tuple[int, str, str, str]]:
    """1 plus 16 products of 2^-p: the exact sum, float32 one after another, and one mma.

    Returns:
        Per p what is above 1, in units of the last place of 1 (2^-23).
    """
    rows = []
    for power in powers:
        a, b = np.zeros((16, 16), np.float32), np.zeros((16, 8), np.float32)
        a[0], b[:, 0] = 2.0**-12, 2.0 ** (12 - power)
        c = np.zeros((16, 8), np.float32)
        c[0, 0] = 1
        plain = np.float32(1)
        for _ in range(16):
            plain = plain + np.float32(2.0**-power)
        core = mma(c, to_bf16(a), to_bf16(b))[0, 0]
        sums = (1 + 16 * 2.0**-power, float(plain), float(core))
        exact, one_by_one, tensor = (f"{(s - 1) * 2**23:g}" for s in sums)
        rows.append((power, exact, one_by_one, tensor))
    return rows


OPERANDS = {
    "gauss": "near 1",
    "wide": "spread over 12 powers of two",
    "wider": "spread over 28",
    "edge": "spread over 140, with subnormal ones and sums that overflow",
}
"""Kinds of operands of bench/probe_mma.py."""


def probe() -> list[str]:
    """How many outputs of an H200 had the bits of the best models of an mma."""
    import json

    path = CHECKOUT / "bench" / "results" / "h200" / "mma_probe.json"
    record = json.loads(path.read_text(encoding="utf-8"))
    where = record.get("provenance", record)  # the first records had the name of the GPU only
    kinds = record["ranking"][0][1]
    date = where["date"][:10] if "date" in where else "date not kept"
    lines = [f"{where['gpu']}, {date}; operands:"]
    lines += [f"    {kind:6} {says}" for kind, says in OPERANDS.items() if kind in kinds]
    for name, shares in record["ranking"][:5]:
        each = ", ".join(f"{kind} {share:.2%}" for kind, share in shares.items())
        lines.append(f"{name:40} {each} [measured]")
    return lines


@dataclass(frozen=True)
class LaunchSeen:
    """A launch of the engine: its steps, and for every active row who it belongs to.

    Attributes:
        steps: that it took.
        rows: per row the number of the sequence, and whether it fed a token of its prompt.
    """

    steps: int
    rows: tuple[tuple[int, bool], ...]


class _Counting(Launch):
    """A launch that counts the steps whose tokens were taken."""

    def __init__(self, launch: Launch, count: Callable[[], None]) -> None:
        self.launch, self.count, self.n_steps = launch, count, launch.n_steps

    def __next__(self) -> npt.NDArray[Any]:
        tokens = next(self.launch)
        self.count()
        return tokens

    def cancel(self) -> None:
        """As the launch."""
        self.launch.cancel()

    def close(self) -> None:
        """As the launch."""
        self.launch.close()


def launches(tokens: Sequence[int] = (40, 12)) -> list[LaunchSeen]:
    """What the engine launches for two requests that come together; `tokens` of their answers."""
    from mkref.engine import Engine

    prompts = [agreement()["kernel"]["prompt_ids"][i] for i in (PROMPT, NEIGHBOURS[0])]
    seen: list[tuple[int, tuple[tuple[int, bool], ...]]] = []
    pages: list[int] = []
    with Engine.load("nano", "interpreter", 1, max_context=MAX_CONTEXT) as engine:
        machine: Any = engine.machine
        start, counted = machine.start, 0

        def spy(inputs: Any, n_steps: int = 1, **settings: Any) -> Any:
            rows = []
            for page, position in zip(inputs.page_table[0, :, 0], inputs.positions, strict=True):
                if int(page) not in pages:
                    pages.append(int(page))
                number = pages.index(int(page))
                rows.append((number, bool(position < len(prompts[number]))))
            seen.append((counted, tuple(rows)))
            return _Counting(start(inputs, n_steps, **settings), count)

        def count() -> None:
            nonlocal counted
            counted += 1

        machine.start = spy
        engine.generate_batch(prompts, max_tokens=list(tokens), ignore_eos=True)
    ends = [begin for begin, _ in seen[1:]] + [counted]
    return [LaunchSeen(end - begin, rows) for (begin, rows), end in zip(seen, ends, strict=True)]
