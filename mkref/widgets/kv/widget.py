"""The KV view with a slider for the step, keys and clicks; nothing is decided here."""

from __future__ import annotations

from typing import TYPE_CHECKING

from mkref.widgets.kv.model import KvView, kv_view
from mkref.widgets.kv.picture import KvPicture
from mkref.widgets.kv.render import figure, summary
from mkref.widgets.live import Action, Range, Stage

if TYPE_CHECKING:
    from mkref.widgets.figure import Figure
    from mkref.widgets.kv.history import History

__all__ = ["KvWidget"]

JUMP = 10
ACTIONS = (
    Action("next", ".", "the next step", "step \u25b6"),
    Action("before", ",", "the step before", "\u25c0 step"),
    Action("event", "d", "on to the next step in which a page or a request changes", "next change"),
    Action("event_before", "a", "back to the last such step", "change before"),
    Action("right", "arrowright", f"{JUMP} steps on"),
    Action("left", "arrowleft", f"{JUMP} steps back"),
    Action("first", "0", "the first step", "first"),
    Action("last", "e", "the last step", "last"),
    Action("down", "arrowdown", "select the next request"),
    Action("up", "arrowup", "select the request before"),
    Action("nothing", "escape", "select nothing"),
)
MOUSE = "a click on a request or its page selects it, a click on a column of rows goes there"


class KvWidget(Stage):
    """A session of a paged KV cache and its batch, step by step.

    Args:
        history: of the session.
        at: the step shown at first, as in `kv_view`.

    Attributes:
        at: the step shown.
        selected: the request that stands out, or "".
    """

    def __init__(self, history: History, at: int | None = None) -> None:
        self.history = history
        self.at, self.selected = kv_view(history, at).at, ""
        most = len(history.moments) - 1
        super().__init__("KV cache and batch", ACTIONS, [Range("step", "step", most)], MOUSE)

    @property
    def shown(self) -> KvView:
        """What is shown."""
        return kv_view(self.history, self.at, self.selected)

    @property
    def static(self) -> Figure:
        """The same as a static figure."""
        return figure(self.shown)

    def picture(self) -> tuple[str, list[tuple[float, float, float, float, str]]]:
        """The SVG; requests, pages and steps can be clicked."""
        picture = KvPicture(self.shown, summary(self.shown))
        return picture.svg, picture.regions

    def positions(self) -> dict[str, int]:
        """The slider of the step."""
        return {"step": self.at}

    def act(self, name: str, value: int) -> None:
        """Go to a step, or select a request."""
        last = len(self.history.moments) - 1
        moves = {"next": 1, "before": -1, "right": JUMP, "left": -JUMP}
        if name in moves:
            self.at = min(max(self.at + moves[name], 0), last)
        elif name == "step":
            self.at = value
        elif name in ("first", "last"):
            self.at = 0 if name == "first" else last
        elif name in ("event", "event_before"):
            self.at = self._event(1 if name == "event" else -1)
        elif name == "request":
            self.selected = self.history.names[value]
        elif name == "nothing":
            self.selected = ""
        elif name in ("down", "up") and self.history.names:
            self._select(1 if name == "down" else -1)

    def _event(self, by: int) -> int:
        """The next moment in some direction in which something happened; else where it is."""
        at = self.at + by
        while 0 <= at < len(self.history.moments):
            if at == 0 or kv_view(self.history, at).changes.said:
                return at
            at += by
        return self.at

    def _select(self, by: int) -> None:
        """Another of the requests that run now, in a circle."""
        names = [held.name for held in self.history.moments[self.at].running]
        if names:
            at = names.index(self.selected) + by if self.selected in names else 0
            self.selected = names[at % len(names)]
