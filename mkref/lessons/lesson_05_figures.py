"""What lesson 05 shows: chunks of rows, attention of one SM in four layers as recorded, and the
kernel's `attention` in parts."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from mkref.lessons.lanes import IDLE, Look, Span, lanes_figure
from mkref.lessons.lesson_05 import CHUNK, chunks_of
from mkref.lessons.recorded import recorded_trace
from mkref.lessons.source import Code, code
from mkref.widgets.figure import Table
from mkref.widgets.palette import style_of

if TYPE_CHECKING:
    from mkref.widgets.figure import Figure

__all__ = ["attention_part", "chunks_figure", "recorded_attention"]

CASES = ((300, 0), (300, 70), (130, 70), (63, 70))
LOOKS = {
    "skip": Look("not read", "#ffffff"),
    "mask": Look("read, but masked", "#F0E442", "diagonal"),
    "seen": Look("seen", "#56B4E9"),
}


SCORES = "// Scores of this warp's 16 keys"
RESCALING, WEIGHTS = "if (now.chunk == range.split_begin(", "uint16_t* weight = "
PARTS = {
    "names": ("const AttentionItem now = item;", SCORES),
    "scores": (SCORES, "if (KEYS_FIRST) {"),
    "maximum": ("const bool pages = ", RESCALING),
    "rescaling": (RESCALING, WEIGHTS),
    "weights": (WEIGHTS, "// Values: rows are this warp's 16 dimensions"),
    "values": ("// Values: rows are this warp's 16 dimensions", ""),
}
"""Parts of `attention`: where each begins, and what comes after it; "" is the end."""


def attention_part(name: str) -> Code:
    """A part of the kernel's `attention`, which is too long for one look; a key of `PARTS`."""
    whole = code("attention")
    lines = whole.text.splitlines()
    begin, after = (
        next((i for i, line in enumerate(lines) if mark and line.lstrip().startswith(mark)), None)
        for mark in PARTS[name]
    )
    assert begin is not None, f"the kernel has no part {name!r}"
    text = "\n".join(lines[begin:after]).rstrip()
    return replace(whole, line=whole.line + begin, text=text)


def chunks_figure(page: int = 64) -> Figure:
    """Which keys of rows at four positions are seen, masked and not read."""
    lanes: list[tuple[str, list[Span]]] = []
    counts, rows = [], []
    for position, window in CASES:
        first = position - window + 1 if 0 < window <= position else 0
        read, end = first // page * page, (position // page + 1) * page
        spans = [Span(0, read, "skip")] if read else []
        if first > read:
            spans.append(Span(read, first, "mask", f"{first - read}"))
        spans.append(Span(first, position + 1, "seen", f"{position + 1 - first} keys"))
        if end > position + 1:
            spans.append(Span(position + 1, end, "mask", f"{end - position - 1}"))
        name = f"at {position}, " + (f"window {window}" if window else "all keys")
        lanes.append((name, spans))
        chunk, count = chunks_of(position, window)
        counts.append(count)
        masked = first - read + end - position - 1
        chunks = f"{chunk} to {chunk + count - 1}" if count > 1 else f"{chunk}"
        rows.append((name, str(read), str(masked), f"{first} to {position}", chunks))
    borders = [Span(at, at + CHUNK, "skip", f"chunk {at // CHUNK}") for at in (0, 128, 256)]
    lanes.append(("chunks", borders))
    sentence = (
        "Which keys are read, derived: four rows with their positions and windows, above the "
        f"chunks of {CHUNK} keys. They need {', '.join(map(str, counts))} chunks; whole pages of "
        f"{page} keys are read, and keys before the window or after the token are masked. Numbers "
        "in the boxes count keys."
    )
    figure = lanes_figure("Chunks begin at fixed positions", sentence, lanes, LOOKS)
    head = ("row", "keys before, not read", "read, but masked", "keys seen", "chunks")
    return replace(figure, table=Table(head, tuple(rows)))


def recorded_attention(sm: int = 22, first: int = 8) -> Figure:
    """ATTENTION and MERGE of one SM in a layer with all keys and in three with a window."""
    trace = recorded_trace("trace_north_h200.json.gz")
    lanes: list[tuple[str, list[Span]]] = []
    looks = {"idle": IDLE}
    works = []
    for layer in range(first, first + 4):
        tasks = [
            e
            for e in trace
            if (e.sm, e.layer) == (sm, layer) and e.op in ("ATTENTION", "MERGE") and not e.beside
        ]
        kind = "window" if layer % 4 else "all keys"
        spans, at = [], 0.0
        for task in tasks:
            style = style_of(task.op)
            looks.setdefault(task.op, Look(task.op, style.fill, style.pattern, style.ink))
            waited, worked = task.ready - task.begin, task.end - task.ready
            spans.append(Span(at, at + waited, "idle"))
            label = f"{worked / 1000:.1f} us"
            spans.append(Span(at + waited, at + waited + worked, task.op, label))
            at += waited + worked
            if task.op == "ATTENTION":
                works.append(worked / 1000)
        lanes.append((f"layer {layer}, {kind}", spans))
    sentence = (
        f"ATTENTION and MERGE of SM {sm}, {trace.where} [measured], one layer per row, what lay "
        f"between the two left out: attention works {works[0]:.1f} us over all keys, and "
        f"{', '.join(f'{work:.1f}' for work in works[1:])} us with a window."
    )
    return lanes_figure("Two chunks per SM, or one", sentence, lanes, looks)
