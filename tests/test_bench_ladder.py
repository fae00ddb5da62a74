"""The ladder's bookkeeping, with the CPU machine in the place of the GPU's."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

import pytest

from mkref.machine.cuda import CudaMachine
from mkref.machine.host import HostMachine
from mkref.measure.ladder import RUNGS, STEPS, Rung, climb, format_ladder
from mkref.measure.launches import SplitHost
from mkref.measure.rungs import FOUR, plain, split
from tests.decode import small_model

if TYPE_CHECKING:
    from mkref.plan import Plan


@dataclass(frozen=True)
class HostRung(Rung):
    """The same on a CPU."""

    def machine(self, plan: Plan) -> CudaMachine:
        """Not a `CudaMachine`, but all that is used of one."""
        if self.groups is None:
            return cast(CudaMachine, HostMachine())
        return cast(CudaMachine, SplitHost(split(plan, self.groups)))


def real(plan: Plan) -> Plan:
    """The plan itself."""
    return plan


@pytest.fixture(name="rows", scope="module")
def rows_fixture() -> list[dict[str, Any]]:
    """Five rungs, one of which cannot be built."""
    rungs = [
        HostRung("a", "launches", plain, groups=FOUR),
        HostRung("c", "no such kernel", plain, changes={"no such text": ""}),
        HostRung("e", "counters", plain),
        HostRung("h", "the real one", real, steps=STEPS),
    ]
    said: list[str] = []
    rows = climb(small_model()[1], 2, 60, 2, n_sm=2, rungs=rungs, say=said.append)
    assert ["c  no such kernel: MachineError"] == [line.split(": measure")[0] for line in said]
    return rows


def test_a_failure_leaves_the_others(rows: list[dict[str, Any]]) -> None:
    """It is reported in its row; the other rungs have all their rounds."""
    assert ["a", "c", "e", "h"] == [row["rung"] for row in rows]
    assert "no text 'no such text'" in rows[1]["error"]
    assert [2, 2, 2] == [len(row["samples_ms"]) for row in rows if "error" not in row]


def test_ratios_are_to_the_top(rows: list[dict[str, Any]]) -> None:
    """And all rungs have written the same tokens."""
    good = [row for row in rows if "error" not in row]
    assert [True] * 3 == [row["same_tokens"] for row in good]
    assert 1.0 == good[-1]["ratio_to_h"]
    for row in good:
        want = row["ms_per_step"] / good[-1]["ms_per_step"]
        assert want == pytest.approx(row["ratio_to_h"], rel=1e-3)
        assert row["best"]


def test_text_table(rows: list[dict[str, Any]]) -> None:
    """A line per rung; tuning of one letter has a mark at its best."""
    lines = format_ladder(rows).splitlines()
    assert 5 == len(lines)
    assert lines[2].startswith("c  no such kernel")
    assert lines[4].split()[-2:] == ["1.000", "same"]
    better = {**rows[0], "name": "other", "best": False}
    assert [True, False] == ["*" in x for x in format_ladder([rows[0], better]).splitlines()[1:]]


def test_rungs_are_a_to_h() -> None:
    """In this order; the top is the engine's own way, with nothing changed."""
    assert list("abcdefgh") == list(dict.fromkeys(rung.letter for rung in RUNGS))
    top = RUNGS[-1]
    assert (None, {}, {}, None, STEPS) == (
        top.groups, top.switches, top.changes, top.ring, top.steps,
    )  # fmt: skip
