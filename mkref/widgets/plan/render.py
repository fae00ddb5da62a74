"""The explorer without a kernel: the layer's graph, the lists of the SMs, sentences, a table."""

from __future__ import annotations

from typing import TYPE_CHECKING

from mkref.plan.task import NO_COUNTER
from mkref.trace.summary import n_sms
from mkref.widgets.figure import Figure, Table
from mkref.widgets.plan.graph import experts_through
from mkref.widgets.plan.picture import PlanPicture
from mkref.widgets.plan.progress import NOTHING

if TYPE_CHECKING:
    from mkref.widgets.plan.model import PlanView

__all__ = ["figure", "states_table", "summary"]

SHOWN = 4
"""SMs whose state the sentences name."""


def _layer(view: PlanView) -> str:
    last = view.progress.plan.config.num_hidden_layers
    return "After the last layer" if view.layer == last else f"Layer {view.layer}"


def summary(view: PlanView) -> str:
    """The plan, the layer, how far the step is, who can go on and who waits for whom."""
    plan, moment = view.progress.plan, view.moment
    n = len(view.progress.tasks)
    ops = ", ".join(
        f"{len(node.records)} {node.name}" for node in view.graph.nodes if not node.is_counter
    )
    size = f"{n:,} tasks and {len(plan.counters)} counters"
    parts = [f"Plan of {n_sms(plan.n_sm)} with {size}.", f"{_layer(view)}: {ops}."]
    if moment.last != NOTHING:
        last = view.progress.name(moment.last)
        are = "task is" if moment.n_done == 1 else "tasks are"
        parts.append(f"{moment.n_done:,} {are} done, the last: {last}.")
    if view.progress.is_over(moment):
        parts.append("The step is over.")
        if view.tokens:
            parts.append(f"Next tokens: {', '.join(map(str, view.tokens))}.")
    elif moment.last != NOTHING:
        able = view.progress.can_go(moment)
        if not able:
            parts.append("NOBODY CAN GO ON.")
        elif plan.n_sm > SHOWN:
            parts.append(f"{n_sms(len(able))} can go on.")
        if not able or plan.n_sm <= SHOWN:
            stuck = [sm for sm in range(plan.n_sm) if view.state(sm) != "done"][:SHOWN]
            parts += [f"SM {sm}: {view.state(sm)}." for sm in stuck]
    said = view.describe_selected()
    return " ".join([*parts, said] if said else parts)


def table(view: PlanView) -> Table:
    """The layer's operations: how many tasks, what they wait for, what they signal, done."""
    progress, moment = view.progress, view.moment
    rows = []
    for node in view.graph.nodes:
        if node.is_counter:
            continue
        tasks = [progress.tasks[record] for record in node.records]
        sms = len({progress.sm_of[record] for record in node.records})
        done = sum(progress.is_done(moment, record) for record in node.records)

        def names(counters: set[int]) -> str:
            return ", ".join(
                f"{view.counter(c)} ({moment.arrivals[c]}/{progress.plan.counters[c].target})"
                for c in sorted(counters - {NO_COUNTER})
            ) or "-"  # fmt: skip

        rows.append(
            (
                node.name, str(len(tasks)), str(sms), names({t.wait for t in tasks}),
                names({experts_through(t) for t in tasks}), names({t.signal for t in tasks}),
                f"{done}/{len(tasks)}",
            )
        )  # fmt: skip
    heads = ("operation", "tasks", "SMs", "waits for", "experts through", "signals", "done")
    return Table(heads, tuple(rows))


def states_table(view: PlanView) -> Table:
    """What each SM is at, and whom it waits for."""
    plan = view.progress.plan
    rows = [
        (f"SM {sm}", f"{view.moment.done[sm]} of {len(plan.tasks[sm])}", view.state(sm))
        for sm in range(plan.n_sm)
    ]
    return Table(("SM", "tasks done", "next"), tuple(rows))


def figure(view: PlanView) -> Figure:
    """Picture, sentences and the table of the layer's operations."""
    said = summary(view)
    return Figure(PlanPicture(view, said).svg, said, table(view))
