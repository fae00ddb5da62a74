"""What lesson 12 runs and draws: damaged plans in many orders, a message without its parts."""

from __future__ import annotations

from dataclasses import replace
from textwrap import fill
from typing import TYPE_CHECKING

import numpy as np

from mkref.errors import PlanError
from mkref.lessons.exercise import WrongAnswerError
from mkref.lessons.lanes import IDLE, Look, Span, lanes_figure, op_look
from mkref.lessons.recorded import bench_record
from mkref.lessons.source import file_text, section
from mkref.lessons.steps import same_step
from mkref.machine.sanitize import TSAN_EXIT, run_sanitized
from mkref.plan import NO_COUNTER, Op, Plan, verify

if TYPE_CHECKING:
    from mkref.widgets.figure import Figure

__all__ = ["PARTS", "circle", "circle_figure", "first_violation", "message"]
__all__ += ["overwrite_figure", "sanitizers", "without_wait", "wrong_orders"]

LOOKS = {
    "use": op_look("ATTENTION", "ATTENTION: reads q"),
    "merge": op_look("MERGE", "MERGE: reads q"),
    "know": op_look("O_PROJ", "O_PROJ without rows"),
    "write": op_look("QKV", "QKV: writes the next q"),
    "idle": IDLE,
}
PARTS = {
    "nothing": ("", ""),
    "the release": ("ptx::red_release_add(counter, 1)", "ptx::red_relaxed_add(counter, 1)"),
    "the acquire": ("ptx::ld_acquire(counter) <", "ptx::ld_relaxed(counter) <"),
    "the writers' barrier": ("  __syncwarp();  // all 32 lanes have stored\n", ""),
    "the readers' barrier": ("  __syncwarp();  // lane 0 has seen it; the others may go on\n", ""),
}
"""What can be taken out of `12_message.cu`: its text, and what is there instead."""


def without_wait(plan: Plan, op: Op, layer: int, sm: int) -> Plan:
    """The plan with one task that waits for nothing."""
    lists = [
        tuple(
            replace(t, wait=NO_COUNTER, wait_count=0)
            if (t.op, t.layer, at) == (op, layer, sm)
            else t
            for t in tasks
        )
        for at, tasks in enumerate(plan.tasks)
    ]
    return replace(plan, tasks=tuple(lists))


def behind(plan: Plan, op: Op, other: Op, layer: int, sm: int) -> Plan:
    """The plan with a task moved behind another of the same layer and SM."""
    tasks = [*plan.tasks[sm]]
    at = next(i for i, t in enumerate(tasks) if (t.op, t.layer) == (op, layer))
    task = tasks.pop(at)
    after = next(i for i, t in enumerate(tasks) if (t.op, t.layer) == (other, layer))
    tasks.insert(after + 1, task)
    return replace(plan, tasks=(*plan.tasks[:sm], tuple(tasks), *plan.tasks[sm + 1 :]))


def circle(plan: Plan) -> Plan:
    """A plan in which SM 1 merges before it has done its own attention of layer 2."""
    return behind(plan, Op.ATTENTION, Op.MERGE, 2, 1)


def wrong_orders(plan: Plan, n_orders: int) -> int:
    """In how many of so many random orders a step of two rows has other bits than it should."""
    wrong = 0
    for order in range(n_orders):
        try:
            same_step(plan, orders=(order,), rows=2)
        except WrongAnswerError:
            wrong += 1
    return wrong


def first_violation(plan: Plan) -> str:
    """The first sentence of the verifier, or that there is none; broken for reading."""
    try:
        verify(plan)
    except PlanError as error:
        said = str(error).splitlines()[0].replace(": SM", ":\nSM").replace("; ", ";\n").split("\n")
        lines = [fill(line, 86, initial_indent="  ", subsequent_indent="    ") for line in said]
        return "\n".join(lines).removeprefix("  ")
    return "no violation"


