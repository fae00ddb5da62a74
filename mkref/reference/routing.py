"""Which experts a token gets in float32, and which with the contract's roundings: near-ties of the
router.

Two programs that round in different places may choose different experts where the last expert that
is taken and the first that is not have almost the same logit. The token then goes through other
weights and all of its logits move, by far more than a rounding. Nothing here judges; it says where
that happens and how close it was.

Notation: T tokens, E experts, k experts per token.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from mkref.reference.model import Reference

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from mkref.config import NorthConfig

__all__ = ["OtherExperts", "Routers", "margin", "other_experts"]


def margin(logits: Tensor, k: int) -> float:
    """By how much the last of the k experts that a token takes is above the next; `logits` [E]."""
    best = logits.sort(descending=True).values
    return float(best[k - 1] - best[k])


class OtherExperts(NamedTuple):
    """Where a token gets other experts.

    Attributes:
        layers: ascending.
        margin: of float32 in the first of these layers: by how much the logit of the last expert
            that is taken is above that of the next. None if there is no such layer.
    """

    layers: tuple[int, ...]
    margin: float | None


@dataclass(frozen=True)
class Routers:
    """Router logits of one sequence, in float32 and with the contract's roundings.

    Attributes:
        exact, rounded: layer -> [T, E].
        k: experts per token.
    """

    exact: Mapping[int, Tensor]
    rounded: Mapping[int, Tensor]
    k: int

    @classmethod
    def of(
        cls, config: NorthConfig, weights: Mapping[str, Tensor], tokens: Sequence[int]
    ) -> Routers:
        """Run the model twice over the tokens; dense layers have no router."""
        exact: dict[int, Tensor] = {}
        rounded: dict[int, Tensor] = {}
        row = torch.tensor([list(tokens)])
        plain = Reference(config, weights, dtype=torch.float32, probe=_into(exact))
        contract = Reference(config, weights, numerics="contract", probe=_into(rounded))
        for model in (plain, contract):
            model.forward(row, last_only=True)
        return cls(exact, rounded, config.num_experts_per_tok)

    def changed(self) -> dict[int, Tensor]:
        """Layer -> bool [T]: do the two take other experts?"""
        return {
            layer: (self._taken(logits) != self._taken(self.rounded[layer])).any(-1)
            for layer, logits in self.exact.items()
        }

    def other_experts(self, token: int = -1) -> OtherExperts:
        """Of one token, the last if not told otherwise."""
        layers = tuple(sorted(layer for layer, other in self.changed().items() if other[token]))
        if not layers:
            return OtherExperts((), None)
        return OtherExperts(layers, margin(self.exact[layers[0]][token], self.k))

    def noise(self) -> Tensor:
        """Differences of the two logits that are of rounding: [n, E], of all layers, of the tokens
        that got the same experts in every layer before (what they see may not have).
        """
        found, same = [], None
        for layer, other in sorted(self.changed().items()):
            same = torch.ones_like(other) if same is None else same
            found.append((self.rounded[layer] - self.exact[layer])[same])
            same = same & ~other
        return torch.cat(found)

    def _taken(self, logits: Tensor) -> Tensor:
        # As the model takes them: a stable sort, equal logits the lower id first.
        order = logits.sort(dim=-1, descending=True, stable=True).indices
        return order[:, : self.k].sort(dim=-1).values


def other_experts(
    config: NorthConfig, weights: Mapping[str, Tensor], tokens: Sequence[int]
) -> OtherExperts:
    """Layers in which the last token gets other experts in float32 than with the contract's
    roundings, and how close it was in the first of them.

    Args:
        config: of the model.
        weights: Hugging Face name -> tensor.
        tokens: a sequence; the routers may have changed for earlier tokens, too.
    """
    return Routers.of(config, weights, tokens).other_experts()


def _into(seen: dict[int, Tensor]) -> Callable[[str, Tensor], None]:
    """A probe that keeps the router logits by layer."""

    def probe(name: str, value: Tensor) -> None:
        _, layer, part = name.split(".")
        if part == "router":
            seen[int(layer)] = value.float().clone()

    return probe
