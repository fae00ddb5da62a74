"""Lesson 13: its first exercise, a sum whose bits are fixed.

The second, in CUDA, is in `lesson_13_merge`, the third in `lesson_13_verdict`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from mkref.lessons.exercise import (
    EMPTY,
    Answer,
    Mistake,
    Property,
    PythonExercise,
    WrongAnswerError,
)

__all__ = ["CHUNK", "EXERCISES", "bits_of", "fixed_sum", "in_order", "numbers", "per_sm"]

CHUNK = 128
"""Values of a chunk: a part of the definition of the sum."""
Floats = npt.NDArray[Any]


def fixed_sum(x: Floats, n_sm: int) -> np.float32:
    """The sum of x, float32, on `n_sm` SMs, with bits that do not depend on `n_sm`.

    Chunk c is x[128 c : 128 c + 128], the last one is filled up with zeros. It belongs to SM
    c % n_sm. Within a chunk: first half plus second half, value by value, until one value is left.
    The sums of the chunks are then added one after another, chunk 0 first.
    """
    # BEGIN SOLUTION
    import numpy as np

    n_chunks = -(-len(x) // 128)
    padded = np.zeros(128 * n_chunks, np.float32)
    padded[: len(x)] = x
    of_chunk = [np.float32(0)] * n_chunks
    for sm in range(n_sm):
        for c in range(sm, n_chunks, n_sm):
            v = padded[128 * c : 128 * c + 128]
            while len(v) > 1:
                half = len(v) // 2
                v = v[:half] + v[half:]
            of_chunk[c] = v[0]  # kept under the chunk's number, not added to the SM's others
    total = of_chunk[0]
    for one in of_chunk[1:]:
        total = total + one
    return total
    # END SOLUTION


def numbers(n: int, seed: int = 13) -> Floats:
    """Numbers as they meet in a product: both signs, sizes over some powers of two."""
    rng = np.random.default_rng([seed, n])
    scale = np.exp2(rng.integers(-6, 7, n))
    return np.asarray((rng.standard_normal(n) * scale).astype(np.float32))


def bits_of(value: Any) -> str:
    """The 32 bits of a float32, in hexadecimal.

    >>> bits_of(1.0)
    '3f800000'
    """
    return f"{int(np.float32(value).view(np.uint32)):08x}"


def in_order(x: Floats) -> np.float32:
    """One value after another, float32."""
    return np.float32(np.add.accumulate(np.asarray(x, np.float32))[-1])


def per_sm(x: Floats, n_sm: int) -> np.float32:
    """The tempting way: every SM adds its values, x[sm], x[sm + n_sm], ..., then SM after SM."""
    return in_order(np.array([in_order(x[sm::n_sm]) for sm in range(n_sm)], np.float32))


def _chunks(x: Floats) -> list[Floats]:
    padded = np.zeros(-(-len(x) // CHUNK) * CHUNK, np.float32)
    padded[: len(x)] = x
    return list(padded.reshape(-1, CHUNK))


def _halves(v: Floats) -> np.float32:
    while len(v) > 1:
        v = v[: len(v) // 2] + v[len(v) // 2 :]
    return np.float32(v[0])


def _neighbours(v: Floats) -> np.float32:
    while len(v) > 1:
        v = v[0::2] + v[1::2]
    return np.float32(v[0])


def _in_sms(x: Floats, n_sm: int) -> np.float32:
    """The SM's chunks are added in the SM."""
    sums = np.array([_halves(chunk) for chunk in _chunks(x)], np.float32)
    return in_order(np.array([in_order(sums[sm::n_sm]) for sm in range(min(n_sm, len(sums)))]))


def _as_they_come(x: Floats, n_sm: int) -> np.float32:
    """SM after SM, each chunk by chunk."""
    sums = [_halves(chunk) for chunk in _chunks(x)]
    return in_order(np.array([s for sm in range(n_sm) for s in sums[sm::n_sm]], np.float32))


def _cut_by_sms(x: Floats, n_sm: int) -> np.float32:
    parts = [part for part in np.array_split(np.asarray(x, np.float32), n_sm) if len(part)]
    return in_order(np.array([in_order(part) for part in parts], np.float32))


