"""Pages of the KV cache: the accounting holds under any sequence of requests."""

from __future__ import annotations

import numpy as np
import pytest

from mkref.engine.kv import FULL, SLIDING, KvPages, KvSequence, pages_for, window_pages
from mkref.plan.build import PAGE
from tests.engines import tiny_model


def make(
    window: int,
    full: int,
    sliding: int,
    max_context: int = 1024,
    layers: str = "both",
    ahead: int = 1,
) -> KvPages:
    """Pages for a model with the given window; `layers` is "both", "full" or "sliding"."""
    from dataclasses import replace

    config, _ = tiny_model()
    kinds = {
        "both": config.layer_types,
        "full": ("full_attention",) * 3,
        "sliding": ("sliding_attention",) * 3,
    }
    config = replace(config, sliding_window=window, layer_types=kinds[layers])
    return KvPages(config, full, sliding, max_context, ahead)


def test_window_pages_is_the_most_that_any_place_needs() -> None:
    """The formula against every offset of the window within a page."""
    for window in [*range(1, 200), 4096]:
        worst = max((at + window - 1) // PAGE + 1 for at in range(PAGE))
        assert worst == window_pages(window)


@pytest.mark.parametrize("seed", range(6))
def test_random_requests(seed: int) -> None:
    """Open, advance, close at random: no page is lost, none has two owners, tokens stay readable.

    A dictionary plays the memory: every token writes its name into its page, and after every step
    all tokens that a layer of the kind may see must still be there.
    """
    rng = np.random.default_rng(seed)
    window = int(rng.choice([1, 5, 64, 65, 130, 300]))
    kv = make(window, full=30, sliding=14)
    memory: dict[tuple[int, int, int], tuple[int, int]] = {}
    live: dict[int, tuple[KvSequence, int]] = {}
    opened = refused = 0
    for _ in range(1500):
        action = rng.random()
        if action < 0.02:
            n = int(rng.integers(1, 900))
            sequence = kv.open(n)
            enough = all(
                need <= kv.budget[kind] - sum(s.reserved[kind] for s, _ in live.values())
                for kind, need in enumerate(kv.needs(n))
            )
            assert enough == (sequence is not None)
            if sequence is None:
                refused += 1
            else:
                opened += 1
                live[opened] = (sequence, 0)
        elif action < 0.03 and live:
            name = int(rng.choice(list(live)))
            kv.close(live.pop(name)[0])
        elif live:
            name = int(rng.choice(list(live)))
            sequence, position = live[name]
            for _ in range(int(rng.integers(1, 60))):
                if position == sequence.n_tokens:
                    break
                before = sequence.table.copy()
                changed = kv.advance(sequence, position)
                assert changed == (before != sequence.table).any()
                for kind in (FULL, SLIDING):
                    page = int(sequence.table[kind, position // PAGE])
                    assert page >= 0
                    memory[kind, page, position % PAGE] = (name, position)
                    first = max(0, position - window + 1) if kind == SLIDING else 0
                    for seen in {first, (first + position) // 2, position}:
                        page = int(sequence.table[kind, seen // PAGE])
                        assert (name, seen) == memory[kind, page, seen % PAGE]
                position += 1
            live[name] = (sequence, position)
        kv.check()
    assert opened > 3
    assert refused > 0
    for sequence, _ in live.values():
        kv.close(sequence)
    kv.check()
    assert (30, 14) == (kv.free(FULL), kv.free(SLIDING))
    assert (30, 14) == (kv.unreserved(FULL), kv.unreserved(SLIDING))


def test_sliding_pages_that_left_the_window_are_given_back() -> None:
    """Entries behind the window become -1, the page serves again; full layers keep everything."""
    kv = make(window=70, full=16, sliding=3)
    sequence = kv.open(1000)
    assert sequence is not None
    for position in range(1000):
        kv.advance(sequence, position)
        first = max(0, position - 69) // PAGE
        held = np.flatnonzero(sequence.table[SLIDING] >= 0).tolist()
        assert list(range(first, position // PAGE + 1)) == held
        assert sequence.held(SLIDING) <= window_pages(70)
        assert sequence.held(FULL) == position // PAGE + 1
    kv.check()


def test_a_jump_takes_what_the_window_needs() -> None:
    """A prompt that is taken in at once gets all full pages, and only the last sliding pages."""
    kv = make(window=70, full=16, sliding=3)
    sequence = kv.open(1000)
    assert sequence is not None
    assert kv.advance(sequence, 700)
    assert list(range(11)) == np.flatnonzero(sequence.table[FULL] >= 0).tolist()
    assert [9, 10] == np.flatnonzero(sequence.table[SLIDING] >= 0).tolist()
    assert not kv.advance(sequence, 701)
    kv.check()


@pytest.mark.parametrize("window", [1, 5, 64, 66, 70, 300])
@pytest.mark.parametrize("ahead", [1, 8, 32, 100])
def test_several_tokens_at_once(window: int, ahead: int) -> None:
    """Everything that any of the tokens sees or is has a page, within what was reserved.

    The tokens need not all come: the next call begins among them, or behind them.
    """
    rng = np.random.default_rng(window * 1000 + ahead)
    needs = window_pages(window + ahead - 1)
    kv = make(window, full=16, sliding=needs, ahead=ahead)
    sequence = kv.open(1000)
    assert sequence is not None
    position = 0
    while position < 1000:
        count = min(int(rng.integers(1, ahead + 1)), 1000 - position)
        kv.advance(sequence, position, count)
        for seen in {max(0, position - window + 1), position, position + count - 1}:
            assert sequence.table[SLIDING, seen // PAGE] >= 0
            assert sequence.table[FULL, seen // PAGE] >= 0
        assert sequence.held(SLIDING) <= needs
        kv.check()
        position += int(rng.integers(1, count + 1))
    kv.close(sequence)
    kv.check()
    assert needs == kv.free(SLIDING)


@pytest.mark.parametrize(("layers", "needs"), [("full", (4, 0)), ("sliding", (0, 3))])
def test_kinds_that_a_model_lacks_need_no_pages(layers: str, needs: tuple[int, int]) -> None:
    """Without full (or sliding) layers a sequence holds no pages of that kind."""
    kv = make(window=70, full=4 if layers == "full" else 0, sliding=3, layers=layers)
    assert needs == kv.needs(256)
    sequence = kv.open(256)
    assert sequence is not None
    kv.advance(sequence, 255)
    kv.check()


def test_reservations_keep_a_promise() -> None:
    """Who was admitted always gets its pages, also when somebody else wanted them."""
    kv = make(window=70, full=8, sliding=9)
    first, second = kv.open(256), kv.open(256)
    assert first is not None
    assert second is not None
    assert kv.open(64) is None
    assert 8 == kv.free(FULL)
    for sequence in (first, second):
        kv.advance(sequence, 255)
    assert 0 == kv.free(FULL)
    kv.close(first)
    assert kv.open(256) is not None
    assert (4, 3) == kv.needs(4 * PAGE)
    assert 4 == pages_for(256)


def test_check_finds_every_kind_of_damage() -> None:
    """A lost page, a page with two owners, a wrong range, a wrong sum: each is named."""

    def damaged() -> tuple[KvPages, KvSequence]:
        kv = make(window=70, full=8, sliding=9)
        sequence = kv.open(256)
        assert sequence is not None
        kv.advance(sequence, 130)
        return kv, sequence

    kv, _ = damaged()
    kv._free[FULL].pop()
    with pytest.raises(RuntimeError, match=r"lost \[\d\]"):
        kv.check()
    kv, sequence = damaged()
    kv._free[FULL].append(int(sequence.table[FULL, 0]))
    with pytest.raises(RuntimeError, match=r"owned twice \[\d\]"):
        kv.check()
    kv, sequence = damaged()
    sequence.table[SLIDING, 0] = -1
    with pytest.raises(RuntimeError, match="are not one range"):
        kv.check()
    kv, _ = damaged()
    kv._reserved[FULL] += 1
    with pytest.raises(RuntimeError, match="pages reserved, not"):
        kv.check()


def test_beyond_the_promise_is_refused() -> None:
    """A position outside of what a sequence was opened for is a bug of the caller."""
    kv = make(window=70, full=8, sliding=9)
    sequence = kv.open(64)
    assert sequence is not None
    with pytest.raises(ValueError, match="position 64 of a sequence opened for 64"):
        kv.advance(sequence, 64)
    with pytest.raises(ValueError, match=r"positions 63 \+ 2 of a sequence opened for 64"):
        kv.advance(sequence, 63, 2)
    with pytest.raises(ValueError, match="2 tokens at once, pages were reserved for 1"):
        kv.advance(sequence, 3, 2)
    assert kv.has_room(7 * PAGE)
    assert not kv.has_room(7 * PAGE + 1)
