"""Token ids become text while they come: whole characters only, and nothing beyond a stop string.

`Detokenizer` turns ids into text piece by piece. `StopFilter` holds back what may be the beginning
of a stop string. Together the pieces are exactly the text that one would get at the end.

What it does not do: decide about tokens (`mkref.engine.scheduler` ends a sequence on ids).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mkref.engine.tokenizer import Tokenizer

__all__ = ["Detokenizer", "StopFilter"]

BROKEN = "\ufffd"
"""What a decoder shows for bytes that are no character, or not one yet."""
LONGEST_HELD = 64
"""Tokens without a whole character at their end that are decoded again and again; garbage only."""


class Detokenizer:
    """Incremental decoding.

    A byte-level token may end inside a character. Then the decoder shows one U+FFFD at the end of
    the text; it is held back until the rest of the character comes, or until a later token shows
    that it never will.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._context: list[int] = []  # the ids before: decoders treat a first token specially
        self._ids: list[int] = []  # since the last whole character at the end of a token
        self._shown = 0  # characters of `_ids` that were given out

    def push(self, token_id: int) -> str:
        """Text that is complete now; often one word, at times nothing."""
        self._ids.append(token_id)
        text = self._decode()
        if text.endswith(BROKEN) and len(self._ids) < LONGEST_HELD:
            piece, self._shown = text[self._shown : -1], max(self._shown, len(text) - 1)
            return piece
        return self._take(text)

    def finish(self) -> str:
        """The rest; a character that stayed incomplete shows as U+FFFD."""
        return self._take(self._decode()) if self._ids else ""

    def _decode(self) -> str:
        before = self._tokenizer.decode(self._context)
        return self._tokenizer.decode([*self._context, *self._ids])[len(before) :]

    def _take(self, text: str) -> str:
        """Everything that was not given out, and begin anew."""
        piece = text[self._shown :]
        if text:  # special tokens have no text; the context stays something that has
            self._context = self._ids
        self._ids, self._shown = [], 0
        return piece


class StopFilter:
    """Lets text pass up to the first stop string.

    Args:
        stops: strings that end the text; they are not part of it.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stops)
        self._held = ""
        self.stopped = False

    def push(self, piece: str) -> str:
        """The part of the text so far that is safe to show and was not shown yet."""
        if self.stopped:
            return ""
        text = self._held + piece
        found = [at for stop in self._stops if (at := text.find(stop)) >= 0]
        if found:
            self.stopped = True
            self._held = ""
            return text[: min(found)]
        keep = max((self._overlap(text, stop) for stop in self._stops), default=0)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]

    def finish(self) -> str:
        """What was held back, now that no more comes."""
        held, self._held = self._held, ""
        return held

    @staticmethod
    def _overlap(text: str, stop: str) -> int:
        """Length of the longest end of `text` with which `stop` begins."""
        return next(
            (n for n in range(min(len(stop) - 1, len(text)), 0, -1) if text.endswith(stop[:n])), 0
        )