def _cut_evenly(x: Floats, n_sm: int) -> np.float32:
    """As many parts as SMs, all of one length but the last."""
    size = -(-len(x) // n_sm)
    parts = [np.asarray(x[at : at + size], np.float32) for at in range(0, len(x), size)]
    return in_order(np.array([in_order(part) for part in parts], np.float32))


def _runs_of_chunks(x: Floats, n_sm: int) -> np.float32:
    """Each SM adds chunks that follow one another."""
    parts = np.array_split(np.array([_halves(c) for c in _chunks(x)], np.float32), n_sm)
    return in_order(np.array([in_order(part) for part in parts if len(part)], np.float32))


def _repeated(x: Floats) -> list[Floats]:
    """Chunks, the last one filled with the first values again."""
    return list(np.resize(x, (-(-len(x) // CHUNK), CHUNK)).astype(np.float32))


SEEDS = range(6)
"""Some wrong orders give the right bits for some numbers: each case is tried with several."""
SIZES: tuple[tuple[str, int, int], ...] = (
    ("one chunk on one SM", CHUNK, 1),
    ("20 chunks on one SM", 20 * CHUNK, 1),
    ("20 chunks on 2 SMs", 20 * CHUNK, 2),
    ("20 chunks on 7 SMs", 20 * CHUNK, 7),
    ("20 chunks on 132 SMs", 20 * CHUNK, 132),
    ("1,000 values on 3 SMs", 1000, 3),
)
LARGE = np.array([2.0**24, *255 * [1.0]], np.float32)


def _must_be_number(got: Any) -> None:
    if got is None:
        raise WrongAnswerError(f"it returns None, {EMPTY}")
    if np.ndim(got) or isinstance(got, str):
        raise WrongAnswerError(f"it returns a {type(got).__name__}, not a number")


def _sum_trial(where: str, arrays: Sequence[Floats], n_sm: int) -> Property:
    def trial(answer: Answer) -> None:
        for x in arrays:
            right = fixed_sum(x, n_sm)
            with np.errstate(all="ignore"):
                got = answer(x.copy(), n_sm)
            _must_be_number(got)
            if not np.float64(got) == np.float64(right):
                raise WrongAnswerError(
                    f"{float(right):.9g} is right, bits {bits_of(right)}; it returns "
                    f"{float(got):.9g}, bits {bits_of(got)}"
                )

    return Property(where, trial)


def _nan_stays(answer: Answer) -> None:
    x = numbers(300)
    x[200] = np.nan
    with np.errstate(all="ignore"):
        got = answer(x, 2)
    _must_be_number(got)
    if not math.isnan(float(got)):
        raise WrongAnswerError("a NaN among the values has vanished")


_SUM_MISTAKES = (
    Mistake(
        _in_sms,
        "each SM adds its own chunks first, so which chunks meet first depends on n_sm. Keep the "
        "sums apart, under the number of the chunk, until all are there.",
    ),
    Mistake(
        _as_they_come,
        "the chunks' sums are added SM after SM, so their order depends on n_sm. Which order "
        "does not?",
    ),
    Mistake(
        _cut_by_sms,
        "the values are cut into as many parts as there are SMs. Where a chunk begins must follow "
        "from its number alone.",
    ),
    Mistake(
        lambda x, n_sm: in_order(x),
        "this does not depend on n_sm, but it is another sum: value after value, which one thread "
        "would have to do alone. Within a chunk halves are added.",
    ),
    Mistake(
        lambda x, n_sm: in_order(np.array([_neighbours(c) for c in _chunks(x)], np.float32)),
        "fixed, and as good, but other bits: neighbours are added here, the definition says first "
        "half plus second half.",
    ),
    Mistake(
        lambda x, n_sm: in_order(np.array([c.sum(dtype=np.float32) for c in _chunks(x)])),
        "the chunks are right, and `sum` of NumPy adds each in an order of its own, which is not "
        "the defined one. Write out first half plus second half.",
    ),
    Mistake(
        lambda x, n_sm: _halves(np.add.accumulate(np.array(_chunks(x)))[-1]),
        "all chunks are added into one, value by value, and halved at the end. Each chunk has a "
        "sum of its own, down to one value; only then are the sums added.",
    ),
    Mistake(
        lambda x, n_sm: np.float32(np.asarray(x, np.float64).sum()),
        "added in float64 and rounded once. It is nearer to the true sum, and not what was "
        "defined: with the same bits as the goal, better is wrong, too.",
    ),
    Mistake(
        lambda x, n_sm: in_order(np.array(sorted(_halves(c) for c in _chunks(x)), np.float32)),
        "the chunks' sums are sorted by size. Their order must be that of their numbers.",
    ),
    Mistake(
        per_sm,
        "the values are dealt to the SMs one by one, as in the prediction, so which of them meet "
        "depends on n_sm. Deal whole chunks, whose values always meet each other first.",
    ),
    Mistake(
        _cut_evenly,
        "split-K: x is cut into n_sm parts of one length, so the length depends on n_sm. A chunk "
        "has 128 values, however many SMs there are.",
    ),
    Mistake(
        _runs_of_chunks,
        "the chunks are right, but each SM adds up a run of them, and how long a run is depends on "
        "n_sm. Add the sums of the chunks one by one, as if there were no SMs.",
    ),
    Mistake(
        lambda x, n_sm: in_order(np.array([_halves(c) for c in _chunks(x)][: len(x) // CHUNK])),
        "the values behind the last full chunk are left out. They are a chunk, too, filled up with "
        "zeros.",
    ),
    Mistake(
        lambda x, n_sm: in_order(np.array([_halves(c) for c in _repeated(x)])),
        "the last chunk is filled up with values that were there before: `np.resize` repeats. Fill "
        "up with zeros.",
    ),
    Mistake(
        lambda x, n_sm: np.array([_halves(c) for c in _chunks(x)], np.float32).sum(),
        "within the chunks all is right. Across them `sum` of NumPy chooses the order: add one "
        "after another, chunk 0 first.",
    ),
    Mistake(
        lambda x, n_sm: sum(float(_halves(c)) for c in _chunks(x)),
        "the chunks' sums are added as Python floats (`float`, `.tolist()`, `.item()`), which are "
        "float64. Keep each of them, and the total, an `np.float32`.",
    ),
    Mistake(
        lambda x, n_sm: in_order(np.array([sum(c.tolist()) for c in _chunks(x)], np.float32)),
        "each chunk is added in float64 (`.tolist()` makes Python floats) and rounded once. The "
        "halves are to be added in float32, with a rounding each.",
    ),
)

EXERCISES = (
    PythonExercise(
        id="13.1",
        solution=fixed_sum,
        properties=(
            *(
                _sum_trial(where, [numbers(n, seed) for seed in SEEDS], n_sm)
                for where, n, n_sm in SIZES
            ),
            _sum_trial("2^24 and 255 ones on 2 SMs", [LARGE], 2),
            Property("a NaN stays a NaN", _nan_stays),
        ),
        mistakes=_SUM_MISTAKES,
        samples=tuple((numbers(n, seed), n_sm) for _, n, n_sm in SIZES for seed in SEEDS),
        then="Now: a product of the kernel is added on three levels, which come next. Which of "
        "them are added one after another, as the chunks are here?",
    ),
)
