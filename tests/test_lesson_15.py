"""What lesson 15 computes from the records, and the sentences of its prose that depend on them.

When the records are measured again and a test of the second kind fails, the text of the notebook is
what must be looked at.
"""

from __future__ import annotations

from collections.abc import Iterator
from math import inf
from statistics import mean, median
from typing import Any

import numpy as np
import pytest

from mkref.config import NORTH_MINI_CODE
from mkref.errors import RequestError
from mkref.lessons import lesson_15_record as record
from mkref.lessons.lesson_15 import interval, share_of_bound, step_like
from mkref.lessons.lesson_15_claims import IDEAS, claim, recorded_claims, recorded_rungs
from mkref.lessons.lesson_15_critics import (
    EVIDENCE,
    climb_source,
    criticism,
    log_points,
    log_table,
    way_of_kernels,
)
from mkref.lessons.lesson_15_figures import (
    baselines,
    errors,
    gains,
    path_parts,
    shares,
    start,
    turns,
    waterfall,
)
from mkref.lessons.lesson_15_strips import Strip, strip_chart
from mkref.lessons.recorded import bench_record, evidence, recorded_trace
from mkref.measure.ladder import RUNGS

FIGURES = (waterfall, turns, gains, baselines)


@pytest.fixture
def other_ladder(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A record with the batches 1 and 3 in three turns."""
    made = {"provenance": {"gpu": "a GPU", "date": "2027-01-02T00:00:00"}, "rows": []}
    for batch in (1, 3):
        for n, rung in enumerate(RUNGS):
            samples = [batch * (4 - 0.1 * n) * (1 + 0.01 * turn) for turn in range(3)]
            row = {"batch": batch, "rung": rung.letter, "name": rung.name, "samples_ms": samples}
            first = rung.letter not in [r.letter for r in RUNGS[:n]]
            made["rows"].append(  # type: ignore[attr-defined]
                row | {"launches_per_step": 1, "best": first, "same_tokens": True}
            )

    def only(name: str) -> Any:
        return made if name == record.LADDER else bench_record(name)

    monkeypatch.setattr(record, "bench_record", only)
    record._ladders.cache_clear()
    yield
    record._ladders.cache_clear()


# ---- what is computed ----------------------------------------------------------------------------


@pytest.mark.parametrize("n", [6, 7, 10, 15])
def test_interval_holds_the_true_ratio_as_often_as_it_says(n: int) -> None:
    """Of 2,000 experiments with lopsided noise at least 94 % contain the median ratio, 0.9."""
    rng = np.random.default_rng(n)
    hits = 0
    for _ in range(2000):
        a = 1 + rng.random(n)
        b = 0.9 * a * np.exp(rng.exponential(0.02, n) - 0.02 * np.log(2))
        low, high = interval(a.tolist(), b.tolist())
        hits += low <= 0.9 <= high
    assert hits >= 0.94 * 2000


def test_interval_of_too_few_turns_tells_nothing() -> None:
    """Five turns cannot reach 95 %, six can."""
    for n in range(6):
        assert interval([2.0] * n, [1.0] * n) == (0.0, inf)
    assert interval([2.0] * 6, [1.0] * 6) == (0.5, 0.5)


def test_share_is_that_of_the_benchmark() -> None:
    """With as many experts as were counted the share is the recorded one, also by the exercise;
    with eight for each row it looks better than it is.
    """
    for batch, row in record.decode_rows().items():
        share = record.share_if(batch, row["experts_per_layer"])
        assert share == pytest.approx(row["share_of_datasheet_bound"], abs=1e-4)
    most = max(record.decode_rows())
    assert 0.97 < record.share_if(most, 8 * most) < 1.05  # "would be believed"
    step, row = step_like(1, 8192), record.decode_rows()[1]
    share = share_of_bound(step, row["ms_per_step"], 4814.304)
    assert share == pytest.approx(row["share_of_datasheet_bound"], abs=1e-3)


def test_every_recorded_rung_has_its_ideas() -> None:
    """No rung of the program or of a record is unknown to the claims."""
    assert {rung.name for rung in RUNGS} == IDEAS.keys()
    for batch in record.batches():
        assert len(recorded_rungs(batch)) == len(record.ladder(batch))


def test_claims_are_no_more_than_medians_say() -> None:
    """Where one pair tells about an idea, its claim lies below the ratio of the medians."""
    for batch in record.batches():
        best, claims = record.best_rungs(batch), recorded_claims(batch)
        assert claims["order"] <= 100 * (1 - best["f"].ms / best["e"].ms) + 1
        assert claim(recorded_rungs(batch), "no such idea", interval) == 0


def test_any_batches_do(other_ladder: None) -> None:
    """The lesson takes whichever batches the ladder has; three turns claim nothing."""
    assert record.batches() == [1, 3]
    assert record.ladder_source() == "ladder.json, a GPU, 2027-01-02"
    assert {*recorded_claims(3).values()} == {0.0}
    for figure in FIGURES:
        assert "batch 3" in figure(3).summary
    assert "3 turns are too few" in gains(3).text()
    with pytest.raises(RequestError, match=r"no ladder of batch 8; there are \[1, 3\]"):
        record.ladder(8)


def test_parts_of_the_path_are_the_step() -> None:
    """Nothing of the recorded step is left out or counted twice."""
    span = recorded_trace(record.TRACE).span_ns / 1e6
    assert sum(record.of_path().values()) == pytest.approx(span, abs=1e-9)


def test_figures_say_what_they_are() -> None:
    """Each summary has a label; pictures hold every row of their table."""
    figures = [figure(batch) for figure in FIGURES for batch in record.batches()]
    for figure in [*figures, start(), shares(), path_parts(), errors()]:
        assert "[measured" in figure.summary or "measured]" in figure.summary
        assert len(figure.table.rows) >= 3
        assert figure.svg.startswith("<svg")


def test_strips_draw_points_spans_and_marks() -> None:
    """A circle for each point, a square for each marked one, ticks at round values."""
    svg = strip_chart(
        [Strip("one", [1.0, 2.0], "text", (1,), (0.5, 1.5))],
        title="t", head="h", unit=" %", legend=("point", "square"),
    )  # fmt: skip
    assert svg.count("a3.5") == 2 * 2  # one point, one in the legend, two arcs each
    assert ">0 %<" in svg
    assert ">2 %<" in svg


def test_simulator_errors_are_those_of_its_record() -> None:
    """All held-out cases are drawn, and the record's own summary agrees with them."""
    found = [error for group in record.held_out().values() for error in group]
    every = record.simulated()["held_out"]["all"]
    assert every["n"] == len(found) > 0
    assert every["mean_abs"] == pytest.approx(np.abs(found).mean(), abs=1e-4)


def test_every_criticism_has_evidence() -> None:
    """Each is quoted with a link; the pages of the log are found."""
    rows = evidence("critics.json")["rows"]
    assert [row["id"] for row in rows] == [*EVIDENCE]
    assert all(row["url"].startswith("https://") and row["label"] == "quoted" for row in rows)
    text = criticism()._repr_markdown_()
    assert len(text.splitlines()) == len(rows) + 2
    assert len(log_table(8).rows) >= 8
    assert len(log_points(10, "Lost, too:").rows) >= 4
    assert "entry.samples.append(ms)" in climb_source().text


# ---- what the prose says -------------------------------------------------------------------------


def test_persistent_alone_loses_to_a_graph() -> None:
    """'Rung d loses', 'counters alone do not make up for that', at every batch of the record."""
    for batch in record.batches():
        best = record.best_rungs(batch)
        assert best["b"].ms < best["e"].ms < best["d"].ms
        assert best["h"].ms < best["c"].ms


def test_gains_change_with_the_batch() -> None:
    """The loader ahead brings most with one row, the order with many; the chain is nearer there."""
    large = max(record.batches())
    assert (record.best_step(1), record.best_step(large)) == ("g", "f")
    assert record.chain_ratio(1) > record.chain_ratio(large)
    assert all(way_of_kernels(batch) > 0.5 for batch in record.batches())


def test_two_turns_are_late_each_for_other_rungs() -> None:
    """'The two turns follow each other', 'd to g are late and a to c are not', 'the other way
    round'; 'rung h hardly notices'; 'both are wrong, in opposite directions', 'in turn 9 d alone'.
    """
    batch = record.most_disturbed()
    rungs = record.best_rungs(batch)
    first, second = record.late_turns(batch)
    assert second == first + 1
    late = {
        turn: {letter for letter, r in rungs.items() if r.samples[turn] / r.ms - 1 > 0.01}
        for turn in (first, second)
    }
    assert late == {first: {*"defg"}, second: {*"abc"}}
    wide = {letter: max(r.samples) / min(r.samples) - 1 for letter, r in rungs.items()}
    assert 3 * wide["h"] < median(wide.values())
    above, below = record.late_ratios(batch, "c", "d")
    assert above > 0.02
    assert below < -0.02
    assert rungs["d"].samples[8] / rungs["d"].ms == pytest.approx(1.0367, abs=1e-4)
    others = [r.samples[8] / r.ms for letter, r in rungs.items() if letter != "d"]
    assert max(others) < 1.01


def test_loader_at_the_largest_batch_gains_a_small_part() -> None:
    """'A small part of what it is with one row', but shown: the interval leaves out 0 %."""
    gains = {}
    for batch in (1, max(record.batches())):
        rungs = record.best_rungs(batch)
        low, high = interval(rungs["f"].samples, rungs["g"].samples)
        assert 0 < low <= high < 1
        gains[batch] = 1 - rungs["g"].ms / rungs["f"].ms
    assert 0 < gains[max(gains)] < gains[1] / 3


def test_same_kernel_seems_faster_later() -> None:
    """'As much as some good ideas bring': by 1 % or more; 'the slowest by far'; the left half is
    even and lies above mean and median, the right half swings and is shorter by 'some percent'.
    """
    ms = record.steps()
    first, second = (median(ms[i : i + 8]) for i in (0, 8))
    assert second < 0.99 * first
    assert ms[0] > 1.5 * max(ms[1:])
    even, later = ms[8:96], ms[len(ms) // 2 :]
    assert min(even) > max(mean(ms), median(ms))
    assert max(even) / min(even) < 1.05 < 1.08 < max(later) / min(later)
    assert median(later) < 0.98 * median(even)
    assert np.mean(np.array(later) < median(even)) > 0.95  # 'nearly all are shorter'


def test_other_sentences() -> None:
    """Skeletons lie closer together than rungs; stamps cost time; the simulator errs in a sign."""
    best = record.best_rungs(1)
    assert 1 < record.skeleton_ratio() < best["b"].ms / best["h"].ms
    traced, plain = record.traced_and_not()
    assert plain is None or plain < traced
    rates = record.read_limits().values()
    assert max(rates) > 1.01 * min(rates)  # 'it is itself a measurement'
    variants = record.simulated()["variants"]
    assert any((v["measured"] > 1) != (v["simulated"] > 1) for v in variants)
    assert record.simulated()["held_out"]["all"]["mean_abs"] < 0.035
    for batch, row in record.decode_rows().items():
        expected = NORTH_MINI_CODE.expected_distinct_experts(batch)
        assert row["experts_per_layer"] == pytest.approx(expected, rel=0.01)
