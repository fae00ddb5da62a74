"""Lesson 16: its exercises in CUDA, ordinary kernels and the body of a task in the ported kernel.

The first is compared with the oracle, within a tolerance; the second with the interpreter, bit for
bit, alone and in a whole step.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from mkref.lessons.cuda_exercise import CudaExercise, Patch
from mkref.lessons.exercise import Property, WrongAnswerError
from mkref.lessons.lesson_16 import shared_port
from mkref.lessons.lesson_16_oracle import silu
from mkref.lessons.program import YOURS, Program, close, same
from mkref.lessons.source import find_block
from mkref.lessons.whole import LESSON_CONFIG, Part
from mkref.reference.scalars import from_bf16, to_bf16

__all__ = ["EXERCISES", "PortedExercise"]

BF16 = 2.0**-8
"""Relative: rounding to bfloat16 is off by half of that, and the float32 sums by far less."""
SUMS = 1e-5
"""Absolute: what float32 sums of some hundred products of about 1 are off, and much more."""


@dataclass(frozen=True)
class PortedExercise(CudaExercise):
    """The body of a function that only the ported kernel has.

    Attributes:
        function: of the ported kernel; the learner writes its body.
    """

    @property
    def part(self) -> Part:
        """The function, with marks around its body."""
        first, last, lines = self._place(shared_port().kernel)
        own = lines[first : last + 1]
        opened = next(i for i, line in enumerate(own) if line.endswith("{"))
        marked = [*own[: opened + 1], "  // BEGIN SOLUTION", *own[opened + 1 : -1]]
        return Part(first, last, "\n".join([*marked, "  // END SOLUTION", "}\n"]))

    def _place(self, text: str) -> tuple[int, int, list[str]]:
        lines = text.splitlines()
        found = find_block(lines, self.function)
        assert found is not None, "the port has it"
        return *found, lines

    def whole(self, answer: str) -> str:
        """The ported kernel for the small model, with an answer in it."""
        port = shared_port()
        source = port.module("machine.source").kernel_source
        text = source(LESSON_CONFIG, port.module("machine.host").HOST_RING)
        first, last, lines = self._place(text)
        before, after = "\n".join(lines[:first]), "\n".join(lines[last + 1 :])
        at = self.part.last + 2
        return f'{before}\n#line 1 "{YOURS}"\n{answer}\n#line {at} "{self.file}"\n{after}\n'


# ---- 16.1


def _ordinary(
    rows: int, hidden: int, width: int, *, blocks: int = 0, gain: float = 1.0, seed: int = 0
) -> Callable[[Program], None]:
    """Both kernels against the oracle; the second gets the right h, so that each is tried alone."""
    where = f"{rows} row{'s' * (rows > 1)}, hidden {hidden}, width {width}"

    def trial(program: Program) -> None:
        rng = np.random.default_rng([seed, hidden, width])

        def draw(*shape: int, scale: float = 1.0) -> Any:
            return to_bf16(rng.normal(0, scale, shape).astype(np.float32))

        y, down = draw(rows, hidden), draw(hidden, width, scale=width**-0.5)
        gate, up = (draw(width, hidden, scale=g * hidden**-0.5) for g in (gain, 1.0))
        y64, gate64, up64, down64 = (from_bf16(w).astype(np.float64) for w in (y, gate, up, down))
        h64 = silu(y64 @ gate64.T) * (y64 @ up64.T)
        h, given = program.poisoned((rows, width)), [program.array(w) for w in (y, gate, up)]
        grid = (blocks or -(-width // 8), rows)
        program.launch("shared_up", grid, (256,), (h, *given, hidden, width), seed=seed)
        allowed = BF16 * np.abs(h64) + SUMS
        close(h64, h, allowed, where, "h")

        right_h = to_bf16(h64.astype(np.float32))
        x0 = rng.normal(0, 1, (rows, hidden)).astype(np.float32)
        x, args = program.array(x0), (program.array(right_h), program.array(down), hidden, width)
        grid = (blocks or -(-hidden // 8), rows)
        program.launch("shared_down", grid, (256,), (x, *args), seed=seed)
        right = x0 + from_bf16(right_h).astype(np.float64) @ down64.T
        close(right, x, SUMS * (1 + np.abs(right) + _largest(right_h)), where, "x")

    return trial


def _largest(h: Any) -> Any:
    """Largest activation of each row, float64 [rows, 1]."""
    return np.abs(from_bf16(h).astype(np.float64)).max(axis=-1, keepdims=True)


_H = "  h += (long long)blockIdx.y * width;\n"
_TO_WIDTH = "  for (int out = warp; out < width"
_TO_HIDDEN = "  for (int out = warp; out < hidden"
_UP_BODY = """\
  y += (long long)blockIdx.y * hidden;
  h += (long long)blockIdx.y * width;
  for (int out = warp; out < width; out += gridDim.x * n_warps) {
    const float g = dot(gate + (long long)out * hidden, y, hidden);
    const float u = dot(up + (long long)out * hidden, y, hidden);
    if (threadIdx.x % 32 == 0) h[out] = float_to_bf16(g / (1.0f + expf(-g)) * u);
  }
