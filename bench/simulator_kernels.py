"""Which kernel a record was made with, as the simulator needs it: plan, switches, times, trace.

Records that name no older kernel are of the present one. When there are new records only, older
kernels can go.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property
from typing import TYPE_CHECKING, Any

from mkref.config import NORTH_MINI_CODE
from mkref.machine.source import Ring
from mkref.plan.build import build_plan
from mkref.plan.effects import ROUTED
from mkref.plan.task import Flag, Op
from mkref.simulate.costs import FILE, from_dict
from mkref.simulate.switches import Switches

if TYPE_CHECKING:
    from mkref.plan.build import Plan
    from mkref.plan.task import Task
    from mkref.simulate.costs import Costs

__all__ = ["KERNELS", "PRESENT", "VERSION_FOUR", "VERSION_THREE", "VERSION_TWO", "Kernel"]
__all__ += ["kernel_of"]

N_SM = 132
EACH_CHUNK = 2**20
"""As the most splits of a row: attention leaves one result for each chunk, however many."""


@dataclass(frozen=True)
class Kernel:
    """A version of the kernel.

    Attributes:
        name: in words; `short` stands in front of the names of its cases.
        switches: of it.
        trace: file with a recorded step of it.
        rings: for each number of rows that a plan serves; where none is named, the largest.
        early: x and router logits announce themselves, and SMs without rows have empty tasks.
    """

    name: str
    short: str
    switches: Switches
    trace: str
    rings: tuple[tuple[int, Ring], ...] = ()
    early: bool = True

    def plan(self, rows: int) -> Plan:
        """The plan of the large geometry; how many pages it has does not matter for time."""
        return _plan(self.early, rows)

    @cached_property
    def costs(self) -> Costs:
        """The times of the table that is shipped, for this kernel."""
        table = json.loads(FILE.read_text(encoding="utf-8"))
        return from_dict(table, self.short if self.short in table["older"] else "")

    def switches_for(self, rows: int) -> Switches:
        """Its switches with the ring of a plan for so many rows."""
        return replace(self.switches, ring=dict(self.rings).get(rows))


PRESENT = Kernel(
    "present, bench/LOG.md section 14",
    "v5",
    Switches(),
    "notebooks/data/trace_north_h200.json.gz",
)
VERSION_FOUR = Kernel(
    "version four, bench/LOG.md section 13",
    "v4",
    Switches(most_splits=EACH_CHUNK, merge_at_once=512, helper_at_once=32),
    "bench/results/h200/version_four/trace_north.json.gz",
)
VERSION_THREE = Kernel(
    "version three, bench/LOG.md section 12",
    "v3",
    Switches(
        may_miss=0,
        least_normed=4,
        most_splits=EACH_CHUNK,
        merge_at_once=256,
        helper_at_once=32,
    ),
    "bench/results/h200/version_three/trace_north.json.gz",
    ((8, Ring(5, 64)), (16, Ring(4, 64)), (32, Ring(2, 32))),
)
VERSION_TWO = Kernel(
    "version two, bench/LOG.md section 9",
    "v2",
    Switches(
        merge_rows=2,
        early_rows=0,
        announced=False,
        may_miss=0,
        least_normed=4,
        most_splits=EACH_CHUNK,
        merge_at_once=64,
        helper_at_once=32,
        hold_back_after=(Op.EMBED, Op.QKV, Op.DOWN),
    ),
    "bench/results/h200/version_two/trace_north.json.gz",
    ((8, Ring(5, 64)), (16, Ring(4, 64)), (32, Ring(2, 32))),
    early=False,
)
KERNELS = (VERSION_TWO, VERSION_THREE, VERSION_FOUR, PRESENT)
HASHES = {
    "3834258e9cdf248a": VERSION_FOUR,  # "kernel" of records of `mkref bench`
    "9f685cae8770189d": VERSION_THREE,
    "a9dd84de320e407b": VERSION_TWO,
    "6b1ecf73123c02f7": VERSION_TWO,  # "sources" of traces
    "13c913f925aa4dab": VERSION_THREE,
    "5608611a093a6dc6": VERSION_FOUR,
}


def kernel_of(provenance: Mapping[str, Any]) -> Kernel:
    """The kernel of a record or a trace."""
    return HASHES.get(str(provenance.get("kernel") or provenance.get("sources")), PRESENT)


@cache
def _plan(early: bool, rows: int) -> Plan:
    plan = build_plan(NORTH_MINI_CODE, N_SM, full_pages=1, sliding_pages=1, rows=rows)
    if early:
        return plan
    return replace(plan, tasks=tuple(_without_early(tasks) for tasks in plan.tasks))


def _without_early(tasks: Sequence[Task]) -> tuple[Task, ...]:
    """A list as it was before SMs without rows had tasks; the experts are released by the last task
    that needs them."""
    kept = [t for t in tasks if t.count or t.op not in (Op.O_PROJ, Op.DOWN)]
    users = {t.layer: i for i, t in enumerate(kept) if t.op in ROUTED}
    return tuple(
        replace(t, flags=t.flags & ~Flag.EARLY | (Flag.RELEASE if users.get(t.layer) == i else 0))
        for i, t in enumerate(kept)
    )
