"""Time of whole decode steps, from token ids to the next token ids, host included.

Steps run in launches of several, greedy, each fed with the tokens of the one before, as the engine
runs them. Rows already have a context of random keys and values. A sample is the time of one launch
per step, from one launch's begin to the next one's, so what the host does in between is in it.

    even     all rows as long as the context
    ragged   rows from a quarter to seven quarters of it, the same in the mean
    prompt   all rows are consecutive tokens of one sequence; a launch is one step

What it does not do: run a prompt to get a context, or compare with other engines.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from mkref.errors import RequestError
from mkref.machine.inputs import StepInputs
from mkref.measure.bytes import clear_experts, distinct_experts, step_bytes
from mkref.measure.pages import fill_kv, page_table
from mkref.measure.record import spread
from mkref.plan.build import ROW_CHOICES, build_plan

if TYPE_CHECKING:
    from mkref.config import NorthConfig
    from mkref.machine.base import KernelMachine
    from mkref.weights.packed import PackedWeights

__all__ = ["HEADER", "Case", "Ceiling", "Kind", "format_row", "load", "measure", "rows_for"]

Kind = Literal["even", "ragged", "prompt"]
WARM_UP_LAUNCHES = 2
LAUNCH_STEPS = 32
HEADER = (
    f"{'batch':>5} {'context':>8} {'kind':7} {'ms/step':>9} {'spread':>8} {'tokens/s':>9} "
    f"{'GB/step':>8} {'of bound':>9} {'of read':>8}"
)


@dataclass(frozen=True)
class Ceiling:
    """Bytes per second of the memory: by its data sheet, and as a bulk read gets them."""

    datasheet: float | None = None
    measured: float | None = None


@dataclass(frozen=True)
class Case:
    """What is measured.

    Attributes:
        batch: sequences; of a prompt, tokens of the one sequence in a step.
        context: tokens in every row at the end, in the mean.
        kind: see above.
        rows: that the plan serves, 8, 16 or 32.
    """

    batch: int
    context: int
    kind: Kind = "even"
    rows: int = 8

    def lengths(self) -> list[int]:
        """Tokens of every sequence at the end.

        >>> Case(3, 800, "ragged").lengths()
        [200, 800, 1400]
        """
        if self.kind == "prompt":
            return [self.context]
        if self.kind == "even" or self.batch == 1:
            return [self.context] * self.batch
        low, high = self.context / 4, self.context * 7 / 4
        return [round(low + (high - low) * r / (self.batch - 1)) for r in range(self.batch)]


def rows_for(batch: int, least: int = 0) -> int:
    """The smallest plan that serves a batch.

    Raises:
        RequestError: none does.
    """
    for rows in ROW_CHOICES:
        if rows >= max(batch, least):
            return rows
    raise RequestError(f"--batch: {batch} rows; a step takes at most {ROW_CHOICES[-1]}")


def load(machine: KernelMachine, weights: PackedWeights, case: Case, n_sm: int) -> np.ndarray:
    """Make the machine ready for a case, with a filled pool; the page table of its sequences."""
    table, (full, sliding) = page_table(weights.config, case.lengths())
    plan = build_plan(weights.config, n_sm, full_pages=full, sliding_pages=sliding, rows=case.rows)
    machine.load(plan, weights, max(case.lengths()))
    fill_kv(machine)
    return table


def measure(
    machine: KernelMachine, case: Case, table: np.ndarray, steps: int, ceiling: Ceiling
) -> dict[str, Any]:
    """One row of the record.

    Args:
        machine: loaded for the case.
        table: its page table.
        steps: at least so many after the warm-up.
        ceiling: for the shares.
    """
    config = machine.plan.config
    run = _prompt if case.kind == "prompt" else _decode
    launches = run(machine, case, table, steps)
    positions: list[np.ndarray] = []
    samples: list[float] = []
    for launch in range(WARM_UP_LAUNCHES):
        next(launches)
        if launch == WARM_UP_LAUNCHES - 1:
            clear_experts(machine)
    begin = time.perf_counter()
    for fed in launches:
        now = time.perf_counter()
        samples.append((now - begin) * 1e3 / len(fed))
        positions.extend(fed)
        begin = now
    experts = distinct_experts(machine, len(positions))
    if case.kind == "prompt":  # one sequence: its pages count once
        positions = [fed[-1:] for fed in positions]
    n_bytes = float(np.mean([step_bytes(config, experts, fed.tolist()) for fed in positions]))
    timed = spread(samples)
    ms = timed["ms_per_step"]
    return {
        "batch": 1 if case.kind == "prompt" else case.batch,
        "context": case.context,
        "kind": case.kind,
        "ms_per_step": ms,
        "spread_ms": timed["spread_ms"],
        "tokens_per_s": round(case.batch * 1e3 / ms, 2),
        "bytes": round(n_bytes),
        "share_of_datasheet_bound": _share(n_bytes, ceiling.datasheet, ms),
        "share_of_measured_bandwidth": _share(n_bytes, ceiling.measured, ms),
        "tokens_per_step": case.batch,
        "lengths": case.lengths(),
        "plan_rows": case.rows,
        "experts_per_layer": round(experts, 3),
        "steps": len(positions),
        "steps_per_launch": 1 if case.kind == "prompt" else _launch_steps(case, steps),
        "samples_ms": timed["samples_ms"],
    }


def _share(n_bytes: float, bandwidth: float | None, ms: float) -> float | None:
    return None if not bandwidth else round(n_bytes / bandwidth * 1e3 / ms, 4)


def _launch_steps(case: Case, steps: int) -> int:
    """Steps of a launch: as many as the engine takes, less for a short context or measurement."""
    return max(1, min(LAUNCH_STEPS, steps, min(case.lengths()) // 2))


def _decode(
    machine: KernelMachine, case: Case, table: np.ndarray, steps: int
) -> Iterator[np.ndarray]:
    """Launches; gives the positions of each, int [steps, rows]. Ends at the case's lengths, and
    begins again from the first position where the context is too short for so many steps.
    """
    n_steps = _launch_steps(case, steps)
    n_launches = -(-steps // n_steps) + WARM_UP_LAUNCHES
    lengths = np.array(case.lengths())
    fit = min(n_launches, int(lengths.min()) // n_steps)
    tokens = _first_tokens(machine.plan.config, case.batch)
    for launch in range(n_launches):
        at = (lengths - (fit - launch % fit) * n_steps).astype(np.int32)
        out = machine.decode(StepInputs(tokens, at, table), n_steps)
        tokens = out[-1]
        yield at + np.arange(n_steps)[:, None]


def _prompt(
    machine: KernelMachine, case: Case, table: np.ndarray, steps: int
) -> Iterator[np.ndarray]:
    """Steps of consecutive tokens of one sequence; gives the positions, int [1, rows]."""
    n, n_launches = case.batch, steps + WARM_UP_LAUNCHES
    fit = max(1, min(n_launches, case.context // n))
    tokens, shared = _first_tokens(machine.plan.config, n), np.repeat(table, n, axis=1)
    earlier = np.arange(n, dtype=np.int32)
    for launch in range(n_launches):
        at = case.context - (fit - launch % fit) * n + np.arange(n, dtype=np.int32)
        machine.step(StepInputs(tokens, at, shared, earlier=earlier))
        yield at[None]


def _first_tokens(config: NorthConfig, n: int) -> np.ndarray:
    """Different tokens, all over the vocabulary."""
    return (np.arange(n) * 1009 % (config.vocab_size - 1) + 1).astype(np.int32)


def format_row(row: Mapping[str, Any]) -> str:
    """A row of the record as a line below `HEADER`."""

    def percent(name: str) -> str:
        return "-" if row[name] is None else f"{row[name]:.1%}"

    return (
        f"{row['tokens_per_step']:>5} {row['context']:>8} {row['kind']:7} "
        f"{row['ms_per_step']:9.4f} {row['spread_ms']:8.4f} {row['tokens_per_s']:9.1f} "
        f"{row['bytes'] / 1e9:8.3f} {percent('share_of_datasheet_bound'):>9} "
        f"{percent('share_of_measured_bandwidth'):>8}"
    )
