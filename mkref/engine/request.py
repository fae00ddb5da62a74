"""What one asks of the engine and what one gets: requests, tokens, completions.

`make_request` checks everything before anything runs; each mistake is one `RequestError` that names
the argument, its value and what would be right.

What it does not do: run a step.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from mkref.errors import RequestError

if TYPE_CHECKING:
    import numpy as np

    from mkref.engine.tokenizer import Tokenizer

__all__ = [
    "Completion", "Prompt", "Request", "Stop", "Token", "listed", "make_request", "show",
    "whole_number",
]  # fmt: skip

Prompt = str | Sequence[int]
Stop = str | int | Sequence[str | int] | None

TEMPERATURES = (1e-3, 1e3)
"""Beyond these a float32 logit divided by the temperature overflows or says nothing."""
MAX_SEED = 2**64 - 1


@dataclass(frozen=True)
class Request:
    """A checked request; fields as in `Engine.generate`. `eos_ids` end it as "eos"."""

    prompt: tuple[int, ...]
    max_tokens: int
    temperature: float = 0.0
    seed: int = 0
    stop_ids: frozenset[int] = frozenset()
    stop_texts: tuple[str, ...] = ()
    eos_ids: frozenset[int] = frozenset()
    return_logits: bool = False

    @property
    def n_tokens(self) -> int:
        """Tokens of prompt and longest answer."""
        return len(self.prompt) + self.max_tokens


@dataclass(frozen=True)
class Token:
    """One generated token.

    Attributes:
        id: token id.
        text: characters that this token completes; all pieces together are the completion's text.
        finish_reason: None, except for the last token; see `Completion`.
    """

    id: int
    text: str
    finish_reason: str | None = None


@dataclass(frozen=True, eq=False)
class Completion:
    """What a request came to.

    Attributes:
        token_ids: every generated token, with the one that ended it.
        text: their text without special tokens and without the stop string; empty if the model has
            no tokenizer.
        prompt_token_ids: what was fed.
        finish_reason: "eos" (a token that ends a text), "stop" (`stop`) or "length" (`max_tokens`).
        machine: name of the machine that ran it.
        ms_per_token: median time of the steps that generated its tokens, in milliseconds.
        logits: float32 [len(token_ids), V] if asked for.
    """

    token_ids: tuple[int, ...]
    text: str
    prompt_token_ids: tuple[int, ...]
    finish_reason: str
    machine: str
    ms_per_token: float
    logits: np.ndarray | None = None


def whole_number(name: str, value: Any, least: int, most: int, why: str = "") -> int:
    """`value` as an int, or the error that names it; `why` explains the upper limit."""
    try:
        number = operator.index(value)
    except TypeError:
        number = None
    if number is None or isinstance(value, bool) or not least <= number <= most:
        limits = f"a whole number from {least} to {most}"
        raise RequestError(f"{name}: {show(value)}; must be {limits}{f' ({why})' if why else ''}")
    return number


def show(value: Any) -> str:
    """A value on one line, not too long."""
    try:
        text = " ".join(repr(value).split())
    except ValueError:  # Python prints no int of more than 4300 digits
        return "a number of thousands of digits"
    return text if len(text) <= 60 else text[:57] + "..."


def listed(value: Any) -> list[Any] | None:
    """The values of a list, an array or whatever can be iterated; None for one value or a text."""
    if isinstance(value, str | bytes):
        return None
    try:
        return list(value)
    except TypeError:
        return None


def make_request(
    prompt: Prompt,
    *,
    max_tokens: int,
    temperature: float = 0.0,
    seed: int = 0,
    stop: Stop = None,
    ignore_eos: bool = False,
    return_logits: bool = False,
    tokenizer: Tokenizer | None,
    why_no_text: str,
    vocab_size: int,
    eos_token_ids: Iterable[int],
    max_context: int,
) -> Request:
    """Check a request.

    Raises:
        RequestError: names the argument.
    """
    ids = _prompt_ids(prompt, tokenizer, why_no_text, vocab_size)
    if len(ids) >= max_context:
        raise RequestError(
            f"prompt: {len(ids)} tokens; the context is {max_context} tokens and must hold the "
            "prompt and the answer: shorten the prompt or load the model with a larger max_context"
        )
    room = max_context - len(ids)
    why = f"a context of {max_context} less a prompt of {len(ids)}"
    stop_ids, stop_texts = _stops(stop, tokenizer, why_no_text, vocab_size)
    return Request(
        prompt=ids,
        max_tokens=whole_number("max_tokens", max_tokens, 1, room, why),
        temperature=_temperature(temperature),
        seed=whole_number("seed", seed, 0, MAX_SEED),
        stop_ids=stop_ids,
        stop_texts=stop_texts,
        eos_ids=frozenset() if ignore_eos else frozenset(eos_token_ids),
        return_logits=return_logits,
    )


def _prompt_ids(
    prompt: Prompt, tokenizer: Tokenizer | None, why_no_text: str, vocab_size: int
) -> tuple[int, ...]:
    if isinstance(prompt, str):
        if tokenizer is None:
            raise RequestError(f"prompt: {show(prompt)} is text, and {why_no_text}; give token ids")
        ids: Sequence[int] | None = tokenizer.encode(prompt)
    else:
        ids = listed(prompt)
    if ids is None:
        raise RequestError(f"prompt: {show(prompt)}; must be text or a sequence of token ids")
    if not len(ids):
        raise RequestError("prompt: no tokens; a prompt has at least one")
    return tuple(
        whole_number(f"prompt[{i}]", t, 0, vocab_size - 1, "vocabulary") for i, t in enumerate(ids)
    )


def _temperature(value: Any) -> float:
    low, high = TEMPERATURES
    try:
        number = float(value)
    except (TypeError, ValueError, OverflowError):
        number = math.nan
    if number != 0 and not low <= number <= high:
        raise RequestError(f"temperature: {show(value)}; must be 0 (greedy) or {low:g} to {high:g}")
    return number


def _stops(
    stop: Stop, tokenizer: Tokenizer | None, why_no_text: str, vocab_size: int
) -> tuple[frozenset[int], tuple[str, ...]]:
    several = listed(stop)
    given = [] if stop is None else [stop] if several is None else several
    texts = tuple(s for s in given if isinstance(s, str))
    if "" in texts:
        raise RequestError("stop: an empty string; must be text that is to end the answer")
    if texts and tokenizer is None:
        raise RequestError(
            f"stop: {show(texts[0])} is text, and this model has no tokenizer.json; give token ids"
        )
    ids = [s for s in given if not isinstance(s, str)]
    return frozenset(whole_number("stop", i, 0, vocab_size - 1, "vocabulary") for i in ids), texts
