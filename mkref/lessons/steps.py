"""Small plans and single operations of the kernel, for exercises.

    lesson_plan, proved, same_step     a learner's plan: is it right, does it give the same bits?
    run_op                             a learner's function inside the kernel: one operation of a
                                       step, every buffer compared with the interpreter's bits
    launch, interpret                  a plan in the learner's kernel, and in the interpreter

The model is `LESSON_CONFIG` with random weights and six sequences of different lengths. Nothing
here judges style or speed.
"""

from __future__ import annotations

import hashlib
import platform
from collections.abc import Iterator, Mapping
from functools import cache
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from mkref.errors import MachineError, PlanError
from mkref.lessons.exercise import EMPTY, WrongAnswerError
from mkref.lessons.program import HANGS, Program, same
from mkref.lessons.whole import LESSON_CONFIG
from mkref.machine.cache import cached
from mkref.measure.rungs import SINGLE, plain, split
from mkref.plan import Interpreter, Op, Plan, build_plan, verify
from mkref.plan.buffers import BUFFERS, SCALARS
from mkref.plan.effects import WRITES
from mkref.reference.scalars import to_bf16
from mkref.weights.layout import PAGE, PackedLayout, kv_tile, pack_kv_page

if TYPE_CHECKING:
    from mkref.plan.memory import Buffers
    from mkref.weights.packed import PackedWeights

__all__ = [
    "MAX_CONTEXT",
    "POSITIONS",
    "interpret",
    "launch",
    "lesson_plan",
    "lesson_weights",
    "lesson_words",
    "parts_of",
    "proved",
    "run_op",
]
__all__ += ["same_step"]

MAX_CONTEXT = 384
PAGES = MAX_CONTEXT // PAGE
POSITIONS = (130, 0, 63, 300, 64, 127)
"""Of the rows, in this order: in the middle of a page, at its borders, beyond the window."""
TOKENS = (12, 5, 77, 516, 300, 9)
TIMEOUT_S = 3.0
PARAMS = np.dtype([(name, np.int64) for name in (*BUFFERS, *SCALARS)])
FIXED = ("weights", "gammas", "rope", "tasks", "task_offsets", "counters", "status", "trace")
NOT_COMPARED = {*FIXED, "stage_trace", "progress", "control", "tokens_out", "active_experts"}


@cache
def lesson_weights() -> PackedWeights:
    """Random weights of `LESSON_CONFIG`, the same on every computer."""
    from mkref.weights.synthetic import synthetic_weights

    return synthetic_weights(LESSON_CONFIG, seed=3)


@cache
def lesson_words() -> tuple[np.ndarray, np.ndarray]:
    """The words of `lesson_weights`: tiles and gammas, uint16.

    They are kept on disk: PyTorch makes them, and takes seconds to import, while every CUDA answer
    is tried in a process of its own.

    Raises:
        MachineError: the build cache cannot be written.
    """

    def make(file: Path) -> None:
        with file.open("wb") as out:
            for words in lesson_weights().words():
                np.save(out, words)

    maker = find_spec("mkref.weights.synthetic")
    assert maker is not None
    assert maker.origin is not None
    source = Path(maker.origin).read_text(encoding="utf-8")
    places = [*PackedLayout(LESSON_CONFIG).placements()]  # a lesson's port may have more of them
    kind = f"{LESSON_CONFIG} {version('torch')} {platform.machine()} {source} {places}"
    name = f"lesson-weights-{hashlib.sha256(kind.encode()).hexdigest()[:16]}.npy"
    with cached(name, make).open("rb") as stored:
        return np.load(stored), np.load(stored)


def lesson_plan(n_sm: int = 3) -> Plan:
    """A plan of `LESSON_CONFIG` with room for eight rows."""
    pages = 8 * PAGES
    return build_plan(LESSON_CONFIG, n_sm, full_pages=pages, sliding_pages=pages)


def proved(plan: object) -> Plan:
    """The plan, if the verifier finds nothing.

    Raises:
        WrongAnswerError: it is no plan, or the first violation.
    """
    if plan is None:
        raise WrongAnswerError(f"it returns None, {EMPTY}")
    if not isinstance(plan, Plan):
        raise WrongAnswerError(f"it returns a {type(plan).__name__}, which is no plan")
    try:
        verify(plan, MAX_CONTEXT)
    except PlanError as error:
        first = str(error).removeprefix("plan: ").splitlines()[0]
        raise WrongAnswerError(f"{_size(plan)}, the verifier says: {first}") from error
    return plan


