"""What each operation computes, in NumPy: every one but attention (`interpret_attention`).

The functions have the names of `cuda/megakernel.cu` and do to the buffers what those do, bit for
bit: the same rounding, the same order of every sum, the same places written. Only active rows are
read and written. `embed` and `sample` get the tokens that their SM keeps in shared memory as well.

What it does not do: wait, signal or decide who runs next (`mkref.plan.interpret`).

Notation: H hidden size, D head dimension, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from mkref.errors import PlanError
from mkref.plan.memory import A_ORDER, B_ORDER, Buffers, UnpackedWeights
from mkref.plan.products import Operand, columns
from mkref.plan.runtime import Route, segments
from mkref.plan.task import Flag, Task
from mkref.reference.mma import WARPS, sum_warps
from mkref.reference.sampling import gumbel
from mkref.reference.scalars import F32, Float, Words, from_bf16, rmsnorm, rotate, swiglu, to_bf16
from mkref.weights.layout import TILE, from_b_order

if TYPE_CHECKING:
    from mkref.config import NorthConfig

__all__ = [
    "NO_TOKEN",
    "Step",
    "down",
    "embed",
    "gate_up",
    "head",
    "o_proj",
    "qkv",
    "router",
    "sample",
]

NO_TOKEN = 0x7FFFFFFF
"""Token of a HEAD slot that offers none."""
ABSENT = np.uint32(0xFFFFFFFF)
"""The bits of an x that nobody has written."""
MINUS_INF = F32(-np.inf)
Ints = npt.NDArray[np.int64]


@dataclass
class Step:
    """One decode step under way.

    Attributes:
        config: the model's geometry.
        buffers: all buffers, by name.
        weights: the packed weights, unpacked on demand.
        rows: active rows, at most those that the plan was built for.
        index: steps since the counters were zero.
        launch_step: steps of this launch before this one; positions move on by it.
        not_finite: lowest (row, token) of the logits that are not finite, if there are any.
    """

    config: NorthConfig
    buffers: Buffers
    weights: UnpackedWeights
    rows: int
    index: int
    launch_step: int = 0
    not_finite: tuple[int, int] | None = None
    _normed: tuple[int, Float, Operand] | None = field(default=None, repr=False)

    @property
    def max_rows(self) -> int:
        """Rows of every buffer: those that the plan was built for."""
        return len(self.buffers["tokens"])

    @property
    def positions(self) -> Ints:
        """Position of the token that each row feeds in this step, int64 [rows]."""
        return self.buffers["positions"][: self.rows].astype(np.int64) + self.launch_step

    def x(self, layer: int) -> Float:
        """Residual stream that `layer` reads, float32 [rows, H]: a view."""
        return self.buffers["x"][layer & 1, : self.rows]

    def forget_x(self, layer: int, out: Ints) -> None:
        """Make outputs of that layer's x ABSENT."""
        self.buffers["x"].view(np.uint32)[layer & 1, : self.rows, out] = ABSENT

    def version(self, layer: int) -> np.uint64:
        """What the router logits of a layer in this step carry."""
        return np.uint64((self.index * self.config.num_hidden_layers + layer + 1) % (1 << 32))

    def forget_router_logits(self) -> None:
        """Give rows that are not active a number that no layer wants for 2^32 layers."""
        self.buffers["router_logits"][self.rows :] = self.version(-1) << np.uint64(32)

    def router_logits(self, layer: int) -> Float:
        """float32 [rows, experts].

        Raises:
            PlanError: some are not of this layer and step; the kernel would wait for ever.
        """
        words = self.buffers["router_logits"][: self.rows]
        if (words >> np.uint64(32) != self.version(layer)).any():
            raise PlanError(f"plan: router logits of another layer where layer {layer} needs its")
        return words.astype(np.uint32).view(F32)

    def matrix_product(self, task: Task, x: Operand) -> Float:
        """Product of the task's row blocks with activations, float32 [rows, 16 count]."""
        tile = task.weights + task.first * task.k_tiles
        return self.weights.matrix(tile, task.count, task.k_tiles).project(x)

    def normed(self, layer: int) -> Operand:
        """RMSNorm of x with the layer's gamma, as an operand of products.

        Every task computes it for itself in the kernel; here the last result serves while x is
        the same, bit for bit.
        """
        x = self.x(layer)
        if self._normed is not None:
            of_layer, of_x, result = self._normed
            if of_layer == layer and np.array_equal(of_x.view(np.uint32), x.view(np.uint32)):
                return result
        gamma = self.buffers["gammas"][layer]
        result = columns(rmsnorm(x, gamma, self.config.rms_norm_eps))
        self._normed = (layer, x.copy(), result)
        return result


