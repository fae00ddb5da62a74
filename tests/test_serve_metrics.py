"""Metrics that Prometheus' own parser reads, log lines for programs, the API's own schema."""

from __future__ import annotations

import asyncio
import io
import json
import logging
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from mkref.errors import MkrefError
from mkref.serve.app import require
from mkref.serve.logs import JsonFormatter, configure_logs
from mkref.serve.metrics import _labels
from tests.serve_fakes import FakeService, client

CHAT = "/v1/chat/completions"
HI = {"messages": [{"role": "user", "content": "a secret word"}]}


def observed(*requests: tuple[str, Any, dict[str, str]]) -> tuple[dict[str, Any], list[Any]]:
    """The metric families after some POSTs, and the log lines."""
    stream = io.StringIO()
    handler = configure_logs(stream)
    try:

        async def run() -> str:
            async with client(FakeService(), api_key="k") as made:
                for path, body, headers in requests:
                    await made.post(path, json=body, headers=headers)
                return (await made.get("/metrics")).text

        families = {f.name: f for f in text_string_to_metric_families(asyncio.run(run()))}
    finally:
        logging.getLogger("mkref.serve").handlers.remove(handler)
        logging.getLogger("uvicorn").handlers.remove(handler)
    return families, [json.loads(line) for line in stream.getvalue().splitlines()]


KEY = {"authorization": "Bearer k"}


def test_metrics() -> None:
    """Counts by path, method and status; unknown paths are one; the engine's own numbers."""
    families, _ = observed(
        (CHAT, HI, KEY), (CHAT, HI, KEY), (CHAT, {}, KEY), (CHAT, HI, {}), ("/nowhere/é", {}, KEY)
    )
    counted = {
        (s.labels["path"], s.labels["status"]): s.value
        for s in families["mkref_http_requests"].samples
    }
    assert {(CHAT, "200"): 2, (CHAT, "400"): 1, (CHAT, "401"): 1, ("other", "404"): 1} == counted
    values = {s.name: s.value for f in families.values() for s in f.samples if not s.labels}
    assert (1, 2, 7) == (
        values["mkref_running"],
        values["mkref_waiting"],
        values["mkref_steps_total"],
    )
    assert (0, 1) == (values["mkref_answers_in_flight"], values["mkref_http_in_flight"])
    pages = {
        (s.labels["kind"], s.labels["state"]): s.value for s in families["mkref_kv_pages"].samples
    }
    assert {(k, s): n for k in ("full", "sliding") for s, n in
            (("free", 5), ("cached", 2), ("used", 1))} == pages  # fmt: skip
    assert all(family.documentation for family in families.values())


def test_histograms_are_cumulative() -> None:
    """Each bucket counts what is at most its bound; the last is all."""
    families, _ = observed((CHAT, HI, KEY))
    samples = families["mkref_queue_seconds"].samples
    buckets = [(s.labels["le"], s.value) for s in samples if s.name.endswith("_bucket")]
    assert [("0.005", 0), ("0.01", 0), ("0.02", 1)] == buckets[:3]
    assert ("+Inf", 1) == buckets[-1]
    assert sorted(value for _, value in buckets) == [value for _, value in buckets]
    assert {"mkref_queue_seconds_sum": 0.015, "mkref_queue_seconds_count": 1} == {
        s.name: s.value for s in samples if not s.labels
    }


def test_labels_are_escaped() -> None:
    """A value with quotes, backslashes or line ends stays one value."""
    text = f"x{_labels({'a': chr(34) + chr(92) + chr(10)})} 1\n"
    (family,) = text_string_to_metric_families(text)
    assert {"a": '"\\\n'} == family.samples[0].labels


def test_log_lines() -> None:
    """One line a request: who, what, how long, how many tokens; no text and no key."""
    _, lines = observed((CHAT, HI, {**KEY, "x-request-id": "r1"}), (CHAT, {}, {}))
    first, second = (line for line in lines if line["event"] == "request")
    assert ("POST", CHAT, 200, "r1", False) == (
        first["method"], first["path"], first["status"], first["request_id"], first["stream"]
    )  # fmt: skip
    assert (["stop"], "info") == (first["finish_reasons"], first["level"])
    assert first["completion_tokens"] > 0
    assert first["ms"] >= 0
    assert 401 == second["status"]
    assert not any("secret" in json.dumps(line) or "Bearer" in json.dumps(line) for line in lines)


def test_unexpected_errors_are_logged() -> None:
    """A bug's traceback goes to the log, with the request's id; the client learns nothing of it."""
    stream = io.StringIO()
    handler = configure_logs(stream)
    service = FakeService()
    service.error = ZeroDivisionError("deep inside")

    async def run() -> tuple[int, str]:
        async with client(service) as made:
            response = await made.post(CHAT, json=HI, headers={"x-request-id": "r7"})
            return response.status_code, response.text

    status, text = asyncio.run(run())
    logging.getLogger("mkref.serve").handlers.remove(handler)
    logging.getLogger("uvicorn").handlers.remove(handler)
    line = next(json.loads(each) for each in stream.getvalue().splitlines() if "unexpected" in each)
    assert (500, "r7", "error") == (status, line["request_id"], line["level"])
    assert "deep inside" in line["traceback"]
    assert "deep inside" not in text


def test_a_line_is_a_line() -> None:
    """Line ends in a message do not end the line."""
    record = logging.LogRecord("uvicorn.error", logging.INFO, "", 0, "a\nb %s", ("c\n",), None)
    line = JsonFormatter().format(record)
    assert "\n" not in line
    assert "a\nb c\n" == json.loads(line)["event"]
    assert "uvicorn.error" == json.loads(line)["logger"]


def test_openapi() -> None:
    """The schema of every endpoint is there, and refers to nothing outside of itself."""

    async def run() -> Any:
        async with client() as made:
            return (await made.get("/openapi.json")).json()

    described = asyncio.run(run())
    paths = described["paths"]
    assert {"/v1/chat/completions", "/v1/completions", "/v1/models", "/v1/models/{model_id}",
            "/health", "/metrics"} == paths.keys()  # fmt: skip
    body = paths[CHAT]["post"]["requestBody"]["content"]["application/json"]["schema"]
    assert "$ref" not in json.dumps(body)
    assert ["messages"] == body["required"]
    assert {"400", "401", "429", "503"} <= paths[CHAT]["post"]["responses"].keys()


def test_missing_packages(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the extra there is one line that says how to get it."""

    def absent(name: str) -> Any:
        raise ImportError(name)

    monkeypatch.setattr("mkref.serve.app.importlib.import_module", absent)
    with pytest.raises(MkrefError, match=r'serve: not installed: fastapi, .*"mkref\[serve\]"'):
        require()
