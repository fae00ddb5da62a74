"""Plans as `build_plan` makes them: shares, counters, page pool, buffers, and their saved form."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest

from mkref.config import NORTH_MINI_CODE
from mkref.errors import ConfigError, PlanError
from mkref.plan import (
    NO_COUNTER,
    KvPool,
    Op,
    Plan,
    Task,
    balance,
    buffer_table,
    build_plan,
    share,
)
from mkref.plan.buffers import BUFFERS, max_active
from mkref.weights.layout import PackedLayout
from tests.decode import small_config

ROW_OPS = (Op.EMBED, Op.O_PROJ, Op.DOWN, Op.HEAD)


def small_plan(n_sm: int = 3, **changes: object) -> Plan:
    """A plan of the small model."""
    return build_plan(small_config(**changes), n_sm, full_pages=8, sliding_pages=6)


def test_share_covers_everything_evenly() -> None:
    """Ranges follow one another from 0 to the total; lengths differ by at most one."""
    rng = np.random.default_rng(0)
    for total, n in [(0, 5), (1, 1), (3, 200), *rng.integers(1, 3000, (200, 2)).tolist()]:
        ranges = [share(total, n, slot) for slot in range(n)]
        lengths = [end - begin for begin, end in ranges]
        assert [0, *(end for _, end in ranges)] == [*(begin for begin, _ in ranges), total]
        assert max(lengths) - min(lengths) <= 1
        assert min(lengths) >= 0


@pytest.mark.parametrize("n_sm", [1, 2, 3, 4, 7, 16, 61, 132, 300])
def test_row_blocks_are_shared_evenly(n_sm: int) -> None:
    """Per layer and operation, two SMs' row blocks differ by at most one; router and qkv as one."""
    plan = small_plan(n_sm)
    blocks: dict[tuple[int, str], list[int]] = {}
    for sm, _, task in plan:
        if task.op in (*ROW_OPS, Op.ROUTER, Op.QKV):
            together = task.op in (Op.ROUTER, Op.QKV)
            name = "router and qkv" if together else Op(task.op).name
            blocks.setdefault((task.layer, name), [0] * n_sm)[sm] += task.count
    assert len(blocks) == 2 + 3 * plan.config.num_hidden_layers
    for (layer, name), counts in blocks.items():
        assert max(counts) - min(counts) <= 1, (layer, name)


