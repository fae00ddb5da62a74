"""An answer in the chat format, read token by token: reasoning, content, calls.

Markers are recognised by their ids. Text that spells one is text, whatever it spells, and no marker
ever shows as text. Text outside of any block is content, or reasoning if the prompt opened the
thinking block. Calls count only if the request has tools; otherwise an action block is content.

Stop strings end the content; its end is held back as long as it may be the beginning of one. The
log probabilities of content tokens wait with the text that they belong to.

What it does not do: know HTTP, or end the generation (`done` says that it should be ended).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from mkref.engine.text import Detokenizer, StopFilter
from mkref.serve.calls import CallPart, CallReader

if TYPE_CHECKING:
    from mkref.engine.request import LogProb
    from mkref.engine.tokenizer import Tokenizer
    from mkref.serve.template import Markers

__all__ = ["AnswerReader", "Part"]

OPENS = {
    "start_thinking": "reasoning",
    "start_text": "content",
    "start_action": "action",
}
CLOSES = ("end_thinking", "end_text", "end_action", "end_turn")


@dataclass(frozen=True)
class Part:
    """Something new: text of one channel, or a piece of a call.

    Attributes:
        channel: "reasoning", "content" or "call".
        text: of the first two.
        call: of the third.
        logprobs: of the tokens whose text this part completes; content only.
    """

    channel: str
    text: str = ""
    call: CallPart | None = None
    logprobs: tuple[LogProb, ...] = ()


class AnswerReader:
    """Reads one answer.

    Args:
        tokenizer: of the model.
        markers: of its vocabulary.
        reasoning: whether the prompt opened the thinking block.
        tools: whether calls are read.
        stops: texts that end the content.

    Attributes:
        done: a stop string was found; nothing after it counts.
        n_tokens, n_reasoning: tokens read, and those of them that were reasoning.
        n_calls: calls that have begun.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        markers: Markers,
        *,
        reasoning: bool = False,
        tools: bool = False,
        stops: Sequence[str] = (),
    ) -> None:
        self.done = False
        self.n_tokens = self.n_reasoning = 0
        self._tokenizer = tokenizer
        self._markers = markers
        self._tools = tools
        self._channel = "reasoning" if reasoning else ""
        self._text = Detokenizer(tokenizer)
        self._stop = StopFilter(stops)
        self._blank = ""  # white space between blocks, which only counts if text follows
        self._any_block = reasoning
        self._calls: CallReader | None = None
        self._n_earlier_calls = 0
        # Characters of content: that came, that were shown, up to the last token that was told.
        self._n_text = self._n_shown = self._n_told = 0
        self._waiting: deque[tuple[int, LogProb]] = deque()  # end of each token's text

    @property
    def n_calls(self) -> int:
        """Calls that have begun."""
        return self._n_earlier_calls if self._calls is None else self._calls.n_calls

    def push(self, token: int, logprob: LogProb | None = None) -> list[Part]:
        """What a token adds; several parts at the border between two blocks."""
        if self.done:
            return []
        self.n_tokens += 1
        name = self._markers.names.get(token)
        if name is None:
            self.n_reasoning += self._channel == "reasoning"
            return self._take(self._text.push(token), logprob)
        parts: list[Part] = []
        if name in OPENS or name in CLOSES:
            parts = self._close()
            self._channel = OPENS.get(name, "")
            self._any_block = True
            if self._channel == "action" and self._tools:
                self._calls = CallReader(self._n_earlier_calls)
        return parts

    def finish(self) -> list[Part]:
        """The rest, now that no more tokens come."""
        parts = self._close()
        if not self.done:
            parts += self._show(self._stop.finish(), last=True)
        return parts

    def _close(self) -> list[Part]:
        """End the block: bytes that never became a character, text of a call that was none."""
        parts = self._take(self._text.finish(), None)
        self._text = Detokenizer(self._tokenizer)
        self._blank = ""
        if self._calls is not None:
            lost = self._calls.finish()
            self._n_earlier_calls, self._calls = self._calls.n_calls, None
            if lost:
                parts += self._content(lost, None)
        return parts

    def _take(self, text: str, logprob: LogProb | None) -> list[Part]:
        """Text of the present block."""
        if self._channel == "reasoning":
            return [Part("reasoning", text)] if text else []
        if self._calls is not None:
            return [Part("call", call=part) for part in self._calls.push(text)]
        if self._channel == "" and self._any_block:
            self._blank += text
            if not self._blank.strip():
                return []
            text, self._blank = self._blank, ""
            self._any_block = False
        return self._content(text, logprob)

    def _content(self, text: str, logprob: LogProb | None) -> list[Part]:
        if self.done:
            return []
        self._n_text += len(text)
        if logprob is not None:
            self._waiting.append((self._n_text, logprob))
        shown = self._stop.push(text)
        self.done = self._stop.stopped
        return self._show(shown, last=self.done)

    def _show(self, text: str, *, last: bool) -> list[Part]:
        """A part of the content, with the tokens that it completes; at the end also a token of
        which only the beginning shows."""
        self._n_shown += len(text)
        logprobs = []
        while self._waiting:
            end, logprob = self._waiting[0]
            if end > self._n_shown and not (last and self._n_told < self._n_shown):
                break
            logprobs.append(logprob)
            self._n_told = end
            self._waiting.popleft()
        if last:
            self._waiting.clear()
        return [Part("content", text, logprobs=tuple(logprobs))] if text or logprobs else []
