"""How fast a decode step can possibly be: the bytes that it must read, over the memory's bandwidth.

A step of a small batch reads every weight that it needs once and does next to nothing with it, so
memory bandwidth bounds it. Counted are bfloat16 weights, keys and values; not activations, which
stay in caches. All numbers here are derived from the config.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from mkref.errors import RequestError
from mkref.geometry import BF16_BYTES

if TYPE_CHECKING:
    from mkref.config import NorthConfig

__all__ = ["Part", "SpeedOfLight", "speed_of_light"]


@dataclass(frozen=True)
class Part:
    """One kind of bytes that a step reads."""

    name: str
    n_bytes: float


@dataclass(frozen=True)
class SpeedOfLight:
    """Bytes of one decode step by part.

    Attributes:
        context: tokens in the cache of every row.
        batch: rows.
        distinct: experts that the rows touch together in a sparse layer; a mean may be fractional.
        parts: largest first is not promised; the order is that of a step, head last.
    """

    context: int
    batch: int
    distinct: float
    parts: tuple[Part, ...]

    @property
    def n_bytes(self) -> float:
        """All bytes of the step."""
        return sum(part.n_bytes for part in self.parts)

    def ms(self, bytes_per_s: float) -> float:
        """Least milliseconds of the step."""
        return self.n_bytes / bytes_per_s * 1e3

    def tokens_per_s(self, bytes_per_s: float) -> float:
        """Most tokens per second of all rows together."""
        return self.batch * bytes_per_s / self.n_bytes


def speed_of_light(
    config: NorthConfig, *, context: int = 8192, batch: int = 1, distinct: float | None = None
) -> SpeedOfLight:
    """Bytes of one decode step.

    Args:
        config: the model's geometry.
        context: tokens in the cache of every row, at least 0.
        batch: rows, at least 1.
        distinct: experts touched per sparse layer; None: the expected number if every row draws its
            own uniformly, which real routing undercuts.

    Raises:
        RequestError: `context`, `batch` or `distinct` out of range.

    >>> from mkref.config import NORTH_MINI_CODE
    >>> step = speed_of_light(NORTH_MINI_CODE)
    >>> round(step.n_bytes / 1e9, 3), round(step.tokens_per_s(3.35e12), 1)
    (7.131, 469.8)
    """
    if context < 0:
        raise RequestError(f"context: {context} tokens; give 0 or more")
    if batch < 1:
        raise RequestError(f"batch: {batch} rows; give 1 or more")
    if distinct is None:
        distinct = config.expected_distinct_experts(batch)
    if not 0 <= distinct <= config.num_experts:
        raise RequestError(f"distinct: {distinct} experts; give 0 to {config.num_experts}")
    hidden, layers = config.hidden_size, config.num_hidden_layers
    dense = sum(config.mlp_width(i) for i in range(layers) if config.is_dense(i))
    parameters = {
        "attention projections": layers * 2 * hidden * (config.q_width + config.kv_width),
        "dense MLP": 3 * hidden * dense,
        "routers": config.n_sparse_layers * config.num_experts * hidden,
        "experts": config.n_sparse_layers * distinct * config.expert_parameters,
        "norms": (layers + 1) * hidden,
        "LM head": config.vocab_size * hidden,
    }
    parts = [Part(name, BF16_BYTES * n) for name, n in parameters.items()]
    parts.insert(1, Part("keys and values", batch * config.kv_bytes(context)))
    return SpeedOfLight(context, batch, distinct, tuple(parts))
