"""Each operation of the interpreter alone, against float64 on matrices in natural order.

Every test poisons all buffers with NaN (0xFF bytes), gives the operation its inputs for some rows
and checks that exactly the outputs of these rows changed.

Tolerances. One mma cuts 17 terms below 2^-25 of the largest exponent (a term is below 4 of these)
and its sum below 2^-23, so a chain of s steps is off by less than s * 2^-19 of the sum of absolute
values; here s is at most 2, and eight partial sums add 8 * 2^-24: together below 2^-17. Rounding to
bfloat16 adds 2^-8 of the value. exp2 is good to 2^-22.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt
import pytest

from mkref.plan import Flag, Interpreter, Op, Task, build_plan
from mkref.plan import interpret_ops as ops
from mkref.plan.interpret_attention import attention, merge
from mkref.plan.memory import UnpackedWeights
from mkref.plan.runtime import Route, find_experts
from mkref.reference.sampling import sample as draw
from mkref.reference.scalars import from_bf16, rmsnorm, to_bf16
from mkref.weights.layout import (
    PackedLayout,
    from_b_order,
    pack_kv_page,
    to_b_order,
    unpack_kv_page,
)
from mkref.weights.packed import PackedWeights
from tests.decode import small_model

Wide = npt.NDArray[np.float64]
PRODUCT = 2.0**-17
BF16 = 2.0**-8
MAX_CONTEXT = 384
POSITIONS = [0, 63, 64, 200, 127]


class Desk:
    """Poisoned buffers, weights, and a step of five rows."""

    def __init__(self, rows: int = 5, **changes: object) -> None:
        self.config, self.packed = small_model(**changes)
        plan = build_plan(self.config, 3, full_pages=40, sliding_pages=40)
        machine = Interpreter.of(plan, MAX_CONTEXT)
        self.buffers = machine.buffers
        self.buffers["weights"][...], self.buffers["gammas"][...] = self.packed.words()
        weights = UnpackedWeights(self.buffers["weights"])
        self.step = ops.Step(self.config, self.buffers, weights, rows, 0)
        self.plan, self.rows, self.layout = plan, rows, PackedLayout(self.config)
        self.random = np.random.default_rng(11)
        self.buffers["positions"][:rows] = POSITIONS[:rows]

    def weight(self, name: str) -> Wide:
        """A matrix of the model."""
        return np.asarray(self.packed[name].double().numpy())

    def task(self, op: Op, layer: int) -> Task:
        """The task of SM 1."""
        return next(t for t in self.plan.tasks[1] if (t.op, t.layer) == (op, layer))

    def normal(self, *shape: int) -> npt.NDArray[np.float32]:
        """Random numbers."""
        return self.random.standard_normal(shape).astype(np.float32)

    def set_x(self, layer: int) -> npt.NDArray[np.float32]:
        """Random x for the active rows."""
        x = self.buffers["x"][layer & 1]
        x[: self.rows] = self.normal(self.rows, self.config.hidden_size)
        return x[: self.rows].copy()

    def normed(self, layer: int) -> Wide:
        """The bfloat16 activations that products of a layer read."""
        x = self.buffers["x"][layer & 1, : self.rows]
        words = rmsnorm(x, self.buffers["gammas"][layer], self.config.rms_norm_eps)
        return from_bf16(words).astype(np.float64)

    def run(self, *names: str, do: Callable[[], None]) -> None:
        """Run an operation; no other buffers than the named ones may change."""
        before = {name: array.tobytes() for name, array in self.buffers.items()}
        with np.errstate(all="ignore"):
            do()
        changed = {n for n, array in self.buffers.items() if array.tobytes() != before[n]}
        assert set(names) == changed


def every(do: Callable[..., None], desk: Desk, tasks: list[Task], *more: Route) -> None:
    """The same operation on all SMs."""
    for task in tasks:
        do(desk.step, task, *more)


def untouched(array: npt.NDArray[np.generic]) -> bool:
    """Is it still poison?"""
    return len(array) > 0 and set(array.tobytes()) == {0xFF}


def product(x: Wide, w: Wide) -> tuple[Wide, Wide]:
    """x W^T, and how far off the kernel's sums may be."""
    return x @ w.T, PRODUCT * (np.abs(x) @ np.abs(w).T) + 2.0**-126


