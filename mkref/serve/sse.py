"""Server-sent events, and what a client that leaves or does not read means for an answer.

Each event is a line `data: {...}` and an empty line; the last is `data: [DONE]`. A silent stream
sends a comment now and then, so that nobody on the way takes it for dead. A client that goes away
ends the answer at the next step; so does one that takes nothing for too long.

What it does not do: know what an event says.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from typing import TYPE_CHECKING, Any, TypeVar

from starlette.responses import Response

from mkref.serve.errors import as_api_error

if TYPE_CHECKING:
    from starlette.types import Receive, Scope, Send

    from mkref.serve.settings import Settings

__all__ = ["DONE", "ClientGoneError", "EventStream", "sse", "unless_gone"]

Result = TypeVar("Result")
DONE = b"data: [DONE]\n\n"
KEEP_ALIVE = b": still there\n\n"


class ClientGoneError(Exception):
    """Nobody waits for the answer any more."""


def sse(text: str) -> bytes:
    """One event."""
    return f"data: {text}\n\n".encode()


async def gone(receive: Receive) -> None:
    """Return when the client has left."""
    while (await receive())["type"] != "http.disconnect":
        pass


async def unless_gone(receive: Receive, work: Coroutine[Any, Any, Result]) -> Result:
    """The result of some work, which is given up if the client leaves.

    Raises:
        ClientGoneError: it left.
    """
    task = asyncio.create_task(work)
    watch = asyncio.create_task(gone(receive))
    try:
        await asyncio.wait({task, watch}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientGoneError
        return task.result()
    finally:
        for each in (task, watch):
            each.cancel()
        await asyncio.gather(task, watch, return_exceptions=True)


class EventStream(Response):
    """A stream of events.

    Args:
        events: bytes to send, each one event or several; an error of it becomes the last event.
        close: awaited at the end, however it comes.
        settings: how long to wait for what.
        failed: told the error that ended the stream, for the log.
    """

    media_type = "text/event-stream"

    def __init__(
        self,
        events: AsyncIterator[bytes],
        close: Callable[[], Awaitable[None]],
        settings: Settings,
        failed: Callable[[BaseException], None],
    ) -> None:
        super().__init__(None, headers={"cache-control": "no-cache", "x-accel-buffering": "no"})
        del self.headers["content-length"]
        self._events = events
        self._close = close
        self._settings = settings
        self._failed = failed
        self._since, self._sending = time.monotonic(), False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the headers, then events until they end, the client leaves or takes nothing."""
        watch = asyncio.create_task(gone(receive))
        sender = asyncio.create_task(self._send_all(send))
        monitor = asyncio.create_task(self._monitor(send))
        tasks = {watch, sender, monitor}
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            if not sender.done():
                self._failed(ClientGoneError())
            elif (error := sender.exception()) is not None:
                self._failed(error)
                if not isinstance(error, OSError):
                    raise error
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            await self._close()

    async def _send_all(self, send: Send) -> None:
        await self._send(
            send, {"type": "http.response.start", "status": 200, "headers": self.raw_headers}
        )
        try:
            async for body in self._events:
                await self._send(send, _body(body))
        except OSError:  # of the connection
            raise
        except Exception as error:
            self._failed(error)
            await self._send(send, _body(sse(json.dumps(as_api_error(error).body()))))
        await self._send(send, {"type": "http.response.body", "body": b"", "more_body": False})

    async def _send(self, send: Send, message: Any) -> None:
        self._since, self._sending = time.monotonic(), True
        await send(message)
        self._since, self._sending = time.monotonic(), False

    async def _monitor(self, send: Send) -> None:
        """Send a comment when nothing else is sent; return when the client takes nothing."""
        silent_s, stuck_s = self._settings.keep_alive_s, self._settings.write_timeout_s
        while True:
            await asyncio.sleep(min(silent_s, stuck_s) / 4)
            waited = time.monotonic() - self._since
            if self._sending and waited > stuck_s:
                return
            if not self._sending and waited > silent_s:
                try:
                    await asyncio.wait_for(self._send(send, _body(KEEP_ALIVE)), stuck_s)
                except (TimeoutError, OSError):
                    return


def _body(body: bytes) -> Any:
    return {"type": "http.response.body", "body": body, "more_body": True}
