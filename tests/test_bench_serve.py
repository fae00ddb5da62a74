"""Load on a server: `mkref bench serve` against a real one, `bench/serve_north.py`, the numbers."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from bench.serve_north import main as serve_north
from bench.serve_north import steady_ms
from mkref.cli import main
from mkref.measure.load import Job, Sample, jobs, run_load, summary
from tests.engines import save_tiny
from tests.serve_live import live


@pytest.mark.parametrize("more", [["--concurrency", "1,3"], ["--rate", "50,90"]])
def test_against_a_server(more: list[str], tmp_path: Path) -> None:
    """Both kinds of load, token ids of exact lengths; the key is not in the record."""
    target = tmp_path / "serve.json"
    with live(api_key="secret-key") as server:
        command = ["bench", "serve", "--url", server.url, "--requests", "4", *more]
        command += ["--prompt-tokens", "3-9", "--max-tokens", "5", "--token-ids", "2000"]
        command += ["--ignore-eos", "--json", str(target)]
        assert 0 == main([*command, "--api-key", "secret-key"])
        with_wrong_key = main([*command, "--api-key", "wrong"])
    record = json.loads(target.read_text())
    assert 2 == with_wrong_key
    assert "secret-key" not in target.read_text()
    assert 2 == len(record["rows"])
    for row in record["rows"]:
        assert (4, 0, 20) == (row["requests"], row["failed"], row["completion_tokens"])
        assert 12 <= row["prompt_tokens"] <= 36
        assert row["itl_ms"]["p50"] <= row["itl_ms"]["p99"] <= row["e2e_ms"]["p99"]


@pytest.mark.parametrize("more", [[], ["--direct"]])
def test_serve_north(more: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Over HTTP and without it, with a tiny model: every case has its bare step."""
    folder = save_tiny(tmp_path, tokenizer=False)
    monkeypatch.setenv("OUT", str(tmp_path))
    options = ["--geometry", str(folder), "--machine", "host", "--n-sm", "1", "--tokens", "12"]
    assert 0 == serve_north([*options, "--prompts", "4-20", "--concurrency", "1,3", *more])
    record = json.loads((tmp_path / "serve.json").read_text())
    assert ("service" if more else "http") == record["read_through"]
    assert 4 == len(record["rows"])
    for row in record["rows"]:
        assert row["completion_tokens"] == 12 * row["concurrency"]
        assert row["bare_ms"] > 0


def test_a_failure_counts_and_does_not_end_the_load() -> None:
    """Other requests are measured on; the failed one is in no percentile."""

    async def target(job: Job, sample: Sample) -> AsyncIterator[int]:
        if job.number == 1:
            raise ValueError("no")
        for _ in range(job.max_tokens):
            sample.n_tokens += 1
            yield 1

    samples, seconds = asyncio.run(run_load(target, jobs(3, (4, 4), (2, 2)), 2))
    row = summary(samples, seconds)
    assert (3, 1, ["ValueError: no"]) == (row["requests"], row["failed"], row["errors"])
    assert (8, 4) == (row["prompt_tokens"], row["completion_tokens"])


def test_lengths_and_arrivals() -> None:
    """In range, ragged, repeatable; arrivals at the mean rate."""
    load = jobs(4000, (10, 100), (5, 9), rate=50, seed=3)
    assert load == jobs(4000, (10, 100), (5, 9), rate=50, seed=3)
    assert {5, 6, 7, 8, 9} == {job.max_tokens for job in load}
    assert {10, 100} <= {job.prompt_tokens for job in load} <= set(range(10, 101))
    assert load[-1].at == pytest.approx(80, rel=0.1)


def test_steady_time_is_that_of_all_together() -> None:
    """What one client does alone does not count; two tokens at a time count twice."""
    early = Sample(0, n_tokens=6, times=[0.0, 9.0, 10.0, 11.0, 12.0, 13.0])
    pairs = Sample(0, n_tokens=6, times=[10.0, 12.0, 14.0])
    assert steady_ms([early, pairs]) == pytest.approx(1000)
