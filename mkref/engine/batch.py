"""Continuous batching: up to eight sequences share every step, each at its own position.

One step feeds one token of every running sequence: a prompt token while there are any, then the
token that was generated last. A sequence that ends gives its row to the next one that waits, before
the next step. A row's numbers do not depend on its neighbours or on its place, so neither does any
answer.

What it does not do: check requests (`mkref.engine.request`), preempt, or prefer anybody: who comes
first is served first.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence as SequenceOf
from statistics import median
from typing import TYPE_CHECKING, Protocol, runtime_checkable

import numpy as np

from mkref.engine.request import Completion, Request, Token
from mkref.engine.text import Detokenizer, StopFilter
from mkref.machine.base import Machine, StepInputs
from mkref.plan.build import ROWS

if TYPE_CHECKING:
    from mkref.engine.kv import KvPages, KvSequence
    from mkref.engine.tokenizer import Tokenizer

__all__ = ["Batch", "Prefills", "Sequence"]


@runtime_checkable
class Prefills(Protocol):
    """A machine that can take the first tokens of a sequence all at once."""

    def prefill(self, tokens: SequenceOf[int], page_table: np.ndarray) -> None:
        """Put tokens of positions 0, 1, ... into the cache; `page_table` int32 [2, pages]."""


class Sequence:
    """A request on its way.

    Attributes:
        request: what was asked.
        generated: token ids so far.
        events: tokens that nobody has fetched yet.
        finish_reason: why it ended; None while it runs or waits.
        error: what ended it before it was done.
    """

    def __init__(self, request: Request, tokenizer: Tokenizer | None) -> None:
        self.request = request
        self.generated: list[int] = []
        self.events: deque[Token] = deque()
        self.finish_reason: str | None = None
        self.error: BaseException | None = None
        self.kv: KvSequence | None = None
        self.fed = 0  # tokens that are in the cache
        self.step_s: list[float] = []
        self.logits: list[np.ndarray] = []
        self._detokenizer = None if tokenizer is None else Detokenizer(tokenizer)
        self._filter = StopFilter(request.stop_texts)
        self._text: list[str] = []

    @property
    def next_token(self) -> int:
        """The token to feed."""
        prompt = self.request.prompt
        return prompt[self.fed] if self.fed < len(prompt) else self.generated[-1]

    @property
    def generates(self) -> bool:
        """Does the next step give a new token, and not only take in the prompt?"""
        return self.fed >= len(self.request.prompt) - 1

    def accept(self, token: int) -> None:
        """Take the token that a step drew, and end if it is the last."""
        self.generated.append(token)
        text = "" if self._detokenizer is None else self._filter.push(self._detokenizer.push(token))
        reason = self._ends(token)
        if reason and self._detokenizer is not None:
            text += self._filter.push(self._detokenizer.finish()) + self._filter.finish()
            # A stop string may have been completed only now.
            reason = "stop" if self._filter.stopped else reason
        self._text.append(text)
        self.finish_reason = reason
        self.events.append(Token(token, text, reason))

    def _ends(self, token: int) -> str | None:
        if token in self.request.eos_ids:
            return "eos"
        if token in self.request.stop_ids or self._filter.stopped:
            return "stop"
        return "length" if len(self.generated) == self.request.max_tokens else None

    def completion(self, machine: str) -> Completion:
        """The result of a sequence that has ended."""
        return Completion(
            token_ids=tuple(self.generated),
            text="".join(self._text),
            prompt_token_ids=self.request.prompt,
            finish_reason=self.finish_reason or "",
            machine=machine,
            ms_per_token=1e3 * median(self.step_s),
            logits=np.stack(self.logits) if self.logits else None,
        )


class Batch:
    """Sequences that wait and sequences that run on one machine.

    Args:
        machine: loaded.
        kv: pages of the machine's pool.
    """

    def __init__(self, machine: Machine, kv: KvPages) -> None:
        self.machine = machine
        self.kv = kv
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []  # row by row
        self._stepping = False
        self._late: list[Sequence] = []  # cancelled while a step was under way
        self._tokens = np.zeros(ROWS, np.int32)
        self._positions = np.zeros(ROWS, np.int32)
        self._temperatures = np.zeros(ROWS, np.float32)
        self._seeds = np.zeros(ROWS, np.uint64)
        self._table = np.full((2, ROWS, kv.width), -1, np.int32)

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
            self._leave(self.running.index(sequence))

    def step(self) -> None:
        """One step for everybody who runs.

        Raises:
            MachineError: the machine failed. Everybody who ran has ended with this error, and all
                pages are free.
        """
        self._stepping = True
        try:
            self._admit()
            self._run()
        except BaseException as error:
            for sequence in self.running:
                sequence.error = error
            while self.running:
                self._leave(0)
            raise
        finally:
            self._stepping = False
            while self._late:
                self.cancel(self._late.pop())

    def _admit(self) -> None:
        while self.waiting and len(self.running) < ROWS:
            sequence = self.waiting[0]
            kv = self.kv.open(sequence.request.n_tokens)
            if kv is None:
                return
            self.waiting.popleft()
            sequence.kv = kv
            self.running.append(sequence)
            if isinstance(self.machine, Prefills) and len(sequence.request.prompt) > 1:
                head = sequence.request.prompt[:-1]
                self.kv.advance(kv, len(head) - 1)
                self.machine.prefill(head, kv.table)
                sequence.fed = len(head)
            self._place(len(self.running) - 1)

    def _place(self, row: int) -> None:
        """Write what does not change from step to step into a row."""
        sequence = self.running[row]
        self._seeds[row] = sequence.request.seed
        if sequence.kv is not None:
            self._table[:, row] = sequence.kv.table

    def _leave(self, row: int) -> None:
        """Free a row and its pages; the last row moves into the gap."""
        sequence = self.running[row]
        last = self.running.pop()
        if last is not sequence:
            self.running[row] = last
            self._place(row)
        if sequence.kv is not None:
            self.kv.close(sequence.kv)
            sequence.kv = None

    def _run(self) -> None:
        n = len(self.running)
        for row, sequence in enumerate(self.running):
            assert sequence.kv is not None
            self._tokens[row] = sequence.next_token
            self._positions[row] = sequence.fed
            self._temperatures[row] = sequence.request.temperature if sequence.generates else 0
            if self.kv.advance(sequence.kv, sequence.fed):
                self._table[:, row] = sequence.kv.table
        inputs = StepInputs(
            self._tokens[:n],
            self._positions[:n],
            self._table[:, :n],
            self._temperatures[:n],
            self._seeds[:n],
        )
        begin = time.perf_counter()
        drawn = self.machine.step(inputs).tolist()
        seconds = time.perf_counter() - begin
        wanted = any(s.generates and s.request.return_logits for s in self.running)
        logits = self.machine.logits(n) if wanted else None
        for row, sequence in enumerate(self.running):
            if sequence.generates:
                sequence.step_s.append(seconds)
                if sequence.request.return_logits and logits is not None:
                    sequence.logits.append(logits[row].copy())
                sequence.accept(drawn[row])
            sequence.fed += 1
        for row in reversed(range(n)):
            if self.running[row].finish_reason:
                self._leave(row)
