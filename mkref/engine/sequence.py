"""A request on its way: what it has been fed, what came out, and why it ended.

What it does not do: run a step or know a row (`mkref.engine.batch`).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence as SequenceOf
from statistics import median
from typing import TYPE_CHECKING

import numpy as np

from mkref.engine.request import Completion, Request, Token
from mkref.engine.text import Detokenizer, StopFilter
from mkref.plan.buffers import STOP_IDS

if TYPE_CHECKING:
    from mkref.engine.kv import KvSequence
    from mkref.engine.tokenizer import Tokenizer

__all__ = ["Sequence"]


class Sequence:
    """A request on its way.

    Attributes:
        request: what was asked.
        generated: token ids so far.
        events: tokens that nobody has fetched yet.
        finish_reason: why it ended; None while it runs or waits.
        error: what ended it before it was done.
    """

    def __init__(self, request: Request, tokenizer: Tokenizer | None) -> None:
        self.request = request
        self.generated: list[int] = []
        self.events: deque[Token] = deque()
        self.finish_reason: str | None = None
        self.error: BaseException | None = None
        self.kv: KvSequence | None = None
        self.fed = 0  # tokens that are in the cache
        self.n_moves = 0  # changes of its pages
        # The kernel knows so many ids; what else ends the answer, the host finds.
        ids = sorted(request.eos_ids | request.stop_ids)[:STOP_IDS]
        self.device_stops = ids + [-1] * (STOP_IDS - len(ids))
        self.step_s: list[float] = []
        self.logits: list[np.ndarray] = []
        self._detokenizer = None if tokenizer is None else Detokenizer(tokenizer)
        self._filter = StopFilter(request.stop_texts)
        self._text: list[str] = []

    @property
    def n_prompt_left(self) -> int:
        """Prompt tokens that are not in the cache yet, but for the last: that one generates."""
        return max(0, len(self.request.prompt) - 1 - self.fed)

    @property
    def n_left(self) -> int:
        """Tokens that it may still generate."""
        return self.request.max_tokens - len(self.generated)

    def tokens(self, count: int) -> SequenceOf[int]:
        """The next tokens to feed: of the prompt, or the one that was generated last."""
        prompt = self.request.prompt
        return (
            prompt[self.fed : self.fed + count] if self.fed < len(prompt) else self.generated[-1:]
        )

    def accept(self, token: int) -> None:
        """Take the token that a step drew, and end if it is the last."""
        self.generated.append(token)
        text = "" if self._detokenizer is None else self._filter.push(self._detokenizer.push(token))
        reason = self._ends(token)
        if reason and self._detokenizer is not None:
            text += self._filter.push(self._detokenizer.finish()) + self._filter.finish()
            # A stop string may have been completed only now.
            reason = "stop" if self._filter.stopped else reason
        self._text.append(text)
        self.finish_reason = reason
        self.events.append(Token(token, text, reason))

    def _ends(self, token: int) -> str | None:
        if token in self.request.eos_ids:
            return "eos"
        if token in self.request.stop_ids or self._filter.stopped:
            return "stop"
        return "length" if len(self.generated) == self.request.max_tokens else None

    def completion(self, machine: str) -> Completion:
        """The result of a sequence that has ended."""
        return Completion(
            token_ids=tuple(self.generated),
            text="".join(self._text),
            prompt_token_ids=self.request.prompt,
            finish_reason=self.finish_reason or "",
            machine=machine,
            ms_per_token=1e3 * median(self.step_s),
            logits=np.stack(self.logits) if self.logits else None,
        )
