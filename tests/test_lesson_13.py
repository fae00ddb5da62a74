"""What lesson 13 runs and computes beside its exercises."""

from __future__ import annotations

import numpy as np
import pytest

from mkref.lessons import check
from mkref.lessons.lesson_13 import bits_of, fixed_sum, numbers, per_sm
from mkref.lessons.lesson_13_figures import (
    different_sums,
    gaps_figure,
    launches_figure,
    mma_figure,
    sums_figure,
)
from mkref.lessons.lesson_13_merge import merged_otherwise
from mkref.lessons.lesson_13_runs import (
    agreement,
    answer,
    differing,
    digest,
    launches,
    page_bits,
    probe,
    recorded_digest,
    small_terms,
)
from mkref.lessons.lesson_13_ties import NearTie, near_ties, rules
from mkref.lessons.lesson_13_verdict import verdict


@pytest.fixture(name="ties", scope="module")
def ties_fixture() -> list[NearTie]:
    """The recorded places, computed again."""
    return near_ties()


def test_sums() -> None:
    """Dealt to SMs a sum has many results, in fixed chunks one; both are near the true sum."""
    results, units = different_sums()
    assert 15 < results <= units + 1 < 50
    x = numbers(4096)
    exact = x.astype(np.float64).sum()
    assert len({bits_of(per_sm(x, n)) for n in range(1, 20)}) > 5
    assert 1 == len({bits_of(fixed_sum(x, n)) for n in range(1, 20)})
    assert all(abs(f(x, 7) - exact) < 1e-2 for f in (per_sm, fixed_sum))


def test_recorded_bits_come_out_here() -> None:
    """64 tokens alone: the hash of the record, whose prompt had neighbours."""
    alone = answer("host", 1, 64)
    assert recorded_digest() == digest(alone)
    changed = alone.copy()
    changed[0, 0] = np.nextafter(changed[0, 0], np.float32(np.inf))
    assert recorded_digest() != digest(changed)
    assert 1 == differing(alone, changed)
    assert 0 == differing(alone, answer("host", 2, 3, (9, 14, 19)))


def test_pages_do_not_depend_on_the_rows_of_a_prompt() -> None:
    """Three tokens a step and eight; 66 tokens of 5 layers, a key and a value of 32 words each."""
    three, eight = page_bits(3), page_bits(8)
    assert np.array_equal(three, eight)
    assert 66 * 5 * 2 * 32 == (three != 0xFFFF).sum()


def test_near_ties_are_those_of_the_record(ties: list[NearTie]) -> None:
    """The same places, gaps and, where the record looks at them, experts."""
    places = agreement()["machines"]["torch"]["differ"]
    assert [(p["prompt"], p["token"]) for p in places] == [(t.prompt, t.token) for t in ties]
    for place, one in zip(places, ties, strict=True):
        assert one.recorded == pytest.approx(one.gap, abs=1e-4)
        assert list(one.layers) == place.get("other_experts", list(one.layers))
    said = [verdict(*t.rows, 0.2, 0.25) for t in ties]
    assert ["wrong", *5 * ["near-tie"]] == said


def test_first_place_is_a_near_tie_of_the_router(ties: list[NearTie]) -> None:
    """PyTorch's token is our fourth best, since layer 2 had two experts that were almost equal."""
    first, ours = ties[0], ties[0].rows[0]
    assert (9, 5) == (first.prompt, first.token)
    assert 3 == (ours > ours[first.rows[1].argmax()]).sum()
    assert (2, 3, 4) == first.layers
    assert first.margin == pytest.approx(0.0018, abs=1e-4)
    assert "neither: 0 of torch, 0 of transformers [measured]" == rules()[-1]


def test_merge_in_another_order_hides_in_bfloat16() -> None:
    """Most float32 outputs differ, a few after rounding; up to eight splits none."""
    wide, narrow = merged_otherwise()
    assert 0 < narrow < 50 < 30_000 < wide
    assert (0, 0) == merged_otherwise(4096, 8)


def test_mma_is_neither_exact_nor_one_by_one() -> None:
    """Products of 2^-25 count, those of 2^-26 do not."""
    assert {25: ("4", "0", "4"), 26: ("2", "0", "0")} == {
        power: tuple(sums) for power, *sums in small_terms((25, 26))
    }


def test_probe_says_whose_shares_they_are() -> None:
    """The GPU, then what the operands were, then the model that is right in all of them."""
    gpu, *lines = probe()
    assert gpu.startswith("NVIDIA H200, ")
    best = next(line for line in lines if line.startswith("F="))
    assert best.startswith("F=25 block=16 floor=0 rz normalised=0")
    kinds = lines.index(best)
    assert kinds == best.count("100.00%") == best.count("%")


def test_launches_feed_every_token_once() -> None:
    """Prompts of 31 and 25 tokens; an answer's first token comes with the prompt's last."""
    seen = launches((5, 3))
    fed = [
        sum(one.steps * one.rows.count((number, prompt)) for one in seen)
        for number, prompt in ((0, True), (1, True), (0, False), (1, False))
    ]
    assert [31, 25, 4, 2] == fed
    assert "row 7" in launches_figure(seen).text()


def test_figures_say_what_they_show(ties: list[NearTie]) -> None:
    """Sentences with their numbers, and the rows of the tables."""
    assert "5 different results" in sums_figure().summary
    assert ("2^-26", "not at all") in mma_figure().table.rows
    said = gaps_figure(ties, 0.25)
    below = "at most 0.25 below ours at 5 of them, and further below at prompt 9, token 5 (other"
    assert f"at 6 places. Its token is {below} experts)." in said.summary
    assert gaps_figure(ties[1:], 0.25).summary.endswith("at 5 of them, and further below at none.")
    assert ("prompt 9, token 5", f"gap {ties[0].gap:.3f}, other experts") in said.table.rows


def test_verdict_asks_both_rows_for_what_is_not_finite() -> None:
    """One NaN or infinity in either row, at any place, is wrong, whatever the tokens say."""
    for bad in (np.nan, np.inf, -np.inf):
        for place in range(3):
            good = np.array([1, 0.9, -2], np.float32)
            broken = good.copy()
            broken[place] = bad
            said = {verdict(good, broken, 0.2, 0.25), verdict(broken, good, 0.2, 0.25)}
            assert {"wrong"} == said


@pytest.mark.parametrize("word", ["near tie", "Near-tie", "ok"])
def test_unknown_word_is_named(word: str) -> None:
    """The check says which three there are."""
    report = check("13.3", lambda *_: word)
    assert f"it says {word!r}, which is none of same, near-tie, wrong" in repr(report)


def test_array_is_no_number() -> None:
    """Nor in the trial with a NaN, which has not vanished from it."""
    report = check("13.1", lambda x, n_sm: x)
    assert {"it returns a ndarray, not a number"} == {wrong for _, wrong in report.results}
