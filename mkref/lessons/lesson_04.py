"""Lesson 04: its exercises, the order of a tile and the end of QKV in the kernel that runs."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from mkref.lessons.cuda_exercise import Blank
from mkref.lessons.exercise import (
    EMPTY,
    Answer,
    Mistake,
    Property,
    PythonExercise,
    WrongAnswerError,
)
from mkref.lessons.lesson_04_finish import (
    FinishExercise,
    flags_alone,
    in_step,
    roundings_alone,
    widths_alone,
)
from mkref.lessons.lesson_04_mistakes import FINISH
from mkref.lessons.recorded import bench_record
from mkref.weights.tiles import TILE, TILE_WORDS, pack_tiles, unpack_tiles

if TYPE_CHECKING:
    from mkref.lessons.program import Program

__all__ = ["EXERCISES", "ladder_ms", "loads_per_lane", "other_bits", "tile_order"]

LANES = 32
NUMBERED = np.arange(TILE_WORDS, dtype=np.uint16).reshape(TILE, TILE)
"""A tile whose word (row, k) is 16 row + k."""
REGISTERS = ("a0", "a1", "a2", "a3")


def tile_order(tile: npt.NDArray[np.uint16]) -> list[int]:
    """The 256 words of a 16 x 16 tile, `tile[row, k]`, in the order in which lanes read them.

    Lane 4 g + t (g = 0..7, t = 0..3) has eight words in a row, four registers of two:
        a0 = row g, k 2t and 2t + 1          a1 = row g + 8, the same k
        a2 = row g, k 2t + 8 and 2t + 9      a3 = row g + 8, the same k as a2
    The result is a list or an array; `tile` itself stays as it is.
    """
    # BEGIN SOLUTION
    words = []
    for g in range(8):
        for t in range(4):
            for k in (2 * t, 2 * t + 8):
                for row in (g, g + 8):
                    words += [tile[row, k], tile[row, k + 1]]
    return words
    # END SOLUTION


def _words(answer: Answer, tile: npt.NDArray[np.uint16]) -> npt.NDArray[np.int64]:
    """What the answer gives for a tile, if it is 256 whole numbers."""
    own = tile.copy()
    given: Any = answer(own)
    if given is None:
        raise WrongAnswerError(f"it returns None, {EMPTY}")
    if not np.array_equal(own, tile):
        raise WrongAnswerError("it changes the tile that it was given; make a new list or array")
    try:
        words = np.asarray(given)
    except ValueError:
        raise WrongAnswerError("it returns a list of lists of different lengths") from None
    if words.shape == (TILE_WORDS,) and words.dtype.kind == "f":
        raise WrongAnswerError(
            f"it returns 256 numbers of type {words.dtype}, words are {tile.dtype}: an array of "
            "np.zeros or np.empty needs dtype=tile.dtype"
        )
    if words.shape != (TILE_WORDS,) or words.dtype.kind not in "iu":
        what = f"shape {words.shape}" if words.shape else f"a {type(given).__name__}"
        raise WrongAnswerError(f"it returns {what}, not a list of 256 words")
    return words.astype(np.int64)


def _place(at: int) -> str:
    return f"lane {at // 8}, {REGISTERS[at % 8 // 2]}, {('low', 'high')[at % 2]} half"


def _numbered(answer: Answer) -> None:
    words, right = _words(answer, NUMBERED), pack_tiles(NUMBERED)[0]
    wrong = np.flatnonzero(words != right)
    if not wrong.size:
        return
    at, given = int(wrong[0]), int(words[wrong[0]])
    is_ = f"row {given // 16}, k {given % 16}" if 0 <= given < TILE_WORDS else "no word of it"
    raise WrongAnswerError(
        f"{TILE_WORDS - wrong.size} of 256 words are in their places; {_place(at)} (word {at}) "
        f"is {is_}, must be row {right[at] // 16}, k {right[at] % 16}"
    )


def _random(answer: Answer) -> None:
    tile = np.random.default_rng(4).integers(0, 1 << 16, (TILE, TILE)).astype(np.uint16)
    wrong = np.flatnonzero(_words(answer, tile) != pack_tiles(tile)[0])
    if wrong.size:
        raise WrongAnswerError(f"random words: {wrong.size} of 256 are wrong")


def _product(answer: Answer) -> None:
    """Hands the fragment to the model of the tensor core, with a vector that tells rows apart."""
    from mkref.reference.mma import project
    from mkref.reference.scalars import to_bf16

    tile = to_bf16(np.arange(TILE_WORDS, dtype=np.float32).reshape(TILE, TILE))
    x = to_bf16(2.0 ** np.arange(TILE, dtype=np.float32))[None]
    words = _words(answer, tile)
    if words.min() < 0 or words.max() > 0xFFFF:
        raise WrongAnswerError("one mma: these are no words of the tile")
    got = project(words.astype(np.uint16)[None], x)[0]
    right = project(pack_tiles(tile), x)[0]
    wrong = np.flatnonzero(got != right)
    if wrong.size:
        row = int(wrong[0])
        raise WrongAnswerError(
            f"one mma: {wrong.size} of 16 sums are wrong; row {row} gives {got[row]:g}, must be "
            f"{right[row]:g}"
        )


def _axes(*order: int) -> Answer:
    """A tile seen as [rh, g, kh, t, p] with these axes in another order."""
    return lambda tile: tile.reshape(2, 8, 2, 4, 2).transpose(order).reshape(-1)


def _lanes(
    tile: npt.NDArray[np.uint16], place: Callable[[int, int], tuple[tuple[int, ...], ...]]
) -> list[int]:
    """The words lane by lane, if lane 4 g + t has these rows and begins at these k."""
    words = []
    for lane in range(LANES):
        rows, begins = place(*divmod(lane, 4))
        words += [tile[row, k + i] for k in begins for row in rows for i in (0, 1)]
    return words


_MISTAKES = (
    Mistake(
        lambda tile: tile.reshape(-1),
        "that is row after row. A lane would have to collect its eight words from four places: "
        "which lane reads which words together?",
    ),
    Mistake(
        _axes(1, 3, 0, 2, 4),
        "a1 and a2 have changed places. Which comes first after a0: eight rows further, or eight "
        "k further?",
    ),
    Mistake(
        _axes(3, 1, 2, 0, 4),
        "the lanes are counted the other way round: neighbours are t, not g, in lane 4 g + t.",
    ),
    Mistake(
        _axes(2, 0, 1, 3, 4),
        "that is register after register, each for all lanes. One load of 16 bytes wants the four "
        "registers of one lane side by side.",
    ),
    Mistake(
        lambda tile: pack_tiles(np.ascontiguousarray(tile.T))[0],
        "rows and k are exchanged: tile[row, k] has the output first and the depth second.",
    ),
    Mistake(
        lambda tile: pack_tiles(tile)[0].reshape(-1, 2)[:, ::-1].reshape(-1),
        "the two words of a register have changed places: the one with the lower k comes first.",
    ),
    Mistake(
        lambda tile: _lanes(tile, lambda g, t: ((g, g + 8), (t, t + 8))),
        "lane t of a row begins at k = t, so neighbours share a word. Each lane has two words: "
        "where does the next one begin?",
    ),
    Mistake(
        lambda tile: _lanes(tile, lambda g, t: ((2 * g, 2 * g + 1), (2 * t, 2 * t + 8))),
        "a lane's rows are neighbours here, 2g and 2g + 1. In the picture they are eight apart.",
    ),
)


def _qkv(layer: int, rows: int, n_sm: int, seed: int = 0) -> Callable[[Program], None]:
    def trial(program: Program) -> None:
        from mkref.plan import Op

        in_step(Op.QKV, layer, rows, n_sm, seed)(program)

    return trial


EXERCISES = (
    PythonExercise(
        id="04.1",
        solution=tile_order,
        properties=(
            Property("a tile of numbers", _numbered),
            Property("random words", _random),
            Property("one mma with it", _product),
        ),
        mistakes=_MISTAKES,
        then="Now: which order do the 16 values of an activation need, for lane 4 g + t to read "
        "its four with one load of 8 bytes?",
    ),
    FinishExercise(
        id="04.2",
        answer="finish",
        file="megakernel.cu",
        function="finish",
        blanks=(Blank("const int dim = out % HEAD_DIM;", "break;"),),
        properties=(
            Property("one row, with positions", _qkv(1, 1, 2)),
            Property("three rows at different positions", _qkv(1, 3, 2)),
            Property("a layer with full attention", _qkv(4, 2, 2)),
            Property("six rows on three SMs", _qkv(2, 6, 3)),
            Property("warps in any order", _qkv(3, 6, 2, seed=3)),
            Property("finish alone: other sizes, a later step", widths_alone),
            Property("finish alone: other bits in task.flags", flags_alone),
            Property("finish alone: every operation rounds", roundings_alone),
        ),
        mistakes=FINISH,
        then="Now find who waits for these words: which tasks read q, and which read k_new?",
    ),
)


def loads_per_lane(order: Answer) -> int:
    """Pieces of neighbouring words that lane 13 collects, if a tile lies in this order.

    Args:
        order: of the 256 words of a tile, such as `tile_order`.
    """
    at = {int(word): place for place, word in enumerate(order(NUMBERED.copy()))}
    wanted = pack_tiles(NUMBERED)[0].reshape(LANES, 8)[13]
    places = [at[int(word)] for word in wanted]
    return 1 + sum(b != a + 1 for a, b in pairwise(places))


def other_bits(depth: int = 2048, outputs: int = 256) -> tuple[int, float, int]:
    """Sums whose bits differ if one warp chains all tiles instead of eight, and by how much.

    Random weights and activations; the sums are those of docs/numerics.md, on this computer.

    Returns:
        How many differ, the largest difference relative to the largest sum, and how many still
        differ when they are rounded to bfloat16.
    """
    from mkref.reference.mma import chain, project
    from mkref.reference.scalars import to_bf16

    rng = np.random.default_rng(2)
    weight = to_bf16(rng.normal(0, 0.02, (outputs, depth)).astype(np.float32))
    x = to_bf16(rng.normal(0, 1, (1, depth)).astype(np.float32))
    tiles = pack_tiles(weight)
    assert np.array_equal(unpack_tiles(tiles, outputs, depth), weight)
    eight = project(tiles, x)[0]
    one = chain(np.zeros((outputs, 1), np.float32), weight, np.ascontiguousarray(x.T))[:, 0]
    far = np.abs(eight - one).max() / np.abs(eight).max()
    stored = to_bf16(eight) != to_bf16(one)
    return int((eight != one).sum()), float(far), int(stored.sum())


def ladder_ms(name: str, batch: int = 1) -> float:
    """Milliseconds per step of a rung of the ladder, measured on an H200.

    Args:
        name: of the rung in `bench/results/h200/ladder.json`.
        batch: rows of the step.
    """
    rows = bench_record("h200/ladder.json")["rows"]
    found = [row["ms_per_step"] for row in rows if (row["name"], row["batch"]) == (name, batch)]
    return float(found[0])
