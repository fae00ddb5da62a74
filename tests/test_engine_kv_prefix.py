"""Traps of sharing pages: equal hashes, copies, and what is evicted in which order."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from mkref.engine import kv as kv_module
from mkref.engine import kv_check, kv_index
from mkref.engine.kv import FULL, SLIDING, KvCache
from tests.test_engine_kv import entries, make, run, text


def fill(kv: KvCache, n_pages: int) -> None:
    """Take so many pages of both kinds and give them back: what was cached has to go."""
    sequence = kv.open([])
    assert kv.advance(sequence, 0, 64 * n_pages)
    kv.close(sequence)


class Colliding(bytes):
    """Keys of which all have the same hash."""

    def __hash__(self) -> int:
        return 1


def test_equal_hashes_never_share_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pages are found by their tokens: with one hash for all, everything works as before."""
    keys = kv_index.page_keys

    def colliding(*args: object) -> Iterator[bytes]:
        return map(Colliding, keys(*args))  # type: ignore[arg-type]

    for module in (kv_module, kv_index, kv_check):
        monkeypatch.setattr(module, "page_keys", colliding)
    kv = make(window=70, full=48, sliding=48)
    for seed in range(3):
        kv.close(run(kv, text(300, seed)))
    for seed in range(3):
        assert 256 == kv.match(text(300, seed))
        assert 0 == kv.match(text(300, seed)[1:])
    mixed = text(64, 0) + text(64, 1) + text(100, 2)
    assert 64 == kv.match(mixed)
    kv.close(run(kv, mixed))
    assert 192 == kv.match(mixed)
    assert {hash(node.key) for node in kv.index.root.children.values()} == {1}


def test_a_page_is_found_behind_its_own_prefix_only() -> None:
    """The same 64 tokens after other tokens are another page."""
    kv = make(window=70, full=48, sliding=48)
    kv.close(run(kv, text(64, 0) + text(65, 1)))
    assert 0 == kv.match(text(65, 1))
    assert 64 == kv.match(text(64, 0) + text(65, 0))


def test_sliding_pages_behind_the_window_may_be_missing() -> None:
    """They are evicted first; the end of the sequence is found, a point far before it is not."""
    kv = make(window=70, full=16, sliding=10)
    first = run(kv, text(600))
    assert [8, 9] == entries(first, SLIDING)
    assert 512 == kv.match(text(520))
    fill(kv, 6)
    assert 6 == kv.stats().sliding.evictions
    assert 0 == kv.stats().full.evictions
    assert [576, 512, 512] == [kv.match(text(n)) for n in (600, 576, 520)]
    assert 0 == kv.match(text(300))
    kv.close(first)
    second = kv.open(text(700))
    assert 576 == second.n_cached
    assert [7, 8] == entries(second, SLIDING)
    assert list(range(9)) == entries(second, FULL)


def test_missing_sliding_pages_are_filled_in_by_who_has_them() -> None:
    """After a fork where none were left was computed once, it is found."""
    kv = make(window=70, full=24, sliding=10)
    first = run(kv, text(600))
    fill(kv, 6)
    fork = [*text(320), *[4] * 20]
    assert 0 == kv.match(fork)
    second = run(kv, fork)
    assert 320 == kv.match(fork)
    third = kv.open(fork)
    assert (first.table[FULL, :5] == third.table[FULL, :5]).all()
    assert [3, 4] == entries(third, SLIDING)
    assert second.table[SLIDING, 4] == third.table[SLIDING, 4]
    assert (second.table[FULL, :5] != third.table[FULL, :5]).all()  # its copies


