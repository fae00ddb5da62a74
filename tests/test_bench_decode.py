"""`mkref bench decode`: what is counted, what is written, what is refused."""

from __future__ import annotations

import argparse
import json
from typing import Any

import numpy as np
import pytest

from mkref.cli import main
from mkref.config import NORTH_MINI_CODE
from mkref.errors import RequestError
from mkref.machine.base import StepInputs
from mkref.machine.interpreter import InterpreterMachine
from mkref.machine.nvrtc import compile_cubin
from mkref.measure.bandwidth import READ_SOURCE
from mkref.measure.bytes import clear_experts, distinct_experts, step_bytes
from mkref.measure.decode import Case, Ceiling, load, measure, rows_for
from mkref.measure.pages import page_table
from mkref.measure.record import process_age_s
from mkref.plan.runtime import find_experts
from tests.decode import small_config, small_model
from tests.engines import save_tiny

NEEDED = {
    "batch", "context", "ms_per_step", "spread_ms", "tokens_per_s", "bytes",
    "share_of_datasheet_bound", "share_of_measured_bandwidth",
}  # fmt: skip


@pytest.fixture(name="record", scope="module")
def record_fixture(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The record of a tiny model on the CPU, all kinds of cases."""
    folder = save_tiny(tmp_path_factory.mktemp("tiny"))
    target = folder / "decode.json"
    options = ["--machine", "host", "--sms", "2", "--context", "40", "--steps", "12"]
    options += ["--batch", "1,3", "--ragged", "--prompt", "10", "--json", str(target)]
    assert 0 == main(["bench", "decode", "--geometry", str(folder), *options])
    return json.loads(target.read_text())


def test_record_has_its_form(record: dict[str, Any]) -> None:
    """Provenance and rows, and nothing else; every row has what the README's table needs."""
    assert ["provenance", "rows"] == list(record)
    kinds = [(r["batch"], r["kind"], r["tokens_per_step"], r["plan_rows"]) for r in record["rows"]]
    assert [
        (1, "even", 1, 8), (3, "even", 3, 8), (3, "ragged", 3, 8), (1, "prompt", 10, 16),
    ] == kinds  # fmt: skip
    for row in record["rows"]:
        assert set() == NEEDED - row.keys()
        assert row["tokens_per_s"] == pytest.approx(
            row["tokens_per_step"] * 1e3 / row["ms_per_step"], rel=1e-4, abs=0.006
        )
        assert min(row["samples_ms"]) <= row["ms_per_step"] <= max(row["samples_ms"])
        assert row["steps"] >= 12
        assert row["share_of_datasheet_bound"] is None  # a CPU has no data sheet here
    assert [10, 40, 70] == record["rows"][2]["lengths"]


def test_record_says_where_it_is_from(record: dict[str, Any]) -> None:
    """Machine, sources, date, command; the cold start."""
    made = record["provenance"]
    assert ("host", "none", 2) == (made["machine"], made["gpu"], made["n_sm"])
    for name in ("commit", "date", "command", "kernel", "python", "numpy"):
        assert made[name]
    cold = made["cold_start_s"]
    assert {"weights", "build_and_load", "first_token", "since_process_start"} <= cold.keys()


def test_experts_are_those_that_were_hit() -> None:
    """Against the router logits that each step leaves behind for its last layer."""
    config, weights = small_model(num_hidden_layers=2)
    machine = InterpreterMachine()
    table = load(machine, weights, case := Case(4, 70), 2)
    tokens, found = np.array([5, 6, 7, 8], np.int32), []
    clear_experts(machine)
    for position in (60, 61, 62):
        at = np.full(case.batch, position, np.int32)
        tokens = machine.step(StepInputs(tokens, at, table))
        logits = machine.read("router_logits")[:4].astype(np.uint32).view(np.float32)
        found.append(len(find_experts(1, logits, config).experts))
    assert sum(found) / 3 == distinct_experts(machine, 3)
    assert 3 <= min(found) <= max(found) <= 12
    machine.close()


def test_bytes_of_the_full_geometry() -> None:
    """Batch 1 at 8K with 8 experts: 7.13 GB; weights once, keys and values per row."""
    one = step_bytes(NORTH_MINI_CODE, 8, [8191])
    assert 7.13e9 == pytest.approx(one, rel=1e-3)
    both = step_bytes(NORTH_MINI_CODE, 8, [8191, 8191])
    assert NORTH_MINI_CODE.kv_bytes(8192) == both - one


def test_shares_are_of_the_bytes() -> None:
    """Bytes / bandwidth / time."""
    _, weights = small_model(num_hidden_layers=2)
    machine = InterpreterMachine()
    case = Case(1, 12)
    table = load(machine, weights, case, 1)
    row = measure(machine, case, table, 4, Ceiling(1e9, 5e8))
    want = row["bytes"] / 1e9 / (row["ms_per_step"] / 1e3)
    assert want == pytest.approx(row["share_of_datasheet_bound"], abs=1e-4)
    assert 2 * want == pytest.approx(row["share_of_measured_bandwidth"], abs=2e-4)
    machine.close()


@pytest.mark.parametrize("batch", [2, 3, 8])
def test_ragged_rows_have_the_mean_length(batch: int) -> None:
    """A quarter to seven quarters of the context, evenly."""
    lengths = Case(batch, 8192, "ragged").lengths()
    assert (2048, 14336) == (lengths[0], lengths[-1])
    assert 8192 == pytest.approx(np.mean(lengths), abs=1)


def test_page_table_has_room_for_the_window() -> None:
    """No page is of two rows, and none comes again within the window and a launch of 32 steps."""
    config = small_config(sliding_window=200)
    table, (full, sliding) = page_table(config, [1000, 300])
    assert [list(range(16)), list(range(16, 21))] == [row[row >= 0].tolist() for row in table[0]]
    assert (21, 14) == (full, sliding)
    need = -(-(200 + 32) // 64) + 1
    for row in table[1]:
        pages = row[row >= 0]
        for begin in range(len(pages)):
            window = pages[begin : begin + need]
            assert len(window) == len(set(window.tolist()))


def test_rows_of_the_plan() -> None:
    """The smallest that serves the batch, and at least as many as asked for."""
    assert [8, 16, 32, 32] == [rows_for(8), rows_for(9), rows_for(32), rows_for(2, 32)]


def test_process_has_an_age() -> None:
    """More than nothing, less than a day."""
    age = process_age_s()
    assert age is None or 0 < age < 86400


def test_the_bandwidth_test_compiles() -> None:
    """For the architecture that has bulk copies."""
    image, _ = compile_cubin(READ_SOURCE, "sm_90a")
    assert image[:4] == b"\x7fELF"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--batch", "33"], "--batch: 33 rows; a step takes at most 32"),
        (["--batch", "1,x"], "'x'; must be a whole number of at least 1"),
        (["--context", "9000000"], "--context: 9000000 tokens; the model has"),
        (["--json", "/no/such/folder/x.json"], "--json: '/no/such/folder/x.json'; must be a file"),
        (["--machine", "torch"], "--machine: 'torch' runs no plan"),
        (["--prompt", "80", "--context", "64"], "--prompt: 80 tokens do not fit into 64"),
        (["--geometry", "nowhere"], "'nowhere' is neither a folder nor a model"),
    ],
)
def test_mistakes_are_told(
    options: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """One line, before anything is measured."""
    arguments = ["bench", "decode", "--geometry", "nano", "--context", "64", *options]
    assert 2 == main(arguments)
    assert message in capsys.readouterr().err


def test_default_context_fits_the_model(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Who gives no --context measures at 8192 tokens, or at as many as the model has room for."""
    seen: list[int] = []

    def begin(*_: object) -> None:
        raise RequestError("that far")

    def cases(options: argparse.Namespace) -> list[object]:
        seen.extend(options.context)
        return []

    monkeypatch.setattr("mkref.measure.session.Session.begin", begin)
    monkeypatch.setattr("mkref.cli.bench._cases", cases)
    for geometry in ("nano", "north"):
        assert 2 == main(["bench", "decode", "--geometry", geometry])
        assert "mkref: that far\n" == capsys.readouterr().err
    assert [2048, 8192] == seen


def test_ladder_needs_a_gpu(capsys: pytest.CaptureFixture[str]) -> None:
    """Says so, or what is wrong with its options."""
    assert 2 == main(["bench", "ladder", "--only", "a,z"])
    assert "--only: z; the rungs are a to h" in capsys.readouterr().err
    assert 2 == main(["bench", "ladder", "--batch", "9"])
    assert "--batch: 9 rows; the ladder takes 1 to 8" in capsys.readouterr().err
