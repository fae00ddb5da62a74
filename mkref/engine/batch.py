"""Continuous batching: sequences share every launch, each at its own position.

While prompts are being taken in, a launch is one step: a row for every sequence, and the rows that
are left for further tokens of the prompts, in turns. Once everybody generates, a launch runs many
steps: the kernel feeds itself, and the host only reads along. It ends when somebody's answer does,
and the row goes to the next one that waits. A row's numbers do not depend on its neighbours, on its
place or on how steps are grouped into launches, so neither does any answer.

What it does not do: check requests (`mkref.engine.request`), preempt, or prefer anybody: who comes
first is served first.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator
from collections.abc import Sequence as SequenceOf
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, runtime_checkable

import numpy as np

from mkref.engine.kv import AHEAD
from mkref.errors import MkrefError
from mkref.machine.base import Launch, Machine, StepInputs
from mkref.plan.buffers import STOP_IDS

if TYPE_CHECKING:
    from mkref.engine.kv import KvPages, KvSequence
    from mkref.engine.sequence import Sequence

__all__ = ["Batch", "Prefills"]


@runtime_checkable
class Prefills(Protocol):
    """A machine that can take the first tokens of a sequence all at once."""

    def prefill(self, tokens: SequenceOf[int], page_table: np.ndarray) -> None:
        """Put tokens of positions 0, 1, ... into the cache; `page_table` int32 [2, pages]."""


@dataclass
class _Row:
    """The rows of one sequence in a launch: the last one's token may be its next."""

    sequence: Sequence
    count: int
    last: int


