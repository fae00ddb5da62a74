"""Exercise 13.2: the merge of attention by one warp, with the bits of the merge by eight.

Alone a row is merged by the consumers, in company by the helper (`MERGE_ROWS`): two builds of the
kernel. The trials run the learner's in the build for eight rows and the consumers' in that for one,
on the results of splits made here, and compare every bit.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from mkref.lessons.cuda_exercise import Blank, CudaExercise
from mkref.lessons.exercise import Property, WrongAnswerError
from mkref.lessons.lesson_13_mistakes import LAST_L, LAST_O, MISTAKES, SUM_L, SUM_O
from mkref.lessons.steps import interpret, launch
from mkref.lessons.whole import LESSON_CONFIG
from mkref.plan.buffers import BUFFERS
from mkref.plan.build import MOST_SPLITS
from mkref.plan.memory import Buffers, allocate
from mkref.plan.task import Op
from mkref.reference.scalars import exp2, to_bf16
from mkref.weights.layout import PAGE

if TYPE_CHECKING:
    from mkref.lessons.program import Program
    from mkref.plan import Plan

__all__ = ["EXERCISES", "merged_otherwise"]

CHUNK = 2 * PAGE
MOST_CHUNKS = 70
LAYER = 0
"""Of the lessons' small model: all keys are seen, so a row has as many chunks as it is long. It has
as many splits, but at most `MOST_SPLITS`.
"""
Words = npt.NDArray[np.uint16]


@cache
def _part(n_sm: int) -> Plan:
    """MERGE of one layer as a launch of its own."""
    from mkref.measure.rungs import SINGLE, plain, split
    from mkref.plan import build_plan

    plan = build_plan(LESSON_CONFIG, n_sm, full_pages=8, sliding_pages=8)
    parts = split(plain(plan), SINGLE)
    return next(p for p in parts if any((t.op, t.layer) == (Op.MERGE, LAYER) for _, _, t in p))


def _split_results(n_splits: int, seed: int) -> tuple[Any, Any]:
    """Results of the splits of a sequence: part_o [J, splits, 8, D] and part_ml [J, splits, 8, 2].

    The terms of both sums nearly cancel, so that a rounding in another place shows in the bfloat16.
    Real l are positive, and show it far more seldom.
    """
    c = LESSON_CONFIG
    rng = np.random.default_rng([seed, n_splits])
    shape = (c.num_key_value_heads, n_splits, 8)
    m = rng.normal(0, 2, shape).astype(np.float32)
    # exp2 and sums one after another: the same numbers on every computer.
    weight = exp2(m - m.max(axis=1, keepdims=True)).astype(np.float64)
    terms = rng.normal(0, 8, (*shape, c.head_dim + 1))
    if n_splits > 1:
        terms -= np.add.accumulate(terms, axis=1)[:, -1:] / n_splits * (1 - 2.0**-14)
    terms = (terms / weight[..., None]).astype(np.float32)
    return terms[..., :-1], np.stack([m, terms[..., -1]], axis=-1)


def _memory(part: Plan, lengths: Sequence[int], seeds: Sequence[int]) -> Buffers:
    """All buffers, with the results of a sequence in every row; all else is poison or zero.

    Args:
        part: the launch.
        lengths: chunks of each row.
        seeds: of its results.
    """
    buffers = allocate(part, MOST_CHUNKS * CHUNK)
    for name in ("tokens", "earlier", "temperatures", "seeds", "page_table", "kv", "weights"):
        buffers[name][...] = 0
    for name in ("k_new", "v_new", "gammas"):
        buffers[name][...] = 0
    buffers["stop_ids"][...] = -1
    buffers["positions"][...] = 0
    for row, (n_chunks, seed) in enumerate(zip(lengths, seeds, strict=True)):
        buffers["page_table"][:, row] = row
        buffers["positions"][row] = n_chunks * CHUNK - 1 - 9 * row
        n_splits = _splits(n_chunks)
        part_o, part_ml = _split_results(n_splits, seed)
        buffers["part_o"][row, :, :n_splits] = part_o
        buffers["part_ml"][row, :, :n_splits] = part_ml
    return buffers


def _splits(n_chunks: int) -> int:
    return min(n_chunks, MOST_SPLITS)


def _row_of(n_chunks: int) -> str:
    return f"a row of {(n := _splits(n_chunks))} split{'s' if n > 1 else ''}"


def _merged(
    program: Program, lengths: Sequence[int], seeds: Sequence[int], n_sm: int, where: str
) -> Words:
    """The merge by the learner's kernel: bfloat16 [rows, outputs], in the kernel's order."""
    part = _part(n_sm)
    buffers = _memory(part, lengths, seeds)
    own = {name: program.array(array) for name, array in buffers.items() if name in BUFFERS}
    launch(program, part, own, len(lengths), 0, where)
    return _rows(own, len(lengths))


@cache
def _consumers() -> Program:
    """The kernel's build for one row, as it is."""
    from mkref.lessons.program import Program
    from mkref.machine.host import HOST_RING
    from mkref.machine.source import kernel_source

    source = kernel_source(LESSON_CONFIG, HOST_RING, most_rows=1)
    return Program(source, name="exercise_13_2_alone")