"""
_DOWN_BODY = """\
  x += (long long)blockIdx.y * hidden;
  h += (long long)blockIdx.y * width;
  for (int out = warp; out < hidden; out += gridDim.x * n_warps) {
    const float sum = dot(down + (long long)out * width, h, width);
    if (threadIdx.x % 32 == 0) x[out] += sum;
  }
"""
_ORDINARY = (
    Patch(
        "g / (1.0f + expf(-g)) * u",
        "u / (1.0f + expf(-u)) * g",
        "silu belongs to the gate; up is what it multiplies.",
    ),
    Patch(
        "g / (1.0f + expf(-g)) * u",
        "1.0f / (1.0f + expf(-g)) * u",
        "that is the sigmoid. silu(g) is g times it.",
    ),
    Patch(
        "g / (1.0f + expf(-g)) * u",
        "g * expf(g) / (1.0f + expf(g)) * u",
        "right on paper, but expf(g) is infinite from 89 on, and infinity divided by itself is "
        "NaN. Which form has an exponential that may be infinite?",
    ),
    Patch(
        "x[out] += sum",
        "x[out] = sum",
        "x is the residual stream: the operation adds to it.",
    ),
    Patch(
        "  y += (long long)blockIdx.y * hidden;\n",
        "",
        "every row gets the result of row 0. Which block works on which row?",
    ),
    Patch(
        "  y += (long long)blockIdx.y * hidden;\n",
        "",
        "all blocks work on row 0. Each pointer that has rows must be moved to row `blockIdx.y`, "
        "in both kernels: y and h, then x and h.",
        more=(
            (_H + _TO_WIDTH, _TO_WIDTH),
            ("  x += (long long)blockIdx.y * hidden;\n", ""),
            (_H + _TO_HIDDEN, _TO_HIDDEN),
        ),
    ),
    Patch(
        _H + _TO_WIDTH,
        _TO_WIDTH,
        "every row's h is written to row 0. A row of `h` is `width` long; where does yours begin?",
    ),
    Patch(
        "  x += (long long)blockIdx.y * hidden;\n",
        "",
        "all rows are added to row 0 of x. Move `x` to the block's row, too.",
    ),
    Patch(
        _H + _TO_HIDDEN,
        _TO_HIDDEN,
        "shared_down multiplies the h of row 0 for every row. `h` is an input here, and has rows.",
    ),
    Patch(
        "    if (threadIdx.x % 32 == 0) x[out] += sum;",
        "    x[out] += sum;",
        "all 32 lanes have the sum, and all of them add it.",
    ),
    Patch(
        "for (int out = warp; out < width; out += gridDim.x * n_warps) {",
        "if (int out = warp; out < width) {",
        "with fewer blocks than elements a warp must go on to its next element: how far is it?",
    ),
    Patch(
        _DOWN_BODY,
        "",
        "shared_up is right. shared_down has no body yet: it adds the product with `down` to x.",
    ),
    Patch(
        _UP_BODY,
        "",
        "shared_up has no body yet, so nobody writes h.",
    ),
    Patch(
        "out < width; out += gridDim.x * n_warps",
        "out < width; out += n_warps",
        "n_warps are those of *one* block. All blocks of a row together have `gridDim.x * n_warps` "
        "warps; with a shorter stride several warps take the same element, and add to it twice.",
        more=(("out < hidden; out += gridDim.x * n_warps", "out < hidden; out += n_warps"),),
    ),
    Patch(
        "down + (long long)out * width",
        "down + (long long)out * hidden",
        "`down` is [hidden, width]: one of its rows is `width` long, and so begins that far after "
        "the one before.",
    ),
    Patch(
        "{\n    const float g = ",
        "{\n    if (threadIdx.x % 32 != 0) continue;\n    const float g = ",
        "`dot` is computed by a whole warp: all 32 lanes must call it. Only the store is one "
        "lane's.",
    ),
)

# ---- 16.2


def _task(rows: int, n_sm: int, *, layer: int = 1, seed: int = 0) -> Callable[[Program], None]:
    """SHARED_DOWN of a layer alone: everything before it is done by the interpreter."""
    where = f"layer {layer}, {rows} row{'s' * (rows > 1)}, {n_sm} SM{'s' * (n_sm > 1)}"

    def trial(program: Program) -> None:
        port = shared_port()
        steps, kinds = port.module("lessons.steps"), port.module("plan").Op
        for part, buffers in steps.parts_of(n_sm, rows, seed):
            task = next(task for tasks in part.tasks for task in tasks if task.count)
            if (task.op, task.layer) != (kinds.SHARED_DOWN, layer):
                steps.interpret(part, buffers, rows)
                continue
            own = {n: program.array(a) for n, a in buffers.items() if n in steps.BUFFERS}
            steps.launch(program, part, own, rows, seed, where)
            steps.interpret(part, buffers, rows)
            inactive = ~np.isfinite(buffers["x_mid"]) & np.isfinite(own["x_mid"])
            if inactive.any():  # poison, which the twin has left as it was
                row, at = np.argwhere(inactive)[0]
                raise WrongAnswerError(
                    f"{where}: x_mid[{row}, {at}] must not be written: row {row} is not active"
                )
            same(buffers["x_mid"], own["x_mid"], where, "x_mid")
            for name in sorted(own.keys() - steps.NOT_COMPARED):
                same(buffers[name], own[name], f"{where} (it does not write this)", name)
            return
        raise AssertionError("the plan has it")

    return trial


def _step(rows: int, n_sm: int, *, seed: int = 0) -> Callable[[Program], None]:
    """A whole step in one launch: tasks follow each other, and the ring goes round."""
    where = f"a whole step, {rows} row{'s' * (rows > 1)}, {n_sm} SM{'s' * (n_sm > 1)}"

    def trial(program: Program) -> None:
        steps = shared_port().module("lessons.steps")
        plan = steps.lesson_plan(n_sm)
        right = steps.Interpreter.of(plan, steps.MAX_CONTEXT)
        steps.begin_step(right.buffers, plan, rows, 1)
        own = {n: program.array(a) for n, a in right.buffers.items() if n in steps.BUFFERS}
        right.run(rows, 0)
        try:
            steps.launch(program, plan, own, rows, seed, where)
        except WrongAnswerError as error:
            if "wait code 5" not in str(error):
                raise
            raise WrongAnswerError(f"{where}: a logit is not finite") from error
        for name in ("logits", "tokens_out"):
            same(right.buffers[name], own[name], where, name)

    return trial


_TASK = (
    Patch(
        "load_before(c, c.p.x_mid, block",
        "load_before(c, x_of(c, task.layer), block",
        "this starts from x, so what O_PROJ has added is lost. Which buffer has both?",
    ),
    Patch(
        "  reader.close();\n",
        "",
        "the last stage is never left: the next task of this SM begins a stage too early in the "
        "ring, and reads bytes that are not its own. Every warp must leave the last one, too.",
    ),
    Patch(
        "  reader.close();\n",
        "",
        "the reader is closed after each block, so it counts the stages of the run from 0 again, "
        "and waits for stages that the loader does not send. The run of this task is all of its "
        "blocks; where does it end?",
        more=(("    });\n  }\n", "    });\n    reader.close();\n  }\n"),),
    ),
    Patch(
        "(task.first + block) * 16",
        "block * 16",
        "`block` counts within the task. Which row block of x does this SM begin with?",
    ),
    Patch(
        "chain(c, reader, block * task.k_tiles, task.k_tiles",
        "chain(c, reader, 0, task.k_tiles",
        "every block multiplies the tiles of the first. The run has `count * k_tiles` tiles, one "
        "block after another.",
    ),
    Patch(
        "if (row < c.p.rows) c.p.x_mid[at] = value;",
        "c.p.x_mid[at] = value;",
        "this writes rows that are not active, too; there is no h of theirs.",
    ),
    Patch(
        "if (row < c.p.rows) c.p.x_mid[at] = value;",
        "if (row < c.p.rows) put_x(x_of(c, task.layer + 1) + at, value);",
        "the next x is DOWN's: it adds the routed experts, and says that x is there.",
    ),
    Patch(
        "(const uint2*)c.p.h_shared",
        "(const uint2*)c.p.h",
        "`h` belongs to the routed experts. The shared one has a buffer of its own.",
    ),
    Patch(
        "(const uint2*)c.p.h_shared",
        "(const uint2*)c.s.activation",
        "c.s.activation is the normed x, which `product_of_x` multiplies. What does SHARED_DOWN "
        "multiply, and in which buffer is that?",
    ),
    Patch(
        "chain(c, reader, block * task.k_tiles, task.k_tiles",
        "chain(c, reader, (task.first + block) * task.k_tiles, task.k_tiles",
        "the loader sends the tiles of *this* task, so the run begins with those of its first "
        "block. `task.first` is for outputs; where in the run is block 0?",
    ),
    Patch(
        "c.p.x_mid[at] = value;",
        "c.p.x_mid[at] += value;",
        "`store_after` hands over old value plus sum, so the old value is in there twice. Store "
        "what you get.",
    ),
    Patch(
        "(task.first + block) * 16",
        "task.first * 16",
        "every block writes the outputs of the first. A block has 16 outputs: which is the first "
        "of block number `block`?",
    ),
)

EXERCISES = (
    CudaExercise(
        id="16.1",
        answer="shared_kernels",
        file="16_shared_expert.cu",
        properties=(
            Property("one row", _ordinary(1, 64, 48)),
            Property("several rows", _ordinary(3, 64, 48)),
            Property("sizes that are no multiples of 8 or 32", _ordinary(2, 70, 45)),
            Property("fewer blocks than elements", _ordinary(2, 96, 112, blocks=2)),
            Property("large gates", _ordinary(2, 64, 48, gain=60.0)),
            Property("warps in any order", _ordinary(3, 96, 40, seed=3)),
        ),
        mistakes=_ORDINARY,
        then="Who reads `h` of which SM in the next launch? That will be a counter.",
    ),
    PortedExercise(
        id="16.2",
        answer="shared_task",
        file="megakernel.cu",
        function="shared_down",
        properties=(
            Property("one row on one SM", _task(1, 1)),
            Property("several rows on two SMs", _task(3, 2)),
            Property("another layer, more SMs than row blocks", _task(6, 7, layer=4)),
            Property("warps in any order", _task(5, 2, layer=2, seed=3)),
            Property("a whole step", _step(2, 2)),
            Property("a whole step with more rows and SMs", _step(6, 4, seed=3)),
        ),
        mistakes=_TASK,
        then="Now look at `o_proj` in cuda/megakernel.cu: what would one function for both cost?",
    ),
)
