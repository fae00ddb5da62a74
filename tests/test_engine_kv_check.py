"""The proof of the KV cache's accounting finds every kind of damage."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import pytest

from mkref.engine.kv import FULL, SLIDING, KvCache, KvSequence
from tests.test_engine_kv import make, run, text

if TYPE_CHECKING:
    from mkref.engine.kv_index import Node


def place(sequence: KvSequence) -> Node:
    """The index's node for the last published page, which has one before it."""
    assert sequence.node.parent
    return sequence.node


def lose_a_page(kv: KvCache, sequence: KvSequence) -> None:
    """A free page is in no list any more."""
    kv.pools[FULL].free.pop()


def own_a_page_twice(kv: KvCache, sequence: KvSequence) -> None:
    """A used page is free, too."""
    kv.pools[FULL].free.append(int(sequence.table[FULL, 0]))


def make_up_a_page(kv: KvCache, sequence: KvSequence) -> None:
    """A page that the pool does not have."""
    kv.pools[SLIDING].free.append(99)


def drop_an_entry(kv: KvCache, sequence: KvSequence) -> None:
    """A table has a hole."""
    sequence.table[SLIDING, sequence.begin[SLIDING]] = -1


def point_outside(kv: KvCache, sequence: KvSequence) -> None:
    """A table names a page that the pool does not have."""
    sequence.table[FULL, 0] = 77


def count_wrong(kv: KvCache, sequence: KvSequence) -> None:
    """A page has an owner less than it counts."""
    kv.pools[FULL].refs[int(sequence.table[FULL, 1])] += 1


def free_a_published_page(kv: KvCache, sequence: KvSequence) -> None:
    """The index still points at a free page."""
    pool = kv.pools[FULL]
    page, _ = pool.cached.popitem()
    pool.free.append(page)


def forget_where(kv: KvCache, sequence: KvSequence) -> None:
    """A used page does not know that it is published."""
    kv.pools[FULL].nodes[int(sequence.table[FULL, 0])] = None


def forget_where_a_cached_one_is(kv: KvCache, sequence: KvSequence) -> None:
    """A cached page is in no node."""
    kv.pools[FULL].nodes[next(iter(kv.pools[FULL].cached))] = None


def publish_in_secret(kv: KvCache, sequence: KvSequence) -> None:
    """A page says that it is in the index, and is not."""
    place(sequence).pages[SLIDING] = -1


def empty_a_node(kv: KvCache, sequence: KvSequence) -> None:
    """A node of the index without its full page."""
    kv.pools[FULL].nodes[place(sequence).pages[FULL]] = None
    place(sequence).pages[FULL] = -1


def cut_a_branch(kv: KvCache, sequence: KvSequence) -> None:
    """A node hangs below a node that is not its parent."""
    place(sequence).parent = kv.index.root


def kill_a_node(kv: KvCache, sequence: KvSequence) -> None:
    """A node in the index says that it has been removed."""
    place(sequence).alive = False


def write_what_is_shared(kv: KvCache, sequence: KvSequence) -> None:
    """A sequence may still write a page that is published."""
    sequence.n_published -= 64


def evict_the_beginning(kv: KvCache, sequence: KvSequence) -> None:
    """The first page of a prefix would be evicted before the others."""
    pool = kv.pools[FULL]
    pool.cached.move_to_end(next(reversed(pool.cached)), last=False)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lose_a_page, r"kv: full pages owned twice \[\], lost \[\d+\]"),
        (own_a_page_twice, r"kv: full pages owned twice \[\d+\]"),
        (make_up_a_page, r"kv: sliding pages .*, unknown \[99\]"),
        (drop_an_entry, r"kv: sliding entries \[3\] of a table are not 2 \.\. 3"),
        (point_outside, r"kv: full pages \[77\] of a table are not in 0 \.\. 15"),
        (count_wrong, r"kv: full page \d+ is counted 2 times, and in 1 tables"),
        (free_a_published_page, r"kv: full page \d+ is free and in the index"),
        (forget_where, r"kv: full page \d+ is in the index, and does not know where"),
        (forget_where_a_cached_one_is, r"kv: full page \d+ is cached and not in the index"),
        (publish_in_secret, r"kv: sliding pages .* are published, the index has \d+"),
        (empty_a_node, r"kv: full page of a node of the index is missing"),
        (cut_a_branch, r"kv: index: pages \[\d+, \d+\] are in a wrong place"),
        (kill_a_node, r"kv: index: pages \[\d+, \d+\] are in a wrong place"),
        (write_what_is_shared, r"kv: full pages \[\d+\] are shared or published, and may still be"),
        (evict_the_beginning, r"kv: full page \d+ is evicted before a page behind it"),
    ],
)
def test_check_finds(damage: Callable[[KvCache, KvSequence], None], message: str) -> None:
    """Each kind of damage, in one line that names the kind and the page."""
    kv = make(window=100, full=16, sliding=16)
    kv.close(run(kv, text(256, seed=1)))
    sequence = run(kv, text(256))
    kv.check()
    damage(kv, sequence)
    with pytest.raises(RuntimeError, match=message):
        kv.check()


def test_nodes_that_lead_nowhere_are_found() -> None:
    """Without full layers a node has no page of its own, but there must be one behind it."""
    kv = make(window=70, full=0, sliding=16, layers="sliding")
    kv.close(run(kv, text(200)))
    kv.check()
    kv.index.add(kv.index.root, bytes(256))
    with pytest.raises(RuntimeError, match="kv: index: a node leads to no page"):
        kv.check()


@pytest.mark.parametrize("how", ["flag", "environment", "off"])
def test_debugging_checks_after_every_operation(how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """By a flag or by MKREF_DEBUG_KV=1; without them, damage goes unnoticed until asked for."""
    monkeypatch.setenv("MKREF_DEBUG_KV", "1" if how == "environment" else "0")
    debug = True if how == "flag" else None
    operations: tuple[Callable[[KvCache, KvSequence], object], ...] = (
        lambda kv, _: kv.open([]),
        lambda kv, sequence: kv.advance(sequence, 192, 130),
        lambda kv, sequence: kv.publish(sequence, text(192)),
        lambda kv, sequence: kv.close(sequence),
    )
    for operation in operations:
        kv = make(window=70, full=16, sliding=16, debug=debug)
        sequence = run(kv, text(128))
        assert kv.advance(sequence, 128, 64)
        kv.pools[FULL].free.pop(0)
        if how == "off":
            operation(kv, sequence)
        else:
            with pytest.raises(RuntimeError, match="lost"):
                operation(kv, sequence)
