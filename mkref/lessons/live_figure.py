"""The picture of a number that was recorded and measured again: two bars for each, and a table.

Two runs of one geometry are compared by their values. Runs of different geometries are compared by
ratios only, each to a base of its own run.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from mkref.widgets.bars import Bar, bar_chart
from mkref.widgets.figure import Figure, Table

__all__ = ["Pair", "pairs_figure", "short"]

RECORDED, HERE = ("#56B4E9", "plain"), ("#E69F00", "diagonal")


@dataclass(frozen=True)
class Pair:
    """One quantity: its name, as recorded, as measured here, both in the same unit."""

    name: str
    recorded: float
    here: float


def short(value: float) -> str:
    """Three significant digits, without an exponent.

    >>> short(2.90565), short(0.0891), short(1060.83), short(0)
    ('2.91', '0.0891', '1061', '0')
    """
    if value == 0:
        return "0"
    return f"{value:.{min(max(2 - math.floor(math.log10(abs(value))), 0), 6)}f}"


def pairs_figure(
    pairs: Sequence[Pair],
    *,
    head: str,
    unit: str,
    labels: tuple[str, str],
    base: Pair | None = None,
    notes: Sequence[str] = (),
) -> Figure:
    """Recorded and measured here, side by side.

    Args:
        pairs: from top to bottom; at least one.
        head: what is compared, a few words.
        unit: of the values.
        labels: where the recorded values come from, and those measured here.
        base: None draws values; else every value is divided by that of its own side.
        notes: sentences about the comparison, for the text below the picture.
    """
    bars, rows, said = [], [], []
    for pair in pairs:
        recorded, here = f"{short(pair.recorded)} {unit}", f"{short(pair.here)} {unit}"
        more: tuple[str, ...]
        if base is None:
            lengths, texts = (pair.recorded, pair.here), (recorded, here)
            more = (f"{pair.here / pair.recorded:.2f}" if pair.recorded else "-",)
        else:
            lengths = pair.recorded / base.recorded, pair.here / base.here
            more = texts = (f"{lengths[0]:.1%} of {base.name}", f"{lengths[1]:.1%} of {base.name}")
        bars.append(Bar(pair.name, lengths[0], texts[0], *RECORDED))
        bars.append(Bar("", lengths[1], texts[1], *HERE))
        rows.append((pair.name, recorded, here, *more))
        said.append(f"{pair.name}: {texts[0]} recorded, {texts[1]} here")
    head += ", ratios" if base else ""
    sentence = f"{head}, {labels[0]} and {labels[1]}. {'; '.join(said)}."
    sentence = " ".join((sentence[0].upper() + sentence[1:], *notes))
    chart = bar_chart(
        bars, title=sentence, head=head, notes=(f"plain: {labels[0]}", f"hatched: {labels[1]}")
    )
    ratios = [f"{side} [derived]" for side in ("here over record", "ratio, record", "ratio, here")]
    columns = ratios[:1] if base is None else ratios[1:]
    return Figure(chart, sentence, Table(("what", *labels, *columns), tuple(rows)))