def test_the_end_of_a_prefix_is_evicted_before_its_beginning() -> None:
    """Page by page, what is left is still a prefix; the sequence used longest ago goes first."""
    kv = make(window=2000, full=16, sliding=16)
    for seed in range(2):
        kv.close(run(kv, text(512, seed)))
    assert 512 == kv.match(text(520, 0))  # looking is not using
    found = []
    holder = kv.open([])
    for position in range(0, 1024, 64):
        assert kv.advance(holder, position)
        found.append([kv.match(text(520, seed)) // 64 for seed in range(2)])
    assert [[7 - n, 8] for n in range(8)] + [[0, 7 - n] for n in range(8)] == found


def test_who_is_used_again_is_evicted_later() -> None:
    """Opening makes a prefix the youngest; what is behind the part that was used keeps its age."""
    kv = make(window=2000, full=12, sliding=12)
    kv.close(run(kv, text(257, 0)))
    kv.close(run(kv, text(257, 1)))
    kv.close(kv.open(text(129, 0)))
    fill(kv, 8)  # four were free, and the oldest four go: two of each
    assert [128, 128] == [kv.match(text(300, seed)) for seed in range(2)]
    fill(kv, 10)
    assert [128, 0] == [kv.match(text(300, seed)) for seed in range(2)]


def test_a_long_prompt_leaves_others_their_end() -> None:
    """Its window moves over more sliding pages than there are; they replace one another, and what
    finished sequences need to go on stays.
    """
    kv = make(window=70, full=64, sliding=16)
    ends = {seed: text(200, seed) for seed in range(4)}
    for tokens in ends.values():
        kv.close(run(kv, tokens))
    long = run(kv, text(1024, seed=9))
    assert kv.stats().sliding.evictions > 8
    assert [192] * 4 == [kv.match([*tokens, 1]) for tokens in ends.values()]
    assert 960 == kv.match(text(1024, seed=9))
    assert kv.stats().sliding.cached >= 12
    kv.close(long)


def test_what_many_begin_with_outlives_what_nobody_asked_for() -> None:
    """A page that was found once is not among those that a window has merely passed."""
    kv = make(window=70, full=64, sliding=16)
    common = text(256)
    for seed in range(3):
        kv.close(run(kv, common + text(400, seed + 1)))
    run(kv, text(1024, seed=9))
    assert 256 == kv.match([*common, 1])


def test_pages_that_have_gone_are_not_published() -> None:
    """Without full layers, a prefix whose end has left the window leads to nothing; who publishes
    in time is found.
    """
    kv = make(window=10, full=0, sliding=16, layers="sliding")
    late, early = kv.open([]), kv.open([])
    assert kv.advance(late, 0, 64)
    assert kv.advance(late, 80)
    kv.publish(late, text(64))
    assert (0, 0, {}) == (late.n_published, kv.match(text(65)), kv.index.root.children)
    assert kv.advance(early, 0, 64)
    kv.publish(early, text(64))
    assert 64 == kv.match(text(65))


def test_equal_pages_of_two_that_run_stay_apart() -> None:
    """Who publishes first is found; the other keeps its own copy, unpublished, and it goes free."""
    kv = make(window=70, full=16, sliding=16)
    first, second = kv.open(text(200)), kv.open(text(200))
    for sequence in (first, second):
        assert kv.advance(sequence, 0, 200)
    moves = second.n_moves
    kv.publish(first, text(200))
    kv.publish(second, text(200))
    assert moves == second.n_moves
    assert not set(first.table[FULL, :4]) & set(second.table[FULL, :4])
    third = kv.open(text(200))
    assert (first.table[FULL, :3] == third.table[FULL, :3]).all()
    kv.close(second)
    assert (0, 12) == (kv.stats().full.cached, kv.free(FULL))
    kv.close(first)
    assert (3, 0) == (kv.stats().full.used, kv.stats().full.cached)


def test_a_page_in_use_replaces_its_unused_twin() -> None:
    """Two copies of a prefix are worth less than a free page: the one that nobody uses goes."""
    kv = make(window=70, full=16, sliding=16)
    first = run(kv, text(200))
    second = kv.open(text(10, 3))  # has nothing in common yet, as far as the cache can tell
    assert kv.advance(second, 0, 200)
    kv.close(first)
    assert (3, 9) == (kv.stats().full.cached, kv.free(FULL))
    kv.publish(second, text(200))
    assert (0, 12) == (kv.stats().full.cached, kv.free(FULL))
    assert (second.table[FULL, :3] == kv.open(text(200)).table[FULL, :3]).all()


def test_a_copy_is_not_evicted_before_what_is_behind_it() -> None:
    """The index has the first one's beginning and the second one's end, and forgets the end first.

    The first one has closed earlier, so its pages would be older.
    """
    kv = make(window=2000, full=16, sliding=16)
    first, second = kv.open(text(130)), kv.open(text(260))
    assert kv.advance(first, 0, 130)
    assert kv.advance(second, 0, 260)
    kv.publish(first, text(130))
    kv.publish(second, text(260))
    kv.close(first)
    kv.close(second)
    assert (4, 256) == (kv.stats().full.cached, kv.match(text(260)))
    holder = kv.open([])
    assert kv.advance(holder, 0, 64 * 12)
    for n in (3, 2, 1, 0):
        assert kv.advance(holder, 64 * (15 - n))
        assert 64 * n == kv.match(text(260))


def test_what_is_behind_an_evicted_copy_is_published_again() -> None:
    """A page that nobody uses can always be had, though a running sequence has published behind
    it: that one's pages are forgotten, stay its own, and are in the index after its next publish.
    """
    kv = make(window=2000, full=8, sliding=16)
    first, second = kv.open(text(130)), kv.open(text(260))
    assert kv.advance(first, 0, 128)
    assert kv.advance(second, 0, 256)
    kv.publish(first, text(128))
    kv.publish(second, text(256))
    kv.close(first)
    assert (2, 2) == (kv.free(FULL), kv.stats().full.cached)
    holder = kv.open([])
    assert kv.advance(holder, 0, 64 * 3)
    assert 64 == kv.match(text(260))  # the first one's page 1 went, and with it 2 and 3
    table = second.table.copy()
    kv.publish(second, text(256))  # nothing new, but for that
    assert 256 == kv.match(text(260))
    assert (table == second.table).all()
    kv.close(second)
    assert 256 == kv.match(text(260))


def test_tokens_that_contradict_themselves_are_noticed() -> None:
    """With the debug flag, publishing other tokens than before is an error, not a wrong answer."""
    kv = make(window=70, full=16, sliding=16)
    sequence = run(kv, text(128))
    assert kv.advance(sequence, 128, 64)
    wrong = [*text(64), *text(128, 1)]
    with pytest.raises(RuntimeError, match="page 1 has been published with other tokens"):
        kv.publish(sequence, wrong)
