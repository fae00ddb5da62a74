"""The KV cache, one sequence after the other: tables, windows, prefixes that are found again."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from mkref.engine.kv import FULL, SLIDING, KvCache, KvSequence, pages_for, window_pages
from mkref.plan.build import PAGE
from tests.engines import tiny_model


def make(window: int, full: int, sliding: int, layers: str = "both", **more: Any) -> KvCache:
    """A cache for a model with the given window; `layers` is "both", "full" or "sliding"."""
    config, _ = tiny_model()
    kinds = {
        "both": config.layer_types,
        "full": ("full_attention",) * 3,
        "sliding": ("sliding_attention",) * 3,
    }
    config = replace(config, sliding_window=window, layer_types=kinds[layers])
    return KvCache(config, full, sliding, **{"max_context": 1024, "debug": True, **more})


def text(n: int, seed: int = 0) -> list[int]:
    """Some tokens; those of a smaller `n` are the beginning of those of a larger one."""
    return np.random.default_rng(seed).integers(0, 90, 1024).tolist()[:n]


def run(kv: KvCache, tokens: list[int], step: int = 16) -> KvSequence:
    """Open a sequence and feed it all tokens, publishing as the scheduler does."""
    sequence = kv.open(tokens)
    for position in range(sequence.n_cached, len(tokens), step):
        count = min(step, len(tokens) - position)
        assert kv.advance(sequence, position, count)
        kv.publish(sequence, tokens[: position + count])
    return sequence


def entries(sequence: KvSequence, kind: int) -> list[int]:
    """The entries of a table that hold pages."""
    return np.flatnonzero(sequence.table[kind] >= 0).tolist()


def test_window_pages_is_the_most_that_any_place_needs() -> None:
    """The formula against every offset of the window within a page."""
    for window in [*range(1, 200), 4096]:
        worst = max((at + window - 1) // PAGE + 1 for at in range(PAGE))
        assert worst == window_pages(window)


def test_sliding_pages_that_left_the_window_are_let_go() -> None:
    """Entries behind the window become -1, the page serves again; full layers keep everything."""
    kv = make(window=70, full=16, sliding=3)
    sequence = kv.open([])
    for position in range(1000):
        before, moves = sequence.table.copy(), sequence.n_moves
        assert kv.advance(sequence, position)
        first = max(0, position - 69) // PAGE
        assert list(range(first, position // PAGE + 1)) == entries(sequence, SLIDING)
        assert list(range(position // PAGE + 1)) == entries(sequence, FULL)
        assert (before != sequence.table).any() == sequence.n_moves - moves
    assert (16, window_pages(70)) == (sequence.held(FULL), kv.budget[SLIDING])


def test_a_jump_takes_what_the_window_needs() -> None:
    """A prompt that is taken in at once gets all full pages, and only the last sliding pages."""
    kv = make(window=70, full=16, sliding=3)
    sequence = kv.open(text(1000))
    assert kv.advance(sequence, 700)
    assert list(range(11)) == entries(sequence, FULL)
    assert [9, 10] == entries(sequence, SLIDING)
    assert kv.advance(sequence, 703)
    assert 1 == sequence.n_moves


@pytest.mark.parametrize("window", [1, 5, 64, 66, 70, 300])
@pytest.mark.parametrize("ahead", [1, 8, 32, 100])
def test_alone_a_sequence_that_fits_never_waits(window: int, ahead: int) -> None:
    """With exactly the pages that `fits` wants, up to `ahead` tokens at once always have theirs.

    The tokens need not all come: the next call begins among them, or behind them. What earlier
    sequences left in the cache is no obstacle.
    """
    rng = np.random.default_rng(window * 1000 + ahead)
    need = min(16, window_pages(window + ahead - 1))
    assert not make(window, full=16, sliding=need - 1, ahead=ahead).fits(1000)
    assert not make(window, full=15, sliding=need, ahead=ahead).fits(1000)
    kv = make(window, full=16, sliding=need, ahead=ahead)
    assert kv.fits(1000)
    for seed in (1, 2):
        tokens = text(1000, seed)
        sequence, position = kv.open(tokens), 0
        while position < 1000:
            count = min(int(rng.integers(1, ahead + 1)), 1000 - position)
            assert kv.advance(sequence, position, count)
            for seen in {max(0, position - window + 1), position, position + count - 1}:
                assert sequence.table[SLIDING, seen // PAGE] >= 0
                assert sequence.table[FULL, seen // PAGE] >= 0
            position += int(rng.integers(1, count + 1))
            kv.publish(sequence, tokens[:position])
        kv.close(sequence)
    assert (16, need) == (kv.available(FULL), kv.available(SLIDING))


def test_fits_knows_the_context() -> None:
    """However many pages there are, no sequence is longer than the table."""
    kv = make(window=70, full=99, sliding=99)
    assert kv.fits(1024)
    assert not kv.fits(1025)


@pytest.mark.parametrize("layers", ["full", "sliding"])
def test_kinds_that_a_model_lacks_need_no_pages(layers: str) -> None:
    """Without full (or sliding) layers no page of that kind is taken, and prefixes are found."""
    budget = {"full": 4 if layers == "full" else 0, "sliding": 0 if layers == "full" else 3}
    kv = make(window=70, layers=layers, ahead=1, **budget)
    assert kv.fits(256)
    kv.close(run(kv, text(256), step=1))
    assert 192 == kv.match(text(256))
    sequence = kv.open(text(256))
    expected = {"full": [[0, 1, 2], []], "sliding": [[], [1, 2]]}[layers]
    assert expected == [entries(sequence, kind) for kind in (FULL, SLIDING)]


def test_the_last_prompt_token_is_always_fed() -> None:
    """A prompt that is in the cache as a whole still leaves one token or more to feed."""
    kv = make(window=70, full=16, sliding=16)
    kv.close(run(kv, text(256)))
    found = {n: kv.match(text(n)) for n in (0, 1, 64, 65, 128, 129, 255, 256, 257, 900)}
    wanted = {0: 0, 1: 0, 64: 0, 65: 64, 128: 64, 129: 128, 255: 192, 256: 192, 257: 256, 900: 256}
    assert wanted == found
    assert 192 == kv.open(text(256)).n_cached


def test_an_answer_is_found_by_the_next_turn() -> None:
    """Pages of generated tokens are published like those of the prompt, and taken without a copy.

    Tokens may be any kind of sequence.
    """
    kv = make(window=70, full=16, sliding=16)
    first = run(kv, text(300))  # whoever asked for 100 tokens and got 200
    pages = first.table[:, :4].copy()
    kv.close(first)
    turn = [*text(300), 7, 7, 7]
    for tokens in (turn, tuple(turn), np.array(turn, np.int64)):
        second = kv.open(tokens)
        assert 256 == second.n_cached
        assert (pages[FULL] == second.table[FULL, :4]).all()
        assert [2, 3] == entries(second, SLIDING)
        assert pages[SLIDING, 3] == second.table[SLIDING, 3]
        kv.close(second)


def test_who_only_looks_does_not_count() -> None:
    """Tokens count as asked for when a sequence gets its first page, and once."""
    kv = make(window=70, full=16, sliding=16)
    kv.close(run(kv, text(300)))
    assert (0, 300) == (kv.stats().hits, kv.stats().queries)
    kv.close(kv.open(text(300)))
    assert (0, 300) == (kv.stats().hits, kv.stats().queries)
    sequence = kv.open(text(300))
    for position in (256, 300, 320):
        assert kv.advance(sequence, position)
    assert (256, 600) == (kv.stats().hits, kv.stats().queries)


def test_pages_are_shared_while_they_are_used() -> None:
    """Two run on one prompt: its pages count once, and stay until the last one has gone."""
    kv = make(window=300, full=12, sliding=12)
    first = run(kv, text(200))
    second = run(kv, [*text(192), 5])
    assert (first.table[:, :3] == second.table[:, :3]).all()
    assert (first.table[:, 3] != second.table[:, 3]).all()
    assert 5 == kv.stats().full.used
    kv.close(first)
    assert (4, 0) == (kv.stats().full.used, kv.stats().full.cached)
    kv.close(second)
    assert (0, 3, 9) == (kv.stats().full.used, kv.stats().full.cached, kv.free(FULL))


def test_shared_pages_are_never_written() -> None:
    """A sequence writes behind what it found and behind what it has published, or is refused."""
    kv = make(window=70, full=16, sliding=16)
    kv.close(run(kv, text(130)))
    sequence = kv.open(text(200))
    with pytest.raises(ValueError, match="position 127 of a sequence with 128 published tokens"):
        kv.advance(sequence, 127)
    assert kv.advance(sequence, 128, 64)
    kv.publish(sequence, text(192))
    with pytest.raises(ValueError, match=r"positions 191 \+ 2 of a sequence with 192 published"):
        kv.advance(sequence, 191, 2)
    assert kv.advance(sequence, 192)


def test_too_few_pages_change_nothing() -> None:
    """`advance` says no, and then tables, counts and what is cached are as before."""
    kv = make(window=70, full=5, sliding=8)
    first = run(kv, text(192))
    second = kv.open(text(100, seed=1))
    assert kv.advance(second, 0, 128)
    before, table = kv.stats(), second.table.copy()
    assert not kv.advance(second, 128)
    assert (before, 1) == (kv.stats(), second.n_moves)
    assert (table == second.table).all()
    kv.close(first)  # leaves three cached pages, of which one goes
    assert kv.advance(second, 128)
    assert (2, 1) == (kv.stats().full.cached, kv.stats().full.evictions)
    assert 128 == kv.match(text(900))


def test_a_window_that_moves_pays_for_itself() -> None:
    """What `advance` lets go it may take again, but not if somebody else reads it."""
    kv = make(window=64, full=16, sliding=2, ahead=1)
    alone = run(kv, text(127), step=1)
    assert [0, 1] == entries(alone, SLIDING)
    assert kv.advance(alone, 128)  # page 0 was let go, and is taken
    kv.close(alone)
    kv = make(window=64, full=16, sliding=3, ahead=1)
    first = run(kv, text(120), step=1)
    second = kv.open(text(120))
    assert kv.advance(second, 64)
    assert not kv.advance(second, 128)  # page 0 is the first one's, too
    assert not kv.advance(first, 128)
    kv.close(first)
    assert kv.advance(second, 128)


def test_out_of_range_and_after_the_end_are_refused() -> None:
    """A position past the context, tokens without pages, a closed sequence: bugs of the caller."""
    kv = make(window=70, full=99, sliding=99, debug=False)
    sequence = kv.open(text(64))
    with pytest.raises(ValueError, match="position 1024 of a sequence of at most 1024 tokens"):
        kv.advance(sequence, 1024)
    with pytest.raises(ValueError, match=r"positions 1023 \+ 2 of a sequence of at most 1024"):
        kv.advance(sequence, 1023, 2)
    with pytest.raises(ValueError, match=r"positions 3 \+ 0"):
        kv.advance(sequence, 3, 0)
    assert kv.advance(sequence, 63)
    with pytest.raises(ValueError, match="publish 128 tokens: the sequence has no pages for them"):
        kv.publish(sequence, text(128))
    kv.close(sequence)
    with pytest.raises(ValueError, match="position 0 of a sequence that is closed"):
        kv.advance(sequence, 0)
    with pytest.raises(ValueError, match="publish 64 tokens: the sequence is closed"):
        kv.publish(sequence, text(64))
    with pytest.raises(ValueError, match="close of a sequence that is closed"):
        kv.close(sequence)
    assert 4 == pages_for(256)
    kv.check()


def test_without_reuse_nothing_is_kept() -> None:
    """`reuse=False`: nothing is published, nothing is found, nothing stays."""
    kv = make(window=70, full=16, sliding=16, reuse=False)
    kv.close(run(kv, text(256)))
    assert 0 == kv.match(text(300))
    assert (16, 16) == (kv.free(FULL), kv.free(SLIDING))


class Counting(list[int]):
    """Tokens that count how many of them are looked at."""

    seen = 0

    def __getitem__(self, at: Any) -> Any:
        part = super().__getitem__(at)
        self.seen += len(part)
        return part


def test_work_is_only_for_what_is_new() -> None:
    """Publishing reads the tokens of new pages; finding stops soon after the first strange page."""
    kv = make(window=70, full=16, sliding=16, debug=False, max_context=200_000)
    tokens = Counting(text(1000))
    sequence = kv.open(tokens)
    assert kv.advance(sequence, 0, 1000)
    tokens.seen = 0
    kv.publish(sequence, tokens)
    assert 960 == tokens.seen == sequence.n_published
    for _ in range(5):
        kv.publish(sequence, tokens)
    assert 960 == tokens.seen
    long = Counting([*text(100), *[3] * 100_000])
    assert 64 == kv.match(long)
    assert long.seen <= 1024
