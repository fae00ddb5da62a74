"""What an engine is made of: model folder, context and pages, tokenizer, machine, weights.

What it does not do: put them together (`mkref.engine.engine` does).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from mkref.config import NORTH_MINI_CODE, NorthConfig
from mkref.engine.kv import AHEAD, pages_for, window_pages
from mkref.engine.scheduler import Scheduler
from mkref.engine.tokenizer import TOKENIZER_FILE, Tokenizer
from mkref.engine.values import show, whole_number
from mkref.errors import CheckpointError, MachineError, RequestError
from mkref.machine import create
from mkref.paths import models_root
from mkref.plan.build import MAX_SMS, ROW_CHOICES, ROWS

if TYPE_CHECKING:
    import numpy as np

    from mkref.engine.kv import KvCache
    from mkref.machine.base import Machine
    from mkref.weights.checkpoint import Checkpoint
    from mkref.weights.packed import PackedWeights

__all__ = ["GEOMETRIES", "Sizes", "load_geometry", "model_folder", "models", "sizes_for"]

DEFAULT_CONTEXT = 4096
GEOMETRIES = {"north-mini-code": NORTH_MINI_CODE}
"""Models of which mkref knows the geometry only."""


def models() -> list[str]:
    """Names of the models that come with mkref."""
    return sorted(file.parent.name for file in models_root().glob("*/config.json"))


def model_folder(model: str | Path) -> Path:
    """The folder of a model: the name of one that comes with mkref, or a path.

    A name wins over a folder of the same name; write `./nano` for the latter.

    Raises:
        CheckpointError: neither; names both.
    """
    bundled = models_root() / model
    if isinstance(model, str) and model in models():
        return bundled
    if model != "" and Path(model).is_dir():  # Path("") is the current folder
        return Path(model)
    known = ", ".join(models()) or "none"
    hint = ""
    if model in GEOMETRIES:
        hint = "; of this model mkref knows the geometry only: give the folder with its checkpoint"
    raise CheckpointError(
        f"model: {str(model)!r} is neither a folder nor a model that comes with mkref "
        f"({known}){hint}"
    )


def load_geometry(model: str | Path) -> NorthConfig:
    """The config of a model folder, or of a geometry that is known by name; needs no weights.

    Raises:
        CheckpointError: there is no such model.
        ConfigError: its config.json is missing, or describes another kind of model.
    """
    if isinstance(model, str) and model in GEOMETRIES:
        return GEOMETRIES[model]
    file = Path(model)
    return NorthConfig.load(file if file.is_file() else model_folder(model))


@dataclass(frozen=True)
class Sizes:
    """Longest sequence in tokens, and pages of the two kinds."""

    max_context: int
    full_pages: int
    sliding_pages: int


def sizes_for(
    config: NorthConfig,
    max_context: int | None = None,
    kv_pages: int | None = None,
    rows: int = ROWS,
) -> Sizes:
    """Context and page budget.

    Args:
        config: of the model.
        max_context: tokens of prompt and answer; None: 4096, or what the model allows if less.
        kv_pages: pages of 64 tokens in each full layer; None: enough for `rows` full contexts. With
            less, requests may have to wait for one another.
        rows: rows of a step, 8, 16 or 32.

    Raises:
        RequestError: out of range.
    """
    if not isinstance(rows, int) or rows not in ROW_CHOICES:
        raise RequestError(f"rows: {show(rows)}; must be one of {ROW_CHOICES}")
    most = config.max_position_embeddings
    if max_context is None:
        max_context = min(most, DEFAULT_CONTEXT)
    max_context = whole_number("max_context", max_context, 2, most, "max_position_embeddings")
    pages = pages_for(max_context)
    if kv_pages is not None:
        why = f"one to {rows} sequences of max_context"
        kv_pages = whole_number("kv_pages", kv_pages, pages, rows * pages, why)
    sliding = rows * min(pages, window_pages(config.sliding_window + AHEAD - 1))
    return Sizes(max_context, rows * pages if kv_pages is None else kv_pages, sliding)


def find_tokenizer(folder: Path, config: NorthConfig) -> tuple[Tokenizer | None, str]:
    """The tokenizer of a model folder; without one, None and the reason: token ids work anyway.

    Raises:
        CheckpointError: the file is no tokenizer.
        RequestError: it makes ids that the model does not have.
    """
    if not (folder / TOKENIZER_FILE).is_file():
        return None, f"this model has no {TOKENIZER_FILE}"
    if find_spec("tokenizers") is None:
        return None, "the package tokenizers is not installed (pip install tokenizers)"
    tokenizer = Tokenizer(folder, config.bos_token_id)
    if tokenizer.vocab_size > config.vocab_size:
        raise RequestError(
            f"tokenizer: {tokenizer.vocab_size} tokens in {folder}, but the model's vocab_size is "
            f"{config.vocab_size}; the tokenizer belongs to another model"
        )
    return tokenizer, ""


def make_machine(name: str, n_sm: int | None, trace: bool, options: dict[str, Any]) -> Machine:
    """A machine by name, see `mkref.machine.create`.

    Raises:
        RequestError: `n_sm` is no number of SMs.
        MachineError: it cannot run here.
    """
    if n_sm is not None:
        n_sm = whole_number("n_sm", n_sm, 1, MAX_SMS)
    return create(name, n_sm=n_sm, trace=trace, **options)


@runtime_checkable
class TakesPrompts(Protocol):
    """A machine that can take tokens of a prompt all at once."""

    max_context: int

    def prefill(self, tokens: Sequence[int], page_table: np.ndarray, position: int = 0) -> None:
        """Put tokens of `position` ... into the cache; `page_table` int32 [2, pages]."""


class _AtOnce:
    """Prompts through a machine of that kind, as `mkref.engine.scheduler.Prefills`."""

    def __init__(self, machine: TakesPrompts) -> None:
        self.chunk = machine.max_context
        self._machine = machine

    def run(self, tokens: Sequence[int], position: int, table: np.ndarray) -> None:
        """See `Prefills.run`."""
        self._machine.prefill(tokens, table, position)


def make_scheduler(machine: Machine, kv: KvCache, exact: bool) -> Scheduler:
    """A scheduler that takes prompts in as the machine can, and as exactly as is asked for."""
    if isinstance(machine, TakesPrompts):
        return Scheduler(machine, kv, prefill=_AtOnce(machine), prefill_from=1)
    if not exact:
        from mkref.engine.prefill import Prefill

        if Prefill.supports(machine):
            return Scheduler(machine, kv, prefill=Prefill(machine))
    return Scheduler(machine, kv)


def _device(machine: Machine) -> str:
    """The torch device where a machine wants its weights."""
    if machine.name == "torch":
        return str(getattr(machine, "device", "cpu"))
    if machine.name == "cuda":
        import torch

        return "cuda" if torch.cuda.is_available() else "cpu"
    return "cpu"


def load_weights(checkpoint: Checkpoint, machine: Machine) -> PackedWeights:
    """Read a checkpoint to where the machine wants its weights, tensor by tensor.

    Raises:
        CheckpointError: a tensor cannot be read or is not finite.
        MachineError: the GPU is too small.
    """
    import torch

    try:
        return checkpoint.load(_device(machine))
    except torch.OutOfMemoryError as error:
        gigabytes = checkpoint.layout.total_tiles * 512 / 1e9
        raise MachineError(
            f"GPU memory: the weights take {gigabytes:.1f} GB, which this GPU does not have free; "
            "machine='host' uses the memory of the CPU"
        ) from error
