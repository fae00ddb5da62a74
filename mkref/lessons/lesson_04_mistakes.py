"""Typical mistakes in exercise 04.2, the end of QKV: changes of the solution and their hints."""

from __future__ import annotations

from mkref.lessons.cuda_exercise import Patch

__all__ = ["FINISH"]

_ROTATION = "v * angle[0] + other * angle[1] : v * angle[0] - other * angle[1]"
_Q = "c.p.q[(tile * COLUMNS + head % GROUP) * 16 + b_order(dim % 16)]"
_K = "c.p.k_new[row * KV_WIDTH + out - Q_WIDTH]"
_V = "c.p.v_new[row * KV_WIDTH + out - Q_WIDTH - KV_WIDTH]"
_V_IN_B_ORDER = (
    "c.p.v_new[row * KV_WIDTH + (out - Q_WIDTH - KV_WIDTH) / 16 * 16 + b_order(out % 16)]"
)

_ROTATED = (
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
        "const int dim = out % HEAD_DIM;",
        "const int dim = out % HEAD_DIM;\n      v = bf16_to_float(float_to_bf16(v));",
        "both sums are rounded before they are rotated. An ordinary kernel that stores q and "
        "rotates it later would do that; here they stay float32 until the end.",
        more=(
            (
                "total(c.s, c.buffer, r ^ 1, row)",
                "bf16_to_float(float_to_bf16(total(c.s, c.buffer, r ^ 1, row)))",
            ),
        ),
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
        "dim / 2 * 2",
        "dim / 2",
        "angles(c, row) has two numbers per pair, cos and sin: pair number i begins at 2 i.",
    ),
    Patch(
        "(task.flags & FLAG_ROPE)",
        "(task.flags && FLAG_ROPE)",
        "task.flags has other bits, too: that it is not 0 says nothing about FLAG_ROPE, and `&&` "
        "only asks whether both are not 0. A bit is tested with one `&`.",
    ),
    Patch(
        "(task.flags & FLAG_ROPE)",
        "(task.flags == FLAG_ROPE)",
        "`==` holds only if FLAG_ROPE is the single bit that is set. In the plan of North Mini "
        "Code nearly all records of QKV have a second one.",
    ),
    Patch(
        "angles(c, row)",
        "(c.p.rope + (long long)c.s.positions[row] * HEAD_DIM)",
        "c.s.positions has the positions of a launch's first step. A launch may do several: "
        "`angles(c, row)` counts c.step as well.",
    ),
    Patch(
        "angles(c, row)",
        "c.s.rope[row]",
        "c.s.rope has place for all rows only in builds for up to eight. `angles(c, row)` knows "
        "where they are in the others.",
    ),
    Patch(
        _ROTATION,
        "fmaf(v, angle[0], other * angle[1]) : fmaf(v, angle[0], -(other * angle[1]))",
        "fmaf rounds once where the contract rounds twice: both products, and then their sum. "
        "Write `*`, `+` and `-`; the compiler is told not to fuse them.",
    ),
    Patch(
        " && out < Q_WIDTH + KV_WIDTH) {\n        const",
        " && out < Q_WIDTH) {\n        const",
        "only q is rotated. A score is a product of q and k, and the angle between them is their "
        "distance: k needs its own.",
    ),
    Patch(
        "(task.flags & FLAG_ROPE) && out <",
        "(task.flags & FLAG_ROPE) && out >= Q_WIDTH && out <",
        "k is rotated and q is not. Outputs below Q_WIDTH are q.",
    ),
    Patch(
        _ROTATION,
        "v * angle[0] - other * angle[1] : v * angle[0] + other * angle[1]",
        "it turns the wrong way: the minus belongs to the even member, the plus to the odd one.",
    ),
    Patch(
        _ROTATION,
        "v * angle[1] + other * angle[0] : v * angle[1] - other * angle[0]",
        "cos and sin have changed places: cos comes first in `angles`, and belongs to the output "
        "itself.",
    ),
    Patch(
        "dim / 2 * 2",
        "out / 2 * 2",
        "`angles(c, row)` has HEAD_DIM numbers, the same for every head. Which dim of its head is "
        "`out`?",
    ),
    Patch(
        "total(c.s, c.buffer, r ^ 1, row)",
        "__shfl_xor_sync(ALL, v, 1)",
        "not all lanes of the warp come here, so a shuffle waits for lanes that never come. And "
        "the neighbouring lane has another row of the batch. `total` gives the partner's sum.",
    ),
)

