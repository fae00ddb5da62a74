"""/v1/chat/completions over scripted answers: whole and streamed responses say the same."""

from __future__ import annotations

import json
from typing import Any

import pytest

from mkref.errors import RequestError
from mkref.serve.served import seed_of
from mkref.serve.service import Event, Usage
from tests.serve_fakes import FakeService, call, deltas, frames, ids, nano, say, tokens_of

CHAT = "/v1/chat/completions"
HI = [{"role": "user", "content": "hi"}]
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
BLOCK = (
    '[\n    {"tool_call_id": "0", "tool_name": "f", "parameters": {"x": 1}},\n'
    '    {"tool_name": "g"}\n]'
)


def chat(service: FakeService | None = None, **fields: Any) -> Any:
    """A whole response."""
    response = call(CHAT, {"messages": HI, **fields}, service)
    assert 200 == response.status_code, response.text
    return response.json()


def stream(service: FakeService | None = None, **fields: Any) -> list[Any]:
    """The chunks of a streamed response."""
    body = {"messages": HI, "stream": True, **fields}
    response = call(CHAT, body, service)
    assert 200 == response.status_code, response.text
    return frames(response)


def test_shape() -> None:
    """Every member of OpenAI's object, in place."""
    answer = chat()
    assert answer["id"].startswith("chatcmpl-")
    assert ("chat.completion", "nano") == (answer["object"], answer["model"])
    (choice,) = answer["choices"]
    assert {"index", "message", "logprobs", "finish_reason"} == choice.keys()
    message = {"role": "assistant", "content": "hello", "refusal": None}
    assert (0, message, None, "stop") == (
        choice["index"], choice["message"], choice["logprobs"], choice["finish_reason"]
    )  # fmt: skip
    usage = answer["usage"]
    n_tokens = 3 + len(tokens_of("hello"))
    assert (n_tokens, 0) == (
        usage["completion_tokens"],
        usage["prompt_tokens_details"]["cached_tokens"],
    )
    assert usage["total_tokens"] == usage["prompt_tokens"] + n_tokens
    assert {"reasoning_tokens": 0} == usage["completion_tokens_details"]


def test_stream_shape() -> None:
    """A chunk with the role, deltas, an end, and no usage unless asked for."""
    chunks = stream()
    assert {"role": "assistant", "content": ""} == chunks[0]["choices"][0]["delta"]
    assert "hello" == deltas(chunks, "content")
    assert ({}, "stop") == (
        chunks[-1]["choices"][0]["delta"],
        chunks[-1]["choices"][0]["finish_reason"],
    )
    assert [None] * (len(chunks) - 1) == [c["choices"][0]["finish_reason"] for c in chunks[:-1]]
    assert not any("usage" in chunk for chunk in chunks)
    assert 1 == len({(c["id"], c["created"], c["object"]) for c in chunks})


def test_stream_usage() -> None:
    """Asked for, the usage is a last chunk without choices, and what the whole response says."""
    service = FakeService()
    service.n_cached = 3
    last = stream(service, stream_options={"include_usage": True})[-1]
    assert [] == last["choices"]
    assert chat(service)["usage"] == last["usage"]
    assert {"cached_tokens": 3} == last["usage"]["prompt_tokens_details"]


def test_settings_reach_the_engine() -> None:
    """Each field of the sampling arrives where it belongs."""
    service = FakeService()
    chat(
        service, temperature=0.5, top_p=0.7, top_k=9, min_p=0.1, presence_penalty=0.2,
        frequency_penalty=-0.3, repetition_penalty=1.1, logit_bias={"7": 5, "9": -1.5}, seed=42,
        min_tokens=2, max_completion_tokens=77, stop_token_ids=[5], priority=-3,
    )  # fmt: skip
    (request,) = service.requests
    s = request.sampling
    assert (0.5, 0.7, 9, 0.1, 0.2, -0.3, 1.1) == (
        s.temperature, s.top_p, s.top_k, s.min_p, s.presence_penalty, s.frequency_penalty,
        s.repetition_penalty,
    )  # fmt: skip
    assert (((7, 5.0), (9, -1.5)), 42, 2, None) == (s.logit_bias, s.seed, s.min_tokens, s.logprobs)
    assert (77, -3, None) == (request.max_tokens, request.priority, request.deadline)
    assert {5, *ids("end_turn")} == request.stop_ids
    assert {nano()[0].eos_token_id} == request.eos_ids


