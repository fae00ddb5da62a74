"""Malformed requests: each is a 4xx in OpenAI's shape that names the field, and nothing runs."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from tests.serve_fakes import FakeService, call, client

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
HI = [{"role": "user", "content": "hi"}]
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
DEEP: Any = {"type": "object"}
for _ in range(100):
    DEEP = {"type": "object", "properties": {"x": DEEP}}


def called(*ids: str) -> dict[str, Any]:
    """An assistant's message with calls."""
    calls = [
        {"id": i, "type": "function", "function": {"name": "f", "arguments": "{}"}} for i in ids
    ]
    return {"role": "assistant", "content": None, "tool_calls": calls}


def parts(*parts: dict[str, Any]) -> dict[str, Any]:
    """A user's message of parts."""
    return {"role": "user", "content": [*parts]}


def with_schema(parameters: Any) -> dict[str, Any]:
    """A tool."""
    return {"type": "function", "function": {"name": "f", "parameters": parameters}}


def answered(call_id: str) -> dict[str, Any]:
    """A tool's message."""
    return {"role": "tool", "tool_call_id": call_id, "content": "1"}


def schema(value: Any, **more: Any) -> dict[str, Any]:
    """A response format with a schema."""
    inner = {"name": "x", "schema": value, **more}
    return {"response_format": {"type": "json_schema", "json_schema": inner}}


# Fields besides a good prompt, and the field that the answer must name. All of them are tried on
# both endpoints.
SHARED: list[tuple[dict[str, Any], str]] = [
    ({"max_tokens": 0}, "max_tokens"),
    ({"max_tokens": -1}, "max_tokens"),
    ({"max_tokens": 1.5}, "max_tokens"),
    ({"max_tokens": "8"}, "max_tokens"),
    ({"max_tokens": True}, "max_tokens"),
    ({"max_tokens": 10**30}, "max_tokens"),
    ({"max_tokens": 10_000}, "max_tokens"),
    ({"temperature": -0.1}, "temperature"),
    ({"temperature": 2.1}, "temperature"),
    ({"temperature": "hot"}, "temperature"),
    ({"temperature": [1]}, "temperature"),
    ({"temperature": 1e-9}, "temperature"),
    ({"temperature": True}, "temperature"),
    ({"top_p": 0}, "top_p"),
    ({"top_p": 1.01}, "top_p"),
    ({"top_p": -1}, "top_p"),
    ({"top_p": 1e-12}, "top_p"),
    ({"top_k": -2}, "top_k"),
    ({"top_k": 1.0}, "top_k"),
    ({"top_k": 2**31}, "top_k"),
    ({"min_p": 1.5}, "min_p"),
    ({"min_p": -0.5}, "min_p"),
    ({"presence_penalty": 2.5}, "presence_penalty"),
    ({"frequency_penalty": -2.5}, "frequency_penalty"),
    ({"repetition_penalty": 0}, "repetition_penalty"),
    ({"repetition_penalty": 1000}, "repetition_penalty"),
    ({"n": 0}, "n"),
    ({"n": 129}, "n"),
    ({"n": "2"}, "n"),
    ({"seed": "x"}, "seed"),
    ({"seed": 2**64}, "seed"),
    ({"seed": 0.5}, "seed"),
    ({"stop": ""}, "stop"),
    ({"stop": 5}, "stop"),
    ({"stop": ["a", ""]}, "stop[1]"),
    ({"stop": ["a", None]}, "stop[1]"),
    ({"stop": ["a"] * 17}, "stop"),
    ({"stop": "a" * 1001}, "stop"),
    ({"stop_token_ids": [-1]}, "stop_token_ids[0]"),
    ({"stop_token_ids": [0, 2048]}, "stop_token_ids[1]"),
    ({"stop_token_ids": 5}, "stop_token_ids"),
    ({"stream": "yes"}, "stream"),
    ({"stream": 1}, "stream"),
    ({"stream_options": {"include_usage": True}}, "stream_options"),
    ({"stream": True, "stream_options": {"x": 1}}, "stream_options.x"),
    ({"stream": True, "stream_options": []}, "stream_options"),
    ({"stream": True, "stream_options": {"include_usage": 1}}, "stream_options.include_usage"),
    ({"logit_bias": []}, "logit_bias"),
    ({"logit_bias": {"a": 1}}, "logit_bias"),
    ({"logit_bias": {"-1": 1}}, "logit_bias"),
    ({"logit_bias": {"5": 101}}, "logit_bias.5"),
    ({"logit_bias": {"5": None}}, "logit_bias.5"),
    ({"logit_bias": {"2048": 1}}, "logit_bias"),
    ({"logit_bias": {str(i): 1 for i in range(301)}}, "logit_bias"),
    ({"min_tokens": -1}, "min_tokens"),
    ({"min_tokens": 9, "max_tokens": 8}, "min_tokens"),
    ({"ignore_eos": "no"}, "ignore_eos"),
    ({"priority": 9}, "priority"),
    ({"return_token_ids": 1}, "return_token_ids"),
    ({"model": 5}, "model"),
    ({"model": "gpt-4"}, "model"),
    ({"unheard_of": 1}, "unheard_of"),
    ({"unheard_of": None}, "unheard_of"),
    ({"": 1}, ""),
]

