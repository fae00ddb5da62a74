"""How exercise 14.3 is tried: single endings, and a small pool of pages in random sessions.

What it does not do: have exercises (`mkref.lessons.lesson_14`).
"""

from __future__ import annotations

from collections.abc import Callable
from random import Random
from typing import Any

from mkref.lessons.exercise import EMPTY, Answer, Property, WrongAnswerError

__all__ = ["let_go_trials"]

N_PAGES = 16


def _called(answer: Answer, pages: list[int], refs: list[int], published: set[int]) -> Any:
    """Both lists, of page numbers each."""
    index = {*published}
    given = answer([*pages], refs, index)
    if given is None:
        raise WrongAnswerError(f"it returns None, {EMPTY}")
    good = isinstance(given, list | tuple) and len(given) == 2
    if not good or not all(isinstance(part, list | tuple) for part in given):
        raise WrongAnswerError(f"it returns {given!r:.60}, and not two lists")
    if index != published:
        raise WrongAnswerError(f"`published` was {sorted(published)}, and is {sorted(index)} now")
    return [*given[0]], [*given[1]]


def let_go_trials(solution: Answer) -> tuple[Property, ...]:
    """The properties; single endings are compared with what the solution makes of them."""

    def ends(pages: list[int], refs: list[int], published: set[int]) -> Callable[[Answer], None]:
        def trial(answer: Answer) -> None:
            mine, theirs = [*refs], [*refs]
            free, cached = solution(pages, mine, published)
            given_free, given_cached = _called(answer, pages, theirs, published)
            where = f"pages {pages}, refs {refs}, published {sorted(published)}"
            if sorted(given_free) != sorted(free):
                raise WrongAnswerError(f"{where}: free are {sorted(free)}, not {given_free}")
            if given_cached != cached:
                raise WrongAnswerError(f"{where}: cached are {cached}, not {given_cached}")
            if theirs != mine:
                raise WrongAnswerError(f"{where}: refs must be {mine} now, and are {theirs}")

        return trial

    return (
        Property("pages of one's own, not published", ends([2, 0], [1, 0, 1], set())),
        Property("a published page stays as a cache", ends([1, 2], [0, 1, 1], {1})),
        Property("the end of a prefix is given up first", ends([3, 0, 2], [1, 0, 1, 1], {0, 2, 3})),
        Property("a shared page stays in use", ends([0, 1], [3, 1], {0})),
        Property("all pages are shared", ends([1, 0], [2, 2], {0, 1})),
        Property("the index is left as it is", ends([2, 1], [0, 1, 1], {0, 1, 2})),
        Property("random sessions: no page is lost, none has two lives", _sessions),
    )


class _Pool:
    """Pages of one kind, an index over them, and sequences that open and close."""

    def __init__(self) -> None:
        self.free = [*range(N_PAGES)]
        self.cached: list[int] = []
        self.refs = [0] * N_PAGES
        self.index: dict[tuple[int, ...], int] = {}  # all keys from the first page on -> page
        self.tables: list[list[int]] = []

    def open(self, keys: list[int]) -> None:
        """A sequence with these pages; all but the last are complete, and published."""
        table: list[int] = []
        for n in range(1, len(keys)):
            page = self.index.get(tuple(keys[:n]))
            if page is None:
                break
            if page in self.cached:
                self.cached.remove(page)
            self.refs[page] += 1
            table.append(page)
        for n in range(len(table) + 1, len(keys) + 1):
            page = self._take()
            table.append(page)
            if n < len(keys):
                self.index[tuple(keys[:n])] = page
        self.tables.append(table)

    def _take(self) -> int:
        if not self.free:
            page = self.cached.pop(0)
            self.index = {key: p for key, p in self.index.items() if p != page}
            self.free.append(page)
        page = self.free.pop()
        self.refs[page] = 1
        return page

    def close(self, number: int, answer: Answer) -> None:
        """End a sequence as the answer has it."""
        table = self.tables.pop(number)
        free, cached = _called(answer, table, self.refs, {*self.index.values()})
        self.free += free
        self.cached += cached

    def check(self) -> None:
        """Every page is in one state, counted right, and can be found if it is kept."""
        used = [page for table in self.tables for page in table]
        for page in range(N_PAGES):
            states = (page in self.free, page in self.cached, page in used)
            if sum(states) != 1:
                names = [
                    n
                    for n, is_so in zip(("free", "cached", "in use"), states, strict=True)
                    if is_so
                ]
                raise WrongAnswerError(f"page {page} is {' and '.join(names) or 'lost'}")
            if self.refs[page] != used.count(page):
                raise WrongAnswerError(
                    f"page {page} is in {used.count(page)} tables, and refs says {self.refs[page]}"
                )
        for key in self.index:
            if len(key) > 1 and key[:-1] not in self.index:
                raise WrongAnswerError("a cached page is left whose beginning has been given up")


def _sessions(answer: Answer) -> None:
    random, pool = Random(3), _Pool()
    for _ in range(400):
        keys = [random.randrange(2) for _ in range(random.randint(1, 4))]
        if len(pool.free) + len(pool.cached) >= 5 and random.random() < 0.6:
            pool.open(keys)
        elif pool.tables:
            pool.close(random.randrange(len(pool.tables)), answer)
        pool.check()
    while pool.tables:
        pool.close(0, answer)
        pool.check()
