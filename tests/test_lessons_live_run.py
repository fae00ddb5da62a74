"""The programs that measure for the lessons, on this CPU instead of a GPU."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mkref.errors import MachineError
from mkref.lessons import live_run
from mkref.machine import create
from mkref.measure.decode import Case, load
from mkref.paths import models_root
from mkref.weights.checkpoint import load_checkpoint


@pytest.mark.parametrize("what", ["trace", "draw"])
def test_programs_measure_on_a_cpu(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same functions, with the small model on this computer: all numbers are there."""
    monkeypatch.setattr(live_run, "STEPS", 2)
    monkeypatch.setattr(live_run, "TURNS", 2)
    monkeypatch.setattr(live_run, "WARM_UP", 1)
    machine: Any = create("host", n_sm=2, trace=what == "trace")
    weights = load_checkpoint(models_root() / "nano")
    table = load(machine, weights, Case(1, 64), 2)
    made = (live_run.trace_rows if what == "trace" else live_run.draw_rows)(machine, 64, table)
    machine.close()
    if what == "trace":
        assert {"ATTENTION", "MERGE", "ROUTER", "GATE_UP", "DOWN"} <= made[0]["ops"].keys()
        parts = [part for op in made[0]["ops"].values() for part in op.values()]
        assert 0 < sum(parts) <= 1.05 * made[0]["span_us"] * 2
    else:
        assert ["kernel", "sampler", "sampler, top_p 0.95"] == [row["name"] for row in made]
        assert all(np.isfinite(row["ms_per_step"]) for row in made)


def test_program_without_a_gpu_is_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: Any, tmp_path: Path
) -> None:
    """Its word becomes that of the lesson."""
    monkeypatch.setattr("mkref.machine.cuda.import_cupy", _no_cupy)
    target = str(tmp_path / "x.json")
    status = live_run.main(["read", "--geometry", "nano", "--context", "64", "--json", target])
    assert (1, "cuda: none here\n") == (status, capsys.readouterr().err)


def _no_cupy() -> Any:
    raise MachineError("cuda: none here\nand more")