def test_defaults() -> None:
    """Without settings: the vendor's sampling, all of the context, a seed that nobody knows."""
    service = FakeService()
    chat(service)
    chat(service)
    one, two = service.requests
    assert (1.0, 0.95) == (one.sampling.temperature, one.sampling.top_p)
    assert 512 == len(one.prompt) + one.max_tokens
    assert one.sampling.seed != two.sampling.seed


def test_ignore_eos() -> None:
    """Neither the model's end nor the turn's ends the answer."""
    service = FakeService()
    chat(service, ignore_eos=True, max_tokens=5)
    (request,) = service.requests
    assert (frozenset(), frozenset()) == (request.eos_ids, request.stop_ids)


def test_several_answers() -> None:
    """`n` answers have seeds of their own, the first the request's; the prompt counts once."""
    service = FakeService(lambda request: ids("start_text", str(request.sampling.seed % 97)))
    answer = chat(service, n=3, seed=-1)
    seeds = [request.sampling.seed for request in service.requests]
    assert [seed_of(-1, i) for i in range(3)] == seeds
    assert 2**64 - 1 == seeds[0]
    assert 3 == len({*seeds})
    assert [0, 1, 2] == [choice["index"] for choice in answer["choices"]]
    assert [str(s % 97) for s in seeds] == [c["message"]["content"] for c in answer["choices"]]
    assert len(service.requests[0].prompt) == answer["usage"]["prompt_tokens"]
    chunks = stream(service, n=3, seed=-1)
    assert [str(s % 97) for s in seeds] == [deltas(chunks, "content", i) for i in range(3)]


def test_length() -> None:
    """An answer that is cut off says so."""
    assert "length" == chat(max_tokens=2)["choices"][0]["finish_reason"]
    assert "length" == stream(max_tokens=2)[-1]["choices"][0]["finish_reason"]


def test_max_tokens_by_either_name() -> None:
    """The old and the new name mean the same, and may come together if they agree."""
    service = FakeService()
    chat(service, max_tokens=5, max_completion_tokens=5)
    chat(service, max_completion_tokens=6)
    assert [5, 6] == [request.max_tokens for request in service.requests]


THINKS = say("let me see", "end_thinking", "start_text", "42", "end_text")


@pytest.mark.parametrize(
    "switch",
    [
        {"reasoning_effort": "high"},
        {"chat_template_kwargs": {"enable_thinking": True}},
        {"chat_template_kwargs": {"thinking": True}, "reasoning_effort": "none"},
    ],
)
def test_reasoning_is_apart(switch: dict[str, Any]) -> None:
    """Thoughts are under both names that clients look for, and are counted."""
    service = FakeService(THINKS)
    answer = chat(service, **switch)
    message = answer["choices"][0]["message"]
    assert ("let me see", "let me see", "42") == (
        message["reasoning_content"], message["reasoning"], message["content"]
    )  # fmt: skip
    details = answer["usage"]["completion_tokens_details"]
    assert {"reasoning_tokens": len(tokens_of("let me see"))} == details
    assert ids("start_thinking")[0] == service.requests[0].prompt[-1]
    chunks = stream(service, **switch)
    assert ("let me see", "42") == (deltas(chunks, "reasoning_content"), deltas(chunks, "content"))


def test_reasoning_can_be_kept_back() -> None:
    """`include_reasoning: false` sends none of it."""
    service = FakeService(THINKS)
    switch: dict[str, Any] = {"reasoning_effort": "low", "include_reasoning": False}
    assert "reasoning_content" not in chat(service, **switch)["choices"][0]["message"]
    chunks = stream(service, **switch)
    assert ("", "42") == (deltas(chunks, "reasoning"), deltas(chunks, "content"))


