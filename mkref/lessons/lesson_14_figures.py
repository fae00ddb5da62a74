"""Pictures of lesson 14: ragged answers in whole batches and continuously; pages of two kinds."""

from __future__ import annotations

from collections.abc import Sequence

from mkref.config import NORTH_MINI_CODE
from mkref.lessons.lanes import Look, Span, lanes_figure
from mkref.lessons.lesson_14 import held_pages
from mkref.widgets.figure import Figure, Table

__all__ = ["LENGTHS", "batching", "batching_figure", "pages_figure", "share_of_pages"]

LENGTHS = (3, 14, 5, 9, 2, 12, 4, 7)
"""Tokens of the answers of eight requests, in the order in which they come."""
ROWS, PAGE, WINDOW, LAUNCH = 4, 64, 256, 32
BATCHING = {
    "early": Look("answer", "#56B4E9"),
    "late": Look("answer, of the last four to come", "#E69F00", "vertical"),
    "idle": Look("row without a request", "#ffffff", "diagonal"),
}
PAGES = {
    "held": Look("held", "#56B4E9"),
    "new": Look("taken for this launch", "#F0E442", "horizontal"),
    "gone": Look("given back: no token of the launch sees it", "#ffffff", "diagonal"),
}


def batching(
    lengths: Sequence[int], rows: int, *, continuous: bool
) -> list[list[tuple[int, int, int]]]:
    """Who is in which row of which steps: per row a list of (request, first step, behind last).

    Args:
        lengths: tokens of the answers, one per step.
        rows: of a step.
        continuous: a row that becomes free is given away at once; else when all have ended.
    """
    found: list[list[tuple[int, int, int]]] = [[] for _ in range(rows)]
    free = [0] * rows
    for number, length in enumerate(lengths):
        if not continuous and number % rows == 0:
            free = [max(free)] * rows
        row = min(range(rows), key=lambda i: (free[i], i))
        if not continuous:
            row = number % rows
        found[row].append((number, free[row], free[row] + length))
        free[row] += length
    return found


def _lanes(continuous: bool) -> tuple[list[tuple[str, list[Span]]], int]:
    used = batching(LENGTHS, ROWS, continuous=continuous)
    last = max(end for row in used for _, _, end in row)
    lanes = []
    for number, row in enumerate(used):
        spans, at = [], 0
        for request, begin, end in row:
            if begin > at:
                spans.append(Span(at, begin, "idle"))
            kind = "early" if request < ROWS else "late"
            spans.append(Span(begin, end, kind, "ABCDEFGH"[request]))
            at = end
        if at < last:
            spans.append(Span(at, last, "idle"))
        lanes.append((f"row {number}", spans))
    return lanes, last


def batching_figure() -> Figure:
    """Eight ragged answers on four rows, in whole batches above, continuously below."""
    whole, n_whole = _lanes(continuous=False)
    mixed, n_mixed = _lanes(continuous=True)
    tokens = sum(LENGTHS)
    sentence = (
        f"A scheme, derived: eight answers of {min(LENGTHS)} to {max(LENGTHS)} tokens on four "
        f"rows. In whole batches they take {n_whole} steps, and {ROWS * n_whole - tokens} of "
        f"{ROWS * n_whole} places are empty; continuously they take {n_mixed} steps, and "
        f"{ROWS * n_mixed - tokens} of {ROWS * n_mixed} places are empty."
    )
    lanes = [("in whole batches", []), *whole, ("continuously", []), *mixed]
    return lanes_figure("A free row is given away at once", sentence, lanes, BATCHING)


def pages_figure() -> Figure:
    """Pages of a full and of a sliding layer at three moments of a sequence that grows."""
    lanes: list[tuple[str, list[Span]]] = []
    said = []
    for position in (64, 330, 620):
        first_new = -(-position // PAGE)
        counts = []
        for name, window in (("full", 0), ("sliding", WINDOW)):
            begin, end = held_pages(position, LAUNCH, window, PAGE)
            counts.append(end - begin)
            kinds = ["gone"] * begin + ["held"] * (end - begin)
            kinds[first_new:] = ["new"] * (end - first_new)
            spans = [Span(p, p + 1, kind, f"{p}") for p, kind in enumerate(kinds)]
            lanes.append((f"at {position}, {name}", spans))
        said.append(f"{counts[0]} and {counts[1]} at token {position}")
    sentence = (
        f"A scheme, derived: how many pages of {PAGE} tokens a full and a sliding layer hold for a "
        f"launch of {LAUNCH} steps, with a window of {WINDOW} tokens: {', '.join(said)}."
    )
    drawn = lanes_figure("Full layers keep, sliding layers give back", sentence, lanes, PAGES)
    rows = [
        (name, *(" ".join(s.label for s in spans if s.kind == kind) or "-" for kind in PAGES))
        for name, spans in lanes
    ]
    table = Table(("token and layer", "held", "taken for this launch", "given back"), tuple(rows))
    return Figure(drawn.svg, sentence, table)


def share_of_pages(n_tokens: int) -> tuple[int, int, float]:
    """Pages of North's 49 layers for a sequence: full layers, sliding layers, part of all.

    Args:
        n_tokens: in the cache; the launch after them is one of 32 steps.
    """
    c = NORTH_MINI_CODE
    kinds = [c.is_sliding(layer) for layer in range(c.num_hidden_layers)]
    counts = []
    for slides in (False, True):
        begin, end = held_pages(n_tokens, LAUNCH, c.sliding_window if slides else 0, PAGE)
        counts.append((end - begin) * kinds.count(slides))
    whole = held_pages(n_tokens, LAUNCH, 0, PAGE)[1] * len(kinds)
    return counts[0], counts[1], sum(counts) / whole
