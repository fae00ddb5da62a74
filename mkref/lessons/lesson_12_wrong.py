"""Lesson 12: runs of the lists of exercise 12.1 in which one thing is wrong."""

from __future__ import annotations

from collections.abc import Callable, Sequence

__all__ = ["Lists", "own_only", "popping", "walk"]

Lists = Sequence[Sequence[tuple[str | None, str | None]]]
Found = list[list[tuple[int, ...]]]


def walk(
    lists: Lists,
    *,
    deep: bool = True,
    joins: bool = True,
    keeps: bool = True,
    merge: Callable[[int, int], int] = max,
    learns: bool = True,
    stores_first: bool = False,
    counts: bool = True,
    counts_itself: bool = True,
    copies: bool = True,
    all_seen: bool = False,
    full: str = "all",
    skips: bool = False,
    rounds: int | None = None,
    until_done: bool = False,
) -> Found:
    """The solution, with one thing wrong.

    Args:
        lists: as of the exercise.
        deep: a counter tells also what its signallers knew of others.
        joins: a counter keeps what earlier arrivals told.
        keeps: an SM keeps what it knew before it learns.
        merge: what learning and telling make of two numbers.
        learns: from the counter that was waited for.
        stores_first: the clock, before it learns.
        counts: an SM its own tasks.
        counts_itself: the signaller, before it tells.
        copies: what it tells.
        all_seen: the clock is what has finished in this run.
        full: when a counter is: "all" have arrived, the "first", all "others" than the waiter, or
            one arrival of "each" SM.
        skips: a task that waits, and does a later one of the list.
        rounds: over the SMs; None: until nobody goes on.
        until_done: until all tasks are done.
    """
    n = len(lists)
    clock = [[0] * n for _ in lists]
    told: dict[str, list[int]] = {}
    done: list[set[int]] = [set() for _ in lists]
    found: Found = [[] for _ in lists]

    def ready(sm: int, at: int) -> bool:
        wait = lists[sm][at][0]
        if wait is None:
            return True
        signals = [
            (i, k) for i, tasks in enumerate(lists) for k, one in enumerate(tasks) if one[1] == wait
        ]
        left = [(i, k) for i, k in signals if k not in done[i]]
        arrived = {i for i, k in signals if k in done[i]}
        return {
            "all": not left,
            "first": not signals or len(left) < len(signals),
            "others": all(i == sm for i, _ in left),
            "each": {i for i, _ in signals} == arrived,
        }[full]

    def do(sm: int, at: int) -> None:
        wait, signal = lists[sm][at]
        stale = tuple(clock[sm])
        if wait in told and learns:
            clock[sm] = [
                merge(a, b) if keeps else b for a, b in zip(clock[sm], told[wait], strict=True)
            ]
        seen = tuple(map(len, found)) if all_seen else tuple(clock[sm])
        found[sm].append(stale if stores_first else seen)
        says = clock[sm]
        if not counts_itself:
            says = list(says)
        clock[sm][sm] += counts
        if not deep:
            says = [k if i == sm else 0 for i, k in enumerate(says)]
        if signal is not None:
            if joins and signal in told:
                told[signal] = [merge(a, b) for a, b in zip(told[signal], says, strict=True)]
            else:
                told[signal] = list(says) if copies else says
        done[sm].add(at)

    before = -1
    while rounds is None or rounds > 0:
        rounds = None if rounds is None else rounds - 1
        now = sum(map(len, found))
        if now == sum(map(len, lists)) if until_done else now == before:
            break
        before = now
        for sm, tasks in enumerate(lists):
            while True:
                left = [at for at in range(len(tasks)) if at not in done[sm]]
                at = next((at for at in left[: None if skips else 1] if ready(sm, at)), None)
                if at is None:
                    break
                do(sm, at)
    return found


def own_only(lists: Lists) -> Found:
    """No run: every task knows of those before it in its list, and of nothing else."""
    n = len(lists)
    return [
        [tuple(at if i == sm else 0 for i in range(n)) for at in range(len(tasks))]
        for sm, tasks in enumerate(lists)
    ]


def popping(lists: list[list[tuple[str | None, str | None]]]) -> Found:
    """Right clocks, and the caller's lists are empty afterwards."""
    found = walk([list(tasks) for tasks in lists])
    for tasks in lists:
        tasks.clear()
    return found
