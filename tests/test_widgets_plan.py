"""The plan explorer: graph of a layer, progress of a step, walks, picture, controls."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from mkref.config import NORTH_MINI_CODE
from mkref.errors import PlanError, RequestError
from mkref.plan import Flag, Interpreter, Op, Plan, build_plan
from mkref.plan.walk import Walk
from mkref.widgets import plan_explorer
from mkref.widgets.plan.graph import ARRIVES, IN_TURN, ROUTES, WAITS, layer_graph
from mkref.widgets.plan.model import PlanView, ranges
from mkref.widgets.plan.picture import PlanPicture
from mkref.widgets.plan.progress import NOTHING, Progress
from mkref.widgets.plan.render import figure, states_table
from mkref.widgets.plan.walk import KEPT, PlanWalk
from tests.engines import tiny_engine
from tests.example_traces import small_plan
from tests.plans import change, find, plan_of, with_list

PLAN = small_plan(4)


@pytest.fixture(scope="module")
def large() -> Plan:
    """The plan of the large model on 132 SMs."""
    return build_plan(NORTH_MINI_CODE, 132, full_pages=8, sliding_pages=8)


def arcs(plan: Plan, layer: int) -> set[tuple[str, str, str]]:
    """Arcs of a layer by name."""
    graph = layer_graph(plan, layer)
    return {(graph.nodes[a.begin].name, a.kind, graph.nodes[a.end].name) for a in graph.arcs}


def test_graph_of_a_sparse_layer() -> None:
    """Operations, counters, and who waits for whom, as docs/architecture.md tells it."""
    assert {
        ("out0", WAITS, "ROUTER"), ("out0", WAITS, "QKV"), ("out0", WAITS, "GATE_UP"),
        ("ROUTER", ARRIVES, "router1"), ("QKV", ARRIVES, "qkv1"),
        ("qkv1", WAITS, "ATTENTION"), ("ATTENTION", ARRIVES, "attention1"),
        ("attention1", WAITS, "MERGE"), ("MERGE", ARRIVES, "merge1"), ("merge1", WAITS, "O_PROJ"),
        ("router1", ROUTES, "GATE_UP"), ("router1", ROUTES, "DOWN"),
        ("GATE_UP", ARRIVES, "h1"), ("h1", WAITS, "DOWN"), ("O_PROJ", IN_TURN, "DOWN"),
        ("DOWN", ARRIVES, "out1"),
    } == arcs(PLAN, 1)  # fmt: skip


def test_graph_of_the_ends() -> None:
    """EMBED stands in layer 0, HEAD and SAMPLE behind the last; other layers do not exist."""
    assert ("EMBED", ARRIVES, "x0") in arcs(PLAN, 0)
    assert not any("ROUTER" in arc for arc in arcs(PLAN, 0))
    assert {("out2", WAITS, "HEAD"), ("HEAD", ARRIVES, "head"), ("head", WAITS, "SAMPLE")} == (
        arcs(PLAN, 3)
    )
    for layer in (-1, 4):
        with pytest.raises(RequestError, match=f"layer: {layer} of a plan with layers 0 to 3"):
            plan_explorer(PLAN, layer=layer)


@pytest.mark.parametrize("layer", range(4))
def test_arcs_lead_to_the_right(layer: int) -> None:
    """Every arc goes to a higher column; no two nodes share a place; all tasks are there."""
    graph = layer_graph(PLAN, layer)
    assert all(graph.nodes[a.begin].column < graph.nodes[a.end].column for a in graph.arcs)
    places = [(node.column, node.row) for node in graph.nodes]
    assert len(places) == len(set(places))
    assert max(row for _, row in places) <= 1
    records = [record for node in graph.nodes for record in node.records]
    assert [r for r, (_, _, task) in enumerate(PLAN) if task.layer == layer] == sorted(records)


def test_graph_of_a_plan_in_a_circle() -> None:
    """A damaged plan is drawn all the same."""
    at = next(i for i, c in enumerate(PLAN.counters) if c.name == "out1")
    broken = change(PLAN, Op.QKV, 1, 0, wait=at)
    assert layer_graph(broken, 1).n_columns == 1
    assert "<svg" in figure(PlanView(Progress(broken), 1, Progress(broken).start())).svg


def test_numbers_in_words() -> None:
    """Neighbours together, long lists cut."""
    assert "0 to 131" == ranges(range(132))
    assert "1, 3 to 4" == ranges([1, 3, 4])


def test_steps_are_those_of_the_interpreter() -> None:
    """At each moment the same SMs can go on and the counters are equal, whoever goes."""
    engine = tiny_engine(n_sm=3)
    engine.generate([5, 77, 30], max_tokens=2, ignore_eos=True)
    interpreter = engine.machine.interpreter  # type: ignore[attr-defined]
    targets = [counter.target for counter in engine.plan.counters]
    for seed in range(3):
        works = Walk(interpreter, targets, 1)
        walk = PlanWalk(engine.plan, works, seed=seed)
        walk.random_order = seed > 0
        while True:
            moment, able = walk.moment, walk.progress.can_go(walk.moment)
            assert works.arrivals() == moment.arrivals
            assert able == [sm for sm in range(3) if works.can_go(sm)]
            if not walk.forward():
                break
        assert walk.progress.is_over(walk.moment)
        assert tuple(targets) == walk.moment.arrivals
        assert len(engine.plan.words()) == walk.at
    engine.close()


def test_walk_computes_the_next_token() -> None:
    """In any order it is the engine's; the engine's own buffers are not touched."""
    engine = tiny_engine(n_sm=3)
    expected = engine.generate([5, 77, 30], max_tokens=6, ignore_eos=True).token_ids
    engine.generate([5, 77, 30], max_tokens=5, ignore_eos=True)
    interpreter = engine.machine.interpreter  # type: ignore[attr-defined]
    before = {name: array.copy() for name, array in interpreter.buffers.items()}
    buffers = interpreter.buffers
    targets = [counter.target for counter in engine.plan.counters]
    tokens = set()
    for seed in range(3):
        works = Walk(interpreter, targets, 1)
        # The step after the last: its token at the position behind.
        works.buffers["tokens"][0] = expected[4]
        works.buffers["positions"][0] = 3 + 4
        walk = PlanWalk(engine.plan, works, seed=seed)
        walk.random_order = True
        assert () == works.tokens()
        walk.run_all()
        tokens.add(works.tokens())
    assert {(expected[5],)} == tokens
    for name, array in before.items():
        assert np.array_equal(array, buffers[name], equal_nan=array.dtype.kind == "f"), name
    engine.close()


def test_walk_refuses_who_cannot_go() -> None:
    """An SM that waits does not move; the walk of the interpreter says so."""
    interpreter = Interpreter.of(PLAN, 128)
    works = Walk(interpreter, [counter.target for counter in PLAN.counters], 1)
    walk = PlanWalk(PLAN)
    while walk.forward(0):
        pass
    assert (1, 0, 0, 0) == walk.moment.done
    assert not works.tokens()
    done = walk.progress.after(walk.progress.start(), 0)
    assert walk.moment == done
    works._sms[1].at = works._sms[1].end
    with pytest.raises(PlanError, match="SM 1 cannot go on"):
        works.advance(1)


def test_going_back_and_on_is_the_same() -> None:
    """Moments are found again, over the places where one is kept; another choice forgets."""
    walk = PlanWalk(small_plan(6))
    moments = [walk.moment]
    while walk.forward():
        moments.append(walk.moment)
    assert len(moments) > KEPT + 2
    for expected in moments[-2::-1]:
        assert walk.back()
        assert expected == walk.moment
    assert not walk.back()
    for expected in moments[1:]:
        assert walk.forward()
        assert expected == walk.moment
    walk.restart()
    assert moments[0] == walk.moment
    assert walk.forward(5)
    assert 1 == len(walk.order)
    assert (0, 0, 0, 0, 0, 1) == walk.moment.done


def test_runs_to_the_end_of_a_layer() -> None:
    """All its tasks are done, and nobody has gone on longer than needed."""
    walk = PlanWalk(PLAN)
    walk.run_layer(0)
    records = [r for r, (_, _, task) in enumerate(PLAN) if task.layer == 0]
    assert all(walk.progress.is_done(walk.moment, r) for r in records)
    assert walk.moment.last in records


def test_deadlock_is_told() -> None:
    """A wait for more than comes: nobody can go on, and it says who waits for whom."""
    target = next(counter.target for counter in PLAN.counters if counter.name == "qkv1")
    broken = change(PLAN, Op.ATTENTION, 1, 2, wait_count=target + 1)
    widget = plan_explorer(broken, layer=1)
    widget._hear(None, {"do": "run_all"}, [])
    assert widget.walk.is_stuck
    said = repr(widget)
    assert "NOBODY CAN GO ON." in said
    assert (
        f"SM 2: ATTENTION of layer 1 waits for counter qkv1 ({target} of {target + 1}); "
        "still to come: nobody: no task is left that signals it."
    ) in said
    assert re.search(r"SM 0: MERGE of layer 1 waits for counter attention1 \(3 of 4\); still to "
                     r"come: 1 ATTENTION on SM 2", said)  # fmt: skip


def test_experts_that_never_come() -> None:
    """A router's counter that never fills holds up the experts, and the words say so."""
    walk = PlanWalk(change(PLAN, Op.GATE_UP, 1, 0, route_count=2))
    walk.run_all()
    assert walk.is_stuck
    said = PlanView(walk.progress, 1, walk.moment).state(0)
    assert said.startswith(
        "GATE_UP of layer 1 waits for its experts, from counter router1 (1 of 2)"
    )


