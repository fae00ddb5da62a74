"""Who runs and who waits: admission, pages, preemption.

Somebody may begin when the pages for the tokens that it has so far are there, and one more, besides
what those who run already are about to take. Nothing is reserved for answers. So the pool may run
short later; then the youngest gives its pages up, goes back to its place in line, and computes its
tokens again when its turn comes. The eldest never gives way, so somebody always gets done, and as
each request only waits for those in front of it, everybody does.

Who begins like somebody whose prompt is just going in waits for that: then it takes the pages over
instead of computing them, too.

What it does not do: start a launch (`mkref.engine.scheduler`). Pages change between launches only.
"""

from __future__ import annotations

import time
from bisect import insort
from itertools import islice
from operator import attrgetter
from typing import TYPE_CHECKING

from mkref.engine.counters import Counters
from mkref.engine.kv import KINDS
from mkref.engine.queue import OVERTAKERS, Line
from mkref.errors import RequestError
from mkref.plan.build import PAGE

if TYPE_CHECKING:
    from mkref.engine.kv import KvCache
    from mkref.engine.request import Request
    from mkref.engine.sequence import Sequence

__all__ = ["Roster"]

LOOK_AHEAD = 8
"""How many who cannot begin are passed over in search of one who can."""


class Roster:
    """Sequences that wait and sequences that run.

    Args:
        kv: pages of the machine's pool.
        rows: how many may run.

    Attributes:
        running: in the order of the line.
        spare: pages that must be there for everybody, besides those for its tokens so far, when
            somebody begins. With fewer more run at a time, and more is computed twice.
    """

    spare = 1

    def __init__(self, kv: KvCache, rows: int) -> None:
        self.kv = kv
        self.rows = rows
        self.waiting = Line()
        self.running: list[Sequence] = []
        self.counters = Counters()
        self._changes = 0  # things that may let somebody begin who could not
        self._settled = -1  # the change at which nobody could
        self._refused: dict[Sequence, tuple[int, int, int]] = {}

    def check(self, request: Request) -> None:
        """Refuse what could not run even alone.

        Raises:
            RequestError: says how large the pool is.
        """
        if not self.kv.fits(request.n_tokens):
            needs = self.kv.needs(request.n_tokens)
            kind = next((k for k in (0, 1) if needs[k] > self.kv.budget[k]), 0)
            raise RequestError(
                f"max_tokens: {request.max_tokens} after a prompt of {len(request.prompt)} tokens "
                f"takes {needs[kind]} {KINDS[kind]} pages, the cache has {self.kv.budget[kind]}; "
                "ask for less or load the model with more kv_pages"
            )

    def join(self, sequence: Sequence) -> None:
        """Line up."""
        self.check(sequence.request)
        sequence.submitted_at = sequence.last_at = time.monotonic()
        self.waiting.join(sequence)
        self._changes += 1

    def may_admit(self) -> bool:
        """Is there reason to think that somebody could begin?"""
        return (
            len(self.waiting) > 0
            and len(self.running) < self.rows
            and self._settled != self._changes
        )

    def admit(self) -> None:
        """Let begin who can, in order."""
        if not len(self.waiting):
            return
        passed: list[Sequence] = []
        for sequence in [*islice(self.waiting, self.rows + LOOK_AHEAD)]:
            if len(self.running) == self.rows:
                return
            if self._begins(sequence):
                for each in passed:
                    each.overtaken += 1
            else:
                passed.append(sequence)
                if sequence.overtaken >= OVERTAKERS or len(passed) == LOOK_AHEAD:
                    break
        self._settled = self._changes

    def _begins(self, sequence: Sequence) -> bool:
        state = (self._changes, self.kv.available(0), self.kv.available(1))
        refused = self._refused.get(sequence, (-1, 0, 0))
        if refused[0] == state[0] and refused[1] >= state[1] and refused[2] >= state[2]:
            return False  # nothing is better than it was, and to look again takes time
        kv = sequence.kv = self.kv.open(sequence.tokens)
        if self.running and not (self._has_room(sequence) and self._has_to(sequence)):
            self.kv.close(kv)
            sequence.kv = None
            self._refused[sequence] = state
            return False
        self._refused.pop(sequence, None)
        self.waiting.leave(sequence)
        insort(self.running, sequence, key=attrgetter("order"))
        sequence.fed = kv.n_cached
        if not sequence.began:
            sequence.began = True
            sequence.n_cached = min(kv.n_cached, len(sequence.request.prompt))
            self.counters.prompt_tokens += len(sequence.request.prompt)
            self.counters.cached_tokens += sequence.n_cached
            self.counters.queue_s.add(time.monotonic() - sequence.submitted_at)
        return True

    def _has_to(self, sequence: Sequence) -> bool:
        """Must it compute its next page, because nobody else is just doing so?"""
        assert sequence.kv is not None
        end = sequence.kv.n_cached + PAGE
        if not self.kv.reuse or len(sequence.tokens) <= end:
            return True
        return not any(
            each.fed < end <= each.fed + each.n_ahead and each.tokens[:end] == sequence.tokens[:end]
            for each in self.running
        )

    def _has_room(self, newcomer: Sequence) -> bool:
        """Are there pages for what it has, and for what everybody is about to take?"""
        short = [0, 0]
        for sequence in (*self.running, newcomer):
            assert sequence.kv is not None
            soon = min(len(sequence.tokens) + self.spare * PAGE, sequence.request.n_tokens)
            for kind, need in enumerate(self.kv.needs(soon)):
                short[kind] += max(0, need - sequence.kv.held(kind))
        return all(short[kind] <= self.kv.available(kind) for kind in (0, 1))

    def grant(self, sequence: Sequence, count: int) -> int:
        """Make pages for as many of its next `count` tokens as there are, at least for one.

        The youngest gives its pages up if there are none.

        Returns:
            Tokens that it may feed; 0 if it was the youngest itself, and waits now.
        """
        assert sequence.kv is not None
        while True:
            n = count
            while n:
                if self.kv.advance(sequence.kv, sequence.fed, n):
                    return n
                n //= 2
            youngest = self.running[-1]
            self._preempt(youngest)
            if youngest is sequence:
                return 0

    def _preempt(self, sequence: Sequence) -> None:
        """Take the pages away; what is complete in them stays in the cache while there is room."""
        self.counters.preemptions += 1
        self.publish(sequence)
        self._release(sequence)
        sequence.fed = 0
        self.waiting.rejoin(sequence)

    def publish(self, sequence: Sequence) -> None:
        """Let others find the pages that are complete."""
        kv = sequence.kv
        assert kv is not None
        if self.kv.reuse and sequence.fed >= kv.n_published + PAGE:
            self.kv.publish(kv, sequence.tokens[: sequence.fed])
            if sequence.n_ahead > 0:
                self._changes += 1  # somebody may wait for this page

    def leave(self, sequence: Sequence) -> None:
        """An end, for whatever reason: of one that runs or waits."""
        if sequence.kv is None:
            self.waiting.leave(sequence)
            self._refused.pop(sequence, None)
        else:
            if sequence.error is None:  # else what its pages hold is in doubt
                self.publish(sequence)
            self._release(sequence)
            self._changes += 1
        self.counters.finished[sequence.over or "error"] += 1
        self.counters.e2e_s.add(time.monotonic() - sequence.submitted_at)

    def _release(self, sequence: Sequence) -> None:
        assert sequence.kv is not None
        self.running.remove(sequence)
        self.kv.close(sequence.kv)
        sequence.kv = None
