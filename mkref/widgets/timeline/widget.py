"""The timeline to zoom and pan: packs one run or two into one array, the scripts draw it.

Nothing is fetched: scripts and style come from the files beside this one. Its notebook output
carries the static figure too, which shows where there is no kernel. Python is asked for one thing
only: the bytes of the file for Perfetto.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from mkref.trace.events import ISSUED, Trace
from mkref.trace.path import ROUTED, describe_path
from mkref.trace.perfetto import STREAMING
from mkref.widgets.live import Live, script, style, traitlets
from mkref.widgets.palette import GRID, INK, OUTLINE, WAIT, as_json
from mkref.widgets.svg import PATTERNS
from mkref.widgets.timeline.compare import LETTERS, counterparts, describe_pair, label_of, pair
from mkref.widgets.timeline.edges import NOBODY, ROUTER, Edges
from mkref.widgets.timeline.export import chrome_json, write_runs
from mkref.widgets.timeline.model import timeline
from mkref.widgets.timeline.render import figure, figure_of_pair, headline, path_table

if TYPE_CHECKING:
    from mkref.widgets.figure import Figure

__all__ = ["FIELDS", "SmTimelineWidget", "pack"]

HERE = Path(__file__).resolve().parent
SCRIPTS = (
    "data.js", "layout.js", "edges.js", "draw.js", "move.js", "mouse.js", "parts.js", "page.js",
)  # fmt: skip
FIELDS = (
    "run", "task", "sm", "op", "layer", "first", "count", "wait", "signal", "beside", "cause",
    "twin", "begin", "ready", "end", "issued",
)  # fmt: skip
"""Columns of the packed array; the scripts get this list too. `task` is the number that Python
knows, `cause` and `twin` are rows of the array."""


def _names(traces: Sequence[Trace], which: str) -> list[str]:
    """Operations or counters of all runs, each once."""
    return [*dict.fromkeys(name for trace in traces for name in getattr(trace, which))]


def pack(*traces: Trace) -> tuple[np.ndarray, int]:
    """All stamped tasks as one int32 array [n, len(FIELDS)], and how many ns one unit of time is.

    int32 holds two seconds of ns; longer traces are rounded to us. Operations and counters are
    numbered anew over all runs, tasks go on counting from run to run.
    """
    unit = 1 if max(trace.times.max(initial=0) for trace in traces) < 2**31 else 1_000
    ops, counters = (_names(traces, which) for which in ("ops", "counters"))
    row_of = [_rows(trace) for trace in traces]
    starts = np.cumsum([0, *(int(trace.complete.sum()) for trace in traces)])
    firsts = np.cumsum([0, *(trace.n_tasks for trace in traces)])
    parts = []
    for k, trace in enumerate(traces):
        done = trace.complete
        op_of = np.array([ops.index(op) for op in trace.ops])
        counter_of = np.array([*(counters.index(name) for name in trace.counters), NOBODY])
        twin = np.full(trace.n_tasks, NOBODY)
        if len(traces) > 1:
            other = 1 - k
            found = counterparts(trace, traces[other])
            twin = np.where(found == NOBODY, NOBODY, row_of[other][found] + starts[other])
        cause = Edges(trace).cause
        columns = dict(trace.columns)
        columns |= {
            "run": np.full(trace.n_tasks, k),
            "task": np.arange(trace.n_tasks) + firsts[k],
            "op": op_of[trace.columns["op"]],
            "wait": counter_of[trace.columns["wait"]],
            "signal": counter_of[trace.columns["signal"]],
            "beside": trace.beside,
            "cause": np.where(cause == NOBODY, NOBODY, row_of[k][cause] + starts[k]),
            "twin": twin,
        }
        times = np.where(trace.times < 0, trace.times, trace.times // unit)
        named = [columns[name] for name in FIELDS[: -ISSUED - 1]]
        parts.append(np.column_stack([*named, times])[done])
    return np.concatenate(parts).astype("<i4"), unit


def _rows(trace: Trace) -> np.ndarray:
    """int64 [n_tasks]: place of each task among those that were stamped."""
    return np.cumsum(trace.complete) - 1


class SmTimelineWidget(Live):
    """One run or two on a canvas, with the keys of Perfetto; press `?` on it for the list.

    Args:
        trace: the run; with another one it is A, and stands over B.
        other: the other run.
        titles: names of the runs; default: the machines in their provenance.
        selected: number of the task that is selected at first.
        path: whether the critical path stands out at first.

    Attributes:
        selected: number of the selected task in the trace, or -1; it can be set from Python. Tasks
            of the other run go on counting after those of the first.
        path: whether the critical path stands out.
    """

    _esm = script(*(HERE / name for name in SCRIPTS))
    _css = style(HERE / "timeline.css")
    tasks = traitlets.Bytes().tag(sync=True)
    meta = traitlets.Dict().tag(sync=True)
    selected = traitlets.Int(NOBODY).tag(sync=True)
    path = traitlets.Bool(False).tag(sync=True)

    def __init__(
        self,
        trace: Trace,
        other: Trace | None = None,
        titles: tuple[str, str] = ("", ""),
        *,
        selected: int = NOBODY,
        path: bool = False,
    ) -> None:
        self.traces = (trace,) if other is None else (trace, other)
        self.figure: Figure
        if other is None:
            self.figure = figure(timeline(trace, selected=selected, path=path), titles[0])
            said = headline(trace, titles[0])
        else:
            both = pair(trace, other, selected=selected, path=path)
            self.figure = figure_of_pair(both, titles)
            said = describe_pair(trace, other, titles)
        packed, unit = pack(*self.traces)
        super().__init__(
            tasks=packed.tobytes(),
            meta=self._meta(said, unit, titles),
            selected=selected,
            path=path,
        )
        self.on_msg(self._answer)

    def _meta(self, said: str, unit: int, titles: tuple[str, str]) -> dict[str, Any]:
        ops = _names(self.traces, "ops")
        runs, start = [], 0
        for letter, title, trace in zip(LETTERS, titles, self.traces, strict=False):
            edges, rows = Edges(trace), _rows(trace) + start
            runs.append(
                {
                    "letter": letter,
                    "title": f"{title or trace.where or 'run'} [{label_of(trace)}]",
                    "n_sm": trace.n_sm,
                    "span_ns": trace.span_ns,
                    "path": [int(rows[link.task]) for link in edges.path],
                    "path_text": describe_path(trace),
                    "path_table": path_table(edges).html(),
                }
            )
            start += int(trace.complete.sum())
        return {
            "fields": list(FIELDS),
            "unit_ns": unit,
            "n_sm": max(trace.n_sm for trace in self.traces),
            "span_ns": max(trace.span_ns for trace in self.traces),
            "runs": runs,
            "ops": [
                {
                    **as_json(op),
                    "streams": op in STREAMING,
                    "routed": op in ROUTED,
                    "router": op == ROUTER,
                }
                for op in ops
            ],
            "counters": _names(self.traces, "counters"),
            "patterns": PATTERNS,
            "colors": {"ink": INK, "outline": OUTLINE, "grid": GRID, "wait": WAIT},
            "summary": said,
            "table": self.figure.table.html(),
        }

    def write_perfetto(self, path: str | Path) -> Path:
        """Write the runs as a file for https://ui.perfetto.dev.

        Raises:
            MkrefError: the file cannot be written.
        """
        return write_runs(self.traces, path)

    def _answer(self, _: Any, content: Any, __: Any) -> None:
        """The browser asks for the file; it saves it where the reader's browser saves files."""
        if content == {"type": "perfetto"}:
            self.send({"type": "perfetto", "name": "timeline.json"}, [chrome_json(self.traces)])

    @property
    def static(self) -> Figure:
        """The figure that stands in for it."""
        return self.figure
