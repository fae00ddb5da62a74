"""Which experts a token gets in two numerics, and how close it was."""

from __future__ import annotations

import pytest
import torch

from mkref.reference.model import Reference
from mkref.reference.routing import OtherExperts, Routers, other_experts
from mkref.weights.synthetic import synthetic_weights
from tests.checkpoints import CONFIG

EXACT = {
    1: torch.tensor([[5.0, 4.0, 1.0, 0.0], [5.0, 4.0, 3.75, 0.0]]),
    2: torch.tensor([[5.0, 4.0, 3.5, 0.0], [5.0, 4.0, 3.5, 0.0]]),
}
"""Layer -> [2 tokens, 4 experts]; two experts are taken."""


def routers(**rounded: list[list[float]]) -> Routers:
    """Those, and other logits in some layers, such as l1=..."""
    other = {int(name[1:]): torch.tensor(rows) for name, rows in rounded.items()}
    return Routers(EXACT, {**EXACT, **other}, 2)


def test_equal_logits_take_equal_experts() -> None:
    """No layer, and so no margin; the order among those that are taken does not count."""
    assert OtherExperts((), None) == routers().other_experts()
    swapped = routers(l1=[[4.0, 5.0, 1.0, 0.0], [4.0, 4.25, 3.75, 0.0]])
    assert OtherExperts((), None) == swapped.other_experts()


def test_margin_is_of_the_first_layer_in_float32() -> None:
    """Of the token that was asked for."""
    turned = [[5.0, 4.0, 1.0, 0.0], [5.0, 3.75, 4.0, 0.0]]
    assert OtherExperts((1,), 0.25) == routers(l1=turned).other_experts()
    assert OtherExperts((), None) == routers(l1=turned).other_experts(0)
    assert OtherExperts((1, 2), 0.25) == routers(l1=turned, l2=turned).other_experts()
    assert OtherExperts((2,), 0.5) == routers(l2=turned).other_experts(1)


def test_equal_logits_take_the_lower_expert_first() -> None:
    """As the model does it: a tie is no other expert."""
    tied = torch.zeros(1, 40)
    assert OtherExperts((), None) == Routers({3: tied}, {3: tied.clone()}, 2).other_experts()
    above = tied.clone()
    above[0, 2] = 1
    assert OtherExperts((3,), 0.0) == Routers({3: tied}, {3: above}, 2).other_experts()


def test_noise_leaves_out_what_other_experts_did() -> None:
    """Layer 2 of the token that had other experts in layer 1; layer 1 itself counts."""
    rounded = routers(
        l1=[[5.5, 4.0, 1.0, 0.0], [5.0, 3.75, 4.0, 0.0]],
        l2=[[5.0, 4.25, 3.5, 0.0], [99.0, 99.0, 99.0, 99.0]],
    )
    right = [[0.5, 0, 0, 0], [0, -0.25, 0.25, 0], [0, 0.25, 0, 0]]
    assert right == rounded.noise().tolist()


@pytest.mark.parametrize("seed", range(3))
def test_experts_are_those_of_the_model(seed: int) -> None:
    """Logits of every layer that has a router, of every token, and the experts that they choose."""
    weights = synthetic_weights(CONFIG, seed=seed)
    tokens = torch.randint(CONFIG.vocab_size, (12,), generator=torch.manual_seed(seed)).tolist()
    chosen: dict[int, list[list[int]]] = {}

    class Spy(Reference):
        def route(self, layer: int, flat: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            ids, scores = super().route(layer, flat)
            chosen[layer] = ids.tolist()
            return ids, scores

    of_both = []
    for numerics in ("plain", "contract"):
        Spy(CONFIG, weights, numerics=numerics).forward(torch.tensor([tokens]))
        of_both.append(dict(chosen))
    seen = Routers.of(CONFIG, weights, tokens)
    assert {1, 2} == set(seen.exact) == set(seen.rounded) == set(of_both[0])
    for layer, other in seen.changed().items():
        pairs = zip(of_both[0][layer], of_both[1][layer], strict=True)
        assert [a != b for a, b in pairs] == other.tolist()
    layers = tuple(layer for layer in (1, 2) if of_both[0][layer][-1] != of_both[1][layer][-1])
    assert layers == other_experts(CONFIG, weights, tokens).layers
    assert seen.noise().square().mean().sqrt() < 0.1
