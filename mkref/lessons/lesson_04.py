"""Lesson 04: its exercises, the order of a tile and the end of QKV in the kernel that runs."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from mkref.lessons.cuda_exercise import Blank, CudaExercise, Patch
from mkref.lessons.exercise import (
    EMPTY,
    Answer,
    Mistake,
    Property,
    PythonExercise,
    WrongAnswerError,
)
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
    before = tile.copy()
    given: Any = answer(tile)
    if given is None:
        raise WrongAnswerError(f"it returns None, {EMPTY}")
    if not np.array_equal(before, tile):
        raise WrongAnswerError("it changes the tile that it was given")
    try:
        words = np.asarray(given)
    except ValueError:
        raise WrongAnswerError("it returns a list of lists of different lengths") from None
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
)


def _qkv(layer: int, rows: int, n_sm: int, seed: int = 0) -> Callable[[Program], None]:
    def trial(program: Program) -> None:
        from mkref.lessons.steps import run_op
        from mkref.plan import Op

        run_op(program, Op.QKV, layer=layer, rows=rows, n_sm=n_sm, seed=seed)

    return trial


_PORT = (
    Patch(
        "v * angle[0] - other * angle[1]",
        "v * angle[0] + other * angle[1]",
        "a rotation has one plus and one minus: a cos - b sin for the even member of the pair, "
        "b cos + a sin for the odd one.",
    ),
    Patch(
        "r ^ 1",
        "r + 1",
        "the partner of an odd output is the one before it. Pairs are (2i, 2i + 1).",
    ),
    Patch(
        "(task.flags & FLAG_ROPE) && out",
        "out",
        "layers with full attention have no rotary positions. The record says which have.",
    ),
    Patch(
        " && out < Q_WIDTH + KV_WIDTH) {\n        const",
        ") {\n        const",
        "q and k are rotated, v is not. Which outputs are v?",
    ),
    Patch(
        "b_order(dim % 16)",
        "dim % 16",
        "attention reads q as the B operand of an mma. In which order are the 16 values of a tile?",
    ),
    Patch(
        "dim / 2 * 2",
        "dim",
        "there is one angle per pair. Both of its members need the same cos and sin.",
    ),
    Patch(
        "const int dim = out % HEAD_DIM;",
        "const int dim = out % HEAD_DIM;\n      v = bf16_to_float(float_to_bf16(v));",
        "the sum is rounded before it is rotated. docs/numerics.md, step 4, has one rounding: at "
        "the end.",
    ),
    Patch(
        "head / GROUP) * DIM_TILES",
        "head % N_KV_HEADS) * DIM_TILES",
        "the query heads of a KV head are neighbours: the first GROUP of them belong to KV head 0.",
        more=(("head % GROUP)", "head / N_KV_HEADS)"),),
    ),
    Patch(
        "v * angle[0] + other * angle[1] :",
        "v * angle[0] - other * angle[1] :",
        "the odd member has the plus: with a the even and b the odd one, it is b cos + a sin, and "
        "a here is `other`.",
    ),
    Patch(
        "r ^ 1",
        "r ^ 8",
        "8 rows further is the partner in GATE_UP. For the rotation neighbours are pairs, "
        "(2i, 2i + 1).",
    ),
    Patch(
        "c.p.q[(tile * COLUMNS + head % GROUP) * 16 + b_order(dim % 16)]",
        "c.p.q[row * Q_WIDTH + out]",
        "q lies in plain rows here. Attention reads tiles: [row][KV head][tile of 16 dims], "
        "COLUMNS columns of 16 words each.",
    ),
    Patch(
        "row * KV_WIDTH + out - Q_WIDTH - KV_WIDTH",
        "row * KV_WIDTH + out - Q_WIDTH",
        "v comes after q and after k: its first output has the number Q_WIDTH + KV_WIDTH.",
    ),
    Patch(
        "dim / 2 * 2",
        "dim / 2",
        "angles(c, row) has two numbers per pair, cos and sin: pair number i begins at 2 i.",
    ),
    Patch(
        "      break;\n    }\n    case OP_GATE_UP",
        "    }\n    case OP_GATE_UP",
        "without `break` the case of GATE_UP is executed as well, and writes into h.",
    ),
)

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
    CudaExercise(
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
        ),
        mistakes=_PORT,
        then="Now find who waits for these words: which tasks read q, and which read k_new?",
    ),
)


def loads_per_lane(order: Answer) -> int:
    """Pieces of neighbouring words that lane 13 collects, if a tile lies in this order.

    Args:
        order: of the 256 words of a tile, such as `tile_order`.
    """
    at = {int(word): place for place, word in enumerate(order(NUMBERED))}
    wanted = pack_tiles(NUMBERED)[0].reshape(LANES, 8)[13]
    places = [at[int(word)] for word in wanted]
    return 1 + sum(b != a + 1 for a, b in pairwise(places))


def other_bits(depth: int = 2048, outputs: int = 256) -> tuple[int, float]:
    """Outputs whose bits differ if one warp chains all tiles instead of eight, and by how much.

    Random weights and activations; the sums are those of docs/numerics.md, on this computer.

    Returns:
        How many differ, and the largest difference relative to the largest output.
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
    return int((eight != one).sum()), float(far)


def ladder_ms(name: str, batch: int = 1) -> float:
    """Milliseconds per step of a rung of the ladder, measured on an H200.

    Args:
        name: of the rung in `bench/results/h200/ladder.json`.
        batch: rows of the step.
    """
    rows = bench_record("h200/ladder.json")["rows"]
    found = [row["ms_per_step"] for row in rows if (row["name"], row["batch"]) == (name, batch)]
    return float(found[0])
