"""Draws a moment of a paged KV cache: pages of the pool by owner, tables, rows of the steps.

Pages: white is free, dotted a cache that nobody uses, coloured used; a page of several requests has
a number. What changed in this step has a thick frame. In tables a hatched entry is a page that went
back because the window has passed it. In the rows of the steps a cell with strokes fed a token of a
prompt, a filled one a token of an answer.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from mkref.widgets.kv.history import KINDS
from mkref.widgets.kv.looks import CACHED, look_of
from mkref.widgets.palette import GRID, INK, OUTLINE, WAIT
from mkref.widgets.svg import Svg, number, rect_path

if TYPE_CHECKING:
    from mkref.widgets.kv.history import Held
    from mkref.widgets.kv.model import KvView

__all__ = ["KvPicture"]

WIDTH, MARGIN = 900, 14
PAGE, GAP, PER_LINE = 22, 2, 18  # a page of the pool
MAX_PAGES = 180  # pages of a kind that are drawn one by one
TABLE_LEFT, ENTRY, ENTRY_HEIGHT, MAX_ENTRIES = 150, 28, 16, 25
STEP_LEFT, STEP_HEIGHT = 74, 16
DIGIT = 6  # width of a digit of size 10, with some air
SHARED_MARK = "x"


class KvPicture:
    """The picture of one view.

    Attributes:
        svg: the document.
        regions: places that can be clicked: x, y, width, height and what they are: `request 0`
            or `step 12`.
    """

    def __init__(self, view: KvView, title: str) -> None:
        self.view, self.history = view, view.history
        self.regions: list[tuple[float, float, float, float, str]] = []
        self.numbers = {name: i for i, name in enumerate(self.history.names)}
        n_pages = [n for n in self.history.n_pages if n <= MAX_PAGES]
        lines = max((-(-n // PER_LINE) for n in n_pages), default=1)
        self.tables_top = 66 + max(lines * (PAGE + GAP), 40) + 34
        most = max((len(moment.running) for moment in self.history.moments), default=0)
        self.steps_top = self.tables_top + 24 + max(most, 1) * (2 * ENTRY_HEIGHT + 12) + 24
        rows_end = self.steps_top + 24 + (self.history.n_rows + 1) * (STEP_HEIGHT + 2)
        self._svg = Svg(WIDTH, rows_end + 58, title)
        self._head()
        for kind in range(len(KINDS)):
            self._pool(kind)
        self._tables()
        self._steps()
        self._legend(rows_end + 32)
        self.svg = self._svg.render()

    def fill(self, name: str) -> str:
        """The fill of a request."""
        style = look_of(self.numbers[name], name)
        return self._svg.fill(style.fill, style.pattern)

    def letter(self, name: str, x: float, y: float, size: int = 11) -> None:
        """A request's letter on its colour."""
        style = look_of(self.numbers[name], name)
        if style.pattern != "plain":
            self._svg.rect(x - 6, y - 9, 12, 11, style.fill)
        self._svg.text(x, y, style.letter, size=size, anchor="middle", color=style.ink)

    def frame(self, x: float, y: float, w: float, h: float, width: float = 2.5) -> None:
        """A thick dark frame."""
        self._svg.path(rect_path(x, y, w, h), "none", stroke=INK, width=width)

    def dots(self) -> str:
        """What is cached."""
        return self._svg.fill(CACHED, "dots")

    def hatched(self) -> str:
        """What was given back."""
        return self._svg.fill("#ffffff", "diagonal", WAIT)

    def _head(self) -> None:
        view = self.view
        last = len(self.history.moments) - 1
        self._svg.text(MARGIN, 26, f"step {view.at} of 0 to {last}", size=18, bold=True)
        moment = view.moment
        said = f"{len(moment.running)} running, {len(moment.waiting)} waiting"
        self._svg.text(WIDTH - MARGIN, 24, said, anchor="end")

    # the pool

    def _pool(self, kind: int) -> None:
        view, left = self.view, MARGIN + kind * (WIDTH // 2)
        sums = view.sums(kind)
        text = (
            f"{KINDS[kind]} pages: {sums.used} used, {sums.shared} shared, "
            f"{sums.cached} cached, {sums.free} free"
        )
        self._svg.text(left, 56, text, bold=True)
        if self.history.n_pages[kind] > MAX_PAGES:
            self._pool_bar(kind, left)
            return
        owners, cached = view.moment.owners(kind), set(view.moment.cached[kind])
        for page in range(self.history.n_pages[kind]):
            x = left + page % PER_LINE * (PAGE + GAP)
            y = 66 + page // PER_LINE * (PAGE + GAP)
            names = owners.get(page, [])
            if names:
                self._used(names, x, y)
            else:
                fill = self.dots() if page in cached else "#ffffff"
                self._svg.rect(x, y, PAGE, PAGE, fill, stroke=OUTLINE if page in cached else WAIT)
            changed = page in view.changes.taken[kind] or page in view.changes.given[kind]
            if changed or (view.selected and view.selected in names):
                self.frame(x, y, PAGE, PAGE)

    def _used(self, names: list[str], x: float, y: float) -> None:
        """A page in the colours of all that use it, as far as there is room for stripes."""
        shown = names[:4]
        for i, name in enumerate(shown):
            part = PAGE / len(shown)
            self._svg.rect(x + i * part, y, part, PAGE, self.fill(name), stroke=OUTLINE)
        if len(names) == 1:
            self.letter(names[0], x + PAGE / 2, y + 15)
            self.regions.append((x, y, PAGE, PAGE, f"request {self.numbers[names[0]]}"))
        else:
            self._svg.rect(x + 3, y + 5, PAGE - 6, 12, "#ffffff")
            text = f"{SHARED_MARK}{len(names)}"
            self._svg.text(x + PAGE / 2, y + 15, text, size=10, anchor="middle")

    def _pool_bar(self, kind: int, left: float) -> None:
        """A large pool as one bar: shared pages count for the first that uses them."""
        width = WIDTH / 2 - 2 * MARGIN
        owners = self.view.moment.owners(kind)
        total, x = self.history.n_pages[kind], left
        for name in self.history.names:
            n = sum(names[0] == name for names in owners.values())
            if not n:
                continue
            part = width * n / total
            self._svg.rect(x, 66, part, 28, self.fill(name), stroke=OUTLINE)
            if part > 14:
                self.letter(name, x + part / 2, 85)
            self.regions.append((x, 66, part, 28, f"request {self.numbers[name]}"))
            x += part
        part = width * len(self.view.moment.cached[kind]) / total
        self._svg.rect(x, 66, part, 28, self.dots(), stroke=OUTLINE)
        self._svg.rect(left, 66, width, 28, "none", stroke=OUTLINE)

    # page tables

    def _tables(self) -> None:
        self._svg.text(MARGIN, self.tables_top, "page tables", bold=True)
        for i, held in enumerate(self.view.moment.running):
            self._table(held, self.tables_top + 12 + i * (2 * ENTRY_HEIGHT + 12))

    def _table(self, held: Held, y: float) -> None:
        self._svg.rect(MARGIN, y + 2, 20, 18, self.fill(held.name), stroke=OUTLINE)
        self.letter(held.name, MARGIN + 10, y + 15)
        self._svg.text(MARGIN + 28, y + 15, f"{held.tokens} tokens", size=11)
        self.regions.append((MARGIN, y, 90, 32, f"request {self.numbers[held.name]}"))
        if held.name == self.view.selected:
            self.frame(MARGIN - 3, y - 1, WIDTH - 2 * MARGIN + 6, 2 * ENTRY_HEIGHT + 6, 1.5)
        n = max(held.begin[kind] + len(held.pages[kind]) for kind in range(len(KINDS)))
        first = max(0, n - MAX_ENTRIES)
        for kind, name in enumerate(KINDS):
            if not self.history.n_pages[kind]:
                continue
            top = y + kind * (ENTRY_HEIGHT + 2)
            self._svg.text(TABLE_LEFT - 8, top + 12, name, size=10, anchor="end")
            for entry in range(first, n):
                x = TABLE_LEFT + (entry - first) * (ENTRY + 1)
                self._entry(held, kind, entry, x, top)
        if first:
            self._svg.text(MARGIN + 28, y + 30, f"{first} before", size=10)

    def _entry(self, held: Held, kind: int, entry: int, x: float, y: float) -> None:
        at = entry - held.begin[kind]
        if at < 0:
            self._svg.rect(x, y, ENTRY, ENTRY_HEIGHT, self.hatched(), stroke=GRID)
            return
        if at >= len(held.pages[kind]):
            return
        page = held.pages[kind][at]
        self._svg.rect(x, y, ENTRY, ENTRY_HEIGHT, self.fill(held.name), stroke=OUTLINE)
        style = look_of(self.numbers[held.name], held.name)
        if style.pattern != "plain":
            self._svg.rect(x + 4, y + 2, ENTRY - 8, ENTRY_HEIGHT - 4, style.fill)
        self._svg.text(x + ENTRY / 2, y + 12, str(page), size=10, anchor="middle", color=style.ink)
        if page in self.view.changes.taken[kind]:
            self.frame(x, y, ENTRY, ENTRY_HEIGHT, 2)

    # rows of the steps

    def _steps(self) -> None:
        view, top = self.view, self.steps_top
        self._svg.text(MARGIN, top, "rows of each step", bold=True)
        steps = view.steps
        width = (WIDTH - STEP_LEFT - MARGIN) / len(steps)
        width = min(width, 40)
        first = top + 12
        for row in range(self.history.n_rows):
            y = first + row * (STEP_HEIGHT + 2)
            self._svg.text(STEP_LEFT - 8, y + 12, f"row {row}", size=10, anchor="end")
        y_waiting = first + self.history.n_rows * (STEP_HEIGHT + 2)
        self._svg.text(STEP_LEFT - 8, y_waiting + 12, "waiting", size=10, anchor="end")
        height = y_waiting + STEP_HEIGHT - first
        free: float = STEP_LEFT  # where the next number of who waits has room
        for i, step in enumerate(steps):
            x, moment = STEP_LEFT + i * width, self.history.moments[step]
            self.regions.append((x, first - 4, width, height + 24, f"step {step}"))
            for row, use in enumerate(moment.rows):
                box = (x, first + row * (STEP_HEIGHT + 2), width - 0.8, STEP_HEIGHT)
                before = self.history.moments[step - 1].rows if i else ()
                same = row < len(before) and before[row].name == use.name
                turns = not same or before[row].is_prompt != use.is_prompt
                self._use(use.name, use.is_prompt, box, letter=turns or step % 10 == 0)
            said, middle = str(len(moment.waiting) or ""), x + width / 2
            if said and middle - DIGIT * len(said) / 2 >= free:  # else they touch
                self._svg.text(middle, y_waiting + 12, said, size=10, anchor="middle")
                free = middle + DIGIT * len(said) / 2
            if step % 10 == 0 or len(steps) <= 12:
                label_y = y_waiting + STEP_HEIGHT + 12
                self._svg.text(x + width / 2, label_y, str(step), size=10, anchor="middle")
        x = STEP_LEFT + (view.at - steps[0]) * width
        self.frame(x - 1, first - 3, width + 1, height + 4)

    def _use(
        self,
        name: str,
        is_prompt: bool,
        box: tuple[float, float, float, float],
        *,
        letter: bool = True,
    ) -> None:
        """A row's cell: filled for an answer, strokes of the same colour for a prompt."""
        x, y, width, height = box
        style = look_of(self.numbers[name], name)
        if is_prompt:
            lines = "".join(
                f"M{number(x + k)} {number(y + height)}L{number(min(x + k + 5, x + width))} "
                f"{number(y)}"
                for k in range(0, max(int(width) - 1, 1), 3)
            )
            self._svg.path(lines, "none", stroke=style.fill, width=1.6)
            self._svg.rect(*box, "none", stroke=OUTLINE)
        else:
            self._svg.rect(*box, self._svg.fill(style.fill, style.pattern), stroke=OUTLINE)
        if width >= 11 and letter:
            if is_prompt or style.pattern != "plain":
                plate = "#ffffff" if is_prompt else style.fill
                self._svg.rect(x + width / 2 - 4.5, y + 3, 9, height - 6, plate)
            ink = INK if is_prompt else style.ink
            self._svg.text(x + width / 2, y + 12, style.letter, size=10, anchor="middle", color=ink)

    def _legend(self, y: float) -> None:
        entries = (
            ("#ffffff", WAIT, 0.5, "free"),
            (self.dots(), OUTLINE, 0.5, "cached"),
            ("#ffffff", INK, 2.5, "changed in this step"),
            (self.hatched(), GRID, 0.5, "given back: behind the window"),
        )
        x: float = MARGIN
        for fill, stroke, width, name in entries:
            self._svg.path(rect_path(x, y, 18, 14), fill, stroke=stroke, width=width)
            self._svg.text(x + 24, y + 11, name, size=11)
            x += 40 + 6.8 * len(name)
        for is_prompt, name in ((True, "prompt"), (False, "answer")):
            if self.history.names:
                self._use(self.history.names[0], is_prompt, (x, y, 22, 14))
            self._svg.text(x + 28, y + 11, f"feeds the {name}", size=11)
            x += 44 + 6.8 * (len(name) + 10)
