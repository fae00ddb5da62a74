"""Continuous batching: sequences share every launch, each at its own position.

While prompts go in, a launch is one step: a row for every sequence, and the rows that are left for
further tokens of the prompts, in turns. Once everybody generates, a launch runs many steps: the
kernel feeds itself, and the host only reads along. It ends when somebody's answer does, or when
somebody else can begin. Text is made of the tokens while the next launch runs already.
A row's numbers do not depend on its neighbours, on its place or on how
steps are grouped into launches, so neither does any answer.

A long prompt may also go in by `Prefill`, much faster but not bit for bit as the kernel does it: a
chunk between two launches, so those who generate wait for one chunk at most.

What it does not do: check requests (`mkref.engine.request`), decide who runs
(`mkref.engine.roster`), or run in several threads at a time.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from collections.abc import Sequence as SequenceOf
from contextlib import contextmanager
from math import inf
from typing import TYPE_CHECKING, Protocol

from mkref.engine.kv import AHEAD
from mkref.engine.request import LogProb
from mkref.engine.roster import Roster
from mkref.engine.rows import Rows, checked_mask
from mkref.errors import MkrefError, RequestError

if TYPE_CHECKING:
    import numpy as np

    from mkref.engine.kv import KvCache
    from mkref.engine.sequence import Sequence
    from mkref.machine.base import Launch, Machine
    from mkref.machine.draw import LogProbs

__all__ = ["PREFILL_FROM", "Prefills", "Scheduler"]

PREFILL_FROM = 128
"""Tokens that a chunk pays for: fewer are faster through the kernel."""
BETWEEN_CHUNKS = 4
"""Most steps between two chunks: a prompt waits for them, those who generate for the chunk."""


class Prefills(Protocol):
    """A fast way for the tokens of a prompt into the cache."""

    chunk: int

    def run(self, tokens: SequenceOf[int], position: int, table: np.ndarray) -> None:
        """Put keys and values of `tokens` at `position`, `position + 1` ... into the pages of
        `table`, int32 [2, pages]. All tokens before are in the cache.
        """


class Scheduler:
    """Runs sequences on one machine.

    Args:
        machine: loaded.
        kv: pages of the machine's pool.
        prefill: for prompts of which `prefill_from` tokens or more are missing; None: everything
            goes through the kernel.
        prefill_from: see there.

    Attributes:
        roster: who runs and who waits.
        counters: what happened so far.
    """

    def __init__(
        self,
        machine: Machine,
        kv: KvCache,
        *,
        prefill: Prefills | None = None,
        prefill_from: int = PREFILL_FROM,
    ) -> None:
        self.machine = machine
        self.kv = kv
        self.prefill, self.prefill_from = prefill, prefill_from
        self.roster = Roster(kv, machine.plan.rows)
        self.counters = self.roster.counters
        self._rows = Rows(machine, kv.width)
        self._launch: Launch | None = None
        self._untold: dict[Sequence, None] = {}  # whose tokens nobody has made text of
        self._n_taken = 0  # steps of the launch
        self._since = 0.0  # when its last tokens came, or it began
        self._soonest = inf  # no deadline is earlier
        self._stepping = False
        self._late: list[tuple[Sequence, str]] = []  # cancelled while a step was under way

    @property
    def busy(self) -> bool:
        """Is there anything left for `step` to do?"""
        return bool(self.roster.running or len(self.roster.waiting) or self._untold)

    def submit(self, sequence: Sequence) -> None:
        """Line up; it begins when a row and pages for its tokens are free.

        Raises:
            RequestError: it could not run even alone.
        """
        self.roster.join(sequence)
        self._soonest = min(self._soonest, _deadline(sequence))

    def cancel(self, sequence: Sequence, reason: str = "cancelled") -> None:
        """End a sequence, wherever it is. One that has ended is no longer there."""
        if self._stepping:
            # A forgotten stream that the garbage collector closes, of all times, inside a step.
            self._late.append((sequence, reason))
            return
        if sequence.kv is not None:
            with self._undisturbed():
                try:
                    self._end_launch()
                except MkrefError as error:  # the others hear of it, not who leaves
                    self._fail(error)
        if sequence.kv is not None or sequence in self.roster.waiting:
            sequence.end(reason)
            self.roster.leave(sequence)

    @contextmanager
    def _undisturbed(self) -> Iterator[None]:
        """Cancellations wait for the end of this."""
        self._stepping = True
        try:
            yield
        finally:
            self._stepping = False
            while self._late:
                self.cancel(*self._late.pop())

    def step(self) -> None:
        """Go on until there is something to tell: mostly, new tokens of everybody who generates.

        Those of the last step of a launch are told when the next launch has begun. So whatever the
        caller does with them, it does while the machine works.

        Raises:
            MachineError: the machine failed. Everybody who ran has ended with this error, and all
                their pages are free. Those who wait still do.
        """
        with self._undisturbed():
            try:
                if self._launch is None:
                    self._expire()
                    self.roster.admit()
                    self._take_in_chunk()
                    self._launch = self._begin()
                    self._publish()
                    if self._tell():
                        return
                elif self.roster.may_admit() or time.monotonic() >= self._soonest:
                    self._launch.cancel()
                if self._launch is not None:
                    self._take(self._launch)
            except BaseException as error:
                self._fail(error)
                raise

    def _expire(self) -> None:
        """End those whose time is over."""
        now = time.monotonic()
        if now < self._soonest:
            return
        self._soonest = inf
        for sequence in [*self.roster.waiting, *self.roster.running]:
            deadline = _deadline(sequence)
            if now >= deadline:
                sequence.end("deadline")
                self.roster.leave(sequence)
            else:
                self._soonest = min(self._soonest, deadline)

    def _fail(self, error: BaseException) -> None:
        """Everybody who runs ends with an error."""
        self.counters.failures += 1
        launch, self._launch = self._launch, None
        try:
            if launch is not None:
                launch.close()
        finally:
            for sequence in [*self.roster.running]:
                if sequence.over:  # it was done before
                    self.roster.leave(sequence)
                else:
                    self._drop(sequence, error)
            self._tell()
            self._rows.forget()
            self.kv.forget()  # whatever broke may have written there

    def _drop(self, sequence: Sequence, error: BaseException) -> None:
        """One sequence ends with an error."""
        sequence.error = error
        self.roster.leave(sequence)

    def _waits_for_chunk(self, sequence: Sequence) -> bool:
        return self.prefill is not None and sequence.n_ahead >= self.prefill_from

    def _take_in_chunk(self) -> None:
        """The next chunk of the eldest long prompt."""
        sequence = next(filter(self._waits_for_chunk, self.roster.running), None)
        if self.prefill is None or sequence is None:
            return
        n = self.roster.grant(sequence, min(self.prefill.chunk, sequence.n_ahead))
        if not n or sequence.kv is None:
            return
        begin, end = sequence.fed, sequence.fed + n
        try:
            self.prefill.run(sequence.tokens[begin:end], begin, sequence.kv.table)
        except Exception as error:  # nobody else's tokens were touched
            self._drop(sequence, error)
            return
        sequence.fed = end
        self.counters.chunks += 1
        self.counters.fed_tokens += n
        self.roster.publish(sequence)  # before its window moves on

    def _begin(self) -> Launch | None:
        """Start a launch; None if nobody needs one."""
        active = [s for s in self.roster.running if not self._waits_for_chunk(s)]
        counts = self._share_rows(active)
        n_steps = self._n_steps(active)
        for i, sequence in enumerate(active):
            if sequence.kv is None:  # an elder one has taken its pages
                continue
            wanted = max(counts[i], n_steps)
            granted = self.roster.grant(sequence, wanted)
            counts[i] = min(counts[i], granted)
            n_steps = min(n_steps, granted or n_steps)
        masks: dict[Sequence, np.ndarray] = {}
        self._rows.clear()
        for sequence, count in zip(active, counts, strict=True):
            if sequence.kv is None:
                continue
            try:
                mask = None
                if sequence.n_ahead < count:
                    mask = checked_mask(sequence, self.machine.plan.config.vocab_size)
            except RequestError as error:  # of a constraint: the fault of one is not that of all
                self._drop(sequence, error)
                continue
            if mask is not None:
                masks[sequence] = mask
            self._rows.place(sequence, count)
        if not self._rows.placed:
            return None
        self.counters.launches += 1
        self._n_taken, self._since = 0, time.monotonic()
        return self._rows.start(n_steps, masks)

    def _share_rows(self, active: list[Sequence]) -> list[int]:
        """Rows of each sequence: one, and then in turns for those with a long prompt."""
        counts = [1] * len(active)
        left = [sequence.n_ahead for sequence in active]
        free = self.roster.rows - len(counts)
        while free and any(left):
            for i, n in enumerate(left):
                if n and free:
                    counts[i], left[i], free = counts[i] + 1, n - 1, free - 1
        return counts

    def _n_steps(self, active: list[Sequence]) -> int:
        """Steps that need nothing from the host: until the first answer reaches its length.

        A launch also ends with the first answer that a token ends (`stop_after` is 1), whether or
        not somebody waits for the row: a row without a purpose makes every step read more experts,
        which costs more than starting again.
        """
        if any(s.n_ahead or s.request.return_logits or s.request.constraint for s in active):
            return 1
        most = BETWEEN_CHUNKS if len(active) < len(self.roster.running) else AHEAD
        return min([most, *(sequence.n_left for sequence in active)])

    def _publish(self) -> None:
        """Let others find what earlier launches completed, while the new one runs."""
        for placed in self._rows.placed:
            if placed.sequence.kv is not None:
                self.roster.publish(placed.sequence)

    def _tell(self) -> bool:
        """Make text of the tokens that were taken; was there any?"""
        untold, self._untold = self._untold, {}
        for sequence in untold:
            try:
                sequence.tell()
            except Exception as error:  # of a decoder: the fault of one is not that of all
                sequence.error = error
        return bool(untold)

    def _take(self, launch: Launch) -> None:
        """Wait for one step; the launch is over with it if somebody's answer is."""
        drawn = next(launch, None)
        if drawn is not None:
            self._accept(drawn.tolist(), launch.logprobs)
            self._n_taken += 1
        ended = any(p.sequence.over or p.sequence.error for p in self._rows.placed)
        if drawn is None or ended or self._n_taken == launch.n_steps:
            self._end_launch()
        else:
            self._tell()

    def _end_launch(self) -> None:
        """Cancel the launch, take what it has done until then, let those go who have ended."""
        launch = self._launch
        if launch is None:
            return
        launch.cancel()
        for drawn in launch:
            self._accept(drawn.tolist(), launch.logprobs)
        self._launch = None
        for sequence in [*self.roster.running]:
            if sequence.over or sequence.error:
                self.roster.leave(sequence)

    def _accept(self, drawn: list[int], logprobs: LogProbs | None) -> None:
        """Give the tokens of one step to their sequences; what comes after an end is dropped."""
        now = time.monotonic()
        seconds, self._since = now - self._since, now
        counters = self.counters
        counters.steps += 1
        logits: np.ndarray | None = None
        for placed in self._rows.placed:
            sequence, row = placed.sequence, placed.last
            if sequence.over or sequence.error:
                continue
            sequence.fed += placed.count
            counters.fed_tokens += placed.count
            if not placed.draws:
                continue
            if sequence.request.return_logits:
                if logits is None:
                    logits = self.machine.logits(self._rows.placed[-1].last + 1)
                sequence.logits.append(logits[row].copy())
            first = sequence.n_generated == 0
            (counters.ttft_s if first else counters.itl_s).add(now - sequence.last_at)
            sequence.last_at = now
            sequence.step_s.append(seconds)
            counters.completion_tokens += 1
            try:
                sequence.take(drawn[row], _logprob(sequence, drawn[row], row, logprobs))
            except Exception as error:  # of a constraint or a decoder: the fault of one
                sequence.error = error
            else:
                self._untold[sequence] = None


def _deadline(sequence: Sequence) -> float:
    deadline = sequence.request.deadline
    return inf if deadline is None else deadline


def _logprob(sequence: Sequence, token: int, row: int, logprobs: LogProbs | None) -> LogProb | None:
    """What the machine tells about the token of a row, if its sequence asked for it."""
    n = sequence.request.sampling.logprobs
    if n is None or logprobs is None:
        return None
    ids, values = logprobs.top_ids[row, :n].tolist(), logprobs.top[row, :n].tolist()
    return LogProb(token, float(logprobs.token[row]), tuple(zip(ids, values, strict=True)))
