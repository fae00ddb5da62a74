"""The chat format: turns become token ids, with markers that no text can forge.

A prompt is a list of pieces: the id of a marker, or text. Text is encoded as data: a message that
spells `<|END_OF_TURN_TOKEN|>` shows the model these letters and ends no turn.

Here is the plain rendering, for models that were not trained on chats. `mkref.serve.north` renders
as North's own template does.

What it does not do: read an answer (`mkref.serve.answer`).
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from mkref.errors import RequestError

if TYPE_CHECKING:
    from mkref.engine.tokenizer import Tokenizer
    from mkref.serve.conversation import Turn

__all__ = ["Markers", "Piece", "encode", "render_plain"]

Piece = int | str
ROLES = {"user": "user", "assistant": "chatbot", "system": "system", "tool": "system"}
SPELLED = {
    "bos": "<BOS_TOKEN>",
    "start_turn": "<|START_OF_TURN_TOKEN|>",
    "end_turn": "<|END_OF_TURN_TOKEN|>",
    "system": "<|SYSTEM_TOKEN|>",
    "user": "<|USER_TOKEN|>",
    "chatbot": "<|CHATBOT_TOKEN|>",
    "start_thinking": "<|START_THINKING|>",
    "end_thinking": "<|END_THINKING|>",
    "start_text": "<|START_TEXT|>",
    "end_text": "<|END_TEXT|>",
    "start_action": "<|START_ACTION|>",
    "end_action": "<|END_ACTION|>",
    "start_result": "<|START_TOOL_RESULT|>",
    "end_result": "<|END_TOOL_RESULT|>",
}
ALIASES = {"<|START_RESPONSE|>": "start_text", "<|END_RESPONSE|>": "end_text"}
"""Older markers of the same family, which sampled answers may still hold."""


@dataclass(frozen=True)
class Markers:
    """Token ids of the markers.

    Attributes:
        ids: by the names of `SPELLED`.
        names: the other way round, the older spellings too.
    """

    ids: dict[str, int]
    names: dict[int, str]

    @classmethod
    def of(cls, tokenizer: Tokenizer) -> Markers:
        """The markers of a vocabulary.

        Raises:
            RequestError: it has not all of them.
        """
        ids = {}
        for name, spelled in SPELLED.items():
            found = tokenizer.id_of(spelled)
            if found is None:
                raise RequestError(
                    f"messages: this model has no chat format (its vocabulary has no {spelled}); "
                    "use /v1/completions"
                )
            ids[name] = found
        names = {i: name for name, i in ids.items()}
        for spelled, name in ALIASES.items():
            found = tokenizer.id_of(spelled)
            if found is not None:
                names[found] = name
        return cls(ids, names)

    def __getitem__(self, name: str) -> int:
        return self.ids[name]


def encode(pieces: Sequence[Piece], tokenizer: Tokenizer) -> list[int]:
    """Token ids of a prompt."""
    ids: list[int] = []
    text: list[str] = []
    for piece in pieces:
        if isinstance(piece, str):
            text.append(piece)
            continue
        if text:  # neighbouring texts are encoded as one, as if the template were one string
            ids += tokenizer.encode_plain("".join(text))
            text = []
        ids.append(piece)
    return ids + (tokenizer.encode_plain("".join(text)) if text else [])


def tools_text(tools: Sequence[dict[str, Any]]) -> str:
    """The list of tools, one a line."""
    lines = ",\n".join(f"    {json.dumps(tool, ensure_ascii=False)}" for tool in tools)
    return f"# Available Tools\n```json\n[\n{lines}\n]\n```"


def calls_text(turn: Turn) -> str:
    """The calls of a turn, one a line."""
    calls = [
        {"tool_call_id": str(call.number), "tool_name": call.name, "parameters": call.arguments}
        for call in turn.calls
    ]
    return "[\n" + ",\n".join(f"    {json.dumps(c, ensure_ascii=False)}" for c in calls) + "\n]"


def results_text(turn: Turn) -> str:
    """The results of a turn, one a line."""
    results = [
        {
            "tool_call_id": str(result.number),
            "results": {str(i): {"content": text} for i, text in enumerate(result.texts)},
        }
        for result in turn.results
    ]
    return "[\n" + ",\n".join(f"    {json.dumps(r, ensure_ascii=False)}" for r in results) + "\n]"


def render_plain(
    turns: Sequence[Turn], tools: Sequence[dict[str, Any]], markers: Markers, *, reasoning: bool
) -> list[Piece]:
    """The plain format: each turn is its markers and what it says; the assistant's turn is open."""
    pieces: list[Piece] = [markers["bos"]]

    def block(name: str, text: str) -> list[Piece]:
        return [markers[f"start_{name}"], text, markers[f"end_{name}"]]

    def say(role: str, *blocks: list[Piece]) -> None:
        pieces.extend((markers["start_turn"], markers[role]))
        for each in blocks:
            pieces.extend(each)
        pieces.append(markers["end_turn"])

    if tools:
        say("system", block("text", tools_text(tools)))
    for turn in turns:
        blocks = []
        if turn.thinking:
            blocks.append(block("thinking", turn.thinking))
        if turn.text or not (turn.calls or turn.results):
            blocks.append(block("text", turn.text))
        if turn.calls:
            blocks.append(block("action", calls_text(turn)))
        if turn.results:
            blocks.append(block("result", results_text(turn)))
        say(ROLES[turn.role], *blocks)
    pieces += [markers["start_turn"], markers["chatbot"]]
    return [*pieces, markers["start_thinking"]] if reasoning else pieces
