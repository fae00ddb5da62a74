"""Lesson 05: its first exercise, the chunks of a row in the kernel that runs, and what it computes.

The second, the merge of splits, is in `lesson_05_merge`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from mkref.lessons.cuda_exercise import Blank, CudaExercise, Patch
from mkref.lessons.exercise import (
    Property,
    WrongAnswerError,
)
from mkref.lessons.recorded import bench_record
from mkref.reference.scalars import exp2

if TYPE_CHECKING:
    from mkref.lessons.program import Program

__all__ = ["CHUNK", "EXERCISES", "chunks_of", "context_ms", "split_bits"]

CHUNK = 128
"""Keys of a chunk: two pages of 64."""
Numbers = npt.NDArray[Any]


PROBE = """
#line 1 "the trial"
extern "C" __global__ void key_ranges(int* out, const int* cases, int n) {
  for (int i = threadIdx.x; i < n; i += blockDim.x) {
    const KeyRange r = key_range(cases[2 * i], cases[2 * i + 1]);
    out[4 * i] = r.first;
    out[4 * i + 1] = r.last;
    out[4 * i + 2] = r.chunk;
    out[4 * i + 3] = r.n_chunks;
  }
}
"""
RANGES = (
    *((position, 0) for position in (0, 127, 128, 8191)),
    *((position, 70) for position in (0, 68, 69, 70, 130, 300)),
    *((position, 4096) for position in (0, 130, 4094, 4095, 4096, 8200)),
)
"""Positions and windows. Windows above 128 are not in the small model that the other trials run."""


class _KeyRangeExercise(CudaExercise):
    """The kernel with a second one behind it, which calls `key_range` alone."""

    def whole(self, answer: str) -> str:
        """The translation unit with an answer in it."""
        return super().whole(answer) + PROBE


def _ranges(program: Program) -> None:
    """`key_range` alone, before it decides who waits for what: a wrong one is told in numbers."""
    cases = np.array(RANGES, np.int32)
    out = program.poisoned((len(cases), 4), np.int32)
    args = (out, program.array(cases), len(cases))
    program.launch("key_ranges", (1,), (32,), args)
    for (position, window), got in zip(RANGES, out.tolist(), strict=True):
        chunk, n_chunks = chunks_of(position, window)
        first = position - window + 1 if 0 < window <= position else 0
        right = {"first": first, "last": position, "chunk": chunk, "n_chunks": n_chunks}
        for (field, value), given in zip(right.items(), got, strict=True):
            if value != given:
                keys = f"window {window}" if window else "all keys"
                raise WrongAnswerError(
                    f"position {position}, {keys}: r.{field} must be {value}, it is {given}"
                )


def _op(name: str, layer: int, rows: int, n_sm: int, seed: int = 0) -> Callable[[Program], None]:
    def trial(program: Program) -> None:
        from mkref.lessons.steps import run_op
        from mkref.plan import Op

        try:
            run_op(program, Op[name], layer=layer, rows=rows, n_sm=n_sm, seed=seed)
        except WrongAnswerError as wrong:  # what the interpreter leaves alone is NaN beforehand
            says = str(wrong).replace("must be nan, it is", "must not be written, it is")
            raise WrongAnswerError(says) from wrong

    return trial


_RANGE_MISTAKES = (
    Patch(
        "r.last - window + 1",
        "r.last - window",
        "that is one key too many: a window of w keys includes the token itself.",
    ),
    Patch(
        "r.last / CHUNK - r.chunk + 1",
        "(r.last - r.first) / CHUNK + 1",
        "the number of chunks does not follow from the number of keys. Chunks begin at multiples "
        "of 128, and a short range may lie across such a border.",
    ),
    Patch(
        "r.last / CHUNK - r.chunk + 1",
        "r.last / CHUNK - r.chunk",
        "from the first to the last chunk, both included: what if they are the same one?",
    ),
    Patch(
        "window > 0 && r.last >= window",
        "r.last >= window",
        "layers with full attention have window 0, which means all keys.",
    ),
    Patch(
        "r.last = position;",
        "r.last = position - 1;",
        "a token sees its own key, too.",
    ),
    Patch(
        "window > 0 && r.last >= window",
        "window > 0",
        "a row that is shorter than the window has a first key below 0, and with a large window a "
        "first chunk below 0. It sees all keys, from 0.",
    ),
    Patch(
        "window > 0 && r.last >= window ? r.last - window + 1 : 0",
        "0",
        "every row sees all keys here. What does the window leave out?",
    ),
    Patch(
        "r.last >= window",
        "r.last > window",
        "at position w, with a window of w, there are w + 1 keys from 0 on: key 0 is not seen any "
        "more. Try the smallest position at which `last - w + 1` is above 0.",
    ),
    Patch(
        "r.chunk = r.first / CHUNK;",
        "r.chunk = 0;",
        "`chunk` is where reading begins. Which chunk has the first key that is seen?",
    ),
    Patch(
        "r.chunk = r.first / CHUNK;",
        "r.chunk = r.first / CHUNK * CHUNK;",
        "`chunk` is set to the number of the chunk's first key, and `n_chunks`, which is made from "
        "it, goes wrong with it. Chunks are numbered 0, 1, 2.",
    ),
    Patch(
        "r.chunk = r.first / CHUNK;",
        "r.chunk = r.first / CHUNK * CHUNK;",
        "`n_chunks` is right, but `chunk` is set to the number of the chunk's first key. Chunks "
        "are numbered 0, 1, 2.",
        more=(("r.last / CHUNK - r.chunk + 1", "r.last / CHUNK - r.first / CHUNK + 1"),),
    ),
    Patch(
        "r.last / CHUNK - r.chunk + 1",
        "(r.last + CHUNK - 1) / CHUNK - r.chunk",
        "rounding up is for a number of keys, and `last` is the number *of* a key, counted from 0. "
        "Position 0 is one key, in one chunk; so is position 128 in the second chunk.",
    ),
    Patch(
        "r.chunk = r.first / CHUNK;",
        "r.chunk = r.first / PAGE;",
        "those are pages, of 64 keys. A chunk is two of them.",
        more=(("r.last / CHUNK - r.chunk + 1", "r.last / PAGE - r.chunk + 1"),),
    ),
    Patch(
        "r.n_chunks = r.last / CHUNK - r.chunk + 1;",
        "r.n_chunks = r.last / CHUNK - r.chunk + 1;\n"
        "  if (r.n_chunks > MOST_SPLITS) r.n_chunks = MOST_SPLITS;",
        "at most 33 is true of splits. A long row has more chunks than that, and `n_splits` needs "
        "their true number.",
    ),
)

EXERCISES = (
    _KeyRangeExercise(
        id="05.1",
        answer="key_range",
        file="megakernel.cu",
        function="key_range",
        blanks=(Blank("r.last = position;", "r.n_chunks = "),),
        properties=(
            Property("key_range alone, windows of 0, 70 and 4,096", _ranges),
            Property("one row, all keys", _op("ATTENTION", 0, 1, 2)),
            Property("six rows, all keys", _op("ATTENTION", 4, 6, 2)),
            Property("one row with a window", _op("ATTENTION", 1, 1, 2)),
            Property("six rows with a window on three SMs", _op("ATTENTION", 2, 6, 3)),
            Property("the merge of six rows", _op("MERGE", 3, 6, 2, seed=3)),
        ),
        mistakes=_RANGE_MISTAKES,
        then="Now: the consumers know this, too. Why does the loader not wait until they tell it?",
    ),
)


def chunks_of(position: int, window: int) -> tuple[int, int]:
    """First chunk and number of chunks of a row, as `key_range` has them; window 0: all keys."""
    first = position - window + 1 if 0 < window <= position else 0
    return first // CHUNK, position // CHUNK - first // CHUNK + 1


def split_bits(keys: int = 1000, dims: int = 64) -> dict[int, int]:
    """How many output words change if the keys of a row are cut into n equal parts instead of
    chunks of 128. A model in float32, one addition after another: it shows that the cut matters,
    not the bits of the kernel, which adds within a chunk as docs/numerics.md says.

    Returns:
        Number of parts -> outputs, of `dims`, with other bits than chunks of 128 give.
    """
    rng = np.random.default_rng(5)
    scores = rng.normal(0, 3, keys).astype(np.float32)
    values = rng.normal(0, 1, (keys, dims)).astype(np.float32)

    def output(begins: list[int]) -> Numbers:
        ends = [*begins[1:], keys]
        top = scores.max()
        total, out = np.float32(0), np.zeros(dims, np.float32)
        for a, b in zip(begins, ends, strict=True):
            m = scores[a:b].max()
            p = exp2(scores[a:b] - m)
            weight = exp2(m - top)
            total = total + np.add.accumulate(p)[-1] * weight
            out = out + np.add.accumulate(p[:, None] * values[a:b])[-1] * weight
        return out / total

    right = output(list(range(0, keys, CHUNK)))
    return {n: int((output([keys * i // n for i in range(n)]) != right).sum()) for n in (5, 7, 9)}


def context_ms(context: int, record: str = "h200/contexts.json") -> float:
    """Milliseconds per step of one row with this context, measured on an H200."""
    rows = bench_record(record)["rows"]
    return float(next(row["ms_per_step"] for row in rows if row["context"] == context))
