"""Pictures of lesson 13: orders of a sum, one mma, gaps between tokens, two requests' launches."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from mkref.lessons.lanes import Look, Span, lanes_figure
from mkref.lessons.lesson_13 import bits_of, fixed_sum, numbers, per_sm
from mkref.lessons.lesson_13_ties import NearTie, all_gaps
from mkref.reference.mma import OUT_BITS, F
from mkref.widgets.figure import Figure, Table
from mkref.widgets.palette import GRID, INK, OUTLINE
from mkref.widgets.svg import Svg

if TYPE_CHECKING:
    from mkref.lessons.lesson_13_runs import LaunchSeen

__all__ = ["different_sums", "gaps_figure", "launches_figure", "mma_figure", "sums_figure"]

N_VALUES = 4096
SMS = (1, 2, 4, 7, 64, 132)
ORANGE, SKY, GREEN, GREY = "#E69F00", "#56B4E9", "#009E73", "#DDDDDD"


def different_sums(most: int = 132) -> tuple[int, int]:
    """A sum on 1 to `most` SMs, if each SM adds its own values.

    Returns:
        How many different results there are, and how far the smallest is from the largest, in units
        of the last place; all have the same sign.
    """
    x = numbers(N_VALUES)
    bits = {int(bits_of(per_sm(x, n_sm)), 16) for n_sm in range(1, most + 1)}
    return len(bits), max(bits) - min(bits)


def sums_figure(shown: int = 12) -> Figure:
    """The last bits of a sum on several numbers of SMs: values dealt to SMs, and fixed chunks."""
    x = numbers(N_VALUES)
    rows = [(n, bits_of(per_sm(x, n)), bits_of(fixed_sum(x, n))) for n in SMS]
    dealt = len({bits for _, bits, _ in rows})
    sentence = (
        f"The same {N_VALUES:,} numbers added in float32 [derived]: if each SM adds its own, "
        f"{len(SMS)} numbers of SMs give {dealt} different results; with chunks of 128 in a fixed "
        f"order all have the bits {rows[0][2]}."
    )
    svg, cell = Svg(760, 82 + 30 * len(rows), sentence), 15
    svg.text(16, 26, "The last 12 bits of a sum", size=16, bold=True)
    svg.text(120, 52, "each SM adds its own values")
    svg.text(450, 52, "chunks of 128, in fixed order")
    for at, (n_sm, *both) in enumerate(rows):
        y = 64 + 30 * at
        svg.text(16, y + 14, f"{n_sm} SM{'s' if n_sm > 1 else ''}")
        for column, (bits, first) in enumerate(zip(both, rows[0][1:], strict=True)):
            left = 120 + 330 * column
            for k in range(shown):
                shift = shown - 1 - k
                bit, was = (int(b, 16) >> shift & 1 for b in (bits, first))
                color = (ORANGE if bit != was else INK) if bit else "#ffffff"
                edge = ORANGE if bit != was else OUTLINE
                svg.rect(left + k * (cell + 2), y, cell, cell, color, stroke=edge)
            svg.text(left + shown * (cell + 2) + 10, y + 13, bits)
    svg.text(16, 74 + 30 * len(rows), "filled: 1; orange: not as on one SM")
    table = Table(
        ("SMs", "each SM its own", "fixed chunks"),
        tuple((str(n), bits, fixed) for n, bits, fixed in rows),
    )
    return Figure(svg.render(), sentence, table)


def mma_figure(powers: Sequence[int] = (0, 3, 24, 25, 26, 27)) -> Figure:
    """Which bits of the terms of an mma are kept, if the largest of them is 1."""
    sentence = (
        f"What one mma keeps, derived from docs/numerics.md: if the largest exponent is 0, bits "
        f"below 2^-{F} of every term are cut off before the sum, so a product of 2^-25 counts and "
        f"one of 2^-26 does not; of the sum {OUT_BITS} bits are kept."
    )
    left, step, rows = 150, 20, len(powers)
    svg = Svg(760, 120 + 28 * rows, sentence)
    svg.text(16, 26, "One mma: terms are cut before they are added", size=16, bold=True)
    for k in range(29):
        x = float(left + k * step)
        color = "#ffffff" if k <= F else svg.fill(GREY, "diagonal")
        for at in range(rows):
            svg.rect(x, 62 + 28 * at, step - 2, 18, color, stroke=GRID)
        if (k % 4 == 0 and k + 1 != F) or k == F:
            svg.text(x + 8, 54, f"-{k}" if k else "0", anchor="middle", size=11)
    svg.text(16, 54, "bit, as power of 2", size=11)
    for at, power in enumerate(powers):
        kept = power <= F
        svg.text(16, 76 + 28 * at, "c = 1" if power == 0 else f"product 2^-{power}")
        look = (SKY if kept else ORANGE, "plain" if kept else "cross")
        svg.rect(left + power * step, 62 + 28 * at, step - 2, 18, svg.fill(*look), stroke=OUTLINE)
    y = 66 + 28 * rows
    svg.rect(left, y, OUT_BITS * step - 2, 10, GREEN, stroke=OUTLINE)
    svg.text(16, y + 10, "kept of the sum")
    x = 16.0
    for says, fill in (
        ("added", SKY),
        ("cut to nothing", svg.fill(ORANGE, "cross")),
        ("below the cut", svg.fill(GREY, "diagonal")),
        (f"{OUT_BITS} bits of the result", GREEN),
    ):
        svg.rect(x, y + 26, 14, 12, fill, stroke=OUTLINE)
        svg.text(x + 20, y + 37, says)
        x += 50 + 7.2 * len(says)
    table = Table(
        ("term", "added"),
        tuple((f"2^-{p}" if p else "1", "as it is" if p <= F else "not at all") for p in powers),
    )
    return Figure(svg.render(), sentence, table)


def gaps_figure(ties: Sequence[NearTie], tie: float) -> Figure:
    """Gaps between the two best tokens of all recorded tokens, and the places that differ."""
    gaps = all_gaps()
    edges = [2.0**k for k in range(-11, 5)]
    counts, _ = np.histogram(gaps, edges)
    close = int((gaps <= tie).sum())
    beyond = [one for one in ties if one.gap > tie]
    names = ", ".join(
        f"prompt {one.prompt}, token {one.token} ({'other' if one.layers else 'same'} experts)"
        for one in beyond
    )
    sentence = (
        f"How far the second best token was below the best, {len(gaps):,} tokens of nano "
        f"[measured]: {close} have a gap of at most {tie}. PyTorch in float32 chose another "
        f"token at {len(ties)} places. Its token is at most {tie} below ours at "
        f"{len(ties) - len(beyond)} of them, and further below at {names or 'none'}."
    )
    svg, left, width, base = Svg(760, 324, sentence), 40, 44, 210
    svg.text(16, 26, "How sure was the kernel?", size=16, bold=True)

    def place(gap: float) -> float:
        return left + width * (math.log2(gap) + 11)

    for k, count in enumerate(counts.tolist()):
        height = 150 * count / max(counts)
        x = float(left + width * k)
        svg.rect(x + 1, base - height, width - 2, height, SKY, stroke=OUTLINE)
        svg.text(x + width / 2, base - height - 4, str(count), anchor="middle", size=11)
    for k in range(-10, 5, 2):
        says = f"{2.0**k:.4g}" if k >= -3 else f"2^{k}"
        svg.text(place(2.0**k), base + 16, says, anchor="middle", size=11)
    svg.rect(place(tie) - 1, 44, 2, base - 44, ORANGE)
    svg.text(place(tie) - 6, 54, f"tie = {tie}", anchor="end")
    for number, one in enumerate(sorted(ties, key=lambda one: one.gap)):
        x = place(one.gap)
        far = one.gap > tie
        color = svg.fill(ORANGE, "cross") if far else GREEN
        svg.path(f"M{x:.1f} {base + 22}l7 14h-14z", color, stroke=OUTLINE)
        svg.text(
            x, base + 50 + 14 * (number % 2), f"{one.prompt}/{one.token}", anchor="middle", size=11
        )
    svg.text(16, base + 86, "bars: number of tokens by gap between the two best")
    svg.text(
        16, base + 104, "triangles: prompt/token where PyTorch chose one that far below our best"
    )
    rows = [
        (f"{a:.4g} to {2 * a:.4g}", str(n)) for a, n in zip(edges, counts.tolist(), strict=False)
    ]
    rows += [
        (
            f"prompt {t.prompt}, token {t.token}",
            f"gap {t.gap:.3f}, {'other' if t.layers else 'same'} experts",
        )
        for t in ties
    ]
    return Figure(svg.render(), sentence, Table(("gap", "tokens"), tuple(rows)))


def launches_figure(seen: Sequence[LaunchSeen]) -> Figure:
    """Launches and rows of two requests, step by step."""
    looks = {
        "launch": Look("a launch", GREY),
        "0p": Look("A, prompt", SKY),
        "0a": Look("A, answer", "#0072B2", ink="#ffffff"),
        "1p": Look("B, prompt", ORANGE, "diagonal"),
        "1a": Look("B, answer", "#D55E00", "cross"),
    }
    n_rows = max(len(one.rows) for one in seen)
    lanes: list[tuple[str, list[Span]]] = [("launches", [])]
    lanes += [(f"row {row}", []) for row in range(n_rows)]
    at = 0
    for one in seen:
        end = at + one.steps
        label = f"{one.steps} steps" if one.steps > 1 else ""
        lanes[0][1].append(Span(at, end, "launch", label))
        for row, (number, prompt) in enumerate(one.rows):
            kind, spans = f"{number}{'p' if prompt else 'a'}", lanes[row + 1][1]
            if spans and (spans[-1].kind, spans[-1].end) == (kind, at):
                spans[-1] = Span(spans[-1].begin, end, kind)
            else:
                spans.append(Span(at, end, kind))
        at = end
    prompt_steps = sum(any(prompt for _, prompt in one.rows) for one in seen)
    long = [one.steps for one in seen if one.steps > 1]
    sentence = (
        f"Two requests on one engine, steps from left to right [simulated, the interpreter]: "
        f"{prompt_steps} launches of one step take in the prompts, eight tokens a step; then "
        f"launches of {' and '.join(map(str, long))} steps make the answers."
    )
    return lanes_figure("The rows of two requests", sentence, lanes, looks)
