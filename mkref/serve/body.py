"""The body of a request: bytes within a limit and in time, then JSON that is safe to walk through.

Refused before anything looks at a field: too many bytes, a client that is too slow, bytes that are
not UTF-8, what is not JSON (NaN and Infinity are not), nesting that would exhaust a recursion, half
a surrogate pair (no encoder would take it), numbers of thousands of digits, more parts than any
honest request has.

What it does not do: know any field (`mkref.serve.schema`).
"""

from __future__ import annotations

import asyncio
import json
from typing import TYPE_CHECKING, Any

from mkref.serve.errors import ApiError

if TYPE_CHECKING:
    from starlette.requests import Request

    from mkref.serve.settings import Settings

__all__ = ["parse_json", "read_body", "read_json"]


MAX_PARTS = 100_000
"""Most members of objects and elements of arrays in a body, numbers in arrays not counted: each one
costs a microsecond or ten to check, and a few megabytes have room for a million.
"""
LARGE = 1 << 16
"""Bytes of a body from which reading it is no work for the event loop."""
NUMBERS = frozenset((int, float))
DISCARDED = 64 << 20
"""Bytes beyond the limit that are read and dropped: most clients read no answer while they send."""


async def read_json(request: Request, settings: Settings) -> dict[str, Any]:
    """The JSON object that a client sent.

    Raises:
        ApiError: it sent something else; 400, 408, 413 or 415.
    """
    kind = request.headers.get("content-type", "application/json").partition(";")[0].strip().lower()
    if kind != "application/json" and not kind.endswith("+json"):
        raise ApiError(
            f"content-type: {kind[:60]!r}; must be application/json",
            code="invalid_content_type",
            status=415,
        )
    coding = request.headers.get("content-encoding", "identity").strip().lower()
    if coding != "identity":
        raise ApiError(
            f"content-encoding: {coding[:60]!r}; must be absent, as bodies are read as they are",
            code="invalid_content_encoding",
            status=415,
        )
    body = await read_body(request, settings.max_body_bytes, settings.body_timeout_s)
    if len(body) < LARGE:
        return parse_json(body, settings.max_depth)
    return await asyncio.to_thread(parse_json, body, settings.max_depth)


async def read_body(request: Request, max_bytes: int, timeout_s: float) -> bytes:
    """All bytes, or a 413, or a 408."""
    declared = request.headers.get("content-length", "")
    if declared.isdecimal() and int(declared[:20]) > max_bytes and "expect" in request.headers:
        raise _too_large(max_bytes)  # it asked first and has sent nothing yet
    parts, size = [], 0
    try:
        async with asyncio.timeout(timeout_s):
            async for part in request.stream():
                size += len(part)
                if size <= max_bytes:
                    parts.append(part)
                elif size > max_bytes + DISCARDED:
                    break
    except TimeoutError as error:
        raise ApiError(
            f"body: not complete after {timeout_s:g} seconds",
            code="body_timeout",
            status=408,
            headers={"Connection": "close", "x-should-retry": "false"},
        ) from error
    if size > max_bytes:
        raise _too_large(max_bytes)
    return b"".join(parts)


def _too_large(max_bytes: int) -> ApiError:
    # Not all of it may have been read: the connection is of no use any more.
    return ApiError(
        f"body: more than the {max_bytes} bytes that this server takes",
        code="body_too_large",
        status=413,
        headers={"Connection": "close"},
    )


def parse_json(body: bytes, max_depth: int) -> dict[str, Any]:
    """The object that the bytes spell.

    Raises:
        ApiError: 400; says where it goes wrong.
    """
    try:
        data = json.loads(body.decode("utf-8"), parse_constant=_no_constant)
    except UnicodeDecodeError as error:
        raise _bad(f"body: byte {error.start} is not UTF-8") from error
    except json.JSONDecodeError as error:
        where = f"line {error.lineno} column {error.colno}"
        raise _bad(f"body: not JSON: {error.msg} at {where}") from error
    except RecursionError as error:
        raise _too_deep("body", max_depth) from error
    except ValueError as error:  # NaN, or a number of more digits than Python reads
        raise _bad(f"body: not JSON that this server reads: {str(error)[:100]}") from error
    if not isinstance(data, dict):
        raise _bad(f"body: must be a JSON object, not {_kind(data)}")
    _walk(data, max_depth, look_at_texts=b"\\u" in body)
    return data


def _walk(data: dict[str, Any], max_depth: int, *, look_at_texts: bool) -> None:
    """Refuse what is too deep or has too many parts, and texts that are no Unicode; all name their
    place.
    """
    n_parts = 0
    stack: list[tuple[str, int, Any]] = [("", 1, data)]
    while stack:
        path, depth, value = stack.pop()
        if isinstance(value, str):
            if look_at_texts:
                _check_text(path, value)
            continue
        if depth > max_depth:
            raise _too_deep(path, max_depth)
        if isinstance(value, list) and NUMBERS.issuperset(map(type, value)):
            continue
        n_parts += len(value)
        if n_parts > MAX_PARTS:
            place = _first_step(path) or "body"
            raise ApiError(
                f"{place}: more than {MAX_PARTS} elements and members up to here",
                param=place,
                code="invalid_value",
            )
        children = value.items() if isinstance(value, dict) else enumerate(value)
        for key, child in children:
            if isinstance(key, str) and look_at_texts:
                _check_text(path or "body", key)
            if isinstance(child, str | dict | list):
                inner = f"{path}.{key}" if isinstance(key, str) else f"{path}[{key}]"
                stack.append((inner.removeprefix("."), depth + 1, child))


def _check_text(path: str, text: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        place = path[:200]
        raise ApiError(
            f"{place}: character {error.start} is half a surrogate pair, which is no Unicode text",
            param=place,
            code="invalid_value",
        ) from error


def _too_deep(path: str, max_depth: int) -> ApiError:
    place = _first_step(path)
    return ApiError(
        f"{place}: nested deeper than {max_depth} levels", param=place, code="invalid_value"
    )


def _first_step(path: str) -> str:
    return path.split(".")[0].split("[")[0][:200]


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} is not a JSON number")


def _bad(message: str) -> ApiError:
    return ApiError(message, code="invalid_json")


def _kind(value: Any) -> str:
    names = {list: "an array", str: "a string", type(None): "null", bool: "a boolean"}
    return names.get(type(value), "a number")
