"""POST /v1/completions: from the checked form to requests, and answers as JSON.

What it does not do: know the chat format; text is text here, and special tokens in a prompt are
what they are.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from mkref.serve.logprobs import CompletionLogprobs
from mkref.serve.served import seed_of
from mkref.serve.sse import sse
from mkref.serve.validate import refuse

if TYPE_CHECKING:
    from mkref.engine.request import Request
    from mkref.serve.schema import CompletionRequest
    from mkref.serve.served import ServedModel
    from mkref.serve.service import Event

__all__ = ["CompletionChoice", "CompletionChunks", "CompletionJob", "prepare_completion"]

DEFAULT_TOKENS = 16
"""OpenAI's default for this endpoint."""


@dataclass(frozen=True)
class CompletionJob:
    """A completion request, ready to run.

    Attributes:
        form: what was asked.
        requests: one per answer; the answers of a prompt are neighbours.
        echoes: for each answer, what is put in front of its text.
    """

    form: CompletionRequest
    requests: list[Request] = field(repr=False)
    echoes: list[str] = field(repr=False)


def prepare_completion(
    form: CompletionRequest, model: ServedModel, max_choices: int
) -> CompletionJob:
    """Everything that can be wrong with a request is found here, before anything runs.

    Raises:
        ApiError, RequestError: names the field.
    """
    model.check_name(form.model)
    n, prompts = form.n or 1, form.prompts
    if n * len(prompts) > max_choices:
        raise refuse(
            "n", f"{n} answers to {len(prompts)} prompts; must be at most {max_choices} answers"
        )
    if form.echo and form.logprobs is not None:
        raise refuse("echo", "not together with logprobs: those of a prompt are not computed")
    stops = (form.stop,) if isinstance(form.stop, str) else tuple(form.stop or ())
    seed = seed_of(form.seed, 0)
    requests, echoes = [], []
    for number, prompt in enumerate(prompts):
        name = "prompt" if len(prompts) == 1 else f"prompt[{number}]"
        if isinstance(prompt, str) and not model.has_text:
            raise refuse(name, "is text, and this model has no tokenizer; give token ids")
        for index in range(n):
            requests.append(
                model.request(
                    form,
                    prompt,
                    index,
                    seed,
                    field=name,
                    max_tokens=form.max_tokens or _default(model, prompt),
                    stop=stops,
                    logprobs=form.logprobs,
                )
            )
            echoes.append(_echo(form, model, prompt))
    return CompletionJob(form, requests, echoes)


def _default(model: ServedModel, prompt: str | Sequence[int]) -> int:
    """OpenAI's default, or less if the context has less room."""
    if isinstance(prompt, str) and model.at_least(len(prompt.encode())) >= model.max_context:
        return 1  # refused before anybody works on it for seconds
    length = len(model.tokenizer.encode(prompt)) if isinstance(prompt, str) else len(prompt)
    return max(min(DEFAULT_TOKENS, model.max_context - length), 1)


def _echo(form: CompletionRequest, model: ServedModel, prompt: str | Sequence[int]) -> str:
    if not form.echo:
        return ""
    if isinstance(prompt, str):
        return prompt
    return model.tokenizer.decode(prompt) if model.has_text else ""


class CompletionChoice:
    """One answer on its way.

    Attributes:
        finish_reason: None while it is under way.
        n_tokens: so far.
        token_ids: all tokens, if the client wants them.
    """

    def __init__(self, job: CompletionJob, index: int, model: ServedModel) -> None:
        self.finish_reason: str | None = None
        self.n_tokens = 0
        self.token_ids: list[int] = []
        form = job.form
        self._wants_ids = bool(form.return_token_ids)
        self._echo = job.echoes[index]
        self._texts: list[str] = [self._echo]
        self._pieces: list[dict[str, Any]] = []
        self._logprobs = (
            None if form.logprobs is None else CompletionLogprobs(form.logprobs, model.vocabulary)
        )

    def take(self, event: Event) -> tuple[str, dict[str, Any] | None]:
        """Text and log probabilities that an event adds."""
        self.n_tokens += len(event.token_ids)
        if self._wants_ids:
            self.token_ids += event.token_ids
        self._texts.append(event.text)
        if event.finish_reason is not None:
            self.finish_reason = "length" if event.finish_reason == "length" else "stop"
        piece = None
        if self._logprobs is not None:
            piece = self._logprobs.piece(event.logprobs or ())
            self._pieces.append(piece)
        return event.text, piece

    @property
    def echo(self) -> str:
        """What stands in front of the text."""
        return self._echo

    def body(self, index: int) -> dict[str, Any]:
        """The whole answer as an element of `choices`."""
        choice: dict[str, Any] = {"index": index, "text": "".join(self._texts)}
        choice["logprobs"] = None if self._logprobs is None else _joined(self._pieces)
        choice["finish_reason"] = self.finish_reason
        if self._wants_ids:
            choice["token_ids"] = self.token_ids
        return choice


def _joined(pieces: list[dict[str, Any]]) -> dict[str, Any]:
    names = ("tokens", "token_logprobs", "top_logprobs", "text_offset")
    return {
        name: None
        if any(piece[name] is None for piece in pieces)
        else [entry for piece in pieces for entry in piece[name]]
        for name in names
    }


class CompletionChunks:
    """Writes the chunks of one response."""

    def __init__(self, answer_id: str, created: int, model: str) -> None:
        head = {"id": answer_id, "object": "text_completion", "created": created, "model": model}
        self._head = json.dumps(head)[:-1] + ', "choices": '

    def piece(
        self,
        index: int,
        text: str,
        logprobs: dict[str, Any] | None,
        finish_reason: str | None,
        extra: dict[str, Any],
    ) -> bytes:
        """What an event added."""
        choice = {
            "index": index,
            "text": text,
            "logprobs": logprobs,
            "finish_reason": finish_reason,
        }
        return sse(f"{self._head}[{json.dumps(choice | extra)}]}}")

    def usage(self, usage: dict[str, Any]) -> bytes:
        """The last chunk of the response."""
        return sse(f'{self._head}[], "usage": {json.dumps(usage)}}}')
