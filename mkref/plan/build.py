"""Build the plan of one decode step: a list of tasks per SM, and the counters that order them.

A plan depends on the model's geometry, the number of SMs and the page budget of the KV pool; not on
the batch, the lengths or the routing, which the tasks read at run time. It is checked by
`mkref.plan.verify`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from mkref.config import NorthConfig, check_kernel_limits
from mkref.errors import PlanError
from mkref.plan.share import share
from mkref.plan.task import FIELDS, NO_COUNTER, WORDS, Flag, Op, Task
from mkref.weights.layout import TILE, PackedLayout

__all__ = ["CHUNK_PAGES", "GROUP_COLUMNS", "MOST_SPLITS", "PAGE", "ROWS", "ROW_CHOICES"]
__all__ += ["Counter", "KvPool", "Plan", "build_plan"]

ROWS = 8
"""Rows of a batch that one step can serve, unless a plan is built for more."""
ROW_CHOICES = (8, 16, 32)
"""One, two or four n sides of `mma.m16n8k16`."""
GROUP_COLUMNS = 8
"""In attention the n side of the mma is the query heads of one KV head."""
PAGE = 64
"""Keys of one KV page."""
CHUNK_PAGES = 2
"""Pages of one attention chunk; fixed, so that a row's sums do not depend on its neighbours."""
MOST_SPLITS = 33
"""Most splits of a row; four KV heads make 132, one for each SM of an H200 (bench/LOG.md)."""
MAX_SMS = 1024


