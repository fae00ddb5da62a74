"""Long prompts through PyTorch instead of through the kernel, a chunk of many tokens at a time.

The kernel takes a prompt in at one token per row and step, and each step reads the weights of the
experts that its few tokens choose. A chunk of some thousand tokens reads every weight once and
keeps the tensor cores busy. Weights are taken from where the kernel has them, keys and values are
left where the kernel looks for them, in its own format, so the next step can follow at once.

The result is not the kernel's bit for bit: who wants exactly its answers feeds it the prompt.

What it does not do: choose pages, feed the last token of a prompt (its logits come from the
kernel), or know requests.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from mkref.engine.prefill_layers import Layers, Workspace, workspace_bytes
from mkref.engine.prefill_pages import Places
from mkref.engine.prefill_table import Span, spans
from mkref.engine.prefill_weights import Operators
from mkref.errors import MachineError
from mkref.machine.base import KernelMachine, Machine
from mkref.weights.layout import TILE_WORDS, PackedLayout

__all__ = ["Prefill", "workspace_bytes"]

CHUNK = 2048


class Prefill:
    """Puts tokens of a prompt into the KV cache of a machine.

    Args:
        machine: loaded; its memory is used in place.
        chunk: most tokens of one `run`; more than the machine's context is the context.

    Raises:
        MachineError: the machine is not one that it can serve; the workspace does not fit.
    """

    def __init__(self, machine: Machine, chunk: int = CHUNK) -> None:
        if not self.supports(machine) or not isinstance(machine, KernelMachine):
            raise MachineError(
                f"prefill: machine {machine.name!r}; must be a loaded one that runs the kernel, "
                "and on a GPU torch must see it, too"
            )
        if isinstance(chunk, bool) or not isinstance(chunk, int) or chunk < 1:
            raise MachineError(f"chunk: {chunk!r}; must be a whole number of tokens, at least 1")
        self.machine = machine
        self.config = machine.plan.config
        self._model = (self.config, machine.max_context)
        self.chunk = min(chunk, machine.max_context)
        self.device = "cuda" if machine.name == "cuda" else "cpu"
        self.layout = PackedLayout(self.config)
        try:
            self._space = Workspace.of(self.config, machine.max_context, self.device)
        except torch.OutOfMemoryError as error:
            raise self._no_memory() from error

    @staticmethod
    def supports(machine: Machine) -> bool:
        """Can prompts of this machine go through torch? It must have a model loaded."""
        if not isinstance(machine, KernelMachine) or "kv" not in machine.buffers:
            return False
        return machine.name != "cuda" or torch.cuda.is_available()

    @property
    def workspace_bytes(self) -> int:
        """Most bytes that it takes on a GPU beside weights and cache."""
        return workspace_bytes(self.config, self.chunk, self.machine.max_context)

    def run(self, tokens: Sequence[int] | np.ndarray, position: int, table: np.ndarray) -> None:
        """Feed up to `chunk` tokens of one sequence; returns when they are in the cache.

        Ends a launch that is under way. Tokens before `position` must be in the cache.

        Args:
            tokens: token ids of positions `position`, `position + 1`, ...
            position: of the first one.
            table: int32 [2, pages], pages of full and of sliding layers; -1 where there is none. A
                sliding layer needs none for tokens that its window has left behind.

        Raises:
            MachineError: names what is wrong with the arguments; nothing was written then. Or the
                GPU has no memory left; the chunk may then be in the cache in part.
        """
        machine = self.machine
        if "kv" not in machine.buffers or self._model != (machine.plan.config, machine.max_context):
            raise MachineError(
                "prefill: the machine was closed, or loaded with another model or context; "
                "make a new Prefill"
            )
        ids = self._ids(tokens, position)
        chunk = spans(machine.plan, table, position, len(ids))
        machine.settle()
        try:
            self._feed(ids, chunk)
        except torch.OutOfMemoryError as error:
            raise self._no_memory() from error
        except torch.AcceleratorError as error:
            reason = str(error).partition("\n")[0]
            raise MachineError(f"cuda: a prompt's chunk failed ({reason})") from error

    def _feed(self, ids: np.ndarray, chunk: tuple[Span | None, ...]) -> None:
        device = torch.device(self.device)
        self._wait()  # what the machine has queued on its own stream
        try:
            with torch.inference_mode():
                places = tuple(None if span is None else Places.of(span, device) for span in chunk)
                self.layers().run(torch.from_numpy(ids).to(device), places)
        finally:  # also after Ctrl-C: the kernel must not start beside it
            self._wait()

    def _ids(self, tokens: Sequence[int] | np.ndarray, position: int) -> np.ndarray:
        """Checked token ids, int64."""
        ids = np.asarray(tokens)
        if ids.ndim != 1 or not 1 <= len(ids) <= self.chunk or ids.dtype.kind not in "iu":
            raise MachineError(
                f"tokens: {ids.dtype} of shape {ids.shape}; must be 1 to {self.chunk} token ids"
            )
        wrong = (ids < 0) | (ids >= self.config.vocab_size)
        if wrong.any():
            at = int(wrong.argmax())
            raise MachineError(
                f"tokens: {ids[at]} at {at}; must be in 0..{self.config.vocab_size - 1}"
            )
        last = self.machine.max_context - len(ids)
        if not 0 <= position <= last:
            raise MachineError(
                f"position: {position} of {len(ids)} tokens; must be in 0..{last}, "
                f"in a context of {self.machine.max_context}"
            )
        return ids.astype(np.int64)

    def layers(self) -> Layers:
        """The model over the machine's memory as it is now."""
        machine, config = self.machine, self.config
        tiles, gammas, kv = (
            self._tensor(name, torch.bfloat16) for name in ("weights", "gammas", "kv")
        )
        rope = self._tensor("rope", torch.float32).view(machine.max_context, -1, 2)
        operators = Operators(
            self.layout,
            tiles.view(-1, TILE_WORDS),
            gammas.view(-1, config.hidden_size),
            self._space.slab,
        )
        pool = machine.plan.pool
        return Layers(operators, pool, kv.view(-1, TILE_WORDS), rope, self._space)

    def _tensor(self, name: str, dtype: torch.dtype) -> Tensor:
        """A buffer of the machine as a flat tensor, shared."""
        memory: Any = self.machine.buffers[name]
        flat = torch.as_tensor(memory, device=self.device)
        table = self.machine.table[name]
        return flat[: table.n_bytes].view(dtype)

    def _wait(self) -> None:
        """Until the GPU is idle. Kernel and torch use streams of their own; this orders them."""
        if self.device == "cuda":
            torch.cuda.synchronize()

    def _no_memory(self) -> MachineError:
        return MachineError(
            f"GPU memory: prefill of {self.chunk} tokens needs {self.workspace_bytes / 1e9:.2f} GB "
            "beside weights and cache; a smaller chunk, or fewer pages, leave more"
        )
