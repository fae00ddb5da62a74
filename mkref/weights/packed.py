"""The packed weights of a model as torch tensors on one device, readable by name.

`PackedWeights` holds the tile array and the gammas, writes a named matrix to its place (`put`) and
reads it back (`tensor_view`). It is also a mapping from Hugging Face names to tensors, each
unpacked when it is asked for, so that `mkref.reference.model` runs on the very bytes that the
kernel streams.

What it does not do: read files (`checkpoint`) or make numbers (`synthetic`).

Notation: M rows and K columns of a matrix, H hidden size, L layers.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from mkref.weights.layout import TILE, TILE_WORDS, PackedLayout, Placement

if TYPE_CHECKING:
    import numpy as np

    from mkref.config import NorthConfig
    from mkref.weights.layout import Words

__all__ = ["PackedWeights", "pack_into", "to_words", "unpack_from"]

# Axes as in `layout`: a matrix as [row block, rh, g, k tile, kh, t, p], and a tile as [g, t, kh,
# rh, p]; one half of a granule as [granule, g, k tile, kh, t, p].
_PACK = (0, 3, 2, 5, 4, 1, 6)
_UNPACK = (0, 5, 2, 1, 4, 3, 6)
_PACK_HALF = (0, 2, 1, 4, 3, 5)
_UNPACK_HALF = (0, 2, 1, 4, 3, 5)


def pack_into(tiles: Tensor, matrix: Tensor, half: int | None = None) -> None:
    """Write a matrix into its tiles, on their device, without a copy of the whole matrix.

    Args:
        tiles: [n, 256], written in place: `n_tiles(M, K)`, or twice that for a half.
        matrix: [M, K] of the same type and device.
        half: None, or 0 for gate and 1 for up rows of interleaved granules.
    """
    rows, cols = matrix.shape
    if half is not None:
        target = tiles.view(-1, cols // TILE, 8, 4, 2, 2, 2)[..., half, :]
        target.copy_(matrix.reshape(-1, 8, cols // TILE, 2, 4, 2).permute(_PACK_HALF))
        return
    target = tiles.view(-1, cols // TILE, 8, 4, 2, 2, 2)
    whole = rows // TILE
    parts = matrix[: whole * TILE].reshape(whole, 2, 8, cols // TILE, 2, 4, 2)
    target[:whole].copy_(parts.permute(_PACK))
    if rows % TILE:
        last = matrix.new_zeros(TILE, cols)
        last[: rows % TILE] = matrix[whole * TILE :]
        target[whole:].copy_(last.view(1, 2, 8, cols // TILE, 2, 4, 2).permute(_PACK))


def unpack_from(tiles: Tensor, rows: int, cols: int, half: int | None = None) -> Tensor:
    """Inverse of `pack_into`: a new tensor [rows, cols]."""
    if half is not None:
        parts = tiles.view(-1, cols // TILE, 8, 4, 2, 2, 2)[..., half, :].permute(_UNPACK_HALF)
    else:
        parts = tiles.view(-1, cols // TILE, 8, 4, 2, 2, 2).permute(_UNPACK)
    return parts.reshape(-1, cols)[:rows]


class PackedWeights(Mapping[str, Tensor]):
    """All weights of a model in the layout that the kernel streams.

    Args:
        config: geometry.
        tiles: bfloat16 [total_tiles, 256].
        gammas: bfloat16 [L + 1, H]: input norm of each layer, then the final norm.
    """

    def __init__(self, config: NorthConfig, tiles: Tensor, gammas: Tensor) -> None:
        self.config = config
        self.layout = PackedLayout(config)
        for name, tensor, shape in (
            ("tiles", tiles, (self.layout.total_tiles, TILE_WORDS)),
            ("gammas", gammas, (config.num_hidden_layers + 1, config.hidden_size)),
        ):
            if tuple(tensor.shape) != shape or tensor.dtype != torch.bfloat16:
                found = f"{tensor.dtype} {list(tensor.shape)}"
                raise ValueError(f"{name}: {found}, must be torch.bfloat16 {list(shape)}")
        self.tiles = tiles
        self.gammas = gammas
        self._places = {place.name: place for place in self.layout.placements()}

    @classmethod
    def empty(cls, config: NorthConfig, device: str | torch.device = "cpu") -> PackedWeights:
        """Room for the weights, with whatever bytes are there."""
        shape = (PackedLayout(config).total_tiles, TILE_WORDS)
        gammas = (config.num_hidden_layers + 1, config.hidden_size)
        return cls(
            config,
            torch.empty(shape, dtype=torch.bfloat16, device=device),
            torch.empty(gammas, dtype=torch.bfloat16, device=device),
        )

    @classmethod
    def from_words(cls, config: NorthConfig, tiles: Words, gammas: Words) -> PackedWeights:
        """The same bytes as NumPy arrays uint16, shared, not copied."""
        return cls(config, _from_words(tiles), _from_words(gammas))

    def words(self) -> tuple[Words, Words]:
        """Tiles and gammas as NumPy uint16, shared with a CPU tensor."""
        return to_words(self.tiles), to_words(self.gammas)

    def region(self, place: Placement) -> Tensor:
        """The tiles of one placement (those of gate and up are the same)."""
        return self.tiles[place.tile : place.tile + place.n_tiles]

    def put(self, place: Placement, tensor: Tensor) -> None:
        """Write one tensor to its place; rows that padding adds become zero."""
        value = tensor.to(device=self.tiles.device, dtype=torch.bfloat16)
        if place.gamma:
            self.gammas[place.tile].copy_(value)
        else:
            pack_into(self.region(place), value, place.half)

    def tensor_view(self, name: str) -> Tensor:
        """One tensor by its Hugging Face name, unpacked: a new bfloat16 tensor on the device.

        Raises:
            KeyError: the model has no tensor of that name.
        """
        place = self._places[name]
        if place.gamma:
            return self.gammas[place.tile].clone()
        return unpack_from(self.region(place), place.rows, place.cols, place.half)

    def __getitem__(self, name: str) -> Tensor:
        return self.tensor_view(name)

    def __iter__(self) -> Iterator[str]:
        return iter(self._places)

    def __len__(self) -> int:
        return len(self._places)

    def __contains__(self, name: object) -> bool:  # Mapping's own would unpack the tensor
        return name in self._places


def _from_words(words: Words) -> Tensor:
    """NumPy uint16 words as bfloat16, shared."""
    return torch.from_numpy(words.view("int16")).view(torch.bfloat16)


def to_words(tensor: Tensor) -> Words:
    """bfloat16 as NumPy uint16 words, shared if it is on the CPU."""
    array: np.ndarray = tensor.view(torch.int16).cpu().numpy()
    return array.view("uint16")
