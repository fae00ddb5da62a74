"""The task record: the one unit of work that every machine executes.

A task is 16 int32 words (64 bytes). This module is the only definition of those words: the CUDA
struct is generated from `FIELDS`, the interpreter and the verifier read the same names. It does not
decide which tasks exist (`mkref.plan.build`) or what they compute (`cuda/megakernel.cu`,
`mkref.plan.interpret`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from enum import IntEnum
from operator import attrgetter

__all__ = ["FIELDS", "NO_COUNTER", "WORDS", "Flag", "Op", "Task"]

NO_COUNTER = -1
"""In `wait`, `route_wait` and `signal`: nothing to wait for, nothing to signal."""


class Op(IntEnum):
    """Operations of the decode step, in the order in which a layer needs them."""

    EMBED = 0  # x <- embedding of the row's token
    ROUTER = 1  # router logits of the normed x
    QKV = 2  # q, k, v of the normed x, rotary positions applied
    ATTENTION = 3  # chunks of 128 keys: partial outputs
    MERGE = 4  # attention output from its chunks; appends k, v to the cache
    GATE_UP = 5  # h = silu(gate) * up for the active experts
    O_PROJ = 6  # x_mid <- x + output projection
    DOWN = 7  # next x <- x_mid + down projections of the active experts
    HEAD = 8  # logits, and the best token of this task's vocabulary rows
    SAMPLE = 9  # next tokens from the bests of all HEAD tasks, on every SM for itself


class Flag(IntEnum):
    """Bits of `Task.flags`."""

    ROPE = 1  # QKV: rotate q and k
    SLIDING = 2  # ATTENTION: pages come from the sliding layers' page table
    DENSE = 4  # GATE_UP, DOWN: one expert of width F with score 1, no router
    RELEASE = (
        8  # the SM's last task of a layer that uses its experts: the loader may write the next
    )
    LAST_OF_LAYER = 16  # the SM's last task of a layer: what follows begins with an RMSNorm
    EARLY = 32  # ROUTER, QKV, HEAD: with few rows, x is read as soon as its words are there


@dataclass(frozen=True)
class Task:
    """One task. `first, count` is a range of 16-row blocks, or "slot `first` of `count`" for work
    whose amount is only known at run time (ATTENTION, MERGE, GATE_UP).
    """

    op: int
    layer: int
    first: int
    count: int
    weights: int = 0  # tile index of the operator's first tile in the packed weights
    k_tiles: int = 0  # depth of the product in 16-wide tiles
    blocks: int = 0  # GATE_UP: granules of 8 outputs per expert; DOWN: row blocks per expert
    wait: int = NO_COUNTER  # counter that must reach wait_count before the inputs may be read
    wait_count: int = 0  # arrivals per step
    # What the loader waits for. GATE_UP, DOWN: counter of the router logits, in which it finds the
    # experts. ATTENTION: counter that must be full for all steps before this one, or none.
    route_wait: int = NO_COUNTER
    route_count: int = 0  # arrivals per step
    signal: int = NO_COUNTER  # counter that gets one arrival when the outputs are visible
    flags: int = 0
    window: int = 0  # ATTENTION, MERGE: keys visible to a token including itself; 0 = all
    kv_tiles: int = 0  # ATTENTION, MERGE: tile index of the layer's first page in the KV pool
    # HEAD: which slot of the bests this task fills; SAMPLE: how many slots there are; GATE_UP: row
    # blocks of ROUTER and QKV, which the shares of all SMs make up for.
    index: int = 0

    def words(self) -> tuple[int, ...]:
        """The 16 int32 words, in the order of `FIELDS`."""
        return _words(self)

    @classmethod
    def from_words(cls, words: Sequence[int]) -> Task:
        """Inverse of `words`.

        >>> t = Task(Op.QKV, layer=3, first=0, count=2)
        >>> Task.from_words(t.words()) == t
        True
        """
        return cls(*(int(w) for w in words))


FIELDS: tuple[str, ...] = tuple(f.name for f in fields(Task))
WORDS = len(FIELDS)
_words = attrgetter(*FIELDS)
