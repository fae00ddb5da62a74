"""How the rows of a launch draw their tokens, beyond temperature and noise, and what comes back.

`Draw` goes into `Machine.start`, `LogProbs` come out of its launch. What each setting does to the
logits, and in which order, is in `mkref.reference.drawing`; on a GPU `cuda/sampler/` does it.

What it does not do: draw, or hold temperatures, seeds and stop ids, which a launch has anyway.

Notation: n active rows, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from mkref.errors import MachineError

if TYPE_CHECKING:
    from mkref.machine.inputs import StepInputs

__all__ = ["BIAS_IDS", "TOP_LOGPROBS", "Draw", "LogProbs", "check_draw", "effective_bans"]

BIAS_IDS = 300
"""Most token ids per row that have a bias, as in OpenAI's interface."""
TOP_LOGPROBS = 20
"""Most likely tokens per row whose probabilities can be asked for."""


@dataclass(frozen=True)
class Draw:
    """Settings per active row. A row whose settings are neutral draws as the kernel does by itself.

    A machine makes the arrays of a `Draw` read-only when it takes it, and looks at them only once.

    Attributes:
        top_k: int32 [n], 0 is off.
        top_p: float32 [n], 1 is off.
        min_p: float32 [n], 0 is off.
        presence, frequency: float32 [n], 0 is off.
        repetition: float32 [n], 1 is off. A row with one of these three reads the counts of
            `Machine.set_counts`, and every token that it draws is counted there.
        bias_ids: int32 [n, 300], token ids, each once per row; -1 after the last.
        bias_values: float32 [n, 300], what is added to their logits.
        ban_until: int32 [n]; at positions below it the row's stop ids are not drawn.
        logprobs: int32 [n]: -1 off, or how many of the most likely tokens are told, 0 to 20.
        mask: uint32 [n, ceil(V / 32)] or None; bit `t % 32` of word `t // 32` is set if token `t`
            is allowed. For launches of one step only.
    """

    top_k: np.ndarray
    top_p: np.ndarray
    min_p: np.ndarray
    presence: np.ndarray
    frequency: np.ndarray
    repetition: np.ndarray
    bias_ids: np.ndarray
    bias_values: np.ndarray
    ban_until: np.ndarray
    logprobs: np.ndarray
    mask: np.ndarray | None = None

    @classmethod
    def neutral(cls, rows: int) -> Draw:
        """Settings that change nothing, for the caller to fill in."""
        return cls(
            top_k=np.zeros(rows, np.int32),
            top_p=np.ones(rows, np.float32),
            min_p=np.zeros(rows, np.float32),
            presence=np.zeros(rows, np.float32),
            frequency=np.zeros(rows, np.float32),
            repetition=np.ones(rows, np.float32),
            bias_ids=np.full((rows, BIAS_IDS), -1, np.int32),
            bias_values=np.zeros((rows, BIAS_IDS), np.float32),
            ban_until=np.zeros(rows, np.int32),
            logprobs=np.full(rows, -1, np.int32),
        )

    def masked(self, mask: np.ndarray) -> Draw:
        """The same with a mask."""
        return replace(self, mask=mask)

    def freeze(self) -> None:
        """Let nobody change an array any more; the mask is always looked at again."""
        for name in KINDS:
            getattr(self, name).flags.writeable = False

    def same_settings(self, other: Draw | None) -> bool:
        """Are these the arrays of `other`, but for the mask?"""
        return other is not None and all(
            getattr(self, name) is getattr(other, name) for name in KINDS
        )

    @property
    def rows(self) -> int:
        """Number of rows."""
        return len(self.top_k)

    @property
    def penalizes(self) -> np.ndarray:
        """bool [n]: does the row read and write its counts?"""
        return (self.presence != 0) | (self.frequency != 0) | (self.repetition != 1)

    @property
    def n_bias(self) -> np.ndarray:
        """int32 [n]: ids that have a bias."""
        return np.count_nonzero(self.bias_ids >= 0, axis=1).astype(np.int32)


@dataclass(frozen=True)
class LogProbs:
    """Natural logarithms of probabilities by the raw logits (no bias, penalty or temperature).

    Attributes:
        token: float32 [n], of the drawn tokens; NaN in a row that did not ask.
        top_ids: int32 [n, 20], the most likely tokens, most likely first; -1 beyond what was asked.
        top: float32 [n, 20], their logarithms; NaN beyond.
    """

    token: np.ndarray
    top_ids: np.ndarray
    top: np.ndarray


