"""What single tokens are as text and as bytes, for log probabilities.

A token of a byte-level vocabulary may be half a character: its bytes are exact, its text shows
U+FFFD for what is no character by itself.

What it does not do: decode texts (`mkref.engine.text`).
"""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mkref.engine.tokenizer import Tokenizer

__all__ = ["Vocabulary"]


@cache
def _alphabet() -> dict[str, int]:
    """The letter that stands for each byte in byte-level vocabularies (GPT-2's, used ever since).

    Bytes that print stand for themselves, the others are counted up from 256.
    """
    prints = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in prints]
    letters = {chr(byte): byte for byte in prints}
    return letters | {chr(256 + i): byte for i, byte in enumerate(others)}


class Vocabulary:
    """Texts and bytes of tokens; without a tokenizer a token's text is its number."""

    def __init__(self, tokenizer: Tokenizer | None) -> None:
        self._tokenizer = tokenizer
        self._bytes: dict[int, bytes] = {}

    def bytes_of(self, token: int) -> bytes:
        """The bytes that a token stands for."""
        found = self._bytes.get(token)
        if found is None:
            found = self._bytes[token] = self._look_up(token)
        return found

    def text_of(self, token: int) -> str:
        """The same as text."""
        return self.bytes_of(token).decode("utf-8", errors="replace")

    def _look_up(self, token: int) -> bytes:
        if self._tokenizer is None:
            return f"token_id:{token}".encode()
        spelled = self._tokenizer.token(token)
        if spelled is None:  # padding of the vocabulary
            return f"token_id:{token}".encode()
        alphabet = _alphabet()
        is_text = bool(self._tokenizer.decode([token]))  # special tokens have none
        if is_text and all(letter in alphabet for letter in spelled):
            return bytes(alphabet[letter] for letter in spelled)
        return spelled.encode()
