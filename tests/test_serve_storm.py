"""Hundreds of hostile requests to a real server in a process of its own, with nano behind it.

Each is a 4xx in OpenAI's shape whose message names the field, never a 5xx, and soon; after each
kind of them the server answers as before, and no page of its cache is lost. What must be said about
each field is tested in test_serve_malformed.py; the same requests are sent here, too.
"""

from __future__ import annotations

import re
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import schemathesis
from hypothesis import HealthCheck, given, settings
from schemathesis import Case, GenerationMode

from tests.serve_process import Server, serving
from tests.test_serve_malformed import CHAT, HI, RAW, TEXT, cases, schema

SOON_S = 15.0
"""An honest limit for a test computer that has other things to do; alone, all take 2 s or less."""
DRAWN = {GenerationMode.NEGATIVE: 40, GenerationMode.POSITIVE: 20}
"""Of each endpoint."""


@pytest.fixture(name="one", scope="module")
def one_fixture(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Server, Any]]:
    """The server, and what it answered first."""
    with serving(tmp_path_factory.mktemp("storm") / "log") as server:
        yield server, server.tokens()


@pytest.fixture(name="server")
def server_fixture(one: tuple[Server, Any]) -> Iterator[Server]:
    """The server; after the test it is looked at."""
    yield one[0]
    one[0].check_unharmed(one[1])


def check_refused(response: httpx.Response, statuses: range = range(400, 500)) -> dict[str, Any]:
    """The error: OpenAI's object, one line, and the field in front."""
    assert response.status_code in statuses, response.text[:300]
    error: dict[str, Any] = response.json()["error"]
    assert {"message", "type", "param", "code"} == error.keys()
    field, colon, words = error["message"].partition(": ")
    assert colon and words and error["code"]  # noqa: PT018
    assert error["param"] is None or error["message"].startswith(f"{error['param']}: ")
    assert error["param"] is not None or re.fullmatch("body|path|method|head|content-.*", field)
    assert "\n" not in error["message"]
    return error


def test_table(server: Server) -> None:
    """All requests of the other file, in one connection, so that none may spoil the next one."""
    n = 0
    with httpx.Client(base_url=server.url, timeout=30) as client:
        for case in cases():
            path, body, field = case.values
            assert field == check_refused(client.post(path, json=body))["param"], body
            n += 1
        for body, status, _ in RAW:
            if status == 400:
                headers = {"content-type": "application/json"}
                check_refused(client.post(TEXT, content=body, headers=headers))
                n += 1
    assert n > 250


@pytest.mark.parametrize("mode", [GenerationMode.NEGATIVE, GenerationMode.POSITIVE])
@pytest.mark.parametrize("path", [CHAT, TEXT])
def test_drawn_from_the_schema(server: Server, path: str, mode: GenerationMode) -> None:
    """Requests that break the API's own schema are all refused; those that follow it may still be
    wrong in what a schema cannot say, but are never the server's fault.
    """
    api = schemathesis.openapi.from_url(f"{server.url}/openapi.json")
    statuses: Counter[int] = Counter()

    @settings(
        max_examples=DRAWN[mode], derandomize=True, database=None, deadline=None,
        suppress_health_check=list(HealthCheck),
    )  # fmt: skip
    @given(case=api[path]["POST"].as_strategy(generation_mode=mode))
    def attack(case: Case[Any]) -> None:
        if mode is GenerationMode.POSITIVE and isinstance(case.body, dict):
            case.body["max_tokens"] = 1
        response = case.call()
        statuses[response.status_code] += 1
        if mode is GenerationMode.NEGATIVE or response.status_code != 200:
            check_refused(httpx.Response(response.status_code, content=response.content))

    attack()
    assert statuses.total() >= DRAWN[mode]


def test_schema_says_what_messages_need(server: Server) -> None:
    """Each kind of message in the API's schema has its own fields; none needs a role alone but the
    assistant's.
    """
    api = httpx.get(f"{server.url}/openapi.json").json()
    body = api["paths"][CHAT]["post"]["requestBody"]["content"]["application/json"]["schema"]
    kinds = body["properties"]["messages"]["items"]
    (kinds,) = [kinds[name] for name in ("anyOf", "oneOf") if name in kinds]
    needed = {kind["title"]: kind["required"] for kind in kinds}
    assert ["role"] == needed.pop("AssistantMessage")
    assert {"SystemMessage", "UserMessage", "ToolMessage"} == needed.keys()
    assert all("content" in names for names in needed.values())