_STORED = (
    Patch(
        "b_order(dim % 16)",
        "dim % 16",
        "attention reads q as the B operand of an mma. In which order are the 16 values of a tile?",
    ),
    Patch(
        "head / GROUP) * DIM_TILES",
        "head % N_KV_HEADS) * DIM_TILES",
        "the query heads of a KV head are neighbours: the first GROUP of them belong to KV head 0.",
        more=(("head % GROUP)", "head / N_KV_HEADS)"),),
    ),
    Patch(
        _Q,
        "c.p.q[row * Q_WIDTH + out]",
        "q lies in plain rows here. Attention reads tiles: [row][KV head][tile of 16 dims], "
        "COLUMNS columns of 16 words each.",
    ),
    Patch(
        _V,
        _V.replace(" - KV_WIDTH", ""),
        "v comes after q and after k: its first output has the number Q_WIDTH + KV_WIDTH.",
    ),
    Patch(
        "      break;\n    }\n    case OP_GATE_UP",
        "    }\n    case OP_GATE_UP",
        "without `break` the case of GATE_UP is executed as well, and writes into h.",
    ),
    Patch(
        "(row * N_KV_HEADS + head / GROUP) * DIM_TILES",
        "(row * DIM_TILES + head / GROUP) * N_KV_HEADS",
        "N_KV_HEADS and DIM_TILES have changed places. They are equal in the small model of the "
        "other trials, and 4 and 8 in North Mini Code.",
    ),
    Patch(
        "tile * COLUMNS",
        "tile * N_HEADS",
        "a tile has COLUMNS columns, those of an mma, however many query heads the model has. "
        "Both are 8 in the small model only.",
    ),
    Patch(
        "const int dim = out % HEAD_DIM;",
        "const int dim = out % 32;",
        "a head has 32 dims in the small model and 128 in North Mini Code. Its name is HEAD_DIM.",
        more=(("out / HEAD_DIM", "out / 32"),),
    ),
    Patch(
        _K,
        _K.replace("KV_WIDTH", "PAGE"),
        "a row of k_new and v_new has KV_WIDTH words. That a page has as many tokens is so in the "
        "small model only.",
        more=((_V, _V.replace("row * KV_WIDTH", "row * PAGE")),),
    ),
    Patch(
        "tile * COLUMNS",
        "tile * GROUP",
        "a tile has COLUMNS columns also where a KV head has fewer query heads. The columns that "
        "are left must not be written.",
    ),
    Patch(
        "(row * N_KV_HEADS + head / GROUP)",
        "(head / GROUP * ROWS + row)",
        "the order is [row][KV head], so all KV heads of a row come before the next row.",
    ),
    Patch(
        "* DIM_TILES + dim / 16",
        "* DIM_TILES",
        "all tiles of a head land on its first one. Which tile of 16 has `dim`?",
    ),
    Patch(
        "b_order(dim % 16)",
        "b_order(dim)",
        "`b_order` orders the 16 values of one tile. Give it the place within the tile.",
    ),
    Patch(
        _K,
        "c.p.k_new[row * KV_WIDTH + (out - Q_WIDTH) / 16 * 16 + b_order(out % 16)]",
        "k and v are in B order. Only q is read as operand B; these two wait in plain order.",
        more=((_V, _V_IN_B_ORDER),),
    ),
    Patch(
        _K,
        "c.p.to[row * KV_WIDTH + out - Q_WIDTH]",
        "k and v have changed places: the outputs are [q; k; v].",
        more=(("c.p.v_new", "c.p.k_new"), ("c.p.to", "c.p.v_new")),
    ),
    Patch(
        _K,
        "c.p.k_new[out - Q_WIDTH]",
        "all rows of the batch write into row 0 of k_new and v_new. Row `row` begins at "
        "row * KV_WIDTH.",
        more=((_V, "c.p.v_new[out - Q_WIDTH - KV_WIDTH]"),),
    ),
    Patch(
        _K,
        "c.p.k_new[row * KV_WIDTH + out]",
        "k comes after q, so its first output has the number Q_WIDTH, and its place is 0.",
    ),
    Patch(
        "% 16)] = float_to_bf16(v);",
        "% 16)] = (uint16_t)(__float_as_uint(v) >> 16);",
        "that cuts the lower half off. `float_to_bf16` rounds to the nearest.",
        more=(
            ("out - Q_WIDTH] = float_to_bf16(v)", "out - Q_WIDTH] = __float_as_uint(v) >> 16"),
            ("- KV_WIDTH] = float_to_bf16(v)", "- KV_WIDTH] = __float_as_uint(v) >> 16"),
        ),
    ),
    Patch(
        "% 16)] = float_to_bf16(v);",
        "% 16)] = v;",
        "a float is stored as a whole number here: C++ converts it to uint16_t without a word. "
        "`float_to_bf16` makes the 16 bits of a bfloat16.",
        more=(
            ("out - Q_WIDTH] = float_to_bf16(v)", "out - Q_WIDTH] = v"),
            ("- KV_WIDTH] = float_to_bf16(v)", "- KV_WIDTH] = v"),
        ),
    ),
)

FINISH = (*_ROTATED, *_STORED)
"""The rotation first, then where q, k and v go."""
