"""Packed weights by name, and synthetic ones: seeded, padded with zeros, sane in depth."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from mkref.config import NorthConfig
from mkref.reference.model import Reference
from mkref.weights.layout import pack_tiles
from mkref.weights.packed import PackedWeights
from mkref.weights.synthetic import synthetic_weights
from tests.checkpoints import CONFIG, UP_2


@pytest.fixture(scope="module")
def weights() -> PackedWeights:
    """Synthetic weights of CONFIG."""
    return synthetic_weights(CONFIG, seed=3)


def equal(a: PackedWeights, b: PackedWeights) -> bool:
    """Bit equality of tiles and gammas."""
    return all(map(np.array_equal, a.words(), b.words()))


def test_packed_weights_agree_with_numpy_packing(weights: PackedWeights) -> None:
    """torch's packing and NumPy's are the same function, padding rows included."""
    for place in weights.layout.placements():
        if not place.gamma and place.half is None:
            words = weights[place.name].view(torch.int16).numpy().view(np.uint16)
            region = weights.words()[0][place.tile : place.tile + place.n_tiles]
            assert np.array_equal(pack_tiles(words), region), place.name


def test_packed_weights_are_a_mapping(weights: PackedWeights) -> None:
    """Names, membership and length without unpacking; wrong arrays are refused."""
    assert len(weights) == len(list(weights)) == 52
    assert UP_2 in weights
    assert "lm_head.weight" not in weights
    with pytest.raises(KeyError, match="lm_head"):
        _ = weights["lm_head.weight"]
    with pytest.raises(ValueError, match=r"tiles: torch.bfloat16 \[3, 256\], must be"):
        PackedWeights(CONFIG, weights.tiles[:3], weights.gammas)
    with pytest.raises(ValueError, match=r"gammas: torch.float32 \[4, 48\], must be"):
        PackedWeights(CONFIG, weights.tiles, weights.gammas.float())


def test_synthetic_weights_are_seeded_and_padded(weights: PackedWeights) -> None:
    """Same seed, same bits; another seed, others; padding rows are zero, nothing else is."""
    assert equal(weights, synthetic_weights(CONFIG, seed=3))
    assert not equal(weights, synthetic_weights(CONFIG, seed=4))
    tiles, _gammas = weights.words()
    layout = weights.layout
    for place in layout.placements():
        region = tiles[place.tile : place.tile + place.n_tiles]
        if place.rows % 16 and not place.gamma:
            last = region.reshape(-1, 3, 8, 4, 2, 2, 2)[-1]  # [k tile, g, t, kh, rh, p]
            rows = last.transpose(4, 1, 0, 3, 2, 5).reshape(16, 48)  # row = 8 rh + g
            assert not rows[place.rows % 16 :].any()
            assert (rows[: place.rows % 16] != 0).mean() > 0.99
    assert not np.any((tiles & 0x7F80) == 0x7F80)
    assert abs(weights.gammas.float().abs().mean() - 1) < 0.05
    assert (weights.gammas[:-1] > 0).all()
    assert 0.2 < (weights.gammas[-1] > 0).float().mean() < 0.8  # signs of the last are random


def test_synthetic_activations_stay_sane_in_depth() -> None:
    """Twenty layers: the stream stays near the embedding's size and logits spread by about 2."""
    raw = {**CONFIG.to_dict(), "num_hidden_layers": 20, "hidden_size": 128}
    config = NorthConfig.from_dict({**raw, "layer_types": None, "mlp_layer_types": None})
    sizes: list[float] = []

    def probe(name: str, tensor: Tensor) -> None:
        if name.endswith(".x"):
            sizes.append(float(tensor.float().pow(2).mean().sqrt()))

    reference = Reference(config, synthetic_weights(config), numerics="contract", probe=probe)
    logits = reference(torch.randint(0, 90, (40,), generator=torch.Generator().manual_seed(0)))
    assert len(sizes) == 20
    embedding = 2 / 128**0.5
    assert 0.7 * embedding < min(sizes)
    assert max(sizes) < 2 * embedding
    assert 1 < float(logits.std()) < 4
