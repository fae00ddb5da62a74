"""Everything that was measured on the H200 and can be simulated: one case per row of a record.

A case knows its measurement, the file that it is from, and how to predict it. `FITTED_ON` names the
few to which a constant of the simulator's table is fitted; all others are held out. They are of
version two; every record of a later kernel is held out. Of those only their traces, one step of one
row at 8,192 tokens each, show some times of the table.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bench.simulator_kernels import Kernel, kernel_of
from mkref.config import NORTH_MINI_CODE
from mkref.simulate.ladder import SIMULATED, simulate_rung
from mkref.simulate.run import Simulated, simulate
from mkref.simulate.situation import Situation

if TYPE_CHECKING:
    from mkref.measure.ladder import Rung
    from mkref.simulate.costs import Costs

__all__ = ["FITTED_ON", "FITTED_VERSION", "ROOT", "Case", "cases"]

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "bench" / "results" / "h200"
LADDER_STEPS = 32
WARM_UP_LAUNCHES = 2

FITTED_VERSION = "v2"
FITTED_ON = {
    "stamp": "decode: batch 1, 8,192 tokens, even",
    "merge_pass": "contexts: batch 1, 131,072 tokens, even",
    "tile": "rows: batch 16, 8,192 tokens, even",
    "host": "ladder: batch 1, g loader runs ahead",
    "merge_panel": "ladder: batch 8, e counters",
    "launch.stream": "ladder: batch 1, a launch per operation",
    "launch.graph": "ladder: batch 1, b graph, per operation",
    "launch.dependent": "ladder: batch 1, c graph + PDL, per operation",
    "launch.early": "ladder: batch 1, c graph + PDL, 4 per layer",
}
"""Constants that no trace shows, and the case that each is fitted to."""


@dataclass(frozen=True)
class Case:
    """One measurement.

    Attributes:
        name: unique among those of the version.
        file: record under `RESULTS`.
        measured_ms: per step; `spread_ms` is the spread of its samples.
        kernel: that was measured.
        simulate: it with some costs.
    """

    kernel: Kernel
    name: str
    file: str
    measured_ms: float
    spread_ms: float
    simulate: Callable[[Costs], Simulated]

    @property
    def version(self) -> str:
        """Of the kernel, short."""
        return self.kernel.short

    def predict(self) -> Simulated:
        """It with the costs of its kernel in the table that is shipped."""
        return self.simulate(self.kernel.costs)

    @property
    def fits(self) -> str:
        """Name of the constant that is fitted to this case; "" if it is held out."""
        if self.version != FITTED_VERSION:
            return ""
        return next((name for name, case in FITTED_ON.items() if case == self.name), "")


def _read(name: str) -> tuple[Kernel, list[dict[str, Any]]]:
    """The kernel of a record, and its rows."""
    record = json.loads((RESULTS / f"{name}.json").read_text())
    return kernel_of(record["provenance"]), record["rows"]


def _positions(row: dict[str, Any]) -> list[int]:
    """Of the rows in the mean of the steps that count, as `mkref.measure.decode` walks them."""
    prompt = row["kind"] == "prompt"
    n = row["tokens_per_step"] if prompt else row["steps_per_launch"]
    launches = (row["steps"] if prompt else -(-row["steps"] // n)) + WARM_UP_LAUNCHES
    fit = max(1, min(launches, min(row["lengths"]) // n))
    counted = [launch % fit for launch in range(WARM_UP_LAUNCHES, launches)]
    back = n * sum(fit - number for number in counted) / len(counted)
    if prompt:
        return [round(row["context"] - back) + i for i in range(n)]
    return [round(length - back + (n - 1) / 2) for length in row["lengths"]]


def _decode(name: str) -> Iterator[Case]:
    kernel, rows = _read(name)
    for row in rows:
        now = Situation.uniform(NORTH_MINI_CODE, _positions(row), row["experts_per_layer"])

        def predict(costs: Costs, row: dict[str, Any] = row, now: Situation = now) -> Simulated:
            switches = kernel.switches_for(row["plan_rows"])
            alone = row["kind"] == "prompt"  # a launch is one step
            plan = kernel.plan(row["plan_rows"])
            return simulate(plan, now, costs=costs, switches=switches, alone=alone)

        of = (
            f"{row['tokens_per_step']} tokens of a prompt"
            if row["kind"] == "prompt"
            else (f"batch {row['batch']}")
        )
        yield Case(
            kernel, f"{Path(name).name}: {of}, {row['context']:,} tokens, {row['kind']}",
            f"{name}.json", row["ms_per_step"], row["spread_ms"], predict,
        )  # fmt: skip


def _ladder(name: str) -> Iterator[Case]:
    rungs = {(rung.letter, rung.name): rung for rung in SIMULATED}
    kernel, rows = _read(name)
    for row in rows:
        rung = rungs.get((row["rung"], row["name"]))
        if rung is None:
            continue
        position = row["context"] - LADDER_STEPS // 2
        now = Situation.uniform(NORTH_MINI_CODE, [position] * row["batch"])

        def predict(costs: Costs, rung: Rung = rung, now: Situation = now) -> Simulated:
            return simulate_rung(
                rung, kernel.plan(8), now, costs=costs, switches=kernel.switches_for(8)
            )

        yield Case(
            kernel, f"ladder: batch {row['batch']}, {row['rung']} {row['name']}",
            f"{name}.json", row["ms_per_step"], row["spread_ms"], predict,
        )  # fmt: skip


def cases() -> list[Case]:
    """All of them."""
    folders = ("version_two/", "version_three/", "version_four/", "")
    decode = ("decode", "contexts", "rows")
    found = [case for folder in folders for name in decode for case in _decode(folder + name)]
    return found + [case for folder in folders for case in _ladder(f"{folder}ladder")]
