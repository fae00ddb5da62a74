"""Three sequences on one machine, for bench/prefill.py: a long prompt, a row that generates, and a
copy of the beginning of the prompt to compare with.

What it does not do: time anything.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from mkref.machine.inputs import StepInputs
from mkref.measure.pages import fill_kv
from mkref.plan.build import PAGE, build_plan

if TYPE_CHECKING:
    from mkref.config import NorthConfig
    from mkref.engine.prefill import Prefill
    from mkref.machine.base import KernelMachine
    from mkref.weights.packed import PackedWeights

__all__ = ["PROMPT", "RUNNING", "SECOND", "Desk", "page_tables"]

PROMPT, RUNNING, SECOND = range(3)
RUNNING_AT, RUNNING_STEPS = 4096, 2048
SECOND_TOKENS = 1024


def page_tables(
    config: NorthConfig, lengths: list[int], ahead: int
) -> tuple[list[np.ndarray], tuple[int, int]]:
    """A page table int32 [2, pages] for each sequence, and the pages that both kinds need.

    Sliding pages are used in turn: as many as a window and `ahead` tokens behind it can lie in.
    """
    used, tables = [0, 0], []
    for length in lengths:
        n = -(-length // PAGE)
        tables.append(np.zeros((2, n), np.int32))
        for kind, own in enumerate((n, min(n, (config.sliding_window + ahead) // PAGE + 3))):
            tables[-1][kind] = used[kind] + np.arange(n) % own
            used[kind] += own
    return tables, (used[0], used[1])


class Desk:
    """A loaded machine and its sequences.

    Args:
        machine: nothing loaded.
        weights: where it wants them.
        longest: tokens of the prompt.
        ahead: tokens of the largest chunk.
        n_sm: of the plan.
    """

    def __init__(
        self, machine: KernelMachine, weights: PackedWeights, longest: int, ahead: int, n_sm: int
    ) -> None:
        self.machine, self.config = machine, weights.config
        self.on_gpu = machine.name == "cuda"
        longest = max(longest, ahead)
        lengths = [longest + PAGE, RUNNING_AT + RUNNING_STEPS, SECOND_TOKENS]
        most = self.config.max_position_embeddings
        lengths = [min(length, most) for length in lengths]
        self.tables, (full, sliding) = page_tables(self.config, lengths, ahead)
        plan = build_plan(self.config, n_sm, full_pages=full, sliding_pages=sliding)
        machine.load(plan, weights, max(lengths))
        fill_kv(machine)
        rng = np.random.default_rng(0)
        self.tokens = rng.integers(0, self.config.vocab_size, max(lengths)).astype(np.int32)
        self._token = self._at = 0
        self._range = (min(RUNNING_AT, most // 2), lengths[RUNNING])

    def chunk(self, prefill: Prefill, begin: int, count: int, sequence: int = PROMPT) -> None:
        """Tokens of the prompt through torch."""
        prefill.run(self.tokens[begin : begin + count], begin, self.tables[sequence])

    def decode_step(self) -> None:
        """One token of the running row."""
        self._step([(RUNNING, 1, self._next(), [self._token])])

    def prompt_step(self, begin: int, rows: int, sequence: int = PROMPT) -> None:
        """Tokens of the prompt in `rows` rows; with less than eight, the running row goes along."""
        part = self.tokens[begin : begin + rows].tolist()
        own = (sequence, len(part), begin, part)
        beside = rows < 8 and sequence == PROMPT
        self._step([(RUNNING, 1, self._next(), [self._token]), own] if beside else [own])

    def next_logits(self, position: int, sequence: int) -> np.ndarray:
        """Logits of the prompt's token at `position`: float32 [V]."""
        self._step([(sequence, 1, position, [int(self.tokens[position])])])
        return self.machine.logits(1)[0]

    def _next(self) -> int:
        """Where the running row is; it begins again when its pages end."""
        begin, end = self._range
        self._at = begin if not begin <= self._at + 1 < end else self._at + 1
        return self._at

    def _step(self, parts: list[tuple[int, int, int, list[int]]]) -> None:
        """A step of (sequence, rows, first position, tokens); keeps the running row's token."""
        width = max(table.shape[1] for table in self.tables)
        n = sum(rows for _, rows, _, _ in parts)
        table = np.full((2, n, width), -1, np.int32)
        tokens: list[int] = []
        positions: list[int] = []
        earlier: list[int] = []
        row = 0
        for sequence, rows, begin, given in parts:
            own = self.tables[sequence]
            table[:, row : row + rows, : own.shape[1]] = own[:, None]
            tokens += given
            positions += range(begin, begin + rows)
            earlier += range(rows)
            row += rows
        inputs = StepInputs(
            np.array(tokens, np.int32),
            np.array(positions, np.int32),
            table,
            earlier=np.array(earlier, np.int32),
        )
        drawn = self.machine.step(inputs)
        if parts[0][0] == RUNNING:
            self._token = int(drawn[0])
