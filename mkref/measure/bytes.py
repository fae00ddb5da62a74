"""Bytes that a decode step has to move: counted, where they depend on the routing.

Weights that every token reads, gammas included; the experts that at least one row chose, as the
kernel counted them; keys and values of every row: those it reads, and the token's own, which it
writes. Activations and what SMs tell each other stay in L2 and are not counted.

What it does not do: measure the memory's traffic.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from mkref.config import NorthConfig
    from mkref.machine.base import Machine

__all__ = ["clear_experts", "distinct_experts", "step_bytes"]


def clear_experts(machine: Machine) -> None:
    """Begin to count experts."""
    machine.write("active_experts", np.zeros(machine.plan.config.num_hidden_layers, np.int32))


def distinct_experts(machine: Machine, steps: int) -> float:
    """Experts per sparse layer and step since `clear_experts`: a mean; 0 without sparse layers.

    Args:
        machine: has run `steps` steps since.
    """
    config = machine.plan.config
    counts = machine.read("active_experts")
    sparse = [int(n) for layer, n in enumerate(counts) if not config.is_dense(layer)]
    return sum(sparse) / (len(sparse) * steps) if sparse else 0.0


def step_bytes(config: NorthConfig, experts: float, positions: Iterable[int]) -> float:
    """Bytes of a step.

    Args:
        config: geometry.
        experts: distinct ones per sparse layer; a mean may be fractional.
        positions: of each row's token, counted from 0.
    """
    kv = sum(config.kv_bytes(position + 1) for position in positions)
    return config.weight_bytes_per_token(experts) + kv
