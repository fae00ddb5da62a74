"""Lesson 14: its exercises, the rows of a step, the pages of a launch, and shared pages let go.

Each is a part of the engine in small: `Scheduler._share_rows` with admission
(`mkref.lessons.lesson_14_rows`), `KvCache.advance`, `PagePool.release`. The second is also tried
beside the engine's own cache.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from random import Random
from typing import Any

from mkref.config import NORTH_MINI_CODE
from mkref.engine.kv import FULL, SLIDING, KvCache
from mkref.lessons.exercise import (
    EMPTY,
    Answer,
    Mistake,
    Property,
    PythonExercise,
    WrongAnswerError,
)
from mkref.lessons.lesson_14_rows import SHARE, next_rows
from mkref.lessons.lesson_14_trials import let_go_trials

__all__ = ["EXERCISES", "held_pages", "let_go", "next_rows"]

ROWS = 8
PAGE = 64


def held_pages(position: int, count: int, window: int, page: int) -> tuple[int, int]:
    """Which pages of a sequence a layer must hold during a launch: (first, behind the last).

    The launch feeds the tokens at `position`, `position + 1` ..., `count` of them, one after
    another. Page number p of the sequence has the tokens from p * `page` on. A token sees the
    last `window` tokens, itself included; window 0 means all of them, as in a full layer.
    """
    # BEGIN SOLUTION
    first_seen = max(0, position - window + 1) if window else 0  # by the first token of the launch
    last = position + count - 1
    return first_seen // page, last // page + 1
    # END SOLUTION


def let_go(
    pages: Sequence[int], refs: list[int], published: set[int]
) -> tuple[list[int], list[int]]:
    """A sequence ends and lets its pages go. Returns two lists, (free, cached).

    `pages` are those of its table, the beginning of the text first. `refs[p]` says in how many
    tables page p is, this one included; bring it up to date. `published` has the pages that the
    prefix index knows. `free` are pages that hold nothing any more. `cached` are pages that
    nobody uses and that may be found again, in the order in which they are to be given up.
    """
    # BEGIN SOLUTION
    free: list[int] = []
    cached: list[int] = []
    for page in reversed(pages):  # the end of a prefix is of no use without its beginning
        refs[page] -= 1
        if refs[page] == 0:
            (cached if page in published else free).append(page)
    return free, cached
    # END SOLUTION


# ---- 14.2


def _pages(answer: Answer, case: tuple[int, int, int, int]) -> tuple[int, int]:
    given = answer(*case)
    if given is None:
        raise WrongAnswerError(f"it returns None, {EMPTY}")
    if not isinstance(given, list | tuple) or len(given) != 2:
        raise WrongAnswerError(f"it returns {given!r:.60}, and not two numbers")
    return given[0], given[1]


def _told(case: tuple[int, int, int, int], right: tuple[int, int], given: Any, by: str) -> None:
    if given != right:
        position, count, window, _ = case
        sees = f"window {window}" if window else "all tokens"
        what = "1 token" if count == 1 else f"{count} tokens"
        tokens = f"{what} from position {position}, {sees}"
        raise WrongAnswerError(f"{tokens}: {by} {right}, it returns {given}")


def _cases(*cases: tuple[int, int, int, int]) -> Callable[[Answer], None]:
    def trial(answer: Answer) -> None:
        for case in cases:
            _told(case, held_pages(*case), _pages(answer, case), "must be")

    return trial


def _engine(answer: Answer) -> None:
    """A sequence that grows in launches of many lengths, in the engine's cache."""
    random, kv = Random(2), KvCache(NORTH_MINI_CODE, 160, 80, 10_000)
    sequence, position = kv.open([1]), 0
    while position < 9_000:
        count = random.choice([1, 7, 8, 32])
        assert kv.advance(sequence, position, count)
        for kind, window in ((FULL, 0), (SLIDING, kv.window)):
            case = (position, count, window, PAGE)
            right = sequence.begin[kind], sequence.end[kind]
            _told(case, right, _pages(answer, case), "the engine holds")
        position += count
    kv.close(sequence)