def close(expected: Wide, got: npt.NDArray[np.generic], tolerance: Wide | float) -> bool:
    """Within tolerance everywhere; NaN never is."""
    assert expected.shape == got.shape
    return bool(np.all(np.abs(expected - got.astype(np.float64)) <= tolerance))


def outputs(task: Task) -> slice:
    """The task's output rows."""
    return slice(task.first * 16, (task.first + task.count) * 16)


def silu(x: Wide) -> Wide:
    """x / (1 + e^-x)."""
    return x / (1 + np.exp(-x))


def test_embed_copies_the_rows_of_the_tokens() -> None:
    """Exact; only this SM's columns, only active rows, only the first copy of x."""
    desk = Desk()
    tokens = [0, 516, 17, 15, 255]
    desk.buffers["tokens"][:5] = tokens
    task = desk.task(Op.EMBED, 0)
    desk.run("x", do=lambda: ops.embed(desk.step, task))
    x, out = desk.buffers["x"], outputs(task)
    assert np.array_equal(desk.weight("model.embed_tokens.weight")[tokens, out], x[0, :5, out])
    assert untouched(x[0, 5:])
    assert untouched(x[1])
    assert untouched(np.delete(x[0], np.r_[out], axis=1))


def test_normalised_x_is_rmsnorm() -> None:
    """Against float64, within one rounding to bfloat16."""
    desk = Desk()
    x = desk.set_x(2).astype(np.float64)
    gamma = from_bf16(desk.buffers["gammas"][2]).astype(np.float64)
    expected = x / np.sqrt((x * x).mean(1, keepdims=True) + desk.config.rms_norm_eps) * gamma
    assert close(expected, desk.normed(2), 1.01 * BF16 * np.abs(expected))


def test_router() -> None:
    """Logits of the experts that exist; padding is not written."""
    desk = Desk()
    desk.set_x(2)
    expected, tolerance = product(desk.normed(2), desk.weight("model.layers.2.mlp.gate.weight"))
    task = next(t for t in desk.plan.tasks[0] if (t.op, t.layer) == (Op.ROUTER, 2))
    desk.run("router_logits", do=lambda: ops.router(desk.step, task))
    logits = desk.buffers["router_logits"]
    assert close(expected, logits[:5], tolerance)
    assert untouched(logits[5:])


@pytest.mark.parametrize("layer", [0, 1, 4])
def test_qkv(layer: int) -> None:
    """Dense with rotation, sliding with rotation, full without; all three SMs together."""
    desk = Desk()
    c, n = desk.config, desk.rows
    desk.set_x(layer)
    prefix = f"model.layers.{layer}.self_attn."
    expected = {}
    for name, heads in (("q", 8), ("k", 2), ("v", 2)):
        value, tolerance = product(desk.normed(layer), desk.weight(f"{prefix}{name}_proj.weight"))
        value, tolerance = (a.reshape(n, heads, -1) for a in (value, tolerance))
        if name != "v" and c.uses_rope(layer):
            frequency = c.rope_theta ** (-np.arange(0, c.head_dim, 2) / c.head_dim)
            angle = np.array(POSITIONS)[:, None, None] * frequency
            a, b = value[..., 0::2], value[..., 1::2]
            turned = (a * np.cos(angle) - b * np.sin(angle), b * np.cos(angle) + a * np.sin(angle))
            value = np.stack(turned, axis=-1).reshape(value.shape)
            # float32 angles of up to 200 are off by 200 * 2^-24 and inv_freq's own rounding
            tolerance = 2 * tolerance.max() + 2e-5 * np.abs(value).max()
        expected[name] = (value, tolerance + 1.01 * BF16 * np.abs(value))
    tasks = [t for _, _, t in desk.plan if (t.op, t.layer) == (Op.QKV, layer)]
    assert len(tasks) == 3
    assert (tasks[0].flags == Flag.ROPE) == (layer != 4)
    desk.run("q", "k_new", "v_new", do=lambda: every(ops.qkv, desk, tasks))
    q = desk.buffers["q"]  # [row, kv head, D / 16, group, 16]
    natural = np.stack([[from_b_order(head) for head in row] for row in q[:n]])
    heads = natural[:, :, : c.group_size].reshape(n, c.num_attention_heads, c.head_dim)
    assert close(expected["q"][0], from_bf16(heads), expected["q"][1])
    for name in "kv":
        assert close(
            expected[name][0], from_bf16(desk.buffers[f"{name}_new"][:n]), expected[name][1]
        )
        assert untouched(desk.buffers[f"{name}_new"][n:])
    assert untouched(q[n:])
    assert untouched(q[:, :, :, c.group_size :])


