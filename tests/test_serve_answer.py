"""Reading answers: channels by markers, calls piece by piece, stop strings, probabilities."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest

from mkref.engine.request import LogProb
from mkref.serve.answer import AnswerReader
from mkref.serve.calls import CallReader
from mkref.serve.template import Markers
from tests.serve_fakes import ids, nano


def read(
    tokens: list[int], **settings: Any
) -> tuple[dict[str, str], list[list[Any]], AnswerReader]:
    """Texts by channel, calls as [name, arguments], and the reader."""
    tokenizer = nano()[1]
    reader = AnswerReader(tokenizer, Markers.of(tokenizer), **settings)
    texts = {"reasoning": "", "content": ""}
    calls: list[list[Any]] = []
    parts = [part for token in tokens for part in reader.push(token)] + reader.finish()
    for part in parts:
        if part.call is None:
            texts[part.channel] += part.text
        elif part.call.name is not None:
            assert len(calls) == part.call.index
            calls.append([part.call.name, part.call.arguments])
        else:
            calls[part.call.index][1] += part.call.arguments
    return texts, calls, reader


@pytest.mark.parametrize(
    ("pieces", "settings", "reasoning", "content"),
    [
        (("start_text", "hé", "end_text"), {}, "", "hé"),
        (("plain",), {}, "", "plain"),
        (("plain",), {"reasoning": True}, "plain", ""),
        (("hm", "end_thinking", "start_text", "x", "end_text"), {"reasoning": True}, "hm", "x"),
        (("start_thinking", "hm", "end_thinking", "start_text", "x"), {}, "hm", "x"),
        (("start_thinking", "cut off"), {}, "cut off", ""),
        (("hm", "end_thinking", "\n", "start_text", " x ", "end_text", "\n"), {"reasoning": True},
         "hm", " x "),
        (("hm", "end_thinking", " loose"), {"reasoning": True}, "hm", " loose"),
        (("start_text", "a", "end_text", "start_text", "b", "end_text"), {}, "", "ab"),
        (("start_text", "a <|END_TEXT|> Vec<T> <co>b</co>", "end_text"), {}, "",
         "a <|END_TEXT|> Vec<T> <co>b</co>"),
        (("start_text", "a", "user", "bos", "b", "end_text"), {}, "", "ab"),
        (("start_action", '[{"tool_name": "f"}]', "end_action"), {}, "", '[{"tool_name": "f"}]'),
        (("start_action", "no calls", "end_action"), {"tools": True}, "", "no calls"),
        ((), {}, "", ""),
    ],
)  # fmt: skip
def test_channels(
    pieces: tuple[str, ...], settings: dict[str, Any], reasoning: str, content: str
) -> None:
    """Text goes where the markers say; what spells a marker is text."""
    texts, calls, _ = read(ids(*pieces), **settings)
    assert {"reasoning": reasoning, "content": content} == texts
    assert [] == calls


def test_text_beside_calls() -> None:
    """Reasoning, content and calls of one answer, in blocks of their own."""
    block = '[\n    {"tool_call_id": "0", "tool_name": "f", "parameters": {"x": 1}}\n]'
    pieces = ("hm", "end_thinking", "start_text", "ok", "end_text", "start_action", block)
    texts, calls, reader = read(ids(*pieces, "end_action"), reasoning=True, tools=True)
    assert {"reasoning": "hm", "content": "ok"} == texts
    assert [["f", '{"x": 1}']] == calls
    assert (1, len(ids("hm"))) == (reader.n_calls, reader.n_reasoning)


def test_two_blocks_of_calls_count_on() -> None:
    """A second action block goes on counting."""
    block = '[{"tool_name": "f", "parameters": {}}]'
    pieces = ("start_action", block, "end_action")
    _, calls, reader = read(ids(*pieces, *pieces), tools=True)
    assert ([["f", "{}"], ["f", "{}"]], 2) == (calls, reader.n_calls)


CALLS: list[tuple[str, list[list[str]], str]] = [
    ('[{"tool_call_id": "0", "tool_name": "f", "parameters": {}}]', [["f", "{}"]], ""),
    ('[{"tool_name": "f"}]', [["f", "{}"]], ""),
    ('[{"tool_call_id": "0", "tool_name": "f"}]', [["f", "{}"]], ""),
    ('[{"parameters": {"x": [1, "}"]}, "tool_name": "f"}]', [["f", '{"x": [1, "}"]}']], ""),
    ('[{"name": "f", "arguments": {"x": 1}}]', [["f", '{"x": 1}']], ""),
    ('[{"tool_name":"f","parameters":{}}{"tool_name":"g","parameters":{}}]',
     [["f", "{}"], ["g", "{}"]], ""),
    ('{"tool_name": "f", "parameters": {"a": {"tool_name": "x"}}}',
     [["f", '{"a": {"tool_name": "x"}}']], ""),
    ('[{"tool_name": "f\\"\\\\", "parameters": {"x": "\\\\\\" }"} }]',
     [['f"\\', '{"x": "\\\\\\" }"}']], ""),
    ('[{"tool_name": "f", "parameters": {"x": ', [["f", '{"x":']], ""),
    ('[{"tool_name": "f", "parameters": {}}, {"tool_na', [["f", "{}"]], ""),
    ('[{"tool_name": 5, "parameters": {}}]', [], '{"tool_name": 5, "parameters": {}}'),
    ("[]", [], ""),
    ("I call nothing", [], "I call nothing"),
]  # fmt: skip


@pytest.mark.parametrize(("text", "calls", "lost"), CALLS)
@pytest.mark.parametrize("cut", [1, 2, 3, 7, 1000, None])
def test_calls(text: str, calls: list[list[str]], lost: str, cut: int | None) -> None:
    """The same calls, however the text is cut; names come whole, arguments in order."""
    reader, rng, at = CallReader(), random.Random(5), 0
    found: list[list[str]] = []
    while at < len(text):
        size = cut or rng.randint(1, 9)
        for part in reader.push(text[at : at + size]):
            if part.name is not None:
                assert len(found) == part.index
                found.append([part.name, ""])
            found[part.index][1] += part.arguments
        at += size
    assert lost == reader.finish()
    assert calls == [[name, arguments.rstrip()] for name, arguments in found]


def test_long_arguments_take_linear_time() -> None:
    """A call that writes a large file is read in a moment, letter by letter."""
    text = json.dumps([{"tool_name": "f", "parameters": {"x": "y" * 300_000}}])
    reader = CallReader()
    told = "".join(part.arguments for letter in text for part in reader.push(letter))
    assert {"x": "y" * 300_000} == json.loads(told)


@pytest.mark.parametrize(
    ("pieces", "stops", "content"),
    [
        (("start_text", "one STOP two", "end_text"), ("STOP",), "one "),
        (("start_text", "one STO", "end_text"), ("STOP",), "one STO"),
        (("start_text", "STOP", "end_text"), ("STOP",), ""),
        (("start_text", "a b c", "end_text"), ("c", "b"), "a "),
        (("start_text", "a", "end_text", "start_text", "b", "end_text"), ("ab",), ""),
    ],
)
def test_stops_cut_the_content(
    pieces: tuple[str, ...], stops: tuple[str, ...], content: str
) -> None:
    """Content ends before the stop string, which may go across tokens and blocks."""
    texts, _, reader = read(ids(*pieces), stops=stops)
    assert content == texts["content"]
    before = reader.n_tokens
    assert [] == reader.push(ids("x")[0]) or not reader.done
    assert before + (not reader.done) == reader.n_tokens
    assert (content != "one STO") == reader.done


def test_stops_leave_reasoning_and_calls_alone() -> None:
    """A stop string in the thoughts or in a call ends nothing."""
    block = '[{"tool_name": "STOP", "parameters": {}}]'
    pieces = ("STOP here", "end_thinking", "start_action", block, "end_action")
    texts, calls, reader = read(ids(*pieces), reasoning=True, tools=True, stops=("STOP",))
    assert ("STOP here", [["STOP", "{}"]], False) == (texts["reasoning"], calls, reader.done)


def test_nothing_shows_that_a_stop_may_take_back() -> None:
    """While the end of the content may be the beginning of a stop string, it is held back."""
    tokenizer = nano()[1]
    reader = AnswerReader(tokenizer, Markers.of(tokenizer), stops=("\n\nEND",))
    shown = ""
    for token in ids("start_text", "text\n\nEN", "end_text"):
        shown += "".join(part.text for part in reader.push(token))
        assert "\n" not in shown
    assert "text\n\nEN" == shown + "".join(part.text for part in reader.finish())


def logprobs_of(pieces: tuple[str, ...], **settings: Any) -> list[tuple[str, list[int]]]:
    """Parts of the content with the ids of the tokens that came with them."""
    tokenizer = nano()[1]
    reader = AnswerReader(tokenizer, Markers.of(tokenizer), **settings)
    parts = [part for t in ids(*pieces) for part in reader.push(t, LogProb(t, -1.0))]
    parts += reader.finish()
    return [
        (part.text, [each.id for each in part.logprobs])
        for part in parts
        if part.channel == "content"
    ]


def test_logprobs_are_those_of_the_content() -> None:
    """Each content token once, with the part that completes its text; no marker, no thought."""
    text = "a é 😀 b"
    told = logprobs_of(("hm", "end_thinking", "start_text", text, "end_text"), reasoning=True)
    assert text == "".join(part for part, _ in told)
    assert ids(text) == [token for _, tokens in told for token in tokens]


def test_logprobs_end_with_the_content() -> None:
    """Tokens of a stop string have none."""
    told = logprobs_of(("start_text", "one two END three", "end_text"), stops=(" END",))
    assert "one two" == "".join(part for part, _ in told)
    assert ids("one two") == [token for _, tokens in told for token in tokens]


@pytest.mark.parametrize("seed", range(40))
def test_any_tokens_are_read(seed: int) -> None:
    """An untrained model may say anything; nothing breaks, and no marker shows."""
    rng = random.Random(seed)
    tokens = [rng.choice((rng.randrange(16), rng.randrange(2048))) for _ in range(200)]
    settings = {
        "reasoning": bool(seed % 2),
        "tools": bool(seed % 3),
        "stops": ("e",) * (seed % 5 == 0),
    }
    texts, calls, reader = read(tokens, **settings)
    assert not any(spelled in texts["content"] for spelled in ("<|START_", "<|END_", "_TOKEN"))
    assert reader.n_tokens <= 200
    assert all(name for name, _ in calls)
