"""What an operator may set about the endpoint.

What it does not do: know where it listens (`mkref.serve.run`), or how the engine was loaded.
"""

from __future__ import annotations

import math
import time
from dataclasses import dataclass, field, fields
from typing import Any

from mkref.engine.values import show, whole_number
from mkref.errors import RequestError

__all__ = ["Settings"]

MEGABYTE = 1 << 20
FORMATS = ("auto", "north", "plain")


@dataclass(frozen=True)
class Settings:
    """The endpoint's settings; each is checked, and a mistake is one `RequestError`.

    Attributes:
        model: the name that clients ask for.
        api_key: what clients must send as a bearer token below /v1; None for nothing.
        chat_format: "north" (through cohere-melody), "plain" (the same markers, simplest), or
            "auto": north for a model that ends its turns by the marker, plain for others.
        reasoning: whether a chat thinks first unless the request says otherwise; None: if the
            model was trained for it.
        temperature, top_p: of requests that do not say; the vendor's recommendation.
        max_body_bytes: longest body of a request.
        max_depth: deepest nesting of its JSON.
        max_concurrency: answers under way at a time, waiting ones too; more are a 429.
        max_context: longest prompt and answer together; None: what the engine has room for.
        max_choices: answers that one request may ask for (`n` times prompts).
        head_timeout_s: a client must have sent the head of its request by then.
        body_timeout_s: a client must have sent its body by then.
        write_timeout_s: a client that takes nothing for so long is dropped.
        request_timeout_s: a request ends by then, wherever it is; None for never.
        keep_alive_s: a silent stream sends a comment so often.
        drain_timeout_s: what runs may go on for so long when the server is told to stop.
        cors_origins: origins of web pages that may call the endpoint; "*" for any.
        created: seconds since 1970, for /v1/models.
    """

    model: str = "nano"
    api_key: str | None = field(default=None, repr=False)
    chat_format: str = "auto"
    reasoning: bool | None = None
    temperature: float = 1.0
    top_p: float = 0.95
    max_body_bytes: int = 16 * MEGABYTE
    max_depth: int = 64
    max_concurrency: int = 256
    max_context: int | None = None
    max_choices: int = 128
    head_timeout_s: float = 10.0
    body_timeout_s: float = 30.0
    write_timeout_s: float = 60.0
    request_timeout_s: float | None = None
    keep_alive_s: float = 15.0
    drain_timeout_s: float = 30.0
    cors_origins: tuple[str, ...] = ()
    created: int = field(default_factory=lambda: int(time.time()))

    def __post_init__(self) -> None:
        for name in ("max_body_bytes", "max_depth", "max_concurrency", "max_choices"):
            whole_number(name, getattr(self, name), 1, 2**40)
        if self.max_context is not None:
            whole_number("max_context", self.max_context, 2, 2**40)
        for each in fields(self):
            value = getattr(self, each.name)
            if each.name.endswith("_s") and value is not None:
                _number(each.name, value, 1e-3, 1e9)
        if self.temperature != 0:
            _number("temperature", self.temperature, 1e-3, 2)
        _number("top_p", self.top_p, 1e-6, 1)
        if self.chat_format not in FORMATS:
            raise RequestError(f"chat_format: {show(self.chat_format)}; must be one of {FORMATS}")
        if not isinstance(self.model, str) or not self.model.strip():
            raise RequestError(f"model: {show(self.model)}; must be a name")
        if self.api_key is not None and not (self.api_key.isascii() and self.api_key.strip()):
            raise RequestError("api_key: must be ASCII text that is not blank")


def _number(name: str, value: Any, least: float, most: float) -> None:
    good = isinstance(value, int | float) and math.isfinite(value) and least <= value <= most
    if not good or isinstance(value, bool):
        raise RequestError(f"{name}: {show(value)}; must be a number from {least:g} to {most:g}")
