"""The README's tables of speed, from records that are made up."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import fill_tables
import pytest

MADE = {
    "gpu": "a GPU",
    "date": "2030-01-02T03:04:05+00:00",
    "commit": "0123456789",
    "datasheet_bytes_per_s": 4.814e12,
    "measured_bytes_per_s": 4.6e12,
    "cold_start_s": {"since_process_start": 12.3},
}


def decode_row(batch: int, kind: str, tokens: int) -> dict[str, Any]:
    """A row as `mkref bench decode` writes it, as far as the table needs it."""
    return {
        "batch": batch, "context": 8192, "kind": kind, "ms_per_step": 1.7234, "spread_ms": 0.01,
        "tokens_per_s": 580.2, "bytes": 7_130_000_000, "share_of_datasheet_bound": 0.861,
        "share_of_measured_bandwidth": 0.9, "tokens_per_step": tokens,
        "device_bytes": 65_500_000_000, "weights_bytes": 61_000_000_000,
        "kv_bytes": 4_000_000_000,
    }  # fmt: skip


def ladder_row(rung: str, batch: int, ms: float, best: bool) -> dict[str, Any]:
    """A row as `mkref bench ladder` writes it."""
    return {"rung": rung, "batch": batch, "ms_per_step": ms, "best": best}


@pytest.fixture(name="results")
def results_fixture(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Records of decode steps, in another place than the real ones."""
    monkeypatch.setattr(fill_tables, "RESULTS", tmp_path)
    (tmp_path / "h200").mkdir()
    rows = [decode_row(1, "even", 1), decode_row(4, "ragged", 4), decode_row(1, "prompt", 16)]
    record = {"provenance": MADE, "rows": rows}
    (tmp_path / "h200" / "decode.json").write_text(json.dumps(record))
    return tmp_path


def test_decode_table(results: Path) -> None:
    """One line per row, in the order of the record, each number with its unit's digits."""
    more = {"provenance": MADE, "rows": [{**decode_row(1, "even", 1), "context": 1024}]}
    (results / "h200" / "contexts.json").write_text(json.dumps(more))
    text = "\n".join(fill_tables.decode())
    numbers = "1.723 | 0.010 | 580 | 7.13 | 86.1% | 90.0% | 0.50 |"
    assert text.splitlines()[-4:] == [
        f"| 8,192 | 1 | {numbers}",
        f"| 8,192 | 4 ragged | {numbers}",
        f"| 8,192 | 16 of a prompt | {numbers}",
        f"| 1,024 | 1 | {numbers}",
    ]
    assert "a GPU, 2030-01-02, commit 0123456" in text
    assert "bytes / 4.814 TB/s" in text
    assert "12 s after the process was started" in text


def test_ladder_table_shows_the_best_of_each_letter(results: Path) -> None:
    """Below the decode table, once there is a record; a rung without a result is named."""
    rows = [ladder_row(letter, 1, 2.0, True) for letter in "abdefgh"]
    rows += [ladder_row("c", 1, 3.0, False), ladder_row("c", 1, 1.9, True)]
    rows += [ladder_row(letter, 8, 9.0, True) for letter in "abdefgh"]
    rows += [{"rung": "c", "batch": 8, "error": "failed"}]
    older = "It is of an earlier kernel than the table above."
    for kernel, says in (({}, False), ({"kernel": "another"}, True)):
        record = {"provenance": {**MADE, **kernel}, "rows": rows}
        (results / "h200" / "ladder.json").write_text(json.dumps(record))
        lines = fill_tables.decode()
        assert says == (older in "\n".join(lines))
    assert lines[-8:][0].startswith("| a | one launch per operation | 2.000 | 9.000 |")
    assert "| c | graph and programmatic dependent launch | 1.900 | failed |" in lines


def test_serving_tables(results: Path) -> None:
    """A line per number of clients, both draws beside the bare step; a line per way of a prompt."""
    shared = {"concurrency": 2, "bare_ms": 2.5, "itl_ms": {"p50": 2.52, "p99": 4.27}}
    plain = {"draw": "greedy", "steady_ms": 2.525, "over_bare": 0.01, "tokens_per_s": 740.2}
    usual = {"draw": "default", "steady_ms": 2.6, "over_bare": 0.04, "tokens_per_s": 725.4}
    served = {"read_through": "http", "rows": [{**shared, **plain}, {**shared, **usual}]}
    rows = [
        {"part": "kernel", "prompt": 2048, "rows": 7, "tokens_per_s": 997.0},
        {"part": "torch", "prompt": 2048, "chunk": 512, "tokens_per_s": 5512.0},
        {"part": "latency", "chunk": "7 rows", "ms_median": 8.64},
        {"part": "latency", "chunk": "no prompt", "ms_median": 2.0},
    ]
    for name, record in (("serve", served), ("prefill", {"rows": rows})):
        (results / "h200" / f"{name}.json").write_text(json.dumps({"provenance": MADE, **record}))
    lines = fill_tables.served()
    assert "| 2 | 2.500 | 2.525 | +1.0% | 2.52 | 4.27 | 740 | 2.600 | +4.0% | 725 |" in lines
    assert "| kernel, 7 rows of a step | 997 | 8.6 |" in lines
    assert "| PyTorch, chunks of 512 | 5,512 |  |" in lines
    assert any("read over HTTP" in line for line in lines)


def test_missing_record_is_told(results: Path) -> None:
    """Which file, and how it is made."""
    (results / "h200" / "decode.json").unlink()
    with pytest.raises(SystemExit, match="the record bench/results/h200/full_geometry.json is"):
        fill_tables.decode()
