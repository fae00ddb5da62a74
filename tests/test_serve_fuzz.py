"""Hostile requests, drawn at random from what the fields are: never a 5xx, never a hang."""

from __future__ import annotations

import asyncio
import json
import random
from typing import Any

from tests.serve_fakes import FakeService, client

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
N = 400
GOOD: dict[str, dict[str, Any]] = {
    CHAT: {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 2},
    TEXT: {"prompt": "hi", "max_tokens": 2},
}
VALUES: tuple[Any, ...] = (
    -1, -(2**70), 2**70, 1e308, -0.5, "", "x" * 9000, "\ud800", [], [[]], [None], [-1], {},
    {"": {}},
    {"type": "x"}, [{"type": "function"}], [{"role": "user"}], float("nan"), float("inf"),
)  # fmt: skip
FIELDS = (
    "model", "max_tokens", "temperature", "top_p", "n", "seed", "stop", "stream", "logit_bias",
    "top_k", "min_p", "min_tokens", "stop_token_ids", "messages", "prompt", "tools", "tool_choice",
    "response_format", "logprobs", "top_logprobs", "echo", "suffix", "stream_options", "no_such",
)  # fmt: skip


def hostile(rng: random.Random) -> tuple[str, dict[str, Any]]:
    """A good request with one to three fields that are not."""
    path = rng.choice([CHAT, TEXT])
    fields = rng.sample(FIELDS, rng.randint(1, 3))
    return path, {**GOOD[path], **{name: rng.choice(VALUES) for name in fields}}


def test_never_the_servers_fault() -> None:
    """At least 300 of them are refused, each with OpenAI's object; the few that happen to be right
    (an empty list of tools) are answered; afterwards the server answers as before.
    """
    rng = random.Random(4)
    refused = 0

    async def run() -> None:
        nonlocal refused
        async with client(FakeService()) as made:
            headers = {"content-type": "application/json"}
            for _ in range(N):
                path, body = hostile(rng)
                sent = json.dumps(body).encode()  # NaN and Infinity go out as Python spells them
                answer = await asyncio.wait_for(made.post(path, content=sent, headers=headers), 10)
                assert answer.status_code == 200 or 400 <= answer.status_code < 500, body
                if answer.status_code != 200:
                    refused += 1
                    error = answer.json()["error"]
                    assert {"message", "type", "param", "code"} == error.keys()
                    assert error["message"]
            for path, body in GOOD.items():
                assert 200 == (await made.post(path, json=body)).status_code

    asyncio.run(run())
    assert refused >= 300
