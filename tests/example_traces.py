"""A made-up trace with the shape of a real one: a small plan, played with made-up durations.

As in the kernel, a MERGE runs beside the other tasks of its SM. Stages of the ring are made up to
fit the tasks.
"""

from __future__ import annotations

from itertools import pairwise

import numpy as np

from mkref.config import NORTH_MINI_CODE, NorthConfig
from mkref.plan.build import Plan, build_plan
from mkref.plan.task import Op
from mkref.trace.events import END, READY, Trace
from mkref.trace.perfetto import STREAMING
from mkref.trace.stages import RingShape

SMALL = NorthConfig.from_dict(
    NORTH_MINI_CODE.to_dict()
    | {
        "vocab_size": 512, "hidden_size": 128, "num_hidden_layers": 3, "num_attention_heads": 4,
        "num_key_value_heads": 2, "head_dim": 32, "intermediate_size": 64, "num_experts": 8,
        "prefix_dense_intermediate_size": 128, "num_experts_per_tok": 2, "sliding_window": 128,
        "layer_types": ["full_attention", "sliding_attention", "full_attention"],
        "mlp_layer_types": ["dense", "sparse", "sparse"], "eos_token_id": 1,
    }
)  # fmt: skip
COST = (200, 500, 2000, 2500, 400, 4000, 1500, 3000, 9000, 300)
START = 1_700_000_000_000_000_000
RING = RingShape(stages=4, stage_bytes=4096)


def small_plan(n_sm: int = 4) -> Plan:
    """The plan of a three-layer model."""
    return build_plan(SMALL, n_sm, full_pages=8, sliding_pages=8)


def played(plan: Plan, seed: int = 0) -> np.ndarray:
    """Stamps of a step in which every task takes a made-up time and waits for its counter.

    Returns:
        uint64 [n_tasks, 4], as the kernel writes them.
    """
    rng = np.random.default_rng(seed)
    stamps = np.zeros((plan.n_tasks, 4), dtype=np.uint64)
    arrivals: dict[int, list[int]] = {}
    # Two lists per SM: what its consumers do, and what its helper does beside them.
    lists: list[list[int]] = []
    tasks = [task for _, _, task in plan]
    for begin, end in pairwise(plan.offsets().tolist()):
        merges = [tasks[i].op == Op.MERGE for i in range(begin, end)]
        lists += [
            [i for i, m in zip(range(begin, end), merges, strict=True) if m == side]
            for side in (False, True)
        ]
    clock, at = [START] * len(lists), [0] * len(lists)
    moved = True
    while moved:
        moved = False
        for lane, mine in enumerate(lists):
            while at[lane] < len(mine):
                task = tasks[mine[at[lane]]]
                come = arrivals.get(task.wait, [])
                if task.wait >= 0 and len(come) < task.wait_count:
                    break
                begin = clock[lane]
                ready = max([begin + 20, *come])
                end = ready + int(COST[task.op] * rng.uniform(0.7, 1.5))
                issued = max(begin, end - int(rng.integers(100, 3000)))
                stamps[mine[at[lane]]] = (begin, ready, end, issued)
                arrivals.setdefault(task.signal, []).append(end)
                clock[lane], at[lane], moved = end + 30, at[lane] + 1, True
    return stamps


def played_stages(
    plan: Plan, stamps: np.ndarray, *, ring: RingShape = RING, rows: int = 256, latency: int = 700
) -> np.ndarray:
    """Stamps of stages that fit to those of the tasks: three stages for each task that streams.

    Returns:
        uint64 [n_sm, rows, 4]; stage n is in row n % rows. The loader never had to wait for the
        landing of every third.
    """
    made = np.zeros((plan.n_sm, rows, 4), dtype=np.uint64)
    n = [0] * plan.n_sm
    gone: list[list[int]] = [[] for _ in n]  # times of release
    for (sm, _, task), times in zip(plan, stamps.astype(np.int64).tolist(), strict=True):
        if Op(task.op).name not in STREAMING:
            continue
        step = (times[END] - times[READY]) // 3
        for k in range(3):
            taken = times[READY] + k * step
            issued = gone[sm][-ring.stages] + 10 if n[sm] >= ring.stages else START + 10 * n[sm]
            issued = min(issued, taken)
            landed = 0 if n[sm] % 3 == 2 else min(issued + latency, taken)
            made[sm, n[sm] % rows] = (issued, landed, taken, taken + step)
            gone[sm].append(taken + step)
            n[sm] += 1
    return made


def example_trace(n_sm: int = 4, seed: int = 0, *, stages: bool = False) -> Trace:
    """A complete trace, with the stages of the rings if asked for."""
    plan = small_plan(n_sm)
    stamps = played(plan, seed)
    return Trace.from_plan(
        plan,
        stamps,
        {"machine": "example", "label": "simulated"},
        stage_stamps=played_stages(plan, stamps) if stages else None,
        ring=RING,
    )
