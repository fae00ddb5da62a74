"""The verifier: clean plans pass; every word, every order and every buffer is checked."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from mkref.config import NORTH_MINI_CODE, NorthConfig
from mkref.errors import PlanError
from mkref.plan import (
    FIELDS,
    NO_COUNTER,
    Buffer,
    KvPool,
    Op,
    Plan,
    buffer_table,
    build_plan,
    effects,
    verify,
)
from tests.decode import small_config
from tests.plans import change, find, plan_of, recount

GEOMETRIES: dict[str, dict[str, object]] = {
    "small": {},
    "no dense layer": {"first_k_dense_replace": 0, "num_experts": 16},
    "only dense": {"first_k_dense_replace": 5},
    "one layer": {"num_hidden_layers": 1, "first_k_dense_replace": 0},
    "wide heads": {"num_attention_heads": 8, "num_key_value_heads": 1, "head_dim": 128},
    "128 experts": {"num_experts": 128, "num_experts_per_tok": 8, "intermediate_size": 16},
    "all full": {"layer_types": ["full_attention"] * 5},
}


# Clean plans


@pytest.mark.parametrize("n_sm", [1, 2, 4, 7, 132])
@pytest.mark.parametrize("name", GEOMETRIES)
def test_clean_plans_pass(name: str, n_sm: int) -> None:
    """Whatever the geometry and the number of SMs, also more SMs than there are row blocks."""
    plan = plan_of(n_sm, **GEOMETRIES[name])
    report = verify(plan, 512)
    sizes = (n_sm, plan.n_tasks, len(plan.counters))
    assert sizes == (report.n_sm, report.n_tasks, report.n_counters)
    assert sum(report.tasks_per_op.values()) == plan.n_tasks


def test_north_on_132_sms_passes() -> None:
    """The true geometry: about 39,000 tasks."""
    plan = build_plan(NORTH_MINI_CODE, 132, full_pages=128, sliding_pages=65)
    report = verify(plan, 8192)
    assert report.n_tasks == 38725
    text = "\n".join(report.lines())
    assert "38725 tasks on 132 SMs, 295 counters: no violation" in text
    assert "6468 GATE_UP" in text
    assert "7130.32" in text  # MB in all


def test_a_saved_plan_is_verified_like_a_built_one() -> None:
    """The verifier looks at words only."""
    plan = plan_of()
    assert verify(plan).lines() == verify(Plan.from_dict(plan.to_dict())).lines()


# Single words


# GATE_UP and DOWN come after tasks of the same SM that have waited for as much or more.
REDUNDANT_WAITS = (Op.GATE_UP, Op.DOWN)
DAMAGED_WORDS = [
    (op, field, delta)
    for op in Op
    for field in FIELDS
    for delta in (-1, 1)
    if not (field == "wait" and op in REDUNDANT_WAITS)
]


@pytest.mark.parametrize(("op", "field", "delta"), DAMAGED_WORDS)
def test_every_word_matters(op: Op, field: str, delta: int) -> None:
    """One word of one task off by one: always refused, in the name of somebody."""
    plan = plan_of()
    sm = 0 if op in (Op.ROUTER, Op.SAMPLE) else 1
    layer = {Op.EMBED: 0, Op.HEAD: 5, Op.SAMPLE: 5}.get(op, 2)
    _, task = find(plan, op, layer, sm)
    damaged = change(plan, op, layer, sm, **{field: getattr(task, field) + delta})
    with pytest.raises(PlanError, match=r"(SM \d+, task \d+|counter '\w+'|layer \d|SAMPLE)"):
        verify(damaged)


@pytest.mark.parametrize("op", REDUNDANT_WAITS)
def test_a_wait_that_another_implies_may_go(op: Op) -> None:
    """The verifier asks whether the order is sure, not whether a particular wait is there."""
    verify(recount(change(plan_of(), op, 2, 1, wait=NO_COUNTER)))


def test_reuse_of_memory_is_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    """A writer that does not wait for the last readers of the same memory.

    In a real plan such a writer also reads too early; the model is told that it reads nothing.
    """
    monkeypatch.setitem(effects.READS, Op.ATTENTION, ())
    plan = plan_of(40)
    verify(plan)
    # An SM with neither qkv nor output rows: its last task of layer 1 is its MERGE.
    busy = {sm for sm, _, t in plan if t.layer in (1, 2) and t.op in (Op.QKV, Op.O_PROJ)}
    sm = min(set(range(40)) - busy)
    damaged = recount(change(plan, Op.ATTENTION, 2, sm, wait=NO_COUNTER))
    message = (
        rf"SM {sm}, task \d+ \(ATTENTION of layer 2\): writes part_o, part_ml of layer 2 over that "
        r"of layer 1, which SM \d+, task \d+ \(MERGE of layer 1\) may still be using"
    )
    with pytest.raises(PlanError, match=message):
        verify(damaged)


def test_one_copy_of_x_would_do(monkeypatch: pytest.MonkeyPatch) -> None:
    """DOWN comes after every GATE_UP, and so after everybody who reads x but its own O_PROJ."""
    monkeypatch.setitem(effects.COPIES, "x", 1)
    verify(plan_of())


def test_no_more_violations_than_can_be_read() -> None:
    """All tasks are wrong: a few are shown, the rest is dots."""
    plan = plan_of()
    lists = tuple(tuple(replace(t, weights=t.weights + 1) for t in ts) for ts in plan.tasks)
    with pytest.raises(PlanError) as caught:
        verify(replace(plan, tasks=lists))
    lines = str(caught.value).splitlines()
    assert len(lines) == 5
    assert lines[-1].strip() == "..."


def test_a_plan_for_no_sm_is_refused() -> None:
    """Also lists that are all empty: nobody does the work."""
    plan = plan_of()
    for tasks in ((), ((), ())):
        with pytest.raises(PlanError, match="EMBED of layer 0: row blocks 0..5 belong to nobody"):
            verify(recount(replace(plan, tasks=tasks)))


# Memory


@pytest.mark.parametrize(
    "name", ["h", "best_values", "counters", "part_ml", "kv", "weights", "rope", "x", "tasks"]
)
def test_a_buffer_that_is_too_small_is_named(name: str) -> None:
    """One element short."""
    plan = plan_of()
    table = buffer_table(plan, 512)
    have = int(np.prod(table[name].shape))
    damaged = {**table, name: Buffer(table[name].dtype, (have - 1,))}
    with pytest.raises(PlanError, match=f"buffer '{name}': {have - 1} elements .* need {have}"):
        verify(plan, 512, buffers=damaged)
    del damaged[name]
    with pytest.raises(PlanError, match=f"buffer '{name}': missing"):
        verify(plan, 512, buffers=damaged)


@pytest.mark.parametrize(("name", "dtype"), [("x", "uint16"), ("kv", "uint32"), ("trace", "int32")])
def test_elements_of_another_size_are_refused(name: str, dtype: str) -> None:
    """As many as the tasks need, but not what the kernel takes them for."""
    plan = plan_of()
    table = buffer_table(plan, 512)
    damaged = {**table, name: Buffer(dtype, table[name].shape)}
    with pytest.raises(PlanError, match=rf"buffer '{name}': elements of \d bytes \({dtype}\)"):
        verify(plan, 512, buffers=damaged)


def test_a_machine_that_does_not_trace_has_no_trace() -> None:
    """The one buffer that may be missing, or be of any length."""
    plan = plan_of()
    table = buffer_table(plan, 512)
    verify(plan, 512, buffers={**table, "trace": Buffer("uint64", (1, 4))})
    del table["trace"]
    verify(plan, 512, buffers=table)


def test_a_pool_of_negative_size() -> None:
    """A plan file may say anything."""
    plan = plan_of()
    with pytest.raises(PlanError, match=r"(full_pages: -8, must be at least 0|kv_tiles = )"):
        verify(replace(plan, pool=replace(plan.pool, full_pages=-8)))


def test_pages_for_one_sequence() -> None:
    """A pool that cannot hold one sequence of the longest length."""
    config = small_config()  # window 70: at most 3 pages, as its first key may end a page
    verify(build_plan(config, 2, full_pages=8, sliding_pages=3), 512)
    with pytest.raises(PlanError, match="full_pages: 7 pages .* 512 tokens needs 8"):
        verify(build_plan(config, 2, full_pages=7, sliding_pages=3), 512)
    with pytest.raises(PlanError, match="sliding_pages: 2 pages .* 512 tokens needs 3"):
        verify(build_plan(config, 2, full_pages=8, sliding_pages=2), 512)
    with pytest.raises(PlanError, match="max_context: 0 tokens"):
        verify(build_plan(config, 2, full_pages=8, sliding_pages=8), 0)


def test_layers_share_no_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    """A pool whose layers overlap is refused although the tasks agree with it."""

    def base(self: KvPool, config: NorthConfig, layer: int) -> int:
        return layer * (self.layer_tiles(config, 0) - 1)

    monkeypatch.setattr(KvPool, "base", base)
    with pytest.raises(PlanError, match="KV pages of layer 1 begin at tile .* within those of"):
        verify(plan_of())
