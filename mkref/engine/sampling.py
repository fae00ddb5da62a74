"""How a request wants its tokens to be drawn: the settings, checked, and what they mean for a row.

The order in which they apply is that of `mkref.reference.drawing`, which computes them.

What it does not do: draw anything, or know the vocabulary (`mkref.engine.request` checks ids).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from mkref.engine.values import listed, show, whole_number
from mkref.errors import RequestError
from mkref.machine.draw import BIAS_IDS, TOP_LOGPROBS, Draw

__all__ = ["MAX_SEED", "TEMPERATURES", "Sampling", "make_draw"]

TEMPERATURES = (1e-3, 1e3)
"""Beyond these a float32 logit divided by the temperature overflows or says nothing."""
MAX_SEED = 2**64 - 1
MAX_TOP_K = 2**31 - 1
PENALTIES, REPETITIONS, BIASES = (-2.0, 2.0), (0.01, 100.0), (-100.0, 100.0)
"""What OpenAI's interface allows for penalties and biases; repetition is not part of that."""


@dataclass(frozen=True)
class Sampling:
    """Settings of one request's draws.

    Attributes:
        temperature: 0 takes the largest logit, else 0.001 to 1000.
        top_p: keep the fewest tokens that have this share of the probability; 1 keeps all.
        top_k: keep so many of the most likely tokens; 0 keeps all.
        min_p: keep tokens that are at least so likely compared with the most likely one.
        presence_penalty: taken from the logit of every token that the answer has already.
        frequency_penalty: the same, times how often the answer has it.
        repetition_penalty: what a logit is divided by (multiplied with, if it is negative) if the
            prompt or the answer has the token already.
        logit_bias: pairs of token id and number to add, or a mapping of them; at most 300.
        seed: of the noise; the same seed draws the same tokens, whatever else runs.
        min_tokens: no token that ends the answer comes before so many others.
        logprobs: None, or how many of the most likely tokens to tell the probability of, 0 to 20,
            besides that of the drawn one.

    Raises:
        RequestError: names the field, its value and what would be right.
    """

    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    seed: int = 0
    min_tokens: int = 0
    logprobs: int | None = None

    def __post_init__(self) -> None:
        low, high = TEMPERATURES
        checked = {
            "temperature": _number(
                "temperature", self.temperature, low, high, also=(0.0, "greedy")
            ),
            "top_p": _number("top_p", self.top_p, 1e-6, 1.0),
            "top_k": whole_number("top_k", self.top_k, 0, MAX_TOP_K, "0 is off"),
            "min_p": _number("min_p", self.min_p, 0.0, 1.0),
            "presence_penalty": _number("presence_penalty", self.presence_penalty, *PENALTIES),
            "frequency_penalty": _number("frequency_penalty", self.frequency_penalty, *PENALTIES),
            "repetition_penalty": _number(
                "repetition_penalty", self.repetition_penalty, *REPETITIONS
            ),
            "logit_bias": _biases(self.logit_bias),
            "seed": whole_number("seed", self.seed, 0, MAX_SEED),
            "min_tokens": whole_number("min_tokens", self.min_tokens, 0, 2**31 - 1),
        }
        if self.logprobs is not None:
            checked["logprobs"] = whole_number("logprobs", self.logprobs, 0, TOP_LOGPROBS)
        for name, value in checked.items():
            object.__setattr__(self, name, value)

    @property
    def penalizes(self) -> bool:
        """Does a draw depend on the tokens that came before (`Machine.set_counts`)?"""
        return bool(self.presence_penalty or self.frequency_penalty or self.repetition_penalty != 1)

    @property
    def filters(self) -> bool:
        """Are unlikely tokens left out? With temperature 0 there is nothing to leave out."""
        return bool(self.temperature and (self.top_p < 1 or self.top_k or self.min_p))

    @property
    def needs_draw(self) -> bool:
        """More than the kernel draws itself, which is temperature and noise?"""
        return bool(
            self.filters
            or self.penalizes
            or self.logit_bias
            or self.min_tokens
            or self.logprobs is not None
        )


def make_draw(samplings: Sequence[Sampling | None], ban_until: Sequence[int]) -> Draw:
    """The settings of all rows of a launch as a machine takes them; `Draw.masked` adds a mask.

    Args:
        samplings: one per row; None for a row whose token nobody takes, as of a prompt.
        ban_until: per row the position below which its stop ids may not come, which is
            `len(prompt) - 1 + min_tokens`.
    """
    draw = Draw.neutral(len(samplings))
    for row, sampling in enumerate(samplings):
        if sampling is None:
            continue
        draw.top_k[row], draw.top_p[row] = sampling.top_k, sampling.top_p
        draw.min_p[row] = sampling.min_p
        draw.presence[row] = sampling.presence_penalty
        draw.frequency[row] = sampling.frequency_penalty
        draw.repetition[row] = sampling.repetition_penalty
        if sampling.min_tokens:
            draw.ban_until[row] = ban_until[row]
        if sampling.logprobs is not None:
            draw.logprobs[row] = sampling.logprobs
        for i, (token, value) in enumerate(sampling.logit_bias):
            draw.bias_ids[row, i], draw.bias_values[row, i] = token, value
    return draw


def _number(
    name: str, value: Any, least: float, most: float, also: tuple[float, str] | None = None
) -> float:
    """`value` as a float in a range, or `also`; the error names what is right."""
    try:
        number = math.nan if isinstance(value, bool | str) else float(value)
    except (TypeError, ValueError, OverflowError):
        number = math.nan
    if not (least <= number <= most or (also is not None and number == also[0])):
        right = f"a number from {least:g} to {most:g}"
        if also is not None:
            right = f"{also[0]:g} ({also[1]}) or {least:g} to {most:g}"
        raise RequestError(f"{name}: {show(value)}; must be {right}")
    return number + 0.0  # no negative zero


def _biases(value: Any) -> tuple[tuple[int, float], ...]:
    """Pairs of id and bias, ids ascending."""
    pairs = listed(value.items() if isinstance(value, Mapping) else value)
    if pairs is None:
        raise RequestError(
            f"logit_bias: {show(value)}; must be a mapping of token ids to numbers, or such pairs"
        )
    if len(pairs) > BIAS_IDS:
        raise RequestError(f"logit_bias: {len(pairs)} tokens; must be at most {BIAS_IDS}")
    biases: dict[int, float] = {}
    for pair in pairs:
        both = listed(pair)
        if both is None or len(both) != 2:
            raise RequestError(f"logit_bias: {show(pair)}; must be a pair of token id and number")
        token = whole_number("logit_bias", both[0], 0, 2**31 - 1, "a token id")
        if token in biases:
            raise RequestError(f"logit_bias: token {token} twice; must have one number per token")
        biases[token] = _number(f"logit_bias[{token}]", both[1], *BIASES)
    return tuple(sorted(biases.items()))
