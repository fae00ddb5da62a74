"""What is known about one HTTP request when it is over: for the log line and the metrics.

What it does not do: hold any text of a request or an answer.
"""

from __future__ import annotations

import re
import secrets
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from starlette.requests import Request

__all__ = ["Report", "report_of", "request_id"]

GOOD_ID = re.compile(r"[A-Za-z0-9._:/+=-]{1,128}")


@dataclass
class Report:
    """Filled in by the endpoint.

    Attributes:
        request_id: the client's own, or a new one.
        stream: whether the answer was streamed.
        prompt_tokens, cached_tokens, completion_tokens: of all answers.
        finish_reasons: of the answers, in the order in which they ended.
        error: what went wrong, if anything did.
        error_code: the same as a word.
    """

    request_id: str
    stream: bool | None = None
    prompt_tokens: int | None = None
    cached_tokens: int | None = None
    completion_tokens: int | None = None
    finish_reasons: list[str] = field(default_factory=list)
    error: str | None = None
    error_code: str | None = None

    def fields(self) -> dict[str, Any]:
        """What is known, for a log line."""
        known = {name: value for name, value in vars(self).items() if value not in (None, [])}
        return dict(known)


def request_id(given: bytes | None) -> str:
    """The client's id if it is one that a log can hold, else a new one."""
    text = "" if given is None else given.decode("latin-1")
    return text if GOOD_ID.fullmatch(text) else f"req_{secrets.token_hex(12)}"


def report_of(request: Request) -> Report:
    """The report of a request, which the outermost layer has made."""
    report = request.scope["mkref.report"]
    assert isinstance(report, Report)
    return report