def test_experts_that_are_never_given_back() -> None:
    """Without Flag.RELEASE the next layer's experts have no place; as the interpreter says."""
    plan = plan_of()
    at, task = find(plan, Op.DOWN, 1, 1)
    tasks = [*plan.tasks[1]]
    tasks[at] = replace(task, flags=task.flags & ~Flag.RELEASE)
    walk = PlanWalk(with_list(plan, 1, tasks))
    walk.run_all()
    view = PlanView(walk.progress, 2, walk.moment)
    assert walk.is_stuck
    assert "GATE_UP of layer 2 waits for the place for its experts, which layer 1 never" in (
        view.state(1)
    )


def test_lists_of_a_small_machine() -> None:
    """A row per SM; cells say what is done, can start, or waits."""
    walk = PlanWalk(PLAN)
    for sm in (0, 0, 1):
        walk.forward(sm)
    rows = PlanView(walk.progress, 0, walk.moment).rows
    assert [(sm,) for sm in range(4)] == [row.sms for row in rows]
    ops = ["EMBED", "QKV", "ATTENTION", "GATE_UP", "MERGE", "GATE_UP", "O_PROJ", "DOWN"]
    assert ops == [cell.op for cell in rows[0].cells]
    states = [(c.n_done, c.n_ready, c.n_waiting) for c in rows[0].cells[:3]]
    assert [(1, 0, 0), (0, 0, 1), (0, 0, 0)] == states
    assert (0, 1, 0) == tuple(
        getattr(rows[2].cells[0], n) for n in ("n_done", "n_ready", "n_waiting")
    )