class Cache:
    """Keys and values of five rows in shuffled pages; everything else in the pool is poison."""

    def __init__(self, desk: Desk, layer: int, garbage: float = np.nan) -> None:
        c = desk.config
        kind = 1 if c.is_sliding(layer) else 0
        self.window = c.sliding_window if kind else 0
        table = desk.buffers["page_table"]
        pages = table.shape[2]
        numbers = np.random.default_rng(3).permutation(40)[: desk.rows * pages]
        table[kind, : desk.rows] = numbers.reshape(desk.rows, pages)
        shape = (2, desk.rows, c.num_key_value_heads, pages * 64, c.head_dim)
        values = np.random.default_rng(4).standard_normal(shape).astype(np.float32)
        self.k, self.v = from_bf16(to_bf16(values)).astype(np.float64)
        new = to_bf16(values[:, np.arange(desk.rows), :, POSITIONS[: desk.rows]]).swapaxes(0, 1)
        desk.buffers["k_new"][: desk.rows], desk.buffers["v_new"][: desk.rows] = new
        # This step's token and all after it are not in the pages yet.
        for row, position in enumerate(POSITIONS[: desk.rows]):
            values[:, row, :, position:] = garbage
        words = to_bf16(values)
        self.kind, self.base, self.table = kind, desk.plan.pool.base(c, layer), table[kind]
        for row in range(desk.rows):
            first = max(0, POSITIONS[row] - self.window + 1) if self.window else 0
            for page in range(first // 64, POSITIONS[row] // 64 + 1):
                for head in range(c.num_key_value_heads):
                    at = slice(page * 64, page * 64 + 64)
                    tiles = pack_kv_page(*words[:, row, head, at])
                    desk.buffers["kv"][self.tiles(desk, row, page, head)] = tiles
            table[kind, row, : first // 64] = -1  # evicted

    def tiles(self, desk: Desk, row: int, page: int, head: int) -> slice:
        """Where a page of one head lies."""
        c = desk.config
        size = c.head_dim // 2
        at = (int(self.table[row, page]) * c.num_key_value_heads + head) * size
        return slice(self.base + at, self.base + at + size)


def attend(desk: Desk, layer: int, cache: Cache, n_slots: int) -> None:
    """ATTENTION and MERGE of a layer on some SMs."""
    flags = Flag.SLIDING if cache.kind else 0
    words = {"window": cache.window, "kv_tiles": cache.base, "flags": flags}
    for slot in range(n_slots):
        attention(desk.step, Task(Op.ATTENTION, layer, slot, n_slots, **words))
    for slot in range(n_slots):
        merge(desk.step, Task(Op.MERGE, layer, slot, n_slots, window=cache.window))


ATTENTION = ("kv", "part_o", "part_ml", "attn")


def set_q(desk: Desk) -> Wide:
    """Random q in the kernel's order, and as [row, head, D]; heads that do not exist are poison."""
    c, n = desk.config, desk.rows
    q = to_bf16(desk.normal(n, c.num_key_value_heads, c.group_size, c.head_dim))
    for row in range(n):
        for head in range(c.num_key_value_heads):
            ordered = to_b_order(q[row, head])
            desk.buffers["q"][row, head, :, : c.group_size] = ordered
    return from_bf16(q).astype(np.float64)


GEOMETRIES: dict[str, dict[str, object]] = {
    "small": {},
    "one head each": {"num_attention_heads": 3, "num_key_value_heads": 3, "head_dim": 64},
    "wide": {"num_attention_heads": 8, "num_key_value_heads": 1, "head_dim": 128},
}


@pytest.mark.parametrize("layer", [1, 4])
@pytest.mark.parametrize("name", GEOMETRIES)
def test_attention_and_merge(name: str, layer: int) -> None:
    """Softmax over the visible keys in float64, and this step's key and value in their page.

    Probabilities are rounded to bfloat16, which counts above and below the division, and so is the
    output: three times 2^-8. What the scores are off by, about 2^-13, is small beside that.
    """
    desk = Desk(**GEOMETRIES[name])
    c = desk.config
    q, cache = set_q(desk), Cache(desk, layer)
    before = desk.buffers["kv"].copy()
    desk.run(*ATTENTION, do=lambda: attend(desk, layer, cache, 2))
    attn = from_bf16(from_b_order(desk.buffers["attn"][:, : desk.rows]))
    for row, position in enumerate(POSITIONS):
        first = max(0, position - cache.window + 1) if cache.window else 0
        k, v = (a[row, :, first : position + 1] for a in (cache.k, cache.v))
        scores = np.einsum("jgd,jsd->jgs", q[row], k) / np.sqrt(c.head_dim)
        p = np.exp(scores - scores.max(-1, keepdims=True))
        p /= p.sum(-1, keepdims=True)
        expected = np.einsum("jgs,jsd->jgd", p, v)
        tolerance = 3 * BF16 * np.einsum("jgs,jsd->jgd", p, np.abs(v))
        assert close(expected.reshape(-1), attn[row], tolerance.reshape(-1)), row
        for head in range(c.num_key_value_heads):
            at = cache.tiles(desk, row, position // 64, head)
            keys, values = unpack_kv_page(desk.buffers["kv"][at], c.head_dim)
            old_keys, old_values = unpack_kv_page(before[at], c.head_dim)
            old_keys[position % 64] = desk.buffers["k_new"][row, head]
            old_values[position % 64] = desk.buffers["v_new"][row, head]
            assert np.array_equal(old_keys, keys)
            assert np.array_equal(old_values, values)
    changed = np.count_nonzero(before != desk.buffers["kv"])
    assert changed <= desk.rows * 2 * c.kv_width
    assert untouched(desk.buffers["attn"][:, desk.rows :])
    assert untouched(desk.buffers["part_o"][desk.rows :])
    if c.group_size < 8:
        assert untouched(desk.buffers["part_o"][:, :, :, c.group_size :])


@pytest.mark.parametrize("layer", [1, 4])
def test_what_lies_behind_the_token_does_not_matter(layer: int) -> None:
    """NaN, infinity or numbers after the token in its page, and any number of slots: the same bits."""
    results = set()
    for garbage, n_slots in ((np.nan, 1), (np.inf, 3), (1e30, 7), (0.0, 50)):
        desk = Desk()
        set_q(desk)
        cache = Cache(desk, layer, garbage)
        with np.errstate(all="ignore"):
            attend(desk, layer, cache, n_slots)
        results.add(tuple(desk.buffers[name].tobytes() for name in ATTENTION[1:]))
    assert len(results) == 1


@pytest.mark.parametrize("layer", [0, 2])
def test_gate_up(layer: int) -> None:
    """silu(gate) * up of every active expert and row, dense and sparse, in B order; no more."""
    desk = Desk()
    c, n = desk.config, desk.rows
    desk.set_x(layer)
    dense, width = c.is_dense(layer), c.mlp_width(layer)
    route = find_experts(layer, desk.normal(n, c.num_experts), c)
    route = Route(layer, (0,), np.ones((1, 8), np.float32)) if dense else route
    tasks = [t for _, _, t in desk.plan if (t.op, t.layer) == (Op.GATE_UP, layer)]
    desk.run("h", do=lambda: every(ops.gate_up, desk, tasks, route))
    size = width * 8
    for active, expert in enumerate(route.experts):
        prefix = f"model.layers.{layer}.mlp." + ("" if dense else f"experts.{expert}.")
        gate, gate_error = product(desk.normed(layer), desk.weight(prefix + "gate_proj.weight"))
        up, up_error = product(desk.normed(layer), desk.weight(prefix + "up_proj.weight"))
        expected = silu(gate) * up
        tolerance = 1.2 * np.abs(up) * gate_error + np.abs(silu(gate)) * up_error
        h = desk.buffers["h"][active * size : (active + 1) * size].reshape(-1, 8, 16)
        got = from_bf16(from_b_order(h[:, :n]))
        assert close(expected, got, tolerance + 1.01 * BF16 * np.abs(expected))
        assert untouched(h[:, n:])
    assert untouched(desk.buffers["h"][len(route.experts) * size :])


def test_o_proj() -> None:
    """x + attention, this SM's rows only."""
    desk = Desk()
    c, n = desk.config, desk.rows
    x = desk.set_x(3).astype(np.float64)
    words = to_bf16(desk.normal(n, c.q_width))
    desk.buffers["attn"][:, :n] = to_b_order(words)
    weight = desk.weight("model.layers.3.self_attn.o_proj.weight")
    expected, tolerance = product(from_bf16(words).astype(np.float64), weight)
    task = desk.task(Op.O_PROJ, 3)
    out = outputs(task)
    desk.run("x_mid", do=lambda: ops.o_proj(desk.step, task))
    x_mid = desk.buffers["x_mid"]
    rounding = 2.0**-24 * np.abs(x + expected)
    assert close((x + expected)[:, out], x_mid[:n, out], (tolerance + rounding)[:, out])
    assert untouched(x_mid[n:])
    assert untouched(np.delete(x_mid, np.r_[out], axis=1))


@pytest.mark.parametrize("layer", [0, 2])
def test_down(layer: int) -> None:
    """x_mid + the chosen experts, weighted; h of experts that a row did not choose may be anything."""
    desk = Desk()
    c, n = desk.config, desk.rows
    dense, width = c.is_dense(layer), c.mlp_width(layer)
    route = find_experts(layer, desk.normal(n, c.num_experts), c)
    route = Route(layer, (0,), np.ones((1, 8), np.float32)) if dense else route
    x_mid = desk.normal(n, c.hidden_size)
    desk.buffers["x_mid"][:n] = x_mid
    expected, tolerance = x_mid.astype(np.float64), np.zeros(x_mid.shape)
    size = width * 8
    for active, expert in enumerate(route.experts):
        scores = route.scores[expert, :n].astype(np.float64)[:, None]
        words = to_bf16(desk.normal(n, width))
        mine = scores[:, 0] > 0
        h = desk.buffers["h"][active * size : (active + 1) * size].reshape(-1, 8, 16)
        h[:, np.flatnonzero(mine)] = to_b_order(words[mine])
        prefix = f"model.layers.{layer}.mlp." + ("" if dense else f"experts.{expert}.")
        weight = desk.weight(prefix + "down_proj.weight")
        value, error = product(from_bf16(words).astype(np.float64), weight)
        expected = expected + scores * value
        tolerance = tolerance + scores * error
    task = desk.task(Op.DOWN, layer)
    out = outputs(task)
    desk.run("x", do=lambda: ops.down(desk.step, task, route))
    x = desk.buffers["x"]
    tolerance = tolerance + 2.0**-20 * np.abs(expected)
    x_next = x[(layer + 1) & 1]
    assert close(expected[:, out], x_next[:n, out], tolerance[:, out])
    assert untouched(x[layer & 1])
    assert untouched(x_next[n:])


@pytest.mark.parametrize("scale", [1.0, 0.25])
def test_head_and_sample(scale: float) -> None:
    """Logits; the best token of each SM's rows; the best of all, with and without temperature."""
    desk = Desk(logit_scale=scale)
    c, n, b = desk.config, desk.rows, desk.buffers
    desk.set_x(5)
    b["temperatures"][:n] = [0.0, 1.0, 0.7, 0.0, 30.0]
    seeds = np.array([1, 2, 3, 4, 2**63 + 5], dtype=np.uint64)
    b["seeds"][:n] = seeds.view(np.uint32).reshape(n, 2)
    expected, tolerance = product(desk.normed(5), desk.weight("model.embed_tokens.weight"))
    tasks = [t for _, _, t in desk.plan if t.op == Op.HEAD]
    names = ("logits", "best_values", "best_tokens")
    desk.run(*names, do=lambda: every(ops.head, desk, tasks))
    assert close(scale * expected, b["logits"][:n], scale * tolerance)
    assert untouched(b["logits"][n:])
    assert desk.step.not_finite is None
    desk.run("next_tokens", do=lambda: ops.sample(desk.step, desk.plan.tasks[0][-1]))
    for row in range(n):
        token = draw(
            b["logits"][row], float(b["temperatures"][row]), int(seeds[row]), POSITIONS[row]
        )
        assert token == b["next_tokens"][row]
    assert untouched(b["next_tokens"][n:])
    for row in (0, 3):
        best = int(b["logits"][row].argmax())
        assert best == b["next_tokens"][row]
        owner = next(t.index for t in tasks if outputs(t).start <= best < outputs(t).stop)
        assert (b["logits"][row, best], best) == (
            b["best_values"][owner, row],
            b["best_tokens"][owner, row],
        )


def test_head_takes_the_lowest_of_equal_logits_and_never_a_nan() -> None:
    """Ties within one SM and between SMs; a NaN is reported and loses; no rows, no candidate."""
    desk = Desk(rows=2)
    b = desk.buffers
    b["temperatures"][:2] = 0
    b["best_values"][:, :2] = [[1.0, np.inf], [1.0, -np.inf], [0.5, np.inf]]
    b["best_tokens"][:, :2] = [[9, 400], [3, 0x7FFFFFFF], [1, 300]]
    ops.sample(desk.step, desk.plan.tasks[0][-1])
    assert [3, 300] == b["next_tokens"][:2].tolist()

    x = desk.set_x(5)
    b["x"][1, 1] = np.nan
    task = desk.task(Op.HEAD, 5)
    with np.errstate(all="ignore"):
        ops.head(desk.step, task)
    assert (1, outputs(task).start) == desk.step.not_finite
    assert [-np.inf, 0x7FFFFFFF] == [b["best_values"][1, 1], b["best_tokens"][1, 1]]
    assert np.isfinite(b["best_values"][1, 0])
    assert np.isfinite(x).all()

    ops.head(desk.step, Task(Op.HEAD, 5, 0, 0, index=2))
    assert [0x7FFFFFFF] * 2 == b["best_tokens"][2, :2].tolist()


def test_weights_are_kept_within_their_budget() -> None:
    """The matrix used longest ago is dropped; what is left is the same object."""
    _, packed = small_model()
    tiles = packed.words()[0]
    weights = UnpackedWeights(tiles, budget=3 * 6 * 256 * 6)
    first = weights.matrix(0, 1, 6)
    second = weights.matrix(6, 1, 6)
    assert first is weights.matrix(0, 1, 6)
    weights.matrix(12, 1, 6)
    weights.matrix(18, 1, 6)
    assert first is weights.matrix(0, 1, 6)
    assert second is not weights.matrix(6, 1, 6)
    assert weights.n_bytes <= weights.budget


def test_the_small_model_is_what_the_tests_assume() -> None:
    """Layer 0 dense and full, 1 to 3 sliding, 4 full; ragged row blocks of vocabulary and router."""
    config, packed = small_model()
    assert isinstance(packed, PackedWeights)
    kinds = [(config.is_dense(i), config.is_sliding(i)) for i in range(5)]
    assert [(True, False), (False, True), (False, True), (False, True), (False, False)] == kinds
    assert config.vocab_size % 16
    assert config.num_experts % 16
