"""A chat with a model in this process: what an endpoint would answer, without HTTP.

What it does not do: serve more than one client, who waits for each answer.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Iterator
from typing import TYPE_CHECKING, Any

from mkref.serve.chat import prepare_chat
from mkref.serve.chat_reply import ChatChoice
from mkref.serve.running import Running, Slots
from mkref.serve.schema import REFUSED
from mkref.serve.schema_chat import ChatRequest
from mkref.serve.served import ServedModel
from mkref.serve.service import Service
from mkref.serve.settings import Settings
from mkref.serve.validate import validated

if TYPE_CHECKING:
    from mkref.engine.engine import Engine

__all__ = ["EmbeddedChat"]


class EmbeddedChat:
    """A loaded model to chat with; a context manager.

        with Engine.load("nano") as engine, EmbeddedChat(engine) as chat:
            for piece in chat.answers(messages=[{"role": "user", "content": "Hello"}]):
                print(piece, end="")

    Args:
        engine: for this chat alone while it lasts.

    Raises:
        RequestError: the model cannot chat.
    """

    def __init__(self, engine: Engine) -> None:
        self._service = Service(engine)
        self._model = ServedModel(self._service, Settings())
        self._runner = asyncio.Runner()

    def __enter__(self) -> EmbeddedChat:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End what is under way; the engine stays loaded."""
        self._runner.close()
        self._service.close()

    def answers(self, **fields: Any) -> Iterator[str]:
        """Pieces of an answer, as they come.

        Args:
            fields: of a request to /v1/chat/completions; None is as good as absent.

        Raises:
            MkrefError: names the field that is wrong, or says what failed.
        """
        form = validated(ChatRequest, fields, REFUSED["chat"])
        pieces = self._pieces(form)
        try:
            while True:
                try:
                    yield self._runner.run(_next(pieces))
                except StopAsyncIteration:
                    return
        finally:
            self._runner.run(pieces.aclose())

    async def _pieces(self, form: ChatRequest) -> AsyncGenerator[str, None]:
        job = prepare_chat(form, self._model, max_choices=1)
        choice = ChatChoice(job, self._model)
        running = Running(self._service, Slots(1), job.requests)
        try:
            async for index, event in running.events():
                delta = choice.take(event)
                if choice.finish_reason is not None and event.finish_reason is None:
                    running.stop(index)
                yield delta.get("reasoning_content") or delta.get("content") or ""
        finally:
            await running.aclose()


async def _next(pieces: AsyncIterator[str]) -> str:
    """A coroutine, which is what a runner takes."""
    return await anext(pieces)
