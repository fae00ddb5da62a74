"""Answers of /v1/chat/completions as JSON: whole, or chunk by chunk.

Each event of the engine becomes at most one chunk, whatever it holds. Chunks are put together from
strings, since a token's chunk is made while the next token is already on its way.

What it does not do: run anything.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from mkref.serve.logprobs import chat_logprobs
from mkref.serve.sse import sse

if TYPE_CHECKING:
    from mkref.serve.answer import AnswerReader, Part
    from mkref.serve.chat import ChatJob
    from mkref.serve.served import ServedModel
    from mkref.serve.service import Event

__all__ = ["ChatChoice", "ChatChunks"]


class ChatChoice:
    """One answer on its way.

    Args:
        job: what was asked.
        model: that answers.

    Attributes:
        reader: of its tokens.
        finish_reason: None while it is under way.
        token_ids: all tokens, if the client wants them.
    """

    def __init__(self, job: ChatJob, model: ServedModel) -> None:
        self.reader: AnswerReader = job.reader(model)
        self.finish_reason: str | None = None
        self.token_ids: list[int] = []
        self._form = job.form
        self._vocabulary = model.vocabulary
        self._text = {"reasoning": [""], "content": [""]}
        self._calls: list[dict[str, Any]] = []
        self._logprobs: list[dict[str, Any]] = []

    def take(self, event: Event) -> dict[str, Any]:
        """What an event adds, as a delta; empty if nothing shows.

        The finish reason is set when the answer is over: by the event, or by a stop string.
        """
        parts: list[Part] = []
        logprobs = event.logprobs or ()
        n_before = self.reader.n_tokens
        for i, token in enumerate(event.token_ids):
            parts += self.reader.push(token, logprobs[i] if logprobs else None)
        if self._form.return_token_ids:
            self.token_ids += event.token_ids[: self.reader.n_tokens - n_before]
        if self.reader.done or event.finish_reason is not None:
            parts += self.reader.finish()
            cut = event.finish_reason == "length" and not self.reader.done
            called = "tool_calls" if self.reader.n_calls else "stop"
            self.finish_reason = "length" if cut else called
        return self._delta(parts)

    def _delta(self, parts: Sequence[Part]) -> dict[str, Any]:
        """Parts as one delta, and kept for the whole message."""
        text: dict[str, str] = {}
        calls: dict[int, dict[str, Any]] = {}
        entries: list[dict[str, Any]] = []
        for part in parts:
            if part.call is not None:
                call = calls.setdefault(part.call.index, {"index": part.call.index})
                self._add_call(call, part.call.name, part.call.arguments)
            elif part.channel == "content" or self._form.include_reasoning is not False:
                text[part.channel] = text.get(part.channel, "") + part.text
            if part.logprobs:
                n_top = self._form.top_logprobs or 0
                entries += chat_logprobs(part.logprobs, n_top, self._vocabulary)
        delta: dict[str, Any] = {}
        if text.get("reasoning"):
            self._text["reasoning"].append(text["reasoning"])
            delta = {"reasoning_content": text["reasoning"], "reasoning": text["reasoning"]}
        if text.get("content"):
            self._text["content"].append(text["content"])
            delta["content"] = text["content"]
        if calls:
            delta["tool_calls"] = list(calls.values())
        self._logprobs += entries
        self.entries = entries
        return delta

    def _add_call(self, call: dict[str, Any], name: str | None, arguments: str) -> None:
        """Add a piece of a call to a delta and to the whole."""
        if name is not None:
            made = {"id": f"call_{secrets.token_hex(12)}", "type": "function"}
            call |= made
            call["function"] = {"name": name, "arguments": ""}
            self._calls.append({**made, "function": {"name": name, "arguments": [""]}})
        function = call.setdefault("function", {"arguments": ""})
        function["arguments"] += arguments
        self._calls[call["index"]]["function"]["arguments"].append(arguments)

    def body(self, index: int) -> dict[str, Any]:
        """The whole answer as an element of `choices`."""
        content = "".join(self._text["content"])
        message: dict[str, Any] = {"role": "assistant", "content": content, "refusal": None}
        reasoning = "".join(self._text["reasoning"])
        if reasoning:
            message |= {"reasoning_content": reasoning, "reasoning": reasoning}
        if self._calls:
            message["content"] = content or None
            message["tool_calls"] = [
                {**call, "function": {**call["function"], "arguments": "".join(
                    call["function"]["arguments"]
                )}}
                for call in self._calls
            ]  # fmt: skip
        choice: dict[str, Any] = {"index": index, "message": message}
        choice["logprobs"] = (
            {"content": self._logprobs, "refusal": None} if self._form.logprobs else None
        )
        choice["finish_reason"] = self.finish_reason
        if self._form.return_token_ids:
            choice["token_ids"] = self.token_ids
        return choice


class ChatChunks:
    """Writes the chunks of one response."""

    def __init__(self, answer_id: str, created: int, model: str) -> None:
        head = {
            "id": answer_id,
            "object": "chat.completion.chunk",
            "created": created,
            "model": model,
        }
        self._head = json.dumps(head)[:-1] + ', "choices": '

    def role(self, index: int, prompt_ids: Sequence[int] | None) -> bytes:
        """The first chunk of an answer."""
        extra = {} if prompt_ids is None else {"prompt_token_ids": list(prompt_ids)}
        return self._chunk(index, {"role": "assistant", "content": ""}, None, None, extra)

    def delta(
        self,
        index: int,
        delta: dict[str, Any],
        entries: list[dict[str, Any]] | None,
        token_ids: Sequence[int] | None,
    ) -> bytes:
        """What an event added."""
        logprobs = None if entries is None else {"content": entries, "refusal": None}
        extra = {} if token_ids is None else {"token_ids": list(token_ids)}
        return self._chunk(index, delta, logprobs, None, extra)

    def end(self, index: int, finish_reason: str) -> bytes:
        """The last chunk of an answer."""
        return self._chunk(index, {}, None, finish_reason, {})

    def usage(self, usage: dict[str, Any]) -> bytes:
        """The last chunk of the response."""
        return sse(f'{self._head}[], "usage": {json.dumps(usage)}}}')

    def _chunk(
        self, index: int, delta: Any, logprobs: Any, finish: str | None, extra: dict[str, Any]
    ) -> bytes:
        choice = {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": finish}
        return sse(f"{self._head}[{json.dumps(choice | extra)}]}}")
