"""Pictures of lesson 07: where partial sums meet, two copies of x, the end of the recorded step,
and nano's next token at three temperatures."""

from __future__ import annotations

import numpy as np

from mkref.lessons.lanes import IDLE, Look, Span, lanes_figure
from mkref.lessons.lesson_07 import RECORD
from mkref.lessons.lesson_07_model import PROMPT, kept_by_top_p, probabilities, tokenizer
from mkref.lessons.recorded import recorded_trace
from mkref.widgets.figure import Figure, Table
from mkref.widgets.palette import GRID, INK, OUTLINE, style_of
from mkref.widgets.svg import Svg

__all__ = ["meeting_figure", "next_figure", "recorded_end", "two_copies"]

SKY, GREEN, YELLOW = "#56B4E9", "#009E73", "#F0E442"
PARTS, BOX = 8, 34
SAID = PROMPT.strip()


def _box(svg: Svg, x: float, y: float, width: float, text: str, fill: str) -> None:
    svg.rect(x, y, width, 26, fill, stroke=OUTLINE)
    svg.text(x + width / 2, y + 17, text, anchor="middle")


def _arrow(svg: Svg, x: float, y: float, to_x: float, to_y: float) -> None:
    """A line with a head, horizontal or vertical."""
    svg.path(f"M{x} {y}L{to_x} {to_y}", "none", stroke=INK, width=1.4)
    if x == to_x:
        svg.path(f"M{to_x - 4} {to_y - 7}h8l-4 7z", INK)
    else:
        svg.path(f"M{to_x - 7} {to_y - 4}v8l7-4z", INK)


def meeting_figure() -> Figure:
    """One element of x in one layer, on the SM that owns it."""
    sentence = (
        "How one element of x gets through a layer on the SM that owns it, a scheme: in O_PROJ "
        "eight warps leave eight partial sums in places 0 to 7 of shared memory, one thread adds "
        "them in that order and adds the result to x, which gives x_mid; in DOWN each of eight "
        "places holds a warp's sum over all chosen experts, and these are added in the same order, "
        "then to x_mid, which gives x of the next layer."
    )
    svg = Svg(760, 268, sentence)
    svg.text(16, 26, "Every partial sum has a place; places are added in their order", size=16,
             bold=True)  # fmt: skip
    svg.path("M16 44h640v186h-640z", "none", stroke=OUTLINE, dash="6 4")
    svg.text(26, 222, "one SM, for the 16 elements of x that it owns in every layer")
    rows = (
        (58, "O_PROJ", "attn, 8 warps", style_of("O_PROJ").fill),
        (138, "DOWN", "experts, 8 warps", style_of("DOWN").fill),
    )
    for y, name, what, fill in rows:
        svg.text(26, y + 14, name, bold=True)
        svg.text(26, y + 30, what)
        for k in range(PARTS):
            _box(svg, 146 + k * (BOX + 4), y, BOX, f"p{k}", svg.fill(fill))
        _arrow(svg, 450, y + 13, 470, y + 13)
        _box(svg, 470, y, 54, "sum", "#ffffff")
        _arrow(svg, 524, y + 13, 544, y + 13)
        each = "; in each p the chosen experts, ascending" if name == "DOWN" else ""
        svg.text(148, y + 42, f"((p0 + p1) + p2) + ... + p7{each}", size=11)
    _box(svg, 544, 58, 100, "x + sum", YELLOW)
    _box(svg, 544, 138, 100, "x_mid + sum", YELLOW)
    _arrow(svg, 594, 84, 594, 138)
    svg.text(588, 115, "x_mid", anchor="end")
    _arrow(svg, 644, 151, 676, 151)
    _box(svg, 676, 138, 70, "next x", YELLOW)
    svg.text(711, 182, "read by", anchor="middle")
    svg.text(711, 198, "all SMs", anchor="middle")
    svg.text(16, 254, "An SM never adds to what another SM owns, so no atomic is needed.")
    table = Table(
        ("step", "places", "order", "result"),
        (
            ("O_PROJ", "8, one per warp", "p0 to p7, then x + sum", "x_mid"),
            ("DOWN", "8, one per warp, experts ascending in each", "p0 to p7, then x_mid + sum",
             "x of the next layer"),
        ),
    )  # fmt: skip
    return Figure(svg.render(), sentence, table)


def two_copies() -> Figure:
    """Which copy of x holds what while EMBED and the first layers run."""
    looks = {
        "task": Look("tasks", "#C8C8C8"),
        "new": Look("words appear, one by one", YELLOW, "diagonal"),
        "x": Look("whole, and read", SKY),
        "gone": Look("ABSENT", "#ffffff"),
    }
    lanes = [
        (
            "tasks",
            [
                Span(0, 2, "task", "EMBED"), Span(2, 5, "task", "layer 0"),
                Span(5, 7, "task", "DOWN 0"), Span(7, 10, "task", "layer 1"),
                Span(10, 12, "task", "DOWN 1"), Span(12, 15, "task", "layer 2"),
            ],
        ),
        (
            "x, even layers",
            [
                Span(0, 2, "new"), Span(2, 5, "x", "of layer 0"), Span(5, 10, "gone", "ABSENT"),
                Span(10, 12, "new"), Span(12, 15, "x", "of layer 2"),
            ],
        ),
        (
            "x, odd layers",
            [
                Span(0, 5, "gone", "ABSENT"), Span(5, 7, "new"), Span(7, 10, "x", "of layer 1"),
                Span(10, 15, "gone", "ABSENT"),
            ],
        ),
    ]  # fmt: skip
    sentence = (
        "Two copies of x in turns, a scheme without a clock: DOWN of layer 0 writes the odd copy "
        "word by word and makes the even one ABSENT, DOWN of layer 1 the other way round, so a "
        "reader of x sees in each word whether it is there."
    )
    return lanes_figure("The words of x tell whether they are there", sentence, lanes, looks)


