"""The model as the endpoints see it: names, context, chat format, vocabulary, grammars.

What it does not do: run anything (`mkref.serve.service`), or keep a request.
"""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from mkref.engine.sampling import Sampling
from mkref.errors import RequestError
from mkref.serve.constrain import Grammars
from mkref.serve.errors import ApiError
from mkref.serve.north import render_north
from mkref.serve.template import Markers, encode, render_plain
from mkref.serve.validate import refuse
from mkref.serve.vocabulary import Vocabulary

if TYPE_CHECKING:
    from mkref.engine.request import Constraint, Request
    from mkref.engine.tokenizer import Tokenizer
    from mkref.serve.conversation import Turn
    from mkref.serve.schema import Generation
    from mkref.serve.service import Service
    from mkref.serve.settings import Settings

__all__ = ["Chat", "ServedModel", "seed_of"]

MASK = 2**64 - 1


@dataclass(frozen=True)
class Chat:
    """How the model chats.

    Attributes:
        markers: of its vocabulary.
        north: rendered by cohere-melody, else plainly.
        reasoning: whether it thinks first unless the request says otherwise.
    """

    markers: Markers
    north: bool
    reasoning: bool


def seed_of(seed: int | None, index: int) -> int:
    """The seed of the answer with a number: the request's own for the first, scrambled for others.

    >>> seed_of(7, 0), seed_of(7, 1) == seed_of(7, 1), seed_of(7, 1) == seed_of(7, 2)
    (7, True, False)
    """
    first = secrets.randbits(64) if seed is None else seed & MASK
    if index == 0:
        return first
    # The step and the mixing function of splitmix64 (Steele, Lea, Flood 2014).
    word = (first + index * 0x9E3779B97F4A7C15) & MASK
    word = ((word ^ (word >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    word = ((word ^ (word >> 27)) * 0x94D049BB133111EB) & MASK
    return word ^ (word >> 31)


def _json_bytes(value: Any) -> int:
    """Bytes of a value that a template writes as JSON, if it leaves out every space."""
    return len(json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode())


class ServedModel:
    """What requests need to know about the model.

    Args:
        service: the engine with its queue.
        settings: of the endpoint.

    Attributes:
        name: what clients ask for.
        max_context: longest prompt and answer together.
    """

    def __init__(self, service: Service, settings: Settings) -> None:
        engine = service.engine
        self._service = service
        self._settings = settings
        self.name = settings.model
        self.max_context = min(settings.max_context or engine.max_context, engine.max_context)
        self.vocab_size = int(engine.config.vocab_size)
        self._tokenizer: Tokenizer | None = engine.tokenizer
        self._why_no_text: str = engine.why_no_text
        self.eos_ids = frozenset(engine.config.eos_token_ids)
        self._chat: Chat | None = None
        self._why_no_chat = ""
        try:
            self._chat = self._find_chat()
        except RequestError as error:
            self._why_no_chat = str(error)
        self.vocabulary = Vocabulary(self._tokenizer)
        self._longest = 0
        self._grammars = self._find_grammars()

    def _find_chat(self) -> Chat:
        settings = self._settings
        markers = Markers.of(self.tokenizer)
        # A model whose turns end a text was trained on turns.
        trained = markers["end_turn"] in self.eos_ids
        wanted = settings.chat_format
        north = trained if wanted == "auto" else wanted == "north"
        return Chat(markers, north, trained if settings.reasoning is None else settings.reasoning)

    def _find_grammars(self) -> Grammars | None:
        if self._tokenizer is None or self._chat is None:
            return None
        ends = {*self.eos_ids, self._chat.markers["end_turn"]}
        return Grammars(self._tokenizer, self.vocab_size, ends)

    @property
    def tokenizer(self) -> Tokenizer:
        """Its tokenizer, or the error that says why there is none."""
        if self._tokenizer is None:
            raise RequestError(f"messages: {self._why_no_text}; use /v1/completions with token ids")
        return self._tokenizer

    @property
    def has_text(self) -> bool:
        """Can it read and write text, or token ids only?"""
        return self._tokenizer is not None

    @property
    def chat(self) -> Chat:
        """How it chats, or the error that says why it does not."""
        if self._chat is None:
            raise refuse("messages", self._why_no_chat.removeprefix("messages: "))
        return self._chat

    def prepare(self) -> None:
        """Do now what the first request would wait for."""
        if self._tokenizer is not None:
            self._longest = self._tokenizer.longest
        if self._grammars is not None:
            self._grammars.prepare()

    def check_name(self, model: str | None) -> None:
        """Refuse a request for another model.

        Raises:
            ApiError: 404.
        """
        if model is not None and model != self.name:
            raise ApiError(
                f"model: {model[:100]!r} is not served here; this is {self.name!r}",
                param="model",
                code="model_not_found",
                status=404,
            )

    def prompt(
        self,
        turns: Sequence[Turn],
        tools: Sequence[dict[str, Any]],
        *,
        reasoning: bool,
        json_mode: bool,
    ) -> list[int]:
        """Token ids of a chat.

        Raises:
            ApiError: it is so long that it need not be encoded to know that it does not fit.
        """
        chat = self.chat
        said = sum(len(text.encode()) for turn in turns for text in turn.said())
        said += sum(_json_bytes(call.arguments) for turn in turns for call in turn.calls)
        self._check_bytes(said, "messages")
        self._check_bytes(said + _json_bytes(tools), "tools")
        if chat.north:
            pieces = render_north(
                turns, tools, chat.markers, reasoning=reasoning, json_mode=json_mode
            )
        else:
            pieces = render_plain(turns, tools, chat.markers, reasoning=reasoning)
        return encode(pieces, self.tokenizer)

    def constraint(self, grammar: str, field: str) -> Constraint:
        """A grammar at its beginning."""
        assert self._grammars is not None  # there is a chat format, so there is a tokenizer
        return self._grammars.constraint(grammar, field)

    def request(
        self,
        form: Generation,
        prompt: str | Sequence[int],
        index: int,
        seed: int,
        *,
        field: str,
        max_tokens: int | None,
        length_field: str = "max_tokens",
        stop: Sequence[str | int],
        logprobs: int | None,
        constraint: Constraint | None = None,
    ) -> Request:
        """One answer's request to the engine.

        Args:
            form: what the client sent.
            prompt: text or token ids.
            index: number of the answer.
            seed: of the first answer.
            field: where the prompt came from, for messages.
            max_tokens: None: what the context has room for.
            length_field: where `max_tokens` came from.
            stop: texts and token ids that end the answer.
            logprobs: None, or how many likely tokens to tell.
            constraint: what the answer may be.

        Raises:
            ApiError, RequestError: a value that does not fit the model or its context.
        """
        settings = self._settings
        if isinstance(prompt, str):
            self._check_bytes(len(prompt.encode()), field)
            prompt = self.tokenizer.encode(prompt)
        self._check_ids(prompt, field)
        self._check_ids(form.stop_token_ids or (), "stop_token_ids")
        self._check_room(len(prompt), max_tokens, field, length_field)
        timeout = settings.request_timeout_s
        return self._service.request(
            prompt,
            max_tokens=self.max_context - len(prompt) if max_tokens is None else max_tokens,
            sampling=self._sampling(form, seed_of(seed, index), logprobs),
            stop=[*stop, *(form.stop_token_ids or ())] or None,
            ignore_eos=bool(form.ignore_eos),
            constraint=constraint,
            priority=form.priority or 0,
            deadline=None if timeout is None else time.monotonic() + timeout,
        )

    def at_least(self, n_bytes: int) -> int:
        """Tokens that so many bytes of text must have."""
        return n_bytes // (self._longest or self.tokenizer.longest)

    def _check_bytes(self, n_bytes: int, field: str) -> None:
        """Refuse megabytes of text before a core works on them for seconds."""
        least = self.at_least(n_bytes)
        if least >= self.max_context:
            raise refuse(
                field,
                f"at least {least} tokens; the context is {self.max_context} tokens and must hold "
                "prompt and answer",
                "context_length_exceeded",
            )

    def _check_ids(self, ids: Sequence[int], field: str) -> None:
        if ids and max(ids) >= self.vocab_size:
            at, token = next((i, t) for i, t in enumerate(ids) if t >= self.vocab_size)
            raise refuse(f"{field}[{at}]", f"{token}; must be less than {self.vocab_size}")

    def _check_room(
        self, n_prompt: int, max_tokens: int | None, field: str, length_field: str
    ) -> None:
        if n_prompt >= self.max_context:
            raise refuse(
                field,
                f"{n_prompt} tokens; the context is {self.max_context} tokens and must hold prompt "
                "and answer",
                "context_length_exceeded",
            )
        room = self.max_context - n_prompt
        if max_tokens is not None and max_tokens > room:
            raise refuse(
                length_field,
                f"{max_tokens}; must be at most {room}, which a prompt of {n_prompt} leaves of a "
                f"context of {self.max_context}",
                "context_length_exceeded",
            )

    def _sampling(self, form: Generation, seed: int, logprobs: int | None) -> Sampling:
        settings = self._settings
        temperature, top_p = form.temperature, form.top_p
        return Sampling(
            temperature=settings.temperature if temperature is None else temperature,
            top_p=settings.top_p if top_p is None else top_p,
            top_k=max(form.top_k or 0, 0),
            min_p=form.min_p or 0.0,
            presence_penalty=form.presence_penalty or 0.0,
            frequency_penalty=form.frequency_penalty or 0.0,
            repetition_penalty=form.repetition_penalty or 1.0,
            logit_bias=tuple((int(token), bias) for token, bias in (form.logit_bias or {}).items()),
            seed=seed,
            min_tokens=form.min_tokens or 0,
            logprobs=logprobs,
        )
