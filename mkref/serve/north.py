"""North's chat format, rendered by cohere-melody: the prompt that the model was trained on.

Melody returns one string in which a message's text and the template's markers look alike. So every
marker that stands in a text gets a letter put into it that occurs nowhere else; then the string is
cut at the markers that are left, and the letter is taken out again.

Two things are done before and after melody:

    - it drops what the assistant said beside a call, so that goes into the turn's thinking;
    - it stops after the chatbot marker, while North's template opens the thinking block, or opens
      and closes it where reasoning is off.

What it does not do: read an answer: melody's filter drops calls without an id and arguments that
come before the name, takes text without markers for reasoning, and sees markers in plain text
(`mkref.serve.answer` does none of that).
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from mkref.errors import RequestError
from mkref.serve.template import SPELLED

if TYPE_CHECKING:
    from mkref.serve.conversation import Turn
    from mkref.serve.template import Markers, Piece

__all__ = ["render_north"]

ROLES = {"user": "user", "assistant": "chatbot", "system": "system", "tool": "tool"}
PRIVATE = range(0xE000, 0xF8FF)
"""Letters without a meaning, for the mark that keeps text and markers apart."""


def render_north(
    turns: Sequence[Turn],
    tools: Sequence[dict[str, Any]],
    markers: Markers,
    *,
    reasoning: bool,
    json_mode: bool = False,
) -> list[Piece]:
    """The pieces of a prompt; arguments as in `mkref.serve.template.render_plain`.

    Raises:
        RequestError: cohere-melody cannot render it; says why.
    """
    import cohere_melody

    config: dict[str, Any] = {
        "messages": [message for turn in turns for message in _messages(turn)],
        "grounding": "disabled",  # citations would stand in the text as tags
    }
    if tools:
        config["available_tools"] = [_mapped(tool, _in_range) for tool in tools]
    if json_mode:
        config["json_mode"] = True
    spelled = {text: markers[name] for name, text in SPELLED.items()}
    any_marker = re.compile("|".join(map(re.escape, spelled)))
    everything = json.dumps(config, ensure_ascii=False)
    mark = next(letter for letter in map(chr, PRIVATE) if letter not in everything)
    if any_marker.search(everything):
        config = _mapped(config, lambda value: _hidden(value, any_marker, mark))
    try:
        prompt = str(cohere_melody.render_cmd4(config))
    except ValueError as error:
        reason = " ".join(str(error).split())[:200]
        raise RequestError(f"messages: the chat template refuses them: {reason}") from error
    pieces: list[Piece] = []
    begin = 0
    for found in any_marker.finditer(prompt):
        pieces += [prompt[begin : found.start()].replace(mark, ""), spelled[found[0]]]
        begin = found.end()
    pieces.append(prompt[begin:].replace(mark, ""))
    thinking = [markers["start_thinking"]]
    pieces += thinking if reasoning else [*thinking, markers["end_thinking"]]
    return [piece for piece in pieces if piece != ""]


def _hidden(value: Any, any_marker: re.Pattern[str], mark: str) -> Any:
    """A text in which no marker is to be seen; other values as they are."""
    if not isinstance(value, str):
        return value
    return any_marker.sub(lambda found: f"{found[0][0]}{mark}{found[0][1:]}", value)


def _in_range(value: Any) -> Any:
    """A number that melody reads: it knows no whole numbers beyond 64 bits."""
    too_large = isinstance(value, int) and abs(value) >= 2**63
    return float(max(min(value, 10**308), -(10**308))) if too_large else value


def _mapped(value: Any, change: Any) -> Any:
    """A JSON value with every text, name and number changed."""
    if isinstance(value, dict):
        return {change(key): _mapped(inner, change) for key, inner in value.items()}
    if isinstance(value, list):
        return [_mapped(inner, change) for inner in value]
    return change(value)


def _messages(turn: Turn) -> list[dict[str, Any]]:
    """A turn as melody wants it; each result is a message of its own."""
    if turn.results:
        return [
            {
                "role": "tool",
                "tool_call_id": str(result.number),
                "content": [{"type": "text", "text": text} for text in result.texts or ("",)],
            }
            for result in turn.results
        ]
    role = ROLES[turn.role]
    if turn.calls:
        beside = "\n".join(text for text in (turn.thinking, turn.text) if text)
        message: dict[str, Any] = {"role": role}
        if beside:
            message["content"] = [{"type": "thinking", "thinking": beside}]
        message["tool_calls"] = [
            {
                "id": str(call.number),
                "name": call.name,
                "parameters": json.dumps(call.arguments, ensure_ascii=False),
            }
            for call in turn.calls
        ]
        return [message]
    content: list[dict[str, Any]] = []
    if turn.thinking:
        content.append({"type": "thinking", "thinking": turn.thinking})
    content += [{"type": "text", "text": text} for text in turn.texts or ("",)]
    return [{"role": role, "content": content}]