class Batch:
    """Sequences that wait and sequences that run on one machine.

    Args:
        machine: loaded.
        kv: pages of the machine's pool.
    """

    def __init__(self, machine: Machine, kv: KvPages) -> None:
        self.machine = machine
        self.kv = kv
        self.rows = machine.plan.rows
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []
        self._launch: Launch | None = None
        self._fed: list[_Row] = []  # by the launch
        self._n_taken = 0  # steps of the launch
        self._since = 0.0  # when its last tokens came, or it began
        self._stepping = False
        self._late: list[Sequence] = []  # cancelled while a step was under way
        self._tokens, self._positions, self._earlier = np.zeros((3, self.rows), np.int32)
        self._temperatures = np.zeros(self.rows, np.float32)
        self._seeds = np.zeros(self.rows, np.uint64)
        self._stops = np.full((self.rows, STOP_IDS), -1, np.int32)
        self._table = np.full((2, self.rows, kv.width), -1, np.int32)
        # Whose seed, stop ids and page table a row holds, and since which move of its pages.
        self._owners: list[tuple[KvSequence | None, int]] = [(None, 0)] * self.rows

    def submit(self, sequence: Sequence) -> None:
        """Line up; it begins when a row and its pages are free."""
        self.waiting.append(sequence)

    def cancel(self, sequence: Sequence) -> None:
        """Forget a sequence, wherever it is. One that has ended is no longer there."""
        if self._stepping:
            # A forgotten stream that the garbage collector closes, of all times, inside a step.
            self._late.append(sequence)
            return
        if sequence in self.waiting:
            self.waiting.remove(sequence)
        if sequence in self.running:
            with self._undisturbed():
                try:
                    self._end_launch()
                except MkrefError as error:  # the others hear of it, not who leaves
                    self._fail(error)
        if sequence in self.running:
            self._leave(sequence)

    @contextmanager
    def _undisturbed(self) -> Iterator[None]:
        """Cancellations wait for the end of this."""
        self._stepping = True
        try:
            yield
        finally:
            self._stepping = False
            while self._late:
                self.cancel(self._late.pop())

    def step(self) -> None:
        """Go on until the next step is done: new tokens for everybody who generates.

        Raises:
            MachineError: the machine failed. Everybody who ran has ended with this error, and all
                pages are free.
        """
        with self._undisturbed():
            try:
                if self._launch is None:
                    self._admit()
                    self._launch = self._begin()
                elif self._can_admit():
                    self._launch.cancel()
                self._take(self._launch)
            except BaseException as error:
                self._fail(error)
                raise

    def _can_admit(self) -> bool:
        return (
            len(self.waiting) > 0
            and len(self.running) < self.rows
            and self.kv.has_room(self.waiting[0].request.n_tokens)
        )

    def _admit(self) -> None:
        while self._can_admit():
            sequence = self.waiting.popleft()
            kv = sequence.kv = self.kv.open(sequence.request.n_tokens)
            self.running.append(sequence)
            head = sequence.request.prompt[:-1]
            if kv is not None and head and isinstance(self.machine, Prefills):
                self.kv.advance(kv, len(head) - 1)
                self.machine.prefill(head, kv.table)
                sequence.fed = len(head)

    def _leave(self, sequence: Sequence) -> None:
        """Free a row and its pages."""
        self.running.remove(sequence)
        if sequence.kv is not None:
            self.kv.close(sequence.kv)
            sequence.kv = None

    def _fail(self, error: BaseException) -> None:
        """Everybody who runs ends with an error."""
        launch, self._launch = self._launch, None
        try:
            if launch is not None:
                launch.close()
        finally:
            for sequence in [*self.running]:
                sequence.error = error
                self._leave(sequence)

    def _share_rows(self) -> list[int]:
        """Rows of each running sequence: one, and then in turns for those with a long prompt."""
        counts = [1] * len(self.running)
        left = [sequence.n_prompt_left for sequence in self.running]
        free = self.rows - len(counts)
        while free and any(left):
            for i, n in enumerate(left):
                if n and free:
                    counts[i], left[i], free = counts[i] + 1, n - 1, free - 1
        return counts

    def _n_steps(self) -> int:
        """Steps that need nothing from the host: until the first answer reaches its length.

        A launch also ends with the first answer that a token ends (`stop_after` is 1), whether or
        not somebody waits for the row: a row without a purpose makes every step read more experts,
        which costs more than starting again.
        """
        wanted = any(s.n_prompt_left or s.request.return_logits for s in self.running)
        return 1 if wanted else min([AHEAD, *(s.n_left for s in self.running)])

    def _begin(self) -> Launch:
        n_steps = self._n_steps()
        self._fed, self._n_taken, row = [], 0, 0
        for sequence, count in zip(self.running, self._share_rows(), strict=True):
            self._place(sequence, row, count, max(count, n_steps))
            row += count
            self._fed.append(_Row(sequence, count, row - 1))
        inputs = StepInputs(
            self._tokens[:row],
            self._positions[:row],
            self._table[:, :row],
            self._temperatures[:row],
            self._seeds[:row],
            self._earlier[:row],
        )
        self._since = time.perf_counter()
        if n_steps == 1:
            return self.machine.start(inputs)
        return self.machine.start(inputs, n_steps, stop_ids=self._stops[:row], stop_after=1)

    def _place(self, sequence: Sequence, row: int, count: int, ahead: int) -> None:
        """Write the inputs of a sequence's next tokens into `count` rows."""
        request, kv, end = sequence.request, sequence.kv, row + count
        assert kv is not None
        sequence.n_moves += self.kv.advance(kv, sequence.fed, ahead)
        self._tokens[row:end] = sequence.tokens(count)
        self._positions[row:end] = range(sequence.fed, sequence.fed + count)
        self._earlier[row:end] = range(count)
        # Nobody draws from the rows of a prompt but from the last.
        self._temperatures[row:end] = 0
        if sequence.n_prompt_left < count:
            self._temperatures[end - 1] = request.temperature
        owner = (kv, sequence.n_moves)
        for each in range(row, end):
            if self._owners[each] != owner:
                self._owners[each] = owner
                self._table[:, each] = kv.table
                self._seeds[each] = request.seed
                self._stops[each] = sequence.device_stops

    def _take(self, launch: Launch) -> None:
        """Wait for one step; the launch is over with it if somebody's answer is."""
        drawn = next(launch, None)
        if drawn is not None:
            self._accept(drawn.tolist())
            self._n_taken += 1
        ended = any(row.sequence.finish_reason for row in self._fed)
        if drawn is None or ended or self._n_taken == launch.n_steps:
            self._end_launch()

    def _end_launch(self) -> None:
        """Cancel the launch, take what it has done until then, let those go who have ended."""
        if self._launch is None:
            return
        self._launch.cancel()
        for drawn in self._launch:
            self._accept(drawn.tolist())
        self._launch, self._fed = None, []
        for sequence in [*self.running]:
            if sequence.finish_reason:
                self._leave(sequence)

    def _accept(self, drawn: list[int]) -> None:
        """Give the tokens of one step to their sequences; what comes after an end is dropped."""
        now = time.perf_counter()
        seconds, self._since = now - self._since, now
        logits: np.ndarray | None = None
        for row in self._fed:
            sequence = row.sequence
            if sequence.finish_reason:
                continue
            generates = sequence.n_prompt_left < row.count
            sequence.fed += row.count
            if not generates:
                continue
            if sequence.request.return_logits:
                if logits is None:
                    logits = self.machine.logits(self._fed[-1].last + 1)
                sequence.logits.append(logits[row.last].copy())
            sequence.step_s.append(seconds)
            sequence.accept(drawn[row.last])
