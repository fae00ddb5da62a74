"""What live views share: the static figure beside them, and a stage that shows Python's pictures.

`Live` adds the static form to a widget's notebook output, for readers without a kernel. `Stage` is
for views whose every picture is drawn in Python: the browser shows it, and tells Python which key,
button or place in the picture was chosen. Nothing is fetched: script and style come from the files
beside this one. Whoever derives from these takes `traitlets` from here, so that nothing of it is
imported where anywidget is missing.
"""

from __future__ import annotations

from base64 import b64encode
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import anywidget
import traitlets

if TYPE_CHECKING:
    from mkref.widgets.figure import Figure, Table

__all__ = ["Action", "Live", "Range", "Stage", "script", "style", "traitlets"]

HERE = Path(__file__).resolve().parent


def script(*files: Path) -> str:
    """The script of a live view: its own files behind what all have in common."""
    return "\n".join(f.read_text(encoding="utf-8") for f in (HERE / "element.js", *files))


def style(file: Path) -> str:
    """The style of a live view: its own behind what all have in common."""
    return "\n".join(f.read_text(encoding="utf-8") for f in (HERE / "widget.css", file))


class Live(anywidget.AnyWidget):
    """A widget whose notebook output carries a static figure too."""

    @property
    def static(self) -> Figure:
        """The figure that stands in for it."""
        raise AttributeError("a live view has a static figure of its own")

    def __repr__(self) -> str:
        return self.static.text()

    def _repr_mimebundle_(self, **kwargs: Any) -> Any:
        shown = super()._repr_mimebundle_(**kwargs)
        if shown is None:  # anywidget is told to be silent
            return self.static.bundle()
        data, metadata = shown if isinstance(shown, tuple) else (shown, {})
        return {**data, **self.static.bundle()}, metadata


@dataclass(frozen=True)
class Action:
    """Something that one can do.

    Attributes:
        name: what Python is told.
        key: that does it; as `KeyboardEvent.key`, in lower case.
        text: what it does, for the list of keys.
        button: what its button says; "" for none.
    """

    name: str
    key: str
    text: str
    button: str = ""


@dataclass(frozen=True)
class Range:
    """A slider: Python is told its name and its number."""

    name: str
    label: str
    most: int


class Stage(Live):
    """A picture with keys, buttons, sliders and places to click; press `?` on it for the list.

    Those who derive from it draw in `picture` and act in `act`.
    """

    _esm = script(HERE / "stage.js")
    _css = style(HERE / "stage.css")
    meta = traitlets.Dict().tag(sync=True)
    view = traitlets.Dict().tag(sync=True)

    def __init__(
        self, name: str, actions: Sequence[Action], ranges: Sequence[Range], mouse: str
    ) -> None:
        self._actions = {action.name for action in actions}
        self._ranges = {each.name: each for each in ranges}
        self._n_shown = 0
        super().__init__(
            meta={
                "name": name,
                "actions": [vars(action) for action in actions],
                "ranges": [vars(each) for each in ranges],
                "mouse": mouse,
            },
            view={},
        )
        self.on_msg(self._hear)
        self.show()

    def act(self, name: str, value: int) -> None:
        """Do something: an action, a slider with its value, or a place such as `task` 12."""
        raise AttributeError(f"{type(self).__name__} does nothing when told {name} {value}")

    def picture(self) -> tuple[str, list[tuple[float, float, float, float, str]]]:
        """The SVG, and places in it: x, y, width, height, and a name with a number."""
        raise AttributeError(f"{type(self).__name__} has no picture")

    def more_tables(self) -> list[tuple[str, Table]]:
        """Tables besides the figure's, each with a name."""
        return []

    def pressed(self) -> dict[str, bool]:
        """Actions that switch something on or off, and whether it is on."""
        return {}

    def positions(self) -> dict[str, int]:
        """Where the sliders stand."""
        return {}

    def show(self) -> None:
        """Draw again."""
        svg, regions = self.picture()
        figure = self.static
        tables = [("The same as a table", figure.table), *self.more_tables()]
        self._n_shown += 1
        self.view = {
            "number": self._n_shown,  # so that the browser hears of it, even if nothing changed
            "image": "data:image/svg+xml;base64," + b64encode(svg.encode()).decode(),
            "said": figure.summary,
            "regions": [list(region) for region in regions],
            "tables": [[name, table.html()] for name, table in tables],
            "pressed": self.pressed(),
            "positions": self.positions(),
        }

    def _hear(self, _: Any, content: Any, __: Any) -> None:
        """What the browser says; anything but what the stage offers is passed over."""
        name, value = content.get("do"), content.get("value", 0)
        if not isinstance(name, str) or not isinstance(value, int):
            return
        if name in self._ranges:
            value = min(max(value, 0), self._ranges[name].most)
        elif name not in self._actions:
            places = {region[4] for region in self.picture()[1]}
            if f"{name} {value}" not in places:
                return
        self.act(name, value)
        self.show()
