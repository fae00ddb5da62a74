"""How near was another token? What decides a draw, measured in logits.

Fast mode takes long prompts in by PyTorch, whose sums have another order, so all later logits
differ a little from those that a request has alone. Another token is right only where a little is
enough: `nearness` says how much, from the logits of the request alone.

    greedy    how far the token is below the best, after bias and penalties
    drawn     the same of the final values (logits / temperature + noise), times the temperature
    filter    how far it is from the edge of top_k, top_p or min_p, beyond which it is left out; or
              how far those that would have won are from leaving

An edge of top_k or min_p is a logit, and the distance that to it. That of top_p is a share of the
probability; the distance is the smaller one of two: to the logit of the last token inside, or of
the log odds of the share that lies above the token to those of top_p. Neither moves by more than
twice of what every logit moves at most, and so does the difference of two logits: one tolerance
serves all.

What it does not do: know why logits differ (`bench/soak_router.py` for changed experts).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import numpy.typing as npt

from mkref.reference.drawing import Rules, adjusted, counted, kept, masses
from mkref.reference.sampling import gumbel

if TYPE_CHECKING:
    from collections.abc import Sequence

    from mkref.engine.sampling import Sampling

Logits = npt.NDArray[np.float32]
Distances = npt.NDArray[np.float64]

TOLERANCE = 0.15
"""Logits; those of nano spread over about 20. Fast mode moves a logit by 0.016 (root mean square of
tokens whose routers are clear; `noise`, in the record), and so the difference of two by
0.016 * sqrt(2) = 0.022. This is seven times that, rounded down, because tokens are uneven: single
logits of theirs move by up to 0.16. Where nearly tied experts of the token itself are exchanged,
logits move by up to 2; the exchange alone does that, and leaves 0.016 (`bench/soak_router.py`).
"""


class Nearness(NamedTuple):
    """How near a token was.

    Attributes:
        gap: in logits; 0 if it is the one that is drawn, NaN if the logits are no numbers.
        kind: what the gap is of: "greedy", "drawn" or "filter".
    """

    gap: float
    kind: str


def first_difference(ours: Sequence[int], theirs: Sequence[int]) -> int | None:
    """The first place with another token; None if one is the beginning of the other."""
    pairs = zip(ours, theirs, strict=False)
    return next((at for at, (a, b) in enumerate(pairs) if a != b), None)


def rules_at(
    sampling: Sampling, prompt: Sequence[int], answer: Sequence[int], vocab_size: int
) -> tuple[Rules, int]:
    """The rules of the draw that follows `answer`, and its position."""
    if sampling.min_tokens:
        raise ValueError("min_tokens: not compared here")
    rules = Rules(
        temperature=sampling.temperature,
        seed=sampling.seed,
        top_k=sampling.top_k,
        top_p=sampling.top_p,
        min_p=sampling.min_p,
        presence=sampling.presence_penalty,
        frequency=sampling.frequency_penalty,
        repetition=sampling.repetition_penalty,
        bias=sampling.logit_bias,
        counts=counted(prompt, answer, vocab_size) if sampling.penalizes else None,
    )
    return rules, len(prompt) + len(answer) - 1


def nearness(logits: Logits, rules: Rules, position: int, token: int) -> Nearness:
    """How far a draw is from giving `token`.

    Args:
        logits: float32 [V], of the request alone.
        rules: of the draw.
        position: of the token that was fed.
        token: what somebody else drew.
    """
    heat = rules.temperature
    if not np.isfinite(logits).all():
        return Nearness(float("nan"), "drawn" if heat else "greedy")
    v = adjusted(logits, rules)
    if np.isneginf(v[token]):
        return Nearness(float("inf"), "filter")
    if not heat:
        return Nearness(float(v.max() - v[token]), "greedy")
    z = v / np.float32(heat)
    final = (z + gumbel(rules.seed, position, np.arange(len(z)))).astype(np.float64)
    inside = _inside(z, rules)
    enters = max(0.0, -float(inside[token]))
    rivals = np.flatnonzero((inside >= 0) & (final > final[token]))
    below, leaving = final[rivals] - final[token], inside[rivals]
    wins = float(np.minimum(below, leaving).max(initial=0))
    filtered = enters > wins or bool((leaving < below)[np.minimum(below, leaving) == wins].any())
    gap = float(max(enters, wins)) * heat
    return Nearness(gap, "filter" if gap and filtered else "drawn")


def _inside(z: Logits, rules: Rules) -> Distances:
    """How far each token is inside of all filters, or outside (below 0) of one; infinity: none."""
    wide = z.astype(np.float64)
    inside = np.where(np.isneginf(wide), -np.inf, np.inf)
    descending = np.sort(wide[~np.isneginf(wide)])[::-1]
    if 0 < rules.top_k < len(descending):
        last, following = descending[rules.top_k - 1], descending[rules.top_k]
        inside = np.minimum(inside, wide - np.where(wide >= last, following, last))
    if rules.min_p > 0:
        inside = np.minimum(inside, wide - (descending[0] + np.log(rules.min_p)))
    if rules.top_p < 1:
        inside = np.minimum(inside, _inside_share(z, rules))
    return inside


def _inside_share(z: Logits, rules: Rules) -> Distances:
    """The same of top_p alone, which shares what top_k leaves."""
    wide = z.astype(np.float64)
    begun = kept(z, Rules(temperature=1, top_k=rules.top_k))
    keep = kept(z, Rules(temperature=1, top_k=rules.top_k, top_p=rules.top_p))
    mass = np.where(begun, masses(z)[1], 0).astype(np.float64)
    order = np.argsort(-wide, kind="stable")
    levels = -wide[order]
    running = np.concatenate([[0.0], np.cumsum(mass[order])])
    above = running[np.searchsorted(levels, -wide, side="left")]  # of tokens that are more likely
    with np.errstate(divide="ignore"):
        odds = np.log(above) - np.log(running[-1] - above)
    by_share = np.log(rules.top_p) - np.log1p(-rules.top_p) - odds
    last = wide[keep].min()
    following = wide[~keep].max(initial=-np.inf)
    # Both have one sign, but for roundings at the edge itself.
    inner = np.maximum(0, np.minimum(by_share, wide - following))
    outer = np.minimum(-1e-12, np.maximum(by_share, wide - last))
    return np.where(keep, inner, outer)
