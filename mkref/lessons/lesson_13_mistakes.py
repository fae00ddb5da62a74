"""Typical mistakes of exercise 13.2: other sums, or another order of the same ones."""

from __future__ import annotations

from mkref.lessons.cuda_exercise import Patch

__all__ = ["LAST_L", "LAST_O", "MISTAKES", "SUM_L", "SUM_O"]

SUM_O = (
    "    UNROLL for (int i = 0; i < MOST_SPLITS; i++) sums[i % CONSUMERS] =\n"
    "        sums[i % CONSUMERS] + v[i] * c.s.merge_weight[i];\n"
)
ADD_O = "sums[i % CONSUMERS] + v[i] * c.s.merge_weight[i]"
SUM_L = (
    "    UNROLL for (int i = 0; i < LIST; i++) "
    "l = l + c.s.merge_l[i * CONSUMERS + c.lane % CONSUMERS];\n"
)
ADD_L = "c.s.merge_l[i * CONSUMERS + c.lane % CONSUMERS]"
LAST_O = "    UNROLL for (int w = 1; w < CONSUMERS; w++) o = o + sums[w];\n"
LAST_L = "    ROLL for (int w = 1; w < CONSUMERS; w++) total = total + __shfl_sync(ALL, l, w);\n"
IN_ORDER_O = SUM_O.replace("i % CONSUMERS", "0")
IN_ORDER_L = "    UNROLL for (int i = 0; i < MOST_SPLITS; i++) l = l + c.s.merge_l[i];\n"
DOWN_O = (
    "    o = sums[CONSUMERS - 1];\n"
    "    UNROLL for (int w = CONSUMERS - 2; w >= 0; w--) o = o + sums[w];\n"
)
DOWN_L = (
    "    total = __shfl_sync(ALL, l, CONSUMERS - 1);\n"
    "    ROLL for (int w = CONSUMERS - 2; w >= 0; w--) total = total + __shfl_sync(ALL, l, w);\n"
)
BUTTERFLY_L = (
    "    ROLL for (int x = CONSUMERS / 2; x > 0; x >>= 1) l = l + __shfl_xor_sync(ALL, l, x);\n"
    "    total = l;\n"
)
TREE = (
    "    o = ((sums[0] + sums[1]) + (sums[2] + sums[3])) +\n"
    "        ((sums[4] + sums[5]) + (sums[6] + sums[7]));\n"
)