def recorded_end(sms: tuple[int, ...] = (0, 40, 80, 120)) -> Figure:
    """HEAD and SAMPLE of some SMs in the recorded step."""
    trace = recorded_trace(RECORD)
    chosen = [e for e in trace if e.op in ("HEAD", "SAMPLE")]
    start = min(e.begin for e in chosen)
    looks = {"idle": IDLE}
    lanes: list[tuple[str, list[Span]]] = []
    for sm in sms:
        spans = []
        for e in (e for e in chosen if e.sm == sm):
            style = style_of(e.op)
            looks.setdefault(e.op, Look(e.op, style.fill, style.pattern, style.ink))
            begin, ready, end = ((t - start) / 1e3 for t in (e.begin, e.ready, e.end))
            spans.append(Span(begin, ready, "idle"))
            spans.append(Span(ready, end, e.op, f"{e.op}, {end - ready:.1f} us"))
        lanes.append((f"SM {sm}", spans))
    head = [e.work_ns / 1e3 for e in chosen if e.op == "HEAD"]
    waits, works = (
        np.mean([t for e in chosen if e.op == "SAMPLE" for t in [getattr(e, name) / 1e3]])
        for name in ("wait_ns", "work_ns")
    )
    sentence = (
        f"The end of a step, {trace.where} [measured]: HEAD works {min(head):.0f} to "
        f"{max(head):.0f} us on all 132 SMs; SAMPLE, at the right, waits "
        f"{waits:.1f} us for the slowest HEAD and works {works:.1f} us (means)."
    )
    return lanes_figure("The head, and the choice", sentence, lanes, looks)


def next_figure(
    temperatures: tuple[float, ...] = (0.5, 1.0, 2.0), top_p: float = 0.9, shown: int = 16
) -> Figure:
    """The likeliest next tokens of nano, and those that top_p keeps."""
    spread = [probabilities(t) for t in temperatures]
    order = np.argsort(-spread[0])[:shown]
    names = [repr(tokenizer().decode([int(i)])) for i in order]
    kept = [kept_by_top_p(t, top_p) for t in temperatures]
    said = "; ".join(
        f"temperature {t:g}: {p.max():.1%} for the first token, top_p {top_p:g} keeps {n} of "
        f"{len(p):,}"
        for t, p, n in zip(temperatures, spread, kept, strict=True)
    )
    sentence = f"What nano says after {SAID!r} [derived]. {said}."
    left, top, row, column = 92, 66, 20, 216
    svg = Svg(760, top + row * (shown + 1) + 46, sentence)
    svg.text(16, 26, f"The token after {SAID!r}", size=16, bold=True)
    largest = max(float(p.max()) for p in spread)
    for panel, (temperature, p, n) in enumerate(zip(temperatures, spread, kept, strict=True)):
        x = left + panel * column
        svg.text(x, top - 12, f"temperature {temperature:g}: {n} kept", bold=True)
        for at, i in enumerate(order):
            y, width = top + at * row, max(1.0, 140 * float(p[i]) / largest)
            fill = svg.fill(GREEN) if at < n else svg.fill("#ffffff", "diagonal")
            svg.rect(x, y + 3, width, row - 6, fill, stroke=OUTLINE)
            svg.text(x + width + 5, y + 14, f"{p[i]:.1%}", size=11)
        rest = float(1 - p[order].sum())
        svg.rect(x, top + shown * row + 1, column - 16, 1, GRID)
        svg.text(x, top + shown * row + 17, f"all others: {rest:.1%}", size=11)
    for at, name in enumerate(names):
        svg.text(left - 10, top + at * row + 14, name, anchor="end")
    y = top + row * (shown + 1) + 20
    svg.rect(left, y, 14, 12, svg.fill(GREEN), stroke=OUTLINE)
    svg.text(left + 20, y + 11, f"kept by top_p {top_p:g}")
    svg.rect(left + 170, y, 14, 12, svg.fill("#ffffff", "diagonal"), stroke=OUTLINE)
    svg.text(left + 190, y + 11, "left out")
    rows = [
        (name, *(f"{p[i]:.1%}{'' if at < n else ' (out)'}"
                 for p, n in zip(spread, kept, strict=True)))
        for at, (name, i) in enumerate(zip(names, order, strict=True))
    ]  # fmt: skip
    head = ("token", *(f"temperature {t:g}" for t in temperatures))
    return Figure(svg.render(), sentence, Table(head, tuple(rows)))
