"""The next token of nano, the trained model that comes with mkref, for lesson 07.

What it does not do: use the kernel. Logits come from PyTorch, with the contract's roundings.
"""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from mkref.config import NorthConfig
from mkref.reference.drawing import Rules, kept
from mkref.reference.sampling import sample
from mkref.reference.scalars import F32

if TYPE_CHECKING:
    from mkref.engine.tokenizer import Tokenizer

__all__ = ["PROMPT", "draws", "kept_by_top_p", "next_logits", "probabilities", "softmax"]
__all__ += ["tokenizer"]

PROMPT = "    for i in range("
Numbers = npt.NDArray[Any]


def softmax(v: Numbers) -> Numbers:
    """Of float64 [V]."""
    p = np.exp(v - v.max())
    return np.asarray(p / p.sum())


@cache
def _model() -> tuple[NorthConfig, Tokenizer]:
    from mkref.engine.tokenizer import TOKENIZER_FILE, Tokenizer
    from mkref.paths import models_root

    folder = models_root() / "nano"
    config = NorthConfig.load(folder / "config.json")
    return config, Tokenizer(folder / TOKENIZER_FILE)


def tokenizer() -> Tokenizer:
    """Of nano."""
    return _model()[1]


@cache
def next_logits(prompt: str = PROMPT) -> Numbers:
    """nano's logits of the token after a prompt, float32 [2048]."""
    from safetensors.torch import load_file

    from mkref.paths import models_root
    from mkref.reference.model import Reference

    config, text = _model()
    weights = load_file(models_root() / "nano" / "model.safetensors")
    model = Reference(config, weights, numerics="contract")
    assert config.bos_token_id is not None
    return model.next_logits([[config.bos_token_id, *text.encode(prompt)]])[0]


def probabilities(temperature: float) -> Numbers:
    """Of the token after `PROMPT`, float64 [2048]."""
    return softmax(next_logits().astype(np.float64) / temperature)


def kept_by_top_p(temperature: float, top_p: float = 0.9) -> int:
    """How many tokens the sampler would choose among, after `PROMPT`."""
    z = (next_logits() / F32(temperature)).astype(F32)
    return int(kept(z, Rules(temperature=temperature, top_p=top_p)).sum())


def draws(temperature: float, n: int = 1000, seed: int = 1) -> list[tuple[str, float, float]]:
    """The likeliest tokens after `PROMPT`: text, probability, and their share in n draws with the
    kernel's noise, at n positions."""
    logits, p = next_logits(), probabilities(temperature)
    drawn = np.bincount([sample(logits, temperature, seed, k) for k in range(n)], minlength=len(p))
    best = np.argsort(-p)[:6]
    return [(tokenizer().decode([int(i)]), float(p[i]), float(drawn[i] / n)) for i in best]
