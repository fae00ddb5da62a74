"""A made-up trace with the shape of a real one: a small plan, played with made-up durations."""

from __future__ import annotations

import numpy as np

from mkref.config import NORTH_MINI_CODE, NorthConfig
from mkref.plan.build import Plan, build_plan
from mkref.trace.events import Trace

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
    clock, at = [START] * plan.n_sm, [0] * plan.n_sm
    arrivals: dict[int, list[int]] = {}
    offsets = plan.offsets()
    moved = True
    while moved:
        moved = False
        for sm, tasks in enumerate(plan.tasks):
            while at[sm] < len(tasks):
                task = tasks[at[sm]]
                come = arrivals.get(task.wait, [])
                if task.wait >= 0 and len(come) < task.wait_count:
                    break
                begin = clock[sm]
                ready = max([begin + 20, *come])
                end = ready + int(COST[task.op] * rng.uniform(0.7, 1.5))
                issued = max(begin, end - int(rng.integers(100, 3000)))
                stamps[offsets[sm] + at[sm]] = (begin, ready, end, issued)
                arrivals.setdefault(task.signal, []).append(end)
                clock[sm], at[sm], moved = end + 30, at[sm] + 1, True
    return stamps


def example_trace(n_sm: int = 4, seed: int = 0) -> Trace:
    """A complete trace."""
    plan = small_plan(n_sm)
    return Trace.from_plan(plan, played(plan, seed), {"machine": "example", "label": "simulated"})
