"""POST /v1/chat/completions: from the checked form to requests, and from events to answers.

What it does not do: read the chat format (`mkref.serve.answer`), or build the response's pieces
(`mkref.serve.chat_reply`).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from mkref.serve.answer import AnswerReader
from mkref.serve.conversation import tools_of, turns_of
from mkref.serve.grammar import grammar_of
from mkref.serve.served import seed_of
from mkref.serve.validate import refuse

if TYPE_CHECKING:
    from mkref.engine.request import Request
    from mkref.serve.schema_chat import ChatRequest
    from mkref.serve.served import ServedModel

__all__ = ["ChatJob", "prepare_chat"]


@dataclass(frozen=True)
class ChatJob:
    """A chat request, ready to run.

    Attributes:
        form: what was asked.
        requests: one per answer.
        reasoning: whether answers begin inside the thinking block.
        tools: whether calls are read.
        stops: texts that end the content.
    """

    form: ChatRequest
    requests: list[Request] = field(repr=False)
    reasoning: bool
    tools: bool
    stops: tuple[str, ...]

    def reader(self, model: ServedModel) -> AnswerReader:
        """A reader for one answer."""
        return AnswerReader(
            model.tokenizer,
            model.chat.markers,
            reasoning=self.reasoning,
            tools=self.tools,
            stops=self.stops,
        )


def prepare_chat(form: ChatRequest, model: ServedModel, max_choices: int) -> ChatJob:
    """Everything that can be wrong with a chat request is found here, before anything runs.

    Encoding and compiling may take a while: not for the event loop.

    Raises:
        ApiError, RequestError: names the field.
    """
    model.check_name(form.model)
    chat = model.chat
    n = form.n or 1
    if n > max_choices:
        raise refuse("n", f"{n}; must be at most {max_choices}")
    max_tokens = _max_tokens(form)
    n_top = _top_logprobs(form)
    reasoning = _reasoning(form, default=chat.reasoning)
    turns = turns_of(form.messages)
    all_tools = tools_of(form.tools or ())
    grammar = grammar_of(form, chat.markers, reasoning=reasoning)
    tools = [] if form.tool_choice == "none" else all_tools
    wants_json = form.response_format is not None and form.response_format.type != "text"
    prompt = model.prompt(turns, tools, reasoning=reasoning, json_mode=wants_json)
    stops = (form.stop,) if isinstance(form.stop, str) else tuple(form.stop or ())
    if grammar is not None:
        _check_constrained(form, grammar[1])
    # Text stops are found in the content alone, so the engine does not look for them.
    ends = () if form.ignore_eos else (chat.markers["end_turn"],)
    seed = seed_of(form.seed, 0)
    requests = [
        model.request(
            form,
            prompt,
            index,
            seed,
            field="messages",
            max_tokens=max_tokens,
            length_field="max_tokens" if form.max_tokens else "max_completion_tokens",
            stop=ends,
            logprobs=n_top,
            constraint=None if grammar is None else model.constraint(*grammar),
        )
        for index in range(n)
    ]
    return ChatJob(form, requests, reasoning, bool(tools), stops)


def _max_tokens(form: ChatRequest) -> int | None:
    old, new = form.max_tokens, form.max_completion_tokens
    if old is not None and new is not None and old != new:
        raise refuse(
            "max_tokens", f"{old}; must equal max_completion_tokens, {new}, or be left out"
        )
    least = form.min_tokens
    if least is not None and new is not None and least > new:
        raise refuse("min_tokens", f"{least}; must be at most max_completion_tokens, {new}")
    return old if new is None else new


def _top_logprobs(form: ChatRequest) -> int | None:
    if form.top_logprobs is not None and not form.logprobs:
        raise refuse("top_logprobs", "only with logprobs: true")
    return (form.top_logprobs or 0) if form.logprobs else None


def _reasoning(form: ChatRequest, *, default: bool) -> bool:
    """Whether the model thinks first; the first setting that says something decides."""
    options = form.chat_template_kwargs
    if options is not None:
        for switch in (options.reasoning, options.enable_thinking, options.thinking):
            if switch is not None:
                return switch
    if form.reasoning_effort is not None:
        return form.reasoning_effort != "none"
    return default


def _check_constrained(form: ChatRequest, field: str) -> None:
    """A grammar says when an answer may end; nothing else can."""
    if form.ignore_eos:
        raise refuse("ignore_eos", f"not together with {field}, which says when the answer ends")
    if form.min_tokens:
        raise refuse("min_tokens", f"not together with {field}, which says when the answer ends")
