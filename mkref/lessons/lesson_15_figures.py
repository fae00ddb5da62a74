"""Pictures of lesson 15: the ladder as a waterfall, turns and steps, intervals of gains, baselines,
shares of the bound, the path of a step, the simulator's errors."""

from __future__ import annotations

from itertools import pairwise
from math import isfinite
from statistics import mean, median

from mkref.lessons.lanes import IDLE
from mkref.lessons.lesson_15 import interval
from mkref.lessons.lesson_15_record import (
    CONTEXT,
    LATE,
    best_rungs,
    bound_ms,
    decode_rows,
    held_out,
    ladder_source,
    late_turns,
    of_path,
    simulated,
    steps,
    vllm_ms,
)
from mkref.lessons.lesson_15_strips import Strip, strip_chart
from mkref.lessons.recorded import bench_record
from mkref.widgets.bars import Bar, bar_chart
from mkref.widgets.figure import Figure, Table
from mkref.widgets.palette import GRID, OUTLINE, style_of
from mkref.widgets.svg import Svg, rect_path

__all__ = ["baselines", "errors", "gains", "path_parts", "shares", "start", "turns", "waterfall"]

WIDTH, ROW, TOP, RIGHT = 760, 28, 50, 200
FAR = 1.25
"""Times the median, from which on a step stands at the edge of the picture."""
LOOKS = (
    ("time of the step", "#E8E8E8", "plain"),
    ("saved", "#009E73", "vertical"),
    ("lost", "#D55E00", "diagonal"),
)
PATH_OPS = {
    "experts": "GATE_UP",
    "projections, router": "QKV",
    "attention, merge": "ATTENTION",
    "head": "HEAD",
    "embedding, sample": "EMBED",
}
"""The operation whose look a part of the critical path has."""


def waterfall(batch: int) -> Figure:
    """What each rung takes away from the time of the one before, or adds to it."""
    rungs = [*best_rungs(batch).values()]
    left, longest = 24 + 7 * max(len(r.name) + 3 for r in rungs), max(r.ms for r in rungs)
    scale = (WIDTH - left - RIGHT) / longest
    bound = bound_ms(batch) if batch in decode_rows() else None
    svg_rows: list[tuple[str, float, float, str]] = []
    rows, said = [], []
    for before, rung in zip([None, *rungs], rungs, strict=False):
        was = before.ms if before else rung.ms
        change = "" if before is None else f"{rung.ms / was - 1:+.1%}"
        name = f"{rung.letter}  {rung.name}"
        svg_rows.append((name, was, rung.ms, f"{rung.ms:.2f} ms {change} [measured]"))
        rows.append((name, f"{rung.ms:.3f}", change))
        said.append(f"{rung.letter} {rung.ms:.2f}")
    if bound is not None:
        svg_rows.append(("bytes, data sheet", bound, bound, f"{bound:.2f} ms [derived]"))
        rows.append(("bytes, data sheet", f"{bound:.3f}", ""))
        said.append(f"bytes at the data sheet's bandwidth {bound:.2f} [derived]")
    sentence = (
        f"The ladder at batch {batch}, ms per step, {ladder_source()} [measured], the best "
        f"of each letter: {', '.join(said)}."
    )
    svg = Svg(WIDTH, TOP + ROW * len(svg_rows) + 34, sentence)
    svg.text(16, 26, f"what each rung saves or costs, batch {batch}", size=16, bold=True)
    for row, (name, was, ms, text) in enumerate(svg_rows):
        y = TOP + ROW * row
        svg.text(left - 10, y + 17, name, anchor="end")
        svg.rect(left, y + 3, ms * scale, ROW - 8, LOOKS[0][1], stroke=OUTLINE)
        if was > ms:
            fill = svg.fill(*LOOKS[1][1:])
            svg.rect(left + ms * scale, y + 3, (was - ms) * scale, ROW - 8, fill, stroke=OUTLINE)
        elif was < ms:
            fill = svg.fill(*LOOKS[2][1:])
            svg.rect(left + was * scale, y + 3, (ms - was) * scale, ROW - 8, fill, stroke=OUTLINE)
        svg.text(left + max(was, ms) * scale + 8, y + 17, text)
    x, y = 16.0, TOP + ROW * len(svg_rows) + 24
    for says, color, pattern in LOOKS:
        svg.rect(x, y - 10, 14, 12, svg.fill(color, pattern), stroke=OUTLINE)
        svg.text(x + 20, y, says)
        x += 40 + 7 * len(says)
    return Figure(svg.render(), sentence, Table(("rung", "ms", "change"), tuple(rows)))


