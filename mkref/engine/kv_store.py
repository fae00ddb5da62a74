"""All pages, and the prefix index over them: publish a page, take one, evict one.

What is evicted first is what was let go first, separately for each kind, and for sliding pages
separately for those in the middle of a sequence and those at its end (`PagePool.victim`). A full
page goes with its node and all behind it, as no prefix through them could be found any more; a
sliding page goes alone.

What it does not do: know sequences (`mkref.engine.kv`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from mkref.engine.kv_index import PrefixIndex
from mkref.engine.kv_pool import PagePool
from mkref.engine.kv_sizes import FULL

if TYPE_CHECKING:
    from mkref.engine.kv_index import Node

__all__ = ["PageStore"]


class PageStore:
    """The pools of both kinds and the index.

    Args:
        kinds: that the model has.
        budget: pages of each kind.
    """

    def __init__(self, kinds: tuple[int, ...], budget: tuple[int, int]) -> None:
        self.kinds = kinds
        self.pools = (PagePool(budget[0]), PagePool(budget[1]))
        self.index = PrefixIndex()

    def take(self, kind: int) -> int:
        """A page, from now on used once; if none is free, a cached one is evicted.

        There must be one (`PagePool.available`).
        """
        pool = self.pools[kind]
        if not pool.free:
            self.evict(kind)
        return pool.take()

    def evict(self, kind: int) -> None:
        """Make one page or more free: the cached one that was let go first."""
        pool = self.pools[kind]
        node = pool.nodes[pool.victim()]
        assert node is not None
        pool.evictions += 1
        if kind == FULL:
            self._forget(node)
            return
        pool.withdraw(node.pages[kind])
        node.pages[kind] = -1
        # Without full layers, nodes that lead to no page any more are of no use.
        while node.parent and not node.children and node.pages == [-1, -1]:
            self.index.remove(node)
            node = node.parent

    def _forget(self, node: Node) -> None:
        """Take a node out of the index, with all behind it.

        What is behind it and cached has been let go earlier, so it is gone by now. What is left is
        used by sequences that have a copy of this page of their own; they publish it again.
        """
        for each in self.index.remove(node):
            for kind in self.kinds:
                if each.pages[kind] >= 0:
                    self.pools[kind].withdraw(each.pages[kind])

    def offer(self, node: Node, kind: int, page: int) -> None:
        """Publish a used page as that of a node, unless there is one that somebody uses.

        One that nobody uses becomes free: a second copy is worth less than room.
        """
        pool, old = self.pools[kind], node.pages[kind]
        if page == old or (old >= 0 and pool.refs[old]):
            return
        if old >= 0:
            pool.withdraw(old)
        node.pages[kind] = page
        pool.nodes[page] = node
