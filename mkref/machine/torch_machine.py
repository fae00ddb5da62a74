"""The machine without a kernel: `mkref.reference` over the same paged KV cache, on any device.

It takes the same inputs as the others, so the engine drives it unchanged, and draws tokens with the
kernel's own generator (`mkref.reference.sampling`). Rows are computed one after another, each by
itself. It can also take a whole prompt at once (`prefill`), which the kernel does not.

What it does not do: run a plan (of the plan it uses the geometry and the page budget), offer the
kernel's buffers, or equal the kernel bit for bit: its sums are torch's.

Notation: J key/value heads, D head dimension, T new tokens, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from typing import TYPE_CHECKING, Literal

import numpy as np
import torch
from torch import Tensor

from mkref.errors import MachineError
from mkref.machine.draw import check_draw, effective_bans
from mkref.machine.draw_rows import draw_rows
from mkref.machine.inputs import StepInputs, check_launch, check_stops
from mkref.machine.interface import Machine
from mkref.machine.launch import Launch, LazyLaunch
from mkref.machine.sampler import check_counts
from mkref.plan.buffers import STOP_IDS
from mkref.plan.build import PAGE, Plan
from mkref.plan.runtime import launch_ends
from mkref.reference.drawing import counted
from mkref.reference.model import KVCache, Reference
from mkref.reference.sampling import sample

if TYPE_CHECKING:
    from numpy.typing import ArrayLike

    from mkref.machine.draw import Draw, LogProbs
    from mkref.weights.packed import PackedWeights

__all__ = ["TorchMachine"]

UNPACK_BYTES = 1 << 28
"""Weights of at most this many bytes are unpacked once, not every time that they are used."""


class _PagedCache(KVCache):
    """Keys and values of one sequence, in the pages that its page table names.

    Args:
        pools: per layer, keys and values [pages, J, 64, D]; filled in when a layer is first used.
        plan: geometry and page budget.
        pages: int [2, pages of the row]; -1 where a page is gone.
        length: tokens that are in the cache.
    """

    def __init__(
        self, pools: dict[int, tuple[Tensor, Tensor]], plan: Plan, pages: np.ndarray, length: int
    ) -> None:
        super().__init__(length)
        self.pools, self.plan, self.pages = pools, plan, pages

    def append(self, layer: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Store [1, J, T, D] and return everything up to it, zeros where a page is gone."""
        sliding = self.plan.config.is_sliding(layer)
        if layer not in self.pools:
            budget = self.plan.pool.sliding_pages if sliding else self.plan.pool.full_pages
            shape = (budget, k.shape[1], PAGE, k.shape[3])
            # Poison: a key that nobody wrote shows in the logits.
            empty = k.new_full(shape, float("nan"))
            self.pools[layer] = (empty, empty.clone())
        pages = self.pages[int(sliding)]
        out = []
        for pool, new in zip(self.pools[layer], (k, v), strict=True):
            out.append(torch.cat([self._read(pool, pages), new], dim=2))
            self._write(pool, pages, new[0])
        return out[0], out[1]

    def _read(self, pool: Tensor, pages: np.ndarray) -> Tensor:
        """Tokens 0 .. length - 1: [1, J, length, D]."""
        wanted = pages[: -(-self.length // PAGE)]
        held = pool[torch.as_tensor(np.maximum(wanted, 0), dtype=torch.long, device=pool.device)]
        held[torch.as_tensor(wanted < 0, device=pool.device)] = 0
        # [pages, J, 64, D] -> [1, J, tokens, D]
        return held.transpose(0, 1).flatten(1, 2)[None, :, : self.length]

    def _write(self, pool: Tensor, pages: np.ndarray, new: Tensor) -> None:
        """Put [J, T, D] behind the tokens that are there; what has no page is dropped."""
        end = self.length + new.shape[1]
        for page in range(self.length // PAGE, (end - 1) // PAGE + 1):
            if pages[page] >= 0:
                first, last = max(page * PAGE, self.length), min((page + 1) * PAGE, end)
                part = new[:, first - self.length : last - self.length]
                pool[int(pages[page]), :, first - page * PAGE : last - page * PAGE] = part


class TorchMachine(Machine):
    """Runs `mkref.reference.model.Reference`.

    Args:
        device: "auto" (a GPU that torch sees, else the CPU) or a torch device; the weights must be
            loaded there.
        numerics: "contract" rounds where docs/numerics.md does, "plain" where transformers does.
        dtype: of "plain" arithmetic: "float32", "float64" or "bfloat16".

    Raises:
        MachineError: torch does not have that device.
    """

    name = "torch"

    def __init__(
        self,
        *,
        device: str = "auto",
        numerics: Literal["plain", "contract"] = "contract",
        dtype: str = "float32",
    ) -> None:
        if device == "auto":
            device = "cuda" if torch.cuda.is_available() else "cpu"
        try:
            torch.empty(1, device=device)
        except (AssertionError, RuntimeError) as error:
            reason = str(error).splitlines()[0]
            raise MachineError(
                f"device: torch cannot use {device!r} ({reason}); 'auto' takes one that it can"
            ) from error
        if dtype not in ("float32", "float64", "bfloat16"):
            raise MachineError(f"dtype: {dtype!r}; must be float32, float64 or bfloat16")
        if numerics not in ("plain", "contract"):
            raise MachineError(f"numerics: {numerics!r}; must be plain or contract")
        self.device = device
        self.numerics: Literal["plain", "contract"] = numerics
        self.dtype: torch.dtype = getattr(torch, dtype)
        self.reference: Reference | None = None
        self._pools: dict[int, tuple[Tensor, Tensor]] = {}
        self._logits = np.zeros((0, 0), np.float32)
        self._counts = np.zeros((0, 0), np.uint16)

    def load(self, plan: Plan, weights: PackedWeights, max_context: int) -> None:
        """See `Machine.load`; nothing is built."""
        self.plan, self.max_context = plan, max_context
        self._pools = {}
        self._counts = np.zeros((plan.rows, plan.config.vocab_size), np.uint16)
        tensors: Mapping[str, Tensor] = weights
        if weights.tiles.nbytes <= UNPACK_BYTES:
            tensors = {name: weights[name] for name in weights}
        self.reference = Reference(plan.config, tensors, dtype=self.dtype, numerics=self.numerics)

    def prefill(self, tokens: Sequence[int], page_table: np.ndarray, position: int = 0) -> None:
        """Put tokens of a sequence into the cache, all at once.

        Args:
            tokens: token ids of `position`, `position + 1`, ...
            page_table: int32 [2, pages] of the sequence; it needs no page for tokens that no later
                token of a sliding layer sees.
            position: of the first of them; those before are in the cache.
        """
        self._forward(tokens, page_table, position)

    def start(
        self,
        inputs: StepInputs,
        n_steps: int = 1,
        *,
        stop_ids: np.ndarray | None = None,
        stop_after: int = 0,
        draw: Draw | None = None,
    ) -> Launch:
        """See `Machine.start`; each step runs when its tokens are asked for."""
        check_launch(inputs, self.plan, self.max_context, n_steps)
        check_stops(stop_ids, stop_after, inputs.rows)
        if draw is not None:
            check_draw(draw, inputs, n_steps, self.plan.config.vocab_size)
        return LazyLaunch(self._steps(inputs, n_steps, stop_ids, stop_after, draw), n_steps)

    def set_counts(self, row: int, prompt_ids: ArrayLike, output_ids: ArrayLike) -> None:
        """See `Machine.set_counts`."""
        rows, vocab = self._counts.shape
        check_counts(row, prompt_ids, output_ids, rows, vocab)
        self._counts[row] = counted(prompt_ids, output_ids, vocab)

    def _steps(
        self,
        inputs: StepInputs,
        n_steps: int,
        stop_ids: np.ndarray | None,
        stop_after: int,
        draw: Draw | None,
    ) -> Generator[tuple[np.ndarray, LogProbs | None], None, None]:
        bans = None
        if draw is not None:
            bans = effective_bans(draw, inputs, stop_ids, self.plan.config.vocab_size)
        if stop_ids is None:
            stop_ids = np.full((inputs.rows, STOP_IDS), -1)
        drawn: list[np.ndarray] = []
        for step in range(n_steps):
            self._step(inputs, drawn[-1] if drawn else inputs.tokens, step)
            tokens, told = self._draw(inputs, step, stop_ids, draw, bans)
            drawn.append(tokens)
            yield tokens, told
            if launch_ends(np.stack(drawn), stop_ids, stop_after, cancelled=False):
                return

    def _step(self, inputs: StepInputs, tokens: np.ndarray, step: int) -> None:
        """Logits, row by row: a row sees the keys of those before it (`StepInputs.earlier`)."""
        rows, positions = range(inputs.rows), (inputs.positions + step).tolist()
        self._logits = np.stack(
            [
                self._forward([tokens[row]], inputs.page_table[:, row], positions[row])
                for row in rows
            ]
        )
        for row in rows:
            if not np.isfinite(self._logits[row]).all():
                raise MachineError(
                    f"logits: row {row} is not finite; "
                    "the weights or the KV cache hold NaN or infinity"
                )

    def _draw(
        self,
        inputs: StepInputs,
        step: int,
        stop_ids: np.ndarray,
        draw: Draw | None,
        bans: np.ndarray | None,
    ) -> tuple[np.ndarray, LogProbs | None]:
        """The tokens of all rows."""
        positions = inputs.positions + step
        temperatures = inputs.temperatures if len(inputs.temperatures) else np.zeros(inputs.rows)
        seeds = inputs.seeds if len(inputs.seeds) else np.zeros(inputs.rows, np.uint64)
        if draw is None or bans is None:
            drawn = [
                sample(self._logits[row], temperatures[row], int(seeds[row]), int(positions[row]))
                for row in range(inputs.rows)
            ]
            return np.asarray(drawn, np.int32), None
        tokens, told = draw_rows(
            self._logits,
            draw,
            temperatures=temperatures,
            seeds=seeds,
            positions=positions,
            stop_ids=stop_ids,
            ban_until=bans,
            counts=self._counts,
        )
        return tokens, told if (draw.logprobs >= 0).any() else None

    def _forward(self, tokens: Sequence[int], pages: np.ndarray, position: int) -> np.ndarray:
        """Feed tokens at `position`, `position + 1` ...: logits of the last, float32 [V]."""
        if self.reference is None:
            raise MachineError("machine 'torch': no model is loaded; call load first")
        cache = _PagedCache(self._pools, self.plan, pages, int(position))
        ids = torch.as_tensor(np.asarray(tokens, np.int64), device=self.device)
        logits = self.reference(ids, cache, last_only=True)[-1].float()
        return np.asarray(logits.cpu().numpy())

    def read(self, name: str) -> np.ndarray:
        """A copy of "logits", float32 [rows of the last step, V]; there are no other buffers."""
        if name != "logits":
            raise MachineError(f"buffer {name!r}: machine 'torch' only has 'logits'")
        return self._logits.copy()

    def write(self, name: str, array: np.ndarray) -> None:
        """There is nothing to write."""
        raise MachineError(f"buffer {name!r}: machine 'torch' has no buffers to write")

    def close(self) -> None:
        """Give memory back."""
        self.reference = None
        self._pools = {}
