"""What happened between two moments: who began or ended, which pages changed hands.

What it does not do: know why; it compares two moments.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from mkref.widgets.kv.history import KINDS

if TYPE_CHECKING:
    from mkref.widgets.kv.history import Moment

__all__ = ["Changes", "changes", "describe_changes", "plural"]

Pages = tuple[frozenset[int], frozenset[int]]


@dataclass(frozen=True)
class Changes:
    """Differences between a moment and the one before.

    Attributes:
        taken: per kind, pages that are used now and were not.
        given: per kind, pages that were used and are not any more.
        evicted: per kind, pages that were cached and hold something else or nothing now.
        said: each difference in words.
    """

    taken: Pages
    given: Pages
    evicted: Pages
    said: tuple[str, ...]


def plural(n: int, what: str) -> str:
    """A number of things.

    >>> plural(1, "page"), plural(3, "sliding page")
    ('1 page', '3 sliding pages')
    """
    return f"{n} {what}{'' if n == 1 else 's'}"


def changes(before: Moment | None, now: Moment, page_tokens: int) -> Changes:
    """Compare.

    Args:
        before: None at the start, where nothing has happened yet.
        now: the moment after it.
        page_tokens: tokens of a page.
    """
    if before is None:
        nothing: Pages = (frozenset(), frozenset())
        return Changes(nothing, nothing, nothing, ())
    taken, given, evicted = [], [], []
    for kind in range(len(KINDS)):
        old, new = set(before.owners(kind)), set(now.owners(kind))
        taken.append(frozenset(new - old))
        given.append(frozenset(old - new))
        gone = set(before.cached[kind]) - set(now.cached[kind])
        evicted.append(frozenset(gone - _found(before, now, kind, page_tokens)))
    said = _said(before, now)
    said += [
        f"{plural(len(pages), f'cached {name} page')} {'is' if len(pages) == 1 else 'are'} given up"
        for name, pages in zip(KINDS, evicted, strict=True)
        if pages
    ]
    return Changes(
        (taken[0], taken[1]), (given[0], given[1]), (evicted[0], evicted[1]), tuple(said)
    )


def _found(before: Moment, now: Moment, kind: int, page_tokens: int) -> set[int]:
    """Pages that those who have just begun found in the cache."""
    return {
        page
        for held in now.running
        if before.of(held.name) is None
        for page in held.pages[kind][: held.found // page_tokens - held.begin[kind]]
    }


def _said(before: Moment, now: Moment) -> list[str]:
    said = []
    for held in now.running:
        old = before.of(held.name)
        if old is None:
            found = f", finds {held.found} tokens in the cache" if held.found else ""
            said.append(f"{held.name} begins{found}")
            continue
        for kind, name in enumerate(KINDS):
            new = len(set(held.pages[kind]) - set(old.pages[kind]))
            let_go = len(set(old.pages[kind]) - set(held.pages[kind]))
            if new:
                said.append(f"{held.name} takes {plural(new, f'{name} page')}")
            if let_go:
                said.append(f"{held.name} gives {plural(let_go, f'{name} page')} back")
    for held in before.running:
        if now.of(held.name) is None:
            again = held.name in now.waiting
            said.append(
                f"{held.name} loses its pages and waits" if again else f"{held.name} has ended"
            )
    known = {*before.waiting, *(held.name for held in before.running)}
    said += [f"{name} lines up" for name in now.waiting if name not in known]
    return said


def describe_changes(found: Changes) -> str:
    """One sentence; "" if nothing happened."""
    return f"Since the step before: {'; '.join(found.said)}." if found.said else ""