def test_calls() -> None:
    """Parallel calls, one without parameters: arguments are JSON text, ids are unique."""
    service = FakeService(say("start_action", BLOCK, "end_action"))
    (choice,) = chat(service, tools=[TOOL])["choices"]
    assert ("tool_calls", None) == (choice["finish_reason"], choice["message"]["content"])
    calls = choice["message"]["tool_calls"]
    assert [("f", '{"x": 1}'), ("g", "{}")] == [
        (c["function"]["name"], c["function"]["arguments"]) for c in calls
    ]
    assert 2 == len({c["id"] for c in calls})
    assert {"function"} == {c["type"] for c in calls}


def test_streamed_calls() -> None:
    """The first delta of a call has id, type and name, the others its arguments."""
    service = FakeService(say("start_action", BLOCK, "end_action"))
    chunks = stream(service, tools=[TOOL])
    pieces = [piece for c in chunks for piece in c["choices"][0]["delta"].get("tool_calls", ())]
    for index, (name, arguments) in enumerate([("f", '{"x": 1}'), ("g", "{}")]):
        first, *others = [piece for piece in pieces if piece["index"] == index]
        assert {"index", "id", "type", "function"} == first.keys()
        assert name == first["function"]["name"]
        assert all({"index", "function"} == piece.keys() for piece in others)
        told = [piece["function"]["arguments"] for piece in (first, *others)]
        assert arguments == "".join(told)
    assert "tool_calls" == chunks[-1]["choices"][0]["finish_reason"]


def test_calls_without_tools_are_text() -> None:
    """`tool_choice: none` shows the model no tools, and calls nothing."""
    service = FakeService(say("start_action", BLOCK, "end_action"))
    (choice,) = chat(service, tools=[TOOL], tool_choice="none")["choices"]
    assert "tool_calls" not in choice["message"]
    assert ("stop", BLOCK) == (choice["finish_reason"], choice["message"]["content"])
    prompts = [request.prompt for request in service.requests]
    chat(service)
    assert prompts == [service.requests[1].prompt]


def test_stop_strings() -> None:
    """Content ends before the stop string; the answer is ended there and counted up to there."""
    service = FakeService(say("start_text", "one two STOP three four", "end_text"))
    answer = chat(service, stop=["STOP", "zzz"])
    assert ("one two ", "stop") == (
        answer["choices"][0]["message"]["content"], answer["choices"][0]["finish_reason"]
    )  # fmt: skip
    assert answer["usage"]["completion_tokens"] < len(ids("start_text", "one two STOP three four"))
    assert service.streams[0].cancelled
    chunks = stream(service, stop="STOP")
    assert "one two " == deltas(chunks, "content")
    assert not any("S" in (c["choices"][0]["delta"].get("content") or "") for c in chunks)
    assert ((), frozenset()) == (
        service.requests[0].stop_texts,
        frozenset(service.requests[0].stop_texts),
    )


def test_stop_of_one_answer_leaves_the_others() -> None:
    """With several answers, a stop string ends its own."""
    texts = {0: "a STOP b", 1: "c d e"}
    service = FakeService(
        lambda r: [*ids("start_text", texts[r.sampling.seed != 5]), *ids("end_turn")]
    )
    answer = chat(service, n=2, seed=5, stop="STOP")
    assert ["a ", "c d e"] == [c["message"]["content"] for c in answer["choices"]]


def test_nothing_is_awaited_after_a_stop() -> None:
    """The answer is there when the stop string is; the engine may take its time to end."""
    script: list[Any] = [
        *ids("start_text", "one STOP"),
        0.5,
        ZeroDivisionError("nobody comes here"),
    ]
    for n in (1, 2):
        service = FakeService(lambda _: script)
        (choice, *_) = chat(service, stop="STOP", n=n)["choices"]
        assert ("one ", "stop") == (choice["message"]["content"], choice["finish_reason"])
        assert "one " == deltas(stream(service, stop="STOP", n=n), "content")
        assert [True] * 2 * n == [made.cancelled for made in service.streams]