MEGABYTES: dict[str, tuple[str, bytes]] = {
    "a text": (TEXT, b'{"prompt": "%s"}' % (b"x" * 15_000_000)),
    "token ids": (TEXT, b'{"prompt": [%s5]}' % (b"5," * 5_000_000)),
    "prompts": (TEXT, b'{"prompt": [%s"a"]}' % (b'"a",' * 3_000_000)),
    "nulls": (TEXT, b'{"prompt": [%snull]}' % (b"null," * 3_000_000)),
    "members": (TEXT, b"{%s}" % b",".join(b'"k%d":1' % i for i in range(1_000_000))),
    "a message": (CHAT, b'{"messages": [{"role": "user", "content": "%s"}]}' % (b"x" * 15_000_000)),
    "messages": (CHAT, b'{"messages": [%s{}]}' % (b'{"role":"user","content":""},' * 500_000)),
    "no messages": (CHAT, b'{"messages": [%s0]}' % (b"0," * 7_000_000)),
    "parts": (CHAT, b'{"messages": [{"role":"user","content":[%s{}]}]}' % (b"{}," * 5_000_000)),
    "a tool": (
        CHAT,
        b'{"messages": [{"role": "user", "content": "x"}], "tools": [{"type": "function", '
        b'"function": {"name": "f", "description": "%s"}}]}' % (b"x" * 15_000_000),
    ),
    "arguments": (
        CHAT,
        b'{"messages": [{"role": "assistant", "tool_calls": [{"id": "c", "function": {"name": "f",'
        b' "arguments": "{\\"x\\": \\"%s\\"}"}}]}, {"role": "tool", "tool_call_id": "c", '
        b'"content": "x"}]}' % (b"x" * 15_000_000),
    ),
    "too many": (TEXT, b'{"prompt": "%s"}' % (b"x" * 17_000_000)),
}  # fmt: skip


def test_megabytes(server: Server) -> None:
    """However a body is filled, it is refused soon, and the process does not grow by gigabytes."""
    for name, (path, body) in MEGABYTES.items():
        begin = time.monotonic()
        error = check_refused(server.post(path, body))
        assert time.monotonic() - begin < SOON_S, name
        assert len(error["message"]) < 500, name
    status = Path(f"/proc/{server.process.pid}/status")
    if status.exists():  # Linux
        found = re.search(r"VmHWM:\s+(\d+) kB", status.read_text())
        assert found is not None
        assert int(found[1]) < 3_000_000


ENDLESS: dict[str, Any] = {
    "itself": {"$ref": "#"},
    "in a circle": {"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/a"}}},
    "needs itself": {"type": "object", "properties": {"a": {"$ref": "#"}}, "required": ["a"]},
    "ten million": {"type": "array", "minItems": 10**7, "items": {"type": "null"}},
    "2000 members": {"type": "object", "properties": {f"p{i}": {} for i in range(2000)}},
    "more than most": {"type": "array", "minItems": 5, "maxItems": 2},
    "beyond a range": {"type": "integer", "minimum": 1e308},
    "tiny": {"type": "number", "multipleOf": 1e-300},
    "two types": {"allOf": [{"type": "string"}, {"type": "integer"}]},
    "missing": {"type": "object", "additionalProperties": False, "required": ["x"]},
    "false": {"type": "object", "properties": {"x": False}, "required": ["x"]},
}


def test_schema_that_cannot_be_met(server: Server) -> None:
    """Found before the answer or on the way: the error names the field that has the schema."""
    for name, endless in ENDLESS.items():
        body = {"messages": HI, "max_tokens": 8, **schema(endless)}
        error = check_refused(server.post(CHAT, body))
        assert ("response_format", "invalid_schema") == (error["param"], error["code"]), name


HUGE = b"9" * 4000


NUMBERS = (
    ("temperature", HUGE), ("max_tokens", b"-" + HUGE), ("seed", HUGE), ("n", HUGE),
    ("logit_bias", b'{"5": %s}' % HUGE), ("stop_token_ids", b"[%s]" % HUGE), ("top_k", HUGE),
    ("temperature", b"1e-40"), ("min_p", b"-1e400"), ("presence_penalty", b"-0.0001e9999"),
)  # fmt: skip
HEADERS = (
    ("content-encoding", b"gzip"), ("content-type", b"text/plain"), ("content-type", b"\x80"),
)  # fmt: skip


def test_numbers_and_headers(server: Server) -> None:
    """Numbers of thousands of digits, those that are infinite once they are read, and a body that
    says it is something else.
    """
    for field, value in NUMBERS:
        body = b'{"prompt": "a", "%s": %s}' % (field.encode(), value)
        assert check_refused(server.post(TEXT, body))["message"].startswith(field)
    for name, said in HEADERS:
        response = httpx.post(
            server.url + TEXT,
            content=b"{}",
            headers={b"content-type": b"application/json", name.encode(): said},
        )
        assert 415 == response.status_code
        assert check_refused(response)["message"].startswith(name)
