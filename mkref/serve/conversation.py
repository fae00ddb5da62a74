"""The messages of a request as turns, checked for what no message shows alone.

A tool's result answers a call that the assistant turn before it made, and each call is answered
before anybody else speaks. What the assistant thought earlier is kept: dropping it would change the
prompt, and with it everything behind it would be computed anew.

What it does not do: know a marker (`mkref.serve.template`).
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from mkref.serve.schema_chat import AssistantMessage, ToolMessage
from mkref.serve.validate import refuse

if TYPE_CHECKING:
    from mkref.serve.schema_chat import Message, Tool

__all__ = ["Call", "Result", "Turn", "tools_of", "turns_of"]


@dataclass(frozen=True)
class Call:
    """A call of an earlier answer; `number` counts the calls of the conversation."""

    number: int
    name: str
    arguments: dict[str, Any]


@dataclass(frozen=True)
class Result:
    """What a call gave: the texts of its parts."""

    number: int
    texts: tuple[str, ...]


@dataclass(frozen=True)
class Turn:
    """One turn.

    Attributes:
        role: "system", "user", "assistant" or "tool".
        texts: what was said, part by part.
        thinking: what the assistant thought before.
        calls: of the assistant.
        results: of the tools; only in a turn of role "tool".
    """

    role: str
    texts: tuple[str, ...] = ()
    thinking: str = ""
    calls: tuple[Call, ...] = ()
    results: tuple[Result, ...] = field(default=())

    @property
    def text(self) -> str:
        """What was said, as one text."""
        return "".join(self.texts)

    def said(self) -> Iterator[str]:
        """Every text of it, results too."""
        yield from (*self.texts, self.thinking)
        for result in self.results:
            yield from result.texts


def turns_of(messages: Sequence[Message]) -> list[Turn]:
    """The turns of a conversation.

    Raises:
        ApiError: a result without its call, or a call without its result; names the message.
    """
    turns: list[Turn] = []
    numbers: dict[str, int] = {}  # calls that wait for a result, by the client's id
    n_calls = 0
    for at, message in enumerate(messages):
        if isinstance(message, ToolMessage):
            _answer(at, message, turns, numbers)
            continue
        if numbers:
            raise refuse(
                f"messages[{at}].role",
                f"{message.role!r}; must be 'tool', since the call {next(iter(numbers))!r} has no "
                "result yet",
            )
        if not isinstance(message, AssistantMessage):
            role = "user" if message.role == "user" else "system"
            turns.append(Turn(role, _texts(message.content)))  # type: ignore[union-attr]
            continue
        calls = []
        for i, call in enumerate(message.tool_calls or ()):
            if call.id in numbers:
                raise refuse(f"messages[{at}].tool_calls[{i}].id", f"{call.id!r} comes twice")
            numbers[call.id] = n_calls
            calls.append(Call(n_calls, call.function.name, _arguments(call.function.arguments)))
            n_calls += 1
        turns.append(_assistant(message, tuple(calls)))
    if numbers:
        raise refuse("messages", f"the call {next(iter(numbers))!r} at their end has no result")
    return turns


def _answer(at: int, message: ToolMessage, turns: list[Turn], numbers: dict[str, int]) -> None:
    """Add a tool's message to the turn of results."""
    if message.tool_call_id not in numbers:
        raise refuse(
            f"messages[{at}].tool_call_id",
            f"{message.tool_call_id!r}; must be the id of a call in the assistant's message before "
            "that has no result yet",
        )
    result = Result(numbers.pop(message.tool_call_id), _texts(message.content))
    if turns[-1].role == "tool":
        turns[-1] = Turn("tool", results=(*turns[-1].results, result))
    else:
        turns.append(Turn("tool", results=(result,)))


def _assistant(message: AssistantMessage, calls: tuple[Call, ...]) -> Turn:
    texts, thinking = [], [message.reasoning_content or message.reasoning or ""]
    if isinstance(message.content, str):
        texts.append(message.content)
    else:
        for part in message.content or ():
            text = part.text or part.refusal or part.thinking or ""
            (thinking if part.type in ("reasoning", "thinking") else texts).append(text)
    texts.append(message.refusal or "")
    return Turn("assistant", tuple(text for text in texts if text), "".join(thinking), calls)


def _texts(content: Any) -> tuple[str, ...]:
    return (content,) if isinstance(content, str) else tuple(part.text for part in content)


def _arguments(text: str) -> dict[str, Any]:
    """Arguments as an object; a broken call of the model goes back to it as what it is."""
    if not text.strip():
        return {}
    try:
        value = json.loads(text, parse_constant=str)
    except (ValueError, RecursionError):
        return {"not_json": text}
    return value if isinstance(value, dict) else {"not_an_object": value}


def tools_of(tools: Sequence[Tool]) -> list[dict[str, Any]]:
    """Functions as the prompt lists them.

    Raises:
        ApiError: two have one name, or parameters do not describe an object.
    """
    seen: set[str] = set()
    listed = []
    for i, tool in enumerate(tools):
        function = tool.function
        if function.name in seen:
            raise refuse(f"tools[{i}].function.name", f"{function.name!r} comes twice")
        seen.add(function.name)
        parameters = function.parameters or {"type": "object", "properties": {}}
        if parameters.get("type", "object") != "object":
            raise refuse(
                f"tools[{i}].function.parameters.type",
                f"{parameters['type']!r}; must be 'object'",
            )
        described = function.description or ""
        listed.append({"name": function.name, "description": described, "parameters": parameters})
    return listed
