"""The ladder: one kernel source, from a launch per operation to many steps in one launch.

    a  one launch per operation
    b  the same launches in a CUDA graph
    c  graph with programmatic dependent launch: the next kernel fetches weights before its inputs
       are there
    d  one launch with a barrier of all SMs between operations
    e  counters between tasks, in the order of the model, every operation divided for itself
    f  the balanced order, in which gate and up fill the gaps around attention
    g  the loader ahead of dependencies
    h  several steps per launch, the next token found on the device

All of them compute the same tokens. In a to g a step is a launch (or a graph, or many launches) and
the next token goes over the host; h does not need it. Of b and c several groupings of operations
and sizes of the ring are measured; the best one counts.

What it does not do: run without a GPU.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from mkref.machine.cuda import CudaMachine
from mkref.machine.inputs import StepInputs
from mkref.machine.source import Ring
from mkref.measure.launches import Changes, Mode, SplitCuda, changed_kernel
from mkref.measure.pages import fill_kv, page_table, share_kv
from mkref.measure.record import spread
from mkref.measure.rungs import FEW, FOUR, SINGLE, barriers, plain, split
from mkref.plan.build import Plan, build_plan
from mkref.plan.task import Op

if TYPE_CHECKING:
    from mkref.machine.base import KernelMachine
    from mkref.weights.packed import PackedWeights

__all__ = ["RUNGS", "Rung", "climb", "format_ladder"]

STEPS = 32
TIMEOUT_S = 1.0
Groups = Sequence[Sequence[Op]]

TWO_PER_SM: Changes = {"__launch_bounds__(THREADS, 1)": "__launch_bounds__(THREADS, 2)"}
"""Registers for two blocks on an SM: the next kernel's is there before this one's has ended."""
SMALL_RING = Ring(stages=2, stage_tiles=64)


@dataclass(frozen=True)
class Rung:
    """One way to run a step.

    Attributes:
        letter: of the ladder; several with the same letter are tuning, and the best one counts.
        name: what distinguishes it.
        plan: from the real plan to that of this rung.
        switches: of `kernel_source`.
        groups: operations per launch; None for one launch.
        mode: how launches follow one another.
        ring: of shared memory; None for the largest.
        changes: of the kernel's text.
        steps: per launch.
    """

    letter: str
    name: str
    plan: Callable[[Plan], Plan] = plain
    switches: Mapping[str, bool] = field(default_factory=dict)
    groups: Groups | None = None
    mode: Mode = "stream"
    ring: Ring | None = None
    changes: Changes = field(default_factory=dict)
    steps: int = 1

    def machine(self, plan: Plan) -> CudaMachine:
        """A machine for this rung; `plan` is what it will be given."""
        if self.groups is None:
            return CudaMachine(ring=self.ring)
        return SplitCuda(split(plan, self.groups), self.mode, ring=self.ring)


def _barriers(plan: Plan) -> Plan:
    return barriers(plain(plan))


def _real(plan: Plan) -> Plan:
    return plan


_PDL: dict[str, Any] = {"mode": "dependent", "switches": {"dependent_launch": True}}
_TWO: dict[str, Any] = {"ring": SMALL_RING, "changes": TWO_PER_SM}
_IN_TURN = {"run_ahead": False}

RUNGS = (
    Rung("a", "launch per operation", groups=SINGLE),
    Rung("b", "graph, per operation", groups=SINGLE, mode="graph"),
    Rung("b", "graph, 4 per layer", groups=FOUR, mode="graph"),
    Rung("b", "graph, 3 per layer", groups=FEW, mode="graph"),
    Rung("c", "graph + PDL, per operation", groups=SINGLE, **_PDL),
    Rung("c", "graph + PDL, 4 per layer", groups=FOUR, **_PDL),
    Rung("c", "graph + PDL, 3 per layer", groups=FEW, **_PDL),
    Rung("c", "graph + PDL, per operation, 2 per SM", groups=SINGLE, **_PDL, **_TWO),
    Rung("c", "graph + PDL, 4 per layer, 2 per SM", groups=FOUR, **_PDL, **_TWO),
    Rung("c", "graph + PDL, 3 per layer, 2 per SM", groups=FEW, **_PDL, **_TWO),
    Rung("d", "one launch, grid barriers", _barriers, _IN_TURN),
    Rung("e", "counters", switches=_IN_TURN),
    Rung("f", "balanced order", _real, _IN_TURN),
    Rung("g", "loader runs ahead", _real),
    Rung("h", "next token on the device", _real, steps=STEPS),
)
"""From the lowest to the highest."""


@dataclass
class _Entry:
    """A rung that is being measured."""

    rung: Rung
    machine: KernelMachine | None = None
    samples: list[float] = field(default_factory=list)
    tokens: bytes = b""
    launches: int = 1
    blocks_per_sm: int = 1
    error: str = ""

    def fail(self, error: Exception) -> None:
        """Keep the reason, give the memory back."""
        self.error = f"{type(error).__name__}: {error}"[:400]
        machine, self.machine = self.machine, None
        if machine is not None:
            try:
                machine.close()
            except Exception as again:
                self.error += f"; then {again}"[:200]


def climb(
    weights: PackedWeights,
    batch: int,
    context: int,
    rounds: int,
    *,
    n_sm: int,
    rungs: Iterable[Rung] = RUNGS,
    say: Callable[[str], None] = lambda line: None,
) -> list[dict[str, Any]]:
    """Measure all rungs in turns, so that the clock of the GPU favours none.

    Args:
        weights: on the GPU.
        batch: rows.
        context: tokens in every row after `STEPS` steps.
        rounds: turns that count; one more comes first.
        n_sm: of the plan.
        rungs: what is measured.
        say: gets a line for what fails.

    Returns:
        A row per rung: letter, name, ms_per_step, spread_ms, samples_ms, ratio_to_h, same_tokens,
        or the error. A rung that fails does not end the others, unless it takes the GPU with it.
    """
    table, (full, sliding) = page_table(weights.config, [context] * batch)
    real = build_plan(weights.config, n_sm, full_pages=full, sliding_pages=sliding)
    entries = [_Entry(rung) for rung in rungs]
    owner: KernelMachine | None = None
    for entry in entries:
        try:
            plan = entry.rung.plan(real)
            entry.machine = entry.rung.machine(plan)
            entry.machine.timeout_s = TIMEOUT_S
            with changed_kernel(entry.rung.changes, entry.rung.switches):
                entry.machine.load(plan, weights, context)
            if isinstance(entry.machine, SplitCuda):
                entry.launches = len(entry.machine.launches)
                entry.blocks_per_sm = entry.machine.blocks_per_sm(batch)
            if owner is None:
                owner = entry.machine
                fill_kv(owner)
            else:
                share_kv(entry.machine, owner)
        except Exception as error:  # whatever it is, the other rungs are worth their time
            entry.fail(error)
            say(f"{entry.rung.letter}  {entry.rung.name}: {entry.error}")
    start = np.full(batch, context - STEPS, np.int32)
    tokens = (np.arange(batch) * 1009 + 17).astype(np.int32) % weights.config.vocab_size
    for turn in range(rounds + 1):
        for entry in entries:
            if entry.machine is None:
                continue
            try:
                begin = time.perf_counter()
                out = _steps(entry.machine, entry.rung.steps, tokens, start, table)
                ms = (time.perf_counter() - begin) * 1e3 / STEPS
            except Exception as error:
                entry.fail(error)
                say(f"{entry.rung.letter}  {entry.rung.name}: {entry.error}")
                continue
            entry.tokens = out.tobytes()
            if turn:
                entry.samples.append(ms)
    rows = _rows(entries, batch, context)
    for entry in entries:
        if entry.machine is not None:
            entry.machine.close()
    return rows


def _steps(
    machine: KernelMachine, per_launch: int, tokens: np.ndarray, at: np.ndarray, table: np.ndarray
) -> np.ndarray:
    """`STEPS` steps; int32 [STEPS, rows]. Machines of several launches do one at a time."""
    out = []
    for step in range(0, STEPS, per_launch):
        done = machine.decode(
            StepInputs(tokens, (at + step).astype(np.int32), table), min(per_launch, STEPS - step)
        )
        tokens = done[-1]
        out.append(done)
    return np.concatenate(out)


def _rows(entries: Sequence[_Entry], batch: int, context: int) -> list[dict[str, Any]]:
    good = [e for e in entries if e.samples]
    top = [float(np.median(e.samples)) for e in good if e.rung.letter == "h"]
    right = [e.tokens for e in good if e.rung.letter == "h"]
    rows = []
    for entry in entries:
        row: dict[str, Any] = {
            "batch": batch,
            "context": context,
            "rung": entry.rung.letter,
            "name": entry.rung.name,
            "launches_per_step": entry.launches if entry.rung.steps == 1 else 1 / entry.rung.steps,
            "blocks_per_sm": entry.blocks_per_sm,
        }
        if entry.error:
            row["error"] = entry.error
        if entry.samples:
            row |= spread(entry.samples)
            row["tokens_per_s"] = round(batch * 1e3 / row["ms_per_step"], 2)
            row["ratio_to_h"] = round(row["ms_per_step"] / top[0], 4) if top else None
            row["same_tokens"] = entry.tokens == right[0] if right else None
            same = [e for e in good if e.rung.letter == entry.rung.letter]
            row["best"] = min(same, key=lambda e: np.median(e.samples)) is entry
        rows.append(row)
    return rows


def format_ladder(rows: Sequence[Mapping[str, Any]]) -> str:
    """The rows as a text table; `*` marks the best of a letter that has several."""
    lines = [f"{'':3}{'rung':40}{'ms per step':>12}{'spread':>9}{'to h':>7}  tokens"]
    for row in rows:
        letters = [r["rung"] for r in rows if "ms_per_step" in r]
        if "ms_per_step" not in row:
            lines.append(f"{row['rung']:3}{row['name']:40}{row.get('error', 'not measured')[:120]}")
            continue
        mark = "*" if row["best"] and letters.count(row["rung"]) > 1 else " "
        ratio = "" if row["ratio_to_h"] is None else f"{row['ratio_to_h']:.3f}"
        same = {True: "same", False: "OTHER", None: ""}[row["same_tokens"]]
        lines.append(
            f"{row['rung'] + mark:3}{row['name']:40}{row['ms_per_step']:12.4f}"
            f"{row['spread_ms']:9.4f}{ratio:>7}  {same}"
        )
    return "\n".join(lines)
