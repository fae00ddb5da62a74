"""What /openapi.json says about bodies and errors.

The endpoints read their bodies themselves, within limits that FastAPI's own reading does not have;
so the schemas are put beside the routes here.

What it does not do: check anything.
"""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, Any

from mkref.serve.schema import CompletionRequest
from mkref.serve.schema_chat import ChatRequest

if TYPE_CHECKING:
    from pydantic import BaseModel

__all__ = ["describe"]

FORMS: dict[str, type[BaseModel]] = {
    "/v1/chat/completions": ChatRequest,
    "/v1/completions": CompletionRequest,
}
ERROR = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["message", "type", "param", "code"],
            "properties": {
                "message": {"type": "string"},
                "type": {"type": "string"},
                "param": {"type": ["string", "null"]},
                "code": {"type": ["string", "null"]},
            },
        }
    },
}


@cache
def describe(path: str) -> dict[str, Any]:
    """The part of an operation that FastAPI cannot know."""
    content = {"application/json": {"schema": ERROR}}
    if path not in FORMS:
        return {}
    errors = {
        str(status): {"description": "see `error.message`", "content": content}
        for status in (400, 401, 404, 408, 413, 415, 429, 500, 503)
    }
    schema = _inlined(FORMS[path].model_json_schema())
    return {
        "requestBody": {"required": True, "content": {"application/json": {"schema": schema}}},
        "responses": errors,
    }


def _is_only_for_messages(value: Any) -> bool:
    """Is it the alternative that says which roles there are, and which nothing may follow?"""
    return isinstance(value, dict) and str(value.get("$ref", "")).endswith("/UnknownMessage")


def _inlined(schema: dict[str, Any]) -> dict[str, Any]:
    """A schema without `$defs`: within an operation a reference to them would lead nowhere."""
    defined = schema.pop("$defs", {})

    def resolve(value: Any) -> Any:
        if isinstance(value, dict):
            if "$ref" in value:
                rest = {name: inner for name, inner in value.items() if name != "$ref"}
                return {**resolve(defined[value["$ref"].rpartition("/")[2]]), **rest}
            return {name: resolve(inner) for name, inner in value.items()}
        if isinstance(value, list):
            return [resolve(inner) for inner in value if not _is_only_for_messages(inner)]
        return value

    inlined: dict[str, Any] = resolve(schema)
    return inlined
