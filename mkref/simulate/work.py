"""How much work a task is: the stages that its loader streams, and what its consumers do with each.

Tasks that are alike share one `Shape`. What a stage holds and how stages, row blocks and experts
meet is decided as in `cuda/megakernel.cu`; how long it takes is in `costs`.

What it does not do: know when anything happens.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from mkref.machine.source import build_rows
from mkref.plan.build import CHUNK_PAGES, PAGE
from mkref.plan.effects import ROUTED
from mkref.plan.runtime import attention_items, segments, split_counts
from mkref.plan.task import Op, Task
from mkref.weights.layout import TILE, TILE_WORDS

if TYPE_CHECKING:
    from mkref.config import NorthConfig
    from mkref.machine.source import Ring
    from mkref.simulate.costs import Costs
    from mkref.simulate.situation import Situation
    from mkref.simulate.switches import Switches

__all__ = ["OF_X", "Shape", "Shapes", "Stage"]

TILE_BYTES = 2 * TILE_WORDS
CONSUMERS = 8
CHUNK = PAGE * CHUNK_PAGES
OF_X = (Op.ROUTER, Op.QKV, Op.GATE_UP, Op.HEAD)
"""Products of the normed x: the first of a layer norms it."""
FITTING_TILES = 64  # tiles of a stage for which the kernel has a fast path
TRIP_RESULTS = 64
"""So many results are one trip of MERGE to L2; what a trip fetches beyond them takes longer."""


class Stage(NamedTuple):
    """One filling of a slot of the ring.

    Attributes:
        n_bytes: of the copy.
        lead: ns that the consumers need before they can take it.
        service: ns from taking it until it is given back.
        group: stages that are given back together with it, itself included; 0 if it is not the last
            of them.
    """

    n_bytes: int
    lead: float
    service: float
    group: int


@dataclass(frozen=True)
class Shape:
    """A task: ns from its inputs to its first stage, its stages, ns from the last to the end."""

    head: float
    stages: tuple[Stage, ...]
    tail: float


class Shapes:
    """Shapes of the tasks of a plan for one situation."""

    def __init__(
        self, config: NorthConfig, rows: int, ring: Ring, situation: Situation,
        costs: Costs, switches: Switches,
    ) -> None:  # fmt: skip
        """`rows` is what the plan has room for, `situation` what is active."""
        self.config, self.ring, self.situation = config, ring, situation
        self.costs, self.switches = costs, switches
        self.n_tiles = rows // 8
        self.stamp = 0.0 if switches.traced else costs.stamp
        self.positions = np.array(situation.positions)
        self._known: dict[tuple[int, ...], Shape] = {}

    def of(self, task: Task, *, normed: bool) -> Shape:
        """The shape of a task; `normed`: its SM has the layer's normed x already."""
        experts = self.situation.experts[task.layer] if task.op in ROUTED else 0
        key = (
            task.op, task.first, task.count, task.k_tiles, task.blocks, task.window, task.index,
            experts, normed,
        )  # fmt: skip
        if key not in self._known:
            self._known[key] = self._shape(task, experts, normed)
        return self._known[key]

    def _shape(self, task: Task, experts: int, normed: bool) -> Shape:
        if task.op == Op.ATTENTION:
            return self._attention(task)
        if task.op == Op.MERGE:
            return Shape(self._merge(task), (), 0.0)
        if task.op == Op.EMBED:
            return Shape(self._less(self.costs.embed if task.count else self.costs.no_merge), (), 0)
        if task.op == Op.SAMPLE:
            return Shape(self._less(self.costs.sample), (), 0.0)
        return self._product(task, experts, normed)

    def _less(self, ns: float) -> float:
        """Without the stamp that is in it."""
        return max(ns - self.stamp, 0.0)

    @cached_property
    def _fits(self) -> bool:
        """Do stages and row blocks meet, so that the fast path is compiled? As in the kernel."""
        widths = (self.config.hidden_size, self.config.q_width)
        return (
            self.n_tiles == 1
            and self.ring.stage_tiles == FITTING_TILES
            and all(width // TILE % FITTING_TILES == 0 for width in widths)
        )

    @cached_property
    def _norm(self) -> float:
        """Rows are normed four at a time, or as many as the build is for."""
        c, rows = self.costs, self.situation.rows
        side = min(max(build_rows(rows), self.switches.least_normed), 4)
        return c.norm + c.norm_row * (side - 1) + c.norm_rows * (-(-rows // 4) - 1)

    def _service(self, op: Op, k_tiles: int, n_tiles_of_stage: int) -> float:
        """What the consumers need for the tiles of one stage."""
        c = self.costs
        experts_fit = self._fits and k_tiles == self.config.intermediate_size // TILE
        if self._fits if op != Op.DOWN else experts_fit and k_tiles <= FITTING_TILES:
            return self._less(c.stage[op.name])
        each = c.tile * self.n_tiles if op in OF_X else c.tile_l2
        return self._less(c.stage[op.name]) + each * -(-n_tiles_of_stage // CONSUMERS)

    def _product(self, task: Task, experts: int, normed: bool) -> Shape:
        c, op, k = self.costs, Op(task.op), task.k_tiles
        head = self._less(c.head[op.name])
        if op in OF_X and not normed:
            head += self._norm
        # Runs of tiles, and row blocks that end with each tile of the run.
        if op == Op.GATE_UP:
            runs = [segment.count * k for segment in segments(task, experts)]
        elif op == Op.DOWN:
            runs = [k] * (task.count * experts)
        else:
            runs = [task.count * k]
        stages: list[Stage] = []
        for number, run in enumerate(runs):
            whole = op != Op.DOWN or number % experts == 0  # a row block begins with the run
            for begin in range(0, run, self.ring.stage_tiles):
                end = min(begin + self.ring.stage_tiles, run)
                new_block = whole and begin % k == 0
                lead = self._less((c.block if new_block else c.gap)[op.name])
                # Row blocks that end within the stage, where several fit into it.
                inside = (end - 1) // k - begin // k if op != Op.DOWN else 0
                service = self._service(op, k, end - begin) + inside * c.block[op.name]
                stages.append(Stage((end - begin) * TILE_BYTES, lead, service, 1))
        if not stages:  # an SM without rows
            return Shape(self._less(c.no_merge), (), 0.0)
        stages[0] = stages[0]._replace(lead=0.0)
        return Shape(head, tuple(stages), self._less(c.tail[op.name]))

    def _attention(self, task: Task) -> Shape:
        c, config, ring = self.costs, self.config, self.ring
        items = attention_items(
            self.positions, task.window, config.num_key_value_heads, task,
            self.switches.most_splits,
        )  # fmt: skip
        if not len(items):
            return Shape(self._less(c.no_item), (), 0.0)
        page = config.head_dim // 2  # tiles of a page of one KV head: keys and values
        pages = CHUNK_PAGES * -(-page // ring.stage_tiles)
        parts = 2 if pages > ring.stages else 1  # a short ring takes all keys first, then values
        fresh = items.last_key // CHUNK == items.first_key // CHUNK + items.chunk
        n_pages = items.last_page - items.first_page + 1
        stages: list[Stage] = []
        for number, (n, own) in enumerate(zip(n_pages.tolist(), fresh.tolist(), strict=True)):
            service = (self._less(c.item) + c.fresh * own) / parts
            for part in range(parts):
                tiles = [
                    min(ring.stage_tiles, page // parts - begin)
                    for _ in range(n)
                    for begin in range(0, page // parts, ring.stage_tiles)
                ]
                lead = self._less(c.item_gap) if number and not part else 0.0
                for t in tiles[:-1]:
                    stages.append(Stage(t * TILE_BYTES, lead, 0.0, 0))
                    lead = 0.0
                stages.append(Stage(tiles[-1] * TILE_BYTES, lead, service, len(tiles)))
        return Shape(
            self._less(c.head["ATTENTION"]), tuple(stages), self._less(c.tail["ATTENTION"])
        )

    def _merge(self, task: Task) -> float:
        c = self.costs
        per_row = self.config.q_width // 32  # units: 32 outputs each
        rows = np.arange(task.first, self.situation.rows * per_row, task.count) // per_row
        if not len(rows):
            return self._less(c.no_merge)
        switches = self.switches
        results = split_counts(self.positions, task.window, switches.most_splits)[rows]
        if self.situation.rows <= switches.merge_rows:
            trips = -(-results // switches.merge_at_once)
            more = np.maximum(results - TRIP_RESULTS * trips, 0)
            each = c.merge + c.merge_pass * trips + c.merge_chunk * more
        else:
            each = c.merge_unit + c.merge_panel * -(-results // switches.helper_at_once)
        return float(each.sum())
