"""Lesson 05, long rows: how many splits and items a row has, the results that they leave for MERGE,
and the record of the kernel before there were splits.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np

from mkref.config import NORTH_MINI_CODE as NORTH
from mkref.geometry import BF16_BYTES
from mkref.lessons.lanes import Look, Span, lanes_figure
from mkref.lessons.lesson_05 import CHUNK, context_ms
from mkref.plan.runtime import chunk_counts, split_begins, split_counts
from mkref.widgets.figure import Figure, Table

__all__ = ["Results", "before_ms", "items_of", "results_of", "splits_figure"]

BEFORE = "h200/version_four/contexts.json"
"""Record of the kernel whose items were single chunks at every context."""
LOOKS = {
    "even": Look("a split", "#56B4E9"),
    "odd": Look("the next split", "#F0E442", "diagonal"),
}


def items_of(tokens: int, window: int = 0) -> int:
    """Items of attention of one row whose newest token is number `tokens`; window 0: all keys."""
    return int(split_counts(np.array([tokens - 1]), window)[0]) * NORTH.num_key_value_heads


def result_bytes(results: int) -> int:
    """Bytes of so many results of each query head, all float32: output, maximum and sum."""
    return results * NORTH.num_attention_heads * (NORTH.head_dim + 2) * 4


def key_bytes(tokens: int) -> int:
    """Bytes of the keys and values of one row in one layer that sees all of them, bfloat16."""
    return tokens * 2 * NORTH.kv_width * BF16_BYTES


@dataclass(frozen=True)
class Results:
    """What the attention of one row leaves for MERGE in a layer that sees all keys.

    Attributes:
        tokens: of the row.
        chunks: results of a query head, if each chunk left one.
        splits: results of a query head as they are.
    """

    tokens: int
    chunks: int
    splits: int

    @property
    def chunks_mb(self) -> float:
        """Megabytes of one result per chunk and query head."""
        return result_bytes(self.chunks) / 1e6

    @property
    def splits_mb(self) -> float:
        """Megabytes of one result per split and query head."""
        return result_bytes(self.splits) / 1e6

    def __str__(self) -> str:
        return (
            f"{self.tokens:7,} tokens, {key_bytes(self.tokens) / 1e6:5.1f} MB of keys and values: "
            f"{self.chunks:5,} chunks {self.chunks_mb:4.1f} MB, "
            f"{self.splits:2} splits {self.splits_mb:3.1f} MB [derived]"
        )


def results_of(tokens: int) -> Results:
    """Results of one row of so many tokens, of each query head in one layer that sees all keys.

    >>> results_of(262_144).chunks, results_of(262_144).splits
    (2048, 33)
    """
    last = np.array([tokens - 1])
    return Results(tokens, int(chunk_counts(last, 0)[0]), int(split_counts(last, 0)[0]))


def before_ms(context: int) -> float:
    """Milliseconds per step of one row before there were splits, measured on an H200."""
    return context_ms(context, BEFORE)


def split_sizes(n_chunks: int) -> list[int]:
    """Chunks of each split of a row with so many chunks.

    >>> split_sizes(3), sorted(set(split_sizes(2_048)))
    ([1, 1, 1], [62, 63])
    """
    n_splits = int(split_counts(np.array([n_chunks * CHUNK - 1]), 0)[0])
    begins = split_begins(np.full(n_splits + 1, n_chunks), np.arange(n_splits + 1))
    return [after - begin for begin, after in pairwise(begins.tolist())]


def splits_figure(tokens: Sequence[int] = (1024, 4224, 5120, 8192)) -> Figure:
    """Chunks of rows of these lengths, and which of them make a split."""
    lanes: list[tuple[str, list[Span]]] = []
    rows, told = [], []
    for length in tokens:
        chunks = results_of(length).chunks
        sizes = split_sizes(chunks)
        spans: list[Span] = []
        for split, size in enumerate(sizes):
            kind = "odd" if split % 2 else "even"
            spans += [Span(at, at + 1, kind) for at in range(len(spans), len(spans) + size)]
        lanes.append((f"{length:,} tokens", spans))
        kinds = [f"{sizes.count(size)} of {size}" for size in sorted(set(sizes))]
        rows.append((f"{length:,} tokens", str(chunks), str(len(sizes)), ", ".join(kinds)))
        told.append(f"{chunks} chunks in {len(sizes)} splits")
    sentence = (
        "Chunks of one KV head in rows of different lengths, derived; a box is a chunk of 128 keys,"
        f" and neighbours that look alike are one split: {', '.join(told)}."
    )
    figure = lanes_figure("At most 33 splits", sentence, lanes, LOOKS)
    head = ("row", "chunks", "splits", "splits of so many chunks")
    return replace(figure, table=Table(head, tuple(rows)))
