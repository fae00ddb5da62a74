"""Where every matrix of a model lies: one array of 16 x 16 bfloat16 tiles.

All matrices are cut into tiles (`tiles`) and all tiles form ONE array, uint16 [total_tiles, 256],
in the order in which a decode step streams them. `PackedLayout` says where everything is; the
functions on tiles can be imported from here too.

What it does not do: read files or create numbers.

Notation: M rows and K columns of a matrix, H hidden size, I expert width, L layers, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from mkref.weights.tiles import (
    PAGE,
    TILE,
    TILE_WORDS,
    Words,
    from_b_order,
    n_tiles,
    pack_kv_page,
    pack_tiles,
    to_b_order,
    unpack_kv_page,
    unpack_tiles,
    write_half,
)

if TYPE_CHECKING:
    from collections.abc import Iterator

    from mkref.config import NorthConfig

__all__ = [
    "PAGE", "TILE", "TILE_WORDS", "LayerOffsets", "PackedLayout", "Placement", "Words",
    "from_b_order", "kv_tile", "n_tiles", "pack_kv_page", "pack_tiles", "to_b_order",
    "unpack_kv_page", "unpack_tiles", "write_half",
]  # fmt: skip

NONE = -1  # offset of a router that a dense layer does not have


def kv_tile(base: int, page: int, kv_head: int, config: NorthConfig) -> int:
    """First of the D / 2 tiles of one page of one key/value head in the pool of a layer."""
    return base + (page * config.num_key_value_heads + kv_head) * (config.head_dim // 2)


@dataclass(frozen=True)
class Placement:
    """Where one named tensor of a checkpoint goes.

    Attributes:
        name: its Hugging Face name.
        rows, cols: its shape [M, K]; for a gamma rows = 1 and cols = H.
        tile: first tile of its region; for a gamma, the row in the gamma array.
        half: None for whole tiles; 0 (gate) or 1 (up) for one half of interleaved granules.
        gamma: it is a gamma (stored apart, uint16 [L + 1, H]).
    """

    name: str
    rows: int
    cols: int
    tile: int
    half: int | None = None
    gamma: bool = False

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the tensor in a checkpoint."""
        return (self.cols,) if self.gamma else (self.rows, self.cols)

    @property
    def n_tiles(self) -> int:
        """Tiles of its region (a gate and its up share theirs)."""
        if self.gamma:
            return 0
        return n_tiles(self.rows if self.half is None else 2 * self.rows, self.cols)


@dataclass(frozen=True)
class LayerOffsets:
    """First tile of each operator of one layer; `router` is -1 in a dense layer."""

    router: int
    qkv: int
    gate_up: int
    o: int
    down: int


class PackedLayout:
    """Tile offsets of every matrix of a model.

    Per layer: router (sparse layers), qkv (rows of q, k, v), gate_up (per expert, interleaved by
    8), o, down (per expert); after all layers the head, which is the embedding.

    Args:
        config: geometry that `check_kernel_limits` accepts.

    >>> from mkref.config import NORTH_MINI_CODE
    >>> layout = PackedLayout(NORTH_MINI_CODE)
    >>> layout.layer(0).qkv, layout.layer(1).router, layout.total_tiles * 512
    (0, 147456, 60968402944)
    """

    def __init__(self, config: NorthConfig) -> None:
        self.config = config
        hidden = config.hidden_size
        layers = []
        tile = 0
        for layer in range(config.num_hidden_layers):
            dense = config.is_dense(layer)
            router = NONE if dense else tile
            qkv = tile + (0 if dense else n_tiles(config.num_experts, hidden))
            gate_up = qkv + n_tiles(config.q_width + 2 * config.kv_width, hidden)
            o = gate_up + self.n_experts(layer) * self.gate_up_stride(layer)
            down = o + n_tiles(hidden, config.q_width)
            tile = down + self.n_experts(layer) * self.down_stride(layer)
            layers.append(LayerOffsets(router, qkv, gate_up, o, down))
        self._layers = tuple(layers)
        self.head = tile
        self.total_tiles = tile + n_tiles(config.vocab_size, hidden)

    def layer(self, layer: int) -> LayerOffsets:
        """Offsets of one layer."""
        return self._layers[layer]

    def n_experts(self, layer: int) -> int:
        """Experts that the layer stores; a dense layer counts as one."""
        return 1 if self.config.is_dense(layer) else self.config.num_experts

    def gate_up_stride(self, layer: int) -> int:
        """Tiles from one expert's gate_up to the next one's."""
        return n_tiles(2 * self.config.mlp_width(layer), self.config.hidden_size)

    def down_stride(self, layer: int) -> int:
        """Tiles from one expert's down to the next one's."""
        return n_tiles(self.config.hidden_size, self.config.mlp_width(layer))

    def placements(self) -> Iterator[Placement]:
        """Every tensor of a checkpoint and where it goes, in layout order (18,730 for North)."""
        config, hidden = self.config, self.config.hidden_size
        block = hidden // TILE  # tiles of 16 rows of depth H
        for i, at in enumerate(self._layers):
            prefix = f"model.layers.{i}."
            attention, mlp = prefix + "self_attn.", prefix + "mlp."
            yield Placement(prefix + "input_layernorm.weight", 1, hidden, i, gamma=True)
            if not config.is_dense(i):
                yield Placement(mlp + "gate.weight", config.num_experts, hidden, at.router)
            k = at.qkv + config.q_width // TILE * block
            v = k + config.kv_width // TILE * block
            yield Placement(attention + "q_proj.weight", config.q_width, hidden, at.qkv)
            yield Placement(attention + "k_proj.weight", config.kv_width, hidden, k)
            yield Placement(attention + "v_proj.weight", config.kv_width, hidden, v)
            experts = [mlp]
            if not config.is_dense(i):
                experts = [f"{mlp}experts.{e}." for e in range(config.num_experts)]
            width = config.mlp_width(i)
            for e, expert in enumerate(experts):
                tile = at.gate_up + e * self.gate_up_stride(i)
                yield Placement(expert + "gate_proj.weight", width, hidden, tile, half=0)
                yield Placement(expert + "up_proj.weight", width, hidden, tile, half=1)
            yield Placement(attention + "o_proj.weight", hidden, config.q_width, at.o)
            for e, expert in enumerate(experts):
                tile = at.down + e * self.down_stride(i)
                yield Placement(expert + "down_proj.weight", hidden, width, tile)
        yield Placement("model.norm.weight", 1, hidden, config.num_hidden_layers, gamma=True)
        yield Placement("model.embed_tokens.weight", config.vocab_size, hidden, self.head)
