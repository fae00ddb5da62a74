"""The rings with controls: ipywidgets around `model` and `render`, nothing computed here."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import ipywidgets

from mkref.widgets.ring.model import ring_view
from mkref.widgets.ring.render import figure

if TYPE_CHECKING:
    from mkref.trace.events import Trace
    from mkref.widgets.figure import Figure

__all__ = ["RingWidget"]

SPREAD = -1
"""Choice of the drop-down list for some SMs of the whole machine."""


class RingWidget(ipywidgets.VBox):
    """One SM or some, and a stretch of time to choose; the picture follows.

    Its notebook output carries the static figure too, which shows where there is no kernel.
    """

    def __init__(self, trace: Trace, title: str = "") -> None:
        self._trace, self._title = trace, title
        view = ring_view(trace)
        wide = {"layout": {"width": "44em"}, "style": {"description_width": "10em"}}
        self.sm = ipywidgets.Dropdown(
            options=[("spread over the machine", SPREAD)]
            + [(f"SM {sm}", sm) for sm in view.stages.sms],
            value=SPREAD, description="SMs", **wide,
        )  # fmt: skip
        first, last = view.begin / 1e3, max(trace.span_ns, view.end) / 1e3
        self.window = ipywidgets.FloatRangeSlider(
            value=(first, view.end / 1e3), min=first, max=last, step=(last - first) / 1e3,
            description="from, to (us)", readout_format=".1f", continuous_update=False, **wide,
        )  # fmt: skip
        self.view = ipywidgets.HTML(
            layout={"min_height": "500px"}
        )  # so that the page does not jump
        super().__init__([self.sm, self.window, self.view])
        for control in (self.sm, self.window):
            control.observe(self._update, names="value")
        self._update()

    @property
    def figure(self) -> Figure:
        """What the controls say, as a static figure."""
        begin, end = (round(us * 1e3) for us in self.window.value)
        sms = None if self.sm.value == SPREAD else [self.sm.value]
        begin = max(begin, self._trace.stages.begin if self._trace.stages else 0)
        view = ring_view(self._trace, sms=sms, window=(begin, max(end, begin + 1)))
        return figure(view, self._title)

    def _update(self, _: Any = None) -> None:
        self.view.value = self.figure.html()

    def __repr__(self) -> str:
        return self.figure.text()

    def _repr_mimebundle_(self, **kwargs: Any) -> Any:
        return {**super()._repr_mimebundle_(**kwargs), **self.figure.bundle()}
