"""A sequence on a machine, fed by the kernel or by `Prefill`, and its cache. No tests here."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from mkref.engine.prefill import Prefill
from mkref.machine.host import HostMachine
from mkref.machine.inputs import StepInputs
from mkref.machine.interpreter import InterpreterMachine
from mkref.plan.build import PAGE, build_plan
from mkref.reference.scalars import from_bf16
from mkref.weights.layout import unpack_kv_page

if TYPE_CHECKING:
    from mkref.machine.base import KernelMachine
    from mkref.weights.packed import PackedWeights

__all__ = ["Lab", "far_apart", "prompt"]

Floats = npt.NDArray[np.float32]
ROWS = 8


def prompt(vocab_size: int, n: int, seed: int = 1) -> list[int]:
    """Random tokens."""
    return np.random.default_rng(seed).integers(0, vocab_size, n).tolist()


@dataclass
class Lab:
    """One sequence on one machine.

    Attributes:
        machine: loaded.
        table: int32 [2, pages], all pages of the sequence, in any order.
        chunk: of the `Prefill` that `torch` makes.
    """

    machine: KernelMachine
    table: npt.NDArray[np.int32]
    chunk: int = 2048

    @classmethod
    def of(
        cls,
        weights: PackedWeights,
        *,
        seed: int = 0,
        context: int = 512,
        host: bool = False,
        chunk: int = 2048,
        machine: KernelMachine | None = None,
        n_sm: int = 2,
    ) -> Lab:
        """A fresh machine with shuffled pages and a few pages to spare."""
        machine = machine or (HostMachine() if host else InterpreterMachine())
        pages = -(-context // PAGE)
        budgets = (pages + 3, pages + 5)
        plan = build_plan(weights.config, n_sm, full_pages=budgets[0], sliding_pages=budgets[1])
        machine.load(plan, weights, context)
        rng = np.random.default_rng(seed)
        table = np.stack([rng.permutation(budget)[:pages] for budget in budgets])
        return cls(machine, table.astype(np.int32), chunk)

    def kernel(self, tokens: Sequence[int], position: int = 0) -> None:
        """Feed tokens, up to eight rows to a step."""
        for begin in range(0, len(tokens), ROWS):
            part = np.array(tokens[begin : begin + ROWS], np.int32)
            at = np.arange(len(part), dtype=np.int32)
            table = np.repeat(self.table[:, None], len(part), axis=1)
            where = position + begin + at
            self.machine.step(StepInputs(part, where.astype(np.int32), table, earlier=at))

    def torch(self, tokens: Sequence[int], position: int = 0, sizes: Sequence[int] = ()) -> None:
        """Feed tokens in chunks of the given sizes, the rest in one."""
        prefill, begin = Prefill(self.machine, self.chunk), 0
        for size in (*sizes, len(tokens)):
            part = tokens[begin : begin + size]
            if part:
                prefill.run(part, position + begin, self.table)
            begin += len(part)

    def logits(self, token: int, position: int) -> Floats:
        """Logits after one more token through the kernel: float32 [V]."""
        one = np.array([token], np.int32), np.array([position], np.int32)
        self.machine.step(StepInputs(*one, self.table[:, None]))
        return self.machine.logits(1)[0]

    def cache(self, n: int, layer: int, first: int = 0) -> Floats:
        """Keys and values of tokens `first` .. `n - 1`: float32 [2, J, tokens, D]."""
        config, pool = self.machine.plan.config, self.machine.plan.pool
        base, tiles = pool.base(config, layer), pool.layer_tiles(config, layer)
        heads, dim = config.num_key_value_heads, config.head_dim
        pages = self.machine.read("kv")[base : base + tiles].reshape(-1, heads, dim // 2, 256)
        begin = first // PAGE
        held = self.table[int(config.is_sliding(layer)), begin : -(-n // PAGE)]
        parts = [
            np.stack([np.stack(unpack_kv_page(pages[page, head], dim)) for head in range(heads)], 1)
            for page in held
        ]  # [2, J, 64, D] each
        words = np.concatenate(parts, axis=2)[:, :, first - begin * PAGE : n - begin * PAGE]
        return from_bf16(words)

    def close(self) -> None:
        """Give the memory back."""
        self.machine.close()


def far_apart(ours: Floats, theirs: Floats) -> tuple[float, float, float]:
    """Largest and root mean square difference, and the share that differs by more than 0.04; all in
    units of the root mean square of `theirs`. NaN anywhere is infinitely far.
    """
    if not (np.isfinite(ours).all() and np.isfinite(theirs).all()):
        return np.inf, np.inf, np.inf
    scale = np.sqrt(np.square(theirs, dtype=np.float64).mean())
    gap = np.abs(ours.astype(np.float64) - theirs) / scale
    return float(gap.max()), float(np.sqrt(np.square(gap).mean())), float((gap > 0.04).mean())
