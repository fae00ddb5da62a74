"""The scheme of lesson 02: what four SMs do at the boundary of two kernels, in three ways."""

from __future__ import annotations

from typing import TYPE_CHECKING

from mkref.lessons.lanes import Look, Span, lanes_figure

if TYPE_CHECKING:
    from mkref.widgets.figure import Figure

__all__ = ["boundary_figure"]

ENDS = (10.0, 12.5, 9.0, 11.0)
"""When each SM is done with its part of the first operation."""
LAST, FETCH, WORK = max(ENDS), 2.5, 8.0
GAP, START, HEARD, HOP = 3.0, 1.2, 1.5, 0.8
"""End and start of a kernel; start of a block; end of the kernel before; a counter."""
LOOKS = {
    "A": Look("A", "#56B4E9"),
    "B": Look("B", "#E69F00", "vertical"),
    "tail": Look("tail: waits for the slowest", "#ffffff", "diagonal"),
    "gap": Look("gap: end, start, signal", "#CC79A7", "horizontal"),
    "fetch": Look("ramp: first bytes of B", "#F0E442", "dots"),
}


def boundary_figure() -> Figure:
    """A launch after the other, with programmatic dependent launch, and as tasks of one kernel."""
    ways: list[tuple[str, list[list[Span]]]] = [
        ("kernel after kernel", []),
        ("with programmatic dependent launch", []),
        ("tasks of one kernel", []),
    ]
    for end in ENDS:
        done, ready = Span(0, end, "A", "A"), LAST + GAP
        ways[0][1].append(
            [
                done,
                *([Span(end, LAST, "tail")] if end < LAST else []),
                Span(LAST, ready, "gap"),
                Span(ready, ready + FETCH, "fetch"),
                Span(ready + FETCH, ready + FETCH + WORK, "B", "B"),
            ]
        )
        # A block fits onto an SM once the one before has left it; its first bytes wait for nobody.
        begins = end + START
        works = max(begins + FETCH, LAST + HEARD)
        ways[1][1].append(
            [
                done,
                Span(end, begins, "gap"),
                Span(begins, works, "fetch"),
                Span(works, works + WORK, "B", "B"),
            ]
        )
        works = LAST + HOP
        ways[2][1].append(
            [
                done,
                *([Span(end, LAST, "tail")] if end < LAST else []),
                Span(LAST, works, "gap"),
                Span(works, works + WORK, "B", "B"),
            ]
        )
    lanes: list[tuple[str, list[Span]]] = []
    for name, sms in ways:
        lanes.append((name, []))
        lanes += [(f"SM {number}", spans) for number, spans in enumerate(sms)]
    sentence = (
        "Scheme, not to scale: between two kernels all SMs wait for the slowest part of A, for the "
        "end of a kernel and the start of the next, and then for the first bytes of B. With "
        "dependent launch an SM fetches them as soon as its own part of A is done. In a "
        "persistent kernel it has asked for them while it still did A: only the tail is left, and "
        "the way of a signal."
    )
    return lanes_figure("What four SMs do between A and B", sentence, lanes, LOOKS)
