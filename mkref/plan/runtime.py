"""Run-time work: what a task finds out from positions, page tables and router logits.

A plan fixes who does which share of the work; how much work there is depends on the step, and how
many steps a launch has on the tokens that come out. These are the same decisions as those of
`cuda/megakernel.cu`, for the interpreter.

What it does not do: compute activations.

Notation: E experts, D head dimension.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from mkref.plan.build import CHUNK_PAGES, MOST_SPLITS, PAGE
from mkref.plan.share import share_half
from mkref.reference.sampling import order_key
from mkref.reference.scalars import Float, sigmoid

if TYPE_CHECKING:
    from mkref.config import NorthConfig
    from mkref.plan.task import Task

__all__ = ["AttentionItems", "Route", "Segment", "attention_items", "chunk_counts", "dense_route"]
__all__ += ["find_experts", "launch_ends", "segments", "split_begins", "split_counts"]
__all__ += ["stopped_rows"]

Ints = npt.NDArray[np.int64]
CHUNK = PAGE * CHUNK_PAGES


def _first_visible(positions: Ints, window: int) -> Ints:
    """First key that each row sees: all, or the last `window` including its own."""
    if window <= 0:
        return np.zeros_like(positions)
    return np.maximum(positions - window + 1, 0)


def chunk_counts(positions: Ints, window: int) -> Ints:
    """Chunks of 128 keys, aligned to absolute positions, that hold each row's visible keys."""
    return positions // CHUNK - _first_visible(positions, window) // CHUNK + 1


def split_counts(positions: Ints, window: int, most_splits: int = MOST_SPLITS) -> Ints:
    """Splits of each row: what MERGE has to read of every KV head.

    >>> split_counts(np.array([127, 128, 4_223, 65_536]), 0)
    array([ 1,  2, 33, 33])
    """
    return np.minimum(chunk_counts(positions, window), most_splits)


