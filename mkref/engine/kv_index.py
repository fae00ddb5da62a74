"""The prefix index: which tokens, from the first one on, lead to which pages.

A tree with one node per complete page: a node's children are the pages that followed it, found by
their 64 token ids. So a node stands for all the tokens from the root down to it. The dictionaries
hash the ids and then compare them: two different pages with equal hashes never take each other's
place.

A node always has a full page. Its sliding page may be missing: who is far enough behind it does not
see that page, so it may have been evicted, or the sequence may never have had it. (A model without
full layers has nodes without any page, as long as a node behind them has one.)

What it does not do: count who uses a page, or choose what to evict (`mkref.engine.kv_pool`).
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence

import numpy as np

from mkref.engine.kv_sizes import SLIDING, first_seen
from mkref.plan.build import PAGE

__all__ = ["Node", "PrefixIndex", "Tokens", "page_keys"]

Tokens = Sequence[int] | np.ndarray
BLOCK = 16 * PAGE
"""Tokens that are turned into keys at once: who misses early should not pay for a long prompt."""


def page_keys(tokens: Tokens, begin: int, end: int) -> Iterator[bytes]:
    """The ids of pages `begin .. end - 1` of a sequence, 256 bytes each."""
    size = PAGE * 4
    for start in range(begin * PAGE, end * PAGE, BLOCK):
        block = tokens[start : min(start + BLOCK, end * PAGE)]
        if isinstance(block, np.ndarray):
            words = block.astype(np.int32).tobytes()
        else:
            words = array("i", block).tobytes()
        for at in range(0, len(words), size):
            yield words[at : at + size]


class Node:
    """A complete page behind a certain prefix.

    Attributes:
        key: its tokens, int32 bytes.
        parent: the page before it; None for the root, which stands for no tokens.
        children: the pages after it that are known.
        pages: page numbers, full and sliding; -1: none.
        alive: whether it is in the index. A sequence may hold on to a node that was removed.
    """

    __slots__ = ("alive", "children", "key", "pages", "parent")

    def __init__(self, key: bytes, parent: Node | None) -> None:
        self.key = key
        self.parent = parent
        self.children: dict[bytes, Node] = {}
        self.pages = [-1, -1]
        self.alive = True


class PrefixIndex:
    """All published pages.

    Attributes:
        root: in front of every first page.
    """

    def __init__(self) -> None:
        self.root = Node(b"", None)

    def longest(self, tokens: Tokens, limit: int, window: int) -> list[Node]:
        """The longest prefix of complete pages that a sequence can go on from.

        Args:
            tokens: of the sequence.
            limit: most pages.
            window: of the sliding layers; 0 if there are none. All sliding pages that the token
                after the prefix sees must be there.

        Returns:
            Its nodes, the first page first.
        """
        node, nodes = self.root, []
        usable = run = 0  # run: how many of the last nodes have a sliding page, without a gap
        for n, key in enumerate(page_keys(tokens, 0, limit), 1):
            child = node.children.get(key)
            if child is None:
                break
            node = child
            nodes.append(node)
            run = run + 1 if node.pages[SLIDING] >= 0 else 0
            if not window or run >= n - first_seen(n * PAGE, window):
                usable = n
        return nodes[:usable]

    def add(self, parent: Node, key: bytes) -> Node:
        """A new node without pages."""
        node = parent.children[key] = Node(key, parent)
        return node

    def remove(self, node: Node) -> list[Node]:
        """Take a node out, and everything behind it.

        Returns:
            What was removed; the pages in it are for the caller to deal with.
        """
        assert node.parent is not None
        del node.parent.children[node.key]
        removed = [node]
        for each in removed:  # grows meanwhile
            removed += each.children.values()
            each.alive = False
        return removed
