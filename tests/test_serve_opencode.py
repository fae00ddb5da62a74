"""OpenCode's requests, recorded once from a real run, replayed against the server.

tests/data/opencode.json says how they were recorded. A scripted service makes the call that the
recorded run made; nano answers the same requests with whatever it says.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import httpx

from tests.serve_fakes import FakeService, call, deltas, frames, ids
from tests.serve_live import live
from tests.tree import ROOT

if TYPE_CHECKING:
    from mkref.engine.request import Request

FEW = ("edit", "glob", "todowrite", "webfetch")
CHAT = "/v1/chat/completions"
BLOCK = """[
    {"tool_call_id": "0", "tool_name": "read", "parameters": {"filePath": "/project/note.txt"}}
]"""


def exchange() -> list[dict[str, Any]]:
    """The bodies in their order: a title, the question, the question with a call's result."""
    told = json.loads((ROOT / "tests" / "data" / "opencode.json").read_text(encoding="utf-8"))
    return [
        {**body, "tools": told["tools"]} if has_tools else body
        for body, has_tools in zip(told["requests"], told["with_tools"], strict=True)
    ]


def script(request: Request) -> Iterable[int]:
    """A call to the first request that has tools, words to the others."""
    asked = len(service.requests)
    if asked == 2:
        return ids("start_action", BLOCK, "end_action", "end_turn")
    return ids("start_text", "A note" if asked == 1 else "It says 42.", "end_text", "end_turn")


service = FakeService(script, max_context=65536)


def as_opencode_reads(chunks: list[Any]) -> dict[str, Any]:
    """The assistant's message that OpenCode makes of a stream."""
    calls: dict[int, dict[str, Any]] = {}
    for chunk in chunks:
        for choice in chunk["choices"]:
            for piece in choice["delta"].get("tool_calls") or ():
                made = calls.setdefault(piece["index"], {"type": "function", "function": {}})
                made["id"] = piece.get("id", made.get("id"))
                for name, text in piece["function"].items():
                    made["function"][name] = made["function"].get(name, "") + text
    return {
        "role": "assistant",
        "content": deltas(chunks, "content"),
        "tool_calls": [*calls.values()],
    }


def test_a_whole_run() -> None:
    """Title, call, result, answer: each stream is what the next recorded request was made from."""
    title, question, result = exchange()
    streams = []
    for body in (title, question, result):
        response = call(CHAT, body, service)
        assert 200 == response.status_code, response.text
        streams.append(frames(response))
        assert streams[-1][-1]["usage"]["completion_tokens"] > 0
    assert "A note" == deltas(streams[0], "content")
    made, sent = as_opencode_reads(streams[1]), result["messages"][2]
    (here,), (there,) = made["tool_calls"], sent["tool_calls"]
    assert made["content"] == sent["content"]
    assert here["function"]["name"] == there["function"]["name"]
    arguments = (json.loads(each["function"]["arguments"]) for each in (here, there))
    assert next(arguments) == next(arguments)
    assert here["id"]
    assert "It says 42." == deltas(streams[2], "content")
    ends = [[c["finish_reason"] for f in s for c in f["choices"]][-1] for s in streams]
    assert ["stop", "tool_calls", "stop"] == ends


def test_with_nano() -> None:
    """nano answers every request; with four tools, as its context has no room for ten. A forced
    call is one of them, with arguments by its schema.
    """
    with live(max_context=2048) as server:
        for body in exchange():
            if "tools" in body:
                body["tools"] = [t for t in body["tools"] if t["function"]["name"] in FEW]
            for more in ({}, {"tool_choice": "required", "parallel_tool_calls": False}):
                if more and "tools" not in body:
                    continue
                asked = {**body, **more, "max_tokens": 40, "seed": 1}
                response = httpx.post(f"{server.url}/chat/completions", json=asked, timeout=120)
                assert 200 == response.status_code, response.text
                chunks = frames(response)
                if more:
                    (made,) = as_opencode_reads(chunks)["tool_calls"]
                    assert made["function"]["name"] in FEW
        too_long = httpx.post(f"{server.url}/chat/completions", json=exchange()[1], timeout=60)
        error = too_long.json()["error"]
        assert (400, "context_length_exceeded") == (too_long.status_code, error["code"])
