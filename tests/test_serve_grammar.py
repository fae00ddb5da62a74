"""Constrained decoding: whatever is drawn from the masks is what the request allows."""

from __future__ import annotations

import json
import random
from typing import Any

import numpy as np
import pytest

from mkref.errors import RequestError
from mkref.serve.answer import AnswerReader
from mkref.serve.constrain import GrammarConstraint, Grammars
from mkref.serve.errors import ApiError
from mkref.serve.grammar import grammar_of
from mkref.serve.schema_chat import ChatRequest
from mkref.serve.template import Markers
from tests.serve_fakes import ids, nano

MARKERS = Markers.of(nano()[1])
ENDS = [2, MARKERS["end_turn"]]
GRAMMARS = Grammars(nano()[1], 2048, ENDS)
HI = [{"role": "user", "content": "hi"}]
CITY = {"type": "object", "properties": {"city": {"enum": ["Oslo", "Rome"]}}, "required": ["city"]}

CLOSED = {**CITY, "additionalProperties": False}


def function(name: str, parameters: Any = None, **more: Any) -> dict[str, Any]:
    """A tool."""
    inner = {"name": name, **more, **({} if parameters is None else {"parameters": parameters})}
    return {"type": "function", "function": inner}


def constraint(reasoning: bool = False, **fields: Any) -> GrammarConstraint | None:
    """The constraint of a request."""
    request = ChatRequest.model_validate({"messages": HI, **fields})
    grammar = grammar_of(request, MARKERS, reasoning=reasoning)
    return None if grammar is None else GRAMMARS.constraint(*grammar)


def draw(seed: int, reasoning: bool = False, most: int = 600, **fields: Any) -> list[int]:
    """Tokens drawn at random from the masks; markers are preferred, so that blocks end."""
    rng = random.Random(seed)
    made = constraint(reasoning, **fields)
    assert made is not None
    tokens: list[int] = []
    while not made.ended and len(tokens) < most:
        allowed = np.flatnonzero(np.unpackbits(made.mask().view(np.uint8), bitorder="little"))
        markers = [token for token in allowed if token < 16]
        hurry = markers and rng.random() < 0.3
        token = int(rng.choice(markers if hurry else list(allowed)))
        if token in ENDS:
            break
        tokens.append(token)
        made.accept(token)
    return tokens


def read(tokens: list[int], reasoning: bool = False) -> tuple[str, list[tuple[str, Any]]]:
    """Content and calls of an answer, arguments parsed."""
    reader = AnswerReader(nano()[1], MARKERS, tools=True, reasoning=reasoning)
    parts = [part for token in tokens for part in reader.push(token)] + reader.finish()
    names = [part.call.name for part in parts if part.call is not None and part.call.name]
    arguments = [""] * len(names)
    for part in parts:
        if part.call is not None:
            arguments[part.call.index] += part.call.arguments
    content = "".join(part.text for part in parts if part.channel == "content")
    return content, list(zip(names, map(json.loads, arguments), strict=True))


def form(schema: Any) -> dict[str, Any]:
    """A response format."""
    return {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}


@pytest.mark.parametrize("reasoning", [False, True])
@pytest.mark.parametrize("seed", range(5))
def test_schema(seed: int, reasoning: bool) -> None:
    """The content is JSON of the schema, on one line, after the thoughts if there are any."""
    schema = {
        "type": "object",
        "properties": {
            "kind": {"enum": ["a", "b"]},
            "n": {"type": "integer", "minimum": 0, "maximum": 9},
            "flags": {"type": "array", "items": {"type": "boolean"}, "maxItems": 3},
        },
        "required": ["kind", "n", "flags"],
        "additionalProperties": False,
    }
    tokens = draw(seed, reasoning, response_format=form(schema))
    content, calls = read(tokens, reasoning)
    value = json.loads(content)
    assert [] == calls
    assert ["kind", "n", "flags"] == list(value)
    assert value["kind"] in ("a", "b")
    assert 0 <= value["n"] <= 9
    assert all(isinstance(flag, bool) for flag in value["flags"])
    assert json.dumps(value) == content


@pytest.mark.parametrize("seed", range(5))
def test_object(seed: int) -> None:
    """`json_object` is any object; what was drawn so far can always be the beginning of one."""
    tokens = draw(seed, most=60, response_format={"type": "json_object"})
    content, _ = read(tokens)
    assert content.startswith("{")
    if tokens[-1] == MARKERS["end_text"]:
        assert isinstance(json.loads(content), dict)


@pytest.mark.parametrize("seed", range(5))
def test_required(seed: int) -> None:
    """At least one call of a declared tool, with arguments of its schema, and nothing else."""
    tools = [function("look", CITY), function("stop_it")]
    content, calls = read(draw(seed, tools=tools, tool_choice="required"))
    assert "" == content
    assert calls
    for name, arguments in calls:
        assert name in ("look", "stop_it")
        good = ({"city": "Oslo"}, {"city": "Rome"}) if name == "look" else ({},)
        assert arguments in good