def same_step(plan: Plan, *, orders: tuple[int | None, ...] = (None, 1), rows: int = 4) -> None:
    """A step of the plan gives the bits that every plan must give, whoever goes first.

    Args:
        plan: perhaps not proved.
        orders: of the interpreter: None for turns, a number for a random order.
        rows: of the batch.

    Raises:
        WrongAnswerError: nobody can go on, or a logit or token differs.
    """
    right = _step(lesson_plan(1), None, rows)
    for order in orders:
        try:
            got = _step(plan, order, rows)
        except (PlanError, MachineError) as error:
            raise WrongAnswerError(f"{_size(plan)}: {_reason(error)}") from error
        for name in ("logits", "tokens_out"):
            same(right[name], got[name], f"a step on {plan.n_sm} SMs", name)


def _size(plan: Plan) -> str:
    return "1 SM" if plan.n_sm == 1 else f"{plan.n_sm} SMs"


def _reason(error: Exception) -> str:
    """The message; of an exercise's memory it is known where numbers that are none come from."""
    text = str(error)
    if "not finite" in text:
        return f"{text.split(';')[0]}: some task has read what nobody had written yet"
    return text


@cache
def _one_sm(rows: int) -> dict[str, np.ndarray]:
    return _run(lesson_plan(1), None, rows)


def _step(plan: Plan, order: int | None, rows: int) -> dict[str, np.ndarray]:
    if plan.n_sm == 1 and order is None and plan == lesson_plan(1):
        return _one_sm(rows)
    return _run(plan, order, rows)


def _run(plan: Plan, order: int | None, rows: int) -> dict[str, np.ndarray]:
    interpreter = Interpreter.of(plan, MAX_CONTEXT, order=order)
    begin_step(interpreter.buffers, plan, rows, seed=1)
    interpreter.run(rows, 0)
    buffers = interpreter.buffers
    return {"logits": buffers["logits"][:rows], "tokens_out": buffers["tokens_out"][0, :rows]}


def begin_step(buffers: Buffers, plan: Plan, rows: int, seed: int) -> None:
    """Weights, inputs, and keys and values of what came before; all else in the pool is NaN."""
    c = plan.config
    buffers["weights"][...], buffers["gammas"][...] = lesson_words()
    for name in ("tokens", "positions", "earlier", "temperatures", "seeds"):
        buffers[name][...] = 0
    buffers["stop_ids"][...] = -1
    buffers["tokens"][:rows], buffers["positions"][:rows] = TOKENS[:rows], POSITIONS[:rows]
    rng = np.random.default_rng(seed)
    table = np.stack([rng.permutation(8 * PAGES)[: rows * PAGES] for _ in range(2)])
    table = table.reshape(2, rows, PAGES)
    buffers["page_table"][:, :rows] = table
    for layer in range(c.num_hidden_layers):
        shape = (2, c.num_key_value_heads, MAX_CONTEXT, c.head_dim)
        for row in range(rows):
            known = np.random.default_rng([row, layer]).standard_normal(shape).astype(np.float32)
            known[:, :, POSITIONS[row] :] = np.nan
            keys, values = to_bf16(known)
            for page in range(PAGES):
                number = int(table[int(c.is_sliding(layer)), row, page])
                for head in range(c.num_key_value_heads):
                    at = kv_tile(plan.pool.base(c, layer), number, head, c)
                    part = (head, slice(page * PAGE, (page + 1) * PAGE))
                    tiles = pack_kv_page(keys[part], values[part])
                    buffers["kv"][at : at + len(tiles)] = tiles


