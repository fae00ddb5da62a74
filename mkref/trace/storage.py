"""Traces in files: compressed JSON that any language reads, equal bytes for equal traces.

Times are stored as differences along each SM, which compress well: a step of the large model on 132
SMs is a few hundred kilobytes, with the ring's stages a few times as much. The format is versioned;
it does not depend on numbers of opcodes. Files from before there were stages are read as well.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from mkref.errors import PlanError
from mkref.jsonfile import read_json, write_json
from mkref.trace.events import COLUMNS, Trace
from mkref.trace.stages import ABSENT, RingShape, Stages

__all__ = ["FORMAT", "load_trace", "save_trace", "trace_from_dict", "trace_to_dict"]

FORMAT = "mkref-trace-1"


def _differences(times: np.ndarray) -> list[list[int]]:
    """Row by row: begin against the end of the row before, then each column against its left."""
    before = np.concatenate([[0], times[:-1, 2]])  # end of the row before
    left = np.column_stack([before, times[:, 0], times[:, 1]])
    issued_before = np.concatenate([[0], times[:-1, 3]])
    return [*(times[:, :3] - left).T.tolist(), (times[:, 3] - issued_before).tolist()]


def _times(differences: list[list[int]]) -> np.ndarray:
    """Inverse of `_differences`."""
    begin, ready, end, issued = (np.asarray(d, dtype=np.int64) for d in differences)
    ends = np.cumsum(begin + ready + end)
    return np.column_stack([ends - end - ready, ends - end, ends, np.cumsum(issued)])


def _stages_to_dict(stages: Stages) -> dict[str, Any]:
    """Issue times against the row before, the others against the issue; null for absent."""
    issued, *later = stages.times.T.tolist()
    after = [
        [None if t == ABSENT else t - begin for t, begin in zip(column, issued, strict=True)]
        for column in later
    ]
    return {
        "ring": [stages.ring.stages, stages.ring.stage_bytes],
        "since": stages.since.tolist(),
        "counts": np.bincount(stages.sm, minlength=len(stages.since)).tolist(),
        "issued": np.diff(issued, prepend=0).tolist(),
        "after": after,
    }


def _stages_from_dict(data: dict[str, Any]) -> Stages:
    """Inverse of `_stages_to_dict`."""
    issued = np.cumsum(np.asarray(data["issued"], dtype=np.int64))
    after = [
        [ABSENT if d is None else t + d for t, d in zip(issued.tolist(), column, strict=True)]
        for column in data["after"]
    ]
    stages, stage_bytes = data["ring"]
    return Stages(
        ring=RingShape(stages, stage_bytes),
        sm=np.repeat(np.arange(len(data["counts"]), dtype=np.int32), data["counts"]),
        times=np.column_stack([issued, *(np.asarray(c, dtype=np.int64) for c in after)]),
        since=np.asarray(data["since"], dtype=np.int64),
    )


def trace_to_dict(trace: Trace) -> dict[str, Any]:
    """A JSON-ready form; `trace_from_dict` turns it back into an equal trace."""
    stages = {} if trace.stages is None else {"stages": _stages_to_dict(trace.stages)}
    return {
        "format": FORMAT,
        "provenance": trace.provenance,
        "ops": list(trace.ops),
        "counters": list(trace.counters),
        "columns": {name: trace.columns[name].tolist() for name in COLUMNS},
        "times": _differences(trace.times),
        **stages,
    }


def trace_from_dict(data: dict[str, Any]) -> Trace:
    """Inverse of `trace_to_dict`.

    Raises:
        PlanError: another format, or parts that do not fit each other.
    """
    if data.get("format") != FORMAT:
        raise PlanError(f"trace: format {data.get('format')!r}; this version reads {FORMAT!r}")
    try:
        for name in ("ops", "counters"):
            if not all(isinstance(text, str) for text in data[name]) or isinstance(data[name], str):
                raise TypeError(f"{name} must be a list of texts")
        most = {"op": len(data["ops"]), "wait": len(data["counters"])}
        most["signal"] = most["wait"]
        for name, end in most.items():
            if max(data["columns"][name], default=-1) >= end:
                raise ValueError(f"columns: {name} counts to {end} only")
        return Trace(
            ops=tuple(data["ops"]),
            counters=tuple(data["counters"]),
            columns={name: np.asarray(data["columns"][name], dtype=np.int32) for name in COLUMNS},
            times=_times(data["times"]),
            provenance=dict(data["provenance"]),
            stages=_stages_from_dict(data["stages"]) if "stages" in data else None,
        )
    except (KeyError, TypeError, ValueError, OverflowError) as error:
        raise PlanError(f"trace: the recording is damaged ({error!r})") from error


def save_trace(trace: Trace, path: str | Path) -> Path:
    """Write a trace; a name that ends in `.gz` is compressed.

    Returns:
        The path that was written.
    """
    return write_json(path, trace_to_dict(trace))


def load_trace(path: str | Path) -> Trace:
    """Read what `save_trace` wrote.

    Raises:
        PlanError: no such file, or not a trace.
    """
    try:
        data = read_json(path)
    except (OSError, EOFError, ValueError) as error:
        raise PlanError(f"trace: cannot read {path}: {error}") from error
    if not isinstance(data, dict):
        raise PlanError(f"trace: {path} holds no trace")
    return trace_from_dict(data)
