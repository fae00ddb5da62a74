"""Constrained decoding: which tokens may come next, by llguidance.

The next mask is made when a token is accepted, so that an answer which cannot be completed ends
there with an error that names the field, and no step ever sees an empty mask.

What it does not do: write grammars (`mkref.serve.grammar`).
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import numpy as np

from mkref.errors import RequestError
from mkref.serve.errors import ApiError

if TYPE_CHECKING:
    from mkref.engine.tokenizer import Tokenizer

__all__ = ["GrammarConstraint", "Grammars"]

CACHED = 64
"""Grammars that are kept: a client sends the same tools again and again."""


class Grammars:
    """Compiles grammars for one vocabulary. Any thread may use it.

    Args:
        tokenizer: of the model.
        vocab_size: of the model, its padding included.
        eos_token_ids: tokens that end a complete answer.
    """

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, eos_token_ids: Iterable[int]) -> None:
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._eos = sorted(set(eos_token_ids))
        self._lock = threading.Lock()
        self._vocabulary: Any = None
        self._compiled: OrderedDict[str, Any] = OrderedDict()

    def prepare(self) -> None:
        """Read the vocabulary; a second for a large one."""
        import llguidance

        with self._lock:
            if self._vocabulary is None:
                self._vocabulary = llguidance.LLTokenizer(
                    self._tokenizer.to_json(), n_vocab=self._vocab_size, eos_token=self._eos
                )

    def constraint(self, grammar: str, field: str) -> GrammarConstraint:
        """A constraint at its beginning.

        Args:
            grammar: Lark text.
            field: of the request, for messages.

        Raises:
            ApiError: the grammar cannot be compiled, or nothing satisfies it.
        """
        with self._lock:
            compiled = self._compiled.get(grammar)
        if compiled is None:
            compiled = self._compile(grammar, field)
            with self._lock:
                self._compiled[grammar] = compiled
                while len(self._compiled) > CACHED:
                    self._compiled.popitem(last=False)
        return GrammarConstraint(compiled.deep_copy(), self._vocab_size, field)

    def _compile(self, grammar: str, field: str) -> Any:
        import llguidance

        self.prepare()
        limits = llguidance.LLParserLimits(verbose_errors=False)
        text = llguidance.LLMatcher.grammar_from_lark(grammar)
        matcher = llguidance.LLMatcher(self._vocabulary, text, log_level=0, limits=limits)
        if matcher.is_error():
            raise ApiError(
                f"{field}: {_reason(matcher.get_error())}", param=field, code="invalid_schema"
            )
        return matcher


def _reason(error: str) -> str:
    """What is wrong with a schema, without the grammar around it."""
    lines = [line.strip() for line in error.splitlines() if line.strip()]
    reason = lines[0] if lines else "cannot be compiled"
    for marker in ("failed to compile JSON schema: ",):
        reason = reason.partition(marker)[2] or reason
    more = next((line for line in lines[1:] if line.startswith("error:")), "")
    if reason.startswith("NoExtension"):
        return "nothing can satisfy the schema"
    return f"{reason} {more}".strip()[:300]


class GrammarConstraint:
    """One answer on its way through a grammar (`mkref.engine.request.Constraint`).

    Args:
        matcher: of llguidance, at its beginning, of nobody else.
        vocab_size: tokens of the model.
        field: of the request, for messages.

    Raises:
        ApiError: no token may come first.
    """

    def __init__(self, matcher: Any, vocab_size: int, field: str) -> None:
        self._matcher = matcher
        self._field = field
        self._mask = np.zeros(-(-vocab_size // 32), np.uint32)
        self._ended = False
        try:
            self._fill()
        except RequestError as error:
            raise ApiError(str(error), param=field, code="invalid_schema") from error

    @property
    def ended(self) -> bool:
        """Is the answer complete?"""
        return self._ended

    def mask(self) -> np.ndarray:
        """Tokens that may come next: uint32 [ceil(V / 32)]."""
        return self._mask

    def accept(self, token: int) -> None:
        """Take the token that came.

        Raises:
            RequestError: the answer cannot be completed.
        """
        self._matcher.consume_token(int(token))
        self._fill()

    def _fill(self) -> None:
        if not self._matcher.is_error():
            if self._matcher.is_stopped():
                self._ended = True
                return
            mask = np.zeros_like(self._mask)  # the one before may still be on its way
            self._matcher.unsafe_compute_mask_ptr(mask.ctypes.data, mask.nbytes)
            self._mask = mask
        if self._matcher.is_error():
            raise RequestError(f"{self._field}: {_reason(self._matcher.get_error())}")
        if not self._mask.any():
            raise RequestError(f"{self._field}: nothing can satisfy the schema from here on")
