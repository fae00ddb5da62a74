"""What lesson 06 computes: how many experts a batch hits, what a plan knows of them, and sums of
their outputs in several orders."""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING

import numpy as np

from mkref.config import NORTH_MINI_CODE
from mkref.lessons.recorded import bench_record, evidence, recorded_trace
from mkref.plan import Op, Plan, build_plan
from mkref.trace.events import BEGIN, END, ISSUED, READY

if TYPE_CHECKING:
    from mkref.plan.task import Task

__all__ = ["RECORD", "expected_hits", "expert_gb", "head_start", "measured", "order_bits"]
__all__ += ["record_of", "routing", "trained_hits"]

RECORD = "trace_north_h200.json.gz"
N_SM = 132


def expected_hits(batch: int, experts: int = 128, k: int = 8) -> float:
    """Distinct experts of `batch` rows that choose k of them with equal chances, each for itself.

    A row passes by a given expert with probability 1 - k / experts.

    >>> expected_hits(1), expected_hits(2)
    (8.0, 15.5)
    """
    return float(experts * (1 - (1 - k / experts) ** batch))


def measured(batch: int) -> dict[str, float]:
    """The H200's record of `batch` rows of 8,192 tokens each.

    Returns:
        "experts" distinct ones per layer, as the kernel counted them, and "ms" per step.
    """
    name = "h200/decode.json" if batch <= 8 else "h200/rows.json"
    row = next(
        row
        for row in bench_record(name)["rows"]
        if (row["batch"], row["context"], row["kind"]) == (batch, 8192, "even")
    )
    return {"experts": float(row["experts_per_layer"]), "ms": float(row["ms_per_step"])}


def expert_gb(experts: float) -> float:
    """GB of a step's experts, all sparse layers, if so many are hit in each."""
    c = NORTH_MINI_CODE
    sparse = sum(not c.is_dense(layer) for layer in range(c.num_hidden_layers))
    return experts * sparse * 3 * c.intermediate_size * c.hidden_size * 2 / 1e9


def trained_hits(batch: int) -> dict[str, float]:
    """Distinct experts of `batch` tokens, mean of the sparse layers of the trained model nano.

    Returns:
        "chance": with equal chances; "rows": of as many texts; "neighbours": of one text, one
        after another.
    """
    record = evidence("nano_routing.json")
    row = next(row for row in record["rows"] if row["batch"] == batch)
    return {
        "chance": expected_hits(batch, record["experts"], record["per_token"]),
        "rows": float(np.mean(row["distinct"])),
        "neighbours": float(np.mean(row["neighbours"])),
    }


def routing(rows: int, seed: int = 2) -> list[list[int]]:
    """The experts of rows with random logits: eight ids of 128 for each, ascending."""
    from mkref.reference.sampling import top_k

    c = NORTH_MINI_CODE
    logits = np.random.default_rng(seed).normal(0, 1, (rows, c.num_experts)).astype(np.float32)
    chosen: list[list[int]] = top_k(logits, c.num_experts_per_tok).tolist()
    return chosen


@cache
def _plan() -> Plan:
    return build_plan(NORTH_MINI_CODE, N_SM, full_pages=200, sliding_pages=200)


def record_of(op: str, sm: int = 22, layer: int = 10) -> Task:
    """The first record of an operation in a plan for up to eight rows on 132 SMs."""
    tasks = _plan().tasks[sm]
    return next(task for task in tasks if (task.op, task.layer) == (Op[op], layer))


def head_start() -> dict[str, float]:
    """Of the recorded step with one row, us, means over sparse layers and recorded SMs.

    Returns:
        "route": from the end of ROUTER until the first bytes of experts are asked for; "idle": how
        long the loader has asked for nothing by then; "begin": from that until the consumers begin
        GATE_UP; "waited": what the consumers of all SMs wait before the first half of GATE_UP.
    """
    trace = recorded_trace(RECORD)
    stages = trace.stages
    assert stages is not None
    columns, times = trace.columns, trace.times

    def of(op: str) -> np.ndarray:
        return np.asarray(trace.complete & (columns["op"] == trace.ops.index(op)))

    first_half = of("GATE_UP") & (columns["first"] % 2 == 0)
    route, idle, begin = [], [], []
    for layer in np.unique(columns["layer"][of("ROUTER")]):
        here = columns["layer"] == layer
        routed = times[here & of("ROUTER"), END].max()
        for sm in stages.sms:
            mine = here & (columns["sm"] == sm)
            asked = stages.times[stages.sm == sm, 0]
            known = times[mine & of("ATTENTION"), ISSUED].max()  # the last bytes that need no route
            first = asked[np.searchsorted(asked, known, "right")]
            route.append(first - routed)
            idle.append(first - known)
            begin.append(times[mine & first_half, READY].min() - first)
    waited = (times[first_half, READY] - times[first_half, BEGIN]).mean()
    return {
        "route": float(np.mean(route)) / 1e3,
        "idle": float(np.mean(idle)) / 1e3,
        "begin": float(np.mean(begin)) / 1e3,
        "waited": float(waited) / 1e3,
    }


def order_bits(n: int = 64) -> dict[str, int]:
    """How many of `n` outputs change if the eight experts of a row are added in another order.

    Each summand is score * output, float32; docs/numerics.md adds them in ascending id.
    """
    rng = np.random.default_rng(6)
    terms = rng.normal(0, 1, (8, n)).astype(np.float32)
    scores = rng.uniform(0.1, 1, 8).astype(np.float32)

    def total(order: np.ndarray) -> np.ndarray:
        out = np.zeros(n, np.float32)
        for e in order:
            out = out + scores[e] * terms[e]
        return out

    right = total(np.arange(8))
    orders = {
        "largest score first": np.argsort(-scores, kind="stable"),
        "as they come, one day": rng.permutation(8),
        "as they come, next day": rng.permutation(8),
    }
    return {name: int((total(order) != right).sum()) for name, order in orders.items()}
