"""From a model's name to the things that an engine is made of: folder, context, page budget.

What it does not do: read weights or make a machine.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from mkref.config import NORTH_MINI_CODE, NorthConfig
from mkref.engine.kv import pages_for, window_pages
from mkref.engine.request import whole_number
from mkref.errors import CheckpointError, RequestError
from mkref.paths import models_root
from mkref.plan.build import ROWS

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
    if Path(model).is_dir():
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
    config: NorthConfig, max_context: int | None = None, kv_pages: int | None = None
) -> Sizes:
    """Context and page budget.

    Args:
        config: of the model.
        max_context: tokens of prompt and answer; None: 4096, or what the model allows if less.
        kv_pages: pages of 64 tokens in each full layer; None: enough for eight full contexts. With
            less, requests may have to wait for one another.

    Raises:
        RequestError: out of range.
    """
    most = config.max_position_embeddings
    if max_context is None:
        max_context = min(most, DEFAULT_CONTEXT)
    max_context = whole_number("max_context", max_context, 2, most, "max_position_embeddings")
    pages = pages_for(max_context)
    if kv_pages is not None:
        why = "one to eight sequences of max_context"
        kv_pages = whole_number("kv_pages", kv_pages, pages, ROWS * pages, why)
    sliding = ROWS * min(pages, window_pages(config.sliding_window))
    return Sizes(max_context, ROWS * pages if kv_pages is None else kv_pages, sliding)


def check_tokenizer(vocab_size: int, config: NorthConfig, folder: Path) -> None:
    """Refuse a tokenizer that makes ids which the model does not have.

    Raises:
        RequestError: names both sizes.
    """
    if vocab_size > config.vocab_size:
        raise RequestError(
            f"tokenizer: {vocab_size} tokens in {folder}, but the model's vocab_size is "
            f"{config.vocab_size}; the tokenizer belongs to another model"
        )