def _rows(buffers: Buffers, rows: int) -> Words:
    attn = buffers["attn"][:, :rows]  # [tiles, rows, 16]
    return np.ascontiguousarray(attn.swapaxes(0, 1)).reshape(rows, -1)


def _right(part: Plan, lengths: Sequence[int], seeds: Sequence[int]) -> Words:
    buffers = _memory(part, lengths, seeds)
    interpret(part, buffers, len(lengths))
    return _rows(buffers, len(lengths))


def _company(*lengths: int, n_sm: int = 2) -> Property:
    """Rows in company have the bits of the numeric contract, and those that they have alone."""
    counts = ", ".join(str(_splits(n_chunks)) for n_chunks in lengths)
    name = f"rows of {counts} splits on {n_sm} SMs"
    if max(lengths) > MOST_SPLITS:
        name += f" ({', '.join(map(str, lengths))} chunks)"

    def trial(program: Program) -> None:
        seeds = range(len(lengths))
        got = _merged(program, lengths, seeds, n_sm, name)
        right = _right(_part(n_sm), lengths, seeds)
        for row, n_chunks in enumerate(lengths):
            alone = _merged(_consumers(), (n_chunks,), (row,), 1, "a row alone")[0]
            this = _row_of(n_chunks)
            _compare(alone, got[row], f"{this}, alone and among {len(lengths)}")
            _compare(right[row], got[row], f"{this}, against the contract")

    return Property(name, trial)


def _compare(right: Words, got: Words, where: str) -> None:
    wrong = np.flatnonzero(right != got)
    if wrong.size:
        at = int(wrong[0])
        raise WrongAnswerError(
            f"{where}: {wrong.size} of {right.size} outputs have other bits, the first "
            f"{int(got[at]):04x} instead of {int(right[at]):04x}"
        )


def _places(program: Program) -> None:
    """Three sequences in two orders."""
    lengths, seeds = (21, 40, 9), (5, 6, 7)
    one = _merged(program, lengths, seeds, 2, "three rows")
    other = _merged(program, lengths[::-1], seeds[::-1], 3, "three rows, the other way round")
    for row, n_chunks in enumerate(lengths):
        _compare(one[row], other[2 - row], f"{_row_of(n_chunks)}, first and last of three")
    right = _right(_part(2), lengths, seeds)
    for row, n_chunks in enumerate(lengths):
        _compare(right[row], one[row], f"{_row_of(n_chunks)}, against the contract")


EXERCISES = (
    CudaExercise(
        id="13.2",
        answer="merge_by_helper",
        file="megakernel.cu",
        function="merge_by_helper",
        blanks=(
            Blank(SUM_O.splitlines()[0].strip(), SUM_L.strip()),
            Blank(LAST_O.strip(), LAST_L.strip()),
        ),
        properties=(
            _company(1, 3, 8),
            _company(9, 16, 17, 32),
            _company(33, 40, 65, n_sm=3),
            _company(20, 2, n_sm=5),
            Property("first or last in the batch", _places),
        ),
        mistakes=MISTAKES,
        then="Now: which constant decides who merges? What was measured for it is in section 14 of "
        'bench/LOG.md, at "MERGE by the consumers".',
    ),
)


def merged_otherwise(n_outputs: int = 65536, n_splits: int = 20) -> tuple[int, int]:
    """Merge splits in eight sums, as the kernel, and one after another.

    Returns:
        How many outputs have other bits in float32, and after the rounding to bfloat16.
    """
    rng = np.random.default_rng(13)
    m = rng.normal(0, 1, n_splits).astype(np.float32)
    weight = exp2(m - m.max())
    o = rng.normal(0, 1, (n_splits, n_outputs)).astype(np.float32) * weight[:, None]
    total = rng.uniform(20, 100, n_splits).astype(np.float32) * weight
    lists = [(_fold(o[w::8]), _fold(total[w::8])) for w in range(8)]
    ours = _fold(np.array([a for a, _ in lists])) / _fold(np.array([b for _, b in lists]))
    plain = _fold(o) / _fold(total)
    return int((ours != plain).sum()), int((to_bf16(ours) != to_bf16(plain)).sum())


def _fold(terms: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """One after another along the first axis, float32."""
    return np.asarray(np.add.accumulate(terms, axis=0)[-1])