MISTAKES = (
    Patch(
        SUM_O,
        SUM_O.replace("i % CONSUMERS", "0"),
        "o is one sum over all splits, one after another. That is a right sum, but eight consumer "
        "warps make eight, and alone the row is merged by them. Which splits belong together?",
    ),
    Patch(
        SUM_O,
        SUM_O.replace("i % CONSUMERS", "i / CONSUMERS"),
        "eight neighbouring splits share a sum here. Consumer warp w takes w, w + 8, w + 16, ...: "
        "which of the eight takes split 9?",
    ),
    Patch(
        LAST_O,
        TREE,
        "the eight sums of o are added as a tree. One after another is the order of the consumers.",
    ),
    Patch(
        LAST_O + LAST_L,
        "",
        "only sum 0 is in the result. At the end the other seven are added to it, those of o and "
        "those of l.",
    ),
    Patch(
        "__shfl_sync(ALL, l, w)",
        "__shfl_sync(ALL, l, CONSUMERS - w)",
        "the sums of l are added from the last to the second. Their order counts, too.",
    ),
    Patch(
        ADD_O,
        "__builtin_fmaf(v[i], c.s.merge_weight[i], sums[i % CONSUMERS])",
        "fmaf rounds once, product and sum together. The consumers round the product, then the "
        "sum: better is other bits.",
    ),
    Patch(
        SUM_L,
        "",
        "l stays 0 in every lane, and o divided by 0 is an infinity (7f80, ff80). The first gap "
        "has two parts: the outputs of the splits, and their l.",
    ),
    Patch(
        SUM_L,
        "    l = c.s.merge_l[c.lane];\n",
        "each lane takes one product, its own, so with more than eight splits some are missing. "
        "Lane w needs those of w, w + 8, w + 16, ..., which other lanes have made: all of them lie "
        "in c.s.merge_l.",
    ),
    Patch(
        SUM_L,
        IN_ORDER_L,
        "every lane adds the products of all splits, and at the end eight lanes are added: a total "
        "that is eight times too large. Lane w adds those of sum w only.",
    ),
    Patch(
        ADD_L,
        "c.s.merge_l[c.lane % CONSUMERS * LIST + i]",
        "the lanes add the right products, but lane w has five neighbours, from 5 w on. In the "
        "consumers' sum w they are eight apart.",
    ),
    Patch(
        ADD_L,
        f"{ADD_L} * c.s.merge_weight[i * CONSUMERS + c.lane % CONSUMERS]",
        "l is multiplied with the weight once more. What lies in c.s.merge_l has it already.",
    ),
    Patch(
        ADD_O,
        "sums[i % CONSUMERS] + v[i] * c.s.merge_l[i]",
        "the outputs are multiplied with c.s.merge_l, the weight times l. An output has its sum l "
        "in it already: it needs the weight alone.",
    ),
    Patch(
        ADD_L,
        "c.s.merge_weight[i * CONSUMERS + c.lane % CONSUMERS]",
        "the sums of l add weights, as if every split had an l of 1. Weight times l lies in "
        "c.s.merge_l.",
    ),
    Patch(
        "__shfl_sync(ALL, l, w)",
        "l",
        "at the end each lane adds its own l seven times. Sum w is in lane w: ask that lane, with "
        "__shfl_sync.",
    ),
    Patch(
        LAST_L,
        "",
        "o is complete, l is sum 0 alone. Seven more sums of l lie in lanes 1 to 7.",
    ),
    Patch(
        "UNROLL for (int i = 0; i < MOST_SPLITS; i++) sums",
        "UNROLL for (int i = 0; i < 32; i++) sums",
        "the output of split 32 is missing, so only long rows are wrong. There are MOST_SPLITS, "
        "one more than a warp has lanes.",
    ),
    Patch(
        "i < LIST; i++) l",
        "i < MOST_SPLITS / CONSUMERS; i++) l",
        "the l of split 32 is missing: 33 / 8 is 4 in whole numbers, but sum 0 has five splits. "
        "LIST is that number, rounded up.",
    ),
    Patch(
        SUM_O,
        IN_ORDER_O,
        "o and l are one sum each, from the first split to the last. That is the tempting order of "
        "the prediction: right, and other bits. The consumers make eight sums of each.",
        more=((SUM_L, IN_ORDER_L), (LAST_L, "")),
    ),
    Patch(
        SUM_O,
        IN_ORDER_O,
        "o and l are one sum each, from the first split to the last, and the loop at the end adds "
        "the complete l of eight lanes. The consumers make eight sums of each.",
        more=((SUM_L, IN_ORDER_L),),
    ),
    Patch(
        SUM_L,
        IN_ORDER_L,
        "o is right, but l is one sum over all splits, from the first to the last. It needs the "
        "same eight sums as o: those of lane w in lane w.",
        more=((LAST_L, ""),),
    ),
    Patch(
        SUM_O,
        SUM_O.replace("i % CONSUMERS", "i / LIST"),
        "in o neighbours share a sum, five splits each: i / LIST. Consumer warp w takes every "
        "eighth split from w on.",
    ),
    Patch(
        LAST_L,
        BUTTERFLY_L,
        "the eight sums of l are added by a butterfly, in pairs. The consumers add one after "
        "another, sum 0 first.",
    ),
    Patch(
        LAST_O,
        TREE,
        "both ends are trees: the eight sums of o are added in pairs, those of l by a butterfly. "
        "The consumers add one after another, sum 0 first.",
        more=((LAST_L, BUTTERFLY_L),),
    ),
    Patch(
        LAST_L,
        BUTTERFLY_L.replace("CONSUMERS / 2", "16"),
        "the butterfly goes over 32 lanes. Only lanes 0 to 7 have a sum of their own, the others "
        "have the same again: a total that is four times too large. And a butterfly adds in "
        "another order than the consumers.",
    ),
    Patch(
        LAST_O,
        DOWN_O,
        "the eight sums of o and of l are added from the last to the first. The consumers begin "
        "with sum 0.",
        more=((LAST_L, DOWN_L),),
    ),
    Patch(
        LAST_O,
        DOWN_O,
        "the eight sums of o are added from the last to the first, those of l the other way. Sum 0 "
        "comes first in both.",
    ),
    Patch(
        "total = total + __shfl_sync(ALL, l, w)",
        "if (c.lane == 0) total = total + __shfl_sync(ALL, l, w)",
        "some lanes skip a call that joins the whole warp, here `__shfl_sync`. ALL says that every "
        "lane calls it, so those that do wait for the others; and every lane needs the total.",
    ),
)
