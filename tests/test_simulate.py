"""The simulator: the same work as the plan has, in a possible order, the same every time."""

from __future__ import annotations

import re
from collections import defaultdict
from dataclasses import replace
from itertools import pairwise, permutations
from typing import Any

import numpy as np
import pytest

from mkref.config import NORTH_MINI_CODE
from mkref.errors import RequestError
from mkref.machine.source import Ring
from mkref.measure.rungs import barriers, plain
from mkref.plan import NO_COUNTER, Op, Plan, build_plan
from mkref.plan.balance import balance
from mkref.plan.build import MOST_SPLITS
from mkref.simulate.costs import H200, Costs
from mkref.simulate.counters import Counters
from mkref.simulate.ladder import SIMULATED, simulate_ladder
from mkref.simulate.program import Part, assemble
from mkref.simulate.run import Simulated, simulate
from mkref.simulate.situation import Situation
from mkref.simulate.switches import Switches
from mkref.simulate.warps import TASK_SLOTS
from mkref.simulate.work import CHUNK, Shapes
from mkref.trace.events import BEGIN, END, ISSUED, READY
from mkref.trace.path import critical_path
from mkref.trace.ring import ring_use
from mkref.trace.storage import trace_from_dict, trace_to_dict
from tests.example_traces import SMALL, small_plan
from tests.tree import ROOT

RING = Ring(5, 16)
SWITCHES = Switches(ring=RING)
PLAN = small_plan(4)
ROWS = (1, 3, 8)
EACH_CHUNK = 2**20
"""As the most splits: a result of each chunk, as older kernels have it."""
CHUNK_STAGES = 2
"""Of the large geometry with stages of 64 tiles: a page of one KV head each."""
EACH_ROWS = pytest.mark.parametrize("rows", ROWS)


def situation(rows: int, context: int = 300) -> Situation:
    """Rows of the small model."""
    return Situation.uniform(SMALL, [context - 1 - 30 * row for row in range(rows)])


def run(
    plan: Plan = PLAN, rows: int = 1, switches: Switches = SWITCHES, costs: Costs = H200,
    alone: bool = True, stages_of: tuple[int, ...] = (0, 1, 2, 3),
) -> Simulated:  # fmt: skip
    """A step of the small model."""
    return simulate(
        plan, situation(rows), costs=costs, switches=switches, alone=alone, stages_of=stages_of
    )


@EACH_ROWS
def test_every_task_runs_once_after_its_inputs(rows: int) -> None:
    """All tasks have all times; ready is not before the last arrival at the counter, and tasks of
    one SM follow one another but for what the helper does."""
    trace = run(rows=rows).trace
    assert trace.complete.all()
    assert PLAN.n_tasks == trace.n_tasks
    assert bool(rows > 2) == bool(trace.beside.any())
    ends: dict[str, int] = defaultdict(int)
    for event in trace:
        ends[event.signal] = max(ends[event.signal], event.end)
    for event in trace:
        early = rows <= 2 and event.wait.startswith("out") and event.op in ("ROUTER", "QKV", "HEAD")
        if event.wait:
            hop = H200.announced if early else H200.hop
            assert event.ready >= ends[event.wait] + int(hop)


def test_a_task_of_experts_waits_for_the_router() -> None:
    """GATE_UP of a layer with experts begins a search after the layer's last ROUTER."""
    trace = run().trace
    for layer in (1, 2):
        routed = max(e.end for e in trace if (e.op, e.layer) == ("ROUTER", layer))
        first = min(e.ready for e in trace if (e.op, e.layer) == ("GATE_UP", layer))
        assert first >= routed + int(H200.announced + H200.find)


@EACH_ROWS
def test_stages_are_the_bytes_of_the_plan(rows: int) -> None:
    """Shapes of all tasks stream what `mkref.plan.balance` counts."""
    now = Situation.uniform(SMALL, [299] * rows, min(8, 2 * rows))
    shapes = Shapes(SMALL, 8, RING, now, H200, SWITCHES)
    counted = balance(PLAN, rows=rows, context=300)
    n_bytes: dict[str, int] = defaultdict(int)
    for _, _, task in PLAN:
        shape = shapes.of(task, normed=False)
        n_bytes[Op(task.op).name] += sum(stage.n_bytes for stage in shape.stages)
        assert sum(stage.group for stage in shape.stages) == len(shape.stages)
        assert all(stage.n_bytes <= RING.stage_tiles * 512 for stage in shape.stages)
    assert {name: int(each.sum()) for name, each in counted.bytes.items()} == {
        name: n for name, n in n_bytes.items() if n
    }


