"""What can be chosen about the kernel and its launches without another plan.

The defaults are the constants of `cuda/megakernel.cu`; other values are variants of it, or what it
was before. Other orders of tasks, barriers and splits into launches are other plans
(`mkref.measure.rungs`); other speeds of the GPU are other costs.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from mkref.errors import RequestError
from mkref.plan.build import MOST_SPLITS
from mkref.plan.task import Op

if TYPE_CHECKING:
    from mkref.machine.source import Ring

__all__ = ["Switches"]


@dataclass(frozen=True)
class Switches:
    """Choices of one simulated kernel.

    Attributes:
        ring: stages in shared memory; None: as many as the kernel takes.
        in_flight: most stages asked for and not there; None: IN_FLIGHT_FEW, or IN_FLIGHT_BATCH
            with more than four rows.
        in_flight_waiting: most of them while the consumers wait for another SM's results.
        run_ahead: the loader does not wait for a task's inputs.
        merge_rows: up to so many rows the consumers do MERGE, else the helper.
        early_rows: up to so many rows tasks with Flag.EARLY wait for the announcement of x only.
        announced: router logits tell by themselves that they are there; else a counter does.
        may_miss: of the announcements of x, one in so many need not have come before x is read, but
            its writers must have ended: whoever reads too soon looks again; 0: all must have come.
        least_normed: rows that are normed however few there are; then as many as the build is for.
        most_splits: of a row in attention; an item is one of them, of one KV head, and MERGE reads
            one result of each. A number beyond all rows' chunks: one result of each chunk.
        merge_at_once: results that the consumers ask for in one pass of MERGE.
        helper_at_once: the same of the helper.
        hold_back_after: operations after which the loader holds back while the next task waits.
        copies: bytes take time; without, every copy has landed at once.
        traced: the kernel takes time stamps, which cost time.
        seed: of the random part of the memory's latency.
    """

    ring: Ring | None = None
    in_flight: int | None = None
    in_flight_waiting: int = 1
    run_ahead: bool = True
    merge_rows: int = 1
    early_rows: int = 2
    announced: bool = True
    may_miss: int = 32
    least_normed: int = 1
    most_splits: int = MOST_SPLITS
    merge_at_once: int = 40
    helper_at_once: int = MOST_SPLITS
    hold_back_after: tuple[Op, ...] = (Op.EMBED, Op.QKV, Op.GATE_UP, Op.O_PROJ, Op.DOWN)
    copies: bool = True
    traced: bool = False
    seed: int = 1

    def __post_init__(self) -> None:
        for name in ("in_flight", "in_flight_waiting"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise RequestError(f"simulate: {name} is {value}; at least one copy at a time")

    def most_in_flight(self, rows: int, stages: int) -> tuple[int, int]:
        """Stages in flight at most: in general, and while the consumers wait for x or q.

        >>> Switches().most_in_flight(1, 5), Switches().most_in_flight(8, 5)
        ((2, 1), (3, 1))
        """
        most = min(self.in_flight or (3 if rows > 4 else 2), stages)
        return most, min(self.in_flight_waiting, most)