_HELD = PythonExercise(
    id="14.2",
    solution=held_pages,
    properties=(
        Property("a full layer keeps all pages", _cases((0, 1, 0, 64), (500, 1, 0, 64))),
        Property("a sequence shorter than the window", _cases((90, 1, 256, 64), (255, 1, 256, 64))),
        Property(
            "the window leaves a page",
            _cases((318, 1, 256, 64), (319, 1, 256, 64), (320, 1, 256, 64), (2_000, 1, 96, 16)),
        ),
        Property("a launch of many steps", _cases((300, 32, 256, 64), (60, 8, 64, 64))),
        Property("a full layer in a launch of many steps", _cases((120, 32, 0, 64))),
        Property("the engine's cache, 9,000 tokens", _engine),
    ),
    mistakes=(
        Mistake(
            lambda p, n, w, s: (max(0, p + n - w) // s if w else 0, (p + n - 1) // s + 1),
            "the last token of the launch no longer sees the first page, but the first token does, "
            "and pages change between launches only.",
        ),
        Mistake(
            lambda p, n, w, s: (max(0, p - w) // s if w else 0, (p + n - 1) // s + 1),
            "a window of w tokens includes the token itself, so it begins at position - w + 1.",
        ),
        Mistake(
            lambda p, n, w, s: (max(0, p - w) // s if w else 0, (p + n) // s + 1),
            "off by one at both ends. With window 1 a token sees only itself, and of 1 token from "
            "position 5 on the last is token 5. What do your two numbers say then?",
        ),
        Mistake(
            lambda p, n, w, s: (max(0, p - w + 1) // s if w else 0, (p + n) // s + 1),
            "position + count is the first token *behind* the launch. At the end of a page that "
            "takes a page too many.",
        ),
        Mistake(
            lambda p, n, w, s: (max(0, p - w + 1) // s if w else 0, p // s + 1),
            "the kernel does not come back to ask for a page: those of all `count` tokens must be "
            "there before the launch begins.",
        ),
        Mistake(
            lambda p, n, w, s: (-(-max(0, p - w + 1) // s) if w else 0, (p + n - 1) // s + 1),
            "rounded up, a page is given back of which the window still sees a part.",
        ),
        Mistake(
            lambda p, n, w, s: ((p - w + 1) // s if w else 0, (p + n - 1) // s + 1),
            "near its beginning a sequence is shorter than the window. Nothing lies before "
            "position 0, and no page has a negative number.",
        ),
        Mistake(
            lambda p, n, w, s: (max(0, p - w + 1) // s, (p + n - 1) // s + 1),
            "window 0 means all tokens: a full layer gives nothing back.",
        ),
        Mistake(
            lambda p, n, w, s: (max(0, p - w + 1) // s if w else 0, (p + n - 1) // s),
            "the second number lies behind the last page, as in `range`.",
        ),
    ),
    then="Now: who pays for it that a launch of 32 steps cannot give pages back on its way?",
)


def _used_as_cached(
    pages: Sequence[int], refs: list[int], published: set[int]
) -> tuple[list[int], list[int]]:
    free, _ = let_go(pages, refs, published)
    return free, [page for page in reversed(pages) if page in published]


def _uncounted(kept: Callable[[int, bool], bool]) -> Answer:
    """Right lists; the count of a page stays if `kept` of (count, is it published?)."""

    def answer(
        pages: Sequence[int], refs: list[int], published: set[int]
    ) -> tuple[list[int], list[int]]:
        before = [*refs]
        found = let_go(pages, refs, published)
        for page in pages:
            if kept(before[page], page in published):
                refs[page] = before[page]
        return found

    return answer


def _emptied(everything: bool) -> Answer:
    """The index loses pages on the way."""

    def answer(
        pages: Sequence[int], refs: list[int], published: set[int]
    ) -> tuple[list[int], list[int]]:
        free, cached = let_go(pages, refs, published)
        published.difference_update([*published] if everything else cached)
        return free, cached

    return answer


_LET_GO = PythonExercise(
    id="14.3",
    solution=let_go,
    properties=let_go_trials(let_go),
    mistakes=(
        Mistake(
            lambda pages, refs, published: (
                [p for p in reversed(pages) if p not in published],
                [p for p in reversed(pages) if p in published],
            ),
            "`refs` is not looked at, so a page goes while another sequence still reads it. "
            "Nothing is as hard to find as that: the other answers nonsense, much later.",
        ),
        Mistake(
            lambda pages, refs, published: let_go(pages, [*refs], published),
            "the lists are right, and `refs` is as it was. It belongs to the pool and not to your "
            "function: count down in the list itself.",
        ),
        Mistake(
            _used_as_cached,
            "a page that others still use is in `cached`, so it may be given up while they read "
            "it. Only pages without a user go into either list.",
        ),
        Mistake(
            lambda pages, refs, published: (let_go(pages, refs, set())[0], []),
            "every page becomes free, so nobody will find a prefix again. What does `published` "
            "say?",
        ),
        Mistake(
            lambda pages, refs, published: let_go([*reversed(pages)], refs, published),
            "the beginning of the text is given up first, and what is behind it can be found no "
            "more: a prefix is looked up from its first page on.",
        ),
        Mistake(
            lambda pages, refs, published: let_go(pages, refs, {*range(len(refs))}),
            "a page that the index does not know cannot be found by anybody. As a cache it would "
            "only take up room.",
        ),
        Mistake(
            lambda pages, refs, published: let_go(
                [p for p in pages if refs[p] == 1], refs, published
            ),
            "a shared page has one user less now. If its count stays, it is never free again.",
        ),
        Mistake(
            lambda pages, refs, published: let_go(pages, refs, published)[::-1],
            "the two lists have changed places: free pages are the first, cached ones the second.",
        ),
        Mistake(
            _uncounted(lambda count, known: count == 1 and known),
            "a cached page has no user, so its count is 0. Who finds it again adds one.",
        ),
        Mistake(
            _uncounted(lambda count, known: known),
            "published pages keep their counts. Being known to the index is no use: this sequence "
            "has let go of them like of all others.",
        ),
        Mistake(
            _uncounted(lambda count, known: count == 1),
            "the last user counts, too: a count of 1 becomes 0 before anybody asks where the page "
            "goes.",
        ),
        Mistake(
            _emptied(everything=True),
            "`published` is emptied, so no cache of anybody is found again. It belongs to the "
            "index: only read it.",
        ),
        Mistake(
            _emptied(everything=False),
            "the index forgets what has just become a cache, so nobody can find it. A page leaves "
            "`published` when it is given up, and not before.",
        ),
    ),
    then="Now: what must `open` do with a page that it finds among the cached ones?",
)

EXERCISES = (SHARE, _HELD, _LET_GO)
