"""The plan explorer with keys, buttons and clicks: a walk, a layer, a selected task.

Nothing is decided here: `walk` goes, `model` and `render` show.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from mkref.widgets.live import Action, Range, Stage
from mkref.widgets.plan.model import PlanView
from mkref.widgets.plan.picture import PlanPicture
from mkref.widgets.plan.progress import NOTHING
from mkref.widgets.plan.render import figure, states_table, summary
from mkref.widgets.plan.walk import PlanWalk

if TYPE_CHECKING:
    from mkref.plan.build import Plan
    from mkref.widgets.figure import Figure, Table
    from mkref.widgets.plan.walk import Works

__all__ = ["PlanExplorer"]

ACTIONS = (
    Action("forward", ".", "one task on", "task \u25b6"),
    Action("back", ",", "one task back", "\u25c0 task"),
    Action("run_layer", "r", "on to the end of the layer shown", "run layer"),
    Action("run_all", "e", "on to the end of the step", "to the end"),
    Action("restart", "0", "back to the start", "to the start"),
    Action("random", "x", "who goes next: in turns, or drawn at random", "random order"),
    Action("go", "enter", "let the SM of the selected task go"),
    Action("layer_up", "d", "show the next layer"),
    Action("layer_down", "a", "show the layer before"),
    Action("right", "arrowright", "select the next task of the SM"),
    Action("left", "arrowleft", "select the task before"),
    Action("down", "arrowdown", "select a task of the next SM"),
    Action("up", "arrowup", "select a task of the SM before"),
    Action("nothing", "escape", "select nothing"),
)
MOUSE = "a click on a task selects it, a click on the name of an SM lets that SM go"


class PlanExplorer(Stage):
    """One layer of a plan as a graph and as lists, while a step walks through it.

    Args:
        plan: to explore.
        layer: shown at first.
        works: computes every task; None: only counters move.

    Attributes:
        walk: moments of the step; it can be moved from Python, then call `show`.
        layer: the layer shown.
        selected: number of the selected task in the plan, or -1.
    """

    def __init__(self, plan: Plan, *, layer: int = 0, works: Works | None = None) -> None:
        self.walk = PlanWalk(plan, works)
        self.layer, self.selected = layer, NOTHING
        most = plan.config.num_hidden_layers
        super().__init__("Plan explorer", ACTIONS, [Range("layer", "layer", most)], MOUSE)

    @property
    def shown(self) -> PlanView:
        """What is shown."""
        works, moment = self.walk.works, self.walk.moment
        over = works is not None and self.walk.progress.is_over(moment)
        tokens = works.tokens() if works is not None and over else ()
        return PlanView(
            self.walk.progress, self.layer, moment, self.selected, tokens, works is not None
        )

    @property
    def static(self) -> Figure:
        """The same as a static figure."""
        return figure(self.shown)

    def picture(self) -> tuple[str, list[tuple[float, float, float, float, str]]]:
        """The SVG; tasks and SMs can be clicked."""
        picture = PlanPicture(self.shown, summary(self.shown))
        return picture.svg, picture.regions

    def more_tables(self) -> list[tuple[str, Table]]:
        """Who waits for whom."""
        return [("Who waits for whom", states_table(self.shown))]

    def pressed(self) -> dict[str, bool]:
        """The order is a switch."""
        return {"random": self.walk.random_order}

    def positions(self) -> dict[str, int]:
        """The slider of the layer."""
        return {"layer": self.layer}

    def act(self, name: str, value: int) -> None:
        """Walk, choose a layer, or select."""
        walk = self.walk
        if name == "layer":
            self.layer = value
        elif name in ("layer_up", "layer_down"):
            most = walk.progress.plan.config.num_hidden_layers
            self.layer = min(max(self.layer + (1 if name == "layer_up" else -1), 0), most)
        elif name == "random":
            walk.random_order = not walk.random_order
        elif name == "nothing":
            self.selected = NOTHING
        elif name == "task":
            self.selected = value
        elif name in ("left", "right", "up", "down"):
            self._move(name)
        else:
            self._walk(name, value)

    def _walk(self, name: str, value: int) -> None:
        walk, progress = self.walk, self.walk.progress
        if name == "forward":
            walk.forward()
        elif name == "back":
            walk.back()
        elif name == "sm":
            walk.forward(value)
        elif name == "go" and self.selected != NOTHING:
            walk.forward(progress.sm_of[self.selected])
        elif name == "run_layer":
            walk.run_layer(self.layer)
        elif name == "run_all":
            walk.run_all()
        elif name == "restart":
            walk.restart()
        last = walk.moment.last
        self.layer = 0 if last == NOTHING else progress.tasks[last].layer

    def _move(self, where: str) -> None:
        """Select a neighbour: in the list, or at the same place of the layer on another SM."""
        progress = self.walk.progress
        rows = progress.lists(self.layer)
        at = next(((i, row.index(self.selected)) for i, row in enumerate(rows)
                   if self.selected in row), None)  # fmt: skip
        if at is None:
            self.selected = next((row[0] for row in rows if row), NOTHING)
            return
        sm, place = at
        sm = min(max(sm + {"up": -1, "down": 1}.get(where, 0), 0), len(rows) - 1)
        place += {"left": -1, "right": 1}.get(where, 0)
        if rows[sm]:
            self.selected = rows[sm][min(max(place, 0), len(rows[sm]) - 1)]