@pytest.mark.parametrize("n_sm", [1, 5, 132])
def test_streamed_bytes_are_the_whole_model(n_sm: int) -> None:
    """Router, qkv, o and head are streamed once, whatever the number of SMs; experts as chosen."""
    plan = small_plan(n_sm)
    config, layout = plan.config, PackedLayout(plan.config)
    got = {name: int(per_sm.sum()) // 512 for name, per_sm in balance(plan).bytes.items()}
    layers = range(config.num_hidden_layers)
    k = config.num_experts_per_tok
    active = [1 if config.is_dense(layer) else k for layer in layers]
    expected = {
        "ROUTER": sum(layout.layer(i).qkv - layout.layer(i).router for i in layers[1:]),
        "QKV": sum(layout.layer(i).gate_up - layout.layer(i).qkv for i in layers),
        "ATTENTION": 5 * config.num_key_value_heads * config.head_dim // 2,
        "GATE_UP": sum(n * layout.gate_up_stride(i) for i, n in zip(layers, active, strict=True)),
        "O_PROJ": sum(layout.layer(i).down - layout.layer(i).o for i in layers),
        "DOWN": sum(n * layout.down_stride(i) for i, n in zip(layers, active, strict=True)),
        "HEAD": layout.total_tiles - layout.head,
    }
    assert expected == got


def test_north_streams_seven_gigabytes_evenly() -> None:
    """One row at 8K context: 7.13 GB on 132 SMs, the busiest SM 6 % above the mean."""
    plan = build_plan(NORTH_MINI_CODE, 132, full_pages=128, sliding_pages=65)
    total = balance(plan, context=8192).total()
    assert 7.13 == round(total.sum() / 1e9, 2)
    assert total.max() / total.mean() < 1.06


def test_balance_refuses_a_batch_that_cannot_be() -> None:
    """No rows, nine rows, no tokens."""
    plan = small_plan()
    for rows, context in ((0, 1), (9, 1), (1, 0)):
        with pytest.raises(ValueError, match="1 to 8 rows"):
            balance(plan, rows=rows, context=context)
    wide = build_plan(small_config(), 3, full_pages=8, sliding_pages=6, rows=16)
    assert balance(wide, rows=16).total().sum() > balance(wide, rows=1).total().sum()
    with pytest.raises(ValueError, match="1 to 16 rows"):
        balance(wide, rows=17)


def test_counters_have_names_and_all_their_producers() -> None:
    """Names are unique; a target is the number of tasks that signal; every wait asks for all."""
    plan = small_plan(7)
    names = [counter.name for counter in plan.counters]
    assert len(names) == len(set(names))
    tasks = [task for _, _, task in plan]
    for index, counter in enumerate(plan.counters):
        assert sum(task.signal == index for task in tasks) == counter.target > 0
    for task in tasks:
        if task.wait != NO_COUNTER:
            assert plan.counters[task.wait].target == task.wait_count
        if task.route_wait != NO_COUNTER:
            assert plan.counters[task.route_wait].target == task.route_count


def test_one_task_per_sm_where_the_work_is_known_at_run_time() -> None:
    """ATTENTION and MERGE have a task on every SM in every layer, GATE_UP two halves of one."""
    n_sm, plan = 40, small_plan(40)
    ops = [Op(task.op) for _, _, task in plan]
    for op, n in ((Op.ATTENTION, 1), (Op.MERGE, 1), (Op.GATE_UP, 2)):
        assert n * n_sm * plan.config.num_hidden_layers == ops.count(op)
    for op in (Op.HEAD, Op.SAMPLE):
        assert n_sm == ops.count(op)
    assert plan.n_tasks == len(ops)
    assert n_sm == plan.n_sm


def test_the_merge_lies_between_the_halves_of_gate_up() -> None:
    """Slots 2 sm and 2 sm + 1 of twice as many as there are SMs; SAMPLE is every SM's last task."""
    n_sm, plan = 7, small_plan(7)
    slots = (Op.ATTENTION, Op.GATE_UP, Op.MERGE)
    for sm, tasks in enumerate(plan.tasks):
        for layer in range(plan.config.num_hidden_layers):
            mine = [(t.op, t.first, t.count) for t in tasks if t.layer == layer and t.op in slots]
            expected = [
                (Op.ATTENTION, sm, n_sm),
                (Op.GATE_UP, 2 * sm, 2 * n_sm),
                (Op.MERGE, sm, n_sm),
                (Op.GATE_UP, 2 * sm + 1, 2 * n_sm),
            ]
            assert expected == mine
        assert (Op.SAMPLE, sm, n_sm, n_sm) == (
            *tasks[-1].words()[:1],
            *tasks[-1].words()[2:4],
            n_sm,
        )
        assert n_sm == tasks[-1].index


def test_the_rows_of_the_router_are_spread() -> None:
    """With more SMs than row blocks, no SM has two; before its other rows, where it has some."""
    plan = build_plan(NORTH_MINI_CODE, 132, full_pages=128, sliding_pages=65)
    for layer in range(1, plan.config.num_hidden_layers):
        routers = [(sm, t.count) for sm, _, t in plan if (t.op, t.layer) == (Op.ROUTER, layer)]
        assert [1] * 8 == [count for _, count in routers]
        assert min(np.diff([sm for sm, _ in routers])) >= 16


@pytest.mark.parametrize(
    ("changes", "layers"),
    [
        ({}, set()),
        ({"first_k_dense_replace": 0}, set()),
        ({"first_k_dense_replace": 2}, set()),
        ({"first_k_dense_replace": 3}, {3, 4}),
        ({"first_k_dense_replace": 4}, {0, 1, 2, 3, 4}),
        ({"first_k_dense_replace": 5}, {0, 1, 2, 3, 4}),
        ({"num_hidden_layers": 1, "first_k_dense_replace": 0}, {0}),
        ({"num_hidden_layers": 2, "first_k_dense_replace": 0}, {0, 1}),
    ],
)
def test_loaders_wait_for_pages_where_no_router_tells(
    changes: dict[str, object], layers: set[int]
) -> None:
    """Layers without two others with routers: loaders wait for the merges of the step before."""
    plan = small_plan(3, **changes)
    attention = [task for _, _, task in plan if task.op == Op.ATTENTION]
    assert layers == {task.layer for task in attention if task.route_wait != NO_COUNTER}
    for task in attention:
        if task.layer in layers:
            counter = plan.counters[task.route_wait]
            assert (f"merge{task.layer}", 3) == (counter.name, task.route_count)


@pytest.mark.parametrize("rows", [8, 16, 32, np.int64(16)])
def test_buffers_follow_the_rows_of_the_plan(rows: int) -> None:
    """Twice the rows, twice the activations; not the columns of a group of query heads."""
    plan = build_plan(small_config(), 3, full_pages=8, sliding_pages=6, rows=rows)
    assert rows == plan.rows == Plan.from_dict(json.loads(json.dumps(plan.to_dict()))).rows
    table = buffer_table(plan, 300)
    assert (2, rows, 96) == table["x"].shape
    assert (rows, 2, 2, 8, 16) == table["q"].shape
    assert (rows, 2, 3, 8, 32) == table["part_o"].shape
    assert (256, rows) == table["tokens_out"].shape
    assert (rows, 8) == table["stop_ids"].shape
    assert min(12, 3 * rows) == max_active(plan.config, rows)


@pytest.mark.parametrize("rows", [0, 1, 12, 64, 8.0, True, "8", None])
def test_rows_that_no_kernel_has(rows: object) -> None:
    """In `build_plan` and in a file."""
    with pytest.raises(PlanError, match=r"rows: .* rows of a batch, must be one of \(8, 16, 32\)"):
        Plan.from_dict({**small_plan().to_dict(), "rows": rows})
    with pytest.raises(PlanError, match=r"rows: .* rows of a batch, must be one of \(8, 16, 32\)"):
        build_plan(
            small_config(),
            3,
            full_pages=1,
            sliding_pages=1,
            rows=rows,  # type: ignore[arg-type]
        )


def test_words_round_trip() -> None:
    """Records in memory, as text, and as tasks are the same; offsets delimit the SMs."""
    plan = small_plan(4)
    words, offsets = plan.words(), plan.offsets()
    assert words.dtype == np.int32
    assert words.shape == (plan.n_tasks, 16)
    for sm, tasks in enumerate(plan.tasks):
        records = words[offsets[sm] : offsets[sm + 1]]
        assert tasks == tuple(Task.from_words(record) for record in records)
    again = Plan.from_dict(json.loads(json.dumps(plan.to_dict())))
    assert plan == again
    assert words.tobytes() == again.words().tobytes()


def test_a_saved_plan_of_another_version_is_refused() -> None:
    """Another format or task record: one line that says what to do."""
    data = small_plan().to_dict()
    changes: list[dict[str, object]] = [{"format": "mkref-plan-1"}, {"fields": ["op"]}]
    for change in changes:
        with pytest.raises(PlanError, match="build it again with `mkref plan`"):
            Plan.from_dict({**data, **change})


@pytest.mark.parametrize("pages", [None, "x", -1, 2.0, True])
def test_pages_of_a_saved_plan_are_numbers(pages: object) -> None:
    """Whatever else a file has there is named."""
    data = small_plan().to_dict()
    with pytest.raises(PlanError, match="plan: kv_pages.full is .*, must be a whole number >= 0"):
        Plan.from_dict({**data, "kv_pages": {"full": pages, "sliding": 6}})


@pytest.mark.parametrize("word", [7.5, "7", None, float("inf")])
def test_words_of_a_saved_plan_are_numbers(word: object) -> None:
    """The message names SM, task and word."""
    data = json.loads(json.dumps(small_plan().to_dict()))
    data["tasks"][2][1][3] = word
    with pytest.raises(PlanError, match="plan: SM 2, task 1: count is .*, must be a whole number"):
        Plan.from_dict(data)


def test_counters_of_a_saved_plan_have_names_and_targets() -> None:
    """A name that is none, a target that is none."""
    data = small_plan().to_dict()
    with pytest.raises(PlanError, match="plan: the name of counter 0 is 5, must be a text"):
        Plan.from_dict({**data, "counters": [[5, 1]]})
    with pytest.raises(PlanError, match="plan: the target of counter 'x0' is -1, must be"):
        Plan.from_dict({**data, "counters": [["x0", -1]]})


@pytest.mark.parametrize("n_sm", [-1, 0, 1025])
def test_n_sm_out_of_range(n_sm: int) -> None:
    """The message names the value and the range."""
    with pytest.raises(PlanError, match=f"n_sm: {n_sm} SMs .* 1 to 1024"):
        small_plan(n_sm)


def test_a_geometry_that_the_kernel_cannot_do_is_refused() -> None:
    """The plan's own limits are those of the kernel."""
    config = replace(small_config(), num_experts=160)
    with pytest.raises(ConfigError, match="num_experts"):
        build_plan(config, 1, full_pages=1, sliding_pages=1)


def test_kv_pool_gives_every_layer_its_own_tiles() -> None:
    """Layers follow one another; each has its kind's pages, all heads, keys and values."""
    config = small_config()
    pool = KvPool.of(config, full_pages=9, sliding_pages=4)
    per_page = config.num_key_value_heads * 64 * config.head_dim * 2 // 256
    at = 0
    for layer in range(config.num_hidden_layers):
        assert at == pool.base(config, layer)
        at += (4 if config.is_sliding(layer) else 9) * per_page
    assert at == pool.total_tiles(config)


def test_buffer_table_has_every_buffer_of_the_kernel() -> None:
    """Same names; sizes of those that are not plain products of the geometry."""
    plan = small_plan(5)
    config, table = plan.config, buffer_table(plan, 300)
    assert list(BUFFERS) == list(table)
    assert max_active(config, 8) == config.num_experts
    assert max(config.num_experts * 48, 112) * 8 == table["h"].shape[0]
    assert table["part_o"].shape == (8, 2, 3, 8, 32)  # 300 tokens: 5 pages, 3 chunks
    assert table["page_table"].shape == (2, 8, 5)
    assert table["tasks"].n_bytes == plan.n_tasks * 64
    dense = small_plan(5, first_k_dense_replace=5, intermediate_size=50)
    assert (112 * 8,) == buffer_table(dense, 300)["h"].shape
    few = small_plan(5, num_experts=128, num_experts_per_tok=1)
    assert max_active(few.config, 8) == 8
