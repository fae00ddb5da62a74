"""Log probabilities in the two shapes that OpenAI's endpoints have.

What it does not do: compute them (the engine), or decide which tokens count (`mkref.serve.answer`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mkref.engine.request import LogProb
    from mkref.serve.vocabulary import Vocabulary

__all__ = ["CompletionLogprobs", "chat_logprobs"]

LOWEST = -9999.0
"""What stands for a probability of zero: JSON has no infinity."""


def chat_logprobs(
    logprobs: Sequence[LogProb], n_top: int, vocabulary: Vocabulary
) -> list[dict[str, Any]]:
    """Entries of `logprobs.content`."""
    return [
        {
            **_entry(each.id, each.logprob, vocabulary),
            "top_logprobs": [
                _entry(token, logprob, vocabulary) for token, logprob in each.top[:n_top]
            ],
        }
        for each in logprobs
    ]


def _entry(token: int, logprob: float, vocabulary: Vocabulary) -> dict[str, Any]:
    spelled = vocabulary.bytes_of(token)
    text = spelled.decode("utf-8", errors="replace")
    return {"token": text, "logprob": max(float(logprob), LOWEST), "bytes": list(spelled)}


class CompletionLogprobs:
    """`logprobs` of /v1/completions, token by token; offsets go on from piece to piece.

    Args:
        n_top: likely tokens to tell.
        vocabulary: of the model.
        offset: characters in front of the first token.
    """

    def __init__(self, n_top: int, vocabulary: Vocabulary, offset: int = 0) -> None:
        self._n_top = n_top
        self._vocabulary = vocabulary
        self._offset = offset

    def piece(self, logprobs: Sequence[LogProb]) -> dict[str, Any]:
        """The object for the next tokens."""
        tokens, offsets, tops = [], [], []
        for each in logprobs:
            text = self._vocabulary.text_of(each.id)
            tokens.append(text)
            offsets.append(self._offset)
            self._offset += len(text)
            top: dict[str, float] = {}
            for token, logprob in each.top[: self._n_top]:
                # Two halves of different characters look alike as text: the likelier one stays.
                top.setdefault(self._vocabulary.text_of(token), max(float(logprob), LOWEST))
            tops.append(top)
        return {
            "tokens": tokens,
            "token_logprobs": [max(float(each.logprob), LOWEST) for each in logprobs],
            "top_logprobs": tops if self._n_top else None,
            "text_offset": offsets,
        }
