"""Errors as OpenAI's clients read them: a status, and one object that says what was wrong where.

    {"error": {"message": "...", "type": "invalid_request_error", "param": "top_p", "code": "..."}}

Every error that leaves the server has this shape, also one that FastAPI or a bug raised.

What it does not do: find mistakes (`mkref.serve.validate`), or write a log.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

from mkref.errors import MkrefError, QueueFullError, RequestError, UnavailableError

if TYPE_CHECKING:
    from starlette.requests import Request
    from starlette.responses import Response

__all__ = ["CLIENT_GONE", "ApiError", "as_api_error", "error_response", "install_handlers"]

KINDS = {
    400: "invalid_request_error",
    401: "authentication_error",
    404: "invalid_request_error",
    405: "invalid_request_error",
    408: "timeout_error",
    413: "invalid_request_error",
    415: "invalid_request_error",
    429: "rate_limit_error",
    503: "service_unavailable_error",
}
CLIENT_GONE = 499
"""The status in the log of a client that left, after nginx; nobody is there to read it."""
FIELD = re.compile(r"[a-z_]+(\[\d+\])*(\.[a-z_]+(\[\d+\])*)*")


class ApiError(MkrefError):
    """What a client is told.

    Args:
        message: one line.
        param: the field of the request, as a path such as `messages[0].content`.
        code: a word for programs.
        status: of the HTTP response.
        headers: of the response.
    """

    def __init__(
        self,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        status: int = 400,
        headers: dict[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.param = param
        self.code = code
        self.status = status
        self.headers = headers or {}

    def body(self) -> dict[str, Any]:
        """The JSON object."""
        kind = KINDS.get(self.status, "server_error" if self.status >= 500 else KINDS[400])
        return {
            "error": {
                "message": self.message,
                "type": kind,
                "param": self.param,
                "code": self.code,
            }
        }


def as_api_error(error: BaseException) -> ApiError:
    """What a client is told about any error; of a bug it learns nothing but that it is one."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, QueueFullError):
        headers = {"Retry-After": "1"}
        return ApiError(str(error), code="queue_full", status=429, headers=headers)
    if isinstance(error, UnavailableError):
        headers = {"Retry-After": "5"}
        return ApiError(str(error), code="unavailable", status=503, headers=headers)
    if isinstance(error, RequestError):
        message = str(error)
        if message.startswith("constraint: ") and isinstance(error.__cause__, RequestError):
            # What the engine calls a constraint is a field with a schema, which the cause names.
            message = str(error.__cause__)
            field = message.partition(":")[0]
            return ApiError(message, param=field, code="invalid_schema")
        field, found, _ = message.partition(":")
        is_field = found and FIELD.fullmatch(field)
        too_long = field == "prompt" and "context" in message
        code = "context_length_exceeded" if too_long else "invalid_value"
        return ApiError(message, param=field if is_field else None, code=code)
    if isinstance(error, MkrefError):
        return ApiError(str(error), code="machine_error", status=500)
    return ApiError("an error of the server; its log has the details", code="internal", status=500)


def error_response(error: ApiError) -> Response:
    """The response for an error."""
    from starlette.responses import JSONResponse

    return JSONResponse(error.body(), error.status, headers=error.headers)


def install_handlers(app: Any) -> None:
    """Have the app answer each error in this shape, its own 404 and 405 too."""
    from starlette.exceptions import HTTPException
    from starlette.requests import ClientDisconnect
    from starlette.responses import Response

    from mkref.serve.report import report_of

    async def on_known(_: Request, error: Exception) -> Response:
        return error_response(as_api_error(error))

    async def on_gone(request: Request, _: Exception) -> Response:
        report = report_of(request)
        report.error, report.error_code = "the client left", "client_gone"
        return Response(status_code=CLIENT_GONE)

    async def on_http(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        path, method = request.url.path, request.method
        if error.status_code == 405:
            message = f"method: {method} is not for {path}"
            code = "method_not_allowed"
        else:
            message, code = f"path: nothing is at {method} {path}", "not_found"
        headers = dict(error.headers or {})
        return error_response(
            ApiError(message, code=code, status=error.status_code, headers=headers)
        )

    app.add_exception_handler(MkrefError, on_known)
    app.add_exception_handler(ClientDisconnect, on_gone)
    app.add_exception_handler(HTTPException, on_http)
