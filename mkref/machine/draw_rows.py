"""All rows of a step drawn in NumPy, for the machines that do not run `cuda/sampler/`.

What it does not do: the arithmetic, which is `mkref.reference.drawing`'s.

Notation: n active rows, V vocabulary.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from mkref.machine.draw import TOP_LOGPROBS, LogProbs
from mkref.reference.drawing import Rules, count, draw, logprobs

if TYPE_CHECKING:
    from mkref.machine.draw import Draw

__all__ = ["draw_rows"]


def draw_rows(
    logits: np.ndarray,
    settings: Draw,
    *,
    temperatures: np.ndarray,
    seeds: np.ndarray,
    positions: np.ndarray,
    stop_ids: np.ndarray,
    ban_until: np.ndarray,
    counts: np.ndarray,
) -> tuple[np.ndarray, LogProbs]:
    """Draw a token for every row, and count it where that is wanted.

    Args:
        logits: float32 [n, V], finite.
        settings: of the rows.
        temperatures: float32 [n].
        seeds: uint64 [n].
        positions: of the tokens that were fed, int [n].
        stop_ids: int [n, 8].
        ban_until: as it holds, int [n].
        counts: uint16 [n or more, V]; changed in place.

    Returns:
        Tokens, int32 [n], and log probabilities.
    """
    n, penalizes = len(logits), settings.penalizes
    tokens = np.zeros(n, np.int32)
    told = LogProbs(
        np.full(n, np.nan, np.float32),
        np.full((n, TOP_LOGPROBS), -1, np.int32),
        np.full((n, TOP_LOGPROBS), np.nan, np.float32),
    )
    for row in range(n):
        ids = settings.bias_ids[row, : settings.n_bias[row]].tolist()
        rules = Rules(
            temperature=float(temperatures[row]),
            seed=int(seeds[row]),
            top_k=int(settings.top_k[row]),
            top_p=float(settings.top_p[row]),
            min_p=float(settings.min_p[row]),
            presence=float(settings.presence[row]),
            frequency=float(settings.frequency[row]),
            repetition=float(settings.repetition[row]),
            bias=tuple(zip(ids, settings.bias_values[row].tolist(), strict=False)),
            banned=tuple(stop_ids[row].tolist()) if positions[row] < ban_until[row] else (),
            allowed=None if settings.mask is None else settings.mask[row],
            counts=counts[row] if penalizes[row] else None,
        )
        tokens[row] = draw(logits[row], rules, int(positions[row]))
        if penalizes[row]:
            count(counts[row], int(tokens[row]))
        n_told = int(settings.logprobs[row])
        if n_told >= 0:
            told.token[row], top_ids, top = logprobs(logits[row], int(tokens[row]), n_told)
            told.top_ids[row, : len(top_ids)] = top_ids
            told.top[row, : len(top)] = top
    return tokens, told
