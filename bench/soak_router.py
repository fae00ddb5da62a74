"""Did other experts make another token? The reference model with experts exchanged on purpose.

Where the last expert that a router takes and the first that it leaves out are nearly tied,
roundings may exchange them, and then all logits of that token move by far more than roundings do.
To say so is not enough of an explanation, because such ties are frequent: here the exchange is
made, and must bring the other token near.

What it does not do: exchange experts of earlier tokens, whose keys and values change, too.
"""

from __future__ import annotations

from itertools import chain, combinations
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from bench.agreement import ROUTER_TIE
from mkref.reference.model import KVCache, Reference
from mkref.reference.routing import margin

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from mkref.config import NorthConfig

Shift = npt.NDArray[np.float32]


class Exchanging(Reference):
    """The model with the contract's roundings, and with experts exchanged for the last token.

    Attributes:
        exchanged: layers in which the last token gets the first expert that is left out, instead
            of the last that is taken.
        margins: layer -> by how much the one's router logit is above the other's, last token.
    """

    def __init__(self, config: NorthConfig, weights: Mapping[str, Tensor]) -> None:
        if config.norm_topk_prob:
            raise ValueError("norm_topk_prob: scores are taken as they are here")
        super().__init__(config, weights, numerics="contract", probe=self._see)
        self.exchanged: frozenset[int] = frozenset()
        self.margins: dict[int, float] = {}
        self._logits = torch.empty(0)

    def _see(self, name: str, value: Tensor) -> None:
        if name.endswith(".router"):
            self._logits = value[-1]

    def route(self, layer: int, flat: Tensor) -> tuple[Tensor, Tensor]:
        """As the model does it, but for the exchange."""
        ids, scores = super().route(layer, flat)
        order = self._logits.sort(descending=True, stable=True).indices
        last, following = order[ids.shape[1] - 1], order[ids.shape[1]]
        self.margins[layer] = margin(self._logits, ids.shape[1])
        if layer in self.exchanged:
            ids, scores = ids.clone(), scores.clone()
            scores[-1, ids[-1] == last] = self.rounding.scores(self._logits[following])
            ids[-1, ids[-1] == last] = following
        return ids, scores


def exchanges(
    config: NorthConfig, weights: Mapping[str, Tensor], tokens: Sequence[int]
) -> Iterator[tuple[dict[int, float], Shift]]:
    """What exchanges of nearly tied experts do to the logits after `tokens`, one after another.

    Yields:
        Layers with their margins, at most `ROUTER_TIE`; what they add to logits, float32 [V].
    """
    model, cache = Exchanging(config, weights), KVCache()
    row = torch.tensor([list(tokens)])
    if len(tokens) > 1:
        model.forward(row[:, :-1], cache, last_only=True)

    def last() -> Tensor:
        copy = KVCache(cache.length, [*cache.keys], [*cache.values])
        return model.forward(row[:, -1:], copy)[0, 0]

    plain = last()
    tied = {layer: margin for layer, margin in model.margins.items() if margin <= ROUTER_TIE}
    for layers in chain.from_iterable(combinations(tied, n + 1) for n in range(len(tied))):
        model.exchanged = frozenset(layers)
        yield {layer: tied[layer] for layer in layers}, np.asarray(last() - plain)
