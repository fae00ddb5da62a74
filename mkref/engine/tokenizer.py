"""Text to token ids and back, by the `tokenizer.json` of a model folder.

A text becomes a prompt by putting the model's `bos_token_id` in front, unless the tokenizer does
that itself: models are trained on texts that begin so.

What it does not do: chat templates, or import the `tokenizers` package before it is needed.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

from mkref.errors import CheckpointError, RequestError

__all__ = ["TOKENIZER_FILE", "Tokenizer"]

TOKENIZER_FILE = "tokenizer.json"


class Tokenizer:
    """A `tokenizer.json`.

    Args:
        path: the file, or the folder that holds it.
        bos_token_id: put in front of every prompt; None for nothing.

    Raises:
        RequestError: the `tokenizers` package is not installed.
        CheckpointError: the file is missing or no tokenizer.
    """

    def __init__(self, path: str | Path, bos_token_id: int | None = None) -> None:
        try:
            import tokenizers
        except ImportError as error:
            raise RequestError(
                "tokenizer: the package tokenizers is not installed; pip install tokenizers, or "
                "give token ids instead of text"
            ) from error
        file = Path(path)
        file = file / TOKENIZER_FILE if file.is_dir() else file
        if not file.is_file():
            raise CheckpointError(f"tokenizer: no file {file}")
        try:
            self._tokenizer: Any = tokenizers.Tokenizer.from_file(str(file))
        except Exception as error:  # the package raises nothing more precise
            raise CheckpointError(f"tokenizer: cannot read {file}: {error}") from error
        self.bos_token_id = bos_token_id
        added = [
            str(token.content) for token in self._tokenizer.get_added_tokens_decoder().values()
        ]
        self._added = re.compile("|".join(map(re.escape, sorted(added, key=len, reverse=True))))
        self._has_added = bool(added)

    @property
    def vocab_size(self) -> int:
        """Number of token ids that have a meaning."""
        return int(self._tokenizer.get_vocab_size())

    def encode(self, text: str) -> list[int]:
        """Token ids of a prompt, the first of which is `bos_token_id` if there is one.

        Raises:
            RequestError: the text holds half a surrogate pair, for instance from an argument that
                was not UTF-8.
        """
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise RequestError(
                f"prompt: character {error.start} is {text[error.start]!r}, which is no Unicode "
                "text; give UTF-8"
            ) from error
        ids: list[int] = self._tokenizer.encode(text).ids
        if self.bos_token_id is not None and ids[:1] != [self.bos_token_id]:
            return [self.bos_token_id, *ids]
        return ids

    def encode_plain(self, text: str) -> list[int]:
        """Token ids of a text that is data: what spells a special token in it stays spelled out.

        Nothing is put in front.
        """
        pieces, begin = [], 0
        if self._has_added:
            for found in self._added.finditer(text):  # cut behind the first letter of each
                pieces.append(text[begin : found.start() + 1])
                begin = found.start() + 1
        pieces.append(text[begin:])
        encoded = self._tokenizer.encode_batch(
            [piece for piece in pieces if piece], add_special_tokens=False
        )
        return [int(i) for piece in encoded for i in piece.ids]

    def id_of(self, spelled: str) -> int | None:
        """The id of the token that the vocabulary spells so, special ones too."""
        found = self._tokenizer.token_to_id(spelled)
        return None if found is None else int(found)

    @cached_property
    def longest(self) -> int:
        """Bytes of the longest token: no text has fewer tokens than its bytes divided by this."""
        return max(len(spelled) for spelled in self._tokenizer.get_vocab())

    def to_json(self) -> str:
        """The whole of `tokenizer.json`, for a library that reads it itself."""
        return str(self._tokenizer.to_str())

    def decode(self, ids: Sequence[int]) -> str:
        """Text of token ids; special tokens are left out, bytes that are no UTF-8 become U+FFFD."""
        return str(self._tokenizer.decode([int(i) for i in ids], skip_special_tokens=True))

    def token(self, token_id: int) -> str | None:
        """How the vocabulary spells one token; None if the id has no meaning."""
        spelled = self._tokenizer.id_to_token(int(token_id))
        return None if spelled is None else str(spelled)
