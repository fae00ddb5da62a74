"""Widgets: pictures of what the rest of mkref computes, to play with in JupyterLab.

Each is three layers: a pure model (`model`), a static picture with text and a table (`render`), and
a thin interactive shell (`widget`), the only one that needs ipywidgets. Where that is not installed
the functions below return the static picture. Nothing here needs a network or keeps widget state.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from mkref.config import NORTH_MINI_CODE

if TYPE_CHECKING:
    from mkref.config import NorthConfig
    from mkref.trace.events import Trace

__all__ = ["ring_occupancy", "sm_timeline", "speed_of_light"]


def speed_of_light(
    config: NorthConfig = NORTH_MINI_CODE,
    *,
    name: str = "North Mini Code",
    context: int = 8192,
    batch: int = 1,
    gpu: str = "h100",
) -> Any:
    """The speed-of-light calculator: bytes that a decode step reads, and how long that takes.

    Args:
        config: geometry of the model.
        name: what the picture calls it.
        context: tokens in the cache of each row, at first.
        batch: rows of the batch, at first.
        gpu: key of `mkref.widgets.hardware.BANDWIDTHS`, at first.

    Returns:
        A widget, or a `Figure` where ipywidgets is not installed.
    """
    from mkref.widgets.hardware import bandwidth
    from mkref.widgets.light.model import speed_of_light as model
    from mkref.widgets.light.render import figure

    chosen = bandwidth(gpu)
    try:
        from mkref.widgets.light.widget import SpeedOfLightWidget
    except ImportError:
        return figure(model(config, context=context, batch=batch), chosen, name)
    return SpeedOfLightWidget(config, name=name, context=context, batch=batch, gpu=gpu)


def sm_timeline(trace: Trace, *, title: str = "") -> Any:
    """The timeline of one step: a row per SM, a bar per task, hatched where the SM waits.

    Args:
        trace: a recorded or live trace.
        title: first words of the caption; default: the machine in the trace's provenance.

    Returns:
        A widget, or a `Figure` where anywidget is not installed.
    """
    from mkref.widgets.timeline.model import timeline
    from mkref.widgets.timeline.render import figure

    try:
        from mkref.widgets.timeline.widget import SmTimelineWidget
    except ImportError:
        return figure(timeline(trace), title)
    return SmTimelineWidget(trace, title)


def ring_occupancy(trace: Trace, *, title: str = "") -> Any:
    """The rings of a step over time: what each holds, what is on its way, bytes in flight of all.

    Args:
        trace: a recorded or live trace with stages.
        title: first words of the caption; default: the machine in the trace's provenance.

    Returns:
        A widget, or a `Figure` where ipywidgets is not installed.

    Raises:
        RequestError: a trace without stages.
    """
    from mkref.widgets.ring.model import ring_view
    from mkref.widgets.ring.render import figure

    try:
        from mkref.widgets.ring.widget import RingWidget
    except ImportError:
        return figure(ring_view(trace), title)
    return RingWidget(trace, title)
