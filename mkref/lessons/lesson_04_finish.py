"""Exercise 04.2 beyond the small model: `finish` alone, in a geometry whose sizes all differ.

In the model that the other trials run, N_KV_HEADS is DIM_TILES, N_HEADS is COLUMNS and KV_WIDTH is
PAGE; its launches have one step, and its records no other bit than FLAG_ROPE. What comes before
`finish` in the kernel is compiled a second time here, for a model without such equalities and for
16 rows, with the answer and a kernel that calls it with given sums.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from mkref.lessons.cuda_exercise import CudaExercise
from mkref.lessons.exercise import WrongAnswerError
from mkref.lessons.program import YOURS, Program, same
from mkref.lessons.source import find_block
from mkref.lessons.whole import LESSON_CONFIG

if TYPE_CHECKING:
    from mkref.plan import Op

__all__ = ["FinishExercise", "flags_alone", "in_step", "roundings_alone", "widths_alone"]

OTHER = replace(LESSON_CONFIG, num_attention_heads=6, num_key_value_heads=3, head_dim=64)
ROWS = 16
"""More than eight: such a build leaves the angles in global memory."""
POSITIONS = (5, 0, 3)
"""Of the rows in use, when the launch begins."""
STEP, ANGLES = 3, 12
GROUP, COLUMNS, THREADS = 2, 8, 256
Q, KV = OTHER.q_width, OTHER.kv_width
PROBE = """
#line 1 "the trial"
extern "C" __global__ void finish_alone(uint16_t* q, uint16_t* k_new, uint16_t* v_new, uint16_t* h,
                                        const float* rope, const float* sums, const int* positions,
                                        int rows, int step, int flags) {
  Shared& s = *(Shared*)ptx::shared_memory();
  const int thread = threadIdx.x, width = Q_WIDTH + 2 * KV_WIDTH;
  for (int i = thread; i < (int)(sizeof(Shared) / 4); i += blockDim.x) ((int*)&s)[i] = 0;
  Params p = {};
  p.q = q, p.k_new = k_new, p.v_new = v_new, p.rope = rope, p.rows = rows;
  Task task = {};
  task.op = OP_QKV, task.flags = flags;
  Best best = {0.0f, 0};
  Context c{p, s, thread, thread / 32, thread % 32, thread % 32 / 4, thread % 4};
  c.step = step;
  c.buffer = 1;
  __syncthreads();
  if (thread < rows) s.positions[thread] = positions[thread];
  const int r = thread / MOST_ROWS, row = thread % MOST_ROWS;
  for (int block = 0; block < width / 16; block++) {
    const int out = block * 16 + r;
    if (row < rows) s.partial[1][0][r * MOST_ROWS + row] = sums[row * width + out];
    __syncthreads();
    if (row < rows) finish(c, task, out, r, row, h, best);
    __syncthreads();
  }
}
"""
BEYOND = "perhaps read from beyond the 16 sums of the block, or from beyond the angles of the row"
Array = npt.NDArray[Any]


class FinishExercise(CudaExercise):
    """The kernel, and before it the part up to the answer again, for `OTHER`."""

    def whole(self, answer: str) -> str:
        """The translation unit with an answer in it, twice."""
        from mkref.machine.host import HOST_RING
        from mkref.machine.source import kernel_source

        lines = kernel_source(OTHER, HOST_RING, ROWS, ROWS).splitlines()
        found = find_block(lines, self.function)
        assert found is not None
        before = "\n".join(lines[: found[0]])
        again = f'{before}\n#line 1 "{YOURS}"\n{answer}\n{PROBE}'
        # In front: calls with types of both models in sight would be ambiguous behind the kernel.
        return (
            f"namespace other_model {{\n{again}}}\nusing other_model::finish_alone;\n"
            f'#line 1 "kernel"\n{super().whole(answer)}'
        )


def in_step(op: Op, layer: int, rows: int, n_sm: int, seed: int = 0) -> Callable[[Program], None]:
    """A trial of one operation in the whole kernel and the small model."""

    def trial(program: Program) -> None:
        from mkref.lessons.steps import run_op

        with_words(lambda: run_op(program, op, layer=layer, rows=rows, n_sm=n_sm, seed=seed))

    return trial


def with_words(trial: Callable[[], None]) -> None:
    """Run a trial; say of a NaN what it means: nobody may write there, or it comes from memory
    that nobody has written. What lies there differs each time: no known mistake can say it."""
    try:
        trial()
    except WrongAnswerError as wrong:
        says = str(wrong).replace("must be nan, it is", "must not be written, it is")
        says = says.replace(", it is nan (", f", it is nan: {BEYOND} (")
        raise WrongAnswerError(says) from wrong


def right_words(sums: Array, angles: Array, rotated: bool) -> dict[str, Array]:
    """What `finish` must write: q as tiles in B order, and k and v in plain order.

    Args:
        sums: float32 [rows, q + k + v].
        angles: float32 [rows, HEAD_DIM]: cos, sin, cos, sin ... of each row's position.
        rotated: has the layer rotary positions?
    """
    from mkref.reference.scalars import to_bf16

    rows, dims = len(sums), OTHER.head_dim
    values = sums.copy()
    if rotated:
        pairs = sums[:, : Q + KV].reshape(rows, -1, dims // 2, 2)
        cos, sin = np.moveaxis(angles.reshape(rows, 1, dims // 2, 2), -1, 0)
        a, b = pairs[..., 0], pairs[..., 1]
        both = np.stack([a * cos - b * sin, b * cos + a * sin], axis=-1)
        values[:, : Q + KV] = both.reshape(rows, -1)
    words = to_bf16(values)
    q = np.full((rows, OTHER.num_key_value_heads, dims // 16, COLUMNS, 16), 0xFFFF, np.uint16)
    k = np.arange(16)
    b_order = (k % 8 // 2) * 4 + k % 2 + k // 8 * 2
    of_heads = words[:, :Q].reshape(rows, -1, GROUP, dims // 16, 16).transpose(0, 1, 3, 2, 4)
    q[..., :GROUP, b_order] = of_heads
    return {"q": q, "k_new": words[:, Q : Q + KV], "v_new": words[:, Q + KV :]}


def _alone(
    program: Program, where: str, sums: Array, rope: Array, *, step: int = 0, flags: int = 1
) -> None:
    from mkref.machine.host import HOST_RING
    from mkref.machine.source import shared_bytes
    from mkref.plan.task import Flag

    positions = np.array(POSITIONS, np.int32)
    right = right_words(sums, rope[positions + step], bool(flags & Flag.ROPE))
    own = {name: program.poisoned(words.shape) for name, words in right.items()}
    given = [program.array(one) for one in (rope, sums, positions)]
    h = program.poisoned((sums.shape[1] * ROWS,))

    def trial() -> None:
        program.launch(
            "finish_alone", (1,), (THREADS,),
            (*own.values(), h, *given, len(positions), step, flags),
            shared=shared_bytes(OTHER, HOST_RING, ROWS),
        )  # fmt: skip
        for name, words in right.items():
            same(words, own[name], where, name)
        same(np.full_like(h, 0xFFFF), h, where, "h")

    with_words(trial)


def _random(seed: int) -> tuple[Array, Array]:
    """Sums of the rows, and cos and sin for every position."""
    rng = np.random.default_rng(seed)
    sums = rng.standard_normal((len(POSITIONS), Q + 2 * KV)).astype(np.float32)
    turn = rng.uniform(0.2, 1.3, (ANGLES, OTHER.head_dim // 2))
    rope = np.stack([np.cos(turn), np.sin(turn)], axis=-1).astype(np.float32)
    return sums, rope.reshape(ANGLES, OTHER.head_dim)


def widths_alone(program: Program) -> None:
    """HEAD_DIM 64, six heads of three KV heads, 16 rows; the fourth step of a launch."""
    sums, rope = _random(1)
    where = f"finish alone, {OTHER.num_attention_heads} heads of {OTHER.head_dim}"
    where = f"{where}, {OTHER.num_key_value_heads} KV heads, c.step {STEP}"
    _alone(program, where, sums, rope, step=STEP)


def flags_alone(program: Program) -> None:
    """The records of a plan for a GPU have FLAG_EARLY as well; further bits must not matter."""
    from mkref.plan.task import Flag

    sums, rope = _random(2)
    early, last = Flag.EARLY, Flag.LAST_OF_LAYER
    for flags in ((Flag.ROPE, early), (early,), (Flag.ROPE, last), (last, early), ()):
        names = " and ".join(f"FLAG_{flag.name}" for flag in flags) or "no flag"
        _alone(program, f"finish alone with {names}", sums, rope, flags=sum(flags))


def roundings_alone(program: Program) -> None:
    """Sums with which both products nearly cancel, so that what they were rounded to is seen: in
    row 0 for the even member of a pair, in row 1 for the odd one."""
    sums, rope = _random(3)
    dims = OTHER.head_dim
    pairs = sums[:, : Q + KV].reshape(len(sums), -1, dims // 2, 2)  # a view
    cos, sin = np.moveaxis(rope[list(POSITIONS)].reshape(-1, 1, dims // 2, 2), -1, 0)
    pairs[0, ..., 0] = pairs[0, ..., 1] * sin[0] / cos[0]
    pairs[1, ..., 1] = -pairs[1, ..., 0] * sin[1] / cos[1]
    _alone(program, "finish alone, products that nearly cancel", sums, rope)