def turns(batch: int) -> Figure:
    """How far each turn of each rung lies from that rung's median; the two turns that are latest in
    their mean are marked."""
    rungs = [*best_rungs(batch).values()]
    off = [[100 * (ms / r.ms - 1) for ms in r.samples] for r in rungs]
    marked = late_turns(batch)
    strips, rows, said = [], [], []
    for rung, one in zip(rungs, off, strict=True):
        name = f"{rung.letter}  {rung.name}"
        each = ", ".join(f"turn {turn + 1} {round(one[turn], 1) + 0.0:+.1f} %" for turn in marked)
        strips.append(Strip(name, one, each, marked))
        others = [value for turn, value in enumerate(one) if turn not in marked]
        cells = (*(one[turn] for turn in marked), min(others), max(others))
        rows.append((name, *(f"{value:+.2f}" for value in cells)))
    for turn in marked:
        who = [rung.letter for rung, one in zip(rungs, off, strict=True) if one[turn] > LATE]
        said.append(f"turn {turn + 1} of {', '.join(who) or 'none'}")
    sentence = (
        f"Turns of each rung, percent from its median, batch {batch}, {ladder_source()} "
        f"[measured]: {len(off[0])} turns each; of the two marked, late by more than {LATE:g} % "
        f"are {' and '.join(said)}."
    )
    names = " and ".join(f"{turn + 1}" for turn in marked)
    chart = strip_chart(
        strips, title=sentence, head=f"turns {names} are late, but of which rungs? [measured]",
        unit=" %", legend=("a turn", f"turns {names}"),
    )  # fmt: skip
    head = ("rung", *(f"turn {turn + 1}, %" for turn in marked), "others from, %", "to, %")
    return Figure(chart, sentence, Table(head, tuple(rows)))


def start(batch: int = 1, part: int = 8) -> Figure:
    """Consecutive steps of one kernel after it was started, with its first and its next ones. Steps
    far beyond the others stand at the upper edge."""
    ms = steps(batch)
    first, second = median(ms[:part]), median(ms[part : 2 * part])
    low, high = min(ms), max(value for value in ms if value < FAR * median(ms))
    far = [number for number, value in enumerate(ms) if value > high]
    svg_width, height, left = WIDTH, 230, 60
    made = bench_record("h200/full_geometry.json")["provenance"]
    beyond = ", ".join(f"step {number + 1} takes {ms[number]:.2f} ms" for number in far)
    sentence = (
        f"{len(ms)} consecutive steps of one kernel, batch {batch}, {made['gpu']}, "
        f"{made['date'][:10]} [measured]: the median of the first {part} is {first:.2f} ms, of the "
        f"next {part} {second:.2f} ms, of the first half {median(ms[: len(ms) // 2]):.2f} ms, of "
        f"the second half {median(ms[len(ms) // 2 :]):.2f} ms{'; ' if far else ''}{beyond}."
    )
    svg = Svg(svg_width, height, sentence)
    svg.text(16, 26, "one kernel, step after step", size=16, bold=True)
    across, up = (svg_width - left - 30) / len(ms), (height - 102) / (high - low)

    def y(value: float) -> float:
        return height - 46 - (value - low) * up

    for value in (low, high):
        svg.rect(left, y(value), svg_width - left - 30, 1, GRID)
        svg.text(left - 8, y(value) + 4, f"{value:.2f}", anchor="end")
    for begin, value in ((0, first), (part, second)):
        svg.rect(left + begin * across, y(value) - 1, part * across, 3, "#D55E00")
    squares = [
        rect_path(left + (step + 0.5) * across - 3, y(min(value, high)) - 3, 6, 6)
        for step, value in enumerate(ms)
    ]
    near = (square for step, square in enumerate(squares) if step not in far)
    svg.path("".join(near), "#56B4E9", stroke=OUTLINE)
    svg.path("".join(squares[step] for step in far), "#D55E00", stroke=OUTLINE)
    if far:
        svg.text(left + (far[-1] + 3) * across, y(high) - 6, f"beyond the scale: {beyond}")
    for x, anchor, which, value in ((left, "start", "first", first), (0, "end", "next", second)):
        says = f"{which} {part} steps: median {value:.2f} ms"
        svg.text(x or svg_width - 30, height - 18, says, anchor=anchor)
    rows = tuple(
        (f"{i + 1} to {i + part}", f"{median(ms[i : i + part]):.3f}")
        for i in range(0, len(ms) - part + 1, part)
    )
    return Figure(svg.render(), sentence, Table(("steps", "median, ms"), rows))


