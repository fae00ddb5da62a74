"""Metrics as Prometheus reads them (text format 0.0.4).

Two sources: what the HTTP side counts here, and what the service counts anyway. A library would
bring a registry of its own, a global one by default; the format is a few lines.

What it does not do: measure (`mkref.serve.observe`, `mkref.engine.counters`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

from mkref.engine.counters import WAIT_S, Histogram

if TYPE_CHECKING:
    from mkref.serve.running import Slots
    from mkref.serve.service import Stats

__all__ = ["CONTENT_TYPE", "HttpMetrics", "render"]

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
Labels = Mapping[str, str]


class HttpMetrics:
    """What the HTTP side counts.

    Attributes:
        requests: ended requests by path, method and status.
        seconds: how long they took, by path.
        in_flight: requests under way.
    """

    def __init__(self) -> None:
        self.requests: Counter[tuple[str, str, int]] = Counter()
        self.seconds: dict[str, Histogram] = {}
        self.in_flight = 0

    def note(self, path: str, method: str, status: int, seconds: float) -> None:
        """Count a request that has ended; `path` is one of ours, so that there are few."""
        self.requests[path, method, status] += 1
        self.seconds.setdefault(path, Histogram(WAIT_S)).add(seconds)


class _Text:
    """Collects lines."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    def family(self, name: str, kind: str, meaning: str) -> None:
        self.lines += [f"# HELP {name} {meaning}", f"# TYPE {name} {kind}"]

    def sample(self, name: str, value: float, labels: Labels | None = None) -> None:
        self.lines.append(f"{name}{_labels(labels or {})} {_number(value)}")

    def one(self, name: str, kind: str, meaning: str, value: float) -> None:
        self.family(name, kind, meaning)
        self.sample(name, value)

    def many(
        self, name: str, kind: str, meaning: str, samples: Iterable[tuple[Labels, float]]
    ) -> None:
        self.family(name, kind, meaning)
        for labels, value in samples:
            self.sample(name, value, labels)

    def histogram(
        self, name: str, meaning: str, samples: Iterable[tuple[Labels, Histogram]]
    ) -> None:
        self.family(name, "histogram", meaning)
        for labels, histogram in samples:
            below = 0
            for bound, count in zip((*histogram.bounds, None), histogram.counts, strict=True):
                below += count
                edge = "+Inf" if bound is None else _number(bound)
                self.sample(f"{name}_bucket", below, {**labels, "le": edge})
            self.sample(f"{name}_sum", histogram.total, labels)
            self.sample(f"{name}_count", below, labels)


def _labels(labels: Labels) -> str:
    if not labels:
        return ""
    escaped = (
        (name, value.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n"))
        for name, value in labels.items()
    )
    return "{" + ",".join(f'{name}="{value}"' for name, value in escaped) + "}"


def _number(value: float) -> str:
    return str(int(value)) if float(value).is_integer() else repr(float(value))


def render(http: HttpMetrics, slots: Slots, stats: Stats) -> str:
    """Everything, as text."""
    text = _Text()
    text.many(
        "mkref_http_requests_total", "counter", "HTTP requests that have ended.",
        [
            ({"path": path, "method": method, "status": str(status)}, count)
            for (path, method, status), count in sorted(http.requests.items())
        ],
    )  # fmt: skip
    text.histogram(
        "mkref_http_request_seconds", "Time of HTTP requests, streams to their last byte.",
        [({"path": path}, histogram) for path, histogram in sorted(http.seconds.items())],
    )  # fmt: skip
    text.one("mkref_http_in_flight", "gauge", "HTTP requests under way.", http.in_flight)
    text.one("mkref_answers_in_flight", "gauge", "Answers under way or waiting.", slots.taken)
    _engine(text, stats)
    _cache(text, stats)
    return "\n".join(text.lines) + "\n"


def _engine(text: _Text, stats: Stats) -> None:
    gauges = {
        "running": (stats.running, "Requests that have rows of a step."),
        "waiting": (stats.waiting, "Requests that wait."),
        "healthy": (stats.healthy, "0 if the machine failed again and again."),
        "accepting": (stats.accepting, "0 if the server is going down."),
    }
    for name, (value, meaning) in gauges.items():
        text.one(f"mkref_{name}", "gauge", meaning, value)
    counters = {
        "rejected": (stats.rejected, "Requests refused because too many waited."),
        "steps": (stats.steps, "Steps of the kernel."),
        "launches": (stats.launches, "Launches of the kernel."),
        "prefill_chunks": (stats.chunks, "Pieces of prompts that went in beside the kernel."),
        "prompt_tokens": (stats.prompt_tokens, "Tokens of prompts."),
        "cached_prompt_tokens": (stats.cached_tokens, "Those of them that were in the cache."),
        "fed_tokens": (stats.fed_tokens, "Tokens fed, also again after a preemption."),
        "completion_tokens": (stats.completion_tokens, "Tokens generated."),
        "preemptions": (stats.preemptions, "Times that a request lost its pages."),
        "failures": (stats.failures, "Launches that failed."),
    }
    for name, (value, meaning) in counters.items():
        text.one(f"mkref_{name}_total", "counter", meaning, value)
    text.many(
        "mkref_finished_total", "counter", "Answers that have ended, by reason.",
        [({"reason": reason}, count) for reason, count in sorted(stats.finished.items())],
    )  # fmt: skip
    histograms = {
        "queue_seconds": (stats.queue_s, "From submission to the first step."),
        "time_to_first_token_seconds": (stats.ttft_s, "From submission to the first token."),
        "inter_token_seconds": (stats.itl_s, "From token to token."),
        "answer_seconds": (stats.e2e_s, "From submission to the end."),
    }
    for name, (histogram, meaning) in histograms.items():
        text.histogram(f"mkref_{name}", meaning, [({}, histogram)])


def _cache(text: _Text, stats: Stats) -> None:
    kinds = {"full": stats.kv.full, "sliding": stats.kv.sliding}
    text.many(
        "mkref_kv_pages", "gauge", "Pages of the KV cache by state.",
        [
            ({"kind": kind, "state": state}, getattr(pages, state))
            for kind, pages in kinds.items()
            for state in ("free", "cached", "used")
        ],
    )  # fmt: skip
    text.many(
        "mkref_kv_evictions_total", "counter", "Cached pages that were given away.",
        [({"kind": kind}, pages.evictions) for kind, pages in kinds.items()],
    )  # fmt: skip
    text.one("mkref_prefix_queries_total", "counter", "Tokens looked up.", stats.kv.queries)
    text.one("mkref_prefix_hits_total", "counter", "Those of them found.", stats.kv.hits)