@pytest.mark.parametrize("seed", range(3))
def test_named(seed: int) -> None:
    """Exactly one call of the named tool."""
    tools = [function("look", CITY), function("stop_it")]
    choice = {"type": "function", "function": {"name": "stop_it"}}
    assert ("", [("stop_it", {})]) == read(draw(seed, tools=tools, tool_choice=choice))


@pytest.mark.parametrize("seed", range(5))
def test_one_call_at_most(seed: int) -> None:
    """`parallel_tool_calls: false` holds for a forced choice and for a free one."""
    fields: dict[str, Any] = {"tools": [function("look", CITY)], "parallel_tool_calls": False}
    assert 1 == len(read(draw(seed, tool_choice="required", **fields))[1])
    assert 2 > len(read(draw(seed, most=80, **fields))[1])


@pytest.mark.parametrize("seed", range(5))
def test_strict_tools(seed: int) -> None:
    """With a strict tool a free choice is text, calls that fit their schema, or both."""
    tokens = draw(seed, tools=[function("look", CITY, strict=True)])
    _, calls = read(tokens)
    assert all(call[1] in ({"city": "Oslo"}, {"city": "Rome"}) for call in calls)


@pytest.mark.parametrize("seed", range(5))
def test_tools_or_schema(seed: int) -> None:
    """Tools and a response format together: calls, or content of the schema."""
    tokens = draw(seed, tools=[function("look", CITY)], response_format=form(CLOSED))
    content, calls = read(tokens)
    assert (content == "") == bool(calls)
    assert calls or json.loads(content)["city"] in ("Oslo", "Rome")


def test_free_choices_are_not_constrained() -> None:
    """Tools alone, or plain text, cost no mask."""
    assert constraint(tools=[function("look", CITY)]) is None
    assert constraint(tools=[function("look", CITY)], tool_choice="none") is None
    assert constraint(response_format={"type": "text"}) is None
    assert constraint() is None


@pytest.mark.parametrize(
    "schema",
    [
        {"$schema": "http://json-schema.org/draft-07/schema#", "title": "t", "type": "null"},
        {"type": ["string", "null"]},
        {"$defs": {"a": {"type": "boolean"}}, "$ref": "#/$defs/a"},
        {"type": "object", "properties": {"a": {"oneOf": [{"type": "null"}, {"const": 1}]}}},
        {"x-guidance": {"whitespace_flexible": True}, "type": "boolean"},
        {},
        {"type": "string", "format": "date-time"},
    ],
)
def test_schemas_of_clients(schema: Any) -> None:
    """Keywords that libraries put into schemas compile."""
    assert constraint(response_format=form(schema)) is not None


def test_lenient_tools() -> None:
    """A tool that is not strict may use keywords that no grammar has; a strict one may not."""
    parameters = {"type": "object", "properties": {"a": {"type": "string", "format": "colour"}}}
    assert constraint(tools=[function("f", parameters)], tool_choice="required") is not None
    with pytest.raises(ApiError, match="colour"):
        constraint(tools=[function("f", parameters, strict=True)], tool_choice="required")


def test_schema_that_nothing_satisfies() -> None:
    """Found when it is compiled, or at the latest where the answer cannot go on; never a 500."""
    made = constraint(response_format=form({"$ref": "#"}))
    assert made is not None
    with pytest.raises(RequestError, match="response_format: nothing can satisfy"):
        made.accept(MARKERS["start_text"])


def test_complete_answer_ends_by_itself() -> None:
    """When nothing may follow, the constraint says so: no end token has to be generated."""
    made = constraint(response_format=form({"const": 1}))
    assert made is not None
    for token in ids("start_text", "1"):
        made.accept(token)
        assert not made.ended
    made.accept(MARKERS["end_text"])
    assert made.ended


def test_wrong_token_is_an_error() -> None:
    """A token that the mask does not allow ends the answer with an error that names the field."""
    made = constraint(response_format={"type": "json_object"})
    assert made is not None
    with pytest.raises(RequestError, match="response_format: "):
        made.accept(ids("x")[0])


def test_answers_do_not_share_a_state() -> None:
    """Two answers of one grammar, which is compiled once, go on independently."""
    first = constraint(response_format=form({"enum": ["a", "b"]}))
    second = constraint(response_format=form({"enum": ["a", "b"]}))
    assert first is not None
    assert second is not None
    before = second.mask().copy()
    first.accept(MARKERS["start_text"])
    assert before.tobytes() == second.mask().tobytes()
    assert before.tobytes() != first.mask().tobytes()


def test_mask_is_the_machine_s() -> None:
    """One bit per token of the model's vocabulary, the padding included, in words of 32."""
    made = constraint(response_format={"type": "json_object"})
    assert made is not None
    assert (np.dtype(np.uint32), (64,)) == (made.mask().dtype, made.mask().shape)
    padded = Grammars(nano()[1], 2100, ENDS).constraint('start: "x"', "f").mask()
    assert (66,) == padded.shape
    assert 0 == int(padded[64:].sum())