def gains(batch: int) -> Figure:
    """The interval of the change from rung to rung, from ratios within turns."""
    best = best_rungs(batch)
    strips, rows, told = [], [], 0
    pairs = [*pairwise(best), ("c", "h")]
    for one, other in pairs:
        a, b = best[one].samples, best[other].samples
        points = [100 * (y / x - 1) for x, y in zip(a, b, strict=True)]
        low, high = interval(a, b)
        what = "best chain to last rung" if (one, other) == ("c", "h") else best[other].name
        name = f"{one} to {other}  {what}"
        span = (100 * (low - 1), 100 * (high - 1)) if isfinite(high) else None
        if span is None:
            text, mark = f"{len(a)} turns are too few", "cannot tell"
        else:
            mark = "cannot tell" if low <= 1 <= high else "faster" if high < 1 else "slower"
            text = f"{span[0]:+.1f} to {span[1]:+.1f} % [derived]"
        told += mark != "cannot tell"
        strips.append(Strip(name, points, text, (), span))
        rows.append((name, text, mark))
    sentence = (
        f"Change from rung to rung at batch {batch}, percent, from the ratios within each turn, "
        f"{ladder_source()} [derived from measured]: {told} of {len(pairs)} are shown with a "
        "confidence of 95 %."
    )
    chart = strip_chart(
        strips, title=sentence, head=f"what is certain at batch {batch}", unit=" %",
        legend=("a turn; hatched: where the true change lies", ""),
    )  # fmt: skip
    return Figure(chart, sentence, Table(("from, to", "interval", "so"), tuple(rows)))


def baselines(batch: int) -> Figure:
    """The same kernel against baselines: how much longer they take."""
    best, bars, rows = best_rungs(batch), [], []
    against: list[tuple[str, float, str]] = []
    engine = vllm_ms(batch)
    if engine is not None:
        own = float(decode_rows()[batch]["ms_per_step"])
        against.append(("vLLM 0.24, own router", engine / own, "other runs"))
    for letter, name in (("a", "launch per operation"), ("b", "best graph")):
        against.append((name, best[letter].ms / best["h"].ms, "same run"))
    against.append(("best graph + PDL", best["c"].ms / best["h"].ms, "same run"))
    for name, ratio, where in against:
        color, pattern = ("#0072B2", "plain") if where == "same run" else ("#E69F00", "diagonal")
        bars.append(Bar(name, ratio, f"{ratio:.2f} times, {where} [measured]", color, pattern))
        rows.append((name, f"{ratio:.3f}", where))
    said = "; ".join(f"{name} {ratio:.2f}" for name, ratio, _ in against)
    sentence = (
        f"Time of baselines over that of the persistent kernel, batch {batch}, {CONTEXT:,} tokens "
        f"[measured]: {said}."
    )
    chart = bar_chart(
        bars, title=sentence, head=f"how much longer? batch {batch}",
        notes=("line: the persistent kernel, 1.0",), full=1.0,
    )  # fmt: skip
    return Figure(chart, sentence, Table(("baseline", "times", "measured in"), tuple(rows)))


