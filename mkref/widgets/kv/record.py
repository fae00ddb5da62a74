"""Record what the KV cache and the batch of a running engine go through.

    with KvRecorder(engine) as recorder:
        engine.generate_batch(prompts, max_tokens=40)
    history = recorder.history()

It looks at the scheduler after every decode step that this has taken in, while the rows of the step
are still known; nothing is computed twice, and the engine does the same as without it.

What it does not do: see inside of a launch. A launch of many steps gets its pages before it begins,
so all of them appear with its first step.
"""

from __future__ import annotations

from string import ascii_uppercase
from types import TracebackType
from typing import TYPE_CHECKING, Any

from mkref.errors import RequestError
from mkref.plan.build import PAGE
from mkref.widgets.kv.history import KINDS, Held, History, Moment, Use

if TYPE_CHECKING:
    from collections.abc import Mapping

    from mkref.engine import Engine
    from mkref.engine.sequence import Sequence

__all__ = ["KvRecorder", "letters"]

NAME = "_accept"
"""The method of the scheduler that takes in a step's tokens; it still knows the rows then."""


def letters(number: int) -> str:
    """A name: A to Z, then AA, AB ...

    >>> letters(0), letters(25), letters(26), letters(53)
    ('A', 'Z', 'AA', 'BB')
    """
    n = len(ascii_uppercase)
    first = letters(number // n - 1) if number >= n else ""
    return first + ascii_uppercase[number % n]


class KvRecorder:
    """Collects moments of an engine while it is entered; `history` gives them.

    Args:
        engine: loaded; whoever runs it may be in this thread only.
        provenance: where this comes from, as short texts; the machine is added.
        most: steps that are kept; later ones are passed over.
    """

    def __init__(
        self, engine: Engine, provenance: Mapping[str, str] | None = None, *, most: int = 4096
    ) -> None:
        self._kv, self._scheduler = engine.kv, engine.scheduler
        self._rows = engine.plan.rows
        self._most = most
        self._provenance = {"machine": engine.machine.name, **(provenance or {})}
        self._names: dict[Sequence, str] = {}
        self._moments: list[Moment] = []

    def __enter__(self) -> KvRecorder:
        accept = getattr(self._scheduler, NAME)

        def accept_and_look(*values: Any) -> None:
            self._name_all()
            # Positions are those before the step, who generates is known before it as well.
            rows = self._uses()
            accept(*values)
            self._look(rows)

        setattr(self._scheduler, NAME, accept_and_look)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        delattr(self._scheduler, NAME)  # the class has its own
        self._look(())  # what is left when all is over

    def history(self) -> History:
        """All moments so far.

        Raises:
            RequestError: there is none.
        """
        if not self._moments:
            raise RequestError(
                "kv recorder: nothing was recorded; run requests while it is entered"
            )
        return History(
            n_pages=self._kv.budget,
            n_rows=self._rows,
            page_tokens=PAGE,
            window=self._kv.window,
            moments=tuple(self._moments),
            provenance=self._provenance,
        )

    def _name(self, sequence: Sequence) -> str:
        return self._names.setdefault(sequence, letters(len(self._names)))

    def _name_all(self) -> None:
        """In the order of the line, so that names do not depend on who is looked at first."""
        roster = self._scheduler.roster
        for sequence in sorted([*roster.running, *roster.waiting], key=lambda s: s.order):
            self._name(sequence)

    def _uses(self) -> tuple[Use, ...]:
        """The rows of the step that is being taken in."""
        uses = []
        for placed in self._scheduler._rows.placed:
            sequence = placed.sequence
            if sequence.finish_reason or sequence.error:
                continue
            for at in range(sequence.fed, sequence.fed + placed.count):
                uses.append(Use(self._name(sequence), at, at < len(sequence.request.prompt)))
        return tuple(uses)

    def _look(self, rows: tuple[Use, ...]) -> None:
        if len(self._moments) == self._most:
            return
        self._name_all()
        roster = self._scheduler.roster
        running = tuple(self._held(s) for s in roster.running if s.kv is not None)
        waiting = tuple(self._name(sequence) for sequence in roster.waiting)
        cached = tuple(tuple(sorted((*pool.cached, *pool.passed))) for pool in self._kv.pools)
        self._moments.append(Moment(rows, running, waiting, (cached[0], cached[1])))

    def _held(self, sequence: Sequence) -> Held:
        kv = sequence.kv
        assert kv is not None
        pages = [
            tuple(kv.table[kind, kv.begin[kind] : kv.end[kind]].tolist())
            for kind in range(len(KINDS))
        ]
        return Held(
            name=self._name(sequence),
            tokens=sequence.fed,
            prompt=len(sequence.request.prompt),
            found=sequence.n_cached,
            begin=(kv.begin[0], kv.begin[1]),
            pages=(pages[0], pages[1]),
        )
