"""Exercise 13.2: the merge of attention by one warp, with the bits of the merge by eight.

Alone a row is merged by the consumers, in company by the helper (`MERGE_ROWS`): two builds of the
kernel. The trials run the learner's in the build for eight rows and the consumers' in that for one,
on the results of chunks made here, and compare every bit.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from mkref.lessons.cuda_exercise import Blank, CudaExercise, Patch
from mkref.lessons.exercise import Property, WrongAnswerError
from mkref.lessons.steps import interpret, launch
from mkref.lessons.whole import LESSON_CONFIG
from mkref.plan.buffers import BUFFERS
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
"""Of the lessons' small model: all keys are seen, so a row has as many chunks as it is long."""
Words = npt.NDArray[np.uint16]


@cache
def _part(n_sm: int) -> Plan:
    """MERGE of one layer as a launch of its own."""
    from mkref.measure.rungs import SINGLE, plain, split
    from mkref.plan import build_plan

    plan = build_plan(LESSON_CONFIG, n_sm, full_pages=8, sliding_pages=8)
    parts = split(plain(plan), SINGLE)
    return next(p for p in parts if any((t.op, t.layer) == (Op.MERGE, LAYER) for _, _, t in p))


def _chunk_results(n_chunks: int, seed: int) -> tuple[Any, Any]:
    """Results of the chunks of a sequence: part_o [J, chunks, 8, D] and part_ml [J, chunks, 8, 2].

    The terms of both sums nearly cancel, so that a rounding in another place shows in the bfloat16.
    Real l are positive, and show it far more seldom.
    """
    c = LESSON_CONFIG
    rng = np.random.default_rng([seed, n_chunks])
    shape = (c.num_key_value_heads, n_chunks, 8)
    m = rng.normal(0, 2, shape).astype(np.float32)
    # exp2 and sums one after another: the same numbers on every computer.
    weight = exp2(m - m.max(axis=1, keepdims=True)).astype(np.float64)
    terms = rng.normal(0, 8, (*shape, c.head_dim + 1))
    if n_chunks > 1:
        terms -= np.add.accumulate(terms, axis=1)[:, -1:] / n_chunks * (1 - 2.0**-14)
    terms = (terms / weight[..., None]).astype(np.float32)
    return terms[..., :-1], np.stack([m, terms[..., -1]], axis=-1)


def _memory(part: Plan, lengths: Sequence[int], seeds: Sequence[int]) -> Buffers:
    """All buffers, with the chunks of a sequence in every row; all else is poison or zero."""
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
        part_o, part_ml = _chunk_results(n_chunks, seed)
        buffers["part_o"][row, :, :n_chunks] = part_o
        buffers["part_ml"][row, :, :n_chunks] = part_ml
    return buffers


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
    chunks = ", ".join(map(str, lengths))
    name = f"rows of {chunks} chunks on {n_sm} SM{'s' if n_sm > 1 else ''}"

    def trial(program: Program) -> None:
        seeds = range(len(lengths))
        got = _merged(program, lengths, seeds, n_sm, name)
        right = _right(_part(n_sm), lengths, seeds)
        for row, n_chunks in enumerate(lengths):
            alone = _merged(_consumers(), (n_chunks,), (row,), 1, "a row alone")[0]
            _compare(alone, got[row], f"a row of {n_chunks} chunks, alone and among {len(lengths)}")
            _compare(right[row], got[row], f"a row of {n_chunks} chunks, against the contract")

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
        _compare(one[row], other[2 - row], f"a row of {n_chunks} chunks, first and last of three")
    right = _right(_part(2), lengths, seeds)
    for row, n_chunks in enumerate(lengths):
        _compare(right[row], one[row], f"a row of {n_chunks} chunks, against the contract")


SUM_O = "list_o[w] =\n            list_o[w] + v[i + w] * c.s.merge_weight[i + w].x;"
ADD_O = "list_o[w] + v[i + w] * c.s.merge_weight[i + w].x"
ADD_L = "list_l = list_l + c.s.merge_weight[c.lane % LISTS + i].y;"
LAST_O = "    UNROLL for (int w = 1; w < LISTS; w++) o = o + list_o[w];\n"
LAST_L = "    ROLL for (int w = 1; w < LISTS; w++) l = l + __shfl_sync(ALL, list_l, w);\n"
TREE = (
    "    o = ((list_o[0] + list_o[1]) + (list_o[2] + list_o[3])) +\n"
    "        ((list_o[4] + list_o[5]) + (list_o[6] + list_o[7]));\n"
)

