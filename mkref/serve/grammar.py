"""Grammars of answers: what a request's tools and `response_format` allow, from the first token on.

A grammar is Lark text as llguidance reads it; `<[7]>` is the token with id 7, so markers cannot be
confused with text. JSON is written as North was trained to write it, on one line with a space after
comma and colon: a small model would else lose itself in white space.

What it does not do: run a grammar (`mkref.serve.constrain`).
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from mkref.serve.validate import refuse

if TYPE_CHECKING:
    from mkref.serve.schema_chat import ChatRequest, Tool
    from mkref.serve.template import Markers

__all__ = ["grammar_of"]

MAX_SCHEMA = 128 << 10
"""Longest JSON schema in characters."""
MORE_CALLS = 31
"""Most calls of an answer, less one."""
FREE = "FREE: /(.|\\n)*/"
WRITTEN = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}


def grammar_of(
    request: ChatRequest, markers: Markers, *, reasoning: bool
) -> tuple[str, str] | None:
    """The grammar of an answer, and the field that asks for it; None if anything is allowed.

    Args:
        request: checked by the schema.
        markers: of the vocabulary.
        reasoning: whether the prompt opened the thinking block.

    Raises:
        ApiError: `tool_choice`, `response_format` or a schema does not fit the rest; names it.
    """
    named = _named(request)
    rules: list[str] = []
    form = _form(request)
    choice = request.tool_choice or ("auto" if request.tools else "none")
    if named is not None or choice == "required":
        if form is not None:
            raise refuse("response_format", "not together with a tool_choice that forces a call")
        field = "tool_choice" if named is None else f"tools[{named}].function.parameters"
        chosen = _numbered(request.tools or [], named)
        single = named is not None or request.parallel_tool_calls is False
        rules += _calls(chosen, markers, single=single)
        body = "calls"
    elif form is not None:
        field = "response_format"
        rules += [_block("answer", "json", markers, "text"), f"json: %json {form}"]
        body = "answer"
        if choice == "auto" and request.tools:
            single = request.parallel_tool_calls is False
            rules += _calls(_numbered(request.tools, None), markers, single=single)
            body = "answer | calls"
    elif choice == "auto" and request.tools and _is_strict(request):
        field = "tools"
        single = request.parallel_tool_calls is False
        rules += _calls(_numbered(request.tools, None), markers, single=single)
        rules += [_block("words", "FREE", markers, "text")]
        body = "words calls? | calls"
    else:
        return None
    if reasoning:
        body = f"thoughts ({body})"
        rules.append(f"thoughts: FREE <[{markers['end_thinking']}]>")
    if any("FREE" in rule for rule in rules):
        rules.append(FREE)
    return "\n".join([f"start: {body}", *rules, ""]), field


def _named(request: ChatRequest) -> int | None:
    """The number of the tool that must be called; checks that `tool_choice` fits the tools."""
    choice = request.tool_choice
    tools = request.tools or []
    if choice is None or choice == "none":
        return None
    if not tools:
        raise refuse("tool_choice", "there are no tools to choose from")
    if isinstance(choice, str):
        return None
    names = [tool.function.name for tool in tools]
    if choice.function.name not in names:
        shown = ", ".join(names[:10])
        raise refuse(
            "tool_choice.function.name", f"{choice.function.name!r}; must be one of {shown}"
        )
    return names.index(choice.function.name)


def _is_strict(request: ChatRequest) -> bool:
    """Calls are checked even if the model is free to make none."""
    asked = any(tool.function.strict for tool in request.tools or ())
    return asked or request.parallel_tool_calls is False


def _form(request: ChatRequest) -> str | None:
    """The JSON schema of the content, as text."""
    form = request.response_format
    if form is None or form.type == "text":
        return None
    if form.type == "json_object":
        if form.json_schema is not None:
            raise refuse("response_format.json_schema", "only with the type json_schema")
        return _schema_text({"type": "object"}, "response_format", lenient=False)
    if form.json_schema is None:
        raise refuse("response_format.json_schema", "missing; it is required")
    field = "response_format.json_schema.schema"
    return _schema_text(form.json_schema.json_schema, field, lenient=False)


def _numbered(tools: Sequence[Tool], only: int | None) -> list[tuple[int, Tool]]:
    return [(i, tool) for i, tool in enumerate(tools) if only is None or i == only]


def _block(name: str, inside: str, markers: Markers, kind: str) -> str:
    """A rule: a block of the chat format around something."""
    return f"{name}: <[{markers[f'start_{kind}']}]> {inside} <[{markers[f'end_{kind}']}]>"


def _calls(tools: list[tuple[int, Tool]], markers: Markers, *, single: bool) -> list[str]:
    """Rules for the action block."""
    more = "" if single else f' ( ",\\n    " call ){{0,{MORE_CALLS}}}'
    which = " | ".join(f"call{i}" for i, _ in tools)
    rules = [
        _block("calls", f'"[\\n    " call{more} "\\n]"', markers, "action"),
        f'call: "{{\\"tool_call_id\\": \\"" NUMBER "\\", \\"tool_name\\": \\"" ( {which} ) "}}"',
        "NUMBER: /[0-9]{1,4}/",
    ]
    for i, tool in tools:
        field = f"tools[{i}].function.parameters"
        schema = _closed(tool.function.parameters)
        text = _schema_text(schema, field, lenient=not tool.function.strict)
        rules.append(f'call{i}: "{tool.function.name}\\", \\"parameters\\": " arguments{i}')
        rules.append(f"arguments{i}: %json {text}")
    return rules


def _closed(parameters: dict[str, Any] | None) -> dict[str, Any]:
    """A tool's schema without arguments that it does not name, unless it says that there may be."""
    schema = {"type": "object", **(parameters or {"properties": {}})}
    if "properties" in schema and not {"patternProperties", "$ref"} & schema.keys():
        schema.setdefault("additionalProperties", False)
    return schema


def _schema_text(schema: dict[str, Any], field: str, *, lenient: bool) -> str:
    """A schema as one line; `lenient` lets keywords pass that the grammar cannot express."""
    text = json.dumps(
        {**schema, "x-guidance": {**WRITTEN, "coerce_one_of": True, "lenient": lenient}}
    )
    if len(text) > MAX_SCHEMA:
        raise refuse(field, f"a schema of {len(text)} characters; at most {MAX_SCHEMA}")
    return text
