"""The rows of a launch: which sequence feeds which tokens where, as arrays for the machine.

The arrays live as long as the scheduler. What a row holds for a sequence that stays in it (seed,
stop ids, page table, settings of the draw) is written once and not for every launch, because the
GPU stands still meanwhile.

What it does not do: decide who gets how many rows (`mkref.engine.scheduler`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from mkref.engine.sampling import make_draw
from mkref.errors import RequestError
from mkref.machine.inputs import StepInputs
from mkref.plan.buffers import STOP_IDS

if TYPE_CHECKING:
    from mkref.engine.sampling import Sampling
    from mkref.engine.sequence import Sequence
    from mkref.machine.base import Machine
    from mkref.machine.draw import Draw
    from mkref.machine.launch import Launch

__all__ = ["Placed", "Rows", "checked_mask"]

Settings = tuple["Sampling | None", int]


@dataclass(frozen=True)
class Placed:
    """The rows of one sequence in a launch.

    Attributes:
        count: tokens that it feeds, one per row.
        last: its last row.
        draws: whether what comes out of that row is its next token.
    """

    sequence: Sequence
    count: int
    last: int
    draws: bool


def checked_mask(sequence: Sequence, vocab_size: int) -> np.ndarray | None:
    """What a sequence's constraint allows next; None if it has none.

    Raises:
        RequestError: the constraint fails, leaves nothing, or gives something else than a mask.
    """
    constraint = sequence.request.constraint
    if constraint is None:
        return None
    try:
        mask = constraint.mask()
    except Exception as error:
        raise RequestError(f"constraint: {error or type(error).__name__}") from error
    shape = (-(-vocab_size // 32),)
    if not isinstance(mask, np.ndarray) or mask.dtype != np.uint32 or mask.shape != shape:
        found = f"{mask.dtype} {mask.shape}" if isinstance(mask, np.ndarray) else type(mask)
        raise RequestError(f"constraint: a mask of {found}; must be uint32 {shape}")
    last = np.uint32(0xFFFFFFFF) >> np.uint32(-vocab_size % 32)
    if not (mask[:-1].any() or mask[-1] & last):
        raise RequestError("constraint: no token may come next; it must allow one, or have ended")
    return mask


class Rows:
    """Inputs of a machine's launches.

    Args:
        machine: loaded.
        width: entries of a page table.
    """

    def __init__(self, machine: Machine, width: int) -> None:
        self._machine = machine
        n = self.n_rows = machine.plan.rows
        self._vocab_size = machine.plan.config.vocab_size
        self.placed: list[Placed] = []
        self._n = 0
        self._tokens, self._positions, self._earlier = np.zeros((3, n), np.int32)
        self._temperatures = np.zeros(n, np.float32)
        self._seeds = np.zeros(n, np.uint64)
        self._stops = np.full((n, STOP_IDS), -1, np.int32)
        self._table = np.full((2, n, width), -1, np.int32)
        self._owners: list[Sequence | None] = [None] * n
        self._moves: list[tuple[Any, int]] = [(None, -1)] * n  # whose page table, at which change
        self._counted: list[Sequence | None] = [None] * n  # whose tokens the machine has counted
        self._settings: list[Settings] = []
        self._draw: Draw | None = None

    def clear(self) -> None:
        """Begin with no rows."""
        self.placed, self._n = [], 0

    def forget(self) -> None:
        """Hold on to no sequence, and rely on nothing that the machine keeps for one."""
        self.clear()
        for held in (self._owners, self._counted):
            held[:] = [None] * self.n_rows
        self._moves[:] = [(None, -1)] * self.n_rows

    def place(self, sequence: Sequence, count: int) -> None:
        """Give the next `count` tokens of a sequence a row each."""
        row, end, fed, kv = self._n, self._n + count, sequence.fed, sequence.kv
        assert kv is not None
        draws, sampling = sequence.n_ahead < count, sequence.request.sampling
        if count == 1:  # by far the most frequent, and much faster so
            self._tokens[row], self._positions[row] = sequence.tokens[fed], fed
            self._earlier[row] = 0
        else:
            self._tokens[row:end] = sequence.tokens[fed : fed + count]
            self._positions[row:end] = np.arange(fed, fed + count)
            self._earlier[row:end] = np.arange(count)
            # Nobody draws from the rows of a prompt but from the last.
            self._temperatures[row : end - 1] = 0
        self._temperatures[end - 1] = sampling.temperature if draws else 0
        for each in range(row, end):
            kept, moves = self._moves[each]
            if kept is not kv or moves != kv.n_moves:
                self._moves[each] = (kv, kv.n_moves)
                self._table[:, each] = kv.table
            if self._owners[each] is not sequence:
                self._owners[each] = sequence
                self._seeds[each] = sampling.seed
                self._stops[each] = sequence.device_stops
        self._n = end
        self.placed.append(Placed(sequence, count, end - 1, draws))

    def start(self, n_steps: int, masks: dict[Sequence, np.ndarray]) -> Launch:
        """Begin a launch with the rows as they are.

        Args:
            n_steps: 1 if a sequence has several rows, or a mask.
            masks: of those that have one.
        """
        n = self._n
        inputs = StepInputs(
            self._tokens[:n],
            self._positions[:n],
            self._table[:, :n],
            self._temperatures[:n],
            self._seeds[:n],
            self._earlier[:n],
        )
        drawing = [p for p in self.placed if p.draws]
        # Sampling is settled before the first launch and does not change while a sequence runs.
        if masks or any(p.sequence.request.sampling.needs_draw for p in drawing):
            draw = self._drawn(drawing, masks)
            return self._machine.start(
                inputs, n_steps, stop_ids=self._stops[:n], stop_after=int(n_steps > 1), draw=draw
            )
        if n_steps == 1:
            return self._machine.start(inputs)
        return self._machine.start(inputs, n_steps, stop_ids=self._stops[:n], stop_after=1)

    def _drawn(self, drawing: list[Placed], masks: dict[Sequence, np.ndarray]) -> Draw:
        """Settings of the draws, made anew only if a row's have changed."""
        settings: list[Settings] = [(None, 0)] * self._n
        # Also rows that are empty this time: who moves to another one is counted there from now on.
        counted: list[Sequence | None] = [None] * self.n_rows
        for placed in drawing:
            sequence, row = placed.sequence, placed.last
            request = sequence.request
            bans = len(request.prompt) - 1 + request.sampling.min_tokens
            settings[row] = (request.sampling, bans)
            if request.sampling.penalizes:
                counted[row] = sequence
                if self._counted[row] is not sequence:
                    ids = np.array(sequence.tokens, np.int32)
                    n_prompt = len(request.prompt)
                    self._machine.set_counts(row, ids[:n_prompt], ids[n_prompt:])
        self._counted = counted
        if self._draw is None or settings != self._settings:
            self._settings = settings
            self._draw = make_draw(*zip(*settings, strict=True))
        if not masks:
            return self._draw
        words = np.full((self._n, -(-self._vocab_size // 32)), 0xFFFFFFFF, np.uint32)
        for placed in drawing:
            if placed.sequence in masks:
                words[placed.last] = masks[placed.sequence]
        return self._draw.masked(words)
