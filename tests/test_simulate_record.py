"""bench/results/simulator.json says what the simulator says now, and how far it is off."""

from __future__ import annotations

import hashlib
import json
from itertools import pairwise
from typing import Any

import numpy as np
import pytest

from bench.simulator_cases import FITTED_ON, FITTED_VERSION, ROOT, cases
from bench.simulator_direct import OWN, read_trace, shown
from bench.simulator_kernels import KERNELS, PRESENT, VERSION_TWO, Kernel
from bench.validate_simulator import OUT, summary
from mkref.errors import RequestError
from mkref.simulate.costs import FILE, from_dict

RECORD: dict[str, Any] = json.loads(OUT.read_text(encoding="utf-8"))
TABLE: dict[str, Any] = json.loads(FILE.read_text(encoding="utf-8"))
ROWS = {(row["kernel"], row["case"]): row for row in RECORD["cases"]}
AGAIN = (
    ("v2", "decode: batch 1, 8,192 tokens, even"),
    ("v3", "contexts: batch 1, 32,768 tokens, even"),
    ("v4", "decode: batch 1, 8,192 tokens, even"),
    ("v5", "decode: batch 1, 8,192 tokens, even"),
    ("v5", "ladder: batch 1, c graph + PDL, 3 per layer"),
)
"""Cases that are simulated again here: they take about a second each."""
MUCH = ("262,144", "rows", "16 tokens of a prompt", "32 tokens of a prompt")
"""Parts of the names of cases with much context or many rows."""


def test_record_is_of_this_table() -> None:
    """The table has not changed since; run bench/validate_simulator.py if it has."""
    assert hashlib.sha256(FILE.read_bytes()).hexdigest() == RECORD["table_sha256"]
    assert FITTED_ON == RECORD["fitted_on"] == TABLE["fitted_on"]


def test_record_has_every_case() -> None:
    """All measurements, unchanged, with the constants that were fitted to some of them."""
    found = cases()
    assert [(case.version, case.name) for case in found] == list(ROWS)
    assert len(found) == len(ROWS)
    for case in found:
        row = ROWS[case.version, case.name]
        assert case.measured_ms == row["measured_ms"]
        assert (f"fitted: {case.fits}" if case.fits else "held out") == row["role"]
        assert (ROOT / row["file"]).is_file()
    assert {(FITTED_VERSION, name) for name in FITTED_ON.values()} <= ROWS.keys()


@pytest.mark.parametrize("key", AGAIN)
def test_simulator_says_the_same_again(key: tuple[str, str]) -> None:
    """The prediction in the record is that of the code as it is."""
    case = next(case for case in cases() if (case.version, case.name) == key)
    assert ROWS[key]["simulated_ms"] == pytest.approx(case.predict().ms, abs=1e-5)


def test_errors_are_what_they_say() -> None:
    """Errors and their summary follow from measurements and predictions."""
    for row in ROWS.values():
        error = row["simulated_ms"] / row["measured_ms"] - 1
        assert row["error"] == pytest.approx(error, abs=2e-5)
    assert summary(RECORD["cases"]) == RECORD["held_out"]


def test_predictions_are_close() -> None:
    """Steps that no constant was fitted to. Of decode and contexts: within 4 % for version two, to
    whose records some constants are fitted; within 6 % for later kernels, of which only a trace
    shows some times; within 8 % with 256K of context, and with 16 or 32 rows. Chains of launches
    and other orders within 10 %, and beyond that by no more than the samples spread: the host of
    version four's ladder was slow. In the mean within 3.5 %, of decode within 2 %."""
    held_out = [row for row in ROWS.values() if row["role"] == "held out"]
    assert len(held_out) >= 6 * len(FITTED_ON)
    for row in held_out:
        case, spread = row["case"], row["measured_spread_ms"] / row["measured_ms"]
        if case.startswith("ladder"):
            most = 0.10 + spread
        elif any(name in case for name in MUCH):
            most = 0.08
        else:
            most = 0.04 if row["kernel"] == FITTED_VERSION else 0.06
        assert abs(row["error"]) < most, (row["kernel"], case)
    assert RECORD["held_out"]["all"]["mean_abs"] < 0.035
    for kernel in ("v2", "v4", "v5"):
        assert RECORD["held_out"][f"{kernel} decode"]["mean_abs"] < 0.02


def test_fitted_cases_are_met() -> None:
    """What a constant was fitted to comes out within 1 %, but for launches, which share one."""
    for name, case in FITTED_ON.items():
        most = 0.05 if name.startswith("launch.") else 0.01
        assert abs(ROWS[FITTED_VERSION, case]["error"]) < most, case