def test_logprobs() -> None:
    """OpenAI's entries for the content's tokens, in both kinds of responses."""
    service = FakeService(say("start_text", "hé", "end_text"))
    entries = chat(service, logprobs=True, top_logprobs=2)["choices"][0]["logprobs"]["content"]
    assert [{"token", "logprob", "bytes", "top_logprobs"}] * len(entries) == [
        e.keys() for e in entries
    ]
    assert "hé".encode() == bytes(b for entry in entries for b in entry["bytes"])
    assert [2] * len(entries) == [len(entry["top_logprobs"]) for entry in entries]
    assert 2 == service.requests[0].sampling.logprobs
    chunks = stream(service, logprobs=True, top_logprobs=2)
    streamed = [
        e
        for c in chunks
        if c["choices"][0]["logprobs"]
        for e in c["choices"][0]["logprobs"]["content"]
    ]
    assert entries == streamed


def test_token_ids() -> None:
    """Asked for, prompt and answer come as token ids too."""
    service = FakeService()
    (choice,) = chat(service, return_token_ids=True)["choices"]
    assert list(service.requests[0].prompt) == choice["prompt_token_ids"]
    assert ids("start_text", "hello", "end_text", "end_turn") == choice["token_ids"]
    chunks = stream(service, return_token_ids=True)
    told = [i for c in chunks for i in c["choices"][0].get("token_ids", ())]
    assert choice["token_ids"] == told
    assert choice["prompt_token_ids"] == chunks[0]["choices"][0]["prompt_token_ids"]


def test_json_is_constrained() -> None:
    """A response format gives the engine a constraint, one for each answer."""
    text = json.dumps({"a": True})
    service = FakeService(say("start_text", text, "end_text"))
    schema = {"type": "object", "properties": {"a": {"type": "boolean"}}, "required": ["a"]}
    answer = chat(
        service, n=2,
        response_format={"type": "json_schema", "json_schema": {"name": "x", "schema": schema}},
    )  # fmt: skip
    assert [text, text] == [c["message"]["content"] for c in answer["choices"]]
    one, two = (request.constraint for request in service.requests)
    assert None not in (one, two)
    assert one is not two


def test_unsatisfiable_answer_is_a_400() -> None:
    """If an answer cannot be completed, the request was wrong, and says where."""
    service = FakeService(say("start_text", "x", "end_text"))
    body = {"messages": HI, "response_format": {"type": "json_object"}}
    service.script = lambda request: [_accept(request, t) for t in ids("start_text", "x")]
    response = call(CHAT, body, service)
    assert (400, "response_format") == (response.status_code, response.json()["error"]["param"])


def _accept(request: Any, token: int) -> Any:
    """A step that tells a constraint a token, as the engine does."""
    try:
        request.constraint.accept(token)
    except RequestError as error:
        return Event((), "", None, "error", Usage(1, 0, 0), error)
    return Event((token,), "", None, None, Usage(1, 0, 1))


def test_north_model() -> None:
    """A model that ends its turns by the marker thinks first, and is rendered by melody."""
    service = FakeService(THINKS, eos=ids("end_turn")[0])
    assert "let me see" == chat(service)["choices"][0]["message"]["reasoning_content"]
    chat(service, reasoning_effort="none")
    assert ids("start_thinking", "end_thinking") == list(service.requests[1].prompt[-2:])


def test_model_without_tokenizer() -> None:
    """It cannot chat, and says what it can do."""
    response = call(CHAT, {"messages": HI}, FakeService(tokenizer=False))
    error = response.json()["error"]
    assert (400, "messages") == (response.status_code, error["param"])
    assert "use /v1/completions with token ids" in error["message"]
