"""/v1/completions over scripted answers: prompts of every kind, text, probabilities, streams."""

from __future__ import annotations

from typing import Any

import pytest

from mkref.serve.served import seed_of
from tests.serve_fakes import FakeService, call, frames, nano, tokens_of

TEXT = "/v1/completions"
(EOS,) = nano()[0].eos_token_ids


def says(text: str, *, end: bool = True) -> FakeService:
    """A service that answers with a text, and the end of a text."""
    return FakeService(lambda _: [*tokens_of(text), *([EOS] * end)])


def complete(service: FakeService, **fields: Any) -> Any:
    """A whole response."""
    response = call(TEXT, {"prompt": "x", "max_tokens": 100, **fields}, service)
    assert 200 == response.status_code, response.text
    return response.json()


def stream(service: FakeService, **fields: Any) -> list[Any]:
    """The chunks of a streamed response."""
    body = {"prompt": "x", "max_tokens": 100, "stream": True, **fields}
    response = call(TEXT, body, service)
    assert 200 == response.status_code, response.text
    return frames(response)


def text_of(chunks: list[Any], index: int = 0) -> str:
    """The text of an answer."""
    return "".join(c["text"] for chunk in chunks for c in chunk["choices"] if c["index"] == index)


def test_shape() -> None:
    """Every member of OpenAI's object, in place."""
    answer = complete(says(" é < <T> done"))
    assert answer["id"].startswith("cmpl-")
    assert ("text_completion", "nano") == (answer["object"], answer["model"])
    choice = {"index": 0, "text": " é < <T> done", "logprobs": None, "finish_reason": "stop"}
    assert [choice] == answer["choices"]
    assert len(tokens_of(" é < <T> done")) + 1 == answer["usage"]["completion_tokens"]


def test_stream() -> None:
    """The same text in pieces, then the reason, then the usage if asked for."""
    chunks = stream(says("one two 😀"), stream_options={"include_usage": True})
    assert "one two 😀" == text_of(chunks)
    assert "stop" == chunks[-2]["choices"][0]["finish_reason"]
    assert complete(says("one two 😀"))["usage"] == chunks[-1]["usage"]
    assert [None] * (len(chunks) - 2) == [c["choices"][0]["finish_reason"] for c in chunks[:-2]]


@pytest.mark.parametrize(
    ("prompt", "prompts"),
    [
        ("abc", [[1, *tokens_of("abc")]]),
        ([1, 50, 60], [[1, 50, 60]]),
        ([50], [[50]]),
        (["a", "b"], [[1, *tokens_of("a")], [1, *tokens_of("b")]]),
        ([[1, 2], [3]], [[1, 2], [3]]),
        ("<|START_TEXT|>a", [[1, 10, *tokens_of("a")]]),
    ],
)
def test_prompts(prompt: Any, prompts: list[list[int]]) -> None:
    """Texts get the model's first token, and special tokens in them count; token ids stay."""
    service = says("ok")
    answer = complete(service, prompt=prompt)
    assert prompts == [list(request.prompt) for request in service.requests]
    assert len(prompts) == len(answer["choices"])
    assert sum(map(len, prompts)) == answer["usage"]["prompt_tokens"]


def test_several_prompts_and_answers() -> None:
    """Answers of a prompt are neighbours; each prompt is answered as if it were alone."""
    service = says("ok")
    answer = complete(service, prompt=["a", "b"], n=2, seed=9)
    assert list(range(4)) == [choice["index"] for choice in answer["choices"]]
    seeds = [request.sampling.seed for request in service.requests]
    assert [9, seed_of(9, 1)] * 2 == seeds
    assert 2 + 2 == answer["usage"]["prompt_tokens"]
    chunks = stream(service, prompt=["a", "b"], n=2)
    assert ["ok"] * 4 == [text_of(chunks, index) for index in range(4)]


def test_default_length() -> None:
    """OpenAI's 16 tokens, or what the context has left."""
    service = says("ok")
    for prompt in ([1] * 5, [1] * 505):
        call(TEXT, {"prompt": prompt}, service)
    assert [16, 7] == [request.max_tokens for request in service.requests]


def test_echo() -> None:
    """The prompt in front, as text, in both kinds of responses."""
    assert "abc def" == complete(says(" def"), prompt="abc", echo=True)["choices"][0]["text"]
    ids = tokens_of("abc")
    assert "abc def" == complete(says(" def"), prompt=ids, echo=True)["choices"][0]["text"]
    assert "abc def" == text_of(stream(says(" def"), prompt="abc", echo=True))


def test_stops_are_the_engine_s() -> None:
    """Stop strings and ids go with the request: the engine ends the answer at that very token."""
    service = says("ok")
    complete(service, stop=["a", "b"], stop_token_ids=[7])
    (request,) = service.requests
    assert (("a", "b"), frozenset([7])) == (request.stop_texts, request.stop_ids)


@pytest.mark.parametrize("n_top", [0, 3])
def test_logprobs(n_top: int) -> None:
    """Lists by token, offsets into the text, in both kinds of responses."""
    logprobs = complete(says("ab cd", end=False), logprobs=n_top)["choices"][0]["logprobs"]
    assert "ab cd" == "".join(logprobs["tokens"])
    n_tokens = len(logprobs["tokens"])
    ends = [len("".join(logprobs["tokens"][:i])) for i in range(n_tokens)]
    assert ends == logprobs["text_offset"]
    assert [-1.0] * n_tokens == logprobs["token_logprobs"]
    tops = logprobs["top_logprobs"]
    assert tops is None if n_top == 0 else [n_top] * n_tokens == [len(top) for top in tops]
    chunks = stream(says("ab cd", end=False), logprobs=n_top)
    told = [c["choices"][0]["logprobs"] for c in chunks if c["choices"][0]["logprobs"]]
    for name in ("tokens", "text_offset", "token_logprobs"):
        assert logprobs[name] == [entry for piece in told for entry in piece[name]]


def test_token_ids() -> None:
    """Asked for, prompt and answer come as token ids too."""
    (choice,) = complete(says("ab"), return_token_ids=True, prompt=[1, 50])["choices"]
    assert ([1, 50], [*tokens_of("ab"), EOS]) == (choice["prompt_token_ids"], choice["token_ids"])
    chunks = stream(says("ab"), return_token_ids=True, prompt=[1, 50])
    assert [1, 50] == chunks[0]["choices"][0]["prompt_token_ids"]
    told = [i for c in chunks for i in c["choices"][0].get("token_ids", ())]
    assert choice["token_ids"] == told


def test_model_without_tokenizer() -> None:
    """Token ids in, token ids out; a text is refused."""
    service = FakeService(lambda _: [5, 6, EOS], tokenizer=False)
    (choice,) = complete(service, prompt=[1, 2], return_token_ids=True, logprobs=1)["choices"]
    assert ("", [5, 6, EOS]) == (choice["text"], choice["token_ids"])
    assert ["token_id:5", "token_id:6", f"token_id:{EOS}"] == choice["logprobs"]["tokens"]
    error = call(TEXT, {"prompt": "x"}, service).json()["error"]
    assert "prompt" == error["param"]
    assert "give token ids" in error["message"]
