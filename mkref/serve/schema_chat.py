"""The fields of /v1/chat/completions: messages, tools, the form of the answer.

What it does not do: look at how messages follow one another (`mkref.serve.conversation`), or at
what a JSON schema says (`mkref.serve.grammar`).
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Discriminator, Field, Tag

from mkref.serve.schema import Generation, Items, Model, support

__all__ = [
    "ChatRequest",
    "Function",
    "JsonSchema",
    "Message",
    "NamedTool",
    "Tool",
    "ToolCall",
]

NAME = r"^[a-zA-Z0-9_.:-]{1,128}$"
MAX_TOOLS = 512


class TextPart(Model):
    """A part of a message. Pictures and sounds are no parts that this model reads."""

    type: Literal["text"]
    text: str


class AssistantPart(Model):
    """A part of an earlier answer."""

    type: Literal["text", "refusal", "reasoning", "thinking"]
    text: str | None = None
    refusal: str | None = None
    thinking: str | None = None


def _shape_of_content(value: Any) -> str:
    return "~parts" if isinstance(value, list) else "~text"


Content = Annotated[
    Annotated[str, Tag("~text")] | Annotated[Items[TextPart], Tag("~parts")],
    Discriminator(_shape_of_content),
]
AssistantContent = Annotated[
    Annotated[str, Tag("~text")] | Annotated[Items[AssistantPart], Tag("~parts")],
    Discriminator(_shape_of_content),
]


class CalledFunction(Model):
    """The function of an earlier call; `arguments` is JSON text."""

    name: str = Field(min_length=1, max_length=128)
    arguments: str = ""


class ToolCall(Model):
    """A call that an earlier answer made."""

    id: str = Field(min_length=1, max_length=200)
    type: Literal["function"] = "function"
    function: CalledFunction
    index: int | None = None


class SystemMessage(Model):
    """What the model is to be."""

    role: Literal["system", "developer"]
    content: Content
    name: str | None = None


class UserMessage(Model):
    """What the user said."""

    role: Literal["user"]
    content: Content
    name: str | None = None


class AssistantMessage(Model):
    """What the model answered before, with what it thought if the client kept that."""

    role: Literal["assistant"]
    content: AssistantContent | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    tool_calls: Items[ToolCall] | None = None
    refusal: str | None = None
    name: str | None = None
    annotations: Any = None
    audio: None = None
    function_call: None = None


class ToolMessage(Model):
    """What a call gave."""

    role: Literal["tool"]
    content: Content
    tool_call_id: str = Field(min_length=1, max_length=200)
    name: str | None = None


class UnknownMessage(Model):
    """Any other role is refused; this one's only purpose is to say so."""

    role: Literal["system", "developer", "user", "assistant", "tool"]


def _role(value: Any) -> str:
    role = value.get("role") if isinstance(value, dict) else None
    known = {"system": "~system", "developer": "~system", "user": "~user"}
    known |= {"assistant": "~assistant", "tool": "~tool"}
    return known.get(role, "~unknown") if isinstance(role, str) else "~unknown"


Message = Annotated[
    Annotated[SystemMessage, Tag("~system")]
    | Annotated[UserMessage, Tag("~user")]
    | Annotated[AssistantMessage, Tag("~assistant")]
    | Annotated[ToolMessage, Tag("~tool")]
    | Annotated[UnknownMessage, Tag("~unknown")],
    Discriminator(_role),
]


class Function(Model):
    """A function that the model may call; `parameters` is a JSON schema."""

    name: str = Field(pattern=NAME)
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(Model):
    """A tool; functions are the only kind."""

    type: Literal["function"]
    function: Function


class NamedFunction(Model):
    """The name of a declared function."""

    name: str = Field(min_length=1, max_length=128)


class NamedTool(Model):
    """The one tool that must be called."""

    type: Literal["function"]
    function: NamedFunction


ToolChoice = Annotated[
    Annotated[Literal["none", "auto", "required"], Tag("~word")]
    | Annotated[NamedTool, Tag("~named")],
    Discriminator(lambda value: "~named" if isinstance(value, dict) else "~word"),
]


class JsonSchema(Model):
    """A JSON schema with a name."""

    model_config = ConfigDict(protected_namespaces=())

    name: str = Field(pattern=NAME)
    description: str | None = None
    json_schema: dict[str, Any] = Field(alias="schema")
    strict: bool | None = None


class ResponseFormat(Model):
    """The form of the answer; `json_schema` belongs to the type of that name."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None


class TemplateOptions(Model):
    """Switches of the chat template by the names that other servers use; all mean the same."""

    reasoning: bool | None = None
    enable_thinking: bool | None = None
    thinking: bool | None = None


Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh"]


class ChatRequest(Generation):
    """The body of POST /v1/chat/completions."""

    messages: Items[Message] = Field(
        min_length=1,
        description="text only; roles system, developer, user, assistant, tool",
        json_schema_extra={"x-support": "yes"},
    )
    max_completion_tokens: int | None = support("yes", "the newer name", ge=1, le=2**31 - 1)
    logprobs: bool | None = support("yes", "of the content's tokens")
    top_logprobs: int | None = support("yes", "0 to 20; with `logprobs` only", ge=0, le=20)
    tools: Items[Tool] | None = support("yes", "functions", max_length=MAX_TOOLS)
    tool_choice: ToolChoice | None = support("yes", "`required` and a name by constrained decoding")
    parallel_tool_calls: bool | None = support("yes", "false: one call at most")
    response_format: ResponseFormat | None = support("yes", "by constrained decoding")
    reasoning_effort: Effort | None = support("yes", "`none` turns reasoning off, others on")
    include_reasoning: bool | None = support("mkref", "false: reasoning is not sent")
    chat_template_kwargs: TemplateOptions | None = support("mkref", "`enable_thinking`: reasoning")
    modalities: Items[Literal["text"]] | None = support("ignored", "`text` is the only one")
    verbosity: Any = support("ignored", "the model has no such setting")
