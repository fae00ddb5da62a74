"""What a paged KV cache and a batch went through: plain data, one moment per decode step.

A `Moment` says which pages every running request holds, which are kept as a cache, who fed which
token in which row of the step, and who waits. A `History` is all of them; it can be written down as
JSON, so a lesson shows a recorded session without an engine.

What it does not do: record (`mkref.widgets.kv.record`), or know what is in a page.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from mkref.errors import RequestError
from mkref.jsonfile import read_json, write_json

__all__ = ["FORMAT", "KINDS", "Held", "History", "Moment", "Use", "load_history", "save_history"]

FORMAT = "mkref-kv-history-1"
KINDS = ("full", "sliding")
"""Full layers keep every page of a request, sliding layers those that the window still reaches."""


@dataclass(frozen=True)
class Held:
    """A running request and its page tables.

    Attributes:
        name: of the request.
        tokens: tokens of it that are in the cache.
        prompt: tokens of its prompt.
        found: tokens that were in the cache already when it began.
        begin: per kind, the first entry of its table that holds a page; those before were given
            back, or never taken.
        pages: per kind, the pages from that entry on.
    """

    name: str
    tokens: int
    prompt: int
    found: int
    begin: tuple[int, int]
    pages: tuple[tuple[int, ...], tuple[int, ...]]


@dataclass(frozen=True)
class Use:
    """One row of a step: whose token it fed, at which position, of the prompt or of the answer."""

    name: str
    position: int
    is_prompt: bool


@dataclass(frozen=True)
class Moment:
    """One decode step.

    Attributes:
        rows: what each row of the step fed; empty for a moment between steps.
        running: requests that hold pages.
        waiting: requests that do not run yet, or not any more, in the order of the line.
        cached: per kind, pages that nobody uses now but that a later request may find.
    """

    rows: tuple[Use, ...]
    running: tuple[Held, ...]
    waiting: tuple[str, ...]
    cached: tuple[tuple[int, ...], tuple[int, ...]]

    def owners(self, kind: int) -> dict[int, list[str]]:
        """Pages that are used, and by whom."""
        found: dict[int, list[str]] = {}
        for held in self.running:
            for page in held.pages[kind]:
                found.setdefault(page, []).append(held.name)
        return found

    def of(self, name: str) -> Held | None:
        """A request's tables; None if it does not run."""
        return next((held for held in self.running if held.name == name), None)


@dataclass(frozen=True)
class History:
    """All moments of a session.

    Attributes:
        n_pages: pages of the pool, per kind.
        n_rows: rows that a step has room for.
        page_tokens: tokens of a page.
        window: tokens that a sliding layer sees.
        moments: one per step, at least one.
        provenance: where this comes from, as short texts.
    """

    n_pages: tuple[int, int]
    n_rows: int
    page_tokens: int
    window: int
    moments: tuple[Moment, ...]
    provenance: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not self.moments:
            raise RequestError("kv history: no moments; record at least one step")
        for at, moment in enumerate(self.moments):
            self._check(at, moment)

    def _check(self, at: int, moment: Moment) -> None:
        """Every page is used or cached or free, and exists; nobody is twice in a batch."""
        names = Counter([*(held.name for held in moment.running), *moment.waiting])
        twice = [name for name, n in names.items() if n > 1]
        if twice:
            raise RequestError(f"kv history: step {at}: request {twice[0]!r} is there twice")
        if len(moment.rows) > self.n_rows:
            raise RequestError(
                f"kv history: step {at}: {len(moment.rows)} rows, a step has {self.n_rows}"
            )
        for kind, name in enumerate(KINDS):
            used, cached = moment.owners(kind), moment.cached[kind]
            both = sorted(used.keys() & set(cached))
            strange = [p for p in (*used, *cached) if not 0 <= p < self.n_pages[kind]]
            if both or strange:
                raise RequestError(
                    f"kv history: step {at}: {name} pages {both} are used and cached, "
                    f"{strange} are not among {self.n_pages[kind]}"
                )

    @property
    def names(self) -> tuple[str, ...]:
        """All requests, short names first."""
        found: dict[str, None] = {}
        for moment in self.moments:
            found |= dict.fromkeys([*(held.name for held in moment.running), *moment.waiting])
        return tuple(sorted(found, key=lambda name: (len(name), name)))

    def to_dict(self) -> dict[str, Any]:
        """A JSON-ready form that `from_dict` turns back."""
        return {"format": FORMAT, **asdict(self)}

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> History:
        """Inverse of `to_dict`.

        Raises:
            RequestError: another format, or parts that do not fit each other.
        """
        if data.get("format") != FORMAT:
            raise RequestError(
                f"kv history: format {data.get('format')!r}; this version reads {FORMAT!r}"
            )
        try:
            return cls(
                n_pages=_two(data["n_pages"]),
                n_rows=data["n_rows"],
                page_tokens=data["page_tokens"],
                window=data["window"],
                moments=tuple(_moment(each) for each in data["moments"]),
                provenance=dict(data["provenance"]),
            )
        except (KeyError, TypeError, ValueError) as error:
            raise RequestError(f"kv history: the recording is damaged ({error!r})") from error


def _two(values: Sequence[Any]) -> tuple[Any, Any]:
    first, second = values
    return first, second


def _moment(data: dict[str, Any]) -> Moment:
    return Moment(
        rows=tuple(Use(**each) for each in data["rows"]),
        running=tuple(
            Held(
                **{name: each[name] for name in ("name", "tokens", "prompt", "found")},
                begin=_two(each["begin"]),
                pages=_two([tuple(pages) for pages in each["pages"]]),
            )
            for each in data["running"]
        ),
        waiting=tuple(data["waiting"]),
        cached=_two([tuple(pages) for pages in data["cached"]]),
    )


def save_history(history: History, path: str | Path) -> Path:
    """Write it; a name that ends in `.gz` is compressed. Equal histories give equal bytes."""
    return write_json(path, history.to_dict())


def load_history(path: str | Path) -> History:
    """Read what `save_history` wrote.

    Raises:
        RequestError: no such file, or not a history.
    """
    try:
        data = read_json(path)
    except (OSError, EOFError, ValueError) as error:
        raise RequestError(f"kv history: cannot read {path}: {error}") from error
    if not isinstance(data, dict):
        raise RequestError(f"kv history: {path} holds none")
    return History.from_dict(data)
