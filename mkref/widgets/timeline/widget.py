"""The timeline to zoom and pan: packs the trace into one array, the scripts draw it.

Nothing is fetched: script and style come from the files beside this one. Its notebook output
carries the static figure too, which shows where there is no kernel.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import anywidget
import numpy as np
import traitlets

from mkref.trace.events import ISSUED, Trace
from mkref.trace.perfetto import STREAMING
from mkref.widgets.palette import GRID, INK, OUTLINE, WAIT, as_json
from mkref.widgets.svg import PATTERNS
from mkref.widgets.timeline.model import timeline
from mkref.widgets.timeline.render import figure, headline

if TYPE_CHECKING:
    from mkref.widgets.figure import Figure

__all__ = ["FIELDS", "SmTimelineWidget", "pack"]

HERE = Path(__file__).resolve().parent
SCRIPTS = ("data.js", "draw.js", "move.js", "page.js")
FIELDS = (
    "sm", "op", "layer", "first", "count", "wait", "signal", "begin", "ready", "end", "issued",
)  # fmt: skip
"""Columns of the packed array; the scripts get this list too."""


def pack(trace: Trace) -> tuple[np.ndarray, int]:
    """All tasks as one int32 array [n, len(FIELDS)], and how many ns one unit of its times is.

    int32 holds two seconds of ns; longer traces are rounded to us.
    """
    done = trace.complete
    unit = 1 if trace.times.max(initial=0) < 2**31 else 1_000
    times = np.where(trace.times < 0, trace.times, trace.times // unit)[done]
    columns = [trace.columns[name][done] for name in FIELDS[: -ISSUED - 1]]
    return np.column_stack([*columns, times]).astype("<i4"), unit


class SmTimelineWidget(anywidget.AnyWidget):
    """A trace on a canvas, with the keys of Perfetto; press `?` on it for the list.

    Attributes:
        selected: number of the selected task in the trace, or -1; it can be set from Python.
    """

    _esm = "\n".join((HERE / name).read_text(encoding="utf-8") for name in SCRIPTS)
    _css = HERE / "timeline.css"
    tasks = traitlets.Bytes().tag(sync=True)
    meta = traitlets.Dict().tag(sync=True)
    selected = traitlets.Int(-1).tag(sync=True)

    def __init__(self, trace: Trace, title: str = "") -> None:
        self.figure: Figure = figure(timeline(trace), title)
        packed, unit = pack(trace)
        meta = {
            "fields": list(FIELDS),
            "unit_ns": unit,
            "n_sm": trace.n_sm,
            "span_ns": trace.span_ns,
            "ops": [
                {
                    **as_json(op),
                    "streams": op in STREAMING,
                    "beside": bool(trace.beside[trace.columns["op"] == k].any()),
                }
                for k, op in enumerate(trace.ops)
            ],
            "counters": list(trace.counters),
            "patterns": PATTERNS,
            "colors": {"ink": INK, "outline": OUTLINE, "grid": GRID, "wait": WAIT},
            "summary": headline(trace, title),
            "table": self.figure.table.html(),
        }
        super().__init__(tasks=packed.tobytes(), meta=meta)

    def __repr__(self) -> str:
        return self.figure.text()

    def _repr_mimebundle_(self, **kwargs: Any) -> Any:
        shown = super()._repr_mimebundle_(**kwargs)
        if shown is None:  # anywidget is told to be silent
            return self.figure.bundle()
        data, metadata = shown if isinstance(shown, tuple) else (shown, {})
        return {**data, **self.figure.bundle()}, metadata