def test_lists_of_a_large_machine(large: Plan) -> None:
    """SMs with equal lists share a row; the sums are those of the layer; it stays small."""
    walk = PlanWalk(large)
    walk.run_layer(0)
    view = PlanView(walk.progress, 1, walk.moment)
    assert 132 == sum(len(row.sms) for row in view.rows)
    assert len(view.rows) <= 4
    records = sorted(r for row in view.rows for cell in row.cells for r in cell.records)
    assert [r for r, (_, _, task) in enumerate(large) if task.layer == 1] == records
    made = figure(view)
    assert "Plan of 132 SMs with 46,052 tasks and 295 counters. Layer 1: 8 ROUTER" in made.summary
    assert len(made.svg) < 40_000


def test_selected_task_is_explained() -> None:
    """Whom it waits for, who waits for it, and whether it may start."""
    progress = Progress(PLAN)
    record = next(r for r, (sm, _, t) in enumerate(PLAN) if (t.op, t.layer, sm) == (3, 1, 2))
    view = PlanView(progress, 1, progress.start(), selected=record)
    assert view.describe_selected() == (
        "Selected: ATTENTION of layer 1 on SM 2. It waits for qkv1 (0 of 4), which 4 QKV on SMs "
        "0 to 3 signal. Its loader waits for merge1 of the step before. It signals attention1, for "
        "which 4 MERGE on SMs 0 to 3 wait. "
        "It is not its turn yet."
    )
    gate_up = record + 1
    said = PlanView(progress, 1, progress.start(), selected=gate_up).describe_selected()
    assert "Its loader waits for router1 (0 of 1), which 1 ROUTER on SM 3 signal." in said
    embed = PlanView(progress, 0, progress.start(), selected=0).describe_selected()
    assert embed.endswith("It can start.")
    assert "It waits for no counter." in embed
    with pytest.raises(RequestError, match="selected: task 98"):
        PlanView(progress, 0, progress.start(), selected=98)


