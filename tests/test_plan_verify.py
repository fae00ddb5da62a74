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
    Counter,
    KvPool,
    Op,
    Plan,
    buffer_table,
    build_plan,
    effects,
    hazards,
    verify,
)
from mkref.plan.clocks import run_clocks
from mkref.plan.hazards import check_order
from mkref.plan.table import TaskTable
from tests.decode import small_config
from tests.plans import change, counter, find, plan_of, recount, with_list

GEOMETRIES: dict[str, dict[str, object]] = {
    "small": {},
    "no dense layer": {"first_k_dense_replace": 0, "num_experts": 16},
    "only dense": {"first_k_dense_replace": 5},
    "one sparse layer": {"first_k_dense_replace": 4},
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
    """The true geometry: about 46,000 tasks."""
    plan = build_plan(NORTH_MINI_CODE, 132, full_pages=128, sliding_pages=65)
    report = verify(plan, 8192)
    assert report.n_tasks == 46052
    text = "\n".join(report.lines())
    assert "46052 tasks on 132 SMs, 295 counters: no violation" in text
    assert "6468 MERGE, 12936 GATE_UP" in text
    assert "7130.32" in text  # MB in all


@pytest.mark.parametrize("rows", [16, 32])
def test_plans_for_more_rows_pass(rows: int) -> None:
    """In the buffers that they ask for; those of eight rows are too small."""
    plan = build_plan(small_config(), 3, full_pages=8, sliding_pages=8, rows=rows)
    assert verify(plan, 512).buffer_bytes > verify(plan_of(), 512).buffer_bytes
    with pytest.raises(PlanError, match=f"buffer 'tokens': 8 elements .* the tasks need {rows}"):
        verify(plan, 512, buffers=buffer_table(plan_of(), 512))


def test_rows_are_those_of_a_kernel() -> None:
    """A plan object may say anything."""
    with pytest.raises(PlanError, match=r"rows: 12 rows of a batch, must be one of \(8, 16, 32\)"):
        verify(replace(plan_of(), rows=12))


def test_a_saved_plan_is_verified_like_a_built_one() -> None:
    """The verifier looks at words only."""
    plan = plan_of()
    assert verify(plan).lines() == verify(Plan.from_dict(plan.to_dict())).lines()


# Single words


# GATE_UP comes after tasks of the same SM that have waited for as much or more.
REDUNDANT_WAITS = (Op.GATE_UP,)
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
    layer = {Op.EMBED: 0, Op.HEAD: 5, Op.SAMPLE: 5}.get(op, 2)
    sm = next(i for i, _, t in plan if i and (t.op, t.layer) == (op, layer))
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
    # An SM with neither qkv nor output rows: the others' MERGE of layer 1 is news to it.
    busy = {
        sm for sm, _, t in plan if t.layer in (1, 2) and t.op in (Op.QKV, Op.O_PROJ) and t.count > 0
    }
    sm = min(set(range(40)) - busy)
    for op, layer in ((Op.ATTENTION, 2), (Op.O_PROJ, 1), (Op.DOWN, 1), (Op.GATE_UP, 1)):
        plan = change(plan, op, layer, sm, wait=NO_COUNTER)
    damaged = recount(plan)
    message = (
        rf"SM {sm}, task \d+ \(ATTENTION of layer 2\): writes part_o, part_ml of layer 2 over that "
        r"of layer 1, which SM \d+, task \d+ \((ATTENTION|MERGE) of layer 1\) may still be using"
    )
    with pytest.raises(PlanError, match=message):
        verify(damaged)


def test_new_keys_stay_until_they_are_in_their_page(monkeypatch: pytest.MonkeyPatch) -> None:
    """A merge that nobody waits for may append too late: its helper is not in the SM's order.

    In a real plan O_PROJ then reads too early; the model is told that it reads nothing.
    """
    monkeypatch.setitem(effects.READS, Op.O_PROJ, ())
    plan = plan_of()
    verify(plan)
    for sm in range(plan.n_sm):
        plan = change(plan, Op.O_PROJ, 2, sm, wait=NO_COUNTER)
    message = (
        r"where the helper does MERGE: "
        r"SM 0, task \d+ \(QKV of layer 3\): writes q, k_new, v_new of layer 3 over that of layer "
        r"2, which SM 0, task \d+ \(MERGE of layer 2\) may still be using"
    )
    with pytest.raises(PlanError, match=message) as caught:
        verify(recount(plan))
    assert "the consumers do" not in str(caught.value)


def test_x_becomes_absent_after_its_readers(monkeypatch: pytest.MonkeyPatch) -> None:
    """DOWN comes after all who read x but its own O_PROJ, which only its threads make right."""
    monkeypatch.setattr(hazards, "SAME_THREADS", ("x_mid",))
    message = (
        r"SM 0, task \d+ \(DOWN of layer 0\): writes x of layer 1 over that of layer 0, "
        r"which SM 0, task \d+ \(O_PROJ of layer 0\) may still be using"
    )
    with pytest.raises(PlanError, match=message):
        verify(plan_of())


def test_clocks_are_those_of_a_late_step() -> None:
    """A step begins when all but the others' SAMPLE of the step before is known, not everything."""
    plan = plan_of(3)
    table = TaskTable(plan)
    clocks = run_clocks(table)
    assert clocks.steps == 2
    # Lanes: the consumers of three SMs, then their helpers, whose last MERGE is known.
    begin = [[0, -1, -1, 0, 0, 0], [-1, 0, -1, 0, 0, 0], [-1, -1, 0, 0, 0, 0]]
    assert begin == clocks.start[plan.offsets()[:-1]].tolist()
    # The loader of SM 1 comes to its first pages with what its helper knew when it had found the
    # experts of the last layer: the router of the layer before. So after all merges but two.
    first = int(np.flatnonzero(table.sm[clocks.readers] == 1)[0])
    assert Op.ATTENTION == table["op"][clocks.readers[first]]
    assert [5, 5, 5] == table.lengths[3:].tolist()
    assert [-2, -2, -2] == clocks.loader[first, 3:].tolist()


def test_clocks_where_the_consumers_merge() -> None:
    """The helper has no task of its own; what was sure about it is now sure about the consumers."""
    table = TaskTable(plan_of(3), helped=())
    assert [0, 0, 0] == table.lengths[3:].tolist()
    assert table.at.tolist() == table.turn.tolist()
    clocks = run_clocks(table)
    assert 2 == clocks.steps
    # O_PROJ knows of every other SM all tasks up to its MERGE.
    merges = table.group(Op.MERGE, 2)
    output = table.group(Op.O_PROJ, 2)[1]
    assert (table.at[merges] + 1).tolist() == clocks.start[output, :3].tolist()
    # And the loader of SM 1, at its first pages, all merges of the step before but the last two.
    first = int(np.flatnonzero(table.sm[clocks.readers] == 1)[0])
    known = table.lengths[:3] + clocks.loader[first, :3]
    assert (known > table.at[table.group(Op.MERGE, 2)]).all()
    assert (known <= table.at[table.group(Op.MERGE, 3)]).all()


def test_a_table_for_the_other_place() -> None:
    """The same as one made for it, and the first stays as it was."""
    plan = plan_of()
    first = TaskTable(plan)
    for helped, early in effects.KINDS:
        made, other = TaskTable(plan, helped, early), first.with_helped(helped, early)
        every = np.arange(len(made))
        assert made.reads_early(every).tolist() == other.reads_early(every).tolist()
        assert made.lane.tolist() == other.lane.tolist()
        assert made.turn.tolist() == other.turn.tolist()
        assert made.lengths.tolist() == other.lengths.tolist()
    assert TaskTable(plan).lane.tolist() == first.lane.tolist()


@pytest.mark.parametrize("n_sm", [1, 3])
@pytest.mark.parametrize("route_wait", [NO_COUNTER, "qkv2", "router4"])
def test_loaders_are_sure_of_the_pages(n_sm: int, route_wait: int | str) -> None:
    """Without a sparse layer, nothing but the wait says that the last step's keys are there.

    Not even on one SM: the loader runs ahead of its own consumers.
    """
    dense = 4 if route_wait == "router4" else 5
    layer = 4 if route_wait == "router4" else 2
    plan = plan_of(n_sm, first_k_dense_replace=dense)
    verify(plan)
    wait = counter(plan, route_wait) if isinstance(route_wait, str) else route_wait
    message = (
        rf"SM 0, task \d+ \(ATTENTION of layer {layer}\): reads kv of layer {layer} of the step "
        rf"before without a wait that comes after SM 0, task \d+ \(MERGE of layer {layer}\)"
    )
    with pytest.raises(PlanError, match=message):
        verify(recount(change(plan, Op.ATTENTION, layer, 0, route_wait=wait)))


def test_the_next_step_waits_for_the_last_readers_of_this_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """An SM that samples at once makes x ABSENT while others' HEAD still reads it.

    In a real plan such a SAMPLE also reads too early; the model is told that it reads nothing.
    """
    monkeypatch.setitem(effects.READS, Op.SAMPLE, ())
    damaged = recount(change(plan_of(), Op.SAMPLE, 5, 1, wait=NO_COUNTER))
    message = (
        r"SM 1, task 0 \(EMBED of layer 0\): writes x of layer 0 over that of layer 5 of the step "
        r"before, which SM 0, task \d+ \(HEAD of layer 5\) of the step before may still be using"
    )
    with pytest.raises(PlanError, match=message):
        verify(damaged)


def test_tokens_are_used_before_there_are_new_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    """SAMPLE before EMBED: the tokens of this step would be lost. Other checks find it first."""
    monkeypatch.setitem(effects.READS, Op.SAMPLE, ())
    plan = plan_of()
    _, sample = find(plan, Op.SAMPLE, 5, 1)
    others = [task for task in plan.tasks[1] if task != sample]
    plan = recount(with_list(plan, 1, [replace(sample, wait=NO_COUNTER), *others]))
    table = TaskTable(plan)
    expected = (
        "SM 1, task 0 (SAMPLE of layer 5): writes tokens of layer 5 over that of layer 5 of the "
        "step before, which SM 1, task 1 (EMBED of layer 0) may still be using"
    )
    also = (  # x is made ABSENT too soon
        "SM 1, task 1 (EMBED of layer 0): writes x of layer 0 over that of layer 5 of the step "
        "before, which SM 0, task 36 (HEAD of layer 5) of the step before may still be using"
    )
    assert [expected, also] == list(check_order(table, run_clocks(table)))


def test_a_counter_is_full_before_the_next_step_adds_to_it() -> None:
    """EMBED may come before another SM's SAMPLE of the step before: no counter for both.

    Nobody waits for this one, so that nothing else is wrong.
    """
    plan = plan_of()
    plan = replace(plan, counters=(*plan.counters, Counter("both", 0)))
    both = len(plan.counters) - 1
    plan = change(plan, Op.SAMPLE, 5, 1, signal=both)
    verify(recount(plan))
    _, embed = find(plan, Op.EMBED, 0, 0)
    halves = replace(embed, count=1, signal=both), replace(embed, first=1, count=embed.count - 1)
    plan = with_list(plan, 0, [*halves, *plan.tasks[0][1:]])
    message = (
        r"SM 0, task 0 \(EMBED of layer 0\): signals counter 'both' without a wait that comes "
        r"after the signal of SM 1, task \d+ \(SAMPLE of layer 5\) of the step before"
    )
    with pytest.raises(PlanError, match=message):
        verify(recount(plan))


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


SIZED = ["h", "best_values", "counters", "part_ml", "q", "kv", "weights", "rope", "x", "tasks"]
SIZED += ["earlier", "stop_ids", "tokens_out", "progress", "control", "active_experts"]


@pytest.mark.parametrize("name", SIZED)
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


def test_all_halves_of_an_sm_are_of_one_share() -> None:
    """The helper divides the work of GATE_UP once per layer."""
    plan = plan_of()
    (at1, one), (at2, two) = find(plan, Op.GATE_UP, 2, 1), find(plan, Op.GATE_UP, 2, 2)
    for sm, at, task in ((1, at1, two), (2, at2, one)):
        tasks = [task if i == at else t for i, t in enumerate(plan.tasks[sm])]
        plan = with_list(plan, sm, tasks)
    with pytest.raises(PlanError, match="is of another share than the SM's GATE_UP before it"):
        verify(recount(plan))