def message(without: str, seeds: tuple[int, ...] = (0, 1, 2, 3)) -> tuple[int, int]:
    """Send a message under ThreadSanitizer, with one of `PARTS` taken out.

    Returns:
        In how many of the runs the words were right, and in how many a race was reported.

    Raises:
        MachineError: no compiler with ThreadSanitizer here.
    """
    source = file_text("12_message.cu").replace("// USE megakernel.cu: section 1", section(1))
    old, new = PARTS[without]
    assert not old or source.count(old) == 1
    source = source.replace(old, new) if old else source
    n, right, races = 64, 0, 0
    for seed in seeds:
        out, data = np.full(n, -1, np.int32), np.zeros(n, np.int32)
        args = (out, data, np.zeros(1, np.int32), np.int32(n))
        code, _ = run_sanitized(
            source, "message", (2,), (32,), args, sanitize="thread", seed=seed, timeout_s=30
        )
        right += bool(np.array_equal(out, np.arange(n, 2 * n)))
        races += code == TSAN_EXIT
    return right, races


def sanitizers() -> list[str]:
    """What NVIDIA's tools said of the kernel on a GPU, and of which commit."""
    record = bench_record("h200/sanitizer.json")
    where = f"{record['provenance']['gpu']}, commit {record['provenance']['commit']}"
    said = [
        f"{tool['tool']:9} {'clean' if tool['clean'] else 'NOT clean'}: {tool['summary'][0]}"
        for tool in record["tools"]
    ]
    return [*said, f"[measured: {where}]"]


def circle_figure() -> Figure:
    """Two SMs that wait for each other for ever, and the order in which they would not."""
    looks = {
        "work": op_look("ATTENTION"),
        "merge": op_look("MERGE"),
        "idle": IDLE,
        "ever": Look("waits for ever", "#ffffff", "cross"),
    }
    lanes = [
        ("SM 1: MERGE first", []),
        ("SM 0", [Span(0, 3, "work", "ATTENTION"), Span(3, 12, "ever", "waits for ever")]),
        ("SM 1", [Span(0, 12, "ever", "waits for ever")]),
        ("SM 1: ATTENTION first", []),
        (
            "SM 0 ",
            [
                Span(0, 3, "work", "ATTENTION"),
                Span(3, 4, "idle"),
                Span(4, 7, "merge", "MERGE"),
            ],
        ),
        ("SM 1 ", [Span(0, 4, "work", "ATTENTION"), Span(4, 7, "merge", "MERGE")]),
    ]
    sentence = (
        "Scheme: MERGE waits for the ATTENTION of all SMs. If the list of SM 1 has MERGE first, it "
        "waits for a task that stands behind it in the same list, and all others wait with it."
    )
    return lanes_figure("A circle of waits", sentence, lanes, looks)


def overwrite_figure() -> Figure:
    """An SM without rows writes the next q while another still reads this one; and the mended."""
    late = Span(3, 6, "write", "QKV")
    slow = [Span(0, 7, "use", "ATTENTION"), Span(7, 9, "merge", "MERGE")]
    lanes = [
        ("tasks without rows left out", []),
        ("SM 5", slow),
        ("SM 0", [Span(0, 2.5, "use", "ATTENTION"), Span(2.5, 3, "idle"), late]),
        ("tasks without rows, with waits", []),
        ("SM 5 ", slow),
        (
            "SM 0 ",
            [
                Span(0, 2.5, "use", "ATTENTION"),
                Span(2.5, 9, "idle"),
                Span(9, 10.5, "know", "O_PROJ"),
                Span(10.5, 13.5, "write", "QKV"),
            ],
        ),
    ]
    sentence = (
        "Scheme of what is allowed, not of what has been seen: SM 0 has no rows of O_PROJ, so "
        "nothing tells it that SM 5 is done with q, and its next QKV may write over q. An O_PROJ "
        "without rows waits for MERGE, and so SM 0 comes after SM 5."
    )
    return lanes_figure("Who still reads q?", sentence, lanes, LOOKS)