CHATS: list[tuple[dict[str, Any], str]] = [
    ({"messages": None}, "messages"),
    ({"messages": []}, "messages"),
    ({"messages": "hi"}, "messages"),
    ({"messages": {"role": "user"}}, "messages"),
    ({"messages": ["hi"]}, "messages[0]"),
    ({"messages": [None]}, "messages[0]"),
    ({"messages": [{}]}, "messages[0].role"),
    ({"messages": [{"role": "robot", "content": "x"}]}, "messages[0].role"),
    ({"messages": [{"role": "function", "content": "x"}]}, "messages[0].role"),
    ({"messages": [{"role": ["user"], "content": "x"}]}, "messages[0].role"),
    ({"messages": [{"role": "user"}]}, "messages[0].content"),
    ({"messages": [{"role": "user", "content": None}]}, "messages[0].content"),
    ({"messages": [{"role": "user", "content": 5}]}, "messages[0].content"),
    ({"messages": [{"role": "user", "content": {"text": "x"}}]}, "messages[0].content"),
    ({"messages": [{"role": "user", "content": ["x"]}]}, "messages[0].content[0]"),
    ({"messages": [parts({"type": "text"})]}, "messages[0].content[0].text"),
    ({"messages": [parts({"type": "image_url", "image_url": {}})]}, "messages[0].content[0].type"),
    ({"messages": [*HI, {"role": "user", "content": "x", "y": 1}]}, "messages[1].y"),
    ({"messages": [{"role": "user", "content": "x " * 4000}]}, "messages"),
    ({"messages": [{"role": "user", "content": "x" * 2**20}]}, "messages"),
    ({"messages": [answered("c1")]}, "messages[0].tool_call_id"),
    ({"messages": [called("c1")]}, "messages"),
    ({"messages": [called("c1"), *HI]}, "messages[1].role"),
    ({"messages": [called("c1"), answered("c2")]}, "messages[1].tool_call_id"),
    ({"messages": [called("c1"), answered("c1"), answered("c1")]}, "messages[2].tool_call_id"),
    ({"messages": [called("c1", "c1")]}, "messages[0].tool_calls[1].id"),
    (
        {"messages": [{"role": "assistant", "tool_calls": [{"id": "a"}]}]},
        "messages[0].tool_calls[0].function",
    ),
    ({"messages": [{"role": "assistant", "tool_calls": {}}]}, "messages[0].tool_calls"),
    ({"messages": [{"role": "tool", "content": "x"}]}, "messages[0].tool_call_id"),
    ({"max_completion_tokens": 0}, "max_completion_tokens"),
    ({"max_completion_tokens": 10_000}, "max_completion_tokens"),
    ({"max_completion_tokens": 5, "max_tokens": 6}, "max_tokens"),
    ({"logprobs": 1}, "logprobs"),
    ({"top_logprobs": 2}, "top_logprobs"),
    ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
    ({"logprobs": True, "top_logprobs": -1}, "top_logprobs"),
    ({"tools": {}}, "tools"),
    ({"tools": [5]}, "tools[0]"),
    ({"tools": [{"type": "function"}]}, "tools[0].function"),
    ({"tools": [{"type": "web", "function": {"name": "f"}}]}, "tools[0].type"),
    ({"tools": [{"type": "function", "function": {}}]}, "tools[0].function.name"),
    ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools[0].function.name"),
    ({"tools": [{"type": "function", "function": {"name": ""}}]}, "tools[0].function.name"),
    ({"tools": [TOOL, TOOL]}, "tools[1].function.name"),
    ({"tools": [with_schema([])]}, "tools[0].function.parameters"),
    ({"tools": [with_schema({"type": "array"})]}, "tools[0].function.parameters.type"),
    ({"tools": [TOOL] * 513}, "tools"),
    ({"tool_choice": "auto"}, "tool_choice"),
    ({"tool_choice": "required"}, "tool_choice"),
    ({"tools": [TOOL], "tool_choice": "maybe"}, "tool_choice"),
    ({"tools": [TOOL], "tool_choice": {"type": "function"}}, "tool_choice.function"),
    (
        {"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "g"}}},
        "tool_choice.function.name",
    ),
    ({"tools": [TOOL], "parallel_tool_calls": "no"}, "parallel_tool_calls"),
    (
        {"tools": [TOOL], "tool_choice": "required", "response_format": {"type": "json_object"}},
        "response_format",
    ),
    ({"tools": [TOOL], "tool_choice": "required", "ignore_eos": True}, "ignore_eos"),
    ({"response_format": {"type": "json_object"}, "min_tokens": 4}, "min_tokens"),
    ({"response_format": "json"}, "response_format"),
    ({"response_format": {}}, "response_format.type"),
    ({"response_format": {"type": "xml"}}, "response_format.type"),
    ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
    ({"response_format": {"type": "json_object", "json_schema": {"name": "x", "schema": {}}}},
     "response_format.json_schema"),
    (schema([]), "response_format.json_schema.schema"),
    (schema({"type": "nonsense"}), "response_format"),
    (schema({"type": "string", "minLength": 5, "maxLength": 2}), "response_format"),
    (schema({"enum": []}), "response_format"),
    (schema({"type": "string", "pattern": "("}), "response_format"),
    (schema({"$ref": "https://example.com/s"}), "response_format"),
    (schema({"not": {}}), "response_format"),
    (schema({"type": "integer", "multipleOf": 0}), "response_format"),
    (schema({"const": "x" * 200_000}), "response_format.json_schema.schema"),
    (schema(DEEP), "response_format"),
    (schema({}, name="a b"), "response_format.json_schema.name"),
    ({"reasoning_effort": "very"}, "reasoning_effort"),
    ({"chat_template_kwargs": {"enable_thinking": "yes"}}, "chat_template_kwargs.enable_thinking"),
    ({"chat_template_kwargs": {"x": 1}}, "chat_template_kwargs.x"),
    ({"modalities": ["text", "audio"]}, "modalities[1]"),
    ({"functions": []}, "functions"),
    ({"function_call": "auto"}, "function_call"),
    ({"audio": {"voice": "x"}}, "audio"),
    ({"prediction": {}}, "prediction"),
    ({"web_search_options": {}}, "web_search_options"),
    ({"prompt": "x"}, "prompt"),
]  # fmt: skip

TEXTS: list[tuple[dict[str, Any], str]] = [
    ({"prompt": None}, "prompt"),
    ({"prompt": ""}, "prompt"),
    ({"prompt": []}, "prompt"),
    ({"prompt": [[]]}, "prompt[0]"),
    ({"prompt": [""]}, "prompt[0]"),
    ({"prompt": 5}, "prompt"),
    ({"prompt": {"text": "x"}}, "prompt"),
    ({"prompt": ["a", 1]}, "prompt[1]"),
    ({"prompt": [1, "a"]}, "prompt[1]"),
    ({"prompt": [[1], "a"]}, "prompt[1]"),
    ({"prompt": [1, -1]}, "prompt[1]"),
    ({"prompt": [1, 2048]}, "prompt[1]"),
    ({"prompt": [[1], [5, 2048]]}, "prompt[1][1]"),
    ({"prompt": [1.0]}, "prompt[0]"),
    ({"prompt": [True]}, "prompt[0]"),
    ({"prompt": [1] * 600}, "prompt"),
    ({"prompt": ["a", "b " * 600]}, "prompt[1]"),
    ({"prompt": "x" * 2**20}, "prompt"),
    ({"prompt": ["a"] * 129}, "n"),
    ({"prompt": ["a", "b"], "n": 100}, "n"),
    ({"logprobs": 21}, "logprobs"),
    ({"logprobs": True}, "logprobs"),
    ({"logprobs": 1, "echo": True}, "echo"),
    ({"echo": "yes"}, "echo"),
    ({"best_of": 2}, "best_of"),
    ({"suffix": "x"}, "suffix"),
    ({"messages": HI}, "messages"),
    ({"tools": [TOOL]}, "tools"),
    ({"response_format": {"type": "json_object"}}, "response_format"),
]

RAW: list[tuple[bytes, int, str]] = [
    (b"", 400, "body"),
    (b"{", 400, "body"),
    (b"nonsense", 400, "body"),
    (b"[]", 400, "body"),
    (b"null", 400, "body"),
    (b'"x"', 400, "body"),
    (b"5", 400, "body"),
    (b'{"prompt": "x"} x', 400, "body"),
    (b'{"prompt": "\xff"}', 400, "body"),
    (b'{"prompt": "x", "temperature": NaN}', 400, "NaN"),
    (b'{"prompt": "x", "temperature": -Infinity}', 400, "-Infinity"),
    (b'{"prompt": "x", "temperature": 1e999}', 400, "temperature"),
    (b'{"prompt": "x", "seed": ' + b"9" * 5000 + b"}", 400, "body"),
    (b'{"prompt": "\\ud800"}', 400, "prompt"),
    (b'{"prompt": "x", "user": {"\\udc00": 1}}', 400, "user"),
    (b'{"prompt": ' + b"[" * 200 + b"]" * 200 + b"}", 400, "prompt"),
    (b'{"prompt": ' + b"[" * 100_000 + b"]" * 100_000 + b"}", 400, "body"),
    (b'{"user": ' + b'{"a":' * 100 + b"1" + b"}" * 101, 400, "user"),
    (b'{"prompt": "x", "stop": [' + b'"a",' * 100_001 + b'"a"]}', 400, "stop: more than"),
    (b'{"prompt": "x", "user": {"a": [' + b"[]," * 100_001 + b"[]]}}", 400, "user: more than"),
    (b'{"prompt": "' + b"x" * 70_000 + b'"}', 413, "body"),
]


def cases() -> list[Any]:
    """All of them, as (path, body, field)."""
    good: dict[str, Any] = {CHAT: {"messages": HI}, TEXT: {"prompt": "hi"}}
    rows = [(path, {**good[path], **more}, f) for path in good for more, f in SHARED]
    rows += [(CHAT, {**good[CHAT], **more}, field) for more, field in CHATS]
    rows += [(TEXT, {**good[TEXT], **more}, field) for more, field in TEXTS]
    return [
        pytest.param(*row, id=f"{row[0].split('/')[2]}-{number}-{row[2]}")
        for number, row in enumerate(rows)
    ]


@pytest.mark.parametrize(("path", "body", "field"), cases())
def test_names_the_field(path: str, body: Any, field: str) -> None:
    """A 400 (404 for another model) with one line that begins with the field; nothing ran."""
    service = FakeService()
    response = call(path, body, service)
    error = response.json()["error"]
    assert (404 if body.get("model") == "gpt-4" else 400) == response.status_code
    assert {"message", "type", "param", "code"} == error.keys()
    assert "invalid_request_error" == error["type"]
    assert field == error["param"]
    assert error["message"].startswith(f"{field}: ")
    assert "\n" not in error["message"]
    assert len(error["message"]) < 500
    assert error["code"]
    assert [] == service.requests


@pytest.mark.parametrize(("body", "status", "words"), RAW)
@pytest.mark.parametrize("path", [CHAT, TEXT])
def test_body_that_is_no_request(path: str, body: bytes, status: int, words: str) -> None:
    """What is not a JSON object within the limits is refused before anything looks at a field."""
    if path == CHAT:
        body = body.replace(b'"prompt": "x"', b'"messages": [{"role": "user", "content": "x"}]')
    service = FakeService()
    response = call(path, body, service, max_body_bytes=1 << 19 if status == 400 else 1 << 16)
    error = response.json()["error"]
    assert status == response.status_code
    assert words in error["message"]
    assert "\n" not in error["message"]
    assert [] == service.requests


def test_there_are_enough() -> None:
    """The tables together try more than two hundred requests."""
    assert 200 < len(cases()) + 2 * len(RAW)


def test_good_requests_pass() -> None:
    """The requests that the tables start from are good ones."""
    for path, body in ((CHAT, {"messages": HI}), (TEXT, {"prompt": "hi"})):
        assert 200 == call(path, body).status_code


def test_null_is_absent() -> None:
    """Clients that send every field they know, most of them null, are served."""
    empty = {"temperature": None, "tools": None, "stop": None, "functions": None, "user": None}
    service = FakeService()
    assert 200 == call(CHAT, {"messages": HI, **empty}, service).status_code
    assert 1.0 == service.requests[0].sampling.temperature


@pytest.mark.parametrize(
    "kind", ["text/plain", "multipart/form-data; boundary=x", "application/xml"]
)
def test_other_content_types(kind: str) -> None:
    """A body that says it is something else is a 415."""

    async def run() -> tuple[int, str]:
        async with client() as made:
            response = await made.post(TEXT, content=b"{}", headers={"content-type": kind})
            return response.status_code, response.json()["error"]["code"]

    assert (415, "invalid_content_type") == asyncio.run(run())


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [("GET", CHAT, 405), ("DELETE", "/v1/models", 405), ("GET", "/v1/nothing", 404),
     ("GET", "/", 404), ("POST", "/v1/embeddings", 404), ("GET", "/v1/models/gpt-4", 404)],
)  # fmt: skip
def test_other_paths_and_methods(method: str, path: str, status: int) -> None:
    """They are told so in the same shape."""

    async def run() -> tuple[int, Any]:
        async with client() as made:
            response = await made.request(method, path)
            return response.status_code, response.json()["error"]

    got, error = asyncio.run(run())
    assert status == got
    assert {"message", "type", "param", "code"} == error.keys()
