"""The ordinary kernels of `cuda/ops/`: each against float64, all of them as one decode step.

Every launch runs on the CPU through `mkref.machine.hostcc`. Outputs are poisoned (0xFF: NaN, -1)
and one row longer than what is written, inputs end with a row of NaN; a comparison that meets a NaN
fails. Tolerances are derived: what float32 sums in the kernel's order and the one rounding to
bfloat16 can lose, and no more.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from functools import cache
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch

from mkref.config import NorthConfig
from mkref.machine.hostcc import HostModule, build, kernel_names
from mkref.machine.nvrtc import ARCHITECTURES, compile_cubin, resources
from mkref.paths import cuda_root
from mkref.reference.model import KVCache, Reference
from mkref.reference.scalars import from_bf16, rmsnorm, rotary_table, to_bf16
from mkref.weights.layout import PAGE
from mkref.weights.packed import PackedWeights, to_words
from tests.decode import small_model

Array = npt.NDArray[Any]
Wide = npt.NDArray[np.float64]

KERNELS = {
    "03_rmsnorm": ["rmsnorm"],
    "04_qkv": ["qkv"],
    "05_attention": ["attention"],
    "06_experts": ["router", "gate_up", "down"],
    "07_head": ["embed", "o_proj", "head", "argmax"],
}
SOURCES = {name: (cuda_root() / "ops" / f"{name}.cu").read_text() for name in KERNELS}
WARPS = 8
U = 2.0**-24
"""Relative error of one float32 rounding."""
BF16 = 2.0**-8
"""Relative error of one rounding to bfloat16."""
EXP = 2.0**-21
"""Relative error of expf and the one or two operations around it."""


@cache
def modules() -> list[HostModule]:
    """All files, compiled for the CPU, two at a time."""
    with ThreadPoolExecutor(2) as pool:
        return list(pool.map(lambda name: build(SOURCES[name], name=name), SOURCES))


def launch(
    kernel: str, grid: tuple[int, ...], *args: Any, block: int = 32 * WARPS, shared: int = 0
) -> None:
    """Run one kernel; Python numbers become int32 and float32."""
    kinds = {int: np.int32, float: np.float32}
    values = [kinds[type(arg)](arg) if type(arg) in kinds else arg for arg in args]
    module = next(module for module in modules() if kernel in module.kernels)
    module.get_function(kernel)(grid, (block,), values, shared)


def blocks(n: int) -> int:
    """Blocks of eight warps for n outputs, one warp each."""
    return -(-n // WARPS)


def poison(*shape: int, dtype: Any = np.uint16) -> Array:
    """0xFF everywhere, with one more row that nobody may write."""
    words = np.dtype(dtype)
    count = (shape[0] + 1) * int(np.prod(shape[1:]))
    return np.full(count * words.itemsize, 0xFF, np.uint8).view(words).reshape(-1, *shape[1:])


def written(out: Array) -> Array:
    """An output without its last row, which must still be poison."""
    assert b"\xff" * out[-1].nbytes == out[-1].tobytes()
    return out[:-1]


def draw(rng: np.random.Generator, *shape: int, std: float = 1.0, dtype: Any = np.uint16) -> Array:
    """Normal numbers, bfloat16 or float32, followed by a row of NaN that nobody may read."""
    values = rng.normal(0.0, std, shape).astype(np.float32)
    out = poison(*shape, dtype=dtype)
    out[:-1] = to_bf16(values) if dtype is np.uint16 else values
    return out


def wide(array: Array) -> Wide:
    """What `draw` made, or a kernel wrote, in float64 and without the last row."""
    return (from_bf16(array) if array.dtype == np.uint16 else array)[:-1].astype(np.float64)


def check(actual: Array, expected: Wide, allowed: Wide) -> None:
    """Every element within its own bound; a NaN is outside."""
    assert expected.shape == actual.shape
    wrong = ~(np.abs(actual.astype(np.float64) - expected) <= allowed)
    assert not wrong.any(), (
        f"{wrong.sum()} of {wrong.size} wrong, first at {np.argwhere(wrong)[0]}: "
        f"{actual[wrong][0]!r}, must be {expected[wrong][0]!r} +- {allowed[wrong][0]:.3g}"
    )


def product(y: Wide, w: Wide) -> tuple[Wide, Wide]:
    """y w^T and its error: K / 32 additions in a lane and five between lanes."""
    depth = y.shape[-1]
    return y @ w.T, (-(-depth // 32) + 5) * U * (np.abs(y) @ np.abs(w).T)


def rounded(value: Wide, error: Wide) -> Wide:
    """Error after rounding to bfloat16."""
    return error + BF16 * (np.abs(value) + error)


@pytest.mark.parametrize("name", KERNELS)
def test_compiles_for_every_architecture(name: str) -> None:
    """Six architectures, no spills and no stack; the file holds the kernels of its lesson."""
    assert KERNELS[name] == kernel_names(SOURCES[name])
    for arch in ARCHITECTURES:
        image, report = compile_cubin(SOURCES[name], arch)
        found = resources(report)
        assert image[:4] == b"\x7fELF"
        assert (0, 0) == (found.spill_bytes, found.stack_bytes), arch
        assert found.registers > 0


@pytest.mark.parametrize(
    ("rows", "hidden"), [(1, 32), (3, 96), (8, 257), (5, 1001), (2, 2048), (1, 7)]
)
def test_rmsnorm(rows: int, hidden: int) -> None:
    """Within one rounding of float64, and the very bits of the numeric contract."""
    rng = np.random.default_rng(hidden)
    x, gamma = draw(rng, rows, hidden, std=3.0, dtype=np.float32), draw(rng, hidden)
    y = poison(rows, hidden)
    launch("rmsnorm", (rows,), y, x, gamma, hidden, 1e-5, shared=WARPS * 4)
    value = wide(x)
    eps = float(np.float32(1e-5))
    expected = value / np.sqrt(np.mean(value**2, -1, keepdims=True) + eps) * wide(gamma)
    error = (hidden / 256 + 20) * U * np.abs(expected)
    check(from_bf16(written(y)), expected, rounded(expected, error))
    assert rmsnorm(x[:-1], gamma[:-1], 1e-5).tolist() == y[:-1].tolist()


def page_tables(rng: np.random.Generator, rows: int, pages: int) -> tuple[Array, int]:
    """Pages of every row in random order, int32 [rows, pages], and the size of the pool."""
    pool = rows * pages + 2
    return rng.permutation(pool)[: rows * pages].reshape(rows, pages).astype(np.int32), pool


@pytest.mark.parametrize("rotate", [0, 1])
@pytest.mark.parametrize(
    ("rows", "hidden", "heads", "kv_heads", "dim"),
    [(1, 32, 1, 1, 32), (3, 75, 4, 2, 32), (8, 131, 6, 2, 64), (2, 96, 3, 3, 6), (1, 64, 8, 1, 128)],
)
def test_qkv(rows: int, hidden: int, heads: int, kv_heads: int, dim: int, rotate: int) -> None:
    """q, and in each row's page the one key and value; the rest of the cache keeps its bytes."""
    rng = np.random.default_rng(hidden)
    y = draw(rng, rows, hidden)
    weight = draw(rng, (heads + 2 * kv_heads) * dim, hidden, std=hidden**-0.5)
    positions = np.array([0, 63, 64, 127, 130, 255, 1, 192][:rows], np.int32)
    table, pool = page_tables(rng, rows, 4)
    rope = np.stack(rotary_table(np.arange(256), dim, 10000.0), axis=-1)  # [256, D / 2, 2]
    q = poison(rows, heads * dim)
    caches = [poison(pool, PAGE, kv_heads * dim) for _ in range(2)]
    shape = (4, hidden, heads, kv_heads, dim, rotate)
    grid = (blocks((heads + 2 * kv_heads) * dim // 2), rows)
    launch("qkv", grid, q, *caches, y, weight, rope, positions, table, *shape)

    value, error = product(wide(y), wide(weight))
    turned = slice(0, (heads + kv_heads) * dim if rotate else 0)  # q and k
    a, b = (value[:, turned][:, i::2] for i in (0, 1))
    turn = rope[positions].astype(np.float64)  # [rows, D / 2, 2], the same for all heads
    cos, sin = (np.tile(turn[..., i], (1, a.shape[1] // (dim // 2))) for i in (0, 1))
    sizes = np.abs(a) + np.abs(b)
    errors = error[:, turned][:, 0::2] + error[:, turned][:, 1::2] + 3 * U * sizes
    error[:, turned] = np.repeat(errors, 2, axis=1)
    value[:, turned] = np.stack([a * cos - b * sin, b * cos + a * sin], -1).reshape(rows, -1)

    own = table[np.arange(rows), positions // PAGE], positions % PAGE
    parts = [written(q), *(written(cache)[own] for cache in caches)]
    check(from_bf16(np.concatenate(parts, axis=1)), value, rounded(value, error))
    for cache in caches:
        cache[own] = 0xFFFF
        assert (cache == 0xFFFF).all()


LENGTHS = [0, 63, 64, 130, 1, 300, 127, 69]


@pytest.mark.parametrize("window", [0, 1, 64, 70])
@pytest.mark.parametrize(
    ("rows", "heads", "kv_heads", "dim", "size"),
    [(8, 4, 2, 32, 1.0), (3, 3, 3, 64, 8.0), (5, 8, 1, 128, 1.0), (4, 5, 1, 96, 0.0)],
)
def test_attention(
    rows: int, heads: int, kv_heads: int, dim: int, size: float, window: int
) -> None:
    """Ragged rows; every key that must not be seen is NaN, and unused pages have no number."""
    rng = np.random.default_rng(dim)
    positions = np.array(LENGTHS[:rows], np.int32)
    table, pool = page_tables(rng, rows, 5)
    q = draw(rng, rows, heads * dim, std=size)
    k_cache, v_cache = (poison(pool, PAGE, kv_heads, dim) for _ in range(2))
    expected = np.zeros((rows, heads, dim))
    error = np.zeros_like(expected)
    for row, last in enumerate(positions.tolist()):
        first = max(0, last - window + 1) if window else 0
        visible = np.arange(first, last + 1)
        k, v = (draw(rng, len(visible), kv_heads, dim) for _ in range(2))
        at = table[row, visible // PAGE], visible % PAGE
        k_cache[at], v_cache[at] = k[:-1], v[:-1]
        pages = last // PAGE - first // PAGE + 1
        for head in range(heads):
            query = wide(q)[row].reshape(heads, dim)[head] / np.sqrt(dim)
            keys, values = (wide(t)[:, head // (heads // kv_heads)] for t in (k, v))
            scores = keys @ query
            p = np.exp(scores - scores.max())
            expected[row, head] = p @ values / p.sum()
            # Error of a score, then of an exponential of differences, then of the sums.
            of_scores = (dim / 32 + 9) * U * (np.abs(keys) @ np.abs(query)).max()
            of_p = of_scores + 4 * U * np.abs(scores).max() + EXP
            of_sums = (pages + 1) * of_p + (len(visible) + 4 * pages) * U
            error[row, head] = 2 * of_sums * (p @ np.abs(values)) / p.sum()
        table[row, : first // PAGE] = table[row, last // PAGE + 1 :] = -(2**30)
    out = poison(rows, heads, dim)
    args = (out, q, k_cache, v_cache, positions, table, 5, kv_heads, dim, window)
    launch("attention", (heads, rows), *args, block=dim, shared=(dim + PAGE) * 4)
    check(from_bf16(written(out)), expected, rounded(expected, error))


@pytest.mark.parametrize("norm", [0, 1])
@pytest.mark.parametrize(
    ("rows", "hidden", "experts", "k"), [(1, 32, 4, 1), (8, 75, 12, 3), (3, 130, 128, 8), (2, 9, 5, 5)]
)
def test_router(rows: int, hidden: int, experts: int, k: int, norm: int) -> None:
    """The k largest logits, largest first; experts with equal weights, and so equal logits, in
    ascending id.
    """
    rng = np.random.default_rng(experts)
    y, weight = draw(rng, rows, hidden), draw(rng, experts, hidden, std=2 * hidden**-0.5)
    weight[experts // 2 : experts] = weight[: experts - experts // 2]  # every logit occurs twice
    ids, scores = poison(rows, k, dtype=np.int32), poison(rows, k, dtype=np.float32)
    args = (ids, scores, y, weight, hidden, experts, k, norm)
    launch("router", (rows,), *args, shared=experts * 4)

    logits, error = product(wide(y), wide(weight))
    order = np.argsort(-logits.astype(np.float32), axis=-1, kind="stable")[:, :k]
    assert order.tolist() == written(ids).tolist()
    expected = 1 / (1 + np.exp(-np.take_along_axis(logits, order, -1)))
    allowed = np.take_along_axis(error, order, -1) / 4 + EXP  # the slope of a sigmoid is <= 1/4
    if norm:
        total = expected.sum(-1, keepdims=True)
        allowed = (allowed + expected / total * (allowed.sum(-1, keepdims=True) + k * U)) / total
        expected = expected / total
    check(written(scores), expected, allowed * (1 + BF16) + U)


EXPERTS = [(1, 32, 16, 4, 1), (8, 75, 33, 12, 3), (3, 130, 48, 7, 7), (2, 96, 112, 1, 1)]


@pytest.mark.parametrize(("rows", "hidden", "width", "experts", "k"), EXPERTS)
def test_gate_up(rows: int, hidden: int, width: int, experts: int, k: int) -> None:
    """Each row's own experts; gates reach from closed to wide open."""
    rng = np.random.default_rng(width)
    y, weight = draw(rng, rows, hidden), draw(rng, experts, 2 * width, hidden, std=0.5)
    ids = np.stack([rng.permutation(experts)[:k] for _ in range(rows)]).astype(np.int32)
    h = poison(rows, k, width)
    launch("gate_up", (blocks(width), rows * k), h, y, weight, ids, hidden, width, k)
    pairs = [[product(wide(y)[r], wide(weight)[e]) for e in ids[r]] for r in range(rows)]
    value, error = (np.array([[pair[i] for pair in row] for row in pairs]) for i in (0, 1))
    gate, up = value[..., :width], value[..., width:]
    silu = gate / (1 + np.exp(-gate))
    # The slope of silu is at most 1.1; exp(-gate) amplifies its argument's rounding by |gate|.
    of_silu = 1.1 * error[..., :width] + (EXP + 2 * U * np.abs(gate)) * np.abs(silu)
    of_h = of_silu * (np.abs(up) + error[..., width:]) + np.abs(silu) * error[..., width:]
    check(from_bf16(written(h)), silu * up, rounded(silu * up, of_h + U * np.abs(silu * up)))


@pytest.mark.parametrize(("rows", "hidden", "width", "experts", "k"), EXPERTS)
def test_down(rows: int, hidden: int, width: int, experts: int, k: int) -> None:
    """x plus the score-weighted sum of each row's own experts, in float32."""
    rng = np.random.default_rng(width)
    x, h = draw(rng, rows, hidden, dtype=np.float32), draw(rng, rows, k, width)
    weight = draw(rng, experts, hidden, width, std=width**-0.5)
    ids = np.stack([rng.permutation(experts)[:k] for _ in range(rows)]).astype(np.int32)
    scores = rng.uniform(0.01, 1.0, (rows, k)).astype(np.float32)
    expected = wide(x)
    sizes, error = np.abs(expected), np.zeros((rows, hidden))
    for r, slot in np.ndindex(rows, k):
        value, of_value = product(wide(h)[r, slot], wide(weight)[ids[r, slot]])
        expected[r] += float(scores[r, slot]) * value
        sizes[r] += float(scores[r, slot]) * np.abs(value)
        error[r] += float(scores[r, slot]) * of_value
    launch("down", (blocks(hidden), rows), x, h, weight, ids, scores, hidden, width, k)
    check(written(x), expected, error + (k + 2) * U * sizes)


@pytest.mark.parametrize(("rows", "hidden", "q_width"), [(1, 32, 16), (8, 75, 131), (3, 96, 256)])
def test_o_proj(rows: int, hidden: int, q_width: int) -> None:
    """x plus the projection, in float32."""
    rng = np.random.default_rng(hidden)
    x, attn = draw(rng, rows, hidden, dtype=np.float32), draw(rng, rows, q_width)
    weight = draw(rng, hidden, q_width, std=q_width**-0.5)
    value, error = product(wide(attn), wide(weight))
    expected = wide(x) + value
    sizes = np.abs(wide(x)) + np.abs(value) + error
    launch("o_proj", (blocks(hidden), rows), x, attn, weight, hidden, q_width)
    check(written(x), expected, error + U * sizes)


@pytest.mark.parametrize(("rows", "hidden", "vocab"), [(1, 32, 16), (8, 75, 517), (3, 300, 90)])
def test_embed_and_head(rows: int, hidden: int, vocab: int) -> None:
    """The two ends of the stream, with one table: embedding exact, logits scaled."""
    rng = np.random.default_rng(vocab)
    y, table = draw(rng, rows, hidden), draw(rng, vocab, hidden, std=hidden**-0.5)
    tokens = rng.integers(0, vocab, rows).astype(np.int32)
    tokens[0] = vocab - 1
    x, logits = poison(rows, hidden, dtype=np.float32), poison(rows, vocab, dtype=np.float32)
    launch("embed", (-(-hidden // 256), rows), x, table, tokens, hidden)
    assert from_bf16(table[tokens]).tolist() == written(x).tolist()
    launch("head", (blocks(vocab), rows), logits, y, table, hidden, vocab, 0.25)
    value, error = product(wide(y), wide(table))
    check(written(logits), value / 4, error / 4)  # times a power of two: exact


@pytest.mark.parametrize("vocab", [1, 31, 255, 517, 5000])
def test_argmax(vocab: int) -> None:
    """Few different values, so that the largest occurs in many threads, lanes and warps: the lowest
    id wins. A NaN never does, and minus infinity is a value like others.
    """
    rng = np.random.default_rng(vocab)
    logits = rng.integers(-3, 4, (5, vocab)).astype(np.float32)
    logits[1], logits[2] = -1.5, -np.inf
    logits[3] = np.where(np.arange(vocab) == vocab - 1, -7.0, np.nan)
    out = poison(5, dtype=np.int32)
    launch("argmax", (5,), out, logits, vocab, shared=WARPS * 8)
    expected = [int(np.argmax(row)) for row in logits]
    expected[3] = vocab - 1
    assert expected == written(out).tolist()


class Step:
    """One decode step of a model as ordinary launches, on row-major weights.

    Args:
        weights: the tiles that the megakernel streams; unpacked here by name.
        table: page numbers, int32 [rows, pages], the same for all layers.
        pool: pages of each layer's cache.
    """

    def __init__(self, config: NorthConfig, weights: PackedWeights, table: Array, pool: int):
        self.config, self.table, self.launches = config, table, 0
        kv_heads, dim = config.num_key_value_heads, config.head_dim
        self.caches = [
            [poison(pool, PAGE, kv_heads, dim) for _ in range(2)]
            for _ in range(config.num_hidden_layers)
        ]
        self.rope = np.stack(rotary_table(np.arange(256), dim, config.rope_theta), axis=-1)

        def stack(prefix: str, *names: str) -> Array:
            return np.concatenate([to_words(weights[f"{prefix}{n}.weight"]) for n in names])

        self.embedding = stack("model.", "embed_tokens")
        self.gammas = [
            *(stack(f"model.layers.{i}.", "input_layernorm") for i in range(len(self.caches))),
            stack("model.", "norm"),
        ]
        self.layers = []
        for i in range(config.num_hidden_layers):
            mlp = f"model.layers.{i}.mlp."
            experts = [mlp]
            if not config.is_dense(i):
                experts = [f"{mlp}experts.{e}." for e in range(config.num_experts)]
            self.layers.append(
                {
                    "qkv": stack(f"model.layers.{i}.self_attn.", "q_proj", "k_proj", "v_proj"),
                    "o": stack(f"model.layers.{i}.self_attn.", "o_proj"),
                    "gate_up": np.stack([stack(e, "gate_proj", "up_proj") for e in experts]),
                    "down": np.stack([stack(e, "down_proj") for e in experts]),
                }
                | ({} if config.is_dense(i) else {"router": stack(mlp, "gate")})
            )

    def run(self, tokens: Array, positions: Array) -> tuple[Array, Array]:
        """Logits float32 [rows, V] and next tokens int32 [rows]; the caches grow by a token."""
        c, rows = self.config, len(tokens)
        hidden, vocab = c.hidden_size, c.vocab_size
        x = poison(rows, hidden, dtype=np.float32)
        y = poison(rows, hidden)
        launch("embed", (-(-hidden // 256), rows), x, self.embedding, tokens, hidden)
        for i in range(c.num_hidden_layers):
            self.norm(i, y, x)
            self.attention(i, x, y, positions)
            self.mlp(i, x, y)
        self.norm(c.num_hidden_layers, y, x)
        logits, following = poison(rows, vocab, dtype=np.float32), poison(rows, dtype=np.int32)
        args = (logits, y, self.embedding, hidden, vocab, c.logit_scale)
        launch("head", (blocks(vocab), rows), *args)
        launch("argmax", (rows,), following, logits, vocab, shared=WARPS * 8)
        return written(logits), written(following)

    def norm(self, i: int, y: Array, x: Array) -> None:
        """y of gamma i."""
        args = (y, x, self.gammas[i], self.config.hidden_size, self.config.rms_norm_eps)
        launch("rmsnorm", (len(x) - 1,), *args, shared=WARPS * 4)

    def attention(self, i: int, x: Array, y: Array, positions: Array) -> None:
        """Add the attention block of layer i to x."""
        c, rows, pages = self.config, len(positions), self.table.shape[1]
        heads, kv_heads, dim = c.num_attention_heads, c.num_key_value_heads, c.head_dim
        q, out = poison(rows, heads * dim), poison(rows, heads * dim)
        where = (positions, self.table, pages)
        shape = (c.hidden_size, heads, kv_heads, dim, int(c.uses_rope(i)))
        args = (q, *self.caches[i], y, self.layers[i]["qkv"], self.rope, *where, *shape)
        launch("qkv", (blocks((heads + 2 * kv_heads) * dim // 2), rows), *args)
        window = c.sliding_window if c.is_sliding(i) else 0
        args = (out, q, *self.caches[i], *where, kv_heads, dim, window)
        launch("attention", (heads, rows), *args, block=dim, shared=(dim + PAGE) * 4)
        args = (x, out, self.layers[i]["o"], c.hidden_size, heads * dim)
        launch("o_proj", (blocks(c.hidden_size), rows), *args)

    def mlp(self, i: int, x: Array, y: Array) -> None:
        """Add the experts, or the dense MLP, of layer i to x."""
        c, rows, weights = self.config, len(x) - 1, self.layers[i]
        k = 1 if c.is_dense(i) else c.num_experts_per_tok
        width = c.mlp_width(i)
        ids, scores = np.zeros((rows, k), np.int32), np.ones((rows, k), np.float32)
        if not c.is_dense(i):
            shape = (c.hidden_size, c.num_experts, k, int(c.norm_topk_prob))
            args = (ids, scores, y, weights["router"], *shape)
            launch("router", (rows,), *args, shared=c.num_experts * 4)
        h = poison(rows, k, width)
        args = (h, y, weights["gate_up"], ids, c.hidden_size, width, k)
        launch("gate_up", (blocks(width), rows * k), *args)
        args = (x, h, weights["down"], ids, scores, c.hidden_size, width, k)
        launch("down", (blocks(c.hidden_size), rows), *args)
