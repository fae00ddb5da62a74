"""A request on its way: what it has been fed, what came out, and why it ended.

What it does not do: run a step or know a row (`mkref.engine.scheduler`).
"""

from __future__ import annotations

import time
from array import array
from collections import deque
from statistics import median
from typing import TYPE_CHECKING

import numpy as np

from mkref.engine.request import Completion, LogProb, Request, Token
from mkref.engine.text import Detokenizer, StopFilter
from mkref.errors import RequestError
from mkref.plan.buffers import STOP_IDS

if TYPE_CHECKING:
    from mkref.engine.kv import KvSequence
    from mkref.engine.tokenizer import Tokenizer

__all__ = ["Sequence"]


class Sequence:
    """A request on its way.

    Attributes:
        request: what was asked.
        tokens: the prompt and what was generated so far.
        events: tokens that nobody has fetched yet.
        tail: text behind the last token, of an answer that ended without a token of its own.
        over: why its last token was the last; None while it runs or waits.
        finish_reason: the same, from the moment on when `events` has that token.
        error: what ended it before it was done.
        order: its place in the line, given by `mkref.engine.queue`; the lowest comes first.
        overtaken: how many have begun before it although they came later.
        kv: its pages; None while it waits.
        fed: tokens of `tokens` that are in the cache.
        n_cached: tokens of the prompt that were in the cache when it first began.
        began: whether it ever left the line.
    """

    def __init__(self, request: Request, tokenizer: Tokenizer | None) -> None:
        self.request = request
        self.tokens = array("i", request.prompt)
        self.events: deque[Token] = deque()
        self.tail = ""
        self.over: str | None = None
        self.finish_reason: str | None = None
        self.error: BaseException | None = None
        self.order = (0, 0)
        self.overtaken = 0
        self.kv: KvSequence | None = None
        self.fed = 0
        self.n_cached = 0
        self.began = False
        self.submitted_at = time.monotonic()
        self.last_at = self.submitted_at  # when it was submitted, or its last token came
        # The kernel knows so many ids; what else ends the answer, the host finds.
        ids = sorted(request.eos_ids | request.stop_ids)[:STOP_IDS]
        self.device_stops = ids + [-1] * (STOP_IDS - len(ids))
        self.step_s: list[float] = []
        self.logits: list[np.ndarray] = []
        self.logprobs: list[LogProb] = []
        self._detokenizer = None if tokenizer is None else Detokenizer(tokenizer)
        self._filter = StopFilter(request.stop_texts)
        self._text: list[str] = []
        self._untold: list[tuple[int, LogProb | None]] = []

    @property
    def generated(self) -> array[int]:
        """Token ids so far."""
        return self.tokens[len(self.request.prompt) :]

    @property
    def n_generated(self) -> int:
        """How many there are."""
        return len(self.tokens) - len(self.request.prompt)

    @property
    def n_ahead(self) -> int:
        """Tokens that must go into the cache before the one that the next is drawn from.

        Of the prompt; after its pages were taken away, also of the answer.
        """
        return len(self.tokens) - 1 - self.fed

    @property
    def n_left(self) -> int:
        """Tokens that it may still generate."""
        return self.request.max_tokens - self.n_generated

    def take(self, token: int, logprob: LogProb | None = None) -> None:
        """Take the token that a step drew, and see whether it is the last."""
        self.tokens.append(token)
        self._untold.append((token, logprob))
        self.over = self._ends(token)
        if self.request.stop_texts:  # whether it ends depends on the text
            self.tell()

    def _ends(self, token: int) -> str | None:
        request = self.request
        if token in request.eos_ids:
            return "eos"
        if token in request.stop_ids:
            return "stop"
        if request.constraint is not None:
            try:
                request.constraint.accept(token)
                if request.constraint.ended:
                    return "stop"
            except Exception as error:
                raise RequestError(f"constraint: {error or type(error).__name__}") from error
        return "length" if self.n_generated >= request.max_tokens else None

    def tell(self) -> None:
        """Make text of the tokens that were taken; `events` and `finish_reason` follow.

        This takes longer than everything else about a token, and the next launch does not need it.
        """
        first = self.n_generated - len(self._untold)
        for n, (token, logprob) in enumerate(self._untold, first + 1):
            if logprob is not None:
                self.logprobs.append(logprob)
            text = "" if self._detokenizer is None else self._detokenizer.push(token)
            # A stop string may not begin among the tokens that must come.
            if n > self.request.sampling.min_tokens:
                text = self._filter.push(text)
            reason = self.over if n == self.n_generated else None
            if reason or self._filter.stopped:
                text += self._rest()
                # A stop string may have been completed only now.
                reason = self.over = "stop" if self._filter.stopped else reason
            self._text.append(text)
            self.events.append(Token(token, text, reason, logprob))
            self.finish_reason = reason
        self._untold.clear()

    def _rest(self) -> str:
        """Text that was held back, now that no token comes any more."""
        if self._detokenizer is None:
            return ""
        return self._filter.push(self._detokenizer.finish()) + self._filter.finish()

    def end(self, reason: str) -> None:
        """End without a token: "cancelled" or "deadline"."""
        if self.over is None and self.error is None:
            self.tell()
            self.tail = self._rest()
            self._text.append(self.tail)
            self.over = self.finish_reason = reason

    def completion(self, machine: str) -> Completion:
        """The result of a sequence that has ended."""
        return Completion(
            token_ids=tuple(self.generated),
            text="".join(self._text),
            prompt_token_ids=self.request.prompt,
            finish_reason=self.finish_reason or "",
            machine=machine,
            ms_per_token=1e3 * median(self.step_s) if self.step_s else 0.0,
            logits=np.stack(self.logits) if self.logits else None,
            logprobs=tuple(self.logprobs) if self.logprobs else None,
            n_cached=self.n_cached,
        )
