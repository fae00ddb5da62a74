"""The official `openai` client against a real server with nano: sync, async, streams, tools, JSON.

nano was never trained on chats, so what it says freely is nonsense; what is constrained is valid.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Iterator
from typing import Any, Literal

import httpx
import openai
import pytest
from openai import AsyncOpenAI, OpenAI
from pydantic import BaseModel

from tests.serve_fakes import tokens_of
from tests.serve_live import Live, live

KEY = "a-key"
HI: list[Any] = [{"role": "user", "content": "Write a function."}]
CITY = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "enum": ["Oslo", "Rome"]},
        "metric": {"type": "boolean"},
    },
    "required": ["city", "metric"],
    "additionalProperties": False,
}
TOOLS: list[Any] = [
    {"type": "function", "function": {"name": "weather", "parameters": CITY}},
    {"type": "function", "function": {"name": "now", "description": "The time."}},
]


class Verdict(BaseModel):
    """A structured answer."""

    language: Literal["python", "rust"]
    good: bool


@pytest.fixture(name="server", scope="module")
def server_fixture() -> Iterator[Live]:
    """One server for all tests of this module."""
    with live(api_key=KEY) as server:
        yield server


@pytest.fixture(name="client")
def client_fixture(server: Live) -> Iterator[OpenAI]:
    """A client of it."""
    with OpenAI(base_url=server.url, api_key=KEY, max_retries=0) as client:
        yield client


def idle(server: Live) -> None:
    """Wait until nothing runs; everything that was begun must end."""
    for _ in range(500):
        stats = server.service.stats()
        if stats.running == stats.waiting == 0:
            return
        time.sleep(0.02)
    pytest.fail(f"still running: {server.service.stats()}")


def test_models(client: OpenAI) -> None:
    """The list, and the model by its name."""
    (model,) = client.models.list().data
    assert ("nano", "model") == (model.id, model.object)
    assert model == client.models.retrieve("nano")


def test_completion(client: OpenAI) -> None:
    """Greedy text, the same from a text and from its token ids, whole and streamed."""
    settings: Any = {"model": "nano", "max_tokens": 8, "temperature": 0}
    whole = client.completions.create(prompt="def add(a, b):", **settings)
    ids = [1, *tokens_of("def add(a, b):")]
    assert (
        whole.choices[0].text == client.completions.create(prompt=ids, **settings).choices[0].text
    )
    chunks = list(
        client.completions.create(
            prompt=ids, stream=True, stream_options={"include_usage": True}, **settings
        )
    )
    assert whole.choices[0].text == "".join(c.text for chunk in chunks for c in chunk.choices)
    assert whole.usage is not None
    last = chunks[-1].usage
    assert last is not None
    assert (whole.usage.prompt_tokens, whole.usage.completion_tokens) == (
        last.prompt_tokens, last.completion_tokens
    )  # fmt: skip


def test_completion_logprobs(client: OpenAI) -> None:
    """Probabilities of the drawn and of the likely tokens; greedy takes the likeliest."""
    answer = client.completions.create(
        model="nano", prompt=["import os", "x = "], max_tokens=4, temperature=0, logprobs=3,
        extra_body={"ignore_eos": True},
    )  # fmt: skip
    for choice in answer.choices:
        logprobs = choice.logprobs
        assert logprobs is not None
        assert logprobs.tokens is not None
        assert logprobs.token_logprobs is not None
        assert logprobs.top_logprobs is not None
        assert choice.text == "".join(logprobs.tokens)
        for token, value, top in zip(
            logprobs.tokens, logprobs.token_logprobs, logprobs.top_logprobs, strict=True
        ):
            assert value <= 0
            assert (token, value) == max(top.items(), key=lambda pair: pair[1])


def test_stop_string(client: OpenAI) -> None:
    """The text ends before the stop string, which may lie across tokens."""
    settings: Any = {"model": "nano", "prompt": "import ", "max_tokens": 12, "temperature": 0}
    text = client.completions.create(**settings, extra_body={"ignore_eos": True}).choices[0].text
    stop = text[3:6]
    cut = client.completions.create(**settings, stop=stop, extra_body={"ignore_eos": True})
    assert (text[: text.index(stop)], "stop") == (cut.choices[0].text, cut.choices[0].finish_reason)


def test_seeds(client: OpenAI) -> None:
    """Same seed, same answers, streamed or not; several answers differ."""
    settings: Any = {"model": "nano", "messages": HI, "max_tokens": 12, "seed": 11, "n": 2}
    settings |= {"extra_body": {"ignore_eos": True, "return_token_ids": True}}
    one = client.chat.completions.create(**settings)
    two = client.chat.completions.create(**settings)
    ids = [choice.model_extra["token_ids"] for choice in one.choices if choice.model_extra]
    assert ids == [choice.model_extra["token_ids"] for choice in two.choices if choice.model_extra]
    assert ids[0] != ids[1]
    streamed: list[list[int]] = [[], []]
    for chunk in client.chat.completions.create(**settings, stream=True):
        for choice in chunk.choices:
            streamed[choice.index] += (choice.model_extra or {}).get("token_ids", [])
    assert ids == streamed


def test_chat_stream(client: OpenAI) -> None:
    """Deltas add up to the whole message, and the usage is the same."""
    settings: Any = {"model": "nano", "messages": HI, "max_tokens": 12, "seed": 3}
    settings |= {"logprobs": True, "top_logprobs": 1, "extra_body": {"ignore_eos": True}}
    whole = client.chat.completions.create(**settings)
    text, entries, usage = "", 0, None
    for chunk in client.chat.completions.create(
        **settings, stream=True, stream_options={"include_usage": True}
    ):
        usage = chunk.usage or usage
        for choice in chunk.choices:
            text += choice.delta.content or ""
            entries += len(choice.logprobs.content or ()) if choice.logprobs else 0
    assert whole.choices[0].message.content == text
    assert whole.choices[0].logprobs is not None
    assert len(whole.choices[0].logprobs.content or ()) == entries
    assert whole.usage is not None
    assert usage is not None
    assert whole.usage.completion_tokens == usage.completion_tokens


@pytest.mark.parametrize("stream", [False, True])
def test_required_tools(client: OpenAI, stream: bool) -> None:
    """A forced call has valid arguments, and its result can be sent back."""
    settings: Any = {
        "model": "nano", "messages": HI, "tools": TOOLS, "tool_choice": "required",
        "parallel_tool_calls": False, "max_tokens": 60, "seed": 5,
    }  # fmt: skip
    if stream:
        with client.chat.completions.stream(**settings) as events:
            for _ in events:
                pass
            message: Any = events.get_final_completion().choices[0].message
    else:
        message = client.chat.completions.create(**settings).choices[0].message
    (called,) = message.tool_calls
    arguments = json.loads(called.function.arguments)
    if called.function.name == "weather":
        assert arguments["city"] in ("Oslo", "Rome")
        assert isinstance(arguments["metric"], bool)
    else:
        assert ("now", {}) == (called.function.name, arguments)
    result: Any = {"role": "tool", "tool_call_id": called.id, "content": "21"}
    said: Any = message.model_dump(exclude_none=True, include={"role", "content", "tool_calls"})
    for call in said["tool_calls"]:
        call["function"].pop("parsed_arguments", None)
    again = client.chat.completions.create(
        model="nano", messages=[*HI, said, result], tools=TOOLS, max_tokens=2
    )
    assert again.usage is not None
    assert again.usage.prompt_tokens > 100


def test_named_tool(client: OpenAI) -> None:
    """The named tool is called, whatever the model would like."""
    answer = client.chat.completions.create(
        model="nano", messages=HI, tools=TOOLS, max_tokens=60,
        tool_choice={"type": "function", "function": {"name": "now"}},
    )  # fmt: skip
    (choice,) = answer.choices
    assert "tool_calls" == choice.finish_reason
    calls: Any = choice.message.tool_calls
    (called,) = calls
    assert called.type == "function"
    assert ("now", "{}") == (called.function.name, called.function.arguments)


def test_structured_output(client: OpenAI) -> None:
    """`parse` gives an object of the class, at any temperature."""
    answer = client.chat.completions.parse(
        model="nano", messages=HI, response_format=Verdict, max_tokens=60, temperature=2
    )
    assert isinstance(answer.choices[0].message.parsed, Verdict)
    with client.chat.completions.stream(
        model="nano", messages=HI, response_format=Verdict, max_tokens=60
    ) as events:
        kinds = {event.type for event in events}
        parsed = events.get_final_completion().choices[0].message.parsed
    assert isinstance(parsed, Verdict)
    assert {"chunk", "content.delta", "content.done"} <= kinds


def test_strict_tool_of_a_class(client: OpenAI) -> None:
    """A tool made of a class is strict, so even a free choice calls it with valid arguments."""
    answer = client.chat.completions.parse(
        model="nano", messages=HI, tools=[openai.pydantic_function_tool(Verdict)], max_tokens=70,
        tool_choice="required", parallel_tool_calls=False,
    )  # fmt: skip
    calls: Any = answer.choices[0].message.tool_calls
    (called,) = calls
    assert isinstance(called.function.parsed_arguments, Verdict)


def test_async_clients_share_the_steps(server: Live) -> None:
    """Requests at the same time get what each gets alone, token for token."""
    prompts = ["import ", "def f(x):\n", "class A:\n    ", "for i in "]

    async def run() -> tuple[list[list[int]], list[list[int]]]:
        async with AsyncOpenAI(base_url=server.url, api_key=KEY, max_retries=0) as client:

            async def one(number: int) -> list[int]:
                answer = await client.completions.create(
                    model="nano", prompt=prompts[number], max_tokens=6 + 2 * number, seed=number,
                    extra_body={"ignore_eos": True, "return_token_ids": True},
                )  # fmt: skip
                return list((answer.choices[0].model_extra or {})["token_ids"])

            together = await asyncio.gather(*map(one, range(4)))
            return together, [await one(number) for number in range(4)]

    together, alone = asyncio.run(run())
    assert alone == together
    assert [6, 8, 10, 12] == [len(ids) for ids in alone]


def test_async_stream(server: Live) -> None:
    """An async stream, read to its end."""

    async def run() -> str:
        async with AsyncOpenAI(base_url=server.url, api_key=KEY, max_retries=0) as client:
            stream = await client.chat.completions.create(
                model="nano", messages=HI, stream=True, max_tokens=60, seed=1,
                response_format={"type": "json_schema", "json_schema": {
                    "name": "city", "strict": True, "schema": CITY}},
            )  # fmt: skip
            return "".join([c.choices[0].delta.content or "" async for c in stream])

    assert {"city", "metric"} == json.loads(asyncio.run(run())).keys()


def test_leaving_a_stream_ends_it(server: Live, client: OpenAI) -> None:
    """A client that closes its stream frees the row: nothing runs on."""
    stream = client.completions.create(
        model="nano", prompt="x", max_tokens=500, stream=True, extra_body={"ignore_eos": True}
    )
    next(iter(stream))
    stream.close()
    idle(server)
    assert server.service.stats().finished["cancelled"] >= 1


def test_errors(server: Live, client: OpenAI) -> None:
    """The client's own exceptions, with the field, the code and the request's id."""
    with pytest.raises(openai.BadRequestError) as bad:
        client.chat.completions.create(model="nano", messages=HI, temperature=5)
    assert ("temperature", "invalid_value") == (bad.value.param, bad.value.code)
    assert bad.value.request_id is not None
    with pytest.raises(openai.NotFoundError) as missing:
        client.chat.completions.create(model="gpt-4", messages=HI)
    assert "model_not_found" == missing.value.code
    with pytest.raises(openai.BadRequestError) as long:
        client.completions.create(model="nano", prompt=[1] * 600)
    assert "context_length_exceeded" == long.value.code
    with (
        OpenAI(base_url=server.url, api_key="other", max_retries=0) as stranger,
        pytest.raises(openai.AuthenticationError),
    ):
        stranger.models.list()


def test_raw_response(client: OpenAI) -> None:
    """The request's id is a header that the client reads."""
    raw = client.models.with_raw_response.list(extra_headers={"x-request-id": "mine"})
    assert "mine" == raw.headers["x-request-id"]


def test_metrics_after_all_that(server: Live) -> None:
    """The numbers of a real service are there, and nothing is left running."""
    idle(server)
    text = httpx.get(server.url.replace("/v1", "/metrics")).text
    values = dict(line.rsplit(" ", 1) for line in text.splitlines() if not line.startswith("#"))
    assert ("0", "0") == (values["mkref_running"], values["mkref_answers_in_flight"])
    assert int(values["mkref_completion_tokens_total"]) > 10
    assert "0" == values["mkref_failures_total"]
    assert 0 == int(values['mkref_kv_pages{kind="full",state="used"}'])


def test_host_machine_and_going_down() -> None:
    """On the CPU's compiled kernel: a stream that runs when the server goes down is finished."""
    with live("host") as server, OpenAI(base_url=server.url, api_key="none") as client:
        stream = client.completions.create(
            model="nano", prompt="x", max_tokens=10, stream=True, extra_body={"ignore_eos": True}
        )
        chunks = iter(stream)
        next(chunks)
        server.server.should_exit = True
        rest = list(chunks)
        assert "length" == rest[-1].choices[0].finish_reason
        server.stop()
        with pytest.raises(openai.APIConnectionError):
            client.with_options(max_retries=0).models.list()