def run_op(
    program: Program, op: Op, *, layer: int = 1, rows: int = 3, n_sm: int = 2, seed: int = 0
) -> None:
    """Run one operation of a layer with the learner's kernel and compare every buffer.

    What comes before it in the step is done by the interpreter; what the operation writes is
    poisoned first.

    Args:
        program: the kernel with the learner's function in it (an exercise on `megakernel.cu`).
        op, layer: which tasks run. HEAD and SAMPLE are in layer 5, EMBED in 0; layer 0 is dense and
            has no ROUTER; 0 and 4 have full attention.
        rows: of the batch, at most 6. The kernel is that for eight, in which the helper does MERGE.
        n_sm: of the plan.
        seed: of the scheduler and the page numbers.

    Raises:
        WrongAnswerError: the kernel hung, wrote beside a buffer, or some bits differ.
    """
    where = f"{op.name} of layer {layer}, {rows} row{'s' if rows > 1 else ''}, {n_sm} SMs"
    for part, buffers in parts_of(n_sm, rows, seed):
        task = next(task for tasks in part.tasks for task in tasks if task.count)
        if (task.op, task.layer) != (op, layer):
            interpret(part, buffers, rows)
            continue
        _poison(buffers, op, layer)
        own = {name: program.array(array) for name, array in buffers.items() if name in BUFFERS}
        launch(program, part, own, rows, seed, where)
        interpret(part, buffers, rows)
        # Rows that are not active get a number that nobody wants from whoever has the first SM.
        own["router_logits"][rows:] = buffers["router_logits"][rows:]
        for name in WRITES[op]:
            for one in name.buffer.split(", "):
                if one in buffers and one not in NOT_COMPARED:
                    same(buffers[one], own[one], where, one)
        if op == Op.SAMPLE:
            same(buffers["tokens_out"][0], own["tokens_out"][0], where, "tokens_out")
        for one in sorted(own.keys() - NOT_COMPARED):
            same(buffers[one], own[one], f"{where} (it only reads this)", one)
        return
    raise AssertionError(f"{where}: no such operation")


def parts_of(n_sm: int, rows: int, seed: int) -> Iterator[tuple[Plan, Buffers]]:
    """A step operation by operation, and the memory that all of them work on."""
    flat = plain(lesson_plan(n_sm))
    shared = Interpreter.of(flat, MAX_CONTEXT).buffers
    begin_step(shared, flat, rows, seed)
    for part in split(flat, SINGLE):
        yield part, {**shared, "tasks": part.words(), "task_offsets": part.offsets()}


def interpret(part: Plan, buffers: Buffers, rows: int) -> None:
    """Run one step of a plan, whole or a part of one, in NumPy; it works on `buffers`."""
    names = [counter.name for counter in part.counters]
    Interpreter(part.config, buffers, names).run(rows, 0)


def _poison(buffers: Buffers, op: Op, layer: int) -> None:
    for touch in WRITES[op]:
        for name in touch.buffer.split(", "):
            if name == "x":
                half = (layer + (touch.layer == "next")) & 1
                buffers["x"][half].view(np.uint8)[...] = 0xFF
            elif name in buffers and name not in ("kv", "tokens", *NOT_COMPARED):
                buffers[name].view(np.uint8)[...] = 0xFF


def launch(
    program: Program,
    part: Plan,
    buffers: Mapping[str, np.ndarray],
    rows: int,
    seed: int,
    where: str,
    **scalars: int,
) -> None:
    """Run the same in the learner's kernel on this CPU.

    Args:
        program: the kernel with the learner's function in it.
        part: a plan, whole or a part of one.
        buffers: all of its memory, made with `program.array`.
        rows: of the batch.
        seed: of the scheduler of the CPU's threads.
        where: of messages, such as "three rows".
        scalars: other values of the kernel's argument, such as `n_steps`, which is 1 if not told.

    Raises:
        WrongAnswerError: the kernel hung or wrote beside a buffer.
    """
    from mkref.machine.base import WAITS
    from mkref.machine.host import HOST_RING
    from mkref.machine.source import THREADS, shared_bytes

    params = np.zeros(1, PARAMS)
    for name, array in buffers.items():
        params[name] = array.ctypes.data
    params["max_pages"] = buffers["page_table"].shape[2]
    params["max_splits"] = buffers["part_o"].shape[2]
    params["rows"], params["n_steps"] = rows, 1
    params["timeout_ns"] = int(TIMEOUT_S * 1e9)
    for name, value in scalars.items():
        params[name] = value
    program.launch(
        "megakernel", (part.n_sm,), (THREADS,), (params[0],), seed=seed, timeout_s=4 * TIMEOUT_S,
        shared=shared_bytes(part.config, HOST_RING, part.rows),
    )  # fmt: skip
    program.look_at_guards(buffers)
    code, sm, record, what = buffers["status"][:4].tolist()
    if code:
        task = [task for tasks in part.tasks for task in tasks][max(record, 0)]
        waits = f"{WAITS[code]} {what}" if code in WAITS else f"wait code {code}"
        raise WrongAnswerError(f"{HANGS} {where}: SM {sm}, {Op(task.op).name} waits for {waits}")
