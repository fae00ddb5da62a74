"""Typical mistakes in exercise 07.1, the body of `sample`: changes and their hints."""

from __future__ import annotations

from mkref.lessons.cuda_exercise import Patch

__all__ = ["SAMPLE"]

SAMPLE = (
    Patch(
        "    best = best_of_lanes(best, 1);\n",
        "",
        "each lane has the best of its own candidates only, every 32nd. Somebody must compare the "
        "lanes: which function does that?",
    ),
    Patch(
        "ROLL for (int i = c.lane; i < task.index; i += 32)",
        "if (const int i = c.lane; i < task.index)",
        "there are more candidates than lanes: a lane takes every 32nd of them.",
    ),
    Patch(
        "{negative_infinity(), 0x7fffffff}",
        "{0.0f, 0x7fffffff}",
        "a logit may be negative, and so may all of them. What is smaller than every logit?",
    ),
    Patch(
        "best.offer(c.p.best_values[i * ROWS + row], c.p.best_tokens[i * ROWS + row]);",
        "best.offer(c.p.best_values[i * ROWS + row], i);",
        "that is the number of the SM which has the best token, and not the token.",
    ),
    Patch(
        "c.p.best_values[i * ROWS + row]",
        "c.p.best_values[row * task.index + i]",
        "the candidates lie SM by SM: those of all rows of an SM are neighbours, so a step from SM "
        "to SM is ROWS words.",
        (("c.p.best_tokens[i * ROWS + row]", "c.p.best_tokens[row * task.index + i]"),),
    ),
    Patch(
        "best.offer(c.p.best_values[i * ROWS + row], c.p.best_tokens[i * ROWS + row]);",
        "if (c.p.best_values[i * ROWS + row] > best.value)\n"
        "          best = Best{c.p.best_values[i * ROWS + row], c.p.best_tokens[i * ROWS + row]};",
        "of two equal values this keeps the one that was seen first. The lower token must win, "
        "whoever has it: `offer` knows that rule.",
    ),
    Patch(
        "const bool any = __ballot_sync(ALL, stops) != 0;",
        "const bool any = stops;",
        "each lane looks at one stop id, and lane 0 tells. Lane 0 must learn what the others have "
        "found.",
    ),
    Patch(
        "c.lane < STOP_IDS && ",
        "",
        "a row has STOP_IDS stop ids. The lanes behind that look at those of the next rows.",
    ),
    Patch(
        "      c.s.tokens[row] = best.token;\n",
        "",
        "the host is told, and the SM itself is not: EMBED of the next step takes its tokens from "
        "`c.s.tokens`.",
    ),
    Patch(
        "      if (any) c.s.row_stopped[row] = 1;\n",
        "",
        "no stop id has ended anything. What do the lines behind yours count, and who writes it?",
    ),
    Patch(
        "best_of_lanes(best, 1)",
        "best_of_lanes(best, MOST_ROWS)",
        "MOST_ROWS is the distance of HEAD, where neighbouring lanes have different rows. Here all "
        "of them have the same row: lanes at distance 1 must be compared, too.",
    ),
    Patch(
        "if (any) c.s.row_stopped[row] = 1;",
        "c.s.row_stopped[row] = any;",
        "a row that has stopped before counts no longer when it draws another token. Once 1, it "
        "stays 1: nobody sets it back during a launch.",
    ),
    Patch(
        "i < task.index; i += 32",
        "i <= task.index; i += 32",
        "one candidate too many: what lies behind the last one is nobody's. They are numbers 0 to "
        "task.index - 1.",
    ),
    Patch(
        "i < task.index; i += 32",
        "i < task.index - 1; i += 32",
        "the last candidate is never looked at. They are numbers 0 to task.index - 1.",
    ),
    Patch(
        "i < task.index; i += 32",
        "i < 132; i += 32",
        "132 is the number of SMs of one GPU. `task.index` says how many candidates there are.",
    ),
    Patch(
        "c.p.best_values[i * ROWS + row]",
        "c.p.best_values[i * MOST_ROWS + row]",
        "candidates are ROWS words apart: memory has places for ROWS rows in every build. "
        "MOST_ROWS is what this build can run, and a build for one row has MOST_ROWS 1.",
        (("c.p.best_tokens[i * ROWS + row]", "c.p.best_tokens[i * MOST_ROWS + row]"),),
    ),
    Patch(
        "c.p.tokens_out[c.step * ROWS + row]",
        "c.p.tokens_out[c.step * MOST_ROWS + row]",
        "steps of tokens_out are ROWS words apart in every build, as the host reads them. "
        "MOST_ROWS is for arrays in shared memory.",
    ),
    Patch(
        "c.p.best_values[i * ROWS + row]",
        "c.p.best_values[i * rows_in_use(c.p) + row]",
        "each SM has left room for ROWS candidates, whether so many rows are in use or not.",
        (("c.p.best_tokens[i * ROWS + row]", "c.p.best_tokens[i * rows_in_use(c.p) + row]"),),
    ),
    Patch(
        "c.p.tokens_out[c.step * ROWS + row]",
        "c.p.tokens_out[row]",
        "every step writes the place of step 0, over the token before it. The host wants the "
        "tokens of all steps.",
    ),
    Patch(
        "c.p.tokens_out[c.step * ROWS + row]",
        "c.p.tokens_out[c.step * rows_in_use(c.p) + row]",
        "the host looks for step 1 behind ROWS places of step 0, used or not.",
    ),
    Patch(
        "if (c.lane == 0) {",
        "if (c.thread == 0) {",
        "c.thread counts all 256 consumers, so it is 0 in warp 0 only. Each warp has a row of its "
        "own: its lane 0 stores.",
    ),
    Patch(
        "c.s.tokens[row] = best.token;",
        "if (task.first == 0) c.s.tokens[row] = best.token;",
        "c.s is the shared memory of *this* SM. EMBED runs on every SM, and each takes its own "
        "c.s.tokens: only tokens_out is for the first SM alone.",
    ),
    Patch(
        "if (task.first == 0) c.p.tokens_out",
        "c.p.tokens_out",
        "every SM writes tokens_out: the same value, but 132 times, into memory of the host. Only "
        "the first SM, task.first == 0, tells it.",
    ),
    Patch(
        "    const bool any = ",
        "    consumers_sync();\n    const bool any = ",
        "consumers_sync waits for all eight warps, and a warp without a row never comes into the "
        "loop. Warps need nothing of each other here; the line behind the loop is enough.",
    ),
    Patch(
        "if (any) c.s.row_stopped[row] = 1;",
        "if (any) c.s.row_stopped[row] += 1;",
        "this counts how often a row has stopped, and the lines behind yours count rows: set it to "
        "1, and a second time to 1.",
    ),
    Patch(
        "const bool any = __ballot_sync(ALL, stops) != 0;",
        "const uint32_t any = __ballot_sync(ALL, stops);",
        "the mask of a ballot has bit k for lane k: stop id number 4 makes it 16, which the lines "
        "behind yours take for 16 rows. A row counts 1.",
        (("if (any) c.s.row_stopped[row] = 1;", "c.s.row_stopped[row] |= any;"),),
    ),
    Patch(
        "    Best best = {",
        "    if (c.s.row_stopped[row]) continue;\n    Best best = {",
        "a row that has stopped draws on until the launch ends: its tokens are written in each "
        "step, and whoever reads them cuts them off.",
    ),
    Patch(
        "c.p.stop_ids[row * STOP_IDS + c.lane]",
        "c.p.stop_ids[c.lane * ROWS + row]",
        "stop ids lie row by row, not as the candidates do: number k of the row is "
        "`c.p.stop_ids[row * STOP_IDS + k]`.",
    ),
    Patch(
        "c.lane < STOP_IDS && ",
        "c.lane < 5 && ",
        "a row has STOP_IDS stop ids, 8. The last ones are never looked at.",
    ),
    Patch(
        "= best.token;\n    }\n",
        "= best.token;\n    }\n    if (any) break;\n",
        "in a build for more than eight rows a warp has several of them. One that stops must not "
        "keep the next from its token.",
    ),
    Patch(
        "if (any) c.s.row_stopped[row] = 1;",
        "if (any && task.first == 0) c.s.row_stopped[row] = 1;",
        "every SM counts stopped rows in its own shared memory: if only the first one knows, the "
        "others run the next step and wait for it forever.",
    ),
    Patch(
        "c.s.tokens[row] = best.token;",
        "if (!c.s.row_stopped[row]) c.s.tokens[row] = best.token;",
        "a row that has stopped draws on like all others: its next step embeds the token it has "
        "just drawn.",
    ),
    Patch(
        "c.s.tokens[row] = best.token;",
        "c.s.tokens[c.warp] = best.token;",
        "in a build for more than eight rows a warp has several of them, so its number is no row: "
        "`c.s.tokens` has a place for each row.",
    ),
    Patch(
        "if (any) c.s.row_stopped[row] = 1;",
        "if (any) c.s.row_stopped[c.warp] = 1;",
        "in a build for more than eight rows a warp has several of them, so its number is no row: "
        "`c.s.row_stopped` has a place for each row.",
    ),
    Patch(
        "c.p.best_values[i * ROWS + row]",
        "c.p.best_values[i * ROWS + c.warp]",
        "in a build for more than eight rows a warp has several of them: their candidates are not "
        "those of the row with the warp's number.",
        (("c.p.best_tokens[i * ROWS + row]", "c.p.best_tokens[i * ROWS + c.warp]"),),
    ),
    Patch(
        "c.p.best_values[i * ROWS + row]",
        "c.p.best_values[i * CONSUMERS + row]",
        "candidates are ROWS words apart. CONSUMERS is the number of warps, which is 8 in every "
        "build.",
        (("c.p.best_tokens[i * ROWS + row]", "c.p.best_tokens[i * CONSUMERS + row]"),),
    ),
    Patch(
        "c.p.stop_ids[row * STOP_IDS + c.lane]",
        "c.p.stop_ids[row * ROWS + c.lane]",
        "each row has STOP_IDS stop ids, so rows are STOP_IDS words apart. ROWS is a number of "
        "rows.",
    ),
    Patch(
        "c.lane < STOP_IDS && ",
        "c.lane < ROWS && ",
        "a row has STOP_IDS stop ids. ROWS is a number of rows, and in a build for more of them "
        "lanes would look at stop ids of the next row.",
    ),
    Patch(
        "{negative_infinity(), 0x7fffffff}",
        "{-1000.0f, 0x7fffffff}",
        "a logit may be smaller than -1000. What is smaller than every logit?",
    ),
    Patch(
        "{negative_infinity(), 0x7fffffff}",
        "{-1e30f, 0x7fffffff}",
        "a float may be as small as -3.4e38. What is smaller than every logit?",
    ),
)