_MISTAKES = (
    Patch(
        SUM_O,
        SUM_O.replace("list_o[w]", "list_o[0]"),
        "o is one sum over all chunks, one after another. That is a right sum, but eight consumer "
        "warps make eight, and alone the row is merged by them. Which chunks belong together?",
    ),
    Patch(
        ADD_O,
        "list_o[w] + v[w * 4 + i / LISTS] * c.s.merge_weight[w * 4 + i / LISTS].x",
        "a list has four neighbouring chunks here. Consumer warp w takes w, w + 8, w + 16, ...",
    ),
    Patch(
        LAST_O,
        TREE,
        "the eight sums of o are added as a tree. One after another is the order of the consumers.",
    ),
    Patch(
        LAST_O + LAST_L,
        "",
        "only list 0 is in the result. At the end the other seven are added to it, those of o and "
        "those of l.",
    ),
    Patch(
        "__shfl_sync(ALL, list_l, w)",
        "__shfl_sync(ALL, list_l, LISTS - w)",
        "the sums of l are added from the last to the second. Their order counts, too.",
    ),
    Patch(
        ADD_O,
        "__builtin_fmaf(v[i + w], c.s.merge_weight[i + w].x, list_o[w])",
        "fmaf rounds once, product and sum together. The consumers round the product, then the "
        "sum: better is other bits.",
    ),
    Patch(
        ADD_L,
        "list_l = list_l + own.y * weight;",
        "own.y and weight are those of this lane's chunk. List w needs the products of chunks w, "
        "w + 8, ..., which other lanes have made: all of them lie in c.s.merge_weight.",
    ),
    Patch(
        ADD_L,
        "list_l = list_l + own.y * c.s.merge_weight[c.lane % LISTS + i].x;",
        "the weight is that of the right chunk, and l that of another, this lane's. The product "
        "of the two that belong together has been made already: `.y`.",
    ),
    Patch(
        ADD_O,
        "list_o[w] + v[i + w] * c.s.merge_weight[i + w].y",
        "the outputs are multiplied with `.y`, the weight times l. An output has its sum l in it "
        "already: it needs the weight alone.",
    ),
    Patch(
        ADD_L,
        "list_l = list_l + c.s.merge_weight[c.lane % LISTS + i].x;",
        "the sums of l add weights, as if every chunk had an l of 1. Weight times l is `.y`.",
    ),
    Patch(
        "__shfl_sync(ALL, list_l, w)",
        "list_l",
        "at the end each lane adds its own list_l seven times. The sum of list w is in lane w: ask "
        "that lane, with __shfl_sync.",
    ),
    Patch(
        LAST_L,
        "",
        "o is complete, l is that of list 0 alone. Seven more sums of l lie in lanes 1 to 7.",
    ),
)

EXERCISES = (
    CudaExercise(
        id="13.2",
        answer="merge_by_helper",
        file="megakernel.cu",
        function="merge_by_helper",
        blanks=(
            Blank("UNROLL for (int i = 0; i < PANEL; i += LISTS) {", "}"),
            Blank(LAST_O.strip(), LAST_L.strip()),
        ),
        properties=(
            _company(1, 3, 8),
            _company(9, 16, 17, 32),
            _company(33, 40, 65, n_sm=3),
            _company(20, 2, n_sm=5),
            Property("first or last in the batch", _places),
        ),
        mistakes=_MISTAKES,
        then="Now: which constant decides who merges, and what was measured to choose it?",
    ),
)


def merged_otherwise(n_outputs: int = 65536, n_chunks: int = 20) -> tuple[int, int]:
    """Merge chunks in eight lists, as the kernel, and one after another.

    Returns:
        How many outputs have other bits in float32, and after the rounding to bfloat16.
    """
    rng = np.random.default_rng(13)
    m = rng.normal(0, 1, n_chunks).astype(np.float32)
    weight = exp2(m - m.max())
    o = rng.normal(0, 1, (n_chunks, n_outputs)).astype(np.float32) * weight[:, None]
    total = rng.uniform(20, 100, n_chunks).astype(np.float32) * weight
    lists = [(_fold(o[w::8]), _fold(total[w::8])) for w in range(8)]
    ours = _fold(np.array([a for a, _ in lists])) / _fold(np.array([b for _, b in lists]))
    plain = _fold(o) / _fold(total)
    return int((ours != plain).sum()), int((to_bf16(ours) != to_bf16(plain)).sum())


def _fold(terms: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """One after another along the first axis, float32."""
    return np.asarray(np.add.accumulate(terms, axis=0)[-1])
