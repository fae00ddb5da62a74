"""The calculator with sliders: ipywidgets around `model` and `render`, nothing computed here."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import ipywidgets

from mkref.widgets.hardware import BANDWIDTHS, Bandwidth, bandwidth
from mkref.widgets.light.model import speed_of_light
from mkref.widgets.light.render import context_text, figure

if TYPE_CHECKING:
    from mkref.config import NorthConfig
    from mkref.widgets.figure import Figure

__all__ = ["SpeedOfLightWidget"]

OWN = "own"
"""Choice of the drop-down list for a bandwidth that the user types."""
CONTEXTS = tuple(1024 << i for i in range(9))  # 1K to 256K


class SpeedOfLightWidget(ipywidgets.VBox):
    """Memory, context and batch to choose; the picture follows.

    Its notebook output carries the static figure too, which shows where there is no kernel.
    """

    def __init__(
        self, config: NorthConfig, *, name: str, context: int, batch: int, gpu: str
    ) -> None:
        self._config, self._name = config, name
        memory = bandwidth(gpu)
        wide = {"layout": {"width": "34em"}, "style": {"description_width": "10em"}}
        choices = [(f"{m.name} ({m.tb_per_s:g} TB/s)", m.key) for m in BANDWIDTHS.values()]
        self.memory = ipywidgets.Dropdown(
            options=[*choices, ("another: type it below", OWN)],
            value=gpu,
            description="memory",
            **wide,
        )
        self.own = ipywidgets.BoundedFloatText(
            value=memory.tb_per_s,
            min=0.001,
            max=1000,
            step=0.1,
            description="TB/s",
            disabled=True,
            **wide,
        )
        contexts = sorted({*CONTEXTS, context})
        self.context = ipywidgets.SelectionSlider(
            options=[(context_text(n), n) for n in contexts],
            value=context, description="context, tokens", continuous_update=False, **wide,
        )  # fmt: skip
        self.batch = ipywidgets.IntSlider(
            value=batch, min=1, max=8, description="batch, rows", continuous_update=False, **wide
        )
        self.view = ipywidgets.HTML(
            layout={"min_height": "340px"}
        )  # so that the page does not jump
        super().__init__([self.memory, self.own, self.context, self.batch, self.view])
        for control in (self.memory, self.own, self.context, self.batch):
            control.observe(self._update, names="value")
        self._update()

    @property
    def chosen(self) -> Bandwidth:
        """The bandwidth that the controls say."""
        if self.memory.value != OWN:
            return bandwidth(self.memory.value)
        return Bandwidth(OWN, "typed in", self.own.value, "quoted", "the user of the calculator")

    @property
    def figure(self) -> Figure:
        """What the controls say, as a static figure."""
        step = speed_of_light(self._config, context=self.context.value, batch=self.batch.value)
        return figure(step, self.chosen, self._name)

    def _update(self, _: Any = None) -> None:
        own = self.memory.value == OWN
        self.own.disabled = not own
        if not own:
            self.own.value = self.chosen.tb_per_s
        self.view.value = self.figure.html()

    def __repr__(self) -> str:
        return self.figure.text()

    def _repr_mimebundle_(self, **kwargs: Any) -> Any:
        return {**super()._repr_mimebundle_(**kwargs), **self.figure.bundle()}
