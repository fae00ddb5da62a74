"""Waves without a kernel: the three ways below one another on one axis of time, a row per SM.

Bars have the colour, pattern and letter of their operation; where an SM has none it is idle. With
many SMs rows get thin and neighbouring tiles of one operation grow together.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

from mkref.widgets.figure import Figure, Table
from mkref.widgets.palette import GRID, OUTLINE, WAIT, style_of
from mkref.widgets.svg import Svg, rect_path
from mkref.widgets.timeline.render import ticks
from mkref.widgets.waves.model import waves

if TYPE_CHECKING:
    from mkref.widgets.waves.model import Bar, Schedule

__all__ = ["figure"]

WIDTH, LEFT, RIGHT = 900, 92, 16
TOP, HEAD, GAP, AXIS = 44, 22, 14, 34
TALLEST, LOWEST, PANEL = 16.0, 1.0, 150.0  # pixels of a row; of all rows of one way, about
MANY_BARS = 700
"""More are drawn without a line between tiles of one operation."""
LETTER = 11.0  # pixels: height that a letter needs
SAID = {
    "grids": "a grid per operation",
    "queue": "one queue",
    "back-fill": "one queue, back-filled",
}


class Block(NamedTuple):
    """Tiles that are drawn as one: of one operation, on neighbouring SMs, without a pause."""

    op: int
    sm: int
    n_sm: int
    begin: float
    end: float


def percent(share: float) -> str:
    """A share as text.

    >>> percent(0.5), percent(1.0)
    ('50%', '100%')
    """
    return f"{share:.0%}"


def summary(schedules: Sequence[Schedule]) -> str:
    """One sentence."""
    first = schedules[0]
    tiles = ", ".join(f"{op.name} {op.tiles:,}" for op in first.operations)
    said = "; ".join(
        f"{SAID[s.way]} {s.end_us:.2f} us, SMs {percent(s.used)} used" for s in schedules
    )
    return f"Tiles on {first.n_sm:,} SMs ({tiles}): {said} [derived]."


def table(schedules: Sequence[Schedule]) -> Table:
    """Waves, the last wave, and the end of each operation in each of the ways."""
    first = schedules[0]
    ends = [s.ends() for s in schedules]
    rows = []
    for i, op in enumerate(first.operations):
        n = waves(op.tiles, first.n_sm)
        last = op.tiles - (n - 1) * first.n_sm
        rows.append(
            (
                op.name, f"{op.tiles:,}", f"{op.tile_us:.2f}", str(n), f"{last} of {first.n_sm}",
                *(f"{each[i]:.2f}" for each in ends),
            )
        )  # fmt: skip
    ideal = sum(op.work_us for op in first.operations) / first.n_sm
    rows.append(("SM-time used", "", "", "", "", *(percent(s.used) for s in schedules)))
    rows.append(("all SMs always busy", "", "", "", "", *(f"{ideal:.2f}" for _ in schedules)))
    head = ("operation", "tiles", "us a tile", "waves", "last wave")
    return Table((*head, *(f"end, {SAID[s.way]}, us" for s in schedules)), tuple(rows))


def joined(bars: Sequence[Bar]) -> list[Block]:
    """Tiles of one operation that touch, on one SM and then on neighbours, as blocks."""
    on_sm: dict[int, list[Block]] = defaultdict(list)
    for bar in sorted(bars, key=lambda b: (b.sm, b.begin)):
        mine = on_sm[bar.sm]
        if mine and mine[-1].op == bar.op and abs(mine[-1].end - bar.begin) < 1e-9:
            mine[-1] = mine[-1]._replace(end=bar.end)
        else:
            mine.append(Block(bar.op, bar.sm, 1, bar.begin, bar.end))
    out: list[Block] = []
    open_blocks: dict[tuple[int, float, float], int] = {}
    for block in (block for sm in sorted(on_sm) for block in on_sm[sm]):
        key = (block.op, round(block.begin, 9), round(block.end, 9))
        at = open_blocks.get(key, -1)
        if at >= 0 and out[at].sm + out[at].n_sm == block.sm:
            out[at] = out[at]._replace(n_sm=out[at].n_sm + 1)
        else:
            open_blocks[key] = len(out)
            out.append(block)
    return out


class _Picture:
    """Draws some schedules of the same operations."""

    def __init__(self, schedules: Sequence[Schedule]) -> None:
        self.schedules = schedules
        self.n_sm = schedules[0].n_sm
        self.row = min(max(PANEL / self.n_sm, LOWEST), TALLEST)
        self.panel = self.row * self.n_sm
        self.height = round(TOP + len(schedules) * (HEAD + self.panel + GAP) + AXIS)
        self.svg = Svg(WIDTH, self.height, summary(schedules))
        self.end = max(s.end_us for s in schedules)

    def x(self, us: float) -> float:
        return LEFT + us / self.end * (WIDTH - LEFT - RIGHT)

    def legend(self) -> None:
        names = [op.name for op in self.schedules[0].operations]
        for i, name in enumerate([*names, "idle"]):
            x = LEFT + i * 132
            fill = self.idle() if name == "idle" else self.fill(name)
            self.svg.rect(x, 12, 22, 15, fill, stroke=OUTLINE)
            if name != "idle":
                style = style_of(name)
                self.svg.text(x + 11, 24, style.letter, anchor="middle", color=style.ink)
            self.svg.text(x + 28, 24, name)

    def fill(self, op: str) -> str:
        style = style_of(op)
        return self.svg.fill(style.fill, style.pattern)

    def idle(self) -> str:
        return self.svg.fill("#ffffff", "diagonal", WAIT)

    def draw(self, schedule: Schedule, top: float) -> None:
        """One way: its name and time, its rows."""
        said = f"{SAID[schedule.way]}: {schedule.end_us:.2f} us, {percent(schedule.used)} used"
        self.svg.text(LEFT, top + 15, said, bold=True)
        top += HEAD
        width = self.x(schedule.end_us) - LEFT
        self.svg.rect(LEFT, top, width, self.panel, self.idle(), stroke=WAIT)
        if len(schedule.bars) <= MANY_BARS:
            blocks = [Block(b.op, b.sm, 1, b.begin, b.end) for b in schedule.bars]
        else:
            blocks = joined(schedule.bars)
        paths: dict[int, list[str]] = defaultdict(list)
        for block in blocks:
            x, y = self.x(block.begin), top + block.sm * self.row
            paths[block.op].append(rect_path(x, y, self.x(block.end) - x, self.row * block.n_sm))
        for op, data in sorted(paths.items()):
            name = schedule.operations[op].name
            self.svg.path("".join(data), self.fill(name), stroke=OUTLINE)
        for block in blocks:
            self.letter(block, schedule, top)
        labels = range(self.n_sm) if self.row >= LETTER else (0, self.n_sm - 1)
        for sm in dict.fromkeys(labels):
            y = top + (sm + 0.5) * self.row + 4
            self.svg.text(LEFT - 8, max(y, top + 8), f"SM {sm}", anchor="end", size=11)

    def letter(self, block: Block, schedule: Schedule, top: float) -> None:
        """The operation's letter, where there is room for it."""
        style = style_of(schedule.operations[block.op].name)
        x, end, height = self.x(block.begin), self.x(block.end), self.row * block.n_sm
        if end - x >= 12 and height >= LETTER:
            y = top + block.sm * self.row + height / 2 + 4
            self.svg.text((x + end) / 2, y, style.letter, anchor="middle", size=11, color=style.ink)

    def axis(self) -> None:
        bottom = self.height - AXIS
        for tick in ticks(0, self.end):
            x = self.x(tick)
            self.svg.rect(x, TOP - 6, 0.5, bottom - TOP + 8, GRID)
            self.svg.text(min(x, WIDTH - 30), bottom + 20, f"{tick:g} us", anchor="middle", size=11)

    def render(self) -> str:
        self.legend()
        self.axis()
        for i, schedule in enumerate(self.schedules):
            self.draw(schedule, TOP + i * (HEAD + self.panel + GAP))
        return self.svg.render()


def figure(schedules: Sequence[Schedule]) -> Figure:
    """Picture, sentence and table of several ways to do the same operations."""
    return Figure(_Picture(schedules).render(), summary(schedules), table(schedules), fits=True)
