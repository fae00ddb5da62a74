"""What lesson 06 shows: experts that batches hit, records, shares, and the recorded route."""

from __future__ import annotations

import numpy as np
import pytest
from record_routing import BATCHES, SKIPPED, TOKENS, distinct, neighbours

from mkref.lessons.lesson_06_figures import (
    hits_by_batch,
    route_in_time,
    routing_figure,
    shares_figure,
)
from mkref.lessons.lesson_06_routing import (
    expected_hits,
    expert_gb,
    head_start,
    measured,
    order_bits,
    record_of,
    routing,
    trained_hits,
)
from mkref.lessons.lesson_06_runs import runs
from mkref.lessons.recorded import bench_record
from mkref.plan.share import share_half


def test_expected_hits_are_those_of_many_draws() -> None:
    """The formula against a few hundred random routes."""
    rng = np.random.default_rng(0)
    for batch in (1, 3, 8):
        draws = [
            len({int(e) for _ in range(batch) for e in rng.choice(128, 8, replace=False)})
            for _ in range(300)
        ]
        assert np.mean(draws) == pytest.approx(expected_hits(batch), rel=0.02)


@pytest.mark.parametrize("batch", [1, 2, 4, 8, 16, 32])
def test_record_was_made_at_random(batch: int) -> None:
    """Random weights hit as many experts as equal chances; the text says so."""
    assert measured(batch)["experts"] == pytest.approx(expected_hits(batch), rel=0.01)


def test_experts_are_half_of_a_step_and_three_quarters_of_eight_rows() -> None:
    """What "Why it matters" says of the bytes."""
    rows = {
        row["batch"]: row["bytes"] / 1e9
        for row in bench_record("h200/decode.json")["rows"]
        if row["kind"] == "even"
    }
    parts = {batch: expert_gb(measured(batch)["experts"]) / rows[batch] for batch in (1, 8)}
    assert parts == {1: pytest.approx(0.5, abs=0.03), 8: pytest.approx(0.75, abs=0.03)}


def test_trained_rows_meet_like_strangers_and_neighbours_more_often() -> None:
    """Of different texts nearly as at random, of one text fewer; never more."""
    for batch in BATCHES[1:]:
        hits = trained_hits(batch)
        assert hits["neighbours"] < 0.95 * hits["chance"]
        assert 0.98 * hits["chance"] < hits["rows"] <= hits["chance"]


def test_recorder_counts_distinct_experts() -> None:
    """Rows that agree hit k, rows that differ hit all; neighbours are counted within a row."""
    agree = np.tile(np.arange(4), (2, 4, TOKENS, 1))  # [layers, rows, tokens, k]
    differ = agree + 4 * np.arange(4)[None, :, None, None]
    assert [4.0, 4.0] == distinct(agree, 4) == neighbours(differ, 8)
    assert [16.0, 16.0] == distinct(differ, 4)
    assert TOKENS > SKIPPED


def test_runs_are_the_shares_of_the_kernel() -> None:
    """The exercise's solution and the plan's division, with nothing beside, are one thing."""
    for sm in range(132):
        halves = [share_half(8 * 96, 0, 264, 2 * sm + half) for half in (0, 1)]
        mine = runs(tuple(range(8)), 96, 132, sm)
        assert sum(end - begin for begin, end in halves) == sum(count for _, _, count in mine)


def test_records_are_what_the_text_says() -> None:
    """A half of 264 with 96 granules per expert, and one of the 128 blocks of x."""
    gate_up, down = record_of("GATE_UP"), record_of("DOWN")
    assert (44, 264, 96) == (gate_up.first, gate_up.count, gate_up.blocks)
    assert (21, 1, 128) == (down.first, down.count, down.blocks)
    assert 4 == sum(record_of("DOWN", sm=sm).count == 0 for sm in range(132))


def test_route_comes_in_time() -> None:
    """In the recorded step the loader knows the experts microseconds before their turn."""
    found = head_start()
    assert found["waited"] < 0.5 < 2 < found["begin"]
    assert "[measured]" in route_in_time().summary


def test_order_changes_bits_of_most_outputs() -> None:
    """Every other order does; otherwise the contract need not fix one."""
    assert all(differ > 20 for differ in order_bits().values())


def test_figures_say_what_they_show() -> None:
    """Numbers of the sentences are those of the data."""
    hit = {e for row in routing(8) for e in row}
    assert f"64 choices hit {len(hit)} experts" in routing_figure().summary
    assert "The shares have 7, 7, 7, 7, 8 granules" in shares_figure().summary
    assert "8: 51.7" in hits_by_batch().summary
