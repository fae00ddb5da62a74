"""The verifier: clean plans pass, every damage is found and named."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest

from mkref.config import NORTH_MINI_CODE, NorthConfig
from mkref.errors import PlanError
from mkref.plan import (
    FIELDS,
    NO_COUNTER,
    Buffer,
    Counter,
    Flag,
    KvPool,
    Op,
    Plan,
    Task,
    buffer_table,
    build_plan,
    hazards,
    verify,
)
from tests.decode import small_config

GEOMETRIES: dict[str, dict[str, object]] = {
    "small": {},
    "no dense layer": {"first_k_dense_replace": 0, "num_experts": 16},
    "only dense": {"first_k_dense_replace": 5},
    "one layer": {"num_hidden_layers": 1, "first_k_dense_replace": 0},
    "wide heads": {"num_attention_heads": 8, "num_key_value_heads": 1, "head_dim": 128},
    "128 experts": {"num_experts": 128, "num_experts_per_tok": 8, "intermediate_size": 16},
    "all full": {"layer_types": ["full_attention"] * 5},
}


def plan_of(n_sm: int = 3, **changes: object) -> Plan:
    """A plan of the small model for 512 tokens."""
    return build_plan(small_config(**changes), n_sm, full_pages=8, sliding_pages=8)


def find(plan: Plan, op: Op, layer: int, sm: int) -> tuple[int, Task]:
    """Position and task of the first such task of an SM."""
    for i, task in enumerate(plan.tasks[sm]):
        if (task.op, task.layer) == (op, layer):
            return i, task
    raise LookupError(f"SM {sm} has no {op.name} of layer {layer}")


def with_list(plan: Plan, sm: int, tasks: list[Task]) -> Plan:
    """The plan with another list for one SM."""
    lists = [*plan.tasks]
    lists[sm] = tuple(tasks)
    return replace(plan, tasks=tuple(lists))


def change(plan: Plan, op: Op, layer: int, sm: int, /, **words: int) -> Plan:
    """The plan with some words of one task changed."""
    at, task = find(plan, op, layer, sm)
    tasks = [*plan.tasks[sm]]
    tasks[at] = replace(task, **words)
    return with_list(plan, sm, tasks)


def counter(plan: Plan, name: str) -> int:
    """Index of a counter."""
    return [c.name for c in plan.counters].index(name)


def recount(plan: Plan) -> Plan:
    """Targets and awaited arrivals as the signals now are: leaves only what is wrong with order."""
    signals = [task.signal for _, _, task in plan]
    arrivals = [signals.count(i) for i in range(len(plan.counters))]

    def aim(task: Task) -> Task:
        return replace(
            task,
            wait_count=0 if task.wait == NO_COUNTER else arrivals[task.wait],
            route_count=0 if task.route_wait == NO_COUNTER else arrivals[task.route_wait],
        )

    return replace(
        plan,
        tasks=tuple(tuple(aim(t) for t in tasks) for tasks in plan.tasks),
        counters=tuple(Counter(c.name, n) for c, n in zip(plan.counters, arrivals, strict=True)),
    )


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


Damage = Callable[[Plan], Plan]


def no_release(plan: Plan) -> Plan:
    """DOWN is the last of its layer: its RELEASE is dropped."""
    return change(plan, Op.DOWN, 2, 1, flags=0)


def early_release(plan: Plan) -> Plan:
    """GATE_UP gives the experts back before DOWN has used them."""
    return change(plan, Op.GATE_UP, 2, 1, flags=Flag.RELEASE)


def lowered_target(plan: Plan) -> Plan:
    """DOWN goes on when all but one have written h."""
    _, task = find(plan, Op.DOWN, 2, 1)
    return change(plan, Op.DOWN, 2, 1, wait_count=task.wait_count - 1)


def overlapping_shares(plan: Plan) -> Plan:
    """SM 1 takes the first row block of SM 2 too."""
    _, task = find(plan, Op.O_PROJ, 2, 1)
    return change(plan, Op.O_PROJ, 2, 1, count=task.count + 1)


def gap(plan: Plan) -> Plan:
    """A row block of qkv belongs to nobody."""
    _, task = find(plan, Op.QKV, 2, 1)
    return change(plan, Op.QKV, 2, 1, count=task.count - 1)


def missing_slot(plan: Plan) -> Plan:
    """Two SMs take the same slot of the attention."""
    return change(plan, Op.ATTENTION, 3, 2, first=1)


def disagreeing_slots(plan: Plan) -> Plan:
    """One SM divides by four where the others divide by three."""
    return change(plan, Op.MERGE, 3, 2, count=4)


def wrong_weights(plan: Plan) -> Plan:
    """One tile off."""
    _, task = find(plan, Op.GATE_UP, 4, 1)
    return change(plan, Op.GATE_UP, 4, 1, weights=task.weights + 1)


def outside_weights(plan: Plan) -> Plan:
    """Beyond the packed array."""
    return change(plan, Op.HEAD, 5, 1, weights=1 << 30)


def wrong_pages(plan: Plan) -> Plan:
    """Layer 3 writes into the pages of layer 2."""
    _, task = find(plan, Op.ATTENTION, 2, 0)
    return change(plan, Op.ATTENTION, 3, 0, kv_tiles=task.kv_tiles)


def same_best(plan: Plan) -> Plan:
    """Two HEAD tasks fill the same slot."""
    return change(plan, Op.HEAD, 5, 2, index=1)


def no_sample(plan: Plan) -> Plan:
    """Nobody chooses the token."""
    return with_list(plan, 0, [t for t in plan.tasks[0] if t.op != Op.SAMPLE])


def missing_operation(plan: Plan) -> Plan:
    """A layer without attention."""
    lists = [[t for t in ts if (t.op, t.layer) != (Op.ATTENTION, 1)] for ts in plan.tasks]
    return replace(plan, tasks=tuple(map(tuple, lists)))


def nobody_signals(plan: Plan) -> Plan:
    """A counter that nobody signals, and one who waits for it."""
    counters = (*plan.counters, Counter("lonely", 0))
    plan = replace(plan, counters=counters)
    return change(plan, Op.EMBED, 0, 1, wait=len(counters) - 1, wait_count=0)


def no_route(plan: Plan) -> Plan:
    """The loader does not wait for the router."""
    return change(plan, Op.GATE_UP, 2, 1, route_wait=NO_COUNTER, route_count=0)


def unknown_opcode(plan: Plan) -> Plan:
    """There is no operation 10."""
    return change(plan, Op.MERGE, 0, 2, op=10)


def too_large(plan: Plan) -> Plan:
    """A word of 33 bits."""
    return change(plan, Op.QKV, 1, 1, weights=1 << 31)


def self_made_cycle(plan: Plan) -> Plan:
    """SM 1 merges before it has done its own attention."""
    tasks = [*plan.tasks[1]]
    a, b = find(plan, Op.ATTENTION, 2, 1)[0], find(plan, Op.MERGE, 2, 1)[0]
    tasks[a], tasks[b] = tasks[b], tasks[a]
    return with_list(plan, 1, tasks)


def long_cycle(plan: Plan) -> Plan:
    """The embedding waits for the head."""
    return recount(change(plan, Op.EMBED, 0, 2, wait=counter(plan, "head")))


def loader_cycle(plan: Plan) -> Plan:
    """The loader of SM 1 waits for the h that it must load for."""
    return recount(change(plan, Op.GATE_UP, 2, 1, route_wait=counter(plan, "h2")))


def dropped_wait(plan: Plan) -> Plan:
    """MERGE does not wait for the chunks."""
    return recount(change(plan, Op.MERGE, 2, 1, wait=NO_COUNTER))


def wrong_counter(plan: Plan) -> Plan:
    """O_PROJ waits for the attention, not for its merge."""
    return recount(change(plan, Op.O_PROJ, 2, 1, wait=counter(plan, "attention2")))


def late_signal(plan: Plan) -> Plan:
    """MERGE signals nothing: the others' O_PROJ cannot know."""
    return recount(change(plan, Op.MERGE, 2, 1, signal=NO_COUNTER))