def test_picture_counts() -> None:
    """The graph's boxes hold the counters' numbers; the lists a cell per task; equal twice."""
    walk = PlanWalk(PLAN)
    walk.run_layer(1)
    view = PlanView(walk.progress, 1, walk.moment)
    made = figure(view)
    assert {"4/4", "8/8", "1/1"} == set(re.findall(r">(\d+/\d+)<", made.svg))
    cells = [region for region in PlanPicture(view, "").regions if region[4].startswith("task")]
    assert sum(task.layer == 1 for _, _, task in PLAN) == len(cells)
    assert made == figure(PlanView(Progress(PLAN), 1, walk.moment))


def test_tables_tell_all_sms() -> None:
    """One row each, also of a finished step."""
    walk = PlanWalk(PLAN)
    rows = states_table(PlanView(walk.progress, 0, walk.moment)).rows
    assert ("SM 0", "0 of 24", "EMBED of layer 0 can start") == rows[0]
    walk.run_all()
    rows = states_table(PlanView(walk.progress, 0, walk.moment)).rows
    assert {"done"} == {row[2] for row in rows}


def tell(widget: Any, name: str, value: int = 0) -> None:
    """What the browser would send."""
    widget._hear(None, {"do": name, "value": value}, [])


def test_widget_walks_and_selects() -> None:
    """Keys and clicks; the layer shown follows the walk."""
    widget = plan_explorer(PLAN, layer=2)
    assert 2 == widget.layer
    tell(widget, "forward")
    assert (1, 0) == (widget.walk.at, widget.layer)
    tell(widget, "back")
    tell(widget, "sm", 3)
    assert (0, 0, 0, 1) == widget.walk.moment.done
    tell(widget, "layer", 1)
    tell(widget, "right")
    first = widget.selected
    assert 1 == PLAN.tasks[0][first].layer
    tell(widget, "right")
    assert first + 1 == widget.selected
    tell(widget, "down")
    assert 1 == widget.walk.progress.sm_of[widget.selected]
    tell(widget, "up")
    tell(widget, "left")
    tell(widget, "left")
    assert first == widget.selected
    tell(widget, "go")
    assert (1, 0, 0, 1) == widget.walk.moment.done
    tell(widget, "nothing")
    assert NOTHING == widget.selected
    tell(widget, "layer_up")
    tell(widget, "layer_down")
    tell(widget, "layer_down")
    assert 0 == widget.layer
    tell(widget, "random")
    assert widget.view["pressed"] == {"random": True}
    tell(widget, "run_layer")
    tell(widget, "run_all")
    assert "The step is over." in repr(widget)
    tell(widget, "restart")
    assert 0 == widget.walk.at
    tell(widget, "task", widget.walk.progress.lists(0)[2][1])
    assert "Selected: QKV of layer 0 on SM 2." in widget.view["said"]


def test_widget_with_an_interpreter_shows_the_token() -> None:
    """What the step has drawn, and that it was computed."""
    engine = tiny_engine(n_sm=2)
    engine.generate([5, 77, 30], max_tokens=2, ignore_eos=True)
    interpreter = engine.machine.interpreter  # type: ignore[attr-defined]
    widget = plan_explorer(engine.plan, interpreter=interpreter)
    assert "computed by the interpreter" in PlanPicture(widget.shown, "").svg
    tell(widget, "run_all")
    assert re.search(r"The step is over\. Next tokens: \d+\.", repr(widget))
    engine.close()
