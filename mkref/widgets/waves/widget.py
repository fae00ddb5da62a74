"""Waves with sliders: ipywidgets around `scenes`, `model` and `render`, nothing computed here."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import ipywidgets

from mkref.widgets.waves.model import WAYS, schedule
from mkref.widgets.waves.render import figure
from mkref.widgets.waves.scenes import SCENES, operations

if TYPE_CHECKING:
    from mkref.config import NorthConfig
    from mkref.widgets.figure import Figure
    from mkref.widgets.waves.model import Operation

__all__ = ["WavesWidget"]

MOST_TILES, MOST_SMS = 600, 160


class WavesWidget(ipywidgets.VBox):
    """What to do, on how many SMs, what a boundary costs; the three ways to do it follow.

    Its notebook output carries the static figure too, which shows where there is no kernel.
    """

    def __init__(
        self, config: NorthConfig, *, scene: str, tiles: int, n_sm: int, tile_us: float,
        boundary_us: float, hand_over_us: float, context: int, tb_per_s: float,
    ) -> None:  # fmt: skip
        self._config, self._context, self._tb_per_s = config, context, tb_per_s
        wide = {"layout": {"width": "36em"}, "style": {"description_width": "12em"}}
        late = {"continuous_update": False, **wide}
        # A slider, because JupyterLab takes the arrow keys away from a list.
        self.scene = ipywidgets.SelectionSlider(
            options=[*SCENES], value=scene, description="scene", **late
        )
        self.meaning = ipywidgets.Label()
        self.tiles = ipywidgets.IntSlider(
            value=tiles, min=1, max=max(MOST_TILES, tiles), description="tiles per operation",
            **late,
        )  # fmt: skip
        self.n_sm = ipywidgets.IntSlider(
            value=n_sm, min=1, max=max(MOST_SMS, n_sm), description="SMs", **late
        )
        self.tile_us = ipywidgets.FloatSlider(
            value=tile_us, min=0.1, max=max(10.0, tile_us), step=0.1, description="tile, us",
            **late,
        )  # fmt: skip
        self.boundary_us = ipywidgets.FloatSlider(
            value=boundary_us, min=0, max=max(10.0, boundary_us), step=0.1,
            description="boundary, us", **late,
        )  # fmt: skip
        self.hand_over_us = ipywidgets.FloatSlider(
            value=hand_over_us, min=0, max=max(10.0, hand_over_us), step=0.1,
            description="hand-over, us", **late,
        )  # fmt: skip
        self.view = ipywidgets.HTML(layout={"min_height": "420px"})
        controls = (
            self.scene, self.tiles, self.n_sm, self.tile_us, self.boundary_us, self.hand_over_us
        )  # fmt: skip
        super().__init__([ipywidgets.HBox([self.scene, self.meaning]), *controls[1:], self.view])
        for control in controls:
            control.observe(self._update, names="value")
        self._update()

    @property
    def operations(self) -> list[Operation]:
        """What the controls say."""
        share = self._tb_per_s * 1e6 / self.n_sm.value  # bytes per us of one SM
        return operations(
            self.scene.value, self._config, self.tiles.value, self.tile_us.value, self._context,
            share,
        )  # fmt: skip

    @property
    def figure(self) -> Figure:
        """The three ways, as a static figure."""
        times = {"boundary_us": self.boundary_us.value, "hand_over_us": self.hand_over_us.value}
        each = self.operations
        return figure([schedule(each, self.n_sm.value, way, **times) for way in WAYS])

    def _update(self, _: Any = None) -> None:
        self.meaning.value = SCENES[self.scene.value]
        # Tiles of the layer follow from the model.
        self.tiles.disabled = self.tile_us.disabled = self.scene.value == "layer"
        self.view.value = self.figure.html()

    def __repr__(self) -> str:
        return self.figure.text()

    def _repr_mimebundle_(self, **kwargs: Any) -> Any:
        return {**super()._repr_mimebundle_(**kwargs), **self.figure.bundle()}