def early_signal(plan: Plan) -> Plan:
    """SM 2 announces its part of the merge with its GATE_UP, before it has merged."""
    at_h, at_merge = counter(plan, "h2"), counter(plan, "merge2")
    plan = change(plan, Op.GATE_UP, 2, 2, signal=at_merge)
    return recount(change(plan, Op.MERGE, 2, 2, signal=at_h))


def swapped_tasks(plan: Plan) -> Plan:
    """DOWN before O_PROJ: x_mid is not there yet."""
    tasks = [*plan.tasks[1]]
    a, b = find(plan, Op.O_PROJ, 2, 1)[0], find(plan, Op.DOWN, 2, 1)[0]
    tasks[a], tasks[b] = tasks[b], tasks[a]
    return with_list(plan, 1, tasks)


def strangers_rows(plan: Plan) -> Plan:
    """SM 1 and SM 2 swap their rows of DOWN: x_mid then lies on the other SM, unannounced."""
    first, second = find(plan, Op.DOWN, 2, 1)[1], find(plan, Op.DOWN, 2, 2)[1]
    plan = change(plan, Op.DOWN, 2, 1, first=second.first, count=second.count)
    return change(plan, Op.DOWN, 2, 2, first=first.first, count=first.count)


def wrong_route(plan: Plan) -> Plan:
    """The loader of SM 1 waits for x, which says nothing about the router logits."""
    return recount(change(plan, Op.GATE_UP, 2, 1, route_wait=counter(plan, "out1")))


