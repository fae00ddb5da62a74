"""The outermost layer of the app: request ids, the key, metrics, one log line a request.

It is plain ASGI, so that it neither buffers streams nor hides their end. An error that nobody
expected is logged with its traceback and becomes a 500 in the usual shape.

What it does not do: read bodies.
"""

from __future__ import annotations

import hmac
import logging
import time
from typing import TYPE_CHECKING, Any

from mkref.serve.errors import ApiError, as_api_error, error_response
from mkref.serve.logs import log_event
from mkref.serve.report import Report, request_id

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Receive, Scope, Send

    from mkref.serve.metrics import HttpMetrics
    from mkref.serve.settings import Settings

__all__ = ["Observer"]


class Observer:
    """Wraps an app.

    Args:
        app: what answers.
        settings: of the endpoint; for the key.
        metrics: that count.
        paths: of the app; others are counted as one.
    """

    def __init__(
        self, app: ASGIApp, settings: Settings, metrics: HttpMetrics, paths: frozenset[str]
    ) -> None:
        self._app = app
        self._metrics = metrics
        self._paths = paths
        key = settings.api_key
        self._key = None if key is None else key.encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = dict(scope["headers"])
        report = Report(request_id(headers.get(b"x-request-id")))
        scope["mkref.report"] = report
        watched = _Watched(send, report.request_id)
        begin = time.monotonic()
        self._metrics.in_flight += 1
        try:
            if self._refused(scope, headers):
                await error_response(_wrong_key())(scope, receive, watched)
            else:
                await self._app(scope, receive, watched)
        except Exception as error:
            await self._unexpected(error, report, watched, scope, receive)
        finally:
            self._metrics.in_flight -= 1
            seconds = time.monotonic() - begin
            path = scope["path"] if scope["path"] in self._paths else "other"
            self._metrics.note(path, scope["method"], watched.status, seconds)
            self._log(scope, report, watched.status, seconds)

    def _refused(self, scope: Scope, headers: dict[bytes, bytes]) -> bool:
        if self._key is None or not scope["path"].startswith("/v1") or scope["method"] == "OPTIONS":
            return False
        scheme, _, key = headers.get(b"authorization", b"").partition(b" ")
        return scheme.lower() != b"bearer" or not hmac.compare_digest(key, self._key)

    async def _unexpected(
        self, error: Exception, report: Report, watched: _Watched, scope: Scope, receive: Receive
    ) -> None:
        report.error, report.error_code = f"{type(error).__name__}: {error}", "internal"
        log_event(logging.ERROR, "unexpected", error, request_id=report.request_id)
        if watched.status == 0:  # nothing was sent yet
            await error_response(as_api_error(error))(scope, receive, watched)

    def _log(self, scope: Scope, report: Report, status: int, seconds: float) -> None:
        quiet = scope["path"] in ("/health", "/metrics") and status == 200
        level = logging.DEBUG if quiet else logging.INFO
        log_event(
            level,
            "request",
            method=scope["method"],
            path=scope["path"][:200],
            status=status,
            ms=round(1e3 * seconds, 2),
            client=(scope.get("client") or ("",))[0],
            **report.fields(),
        )


class _Watched:
    """Passes messages on, adds the request's id, and remembers the status."""

    def __init__(self, send: Send, identity: str) -> None:
        self._send = send
        self._identity = identity.encode("latin-1")
        self.status = 0

    async def __call__(self, message: Any) -> None:
        if message["type"] == "http.response.start":
            self.status = message["status"]
            headers = [*message.get("headers", ()), (b"x-request-id", self._identity)]
            message = {**message, "headers": headers}
        await self._send(message)


def _wrong_key() -> ApiError:
    return ApiError(
        "authorization: missing or wrong; send 'Authorization: Bearer KEY'",
        code="invalid_api_key",
        status=401,
        headers={"WWW-Authenticate": "Bearer"},
    )