def test_north_streams_its_bytes() -> None:
    """One step of the large geometry asks for the 7.13 GB that a row needs, in 32 KB stages."""
    plan = build_plan(NORTH_MINI_CODE, 132, full_pages=1, sliding_pages=1)
    now = Situation.uniform(NORTH_MINI_CODE, [8191])
    shapes = Shapes(NORTH_MINI_CODE, 8, Ring(5, 64), now, H200, Switches())
    total = sum(
        stage.n_bytes for _, _, task in plan for stage in shapes.of(task, normed=False).stages
    )
    assert total == int(balance(plan, rows=1, context=8192).total().sum())


def test_the_ring_is_never_too_full() -> None:
    """At most as many stages as there are slots are issued and not released; at most two are in
    flight; a stage lands before it is taken; copies of a task come in its order."""
    trace = run().trace
    stages = trace.stages
    assert stages is not None
    use = ring_use(trace)
    assert use is not None
    for sm in stages.sms:
        times = stages.times[stages.sm == sm]
        issued, landed, taken, released = times.T
        assert (issued <= landed).all()
        assert (landed <= taken).all()
        assert (taken < released).all()
        assert (issued[5:] >= released[:-5]).all()
        assert (issued[2:] >= landed[:-2]).all()
        assert (np.diff(issued) >= 0).all()
        assert (np.diff(released) >= 0).all()
    total = sum(len(Shapes(SMALL, 8, RING, situation(1), H200, SWITCHES).of(t, normed=False).stages)
                for _, _, t in PLAN)  # fmt: skip
    assert total == len(stages) == run().n_copies


def test_same_inputs_same_times() -> None:
    """Two runs are equal to the bit; another seed of the memory's chance is another run."""
    first, second = run(), run()
    assert (first.ms, trace_to_dict(first.trace)) == (second.ms, trace_to_dict(second.trace))
    assert first.ms != run(switches=replace(SWITCHES, seed=2)).ms


def test_the_record_is_a_trace_like_others() -> None:
    """It says that it is simulated, goes through a file and has a critical path to the end."""
    record = run(alone=False)
    trace = record.trace
    assert "simulated" == trace.provenance["label"]
    assert "4 SMs, batch 1, 300 tokens" in trace.where
    assert trace_to_dict(trace) == trace_to_dict(trace_from_dict(trace_to_dict(trace)))
    path = critical_path(trace)
    assert trace.span_ns == sum(link.work_ns + link.wait_ns for link in path)
    streaming = trace.times[:, ISSUED] >= 0
    assert (trace.times[streaming, ISSUED] <= trace.times[streaming, END]).all()


def test_host_is_in_steps_of_their_own() -> None:
    """A step that the host starts costs what the host does; in a long launch it does not."""
    alone, among = run(), run(alone=False)
    assert alone.ms == pytest.approx(alone.kernel_ms + H200.host / 1e6)
    assert among.ms == among.kernel_ms < alone.ms
    assert (1, 0) == (alone.n_launches, among.n_launches)


def test_each_thing_that_helps_helps() -> None:
    """Running ahead, more bandwidth, no copies at all: each step is shorter."""
    base = run().kernel_ms
    assert base < run(switches=replace(SWITCHES, run_ahead=False)).kernel_ms
    slow = replace(H200, bandwidth=H200.bandwidth / 400)
    assert base < run(costs=slow).kernel_ms
    assert base > run(switches=replace(SWITCHES, copies=False)).kernel_ms
    assert base < run(switches=replace(SWITCHES, traced=True)).kernel_ms