def split_begins(n_chunks: Ints, split: Ints, most_splits: int = MOST_SPLITS) -> Ints:
    """First chunk of a split of rows with so many chunks: equal parts, give or take one chunk.

    >>> split_begins(np.array([5, 66, 70, 70]), np.array([3, 3, 3, 33]))
    array([ 3,  6,  6, 70])
    """
    return np.where(n_chunks <= most_splits, split, split * n_chunks // most_splits)


@dataclass(frozen=True)
class AttentionItems:
    """Chunks of one KV head of one row, one entry each; all int64 [items].

    Attributes:
        row, head: whose.
        chunk: counted from the row's first visible chunk.
        split: of the row, that the chunk belongs to.
        nth: chunks of its split that come before it.
        first_key, last_key: visible keys of the row; `last_key` is the token of this step.
        first_page, last_page: pages of the sequence that the chunk reads.
    """

    row: Ints
    head: Ints
    chunk: Ints
    split: Ints
    nth: Ints
    first_key: Ints
    last_key: Ints
    first_page: Ints
    last_page: Ints

    def __len__(self) -> int:
        return len(self.row)

    def __getitem__(self, index: object) -> AttentionItems:
        return AttentionItems(*(field[index] for field in vars(self).values()))


def attention_items(
    positions: Ints, window: int, n_kv_heads: int, task: Task, most_splits: int = MOST_SPLITS
) -> AttentionItems:
    """The chunks that slot `task.first` of `task.count` works on, in its order.

    Splits of a KV head are dealt to the slots in turn, row after row; the chunks of a split follow
    one another.

    Args:
        positions: int64 [rows].
        window: keys visible including the row's own; 0 is all.
        most_splits: of a row.
    """
    n_chunks = chunk_counts(positions, window)
    per_row = np.minimum(n_chunks, most_splits) * n_kv_heads
    row = np.repeat(np.arange(len(positions)), per_row)
    within = np.arange(len(row)) - np.repeat(np.cumsum(per_row) - per_row, per_row)
    row, within = row[task.first :: task.count], within[task.first :: task.count]
    split, head = np.divmod(within, n_kv_heads)
    begin, end = (split_begins(n_chunks[row], split + side, most_splits) for side in (0, 1))
    count = end - begin
    nth = np.arange(count.sum()) - np.repeat(np.cumsum(count) - count, count)
    row, head, split, begin = np.repeat([row, head, split, begin], count, axis=1)
    chunk = begin + nth
    first_key, last_key = _first_visible(positions, window)[row], positions[row]
    first = (first_key // CHUNK + chunk) * CHUNK_PAGES
    return AttentionItems(
        row=row,
        head=head,
        chunk=chunk,
        split=split,
        nth=nth,
        first_key=first_key,
        last_key=last_key,
        first_page=np.maximum(first, first_key // PAGE),
        last_page=np.minimum(first + CHUNK_PAGES - 1, last_key // PAGE),
    )


@dataclass(frozen=True)
class Route:
    """The experts of one layer for the whole batch.

    Attributes:
        layer: whose.
        experts: chosen by some row, ascending.
        scores: float32 [E, rows]; 0 where the row did not choose the expert.
    """

    layer: int
    experts: tuple[int, ...]
    scores: Float


def dense_route(layer: int, rows: int) -> Route:
    """One expert with score 1 for every row."""
    return Route(layer, (0,), np.ones((1, rows), dtype=np.float32))


def find_experts(layer: int, logits: Float, config: NorthConfig) -> Route:
    """The k largest logits of every row; equal logits: the lower id; a NaN loses to everything.

    Args:
        logits: float32 [rows, E].
    """
    rows, n_experts = logits.shape
    nan = np.isnan(logits)
    keys = order_key(np.where(nan, np.float32(0), logits), np.arange(n_experts))
    keys = np.where(nan, keys & np.uint64(0xFFFFFFFF), keys)
    chosen = np.sort(np.argsort(keys, axis=1)[:, -config.num_experts_per_tok :], axis=1)
    picked = np.take_along_axis(logits, chosen, axis=1)
    values = sigmoid(picked) + (picked - picked)  # NaN stays NaN
    if config.norm_topk_prob:
        total = np.zeros(rows, dtype=np.float32)
        for i in range(chosen.shape[1]):  # ascending id
            total = total + values[:, i]
        values = values / total[:, None]
    scores = np.zeros((n_experts, rows), dtype=np.float32)
    scores[chosen, np.arange(rows)[:, None]] = values
    experts = tuple(np.flatnonzero((scores != 0).any(axis=1)).tolist())
    return Route(layer, experts, scores)


@dataclass(frozen=True)
class Segment:
    """Granules `first .. first + count - 1` of the `active`-th active expert."""

    active: int
    first: int
    count: int


def segments(task: Task, n_active: int) -> Iterator[Segment]:
    """Parts of a GATE_UP task's half of a share, one per expert that it touches.

    >>> from mkref.plan.task import Op, Task
    >>> task = Task(Op.GATE_UP, layer=0, first=1, count=2, blocks=6)
    >>> list(segments(task, 3))
    [Segment(active=1, first=3, count=3), Segment(active=2, first=0, count=6)]
    """
    unit, end = share_half(n_active * task.blocks, task.index, task.count, task.first)
    while unit < end:
        active, first = divmod(unit, task.blocks)
        count = min(end - unit, task.blocks - first)
        yield Segment(active, first, count)
        unit += count


def stopped_rows(tokens: npt.NDArray[np.integer], stop_ids: npt.NDArray[np.integer]) -> int:
    """Rows that have produced one of their stop ids, at whatever step of the launch.

    Args:
        tokens: integers [steps, rows], all tokens of the launch so far.
        stop_ids: integers [rows, 8]; an id below 0 is none.

    >>> stopped_rows(np.array([[5, 7], [2, 9]]), np.array([[5, -1], [7, 2]]))
    2
    """
    equal = (tokens[:, :, None] == stop_ids) & (stop_ids >= 0)  # [steps, rows, ids]
    return int(np.count_nonzero(equal.any(axis=(0, 2))))


def launch_ends(
    tokens: npt.NDArray[np.integer],
    stop_ids: npt.NDArray[np.integer],
    stop_after: int,
    cancelled: bool,
) -> bool:
    """Is the step that is just done the last one of its launch, for another reason than `n_steps`?

    Args:
        tokens: integers [steps, rows], all tokens of the launch so far.
        stop_ids: integers [rows, 8]; an id below 0 is none.
        stop_after: stopped rows that end the launch; 0 is never.
        cancelled: the host's wish was seen in this step (`control[0]`).

    >>> tokens, stop_ids = np.array([[5, 7], [4, 9]]), np.array([[5, -1], [2, -1]])
    >>> [launch_ends(tokens, stop_ids, n, cancelled=False) for n in (0, 1, 2)]
    [False, True, False]
    """
    return cancelled or 0 < stop_after <= stopped_rows(tokens, stop_ids)
