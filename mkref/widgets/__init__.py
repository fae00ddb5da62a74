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
    from mkref.plan.build import Plan
    from mkref.plan.interpret import Interpreter
    from mkref.trace.events import Trace
    from mkref.widgets.kv.history import History

__all__ = ["paged_kv", "plan_explorer", "ring_occupancy", "sm_timeline", "speed_of_light"]
__all__ += ["wave_quantization"]


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


def sm_timeline(
    trace: Trace,
    other: Trace | None = None,
    *,
    title: str = "",
    other_title: str = "",
    selected: int = -1,
    path: bool = False,
) -> Any:
    """The timeline of one step: a row per SM, a bar per task, hatched where the SM waits.

    With another run, for instance a simulated one, both share the picture: A over B on every SM.

    Args:
        trace: a recorded, live or simulated trace.
        other: a run to compare it with.
        title: first words of the caption; default: the machine in the trace's provenance.
        other_title: the same of the other run.
        selected: number of a task of `trace` whose dependencies are shown at first.
        path: show the critical path at first.

    Returns:
        A widget, or a `Figure` where anywidget is not installed.

    Raises:
        RequestError: no such task.
    """
    from mkref.widgets.timeline.compare import pair
    from mkref.widgets.timeline.model import timeline
    from mkref.widgets.timeline.render import figure, figure_of_pair

    titles = (title, other_title)
    try:
        from mkref.widgets.timeline.widget import SmTimelineWidget
    except ImportError:
        if other is None:
            return figure(timeline(trace, selected=selected, path=path), title)
        return figure_of_pair(pair(trace, other, selected=selected, path=path), titles)
    return SmTimelineWidget(trace, other, titles, selected=selected, path=path)


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


def plan_explorer(
    plan: Plan, *, layer: int = 0, interpreter: Interpreter | None = None, rows: int = 1
) -> Any:
    """A plan as a graph and as lists, while a step walks through it task by task.

    Args:
        plan: of any size; a large one is shown with equal SMs together.
        layer: shown at first; the number of layers stands for what comes after the last.
        interpreter: of this plan, with weights and inputs, for instance that of an engine on the
            machine "interpreter" which has answered something: then every task is computed, in
            copies of its buffers. None: only the counters move.
        rows: of the batch that the interpreter computes.

    Returns:
        A widget, or a `Figure` of the start where anywidget is not installed.

    Raises:
        RequestError: the plan has no such layer.
    """
    from mkref.plan.walk import Walk
    from mkref.widgets.plan.model import PlanView
    from mkref.widgets.plan.progress import Progress
    from mkref.widgets.plan.render import figure

    try:
        from mkref.widgets.plan.widget import PlanExplorer
    except ImportError:
        progress = Progress(plan)
        return figure(PlanView(progress, layer, progress.start()))
    works = None
    if interpreter is not None:
        works = Walk(interpreter, [counter.target for counter in plan.counters], rows)
    return PlanExplorer(plan, layer=layer, works=works)


def paged_kv(history: History, *, at: int | None = None) -> Any:
    """A paged KV cache and its batch, step by step: pages by owner, page tables, rows of the steps.

    Args:
        history: of a session, from `mkref.widgets.kv.record.KvRecorder` or from a file
            (`mkref.widgets.kv.history.load_history`).
        at: the step shown at first; below 0 counts from the end; None: one in which most requests
            run.

    Returns:
        A widget, or a `Figure` where anywidget is not installed.

    Raises:
        RequestError: the history has no such step.
    """
    from mkref.widgets.kv.model import kv_view
    from mkref.widgets.kv.render import figure

    try:
        from mkref.widgets.kv.widget import KvWidget
    except ImportError:
        return figure(kv_view(history, at))
    return KvWidget(history, at)


def wave_quantization(
    config: NorthConfig = NORTH_MINI_CODE,
    *,
    scene: str = "chain",
    tiles: int = 10,
    n_sm: int = 8,
    tile_us: float = 2.0,
    boundary_us: float = 1.0,
    hand_over_us: float = 1.0,
    context: int = 8192,
    gpu: str = "h200-copies",
) -> Any:
    """Tiles on SMs in three ways: a grid per operation, one queue, one queue with back-fill.

    Args:
        config: geometry of the model, for the scene "layer".
        scene: key of `mkref.widgets.waves.scenes.SCENES`, at first.
        tiles: of each operation; `tile_us` is what an SM needs for one. Not of "layer".
        n_sm: SMs, at first.
        tile_us: see `tiles`.
        boundary_us: between two grids, at first.
        hand_over_us: from the end of an operation until its results can be used, at first.
        context: tokens of the row, for "layer".
        gpu: key of `mkref.widgets.hardware.BANDWIDTHS`, for "layer".

    Returns:
        A widget, or a `Figure` where ipywidgets is not installed.

    Raises:
        RequestError: no such scene or GPU, or numbers out of range.
    """
    from mkref.widgets.hardware import bandwidth
    from mkref.widgets.waves.model import WAYS, schedule
    from mkref.widgets.waves.render import figure
    from mkref.widgets.waves.scenes import operations

    tb_per_s = bandwidth(gpu).tb_per_s
    share = tb_per_s * 1e6 / max(n_sm, 1)  # bytes per us of one SM
    each = operations(scene, config, tiles, tile_us, context, share)
    times = {"boundary_us": boundary_us, "hand_over_us": hand_over_us}
    static = figure([schedule(each, n_sm, way, **times) for way in WAYS])
    try:
        from mkref.widgets.waves.widget import WavesWidget
    except ImportError:
        return static
    return WavesWidget(
        config, scene=scene, tiles=tiles, n_sm=n_sm, tile_us=tile_us, context=context,
        tb_per_s=tb_per_s, **times,
    )  # fmt: skip
