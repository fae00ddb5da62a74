"""Operations to try: three in a row, three that do not need each other, a layer of the model.

Tiles of the layer are those that the kernel works on: row blocks of 16 outputs, chunks of 128 keys
of one KV head, granules of 8 outputs of an expert; a row's chunks are handed out in at most 33
splits, at 8,192 tokens of one or two. A tile takes as long as its bytes take
an SM that gets an equal share of the memory's bandwidth; that is derived, not measured.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from mkref.errors import RequestError
from mkref.geometry import BF16_BYTES
from mkref.plan.build import CHUNK_PAGES, PAGE
from mkref.plan.runtime import chunk_counts
from mkref.widgets.waves.model import Operation

if TYPE_CHECKING:
    from mkref.config import NorthConfig

__all__ = ["SCENES", "apart", "chain", "layer", "operations"]

SCENES = {
    "chain": "three operations, each needs the one before",
    "apart": "three operations that do not need each other",
    "layer": "a layer of North Mini Code, one row",
}
NAMES = ("QKV", "GATE_UP", "DOWN")
BLOCK, GRANULE = 16, 8


def chain(tiles: int, tile_us: float) -> list[Operation]:
    """Three operations of `tiles` tiles, each of which needs all of the one before."""
    return [
        Operation(name, tiles, tile_us, NAMES[i - 1 : i] if i else ())
        for i, name in enumerate(NAMES)
    ]


def apart(tiles: int, tile_us: float) -> list[Operation]:
    """Three operations of `tiles` tiles without needs."""
    return [Operation(name, tiles, tile_us) for name in NAMES]


def layer(config: NorthConfig, *, context: int, bytes_per_us_of_sm: float) -> list[Operation]:
    """A full-attention layer with experts, one row: attention up to its projection, then experts.

    The router is not among them: GATE_UP needs QKV in its place, since the experts are not known
    before attention begins.

    Args:
        config: geometry.
        context: tokens of the row.
        bytes_per_us_of_sm: share of the bandwidth that one SM gets.

    Raises:
        RequestError: context or bandwidth out of range.
    """
    if context < 1 or not bytes_per_us_of_sm > 0:
        raise RequestError(
            f"waves: context {context} at {bytes_per_us_of_sm} bytes per us; give more than 0"
        )

    def us(elements: int) -> float:
        return elements * BF16_BYTES / bytes_per_us_of_sm

    c, k = config, config.num_experts_per_tok
    chunks = int(chunk_counts(np.array([context - 1]), 0)[0])
    inner = BLOCK * c.hidden_size
    return [
        Operation("QKV", (c.q_width + 2 * c.kv_width) // BLOCK, us(inner)),
        Operation(
            "ATTENTION",
            chunks * c.num_key_value_heads,
            us(2 * PAGE * CHUNK_PAGES * c.head_dim),
            ("QKV",),
        ),
        Operation("O_PROJ", c.hidden_size // BLOCK, us(BLOCK * c.q_width), ("ATTENTION",)),
        Operation(
            "GATE_UP",
            k * c.intermediate_size // GRANULE,
            us(2 * GRANULE * c.hidden_size),
            ("QKV",),
        ),
        Operation(
            "DOWN",
            c.hidden_size // BLOCK,
            us(BLOCK * k * c.intermediate_size),
            ("GATE_UP", "O_PROJ"),
        ),
    ]


def operations(
    scene: str, config: NorthConfig, tiles: int, tile_us: float, context: int, sm_share: float
) -> list[Operation]:
    """The operations of a scene; `sm_share` is `bytes_per_us_of_sm` of `layer`.

    Raises:
        RequestError: no such scene.
    """
    if scene not in SCENES:
        raise RequestError(f"waves: no scene {scene!r}; there are {', '.join(SCENES)}")
    if scene == "layer":
        return layer(config, context=context, bytes_per_us_of_sm=sm_share)
    return (chain if scene == "chain" else apart)(tiles, tile_us)
