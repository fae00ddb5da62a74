"""A simulated step in the form of a recorded one, for the same pictures and sums.

Times are whole ns since the first task of the step was seen; what the loader and the helper did
before that counts as 0, as in a recorded trace.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np

from mkref.plan.task import Op
from mkref.trace.events import COLUMNS, Trace
from mkref.trace.stages import ABSENT, RingShape, Stages
from mkref.weights.layout import TILE_WORDS

if TYPE_CHECKING:
    from mkref.machine.source import Ring
    from mkref.plan.build import Plan
    from mkref.simulate.core import Core

__all__ = ["make_trace"]


def make_trace(
    plan: Plan,
    cores: Sequence[Core],
    ring: Ring,
    stages_of: Sequence[int],
    provenance: Mapping[str, str],
) -> Trace:
    """Everything that is shown, SM after SM.

    Args:
        plan: for the names of counters.
        cores: after the run.
        ring: its shape.
        stages_of: SMs that kept the times of their stages.
        provenance: of the trace.
    """
    works = [(sm, work) for sm, core in enumerate(cores) for work in core.works if work.shown]
    zero = min((work.begin for _, work in works if not work.beside), default=0.0)
    columns = {
        name: np.array(
            [sm if name == "sm" else getattr(work.task, name) for sm, work in works], np.int32
        )
        for name in COLUMNS
    }
    raw = np.array([(w.begin, w.ready, w.end, w.issued) for _, w in works]).reshape(-1, 4)
    return Trace(
        ops=tuple(op.name for op in sorted(Op)),
        counters=tuple(counter.name for counter in plan.counters),
        columns=columns,
        times=_since(raw, zero),
        provenance=dict(provenance),
        stages=_stages(cores, ring, stages_of, zero) if stages_of else None,
    )


def _since(raw: np.ndarray, zero: float) -> np.ndarray:
    """int64, whole ns since `zero`, at least 0; `ABSENT` where nothing happened."""
    times = np.maximum(np.rint(raw - zero), 0).astype(np.int64)
    return np.where(raw < 0, ABSENT, times)


def _stages(cores: Sequence[Core], ring: Ring, stages_of: Sequence[int], zero: float) -> Stages:
    """Stages that were not over when the step began."""
    since = np.full(len(cores), ABSENT, dtype=np.int64)
    sms, rows = [], []
    for sm in sorted(set(stages_of)):
        stamps = np.array(cores[sm].stamps or []).reshape(-1, 4)
        stamps = stamps[stamps[:, 3] >= zero]
        since[sm] = 0
        sms.append(np.full(len(stamps), sm, dtype=np.int32))
        rows.append(stamps)
    return Stages(
        ring=RingShape(ring.stages, ring.stage_tiles * 2 * TILE_WORDS),
        sm=np.concatenate(sms),
        times=_since(np.concatenate(rows), zero),
        since=since,
    )
