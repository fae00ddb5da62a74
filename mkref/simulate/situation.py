"""What one step finds at run time: how many rows, how far each is, how many experts are hit.

A plan does not know these; the kernel reads them from its inputs and finds them in the router's
logits. How long a step takes depends on the number of experts that some row chose in each layer,
not on which ones they are.

What it does not do: run a router (`mkref.plan.runtime.find_experts`).
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from mkref.errors import RequestError

if TYPE_CHECKING:
    from mkref.config import NorthConfig

__all__ = ["Situation"]


@dataclass(frozen=True)
class Situation:
    """One step's inputs.

    Attributes:
        positions: of each row's token, counted from 0.
        experts: distinct experts of each layer that some row chose; 1 in a dense layer.
    """

    positions: tuple[int, ...]
    experts: tuple[int, ...]

    def __post_init__(self) -> None:
        if not self.positions or min(self.positions) < 0:
            raise RequestError(f"situation: positions {self.positions}; give a row from 0 on")
        if not self.experts or min(self.experts) < 1:
            raise RequestError(f"situation: experts {self.experts}; every layer uses at least one")

    @property
    def rows(self) -> int:
        """Active rows."""
        return len(self.positions)

    @classmethod
    def uniform(
        cls, config: NorthConfig, positions: Sequence[int], experts: float | None = None
    ) -> Situation:
        """Rows whose routers choose evenly among all experts.

        Args:
            config: geometry.
            positions: one per row.
            experts: distinct ones per sparse layer, in the mean over layers; None: what is
                expected of so many rows. A fraction is spread over the layers.

        >>> from mkref.config import NORTH_MINI_CODE
        >>> Situation.uniform(NORTH_MINI_CODE, [8191] * 2).experts[:6]
        (1, 15, 16, 15, 16, 15)
        """
        if experts is None:
            n, k = config.num_experts, config.num_experts_per_tok
            experts = n * (1 - (1 - k / n) ** len(positions))
        hit, done = [], 0
        for layer in range(config.num_hidden_layers):
            if config.is_dense(layer):
                hit.append(1)
                continue
            sparse = len(hit) + 1 - sum(config.is_dense(i) for i in range(layer + 1))
            hit.append(int(np.floor(sparse * experts)) - done)
            done += hit[-1]
        return cls(tuple(int(p) for p in positions), tuple(hit))

    @classmethod
    def routed(
        cls,
        config: NorthConfig,
        positions: Sequence[int],
        chosen: Sequence[Collection[Collection[int]]],
    ) -> Situation:
        """Rows whose experts are known.

        Args:
            config: geometry.
            positions: one per row.
            chosen: for every layer the experts of every row; of a dense layer it does not matter.
        """
        hit = tuple(
            1 if config.is_dense(layer) else len({e for row in rows for e in row})
            for layer, rows in enumerate(chosen)
        )
        return cls(tuple(int(p) for p in positions), hit)
