"""Tokens of a request as OpenAI's `usage` counts them.

What it does not do: count; answers say what they took.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mkref.serve.report import Report
    from mkref.serve.service import Event

__all__ = ["UsageSum"]


class UsageSum:
    """Sums over the answers of a request. A prompt counts once, however many answers it gets.

    Args:
        n: answers of each prompt.
        n_answers: all answers.
    """

    def __init__(self, n: int, n_answers: int) -> None:
        self._n = n
        self._prompt = [0] * n_answers
        self._cached = [0] * n_answers
        self._completion = [0] * n_answers
        self._reasoning = [0] * n_answers

    def note(self, index: int, event: Event, completion: int, reasoning: int = 0) -> None:
        """What an answer has taken so far."""
        self._prompt[index] = event.usage.prompt
        self._cached[index] = event.usage.cached
        self._completion[index] = completion
        self._reasoning[index] = reasoning

    def body(self, *, chat: bool) -> dict[str, Any]:
        """The JSON object."""
        prompt, completion = sum(self._prompt[:: self._n]), sum(self._completion)
        usage: dict[str, Any] = {
            "prompt_tokens": prompt,
            "completion_tokens": completion,
            "total_tokens": prompt + completion,
            "prompt_tokens_details": {"cached_tokens": sum(self._cached[:: self._n])},
        }
        if chat:
            usage["completion_tokens_details"] = {"reasoning_tokens": sum(self._reasoning)}
        return usage

    def tell(self, report: Report) -> None:
        """Note the sums for the log."""
        report.prompt_tokens = sum(self._prompt[:: self._n])
        report.cached_tokens = sum(self._cached[:: self._n])
        report.completion_tokens = sum(self._completion)
