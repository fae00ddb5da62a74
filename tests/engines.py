"""Engines for tests: the smallest model with every kind of layer, and its own little tokenizer."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from mkref.engine import Engine
from mkref.engine.tokenizer import Tokenizer
from mkref.weights.save import save_checkpoint
from tests.decode import small_model

if TYPE_CHECKING:
    from mkref.config import NorthConfig
    from mkref.errors import MkrefError
    from mkref.weights.packed import PackedWeights

__all__ = [
    "EOS",
    "PROMPTS",
    "bits",
    "refused",
    "save_tiny",
    "tiny_engine",
    "tiny_model",
    "write_tokenizer",
]

EOS = 1
TINY: dict[str, Any] = {
    "vocab_size": 97,
    "hidden_size": 32,
    "num_hidden_layers": 3,
    "layer_types": ["full_attention", "sliding_attention", "full_attention"],
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "intermediate_size": 16,
    "prefix_dense_intermediate_size": 32,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "max_position_embeddings": 512,
}

PROMPTS = ([5, 77, 30, 12], [9, 8, 7, 6, 5, 4, 3, 2, 90, 11], [40], [3, 2, 3, 5, 8, 13, 21])
"""Ragged, with nothing in common."""


@cache
def tiny_model() -> tuple[NorthConfig, PackedWeights]:
    """Config and synthetic weights: about 17,000 parameters, a window of 70."""
    return small_model(seed=5, **TINY)


def tiny_engine(machine: str = "interpreter", n_sm: int = 1, **settings: Any) -> Engine:
    """The tiny model on a machine; token ids only, unless a tokenizer is given."""
    config, weights = tiny_model()
    return Engine.from_weights(config, weights, machine, n_sm, **{"max_context": 256, **settings})


def write_tokenizer(folder: Path, vocab_size: int = 97) -> Tokenizer:
    """A byte-level tokenizer without merges: ids 0 to 2 are special, then one byte each.

    Half of a two-byte character is a token of its own, which no real text needs and every
    incremental decoder must survive.
    """
    from tokenizers import AddedToken, decoders, models, pre_tokenizers
    from tokenizers import Tokenizer as Raw

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    # Letters, digits, and the bytes of "é" (c3 a9) and "€" (e2 82 ac) as the alphabet spells them.
    wanted = [*"abcdefghijklmnopqrstuvwxyz0123456789.,:()=_-+Ġ", *"Ã©âĤ¬", "Ċ"]
    rest = [letter for letter in alphabet if letter not in wanted]
    letters = [*wanted, *rest][: vocab_size - 3]
    special = ["<pad>", "<eos>", "<bos>"]
    vocab = {token: i for i, token in enumerate([*special, *letters])}
    raw = Raw(models.BPE(vocab=vocab, merges=[]))
    raw.add_special_tokens([AddedToken(token, special=True) for token in special])
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    raw.decoder = decoders.ByteLevel()
    raw.save(str(folder / "tokenizer.json"))
    return Tokenizer(folder, bos_token_id=2)


def save_tiny(folder: Path, *, tokenizer: bool = True) -> Path:
    """A checkpoint folder of the tiny model."""
    config, weights = tiny_model()
    save_checkpoint(folder, config, weights)
    if tokenizer:
        write_tokenizer(folder, config.vocab_size)
    return folder


def bits(logits: np.ndarray | None) -> bytes:
    """Logits as bytes: equal means bit for bit equal."""
    assert logits is not None
    assert np.isfinite(logits).all()
    return logits.tobytes()


def refused(kind: type[MkrefError], call: Callable[[], Any], *parts: object) -> str:
    """The error of a call: of the given kind, one line, with all parts in it."""
    with pytest.raises(kind) as caught:
        call()
    text = str(caught.value)
    assert kind is type(caught.value)
    assert "\n" not in text
    for part in parts:
        assert str(part) in text
    return text
