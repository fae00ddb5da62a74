"""Requests run to their ends by whoever asks, in turns with all others of the same engine.

What it does not do: check requests, or run in a thread of its own (`mkref.serve.service`).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Protocol

from mkref.engine.sequence import Sequence
from mkref.errors import MachineError, RequestError

if TYPE_CHECKING:
    from mkref.engine.request import Completion, Request, Token
    from mkref.engine.scheduler import Scheduler
    from mkref.engine.tokenizer import Tokenizer
    from mkref.machine.base import Machine

__all__ = ["Runs", "complete", "events"]


class Runs(Protocol):
    """What is needed of an engine; see `mkref.engine.engine.Engine`."""

    machine: Machine
    scheduler: Scheduler
    tokenizer: Tokenizer | None

    def check_open(self) -> None:
        """Refuse work that cannot be done."""


def events(engine: Runs, request: Request) -> Iterator[Token]:
    """Tokens of one request as they come; leaving the loop early ends it."""
    sequence = Sequence(request, engine.tokenizer)
    engine.scheduler.submit(sequence)
    try:
        while True:
            _advance(engine, sequence)
            token = sequence.events.popleft()
            yield token
            if token.finish_reason:
                return
    finally:
        engine.scheduler.cancel(sequence)


def complete(engine: Runs, requests: list[Request]) -> list[Completion]:
    """Answers of several requests; nothing runs unless all are in order."""
    for request in requests:
        engine.scheduler.roster.check(request)
    sequences = [Sequence(request, engine.tokenizer) for request in requests]
    for sequence in sequences:
        engine.scheduler.submit(sequence)
    try:
        for sequence in sequences:
            while not sequence.finish_reason:
                sequence.events.clear()
                _advance(engine, sequence)
    finally:
        for sequence in sequences:
            engine.scheduler.cancel(sequence)
    return [sequence.completion(engine.machine.name) for sequence in sequences]


def _advance(engine: Runs, sequence: Sequence) -> None:
    """Run steps until the sequence has a token to give."""
    engine.check_open()
    while not sequence.events:
        error = sequence.error
        if isinstance(error, RequestError):  # its own fault, of its constraint for instance
            raise error
        if error is not None:
            raise MachineError(
                f"a step that this request shared with others failed: "
                f"{error or type(error).__name__}"
            ) from error
        engine.scheduler.step()
