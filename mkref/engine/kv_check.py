"""A proof that the accounting of a KV cache is right, by counting everything again.

What it does not do: repair anything, or run by itself (`KvCache.check`, MKREF_DEBUG_KV).
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, NoReturn

import numpy as np

from mkref.engine.kv_index import page_keys
from mkref.engine.kv_sizes import FULL, KINDS
from mkref.plan.build import PAGE

if TYPE_CHECKING:
    from collections.abc import Collection

    from mkref.engine.kv_index import Node, Tokens
    from mkref.engine.kv_sequence import KvSequence
    from mkref.engine.kv_store import PageStore

__all__ = ["check_cache", "check_tokens"]


def check_cache(store: PageStore, live: Collection[KvSequence]) -> None:
    """Count all pages, owners and places in the index again.

    Raises:
        RuntimeError: names the kind and the page that is wrong.
    """
    nodes = _check_index(store)
    for kind in range(len(KINDS)):
        owners = _check_tables(store, live, kind)
        _check_pool(store, kind, owners)
        _check_nodes(store, kind, nodes)
    if FULL in store.kinds:
        _check_order(store, nodes)


def _wrong(kind: int, what: str) -> NoReturn:
    raise RuntimeError(f"kv: {KINDS[kind]} {what}")


def _check_tables(store: PageStore, live: Collection[KvSequence], kind: int) -> Counter[int]:
    """Tables hold exactly their range, and may write only what is theirs; how often each page."""
    pool, owners = store.pools[kind], Counter[int]()
    for sequence in live:
        begin, end = sequence.begin[kind], sequence.end[kind]
        entries = np.flatnonzero(sequence.table[kind] != -1).tolist()
        if entries != list(range(begin, end)):
            _wrong(kind, f"entries {entries} of a table are not {begin} .. {end - 1}")
        pages = sequence.table[kind, begin:end].tolist()
        strange = [page for page in pages if not 0 <= page < pool.total]
        if strange:
            _wrong(kind, f"pages {strange} of a table are not in 0 .. {pool.total - 1}")
        owners.update(pages)
        written = pages[max(0, sequence.n_published // PAGE - begin) :]
        shared = [page for page in written if pool.refs[page] > 1 or pool.nodes[page]]
        if shared:
            _wrong(kind, f"pages {shared} are shared or published, and may still be written")
    return owners


def _check_pool(store: PageStore, kind: int, owners: Counter[int]) -> None:
    """Every page is free, cached or used; its count is that of its owners."""
    pool = store.pools[kind]
    states = Counter(pool.free)
    states.update([*pool.cached, *pool.passed])
    states.update(owners.keys())
    twice = sorted(page for page, n in states.items() if n > 1)
    lost = sorted(set(range(pool.total)) - states.keys())
    strange = sorted(states.keys() - set(range(pool.total)))
    if twice or lost or strange:
        _wrong(kind, f"pages owned twice {twice}, lost {lost}, unknown {strange}")
    for page, refs in enumerate(pool.refs):
        if refs != owners[page]:
            _wrong(kind, f"page {page} is counted {refs} times, and in {owners[page]} tables")
    for page in pool.free:
        if pool.nodes[page]:
            _wrong(kind, f"page {page} is free and in the index")
    for page in (*pool.cached, *pool.passed):
        if not pool.nodes[page]:
            _wrong(kind, f"page {page} is cached and not in the index")


def _check_index(store: PageStore) -> list[Node]:
    """The index is a tree of live nodes; all of them but the root."""
    nodes = [store.index.root]
    for node in nodes:  # grows meanwhile
        for key, child in node.children.items():
            if child.key != key or child.parent is not node or not child.alive:
                raise RuntimeError(f"kv: index: pages {child.pages} are in a wrong place")
        nodes += node.children.values()
    del nodes[0]
    if any(node.pages == [-1, -1] and not node.children for node in nodes):
        raise RuntimeError("kv: index: a node leads to no page")
    return nodes


def _check_nodes(store: PageStore, kind: int, nodes: list[Node]) -> None:
    """The index points at pages that point back, and no other page points at it."""
    pool = store.pools[kind]
    for node in nodes:
        page = node.pages[kind]
        if page >= 0 and pool.nodes[page] is not node:
            _wrong(kind, f"page {page} is in the index, and does not know where")
        if page < 0 and kind == FULL and FULL in store.kinds:
            _wrong(kind, "page of a node of the index is missing")
    listed = sum(node.pages[kind] >= 0 for node in nodes)
    known = [page for page, node in enumerate(pool.nodes) if node]
    if listed != len(known):
        _wrong(kind, f"pages {known} are published, the index has {listed}")


def _check_order(store: PageStore, nodes: list[Node]) -> None:
    """No full page is evicted before a cached page behind it."""
    pool = store.pools[FULL]
    turn = {page: n for n, page in enumerate(pool.cached)}
    last: dict[Node, int] = {}  # when the last page at or behind a node is evicted
    for node in reversed(nodes):  # children stand after their parents
        own = turn.get(node.pages[FULL], -1)
        behind = max((last[child] for child in node.children.values()), default=-1)
        if 0 <= own < behind:
            _wrong(FULL, f"page {node.pages[FULL]} is evicted before a page behind it")
        last[node] = max(own, behind)


def check_tokens(sequence: KvSequence, tokens: Tokens) -> None:
    """What a sequence publishes begins with what it has published before.

    Raises:
        RuntimeError: names the first page with other tokens.
    """
    node, keys = sequence.node, []
    while node.parent:
        keys.append(node.key)
        node = node.parent
    pairs = zip(reversed(keys), page_keys(tokens, 0, len(keys)), strict=True)
    for entry, (known, key) in enumerate(pairs):
        if known != key:
            raise RuntimeError(f"kv: publish: page {entry} has been published with other tokens")