def _outputs(task: Task) -> np.ndarray:
    """Output indices of a task's row blocks: int64 [16 count]."""
    return np.arange(task.first * TILE, (task.first + task.count) * TILE)


def embed(s: Step, task: Task, sampled: Ints) -> None:
    """x <- embedding of the row's token, gathered from the packed head.

    The host's tokens in the first step of a launch, then those that this SM sampled.

    Raises:
        PlanError: that is no token; the kernel would read somewhere in its memory.
    """
    tokens = (sampled if s.launch_step else s.buffers["tokens"])[: s.rows].astype(np.int64)
    for row, token in enumerate(tokens.tolist()):
        if not 0 <= token < s.config.vocab_size:
            raise PlanError(
                f"plan: EMBED of row {row} finds {token} for a token; 0..{s.config.vocab_size - 1} "
                f"exist"
            )
    k_tiles = np.arange(task.first, task.first + task.count)
    tile = task.weights + (tokens >> 4)[:, None] * (s.config.hidden_size // TILE) + k_tiles
    # [rows, tiles, 16]
    words = s.buffers["weights"][tile[:, :, None], A_ORDER[tokens & 15][:, None, :]]
    s.x(0)[:, _outputs(task)] = from_bf16(words).reshape(s.rows, -1)
    s.forget_x(1, _outputs(task))


def router(s: Step, task: Task) -> None:
    """Router logits, each with the number of its layer and step."""
    out = _outputs(task)
    out = out[out < s.config.num_experts]
    values = s.matrix_product(task, s.normed(task.layer))
    words = np.ascontiguousarray(values[:, : len(out)], dtype=F32).view(np.uint32)
    carried = s.version(task.layer) << np.uint64(32)
    s.buffers["router_logits"][: s.rows, out] = carried | words


def qkv(s: Step, task: Task) -> None:
    """q in B order, k and v as plain vectors; q and k rotated where the layer does."""
    c, rows = s.config, s.rows
    out = _outputs(task)
    values = s.matrix_product(task, s.normed(task.layer))
    kv_from, v_from = c.q_width, c.q_width + c.kv_width
    if task.flags & Flag.ROPE:
        turned = int(np.count_nonzero(out < v_from))  # whole pairs
        pair = out[:turned:2] % c.head_dim // 2
        tables = s.buffers["rope"][s.positions[:, None], pair]  # [rows, pairs, 2]
        values[:, :turned] = rotate(values[:, :turned], tables[..., 0], tables[..., 1])
    words = to_bf16(values)
    is_q, is_k, is_v = out < kv_from, (out >= kv_from) & (out < v_from), out >= v_from
    h, dim = out[is_q] // c.head_dim, out[is_q] % c.head_dim
    kv_head, in_group = h // c.group_size, h % c.group_size
    s.buffers["q"][:rows, kv_head, dim // 16, in_group, B_ORDER[dim % 16]] = words[:, is_q]
    for name, mine, start in (("k_new", is_k, kv_from), ("v_new", is_v, v_from)):
        s.buffers[name].reshape(s.max_rows, -1)[:rows, out[mine] - start] = words[:, mine]


def gate_up(s: Step, task: Task, route: Route) -> None:
    """h = silu(gate) * up for this slot's granules of all active experts; every row."""
    x = s.normed(task.layer)
    per_expert = task.blocks * 8 * s.max_rows
    for part in segments(task, len(route.experts)):
        tile = task.weights + route.experts[part.active] * task.blocks * task.k_tiles
        matrix = s.weights.matrix(tile, task.blocks, task.k_tiles)
        both = matrix.project(x, part.first, part.count).reshape(s.rows, part.count, 2, 8)
        words = swiglu(both[:, :, 0], both[:, :, 1]).reshape(s.rows, -1)
        h = s.buffers["h"][part.active * per_expert :][:per_expert].reshape(-1, s.max_rows, 16)
        out = np.arange(part.first * 8, (part.first + part.count) * 8)
        h[out // 16, : s.rows, B_ORDER[out % 16]] = words.T


def o_proj(s: Step, task: Task) -> None:
    """x_mid <- x + output projection."""
    attn: Words = s.buffers["attn"][:, : s.rows]
    product = s.matrix_product(task, columns(from_b_order(attn)))
    out = _outputs(task)
    s.buffers["x_mid"][: s.rows, out] = s.x(task.layer)[:, out] + product


def down(s: Step, task: Task, route: Route) -> None:
    """Next x <- x_mid + down projections of the experts that each row chose, ascending id."""
    out = _outputs(task)
    acc = np.zeros((WARPS, s.rows, len(out)), dtype=F32)
    per_expert = task.k_tiles * 16 * s.max_rows
    for active, expert in enumerate(route.experts):
        scores = route.scores[expert, : s.rows]
        mine = np.flatnonzero(scores)
        h = s.buffers["h"][active * per_expert :][:per_expert].reshape(-1, s.max_rows, 16)
        tile = task.weights + expert * task.blocks * task.k_tiles
        matrix = s.weights.matrix(tile, task.blocks, task.k_tiles)
        sums = matrix.chains(columns(from_b_order(h[:, mine])), task.first, task.count)
        acc[:, mine] = acc[:, mine] + scores[mine, None] * sums
    s.x(task.layer + 1)[:, out] = s.buffers["x_mid"][: s.rows, out] + sum_warps(acc)
    s.forget_x(task.layer, out)


def head(s: Step, task: Task) -> None:
    """Logits of this task's vocabulary rows, and the best token among them for every row.

    Slot 0 looks whether the host wishes to end the launch, once for all SMs.
    """
    b = s.buffers
    if task.index == 0:
        b["control"][0] = b["progress"][1] != 0
    b["best_values"][task.index, : s.rows] = MINUS_INF
    b["best_tokens"][task.index, : s.rows] = NO_TOKEN
    if task.count == 0:
        return
    tokens = _outputs(task)
    tokens = tokens[tokens < s.config.vocab_size]
    product = s.matrix_product(task, s.normed(task.layer))[:, : len(tokens)]
    logits = product * F32(s.config.logit_scale)
    b["logits"][: s.rows, tokens] = logits
    bad = np.argwhere(~np.isfinite(logits))
    if len(bad):
        found = (int(bad[0, 0]), int(tokens[bad[0, 1]]))
        s.not_finite = found if s.not_finite is None else min(s.not_finite, found)
    for row in range(s.rows):
        values, temperature = logits[row], b["temperatures"][row]
        if temperature > 0:
            low, high = (int(word) for word in b["seeds"][row])
            noise = gumbel(high << 32 | low, int(s.positions[row]), tokens)
            values = values / temperature + noise
        numbers = np.flatnonzero(~np.isnan(values))  # a NaN never wins
        if len(numbers):
            best = numbers[np.argmax(values[numbers])]  # the first, so the lowest id
            b["best_values"][task.index, row] = values[best]
            b["best_tokens"][task.index, row] = tokens[best]


def sample(s: Step, task: Task, sampled: Ints) -> None:
    """Next token: the best of all HEAD slots, kept by this SM; slot 0 also publishes it."""
    values = s.buffers["best_values"][: task.index, : s.rows]
    tokens = s.buffers["best_tokens"][: task.index, : s.rows]
    largest = np.where(values == values.max(axis=0), tokens, NO_TOKEN)
    sampled[: s.rows] = largest.min(axis=0)
    if task.first == 0:
        s.buffers["tokens_out"][s.launch_step, : s.rows] = sampled[: s.rows]
        s.buffers["progress"][0] = s.launch_step + 1