def test_more_sms_are_faster() -> None:
    """The large geometry on 33, 66 and 132 SMs."""
    now = Situation.uniform(NORTH_MINI_CODE, [1023])
    c = NORTH_MINI_CODE
    small = replace(c, num_hidden_layers=3, layer_types=NORTH_MINI_CODE.layer_types[:3],
                    mlp_layer_types=NORTH_MINI_CODE.mlp_layer_types[:3])  # fmt: skip
    now = Situation(now.positions, now.experts[:3])
    times = [
        simulate(build_plan(small, n, full_pages=1, sliding_pages=1), now).ms for n in (33, 66, 132)
    ]
    assert times[0] > 1.3 * times[1] > 1.3 * times[2]


def test_memory_bounds_a_step() -> None:
    """No step is shorter than its bytes at the memory's bandwidth, also where that is small."""
    slow = replace(H200, bandwidth=0.5)
    n_bytes = balance(PLAN, rows=1, context=300).total().sum()
    assert run(costs=slow).kernel_ms * 1e6 >= n_bytes / 0.5


@pytest.mark.parametrize("batch", [1, 8])
def test_the_ladder_goes_down(batch: int) -> None:
    """Every rung of the small model ends, with as many launches as it has, in a possible trace; the
    last is the fastest, a launch per operation the slowest."""
    runs = {rung.name: each for rung, each in simulate_ladder(PLAN, situation(batch, 340))}
    assert {rung.name for rung in SIMULATED} == runs.keys()
    assert set("abcdefgh") == {rung.letter for rung in SIMULATED}
    for record in runs.values():
        assert record.trace.complete.all()
        times = record.trace.times
        assert (times[:, READY] >= times[:, BEGIN]).all()
    ms = {name: each.ms for name, each in runs.items()}
    assert "launch per operation" == max(ms, key=ms.__getitem__)
    assert "next token on the device" == min(ms, key=ms.__getitem__)
    # EMBED, HEAD, SAMPLE; six operations in each layer, and two routers.
    assert 3 + 3 * 6 + 2 == runs["launch per operation"].n_launches
    assert ms["graph + PDL, per operation"] < ms["graph, per operation"]


def test_launches_do_not_overlap_but_for_early_loaders() -> None:
    """In a graph, a task of a later launch begins after all tasks of the one before have ended."""
    runs = {rung.name: each for rung, each in simulate_ladder(PLAN, situation(1))}
    trace = runs["graph, per operation"].trace
    by_phase: dict[tuple[int, str], list[tuple[int, int]]] = defaultdict(list)
    for event in trace:
        if event.count:  # not the empty record with which a launch of MERGE alone ends
            by_phase[event.layer, event.op].append((event.begin, event.end))
    order = sorted(by_phase.values(), key=min)
    for before, after in pairwise(order):
        assert min(after)[0] >= max(end for _, end in before) + int(H200.launch["graph"]) - 1


def test_barriers_join_all_sms() -> None:
    """With a barrier between operations nobody begins one before everybody has ended the last."""
    made = barriers(plain(PLAN))
    trace = run(made, switches=replace(SWITCHES, run_ahead=False)).trace
    for counter in range(len(made.counters)):
        ends = [e.end for e in trace if e.signal == made.counters[counter].name]
        ready = [e.ready for e in trace if e.wait == made.counters[counter].name]
        assert max(ends) < min(ready)


def test_a_deadlock_is_told() -> None:
    """A counter that never fills: one line with the SM and the task that waits."""
    lists = [[replace(t, signal=NO_COUNTER) if t.op == Op.QKV and t.layer == 1 and sm == 2 else t
              for t in tasks] for sm, tasks in enumerate(PLAN.tasks)]  # fmt: skip
    counted = replace(PLAN, tasks=tuple(map(tuple, lists)))
    fine = run(counted)  # targets are counted from who arrives
    assert fine.trace.complete.all()
    swapped = [list(reversed(tasks)) if sm == 0 else list(tasks) for sm, tasks in
               enumerate(PLAN.tasks)]  # fmt: skip
    with pytest.raises(RequestError, match=r"SM \d+ waits for ever for .* the plan has a deadlock"):
        run(replace(PLAN, tasks=tuple(map(tuple, swapped))))


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        (lambda: Situation((), (1,)), "give a row from 0 on"),
        (lambda: Situation((-1,), (1,)), "give a row from 0 on"),
        (lambda: Situation((5,), (1, 0)), "at least one"),
        (lambda: run(rows=9), "9 rows and experts of 3 layers"),
        (lambda: simulate(PLAN, Situation((5,), (1,))), "1 rows and experts of 1 layers"),
        (lambda: Switches(in_flight=0), "in_flight is 0"),
    ],
)
def test_refuses_what_makes_no_sense(wrong: object, says: str) -> None:
    """One line names the value and what would be right."""
    with pytest.raises(RequestError, match=says):
        wrong()  # type: ignore[operator]


