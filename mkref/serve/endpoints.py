"""The two endpoints that generate: read, check, run, answer whole or as a stream.

What it does not do: know any field (`mkref.serve.chat`, `mkref.serve.completions`), or count and
log (`mkref.serve.observe`).
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from starlette.requests import Request  # noqa: TC002  FastAPI reads the annotation
from starlette.responses import JSONResponse, Response

from mkref.serve.body import read_json
from mkref.serve.chat import prepare_chat
from mkref.serve.chat_reply import ChatChoice, ChatChunks
from mkref.serve.completions import CompletionChoice, CompletionChunks, prepare_completion
from mkref.serve.errors import CLIENT_GONE, as_api_error
from mkref.serve.report import report_of
from mkref.serve.running import Running
from mkref.serve.schema import REFUSED, CompletionRequest
from mkref.serve.schema_chat import ChatRequest
from mkref.serve.sse import DONE, ClientGoneError, EventStream, unless_gone
from mkref.serve.usage import UsageSum
from mkref.serve.validate import validated

if TYPE_CHECKING:
    from mkref.serve.chat import ChatJob
    from mkref.serve.completions import CompletionJob
    from mkref.serve.report import Report
    from mkref.serve.running import Slots
    from mkref.serve.schema import Generation
    from mkref.serve.served import ServedModel
    from mkref.serve.service import Service
    from mkref.serve.settings import Settings

__all__ = ["Endpoints"]


@dataclass(frozen=True)
class Endpoints:
    """The endpoints of one app."""

    service: Service
    model: ServedModel
    settings: Settings
    slots: Slots

    async def chat(self, request: Request) -> Response:
        """POST /v1/chat/completions."""
        data = await read_json(request, self.settings)

        def prepare() -> tuple[ChatRequest, ChatJob]:
            form = validated(ChatRequest, data, REFUSED["chat"])
            return form, prepare_chat(form, self.model, self.settings.max_choices)

        form, job = await asyncio.to_thread(prepare)
        choices = [ChatChoice(job, self.model) for _ in job.requests]
        return await self._answer(request, form, job, _ChatRun(self, form, job, choices))

    async def completions(self, request: Request) -> Response:
        """POST /v1/completions."""
        data = await read_json(request, self.settings)

        def prepare() -> tuple[CompletionRequest, CompletionJob]:
            form = validated(CompletionRequest, data, REFUSED["completions"])
            return form, prepare_completion(form, self.model, self.settings.max_choices)

        form, job = await asyncio.to_thread(prepare)
        choices = [CompletionChoice(job, i, self.model) for i in range(len(job.requests))]
        return await self._answer(request, form, job, _CompletionRun(self, form, job, choices))

    async def _answer(
        self,
        request: Request,
        form: Generation,
        job: ChatJob | CompletionJob,
        run: _ChatRun | _CompletionRun,
    ) -> Response:
        report = report_of(request)
        report.stream = bool(form.stream)
        running = Running(self.service, self.slots, job.requests)
        if form.stream:

            async def close() -> None:
                run.usage.tell(report)
                await running.aclose()

            def failed(error: BaseException) -> None:
                _note(report, error)

            events = run.stream(running, report)
            return EventStream(events, close, self.settings, failed)
        try:
            body = await unless_gone(request.receive, run.whole(running, report))
        except ClientGoneError as error:
            _note(report, error)
            return Response(status_code=CLIENT_GONE)
        finally:
            run.usage.tell(report)
            await running.aclose()
        return JSONResponse(body)


def _note(report: Report, error: BaseException) -> None:
    """Keep an error for the log; the first one is the cause of the others."""
    if report.error is not None:
        return
    if isinstance(error, ClientGoneError):
        report.error, report.error_code = "the client left", "client_gone"
    else:
        told = as_api_error(error)
        report.error, report.error_code = f"{type(error).__name__}: {error}", told.code


class _Run:
    """What both kinds of answers have in common."""

    kind = ""

    def __init__(self, endpoints: Endpoints, form: Any, job: Any, choices: list[Any]) -> None:
        self.form = form
        self.job = job
        self.choices = choices
        self.created = int(time.time())
        self.model = endpoints.model
        self.answer_id = f"{self.kind}-{secrets.token_hex(14)}"
        self.usage = UsageSum(form.n or 1, len(choices))

    def prompt_ids(self, index: int) -> list[int] | None:
        """The tokens of a prompt, if the client wants them."""
        return list(self.job.requests[index].prompt) if self.form.return_token_ids else None

    def wants_usage(self) -> bool:
        """Does the stream end with its usage?"""
        options = self.form.stream_options
        return options is not None and options.include_usage

    def reply(self, kind: str, choices: list[dict[str, Any]], usage: Any) -> dict[str, Any]:
        """The whole response."""
        if self.form.return_token_ids:
            for index, choice in enumerate(choices):
                choice["prompt_token_ids"] = self.prompt_ids(index)
        return {
            "id": self.answer_id,
            "object": kind,
            "created": self.created,
            "model": self.model.name,
            "choices": choices,
            "usage": usage,
        }


class _ChatRun(_Run):
    kind = "chatcmpl"

    async def whole(self, running: Running, report: Report) -> dict[str, Any]:
        """All answers, complete."""
        async for index, event in running.events():
            self._take(index, event, running, report)
        choices = [choice.body(index) for index, choice in enumerate(self.choices)]
        return self.reply("chat.completion", choices, self.usage.body(chat=True))

    def _take(self, index: int, event: Any, running: Running, report: Report) -> dict[str, Any]:
        choice: ChatChoice = self.choices[index]
        delta = choice.take(event)
        reader = choice.reader
        self.usage.note(index, event, reader.n_tokens, reader.n_reasoning)
        if choice.finish_reason is not None:
            report.finish_reasons.append(choice.finish_reason)
            if event.finish_reason is None:
                running.stop(index)
        return delta

    async def stream(self, running: Running, report: Report) -> AsyncIterator[bytes]:
        """The same as chunks."""
        chunks = ChatChunks(self.answer_id, self.created, self.model.name)
        yield b"".join(chunks.role(i, self.prompt_ids(i)) for i in range(len(self.choices)))
        async for index, event in running.events():
            delta = self._take(index, event, running, report)
            choice = self.choices[index]
            entries = choice.entries if self.form.logprobs else None
            ids = event.token_ids if self.form.return_token_ids else None
            sent = b""
            if delta or entries or ids:
                sent = chunks.delta(index, delta, entries, ids)
            if choice.finish_reason is not None:
                sent += chunks.end(index, choice.finish_reason)
            if sent:
                yield sent
        if self.wants_usage():
            yield chunks.usage(self.usage.body(chat=True))
        yield DONE


class _CompletionRun(_Run):
    kind = "cmpl"

    async def whole(self, running: Running, report: Report) -> dict[str, Any]:
        """All answers, complete."""
        async for index, event in running.events():
            self._take(index, event, report)
        choices = [choice.body(index) for index, choice in enumerate(self.choices)]
        return self.reply("text_completion", choices, self.usage.body(chat=False))

    def _take(self, index: int, event: Any, report: Report) -> tuple[str, dict[str, Any] | None]:
        choice: CompletionChoice = self.choices[index]
        piece = choice.take(event)
        self.usage.note(index, event, choice.n_tokens)
        if choice.finish_reason is not None:
            report.finish_reasons.append(choice.finish_reason)
        return piece

    async def stream(self, running: Running, report: Report) -> AsyncIterator[bytes]:
        """The same as chunks."""
        chunks = CompletionChunks(self.answer_id, self.created, self.model.name)
        for index, choice in enumerate(self.choices):
            prompt_ids = self.prompt_ids(index)
            if choice.echo or prompt_ids is not None:
                extra = {} if prompt_ids is None else {"prompt_token_ids": prompt_ids}
                yield chunks.piece(index, choice.echo, None, None, extra)
        async for index, event in running.events():
            text, logprobs = self._take(index, event, report)
            finish_reason = self.choices[index].finish_reason
            ids = {"token_ids": list(event.token_ids)} if self.form.return_token_ids else {}
            if text or logprobs or ids or finish_reason is not None:
                yield chunks.piece(index, text, logprobs, finish_reason, ids)
        if self.wants_usage():
            yield chunks.usage(self.usage.body(chat=False))
        yield DONE
