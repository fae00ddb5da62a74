"""Traces: stamps beside tasks, files, sums. Stages of the ring: test_trace_stages.py."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import numpy as np
import pytest

from mkref.errors import MachineError, PlanError
from mkref.plan.task import Op
from mkref.trace.events import ABSENT, BEGIN, END, READY, Trace
from mkref.trace.storage import load_trace, save_trace, trace_from_dict, trace_to_dict
from mkref.trace.summary import by_op, describe, shares, slowest_sm
from tests.example_traces import COST, START, example_trace, played, small_plan
from tests.tree import ROOT

RECORDED = ROOT / "notebooks" / "data" / "trace_nano_host.json.gz"


def equal(a: Trace, b: Trace) -> bool:
    """Whether two traces say the same."""
    columns = all(np.array_equal(a.columns[name], b.columns[name]) for name in a.columns)
    same = (a.ops, a.counters, a.provenance) == (b.ops, b.counters, b.provenance)
    if a.stages is None or b.stages is None:
        return columns and same and a.stages is b.stages and np.array_equal(a.times, b.times)
    stages = a.stages.ring == b.stages.ring and all(
        np.array_equal(getattr(a.stages, name), getattr(b.stages, name))
        for name in ("sm", "times", "since")
    )
    return columns and same and stages and np.array_equal(a.times, b.times)


def test_events_are_the_tasks_of_the_plan() -> None:
    """Every task of every SM appears once, in order, with its own words and names."""
    plan = small_plan(3)
    trace = Trace.from_plan(plan, played(plan))
    events = list(trace)
    tasks = list(plan)
    assert (plan.n_sm, plan.n_tasks) == (trace.n_sm, trace.n_tasks)
    assert [(sm, i) for sm, i, _ in tasks] == [(e.sm, e.index) for e in events]
    assert [Op(t.op).name for _, _, t in tasks] == [e.op for e in events]
    assert [t.layer for _, _, t in tasks] == [e.layer for e in events]
    waits = ["" if t.wait < 0 else plan.counters[t.wait].name for _, _, t in tasks]
    assert waits == [e.wait for e in events]


def test_times_start_at_zero() -> None:
    """Times count from the first task, however large the clock is; waits and work follow."""
    plan = small_plan(2)
    stamps = played(plan)
    trace = Trace.from_plan(plan, stamps)
    assert 0 == trace.times.min()
    assert np.array_equal(stamps.astype(np.int64) - START, trace.times)
    event = next(iter(trace))
    assert (event.ready - event.begin, event.end - event.ready) == (event.wait_ns, event.work_ns)


def test_what_came_before_the_step_is_at_its_beginning() -> None:
    """In a launch of several steps the loader and the helper are ahead: the step is no longer."""
    plan = small_plan(2)
    stamps = played(plan)
    span = Trace.from_plan(plan, stamps).span_ns
    merge = next(i for i, (_, _, t) in enumerate(plan) if t.op == Op.MERGE)
    stamps[merge, BEGIN] = stamps[0, 3] = START - 700
    trace = Trace.from_plan(plan, stamps)
    assert (0, 0, span) == (trace.event(merge).begin, trace.event(0).issued, trace.span_ns)


@pytest.mark.parametrize("nothing", [0, 2**64 - 1], ids=["zero", "poison"])
def test_unwritten_stamps_are_absent(nothing: int) -> None:
    """A task without stamps is left out of events and sums, and does not stretch the time."""
    plan = small_plan(2)
    stamps = played(plan)
    stamps[5] = nothing
    stamps[7, 3] = nothing
    trace = Trace.from_plan(plan, stamps)
    assert [ABSENT] * 4 == trace.times[5].tolist()
    assert plan.n_tasks - 1 == len(list(trace))
    assert ABSENT == trace.event(7).issued
    assert 0 <= trace.span_ns < 10 * plan.n_tasks * max(COST)


def test_refuses_stamps_of_another_plan() -> None:
    """The message gives both sizes."""
    with pytest.raises(
        PlanError, match=r"\(7, 4\) are not those of this plan, which has \d+ tasks"
    ):
        Trace.from_plan(small_plan(2), np.ones((7, 4), np.uint64))


def test_refuses_a_run_without_stamps() -> None:
    """All zero means that the kernel was built without stamps."""
    plan = small_plan(2)
    with pytest.raises(MachineError, match="trace=True"):
        Trace.from_plan(plan, np.zeros((plan.n_tasks, 4), np.uint64))


@pytest.mark.parametrize("column", [BEGIN, READY])
def test_refuses_time_that_runs_backwards(column: int) -> None:
    """Inside a task, and between a task and the one before it on the same SM."""
    plan = small_plan(2)
    stamps = played(plan)
    stamps[3, column] = stamps[3, END] + 5 if column else stamps[2, END] - 5
    with pytest.raises(MachineError, match="task 3 on SM 0"):
        Trace.from_plan(plan, stamps)


def test_merge_runs_beside_the_others() -> None:
    """It may overlap the tasks around it, and so may no other; in an older trace none does."""
    trace = example_trace(4)
    assert {"MERGE"} == {event.op for event in trace if event.beside}
    assert all(event.beside for event in trace if event.op == "MERGE")
    assert not load_trace(RECORDED).beside.any()


def test_merges_of_an_sm_follow_one_another() -> None:
    """Time does not run backwards on the helper either."""
    plan = small_plan(2)
    stamps = played(plan)
    first, second = [i for i, (sm, _, t) in enumerate(plan) if (sm, t.op) == (0, Op.MERGE)][:2]
    stamps[second, BEGIN] = stamps[first, END] - 5
    with pytest.raises(MachineError, match=f"task {second} on SM 0"):
        Trace.from_plan(plan, stamps)


def test_one_task_after_another_has_nothing_beside() -> None:
    """In a trace where a MERGE waits for its turn, as in the interpreter, it counts like others."""
    plan = small_plan(2)
    times = START + 100 * np.arange(plan.n_tasks, dtype=np.uint64)
    stamps = np.column_stack([times, times + 10, times + 90, times + 50])
    trace = Trace.from_plan(plan, stamps)
    assert not trace.beside.any()
    assert shares(trace).work == pytest.approx(80 * plan.n_tasks / 2 / trace.span_ns)


def test_what_ran_ahead_of_the_last_step_is_dropped() -> None:
    """A launch that ended early: the helper saw a MERGE, the loader issued, both for no step."""
    plan = small_plan(2)
    stamps = played(plan)
    merge = next(i for i, (_, _, t) in enumerate(plan) if t.op == Op.MERGE)
    stamps[merge, BEGIN] = stamps.max() + 1000
    stamps[1, 3] = stamps.max()
    trace = Trace.from_plan(plan, stamps)
    assert 0 == trace.event(merge).wait_ns
    assert ABSENT == trace.event(1).issued
    assert ABSENT != trace.event(2).issued


def test_sms_need_no_common_order() -> None:
    """The first task of the next SM may lie before the last of this one."""
    trace = example_trace(3)
    first_of_1 = trace.tasks_of(1)[0]
    assert trace.times[first_of_1, BEGIN] < trace.times[first_of_1 - 1, END]


@pytest.mark.parametrize("name", ["t.json", "t.json.gz"])
def test_file_round_trip(tmp_path: Path, name: str) -> None:
    """What is read is what was written, with absent stamps, names and provenance."""
    plan = small_plan(3)
    stamps = played(plan, seed=3)
    stamps[2:4] = 0
    stamps[9, 3] = 0
    trace = Trace.from_plan(plan, stamps, {"machine": "x", "date": "today"})
    assert equal(trace, load_trace(save_trace(trace, tmp_path / name)))


def test_equal_traces_give_equal_bytes(tmp_path: Path) -> None:
    """The compressed file holds no time and no name."""
    a = save_trace(example_trace(), tmp_path / "a.json.gz").read_bytes()
    b = save_trace(example_trace(), tmp_path / "b.json.gz").read_bytes()
    assert a == b


def test_recording_does_not_depend_on_opcodes() -> None:
    """Operations are stored by name: a recording of unknown operations is still a trace."""
    data = trace_to_dict(example_trace())
    data["ops"] = [name if name == "MERGE" else f"OLD_{name}" for name in data["ops"]]
    assert "OLD_EMBED" == next(iter(trace_from_dict(data))).op


@pytest.mark.parametrize(
    ("damage", "says"),
    [
        (lambda d: d | {"format": "else"}, "format 'else'"),
        (lambda d: {k: v for k, v in d.items() if k != "times"}, "damaged"),
        (lambda d: d | {"times": d["times"][:2]}, "damaged"),
        (lambda d: d | {"times": [t[:-1] for t in d["times"]]}, "do not fit"),
        (lambda d: d | {"columns": {}}, "damaged"),
        (lambda d: d | {"ops": "x"}, "ops must be a list"),
        (lambda d: d | {"ops": [1]}, "ops must be a list"),
        (lambda d: d | {"counters": []}, "counts to 0"),
        (lambda d: d | {"columns": d["columns"] | {"op": [2**70] * len(d["times"])}}, "counts to"),
    ],
)
def test_damaged_file_is_one_error(damage: object, says: str, tmp_path: Path) -> None:
    """Another format and missing parts are refused in words."""
    path = tmp_path / "t.json.gz"
    data = damage(trace_to_dict(example_trace()))  # type: ignore[operator]
    path.write_bytes(gzip.compress(json.dumps(data).encode()))
    with pytest.raises(PlanError, match=says):
        load_trace(path)


@pytest.mark.parametrize(
    "content", [None, b"", b"{", b"[1]"], ids=["missing", "empty", "cut", "list"]
)
def test_no_trace_is_one_error(content: bytes | None, tmp_path: Path) -> None:
    """No file, no JSON, no trace."""
    path = tmp_path / "t.json"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(PlanError, match=r"t\.json"):
        load_trace(path)


def test_shares_add_up() -> None:
    """Work, wait and outside are the whole machine; each agrees with a plain sum over events."""
    trace = example_trace(4)
    part = shares(trace)
    machine = trace.n_sm * trace.span_ns
    consumers = [e for e in trace if not e.beside]
    assert part.work == pytest.approx(sum(e.work_ns for e in consumers) / machine)
    assert part.wait == pytest.approx(sum(e.wait_ns for e in consumers) / machine)
    assert 1.0 == pytest.approx(part.work + part.wait + part.outside)
    assert 0 < part.outside < 0.2


def test_by_op_counts_every_task_once() -> None:
    """Counts and times of all operations add up to the trace; order is that of a step."""
    trace = example_trace(4)
    rows = by_op(trace)
    assert trace.n_tasks == sum(row.n_tasks for row in rows)
    assert sum(e.work_ns for e in trace) == sum(row.work_ns for row in rows)
    assert [op for op in trace.ops if op in {row.op for row in rows}] == [row.op for row in rows]
    head = next(row for row in rows if row.op == "HEAD")
    assert max(e.work_ns for e in trace if e.op == "HEAD") == head.longest_ns
    assert ["MERGE"] == [row.op for row in rows if row.beside]


def test_slowest_sm_works_longest() -> None:
    """It is found when one SM is made slow."""
    plan = small_plan(3)
    trace = Trace.from_plan(plan, played(plan))
    work = [sum(e.work_ns for e in trace if e.sm == sm and not e.beside) for sm in range(3)]
    assert work.index(max(work)) == slowest_sm(trace)


def test_describe_is_one_sentence_with_the_numbers() -> None:
    """Tasks, SMs, both shares and the three largest operations."""
    trace = example_trace(4)
    text = describe(trace)
    assert "\n" not in text
    assert f"{trace.n_tasks} tasks on 4 SMs" in text
    assert f"work {shares(trace).work:.0%}" in text
    assert "GATE_UP" in text


def test_only_keeps_some_sms() -> None:
    """Their tasks and the zero of time stay."""
    trace = example_trace(4)
    part = trace.only(range(1, 3))
    assert {1, 2} == {e.sm for e in part}
    assert [e for e in trace if e.sm in (1, 2)] == list(part)
