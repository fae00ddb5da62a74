"""Inputs of a launch, and what is refused before a machine sees them.

A wrong page number or position would make the kernel read outside of its buffers, so everything is
checked in each launch. The good case is one comparison per array; only a refusal looks for its row.

What it does not do: run anything.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from mkref.errors import MachineError
from mkref.plan.buffers import MAX_LAUNCH_STEPS, STOP_IDS
from mkref.plan.build import PAGE

if TYPE_CHECKING:
    from mkref.plan.build import Plan

__all__ = ["StepInputs", "check_launch", "check_stops"]

SHAPES = (
    ("tokens", 1, "iu"),
    ("positions", 1, "iu"),
    ("page_table", 3, "iu"),
    ("temperatures", 1, "fiu"),
    ("seeds", 1, "iu"),
    ("earlier", 1, "iu"),
)
"""Dimensions of every input, and the kinds of numbers that it may hold."""
KINDS = ((0, "full_attention", "full"), (1, "sliding_attention", "sliding"))


@dataclass(frozen=True)
class StepInputs:
    """Inputs of one decode step for `n` active rows, 1 to `Plan.rows`.

    A row is one token. Mostly it is the only one of its sequence; several rows that follow one
    another may be tokens of one sequence that follow one another (`earlier`), so that a prompt
    goes in faster.

    Attributes:
        tokens: int32 [n], the token that each row feeds.
        positions: int32 [n], its position, counted from 0.
        page_table: int32 [2, n, pages]; kind 0 for full layers, 1 for sliding layers; page `p` of a
            row is the number of the page that holds its tokens 64 p .. 64 p + 63 in the pool of
            that kind.
        temperatures: float32 [n]; 0 is greedy.
        seeds: uint64 [n], of the row's noise.
        earlier: int32 [n], how many rows directly before this one are the tokens directly before
            its own, of the same sequence; none: 0 everywhere.
    """

    tokens: np.ndarray
    positions: np.ndarray
    page_table: np.ndarray
    temperatures: np.ndarray = field(default_factory=lambda: np.zeros(0, np.float32))
    seeds: np.ndarray = field(default_factory=lambda: np.zeros(0, np.uint64))
    earlier: np.ndarray = field(default_factory=lambda: np.zeros(0, np.int32))

    @property
    def rows(self) -> int:
        """Number of active rows."""
        return len(self.tokens)


def check_launch(inputs: StepInputs, plan: Plan, max_context: int, n_steps: int = 1) -> None:
    """Refuse what would make the kernel read outside its buffers in any of `n_steps` steps.

    Raises:
        MachineError: names the input, the row and the value.
    """
    for name, dimensions, kinds in SHAPES:
        array = getattr(inputs, name)
        if not isinstance(array, np.ndarray) or array.dtype.kind not in kinds:
            found = array.dtype if isinstance(array, np.ndarray) else type(array).__name__
            what = "numbers" if "f" in kinds else "whole numbers"
            raise MachineError(f"{name}: {found}; must be a NumPy array of {what}")
        if array.ndim != dimensions:
            raise MachineError(f"{name}: {array.ndim} dimensions; must have {dimensions}")
    n = inputs.rows
    if not 1 <= n <= plan.rows:
        raise MachineError(f"batch: {n} rows; a step takes 1 to {plan.rows}")
    if not 1 <= n_steps <= MAX_LAUNCH_STEPS:
        raise MachineError(f"n_steps: {n_steps} steps; a launch takes 1 to {MAX_LAUNCH_STEPS}")
    for name, array, may_be_empty in (
        ("positions", inputs.positions, False),
        ("temperatures", inputs.temperatures, True),
        ("seeds", inputs.seeds, True),
        ("earlier", inputs.earlier, True),
    ):
        if len(array) != n and (len(array) or not may_be_empty):
            raise MachineError(f"{name}: {len(array)} values for {n} tokens")
    steps = "" if n_steps == 1 else f" for {n_steps} steps"
    for name, array, limit, why in (
        ("tokens", inputs.tokens, plan.config.vocab_size, ""),
        ("positions", inputs.positions, max_context - n_steps + 1, steps),
    ):
        values = array.tolist()
        if min(values) < 0 or max(values) >= limit:
            row = next(i for i, value in enumerate(values) if not 0 <= value < limit)
            raise MachineError(
                f"{name}: row {row} has {values[row]}; must be in 0..{limit - 1}{why}"
            )
    for row, value in enumerate(inputs.temperatures.tolist()):
        if not 0 <= value < np.inf:
            raise MachineError(
                f"temperatures: row {row} has {value}; must be 0 or a positive number"
            )
    if inputs.page_table.shape[:2] != (2, n):
        raise MachineError(f"page_table: shape {inputs.page_table.shape}; must be (2, {n}, pages)")
    _check_pages(inputs, plan, n_steps)
    earlier = inputs.earlier.tolist()
    if any(earlier):
        _check_earlier(inputs, earlier, n_steps)


def _check_pages(inputs: StepInputs, plan: Plan, n_steps: int) -> None:
    """Every page that a row reads or writes in any of the steps is a page of the pool."""
    c = plan.config
    budgets = (plan.pool.full_pages, plan.pool.sliding_pages)
    end = (inputs.positions + (n_steps - 1)) // PAGE + 1
    width = int(end.max())
    for kind, layers, name in KINDS:
        if layers not in c.layer_types:
            continue
        first = (
            np.maximum(inputs.positions - (c.sliding_window - 1), 0) // PAGE if kind else 0 * end
        )
        begin = int(first.min())
        held = inputs.page_table[kind, :, begin:width]
        if held.shape[1] < width - begin:
            held = np.pad(held, ((0, 0), (0, width - begin - held.shape[1])), constant_values=-1)
        bad = held.astype(np.uint32) >= budgets[kind]  # negative ones are too large, too
        if not bad.any():
            continue
        entry = np.arange(begin, width)
        bad &= (entry >= first[:, None]) & (entry < end[:, None])  # a row may be shorter
        if bad.any():
            row = int(bad.any(axis=1).argmax())
            steps = "" if n_steps == 1 else f" and {n_steps} steps"
            pages = inputs.page_table[kind, row, first[row] : end[row]]
            raise MachineError(
                f"page_table: row {row} at position {inputs.positions[row]}{steps} needs "
                f"{end[row] - first[row]} {name} pages numbered 0..{budgets[kind] - 1}, "
                f"has {pages.tolist()}"
            )


def _check_earlier(inputs: StepInputs, earlier: list[int], n_steps: int) -> None:
    """Rows of one sequence stand side by side, at positions and with pages that fit."""
    if n_steps > 1:
        raise MachineError(
            f"earlier: several rows of one sequence in a launch of {n_steps} steps; must be one "
            "step, after which they all would feed the same tokens"
        )
    for row, count in enumerate(earlier):
        most = earlier[row - 1] + 1 if row else 0
        if count not in (0, most):
            right = f"0 or {most}, one more than the row before it has" if row else "0"
            raise MachineError(f"earlier: row {row} has {count}; must be {right}")
        if not count:
            continue
        want = int(inputs.positions[row - 1]) + 1
        if inputs.positions[row] != want:
            raise MachineError(
                f"earlier: row {row} is at position {inputs.positions[row]}; must be at {want}, "
                "after the row before it, which is of the same sequence"
            )
        if not np.array_equal(inputs.page_table[:, row], inputs.page_table[:, row - 1]):
            raise MachineError(
                f"page_table: rows {row - 1} and {row} have different pages; must be the same, as "
                "they are of one sequence (earlier)"
            )


def check_stops(stop_ids: np.ndarray | None, stop_after: int, rows: int) -> None:
    """Refuse stop ids of another shape than the kernel reads.

    Raises:
        MachineError: names what is wrong.
    """
    if stop_ids is not None and stop_ids.shape != (rows, STOP_IDS):
        raise MachineError(
            f"stop_ids: shape {stop_ids.shape}; must be ({rows}, {STOP_IDS}), -1 where unused"
        )
    if not 0 <= stop_after <= rows:
        raise MachineError(
            f"stop_after: {stop_after} rows; must be 0 (never) to {rows}, the rows of the launch"
        )