def shares() -> Figure:
    """Shares of two limits, by batch."""
    made = bench_record("h200/decode.json")["provenance"]
    bars, rows, said = [], [], []
    for batch, row in decode_rows().items():
        sheet, read = row["share_of_datasheet_bound"], row["share_of_measured_bandwidth"]
        text = f"{sheet:.1%}; of measured {read:.1%} [measured]"
        bars.append(Bar(f"batch {batch}", sheet, text, "#009E73", "plain"))
        rows.append((f"{batch}", f"{row['ms_per_step']:.3f}", f"{sheet:.1%}", f"{read:.1%}"))
        said.append(f"batch {batch} {sheet:.1%} or {read:.1%}")
    sentence = (
        "Shares of the data-sheet bound, or of the bandwidth of a plain read in the same run, "
        f"{made['gpu']}, {made['date'][:10]} [measured]: {', '.join(said)}."
    )
    chart = bar_chart(bars, title=sentence, head="share of the data-sheet bound", full=1.0)
    head = ("batch", "ms", "of data sheet", "of measured read")
    return Figure(chart, sentence, Table(head, tuple(rows)))


def path_parts() -> Figure:
    """What the critical path of the recorded step consists of, and Amdahl's limit for each part."""
    parts = of_path()
    total = sum(parts.values())
    bars, rows, said = [], [], []
    for name, ms in parts.items():
        look = IDLE.color, IDLE.pattern
        if name in PATH_OPS:
            look = style_of(PATH_OPS[name]).fill, style_of(PATH_OPS[name]).pattern
        text = f"{ms:.3f} ms; gone: {ms / total:.1%} less at most"
        bars.append(Bar(name, ms, text, *look))
        rows.append((name, f"{ms:.3f}", f"{ms / total:.1%}"))
        said.append(f"{name} {ms:.3f}")
    sentence = (
        f"The critical path of the recorded step, batch 1, ms [measured, with stamps]: "
        f"{'; '.join(said)}; together {total:.2f}."
    )
    chart = bar_chart(bars, title=sentence, head="the longest chain of tasks [measured]")
    return Figure(chart, sentence, Table(("part", "ms", "of the step"), tuple(rows)))


def errors() -> Figure:
    """Simulated over measured, for all cases that no constant was fitted to."""
    groups = held_out()
    every = simulated()["held_out"]["all"]
    strips, rows = [], []
    for name, found in groups.items():
        worst = max(range(len(found)), key=lambda i: abs(found[i]))
        size = mean(abs(error) for error in found)
        text = f"{len(found)} cases, mean {size:.1%}"
        strips.append(Strip(name, [100 * e for e in found], text, (worst,)))
        rows.append((name, str(len(found)), f"{size:.1%}", f"{found[worst]:+.1%}"))
    sentence = (
        f"Simulated over measured time of a step, percent, {every['n']} cases that are held out "
        f"[simulated, against measured]: mean of the absolute errors {every['mean_abs']:.1%}, "
        f"largest {every['max_abs']:.1%}."
    )
    chart = strip_chart(
        strips, title=sentence, head="how far the simulator is off", unit=" %",
        legend=("a case", "the worst of its row"),
    )  # fmt: skip
    head = ("record, kernel", "cases", "mean", "worst")
    return Figure(chart, sentence, Table(head, tuple(rows)))
