"""Damaged plans: the verifier finds each damage and names the place."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from mkref.errors import PlanError
from mkref.plan import NO_COUNTER, Counter, Flag, Op, Plan, verify
from mkref.plan.effects import HELPED
from mkref.plan.table import TaskTable
from mkref.plan.verify import check_place
from tests.plans import change, counter, find, plan_of, recount, with_list

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
    """SM 1 does not know the token, nor whether there is another step."""
    return with_list(plan, 1, [t for t in plan.tasks[1] if t.op != Op.SAMPLE])


def strangers_sample(plan: Plan) -> Plan:
    """SM 2 samples twice, once for SM 1, which needs the token in its own memory."""
    _, sample = find(plan, Op.SAMPLE, 5, 1)
    return with_list(no_sample(plan), 2, [*plan.tasks[2], sample])


def too_few_bests(plan: Plan) -> Plan:
    """SM 1 chooses among two of three."""
    return change(plan, Op.SAMPLE, 5, 1, index=2)


def same_half(plan: Plan) -> Plan:
    """SM 1 does the first half of its experts twice."""
    tasks = [
        replace(t, first=2) if (t.op, t.layer) == (Op.GATE_UP, 2) else t for t in plan.tasks[1]
    ]
    return with_list(plan, 1, tasks)


def wrong_append(plan: Plan) -> Plan:
    """MERGE of layer 3 appends to the pages of layer 2."""
    _, task = find(plan, Op.MERGE, 2, 0)
    return change(plan, Op.MERGE, 3, 0, kv_tiles=task.kv_tiles)


def wrong_page_table(plan: Plan) -> Plan:
    """MERGE looks into the table of the other kind of layers."""
    _, task = find(plan, Op.MERGE, 2, 1)
    return change(plan, Op.MERGE, 2, 1, flags=task.flags ^ Flag.SLIDING)


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
    return behind(plan, Op.ATTENTION, (Op.MERGE, 2))


def long_cycle(plan: Plan) -> Plan:
    """The embedding waits for the head."""
    return recount(change(plan, Op.EMBED, 0, 2, wait=counter(plan, "head")))


def loader_cycle(plan: Plan) -> Plan:
    """The loader of SM 1 waits for the h that it must load for."""
    return recount(change(plan, Op.GATE_UP, 2, 1, route_wait=counter(plan, "h2")))


def dropped_wait(plan: Plan) -> Plan:
    """MERGE does not wait for the chunks, and appends while other SMs copy the page."""
    return recount(change(plan, Op.MERGE, 2, 1, wait=NO_COUNTER))


def early_down(plan: Plan) -> Plan:
    """DOWN does not wait for h: the second half of GATE_UP comes late on other SMs."""
    return recount(change(plan, Op.DOWN, 2, 1, wait=NO_COUNTER))


def early_sample(plan: Plan) -> Plan:
    """SM 1 chooses before the others have: their bests, and whether to go on, are not there."""
    return recount(change(plan, Op.SAMPLE, 5, 1, wait=NO_COUNTER))


def wrong_counter(plan: Plan) -> Plan:
    """O_PROJ waits for the attention, not for its merge."""
    return recount(change(plan, Op.O_PROJ, 2, 1, wait=counter(plan, "attention2")))


def others_order(plan: Plan) -> Plan:
    """O_PROJ waits for h, which the consumers of all SMs signal after their MERGE, if they do it.

    It says nothing about their helpers.
    """
    return recount(change(plan, Op.O_PROJ, 2, 1, wait=counter(plan, "h2")))


def behind(plan: Plan, op: Op, other: tuple[Op, int]) -> Plan:
    """A task of layer 2 on SM 1 comes after another of its list."""
    at, task = find(plan, op, 2, 1)
    tasks = [*plan.tasks[1][:at], *plan.tasks[1][at + 1 :]]
    after = [(t.op, t.layer) for t in tasks].index(other)
    return with_list(plan, 1, [*tasks[: after + 1], task, *tasks[after + 1 :]])


def late_merge(plan: Plan) -> Plan:
    """SM 1 merges after its O_PROJ, which waits for it. A helper would not mind."""
    return behind(plan, Op.MERGE, (Op.O_PROJ, 2))


def merge_last(plan: Plan) -> Plan:
    """If the helper does MERGE, consumers never see that it is the last of its layer."""
    return recount(behind(plan, Op.MERGE, (Op.DOWN, 2)))


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
    return recount(with_list(plan, 1, tasks))


def strangers_rows(plan: Plan) -> Plan:
    """SM 1 and SM 2 swap their rows of DOWN: x_mid then lies on the other SM, unannounced."""
    first, second = find(plan, Op.DOWN, 0, 1)[1], find(plan, Op.DOWN, 0, 2)[1]
    plan = change(plan, Op.DOWN, 0, 1, first=second.first, count=second.count)
    return change(plan, Op.DOWN, 0, 2, first=first.first, count=first.count)


def no_last(plan: Plan) -> Plan:
    """SM 1 would norm x of layer 3 with the gamma of layer 2."""
    return change(plan, Op.DOWN, 2, 1, flags=Flag.RELEASE)


def early_last(plan: Plan) -> Plan:
    """The gamma of layer 3 is there before the GATE_UP of layer 2."""
    return change(plan, Op.QKV, 2, 1, flags=Flag.ROPE | Flag.LAST_OF_LAYER)


def late_task(plan: Plan) -> Plan:
    """The output projection of layer 2 comes after that of layer 3."""
    return recount(behind(plan, Op.O_PROJ, (Op.O_PROJ, 3)))


def late_begin(plan: Plan) -> Plan:
    """SM 1 begins with the last layer."""
    return recount(with_list(plan, 1, [*plan.tasks[1][-1:], *plan.tasks[1][:-1]]))


def three_halves(plan: Plan) -> Plan:
    """One of seven."""
    return change(plan, Op.GATE_UP, 2, 1, count=7)


def other_threads(plan: Plan) -> Plan:
    """SM 1 does the rows of DOWN in two tasks: other threads then read x_mid than wrote it."""
    at, down = find(plan, Op.DOWN, 2, 1)
    first = replace(down, count=1, flags=0)
    second = replace(down, first=down.first + 1, count=down.count - 1)
    tasks = [*plan.tasks[1][:at], first, second, *plan.tasks[1][at + 1 :]]
    return recount(with_list(plan, 1, tasks))


DAMAGES: list[tuple[Damage, str]] = [
    (no_release, "SM 1, task .* (DOWN of layer 2): Flag.RELEASE is missing"),
    (early_release, "SM 1, task .* (GATE_UP of layer 2): Flag.RELEASE, but a later task"),
    (lowered_target, "SM 1, task .* (DOWN of layer 2): wait_count = 5 of counter 'h2', which 6"),
    (overlapping_shares, "SM 2, task .* (O_PROJ of layer 2): row block .* belongs to SM 1"),
    (gap, "QKV of layer 2: row blocks .* belong to nobody"),
    (missing_slot, "SM 2, task .* (ATTENTION of layer 3): ATTENTION slot 1 is SM 1, task .*'s too"),
    (disagreeing_slots, "SM 2, task .* (MERGE of layer 3): one of 4 slots, but SM 0, .* says 3"),
    (wrong_weights, "SM 1, task .* (GATE_UP of layer 4): weights = .*, must be"),
    (outside_weights, "SM 1, task .* (HEAD of layer 5): its weights end at tile .*, the packed"),
    (wrong_pages, "SM 0, task .* (ATTENTION of layer 3): kv_tiles = .*, must be"),
    (same_best, "SM 2, task .* (HEAD of layer 5): slot of the bests 1 is SM 1, task .*'s too"),
    (no_sample, "layer 5: SAMPLE slot 1 of 3 belongs to nobody"),
    (no_sample, "SM 1: 0 SAMPLE tasks, there must be one on every SM"),
    (strangers_sample, "SM 1: 0 SAMPLE tasks, .*\n.*SM 2: 2 SAMPLE tasks, there must be one"),
    (too_few_bests, "SM 1, task .* (SAMPLE of layer 5): reads 2 slots of the bests, 3 HEAD tasks"),
    (same_half, "SM 1, task .* (GATE_UP of layer 2): GATE_UP slot 2 is SM 1, task .*'s too"),
    (same_half, "layer 2: GATE_UP slot 3 of 6 belongs to nobody"),
    (wrong_append, "SM 0, task .* (MERGE of layer 3): kv_tiles = .*, must be"),
    (wrong_page_table, "SM 1, task .* (MERGE of layer 2): flags = 0, must be 2"),
    (missing_operation, "counter 'attention1': target 3, but 0 tasks signal it"),
    (nobody_signals, "SM 1, task 0 (EMBED of layer 0): nobody signals counter 'lonely'"),
    (no_route, "SM 1, task .* (GATE_UP of layer 2): no route_wait"),
    (unknown_opcode, "SM 2, task .* (opcode 10 of layer 0): 0..9 are the operations"),
    (too_large, "SM 1, task .*: weights = 2147483648 does not fit into 32 bits"),
    (
        self_made_cycle,
        "(MERGE of layer 2) waits for ever: counter 'attention2' .* from SM 1, .* (ATTENTION of",
    ),
    (long_cycle, "SM 2, task 0 (EMBED of layer 0) waits for ever: counter 'head' gets 0 of 3"),
    (
        loader_cycle,
        "SM 1, .* (GATE_UP of layer 2) waits for ever: counter 'h2' .* from SM 1, .* (GATE_UP of",
    ),
    (dropped_wait, "SM 1, task .* (MERGE of layer 2): reads part_o, part_ml of layer 2 without"),
    (
        dropped_wait,
        "SM 1, .* (MERGE of layer 2): writes kv of layer 2 over that .* SM 0, .* (ATTENTION of",
    ),
    (
        early_sample,
        "SM 1, .* (SAMPLE of layer 5): reads best_values, best_tokens of layer 5 without",
    ),
    (
        early_sample,
        "SM 1, .* (SAMPLE of layer 5): reads control of layer 5 without a wait .* (HEAD",
    ),
    (early_down, "SM 1, task .* (DOWN of layer 2): reads h of layer 2 .* (GATE_UP of layer 2)"),
    (wrong_counter, "SM 1, task .* (O_PROJ of layer 2): reads attn of layer 2 without a wait"),
    (others_order, "SM 1, .* (O_PROJ of layer 2): reads attn of layer 2 without .* (MERGE of"),
    (
        merge_last,
        "where the helper does MERGE: SM 1, .* (DOWN of layer 2): Flag.LAST_OF_LAYER is missing at",
    ),
    (
        merge_last,
        "where the helper does MERGE: SM 1, .* (MERGE of layer 2): Flag.LAST_OF_LAYER, but this is",
    ),
    (
        loader_cycle,
        "SM 1, .* (GATE_UP of layer 2) waits for ever for the helper to find its experts",
    ),
    (late_signal, "(O_PROJ of layer 2): reads attn of layer 2 .* after SM 1, task .* (MERGE of"),
    (early_signal, "(O_PROJ of layer 2): reads attn of layer 2 .* after SM 2, task .* (MERGE of"),
    (swapped_tasks, "(DOWN of layer 2): reads x_mid of layer 2 without a wait .* (O_PROJ of"),
    (strangers_rows, "(DOWN of layer 0): reads x_mid of layer 0 without a wait .* (O_PROJ of"),
    (no_last, "SM 1, .* (DOWN of layer 2): Flag.LAST_OF_LAYER is missing at the consumers' last"),
    (early_last, "SM 1, .* (QKV of layer 2): Flag.LAST_OF_LAYER, but this is not the consumers'"),
    (late_task, "SM 1, .* (O_PROJ of layer 2): comes after a task of layer 3"),
    (late_begin, "SM 1, task 0 (SAMPLE of layer 5): the first task of an SM, must be of layer 0"),
    (late_begin, "SM 1, .* (HEAD of layer 5): the last task of an SM, must be its SAMPLE"),
    (three_halves, "SM 1, .* (GATE_UP of layer 2): half 2 of 7 does not exist"),
    (
        other_threads,
        "SM 1, .* (DOWN of layer 2): reads x_mid of layer 2 without a wait .* (O_PROJ of",
    ),
]


@pytest.mark.parametrize(("damage", "message"), DAMAGES, ids=[d.__name__ for d, _ in DAMAGES])
def test_damage_is_found_and_named(damage: Damage, message: str) -> None:
    """One thing is wrong; the message says where and what."""
    pattern = message.replace("(", r"\(").replace(")", r"\)")
    with pytest.raises(PlanError, match=pattern):
        verify(damage(plan_of()))


IN_ONE_PLACE: list[tuple[Damage, tuple[Op, ...], tuple[Op, ...], str]] = [
    (
        others_order,
        HELPED,
        (),
        "where the helper does MERGE: SM 1, .* (O_PROJ of layer 2): reads attn of layer 2 without",
    ),
    (
        late_merge,
        (),
        HELPED,
        "where the consumers do MERGE .*: SM 1, .* (O_PROJ of layer 2) waits .* SM 1, .* (MERGE of",
    ),
]


@pytest.mark.parametrize(
    ("damage", "wrong", "right", "message"), IN_ONE_PLACE, ids=[d[0].__name__ for d in IN_ONE_PLACE]
)
def test_both_places_of_merge_are_checked(
    damage: Damage, wrong: tuple[Op, ...], right: tuple[Op, ...], message: str
) -> None:
    """A plan that is right only for many rows, or only for few, is refused and the place named."""
    plan = damage(plan_of())
    assert [] == check_place(TaskTable(plan, right))
    assert 1 == len(check_place(TaskTable(plan, wrong)))
    pattern = "^plan: " + message.replace("(", r"\(").replace(")", r"\)")
    with pytest.raises(PlanError, match=pattern) as caught:
        verify(plan)
    found = [line for line in str(caught.value).splitlines() if line.strip() != "..."]
    assert all("where the " in line for line in found)


def test_what_is_wrong_in_both_places_is_said_once() -> None:
    """Nobody needs to know the place then."""
    plan = wrong_counter(plan_of())
    found = check_place(TaskTable(plan, HELPED))
    assert found == check_place(TaskTable(plan, ()))
    with pytest.raises(PlanError) as caught:
        verify(plan)
    lines = str(caught.value).removeprefix("plan: ").split("\n  ")
    assert found == [line for line in lines if not line.startswith("where ")]
