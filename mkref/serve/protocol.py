"""HTTP/1.1 as uvicorn reads it with h11, with what it leaves to a proxy in front.

Three things that a hostile or broken client can do to a connection, and their end:

    it sends the head of a request byte by byte, or drips on where nobody reads   a 408, then closed
    it sends what is no HTTP                                       a 400 in the shape of all errors
    it never takes the end of its answer                           dropped after `write_timeout_s`

What it does not do: bodies (`mkref.serve.body`), or streams under way (`mkref.serve.sse`).
"""

from __future__ import annotations

import asyncio
import json
import sys
from typing import TYPE_CHECKING, Any

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

from mkref.serve.errors import ApiError

if TYPE_CHECKING:
    from mkref.serve.settings import Settings

__all__ = ["protocol_for"]

REASONS = {400: b"Bad Request", 408: b"Request Timeout", 431: b"Request Header Fields Too Large"}


def protocol_for(settings: Settings) -> type[H11Protocol]:
    """The class of connections, for uvicorn's setting `http`."""

    class Protocol(_Protocol):
        head_timeout_s = settings.head_timeout_s
        write_timeout_s = settings.write_timeout_s

    return Protocol


class _Protocol(H11Protocol):
    """One connection.

    Attributes:
        head_timeout_s: between two answers, bytes must become a request within so long.
        write_timeout_s: a connection that is to be closed has so long to take what is left.
    """

    head_timeout_s: float
    write_timeout_s: float

    def __init__(self, *args: Any, **settings: Any) -> None:
        super().__init__(*args, **settings)
        self._head_timer: asyncio.TimerHandle | None = None
        self._close_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Somebody connects."""
        super().connection_made(_Closing(transport, self))  # type: ignore[arg-type]
        self._await_head()

    def connection_lost(self, exc: Exception | None) -> None:
        """It is over."""
        super().connection_lost(exc)  # asks the transport to close once more
        for timer in (self._head_timer, self._close_timer):
            if timer is not None:
                timer.cancel()

    def data_received(self, data: bytes) -> None:
        """Bytes came; uvicorn forgets its own time-out with the first of them."""
        self._await_head()
        super().data_received(data)
        if self._is_answering and self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    @property
    def _is_answering(self) -> bool:
        return self.cycle is not None and not self.cycle.response_complete

    def _await_head(self) -> None:
        if self._head_timer is None and not self._is_answering:
            self._head_timer = self.loop.call_later(self.head_timeout_s, self._too_slow)

    def _too_slow(self) -> None:
        self._head_timer = None
        if self._is_answering or self.transport.is_closing():
            return
        if self.conn.their_state is h11.IDLE and self.conn.trailing_data[0]:
            self._refuse(
                ApiError(
                    f"head: not complete after {self.head_timeout_s:g} seconds",
                    code="head_timeout",
                    status=408,
                )
            )
        else:
            self.transport.close()

    def send_400_response(self, msg: str) -> None:
        """What is no HTTP; `handle_events` calls it where it caught h11's error."""
        error = sys.exception()
        hint = getattr(error, "error_status_hint", 400)
        self._refuse(
            ApiError(
                f"head: not HTTP that this server reads: {error or msg}",
                code="invalid_http",
                status=hint if hint in REASONS else 400,
            )
        )

    def _refuse(self, error: ApiError) -> None:
        """Say so, unless an answer has begun, and close."""
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            body = json.dumps(error.body()).encode()
            headers = [
                (b"content-type", b"application/json"),
                (b"content-length", str(len(body)).encode()),
                (b"connection", b"close"),
            ]
            head = h11.Response(
                status_code=error.status, headers=headers, reason=REASONS[error.status]
            )
            for event in (head, h11.Data(data=body), h11.EndOfMessage()):
                self.transport.write(self.conn.send(event) or b"")
        self.transport.close()

    def closing(self) -> None:
        """The connection is to be closed: its client has a while to take what is left."""
        if self._close_timer is None:
            self._close_timer = self.loop.call_later(self.write_timeout_s, self.transport.abort)


class _Closing:
    """A transport that tells its protocol when it is asked to close.

    asyncio's `close` waits until the client has taken every byte, for ever if need be.
    """

    def __init__(self, transport: asyncio.Transport, protocol: _Protocol) -> None:
        self._transport = transport
        self._protocol = protocol

    def close(self) -> None:
        """Close when everything is sent, or after a while."""
        self._transport.close()
        self._protocol.closing()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)