@dataclass(frozen=True)
class KvPool:
    """Where the pages of each layer lie in the pool, in tiles of 512 bytes.

    Full and sliding layers have their own page numbers; a sliding layer only needs its window.
    """

    full_pages: int
    sliding_pages: int
    page_tiles: int  # of one page of one KV head: D/2
    n_kv_heads: int

    def base(self, config: NorthConfig, layer: int) -> int:
        """Tile index of the first page of `layer`."""
        return sum(self.layer_tiles(config, before) for before in range(layer))

    def layer_tiles(self, config: NorthConfig, layer: int) -> int:
        """Tiles that `layer` owns."""
        pages = self.sliding_pages if config.is_sliding(layer) else self.full_pages
        return pages * self.n_kv_heads * self.page_tiles

    def total_tiles(self, config: NorthConfig) -> int:
        """Tiles of the whole pool."""
        return self.base(config, config.num_hidden_layers)

    @classmethod
    def of(cls, config: NorthConfig, full_pages: int, sliding_pages: int) -> KvPool:
        """A pool with the given page budgets (pages of 64 tokens, each holding all KV heads)."""
        return cls(full_pages, sliding_pages, config.head_dim // 2, config.num_key_value_heads)


@dataclass(frozen=True)
class Counter:
    """A monotonic counter: `target` arrivals per step, never reset."""

    name: str
    target: int


@dataclass(frozen=True)
class Plan:
    """Tasks per SM, in the order in which the SM runs them, and the table of counters."""

    config: NorthConfig
    pool: KvPool
    tasks: tuple[tuple[Task, ...], ...]
    counters: tuple[Counter, ...]
    rows: int = ROWS

    @property
    def n_sm(self) -> int:
        """Number of SMs, which is the grid of the launch."""
        return len(self.tasks)

    @property
    def n_tasks(self) -> int:
        """Number of tasks on all SMs."""
        return sum(map(len, self.tasks))

    def __iter__(self) -> Iterator[tuple[int, int, Task]]:
        """All (SM, position in its list, task)."""
        for sm, tasks in enumerate(self.tasks):
            for i, task in enumerate(tasks):
                yield sm, i, task

    def words(self) -> np.ndarray:
        """All records, SM after SM: int32 [n_tasks, 16]."""
        flat = [task.words() for _, _, task in self]
        return np.asarray(flat, dtype=np.int32).reshape(-1, WORDS)

    def offsets(self) -> np.ndarray:
        """First record of each SM, and one past the last: int32 [n_sm + 1]."""
        return np.concatenate([[0], np.cumsum([len(t) for t in self.tasks])]).astype(np.int32)

    def to_dict(self) -> dict[str, object]:
        """A JSON-ready form that `from_dict` turns back into an equal plan."""
        return {
            "format": "mkref-plan-2",
            "fields": list(FIELDS),
            "config": self.config.to_dict(),
            "rows": self.rows,
            "kv_pages": {"full": self.pool.full_pages, "sliding": self.pool.sliding_pages},
            "counters": [[c.name, c.target] for c in self.counters],
            "tasks": [[list(t.words()) for t in tasks] for tasks in self.tasks],
        }

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> Plan:
        """Inverse of `to_dict`.

        Raises:
            PlanError: another format, another task record than this version's, or a number that
                is none.
        """
        if data.get("format") != "mkref-plan-2" or tuple(data.get("fields", ())) != FIELDS:
            raise PlanError(
                f"plan: format {data.get('format')!r} with fields {data.get('fields')} is not the "
                f"'mkref-plan-2' of this version; build it again with `mkref plan`"
            )
        config = NorthConfig.from_dict(data["config"])
        full, sliding = (
            _whole(f"kv_pages.{kind}", data["kv_pages"][kind], least=0)
            for kind in ("full", "sliding")
        )
        return cls(
            config,
            KvPool.of(config, full, sliding),
            tuple(
                tuple(_task(f"SM {sm}, task {at}", words) for at, words in enumerate(tasks))
                for sm, tasks in enumerate(data["tasks"])
            ),
            tuple(_counter(i, *entry) for i, entry in enumerate(data["counters"])),
            _check_rows(data["rows"]),
        )


def _whole(name: str, value: object, least: int | None = None) -> int:
    """A number of a plan file."""
    if isinstance(value, int) and not isinstance(value, bool) and (least is None or value >= least):
        return int(value)
    right = "a whole number" if least is None else f"a whole number >= {least}"
    raise PlanError(f"plan: {name} is {value!r}, must be {right}")


def _task(place: str, words: list[object]) -> Task:
    named = zip(FIELDS, words, strict=True)
    return Task(*(_whole(f"{place}: {name}", word) for name, word in named))


def _counter(index: int, name: object, target: object) -> Counter:
    if not isinstance(name, str):
        raise PlanError(f"plan: the name of counter {index} is {name!r}, must be a text")
    return Counter(name, _whole(f"the target of counter {name!r}", target, least=0))


def _check_rows(rows: object) -> int:
    if isinstance(rows, int | np.integer) and int(rows) in ROW_CHOICES:
        return int(rows)
    raise PlanError(f"rows: {rows!r} rows of a batch, must be one of {ROW_CHOICES}")


def build_plan(
    config: NorthConfig, n_sm: int, *, full_pages: int, sliding_pages: int, rows: int = ROWS
) -> Plan:
    """The plan of one decode step on `n_sm` SMs.

    Args:
        config: the model's geometry.
        n_sm: SMs that run the kernel, 1 to 1024.
        full_pages: pages (64 tokens) in the pool of each full-attention layer.
        sliding_pages: pages in the pool of each sliding layer.
        rows: rows of a batch that one step can serve, 8, 16 or 32.

    Raises:
        ConfigError: a geometry that the kernel does not implement.
        PlanError: `n_sm` or `rows` out of range.
    """
    check_kernel_limits(config)
    if not 1 <= n_sm <= MAX_SMS:
        raise PlanError(f"n_sm: {n_sm} SMs cannot run a plan; give 1 to {MAX_SMS}")
    pool = KvPool.of(config, full_pages, sliding_pages)
    return _Builder(config, n_sm, pool, _check_rows(rows)).build()


class _Builder:
    """Collects tasks per SM; counter targets are counted from the tasks that signal."""

    def __init__(self, config: NorthConfig, n_sm: int, pool: KvPool, n_rows: int) -> None:
        self.config, self.n_sm, self.pool, self.n_rows = config, n_sm, pool, n_rows
        self.layout = PackedLayout(config)
        self.lists: list[list[Task]] = [[] for _ in range(n_sm)]
        self.names: list[str] = []

    def build(self) -> Plan:
        c = self.config
        x = self.counter("x0")
        self.rows(c.hidden_size // TILE, Op.EMBED, 0, signal=x, weights=self.layout.head)
        for layer in range(c.num_hidden_layers):
            x = self.layer(layer, x)
        head = self.counter("head")
        self.head(x, head)
        # Every SM finds the next tokens for itself: its EMBED needs them, and a hop costs more.
        self.slots(Op.SAMPLE, layer=c.num_hidden_layers, wait=head, index=self.n_sm)
        return self.with_targets()

    def layer(self, layer: int, x: int) -> int:
        """Append one layer; takes and returns the counter of its input and output x."""
        c, at, hk = self.config, self.layout.layer(layer), self.config.hidden_size // TILE
        dense = c.is_dense(layer)
        width = c.mlp_width(layer)
        window = c.sliding_window if c.is_sliding(layer) else 0
        sliding = Flag.SLIDING if window else 0
        router, qkv, attention, merge, h, out = (
            NO_COUNTER if name == "router" and dense else self.counter(f"{name}{layer}")
            for name in ("router", "qkv", "attention", "merge", "h", "out")
        )
        pages = self.pool.base(c, layer)
        flags = Flag.DENSE if dense else 0
        expert = {"route_wait": router, "flags": flags, "layer": layer}

        # Router and q, k, v read the same x: one share over the rows of both, so that every SM
        # streams the same number of bytes. The router's rows are spread over all SMs and come
        # first on each: the loaders can find the experts while q, k, v are still being computed.
        n_router = 0 if dense else -(-c.num_experts // TILE)
        n_all = n_router + (c.q_width + 2 * c.kv_width) // TILE
        early = Flag.EARLY if layer else 0  # a hop on everybody's path
        rope = Flag.ROPE if c.uses_rope(layer) else 0
        shared = {"layer": layer, "k_tiles": hk, "wait": x}
        for sm in range(self.n_sm):
            begin, end = share(n_all, self.n_sm, sm)
            first, last = begin * n_router // n_all, end * n_router // n_all
            self.add_rows(
                sm,
                first,
                last,
                Op.ROUTER,
                weights=at.router,
                signal=router,
                flags=early,
                **shared,
            )
            self.add_rows(
                sm,
                begin - first,
                end - last,
                Op.QKV,
                weights=at.qkv,
                signal=qkv,
                flags=rope | early,
                **shared,
            )
        # A loader copies pages to which the merges of the step before have appended. It is sure of
        # those once the helper has waited for the router of another layer, and has then found the
        # experts of a third; else it waits for them.
        others = sum(not c.is_dense(i) for i in range(c.num_hidden_layers) if i != layer)
        appended = merge if others < 2 else NO_COUNTER
        self.slots(
            Op.ATTENTION,
            layer=layer,
            wait=qkv,
            route_wait=appended,
            signal=attention,
            flags=sliding,
            window=window,
            kv_tiles=pages,
        )
        # The merge lies between two halves of the same operator: the first gives the attention of
        # the slowest SM time to arrive, the second hides the hop from the merge to O_PROJ.
        gate_up = {
            "weights": at.gate_up,
            "k_tiles": hk,
            "blocks": width // 8,
            "wait": x,
            "signal": h,
            "index": n_all,
        }
        self.halves(Op.GATE_UP, 0, **gate_up, **expert)
        self.slots(
            Op.MERGE,
            layer=layer,
            wait=attention,
            signal=merge,
            flags=sliding,
            window=window,
            kv_tiles=pages,
        )
        self.halves(Op.GATE_UP, 1, **gate_up, **expert)
        # O and down share their output rows: x + attention + experts is a sum inside one SM. An SM
        # without rows has the tasks, too: their waits tell it that the layer is over, before it may
        # see the next x early and write over q.
        n_out = c.hidden_size // TILE
        o_proj = {"weights": at.o, "k_tiles": c.q_width // TILE, "wait": merge, "layer": layer}
        down = {"weights": at.down, "k_tiles": width // TILE, "blocks": n_out, "wait": h, **expert}
        for sm in range(self.n_sm):
            begin, end = share(n_out, self.n_sm, sm)
            signal = out if end > begin else NO_COUNTER
            self.lists[sm] += [
                Task(Op.O_PROJ, first=begin, count=end - begin, **o_proj),
                Task(Op.DOWN, first=begin, count=end - begin, signal=signal, **down),
            ]
        return out

    def head(self, x: int, signal: int) -> None:
        """One HEAD task per SM, also where there is no row left for it: SAMPLE reads every slot."""
        c = self.config
        for sm in range(self.n_sm):
            begin, end = share(-(-c.vocab_size // TILE), self.n_sm, sm)
            self.lists[sm].append(
                Task(
                    Op.HEAD,
                    c.num_hidden_layers,
                    begin,
                    end - begin,
                    weights=self.layout.head,
                    k_tiles=c.hidden_size // TILE,
                    wait=x,
                    signal=signal,
                    flags=Flag.EARLY,
                    index=sm,
                )
            )

    def counter(self, name: str) -> int:
        self.names.append(name)
        return len(self.names) - 1

    def rows(self, n_blocks: int, op: Op, layer: int, **words: int) -> None:
        """One task per SM over its share of `n_blocks` row blocks."""
        for sm in range(self.n_sm):
            self.add_rows(sm, *share(n_blocks, self.n_sm, sm), op, layer, **words)

    def add_rows(self, sm: int, begin: int, end: int, op: Op, layer: int, **words: int) -> None:
        if end > begin:
            self.lists[sm].append(Task(op, layer, begin, end - begin, **words))

    def halves(self, op: Op, half: int, **words: int) -> None:
        """One task per SM for the first or second half of its share: slots 2 sm and 2 sm + 1."""
        for sm in range(self.n_sm):
            self.lists[sm].append(Task(op, first=2 * sm + half, count=2 * self.n_sm, **words))

    def slots(self, op: Op, **words: int) -> None:
        """One task per SM; it finds its part of the run-time work from (slot, number of slots)."""
        for sm in range(self.n_sm):
            self.lists[sm].append(Task(op, first=sm, count=self.n_sm, **words))

    def with_targets(self) -> Plan:
        """Count the arrivals of every counter and write them into the tasks that wait for it."""
        arrivals = [0] * len(self.names)
        for task in (t for tasks in self.lists for t in tasks):
            if task.signal != NO_COUNTER:
                arrivals[task.signal] += 1

        def aim(task: Task) -> Task:
            return replace(
                task,
                wait_count=0 if task.wait == NO_COUNTER else arrivals[task.wait],
                route_count=0 if task.route_wait == NO_COUNTER else arrivals[task.route_wait],
            )

        return Plan(
            self.config,
            self.pool,
            tuple(tuple(aim(t) for t in _mark_last(tasks)) for tasks in self.lists),
            tuple(Counter(n, a) for n, a in zip(self.names, arrivals, strict=True)),
            self.n_rows,
        )


def _mark_last(tasks: list[Task]) -> list[Task]:
    """Flag, per layer, the last task and the last one that uses the layer's experts."""
    users = {task.layer: i for i, task in enumerate(tasks) if task.op in (Op.GATE_UP, Op.DOWN)}
    last = {task.layer: i for i, task in enumerate(tasks)}
    return [
        replace(
            task,
            flags=task.flags
            | (Flag.RELEASE if users.get(task.layer) == i else 0)
            | (Flag.LAST_OF_LAYER if last[task.layer] == i else 0),
        )
        for i, task in enumerate(tasks)
    ]