KINDS = {
    "top_k": np.int32, "top_p": np.float32, "min_p": np.float32, "presence": np.float32,
    "frequency": np.float32, "repetition": np.float32, "bias_ids": np.int32,
    "bias_values": np.float32, "ban_until": np.int32, "logprobs": np.int32,
}  # fmt: skip
LIMITS: dict[str, tuple[float, float, str]] = {
    "top_k": (0, np.inf, "0 (off) or more"),
    "top_p": (1e-6, 1, "0.000001 to 1"),
    "min_p": (0, 1, "0 to 1"),
    "presence": (-1e6, 1e6, "a finite number"),
    "frequency": (-1e6, 1e6, "a finite number"),
    "repetition": (1e-6, 1e6, "a positive number"),
    "logprobs": (-1, TOP_LOGPROBS, f"-1 (off) to {TOP_LOGPROBS}"),
    "bias_values": (-1e6, 1e6, "a finite number"),
}


def check_draw(
    draw: Draw, inputs: StepInputs, n_steps: int, vocab_size: int, known: Draw | None = None
) -> None:
    """Refuse settings that are of another shape than the kernel reads, or mean nothing.

    Args:
        draw, inputs, n_steps: of a launch.
        vocab_size: V.
        known: checked before, and frozen.

    Raises:
        MachineError: names the setting, the row and the value.
    """
    n = inputs.rows
    if not (draw.same_settings(known) and draw.rows == n):
        _check_settings(draw, n, vocab_size)
    if draw.mask is not None:
        _check_mask(draw.mask, n, n_steps, vocab_size)


def _check_settings(draw: Draw, n: int, vocab_size: int) -> None:
    for name, kind in KINDS.items():
        array = getattr(draw, name)
        shape = (n, BIAS_IDS) if name.startswith("bias") else (n,)
        if not isinstance(array, np.ndarray) or array.dtype != kind or array.shape != shape:
            found = (
                f"{array.dtype} {array.shape}"
                if isinstance(array, np.ndarray)
                else type(array).__name__
            )
            raise MachineError(f"draw.{name}: {found}; must be {np.dtype(kind)} {shape}")
        if name in LIMITS:
            low, high, right = LIMITS[name]
            good = (array >= low) & (array <= high)  # NaN is neither
            if not good.all():
                at = tuple(int(i) for i in np.argwhere(~good)[0])
                raise MachineError(f"draw.{name}: row {at[0]} has {array[at]}; must be {right}")
    if (draw.bias_ids != -1).any():
        _check_biases(draw, vocab_size)


def _check_biases(draw: Draw, vocab_size: int) -> None:
    for row, ids in enumerate(draw.bias_ids):
        n = int(draw.n_bias[row])
        used = ids[:n]
        if (
            (ids[n:] != -1).any()
            or (used < 0).any()
            or (used >= vocab_size).any()
            or len(np.unique(used)) != n
        ):
            raise MachineError(
                f"draw.bias_ids: row {row}; must be token ids in 0..{vocab_size - 1}, "
                "each once, and -1 after the last"
            )


def _check_mask(mask: np.ndarray, n: int, n_steps: int, vocab_size: int) -> None:
    shape = (n, -(-vocab_size // 32))
    if not isinstance(mask, np.ndarray) or mask.dtype != np.uint32 or mask.shape != shape:
        found = (
            f"{mask.dtype} {mask.shape}" if isinstance(mask, np.ndarray) else type(mask).__name__
        )
        raise MachineError(f"draw.mask: {found}; must be uint32 {shape}")
    if n_steps != 1:
        raise MachineError(
            f"draw.mask: with {n_steps} steps; must be one step, after which another mask holds"
        )
    last = np.uint32(0xFFFFFFFF) >> np.uint32(-vocab_size % 32)
    some = (mask[:, -1] & last != 0) | (mask[:, :-1].max(axis=1, initial=0) > 0)
    if not some.all():
        row = int(some.argmin())
        raise MachineError(f"draw.mask: row {row} allows no token; must allow at least one")


def effective_bans(
    draw: Draw, inputs: StepInputs, stop_ids: np.ndarray | None, vocab_size: int
) -> np.ndarray:
    """`Draw.ban_until` as it holds: a mask that allows stop ids only is stronger than a ban.

    Returns:
        int32 [n]; 0 where nothing is banned.
    """
    bans = draw.ban_until.copy()
    if stop_ids is None:
        bans[:] = 0
    elif draw.mask is not None:
        for row in np.flatnonzero(inputs.positions < bans):
            words = draw.mask[row].copy()
            ids = np.unique(stop_ids[row][(stop_ids[row] >= 0) & (stop_ids[row] < vocab_size)])
            np.bitwise_and.at(words, ids // 32, ~(np.uint32(1) << (ids % 32).astype(np.uint32)))
            words[-1] &= np.uint32(0xFFFFFFFF) >> np.uint32(-vocab_size % 32)
            if not words.any():
                bans[row] = 0
    return bans
