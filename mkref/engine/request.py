"""What one asks of the engine and what one gets: requests, tokens, completions.

`make_request` checks everything before anything runs; each mistake is one `RequestError` that names
the argument, its value and what would be right.

What it does not do: run a step.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from mkref.engine.sampling import Sampling
from mkref.engine.values import listed, show, whole_number
from mkref.errors import RequestError
from mkref.plan.buffers import STOP_IDS

if TYPE_CHECKING:
    import numpy as np

    from mkref.engine.tokenizer import Tokenizer

__all__ = [
    "MAX_PRIORITY",
    "Completion",
    "Constraint",
    "LogProb",
    "Prompt",
    "Request",
    "Stop",
    "Token",
    "drawn",
    "make_request",
]

Prompt = str | Sequence[int]
Stop = str | int | Sequence[str | int] | None

MAX_PRIORITY = 8


class Constraint(Protocol):
    """What an answer may be, told token by token, for instance by a grammar.

    It belongs to one request. What it raises ends that request with the error, and no other.
    """

    @property
    def ended(self) -> bool:
        """Is the answer complete? Then it ends with "stop"."""

    def mask(self) -> np.ndarray:
        """Tokens that may come next: uint32 [ceil(V / 32)], bit `t % 32` of word `t // 32`."""

    def accept(self, token: int) -> None:
        """Take the token that came; one that ends the text is not told."""


@dataclass(frozen=True)
class Request:
    """A checked request.

    Attributes:
        prompt: token ids.
        max_tokens: most tokens of the answer.
        sampling: how tokens are drawn.
        stop_ids: token ids that end the answer as "stop".
        stop_texts: strings that do.
        eos_ids: token ids that end it as "eos".
        return_logits: keep the logits of every generated token.
        constraint: what the answer may be; None for anything.
        priority: -8 to 8; a lower one comes first, see `mkref.engine.queue`.
        deadline: when it ends at the latest, on the clock of `time.monotonic`; None for never.
    """

    prompt: tuple[int, ...]
    max_tokens: int
    sampling: Sampling = field(default_factory=Sampling)
    stop_ids: frozenset[int] = frozenset()
    stop_texts: tuple[str, ...] = ()
    eos_ids: frozenset[int] = frozenset()
    return_logits: bool = False
    constraint: Constraint | None = None
    priority: int = 0
    deadline: float | None = None

    @property
    def n_tokens(self) -> int:
        """Tokens of prompt and longest answer."""
        return len(self.prompt) + self.max_tokens


@dataclass(frozen=True)
class LogProb:
    """How likely a token was, by the logits that the model gave.

    Attributes:
        id: the token.
        logprob: natural logarithm of its probability.
        top: ids and logarithms of the most likely tokens, the most likely first.
    """

    id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True)
class Token:
    """One generated token.

    Attributes:
        id: token id.
        text: characters that this token completes; all pieces together are the completion's text.
        finish_reason: None, except for the last token; see `Completion`.
        logprob: if asked for.
    """

    id: int
    text: str
    finish_reason: str | None = None
    logprob: LogProb | None = None


@dataclass(frozen=True, eq=False)
class Completion:
    """What a request came to.

    Attributes:
        token_ids: every generated token, with the one that ended it.
        text: their text without special tokens and without the stop string; empty if the model has
            no tokenizer.
        prompt_token_ids: what was fed.
        finish_reason: "eos" (a token that ends a text), "stop" (`stop`, or the constraint is
            fulfilled) or "length" (`max_tokens`).
        machine: name of the machine that ran it.
        ms_per_token: median time of the steps that generated its tokens, in milliseconds.
        logits: float32 [len(token_ids), V] if asked for.
        logprobs: one per token if asked for.
        n_cached: tokens of the prompt that an earlier request had left in the cache.
    """

    token_ids: tuple[int, ...]
    text: str
    prompt_token_ids: tuple[int, ...]
    finish_reason: str
    machine: str
    ms_per_token: float
    logits: np.ndarray | None = None
    logprobs: tuple[LogProb, ...] | None = None
    n_cached: int = 0


def drawn(temperature: Any, seed: Any, sampling: Sampling | None) -> Sampling:
    """The settings that one gave in short, or in full.

    Raises:
        RequestError: one gave both.
    """
    if sampling is None:
        return Sampling(temperature=temperature, seed=seed)
    if temperature or seed:
        raise RequestError(
            f"sampling: has a temperature and a seed; temperature {show(temperature)} and seed "
            f"{show(seed)} must not be given besides"
        )
    return sampling


def make_request(
    prompt: Prompt,
    *,
    max_tokens: int | None,
    fill: bool = False,
    sampling: Sampling | None = None,
    stop: Stop = None,
    ignore_eos: bool = False,
    return_logits: bool = False,
    constraint: Constraint | None = None,
    priority: int = 0,
    deadline: float | None = None,
    tokenizer: Tokenizer | None,
    why_no_text: str,
    vocab_size: int,
    eos_token_ids: Iterable[int],
    max_context: int,
) -> Request:
    """Check a request.

    Args:
        max_tokens: None is what the context has room for, with `fill`.
        others: as in `mkref.engine.engine.Engine`.

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
    sampling = Sampling() if sampling is None else sampling
    stop_ids, stop_texts = _stops(stop, tokenizer, why_no_text, vocab_size)
    eos_ids = frozenset() if ignore_eos else frozenset(eos_token_ids)
    max_tokens = room if max_tokens is None and fill else max_tokens
    request = Request(
        prompt=ids,
        max_tokens=whole_number("max_tokens", max_tokens, 1, room, why),
        sampling=sampling,
        stop_ids=stop_ids,
        stop_texts=stop_texts,
        eos_ids=eos_ids,
        return_logits=return_logits,
        constraint=constraint,
        priority=whole_number("priority", priority, -MAX_PRIORITY, MAX_PRIORITY),
        deadline=deadline,
    )
    _check_sampling(request, vocab_size)
    return request


def _check_sampling(request: Request, vocab_size: int) -> None:
    """What the settings of a draw mean for this model and this request."""
    sampling = request.sampling
    for token, _ in sampling.logit_bias:
        whole_number("logit_bias", token, 0, vocab_size - 1, "vocabulary")
    if sampling.min_tokens > request.max_tokens:
        raise RequestError(
            f"min_tokens: {sampling.min_tokens}; must be at most max_tokens, {request.max_tokens}"
        )
    n_ids = len(request.eos_ids | request.stop_ids)
    if sampling.min_tokens and n_ids > STOP_IDS:
        raise RequestError(
            f"min_tokens: {sampling.min_tokens} with {n_ids} token ids that end the answer; must "
            f"be 0, or at most {STOP_IDS} ids in stop and of the model's own"
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
    # A long prompt of good ids is one comparison; only a refusal looks for its token.
    if {*map(type, ids)} == {int} and min(ids) >= 0 and max(ids) < vocab_size:
        return tuple(ids)
    return tuple(
        whole_number(f"prompt[{i}]", t, 0, vocab_size - 1, "vocabulary") for i, t in enumerate(ids)
    )


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
