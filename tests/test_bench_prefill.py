"""`bench/prefill.py`: all of its parts on a CPU with a tiny model; the numbers that it derives."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bench.prefill import Record, kernel_case, main
from bench.prefill_desk import RUNNING, Desk, page_tables
from mkref.errors import MachineError
from mkref.machine.interpreter import InterpreterMachine
from tests.decode import small_config
from tests.engines import save_tiny, tiny_model


@pytest.fixture(name="record", scope="module")
def record_fixture(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The record of a tiny model through the compiled kernel."""
    folder = save_tiny(tmp_path_factory.mktemp("tiny"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OUT", str(folder))
        options = ["--prompts", "120,200", "--chunks", "64,128", "--machine", "host"]
        assert 0 == main([*options, "--geometry", str(folder)])
    return json.loads((folder / "prefill.json").read_text())


def test_every_part_has_its_rows(record: dict[str, Any]) -> None:
    """Both ways, all prompts and chunks; nothing failed."""
    assert [] == record["errors"]
    assert record["provenance"]["commit"]
    rows: dict[str, list[dict[str, Any]]] = {}
    for row in record["rows"]:
        rows.setdefault(row["part"], []).append(row)
    assert [(120, 8), (120, 7), (200, 8), (200, 7)] == [
        (row["prompt"], row["rows"]) for row in rows["kernel"]
    ]
    assert [(64, 120), (64, 200), (128, 120), (128, 200)] == [
        (row["chunk"], row["prompt"]) for row in rows["torch"]
    ]
    assert ["7 rows", "no prompt", 64, 128] == [row["chunk"] for row in rows["latency"]]
    assert [64, 128] == [row["chunk"] for row in rows["memory"]]
    assert (1, 1) == (len(rows["parts"]), len(rows["distance"]))
    for row in rows["torch"]:
        assert -(-row["prompt"] // row["chunk"]) == len(row["ms_per_chunk"])
        # Seconds are kept to 0.1 ms, and a tiny prompt takes few of those.
        assert row["seconds"] == pytest.approx(row["prompt"] / row["tokens_per_s"], abs=1e-4)


def test_the_two_ways_are_close(record: dict[str, Any]) -> None:
    """The comparison compares the same tokens: a tiny model's caches are as close as in
    test_engine_prefill.
    """
    (row,) = (row for row in record["rows"] if row["part"] == "distance")
    assert 128 == row["tokens"]
    assert max(row["cache_rms_by_layer"]) < 0.02
    assert row["logits_rms"] < 0.02


def test_page_tables_keep_a_window_and_a_chunk() -> None:
    """Within a window and a chunk after it no page comes twice; sequences share none."""
    tables, (full, sliding) = page_tables(small_config(sliding_window=200), [2000, 300], 500)
    assert [list(range(32)), list(range(32, 37))] == [table[0].tolist() for table in tables]
    assert (37, 18) == (full, sliding)
    need = -(-(200 + 500) // 64) + 2
    for begin in range(32 - need + 1):
        assert need == len({*tables[0][1, begin : begin + need].tolist()})
    assert not {*tables[0][1].tolist()} & {*tables[1][1].tolist()}


def test_long_prompts_are_sampled(monkeypatch: pytest.MonkeyPatch) -> None:
    """Groups of steps from the first to the last, and the time of all of them follows."""
    _, weights = tiny_model()
    desk = Desk(InterpreterMachine(), weights, 200, 64, 1)
    begins: list[int] = []
    monkeypatch.setattr(Desk, "prompt_step", lambda self, begin, rows: begins.append(begin))
    monkeypatch.setattr("bench.prefill.ALL_STEPS", 20)
    monkeypatch.setattr("bench.prefill.GROUPS", 3)
    monkeypatch.setattr("bench.prefill.GROUP_STEPS", 2)
    row = kernel_case(desk, 192, 8)
    assert [0, 8, 88, 96, 176, 184] == begins[8:]
    assert (24, 6) == (row["steps"], row["steps_timed"])
    assert row["tokens_per_s"] == pytest.approx(8e3 / row["ms_per_step"], rel=0.2)


def test_the_running_row_begins_again() -> None:
    """It never leaves its pages, and goes along where a step has a row to spare."""
    _, weights = tiny_model()
    desk = Desk(InterpreterMachine(), weights, 200, 64, 1)
    begin, end = desk._range
    desk._at = end - 1
    desk.decode_step()
    assert begin == desk._at
    desk.prompt_step(0, 7)
    assert begin + 1 == desk._at
    desk.prompt_step(0, 8)
    assert begin + 1 == desk._at
    positions = desk.machine.read("positions")
    assert np.arange(8).tolist() == positions.tolist()
    assert desk.tables[RUNNING].shape[1] == 8


def test_a_part_that_fails_is_recorded(tmp_path: Path) -> None:
    """Its error is a line of the record, and the next part runs; after the time is up none does."""

    def broken() -> dict[str, Any]:
        raise MachineError("no such thing")

    record = Record(tmp_path, 60)
    record.add("first", broken)
    record.add("second", lambda: {"value": 1})
    record.end = 0
    record.add("third", lambda: {"value": 1})
    content = json.loads((tmp_path / "prefill.json").read_text())
    assert [{"part": "second", "value": 1}] == content["rows"]
    assert [
        {"part": "first", "error": "MachineError: no such thing"},
        {"part": "third", "error": "no time left"},
    ] == content["errors"]
