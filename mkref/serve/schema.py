"""The fields that both endpoints share, and those of /v1/completions.

Pydantic checks them strictly: no text is taken for a number, no number for a truth value, and what
is not declared here is refused. Each field says how it is supported, and the table of
docs/serving.md is compared with that:

    yes      does what OpenAI's reference says
    mkref    the same for a field that OpenAI does not have (the names are vLLM's)
    ignored  accepted and without effect
    refused  known, and refused with the reason (`REFUSED`)

What it does not do: turn Pydantic's findings into messages (`mkref.serve.validate`), or check what
only the model knows: vocabulary and context.
"""

from __future__ import annotations

from typing import Annotated, Any, TypeVar

from pydantic import BaseModel, ConfigDict, Discriminator, Field, Tag

__all__ = [
    "REFUSED", "CompletionRequest", "Generation", "Items", "Model", "StreamOptions", "support",
]  # fmt: skip

Item = TypeVar("Item")
Items = Annotated[list[Item], Field(fail_fast=True)]
"""A list whose first wrong element ends the search: only that one is told, and there may be a
million of them.
"""
TOKEN_ID = Annotated[int, Field(ge=0, le=2**31 - 1)]
REFUSED = {
    "completions": {
        "suffix": "text cannot be filled in between; send the text before it as the prompt",
        "best_of": "answers are not ranked; ask for n answers",
    },
    "chat": {
        "functions": "replaced by tools",
        "function_call": "replaced by tool_choice",
        "audio": "the model reads and writes text only",
        "prediction": "predicted output is not supported",
        "web_search_options": "the server searches nothing; give a tool",
        "moderation": "the server moderates nothing",
    },
}
"""Fields of OpenAI that are refused, with the reason; null is as good as absent."""


def support(kind: str, note: str = "", **limits: Any) -> Any:
    """A field that may be left out, with what the documentation says about it."""
    return Field(default=None, description=note, json_schema_extra={"x-support": kind}, **limits)


class Model(BaseModel):
    """Base of every object of a request."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, allow_inf_nan=False)


class StreamOptions(Model):
    """What a stream tells besides its text."""

    include_usage: bool = Field(default=False, description="a last chunk with the usage")
    include_obfuscation: bool = Field(default=False, description="without effect")


def _shape_of_stop(value: Any) -> str:
    return "~list" if isinstance(value, list) else "~text"


def _shape_of_prompt(value: Any) -> str:
    if not isinstance(value, list):
        return "~text"
    first = value[0] if value else None
    if isinstance(first, list):
        return "~many"
    return "~texts" if isinstance(first, str) else "~ids"


StopText = Annotated[str, Field(min_length=1, max_length=1000)]
Stop = Annotated[
    Annotated[StopText, Tag("~text")]
    | Annotated[Items[StopText], Field(max_length=16), Tag("~list")],
    Discriminator(_shape_of_stop),
]
PromptIds = Annotated[Items[TOKEN_ID], Field(min_length=1)]
PromptText = Annotated[str, Field(min_length=1)]
Prompt = Annotated[
    Annotated[PromptText, Tag("~text")]
    | Annotated[Items[PromptText], Field(min_length=1), Tag("~texts")]
    | Annotated[PromptIds, Tag("~ids")]
    | Annotated[Items[PromptIds], Field(min_length=1), Tag("~many")],
    Discriminator(_shape_of_prompt),
]
Penalty = Annotated[float, Field(ge=-2, le=2)]
Bias = Annotated[float, Field(ge=-100, le=100)]


class Generation(Model):
    """How an answer is drawn and sent: the fields of both endpoints."""

    model: str | None = support("yes", "the served model's name; may be left out", max_length=500)
    max_tokens: int | None = support("yes", "most tokens of the answer", ge=1, le=2**31 - 1)
    temperature: float | None = support("yes", "0: the most likely token", ge=0, le=2)
    top_p: float | None = support("yes", "the likeliest tokens with this share", gt=0, le=1)
    n: int | None = support("yes", "answers to each prompt, each with a seed of its own", ge=1)
    seed: int | None = support("yes", "same request, same answer", ge=-(2**63), lt=2**64)
    stop: Stop | None = support("yes", "up to 16 texts that end the answer; they are cut off")
    stream: bool | None = support("yes", "server-sent events")
    stream_options: StreamOptions | None = support("yes", "`include_usage`; with `stream` only")
    presence_penalty: Penalty | None = support("yes", "-2 to 2")
    frequency_penalty: Penalty | None = support("yes", "-2 to 2")
    logit_bias: dict[str, Bias] | None = support(
        "yes", "up to 300 token ids, -100 to 100", max_length=300
    )
    top_k: int | None = support("mkref", "0 or -1: off", ge=-1, le=2**31 - 1)
    min_p: float | None = support(
        "mkref", "least share of the likeliest token's probability", ge=0, le=1
    )
    repetition_penalty: float | None = support(
        "mkref", "of tokens of prompt and answer; 1: off", ge=0.01, le=100
    )
    min_tokens: int | None = support("mkref", "nothing ends the answer before", ge=0, le=2**31 - 1)
    ignore_eos: bool | None = support("mkref", "go on after a token that ends a text")
    stop_token_ids: Items[TOKEN_ID] | None = support(
        "mkref", "up to 16 token ids that end the answer", max_length=16
    )
    priority: int | None = support("mkref", "-8 to 8; a lower one comes first", ge=-8, le=8)
    return_token_ids: bool | None = support("mkref", "adds `token_ids` and `prompt_token_ids`")
    user: Any = support("ignored", "no accounts")
    metadata: Any = support("ignored", "nothing is stored")
    store: Any = support("ignored", "nothing is stored")
    service_tier: Any = support("ignored", "see `priority`")
    safety_identifier: Any = support("ignored", "no accounts")
    prompt_cache_key: Any = support("ignored", "every prefix is cached anyway")
    prompt_cache_retention: Any = support("ignored", "as long as there is room")


class CompletionRequest(Generation):
    """The body of POST /v1/completions."""

    prompt: Prompt = Field(
        description="a text, token ids, or a list of either",
        json_schema_extra={"x-support": "yes"},
    )
    echo: bool | None = support("yes", "the prompt in front of the text; not with `logprobs`")
    logprobs: int | None = support("yes", "0 to 20 likely tokens", ge=0, le=20)

    @property
    def prompts(self) -> list[str | list[int]]:
        """Every prompt, one at least."""
        if isinstance(self.prompt, str):
            return [self.prompt]
        if isinstance(self.prompt[0], int):
            return [list(self.prompt)]
        return list(self.prompt)