@pytest.mark.parametrize(
    ("kernel", "batch"),
    [
        *(("v2", 1), ("v2", 8), ("v3", 1), ("v3", 4), ("v3", 8), ("v4", 1), ("v4", 4)),
        *(("v5", 1), ("v5", 4), ("v5", 8)),
    ],
)
def test_order_of_the_ladder_is_the_measured_one(kernel: str, batch: int) -> None:
    """Rungs whose measurements are 8 % apart have the same order in the simulation."""
    start = f"ladder: batch {batch},"
    rungs = [row for (of, name), row in ROWS.items() if of == kernel and name.startswith(start)]
    assert len(rungs) >= 12
    for a in rungs:
        for b in rungs:
            if a["measured_ms"] > 1.08 * b["measured_ms"]:
                assert a["simulated_ms"] > b["simulated_ms"], (a["case"], b["case"])


def test_what_a_change_of_the_kernel_brings() -> None:
    """From each kernel to the next: faster for every number of rows, as measured. The present one
    is so in long rows, in which it merges less: at 8,192 tokens it is as fast as the one before (in
    turns on one board 0.995 to 1.006), which records of two boards cannot tell apart."""
    rows = [f"decode: batch {batch}, 8,192 tokens, even" for batch in (1, 2, 4)]
    long = [f"contexts: batch 1, {n} tokens, even" for n in ("131,072", "262,144")]
    for older, newer in pairwise(kernel.short for kernel in KERNELS):
        for name in long if newer == PRESENT.short else rows:
            before, after = ROWS[older, name], ROWS[newer, name]
            assert after["measured_ms"] < before["measured_ms"]
            assert after["simulated_ms"] < before["simulated_ms"]


@pytest.mark.parametrize("kernel", KERNELS, ids=lambda kernel: kernel.short)
def test_constants_are_those_of_the_trace(kernel: Kernel) -> None:
    """What the stamps show directly is in the table as the kernel's trace has it now."""
    first = kernel is VERSION_TWO
    direct = shown(*read_trace(VERSION_TWO))
    if not first:
        direct = shown(*read_trace(kernel), direct)
        assert direct.keys() == set(OWN)
    kept = TABLE["constants"] | TABLE["older"].get(kernel.short, {})
    value = {name: entry["value"] for name, entry in kept.items()}
    # The stamps show these together with others of the table.
    value["merge"] += value["merge_pass"]
    value["norm"] += value["norm_row"] * (kernel.switches.least_normed - 1)
    for name, each in direct.items():
        if first and name == "hop_load":
            continue  # fitted further
        if isinstance(each, dict):
            assert each.keys() == value[name].keys()
            for key in each:
                assert value[name][key] == pytest.approx(each[key], rel=1e-4)
        else:
            assert value[name] == pytest.approx(each, rel=1e-4), name
        assert kernel.trace in kept[name]["from"]


def test_every_constant_has_a_source() -> None:
    """A file of the repository, the case it was fitted to, or that it is assumed."""
    for table in (TABLE["constants"], *TABLE["older"].values()):
        for name, entry in table.items():
            assert entry["from"].startswith(("shown by ", "fitted", "assumed")), name


def test_layers_of_the_traces_are_met() -> None:
    """The mean time of a layer within 1 %, which is fitted for version two only; the work of every
    operation within 9 %."""
    for short, record in RECORD["traces"].items():
        mean = record["layer_us"]["mean"]
        assert mean[1] == pytest.approx(mean[0], rel=0.01), short
        for op, row in record["by_op_ns"].items():
            assert row["work"][1] == pytest.approx(row["work"][0], rel=0.09), (short, op)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda c: c.pop("hop"), r"\['hop'\] are missing or unknown"),
        (lambda c: c.update(speed={"value": 1.0}), r"\['speed'\] are missing or unknown"),
        (lambda c: c["hop"].update(value=-1.0), "hop is -1.0; give numbers from 0 on"),
        (lambda c: c["head"]["value"].update(QKV=float("nan")), "head is"),
    ],
)
def test_damaged_tables_are_refused(change: Any, says: str) -> None:
    """One line names the constant."""
    damaged = json.loads(FILE.read_text(encoding="utf-8"))
    change(damaged["constants"])
    with pytest.raises(RequestError, match=says):
        from_dict(damaged)


def test_seeds_matter_little() -> None:
    """Another seed of the memory's chance changes a step by less than 2 %."""
    assert np.abs(RECORD["sensitivity"]["other seeds, batch 1"]).max() < 0.02