DAMAGES: list[tuple[Damage, str]] = [
    (no_release, "SM 1, task .* (DOWN of layer 2): Flag.RELEASE is missing"),
    (early_release, "SM 1, task .* (GATE_UP of layer 2): Flag.RELEASE, but a later task"),
    (lowered_target, "SM 1, task .* (DOWN of layer 2): wait_count = 2 of counter 'h2', which 3"),
    (overlapping_shares, "SM 2, task .* (O_PROJ of layer 2): row block .* belongs to SM 1"),
    (gap, "QKV of layer 2: row blocks .* belong to nobody"),
    (missing_slot, "SM 2, task .* (ATTENTION of layer 3): ATTENTION slot 1 is SM 1, task .*'s too"),
    (disagreeing_slots, "SM 2, task .* (MERGE of layer 3): one of 4 slots, but SM 0, .* says 3"),
    (wrong_weights, "SM 1, task .* (GATE_UP of layer 4): weights = .*, must be"),
    (outside_weights, "SM 1, task .* (HEAD of layer 5): its weights end at tile .*, the packed"),
    (wrong_pages, "SM 0, task .* (ATTENTION of layer 3): kv_tiles = .*, must be"),
    (same_best, "SM 2, task .* (HEAD of layer 5): slot of the bests 1 is SM 1, task .*'s too"),
    (no_sample, "0 SAMPLE tasks, there must be one"),
    (missing_operation, "counter 'attention1': target 3, but 0 tasks signal it"),
    (nobody_signals, "SM 1, task 0 (EMBED of layer 0): nobody signals counter 'lonely'"),
    (no_route, "SM 1, task .* (GATE_UP of layer 2): no route_wait"),
    (unknown_opcode, "SM 2, task .* (opcode 10 of layer 0): 0..9 are the operations"),
    (too_large, "SM 1, task .*: weights = 2147483648 does not fit into 32 bits"),
    (
        self_made_cycle,
        "SM 1, .* (MERGE of layer 2) waits for ever: counter 'attention2' gets 2 of 3 arrivals, the "
        "next from SM 1, .* (ATTENTION of layer 2)",
    ),
    (long_cycle, "SM 2, task 0 (EMBED of layer 0) waits for ever: counter 'head' gets 0 of 3"),
    (
        loader_cycle,
        "SM 1, .* (GATE_UP of layer 2) waits for ever: counter 'h2' .* from SM 1, .* (GATE_UP of",
    ),
    (dropped_wait, "SM 1, task .* (MERGE of layer 2): reads part_o, part_ml of layer 2 without"),
    (wrong_counter, "SM 1, task .* (O_PROJ of layer 2): reads attn of layer 2 without a wait"),
    (late_signal, "(O_PROJ of layer 2): reads attn of layer 2 .* after SM 1, task .* (MERGE of"),
    (early_signal, "(O_PROJ of layer 2): reads attn of layer 2 .* after SM 2, task .* (MERGE of"),
    (swapped_tasks, "(DOWN of layer 2): reads x_mid of layer 2 without a wait .* (O_PROJ of"),
    (strangers_rows, "(DOWN of layer 2): reads x_mid of layer 2 without a wait .* (O_PROJ of"),
    (wrong_route, "SM 1, task .* (GATE_UP of layer 2): reads router_logits of layer 2 without"),
]


@pytest.mark.parametrize(("damage", "message"), DAMAGES, ids=[d.__name__ for d, _ in DAMAGES])
def test_damage_is_found_and_named(damage: Damage, message: str) -> None:
    """One thing is wrong; the message says where and what."""
    pattern = message.replace("(", r"\(").replace(")", r"\)")
    with pytest.raises(PlanError, match=pattern):
        verify(damage(plan_of()))


def test_reuse_of_memory_is_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    """A writer that does not wait for the last readers of the same memory.

    In a real plan such a writer also reads too early; the model is told that it reads nothing.
    """
    monkeypatch.setitem(hazards.READS, Op.ATTENTION, ())
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
    monkeypatch.setitem(hazards.COPIES, "x", 1)
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