def test_switches_are_those_of_the_kernel() -> None:
    """The defaults are the constants at the top of cuda/megakernel.cu."""
    text = (ROOT / "cuda" / "megakernel.cu").read_text(encoding="utf-8")

    def constant(name: str) -> str:
        found = re.search(rf"constexpr int {name} =(?:\s*//[^\n]*\n)?\s*([^;]+);", text)
        assert found, name
        return found[1]

    now = Switches()
    assert now.merge_rows == int(constant("MERGE_ROWS"))
    assert now.early_rows == int(constant("EARLY_ROWS"))
    assert now.in_flight_waiting == int(constant("IN_FLIGHT_WAITING"))
    assert TASK_SLOTS == int(constant("TASK_SLOTS"))
    few, batch = (int(constant(f"IN_FLIGHT_{name}")) for name in ("FEW", "BATCH"))
    assert (few, batch) == (now.most_in_flight(4, 9)[0], now.most_in_flight(5, 9)[0])
    held = re.findall(r"OP_(\w+)", constant("HOLD_BACK_AFTER"))
    assert {op.name for op in now.hold_back_after} == set(held)
    assert f"(uint32_t)arrivals / {now.may_miss} : 0u" in text
    # One trip of the consumers, and one of the helper, has the results of all splits.
    consumers = int(constant("CONSUMERS"))
    assert "(MOST_SPLITS + CONSUMERS - 1) / CONSUMERS" == constant("LIST")
    assert now.merge_at_once == -(-MOST_SPLITS // consumers) * consumers
    assert now.most_splits == now.helper_at_once == MOST_SPLITS
    assert "float v[LIST];" in text
    assert "float v[MOST_SPLITS];" in text
    assert now.least_normed == 1
    assert "constexpr int SIDE = MOST_ROWS < 4 ? MOST_ROWS : 4;" in text


def test_some_announcements_may_be_missing() -> None:
    """The counter is full when all but so many have been seen, not before the last was sent."""
    for times, full in (((10.0, 20.0, 90.0), 20.0), ((10.0, 20.0, 22.0), 20.0)):
        for order in permutations(times):
            counters = Counters(1, [0] * 3, {0: 1})
            for at in order:
                assert counters.full_at(0, lambda: None) is None
                counters.arrive(0, at)
            assert full == counters.full_at(0, lambda: None)
    late = Counters(1, [0] * 2, {0: 1})
    late.arrive(0, 90.0, not_before=80.0)
    late.arrive(0, 20.0, not_before=10.0)
    assert 80.0 == late.full_at(0, lambda: None)


def test_only_x_may_miss_announcements() -> None:
    """Of 132 announcements of a layer's x four may be missing; none of the logits or counters."""
    plan = build_plan(NORTH_MINI_CODE, 132, full_pages=1, sliding_pages=1)
    now = Situation.uniform(NORTH_MINI_CODE, [8191])
    shapes = Shapes(NORTH_MINI_CODE, 8, RING, now, H200, Switches())
    program = assemble([Part(plan)], shapes, Switches())
    found = program.may_miss(32)
    assert {4} == set(found.values())
    assert NORTH_MINI_CODE.num_hidden_layers == len(found)
    assert {0} == set(program.may_miss(0).values())


@pytest.mark.parametrize(
    ("rows", "least", "side", "fours"),
    [(1, 1, 1, 1), (1, 4, 4, 1), (2, 1, 2, 1), (3, 1, 4, 1), (4, 1, 4, 1), (8, 1, 4, 2)],
)
def test_rows_are_normed_side_by_side(rows: int, least: int, side: int, fours: int) -> None:
    """As many as the build is for, at least so many, at most four at once."""
    costs = replace(H200, norm_row=10.0, norm_rows=100.0)
    switches = replace(SWITCHES, least_normed=least)
    shapes = Shapes(SMALL, 8, RING, situation(rows), costs, switches)
    task = next(task for _, _, task in PLAN if task.op == Op.QKV)
    norm = shapes.of(task, normed=False).head - shapes.of(task, normed=True).head
    assert norm == pytest.approx(costs.norm + 10.0 * (side - 1) + 100.0 * (fours - 1))


def test_long_merges_take_fewer_trips() -> None:
    """256 results: 64 at once are four trips, 256 are one that takes longer. 33 splits are one."""
    costs = replace(H200, merge_chunk=1.0, merge_pass=500.0)
    task = next(task for _, _, task in PLAN if task.op == Op.MERGE and not task.window)
    now = Situation.uniform(SMALL, [256 * CHUNK - 1])

    def head(**changes: Any) -> float:
        switches = replace(SWITCHES, **changes)
        return Shapes(SMALL, 8, RING, now, costs, switches).of(task, normed=True).head

    units = -(-(SMALL.q_width // 32 - task.first) // task.count)
    few, many = (head(most_splits=EACH_CHUNK, merge_at_once=n) for n in (64, 256))
    assert few - many == pytest.approx(units * (3 * 500.0 - 192.0))
    assert many - head() == pytest.approx(units * 192.0)
    old = head(most_splits=EACH_CHUNK, helper_at_once=32, merge_rows=0)
    assert old - head(merge_rows=0) == pytest.approx(units * 7 * costs.merge_panel)


def test_a_long_row_is_divided_evenly() -> None:
    """Chunks of a row of 2,048 on 132 SMs: 62 or 63 on each, with 33 splits or a result of each."""
    plan = build_plan(NORTH_MINI_CODE, 132, full_pages=1, sliding_pages=1)
    now = Situation.uniform(NORTH_MINI_CODE, [2048 * CHUNK - 1])
    tasks = [task for _, _, task in plan if task.op == Op.ATTENTION and not task.window]
    tasks = [task for task in tasks if task.layer == tasks[0].layer]
    for most in (MOST_SPLITS, EACH_CHUNK):
        switches = Switches(most_splits=most)
        shapes = Shapes(NORTH_MINI_CODE, 8, Ring(6, 64), now, H200, switches)
        chunks = [len(shapes.of(task, normed=True).stages) // CHUNK_STAGES for task in tasks]
        assert {62, 63} == set(chunks)
        assert 4 * 2048 == sum(chunks)


def test_what_announces_itself_is_seen_sooner() -> None:
    """With one row QKV waits for the announcement of x, and the search for that of the logits; with
    eight, or in a kernel without announcements, for the counters."""
    slow = replace(H200, announced=H200.hop / 4, announced_load=0.0)
    for rows, announced, hop in (
        (1, True, H200.hop / 4),
        (8, True, H200.hop),
        (1, False, H200.hop),
    ):
        early = 2 if announced else 0
        switches = replace(SWITCHES, announced=announced, early_rows=early)
        trace = run(rows=rows, switches=switches, costs=slow).trace
        ends = max(e.end for e in trace if (e.op, e.layer) == ("DOWN", 0))
        ready = min(e.ready for e in trace if (e.op, e.layer) == ("QKV", 1))
        assert hop <= ready - ends + 1 < hop + 600


def test_situations() -> None:
    """Expected and known routes: dense layers use one expert; a mean is spread over the layers."""
    one = Situation.uniform(NORTH_MINI_CODE, [8191])
    assert (1, *[8] * 48) == one.experts
    eight = Situation.uniform(NORTH_MINI_CODE, [8191] * 8)
    assert 51.6 == pytest.approx(np.mean(eight.experts[1:]), abs=0.1)
    measured = Situation.uniform(NORTH_MINI_CODE, [8191] * 8, 51.688)
    assert 51.688 == pytest.approx(np.mean(measured.experts[1:]), abs=1 / 48)
    chosen = [[[0], [0]], [[1, 2], [2, 3]], [[4, 5], [4, 5]]]
    assert (1, 3, 2) == Situation.routed(SMALL, [3, 7], chosen).experts
