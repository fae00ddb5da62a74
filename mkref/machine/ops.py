"""The ordinary kernels of `cuda/ops/`: compile them, call each with arrays, run a step with them.

`Ops` takes sizes from the shapes of its arguments and computes grid, block and shared memory as the
header of each file says. `OrdinaryStep` is one decode step: seven launches a layer, six in one that
has no router, and four around them. Both work on NumPy arrays with `host_functions()`, and on CuPy
arrays with kernels of a `cupy.RawModule`, which are called in the same way.

It does not choose a machine, manage pages or sample, and it is not a `Machine`: there is no plan.

Notation: H hidden size, D head dimension, J key/value heads, k experts per token, I expert width,
V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import numpy as np

from mkref.errors import MachineError
from mkref.machine.hostcc import HostFunction, build
from mkref.paths import cuda_root
from mkref.reference.scalars import rotary_table
from mkref.weights.layout import PAGE
from mkref.weights.packed import to_words

if TYPE_CHECKING:
    from mkref.weights.packed import PackedWeights

__all__ = ["OPS", "Ops", "OrdinaryStep", "host_functions", "ops_source"]

OPS = {
    "03_rmsnorm": ("rmsnorm",),
    "04_qkv": ("qkv",),
    "05_attention": ("attention",),
    "06_experts": ("router", "gate_up", "down"),
    "07_head": ("embed", "o_proj", "head", "argmax"),
}
"""Files of `cuda/ops/`, by lesson, and their kernels."""

NORM_THREADS = 256  # with them rmsnorm adds in the order of docs/numerics.md
HOST_WARPS, HOST_BLOCKS = 2, 2  # per block; in x: on a CPU every thread costs a stack

Array = Any
"""A contiguous NumPy or CuPy array; bfloat16 values are uint16 words."""


def ops_source(name: str) -> str:
    """Text of `cuda/ops/name.cu`."""
    return (cuda_root() / "ops" / f"{name}.cu").read_text(encoding="utf-8")


def host_functions() -> dict[str, HostFunction]:
    """Every kernel, compiled for the CPU (from the cache after the first time), by name.

    Raises:
        MachineError: no compiler.
    """
    with ThreadPoolExecutor(2) as pool:
        modules = list(pool.map(lambda name: build(ops_source(name), name=name), OPS))
    return {kernel: module.get_function(kernel) for module in modules for kernel in module.kernels}


class Ops:
    """The kernels, called with arrays; what each computes is in the header of its file.

    Args:
        functions: kernel -> callable(grid, block, args, shared_mem=bytes).
        warps: warps of a block.
        max_blocks: most blocks in x of a projection; None gives every output a warp of its own.
    """

    def __init__(
        self,
        functions: Mapping[str, Callable[..., None]],
        *,
        warps: int = 8,
        max_blocks: int | None = None,
    ) -> None:
        self.functions, self.warps, self.max_blocks = functions, warps, max_blocks
        self.n_launches = 0

    @classmethod
    def host(cls) -> Ops:
        """On the CPU, with few threads in a launch."""
        return cls(host_functions(), warps=HOST_WARPS, max_blocks=HOST_BLOCKS)

    def launch(
        self, kernel: str, grid: tuple[int, ...], *args: Any, threads: int = 0, shared: int = 0
    ) -> None:
        """Run one kernel; int and float arguments become int32 and float32."""
        for i, arg in enumerate(args):
            if hasattr(arg, "flags") and not arg.flags.c_contiguous:
                raise MachineError(f"argument {i} of {kernel} is not contiguous; copy it first")
        kinds = {int: np.int32, bool: np.int32, float: np.float32}
        values = tuple(kinds[type(arg)](arg) if type(arg) in kinds else arg for arg in args)
        block = (threads or 32 * self.warps,)
        self.functions[kernel](grid, block, values, shared_mem=shared)
        self.n_launches += 1

    def across(self, n: int, per_block: int = 0) -> int:
        """Blocks in x for n outputs, `per_block` (one a warp) in each."""
        blocks = -(-n // (per_block or self.warps))
        return blocks if self.max_blocks is None else min(blocks, self.max_blocks)

    def rmsnorm(self, y: Array, x: Array, gamma: Array, eps: float) -> None:
        """y, x [rows, H]."""
        rows, hidden = x.shape
        args = (y, x, gamma, hidden, eps)
        self.launch("rmsnorm", (rows,), *args, threads=NORM_THREADS, shared=NORM_THREADS // 32 * 4)

    def qkv(
        self, q: Array, k_cache: Array, v_cache: Array, y: Array, weight: Array, rope: Array,
        positions: Array, page_table: Array, rotate: bool,
    ) -> None:  # fmt: skip
        """q [rows, heads, D], caches [pages, 64, J, D], y [rows, H], page_table [rows, pages]."""
        rows, heads, dim = q.shape
        grid = (self.across(weight.shape[0] // 2), rows)
        sizes = (page_table.shape[1], y.shape[1], heads, k_cache.shape[2], dim, rotate)
        args = (q, k_cache, v_cache, y, weight, rope, positions, page_table)
        self.launch("qkv", grid, *args, *sizes)

    def attention(
        self, out: Array, q: Array, k_cache: Array, v_cache: Array, positions: Array,
        page_table: Array, window: int,
    ) -> None:  # fmt: skip
        """out, q [rows, heads, D], caches [pages, 64, J, D], page_table [rows, pages]."""
        rows, heads, dim = q.shape
        args = (out, q, k_cache, v_cache, positions, page_table)
        sizes = (page_table.shape[1], k_cache.shape[2], dim, window)
        shared = (dim + PAGE) * 4
        self.launch("attention", (heads, rows), *args, *sizes, threads=dim, shared=shared)

    def router(self, ids: Array, scores: Array, y: Array, weight: Array, norm_topk: bool) -> None:
        """ids, scores [rows, k], y [rows, H]."""
        (rows, k), (experts, hidden) = ids.shape, weight.shape
        args = (ids, scores, y, weight, hidden, experts, k, norm_topk)
        self.launch("router", (rows,), *args, shared=experts * 4)

    def gate_up(self, h: Array, y: Array, weight: Array, ids: Array) -> None:
        """h [rows, k, I], y [rows, H], weight [experts, 2 I, H], ids [rows, k]."""
        rows, k, width = h.shape
        args = (h, y, weight, ids, y.shape[1], width, k)
        self.launch("gate_up", (self.across(width), rows * k), *args)

    def down(self, x: Array, h: Array, weight: Array, ids: Array, scores: Array) -> None:
        """x [rows, H] += experts; h [rows, k, I], weight [experts, H, I], ids, scores [rows, k]."""
        rows, k, width = h.shape
        args = (x, h, weight, ids, scores, x.shape[1], width, k)
        self.launch("down", (self.across(x.shape[1]), rows), *args)

    def embed(self, x: Array, table: Array, tokens: Array) -> None:
        """x [rows, H], table [V, H]."""
        rows, hidden = x.shape
        grid = (self.across(hidden, 32 * self.warps), rows)
        self.launch("embed", grid, x, table, tokens, hidden)

    def o_proj(self, x: Array, attn: Array, weight: Array) -> None:
        """x [rows, H] += projection; attn [rows, heads, D], weight [H, heads D]."""
        hidden, q_width = weight.shape
        self.launch("o_proj", (self.across(hidden), len(x)), x, attn, weight, hidden, q_width)

    def head(self, logits: Array, y: Array, table: Array, scale: float) -> None:
        """logits [rows, V], y [rows, H], table [V, H]."""
        vocab, hidden = table.shape
        args = (logits, y, table, hidden, vocab, scale)
        self.launch("head", (self.across(vocab), len(y)), *args)

    def argmax(self, following: Array, logits: Array) -> None:
        """following [rows], logits [rows, V]."""
        rows, vocab = logits.shape
        self.launch("argmax", (rows,), following, logits, vocab, shared=self.warps * 8)


class OrdinaryStep:
    """One decode step of a model as ordinary launches, on row-major weights.

    Args:
        ops: the kernels.
        weights: packed weights; unpacked here, by name.
        rows: rows of the batch.
        pages: pages in the cache of each full, and of each sliding layer.
        context: positions that the rotary table covers.
        array: puts a NumPy array where the kernels run, for instance `cupy.asarray`.

    Attributes:
        x, y, q, attn, logits, following: what the last launches left there, rows first.
        caches: per layer, keys and values, uint16 [pages, 64, J, D]. All buffers start as 0xFF.
    """

    def __init__(
        self,
        ops: Ops,
        weights: PackedWeights,
        *,
        rows: int,
        pages: tuple[int, int],
        context: int,
        array: Callable[[np.ndarray], Array] = np.ascontiguousarray,
    ) -> None:
        c = self.config = weights.config
        self.ops = ops
        n_layers, heads, dim = c.num_hidden_layers, c.num_attention_heads, c.head_dim

        def words(prefix: str, *names: str) -> np.ndarray:  # matrices below one another
            return np.concatenate([to_words(weights[f"{prefix}{n}.weight"]) for n in names])

        def buffer(*shape: int, dtype: Any = np.uint16) -> Array:
            raw = np.full(int(np.prod(shape)) * np.dtype(dtype).itemsize, 0xFF, np.uint8)
            return array(raw.view(dtype).reshape(shape))

        self.layers: list[dict[str, Array]] = []
        for i in range(n_layers):
            layer, dense = f"model.layers.{i}.", c.is_dense(i)
            each = [""] if dense else [f"experts.{e}." for e in range(c.num_experts)]
            experts = [f"{layer}mlp.{e}" for e in each]
            matrices = {
                "gamma": words(layer, "input_layernorm"),
                "qkv": words(f"{layer}self_attn.", "q_proj", "k_proj", "v_proj"),
                "o": words(f"{layer}self_attn.", "o_proj"),
                "gate_up": np.stack([words(e, "gate_proj", "up_proj") for e in experts]),
                "down": np.stack([words(e, "down_proj") for e in experts]),
            }
            if not dense:
                matrices["router"] = words(f"{layer}mlp.", "gate")
            self.layers.append({name: array(matrix) for name, matrix in matrices.items()})
        self.gamma, self.table = (array(words("model.", n)) for n in ("norm", "embed_tokens"))
        rope = np.stack(rotary_table(np.arange(context), dim, c.rope_theta), axis=-1)
        self.rope = array(rope)  # [context, D / 2, 2]

        self.x = buffer(rows, c.hidden_size, dtype=np.float32)
        self.y = buffer(rows, c.hidden_size)
        self.q, self.attn = (buffer(rows, heads, dim) for _ in range(2))
        self.logits = buffer(rows, c.vocab_size, dtype=np.float32)
        self.following = buffer(rows, dtype=np.int32)
        k = c.num_experts_per_tok
        self.chosen = buffer(rows, k, dtype=np.int32), buffer(rows, k, dtype=np.float32)
        # A dense layer is one expert that every row has chosen, with score 1.
        self.dense = array(np.zeros((rows, 1), np.int32)), array(np.ones((rows, 1), np.float32))
        self.h = [buffer(rows, 1 if c.is_dense(i) else k, c.mlp_width(i)) for i in range(n_layers)]
        shapes = [
            (pages[c.is_sliding(i)], PAGE, c.num_key_value_heads, dim) for i in range(n_layers)
        ]
        self.caches = [(buffer(*shape), buffer(*shape)) for shape in shapes]

    def run(self, tokens: Array, positions: Array, page_tables: Sequence[Array]) -> None:
        """Feed one token per row; results in `logits` and `following`.

        Args:
            tokens, positions: int32 [rows].
            page_tables: of full and of sliding layers, int32 [rows, pages of a row]; valid for
                every page that the row's new token sees.
        """
        c, ops, x, y = self.config, self.ops, self.x, self.y
        ops.embed(x, self.table, tokens)
        for i, layer in enumerate(self.layers):
            sliding, (keys, values) = c.is_sliding(i), self.caches[i]
            table = page_tables[sliding]
            ops.rmsnorm(y, x, layer["gamma"], c.rms_norm_eps)
            ops.qkv(
                self.q, keys, values, y, layer["qkv"], self.rope, positions, table, c.uses_rope(i)
            )
            window = c.sliding_window if sliding else 0
            ops.attention(self.attn, self.q, keys, values, positions, table, window)
            ops.o_proj(x, self.attn, layer["o"])
            ids, scores = self.dense if c.is_dense(i) else self.chosen
            if not c.is_dense(i):
                ops.router(ids, scores, y, layer["router"], c.norm_topk_prob)
            ops.gate_up(self.h[i], y, layer["gate_up"], ids)
            ops.down(x, self.h[i], layer["down"], ids, scores)
        ops.rmsnorm(y, x, self.gamma, c.rms_norm_eps)
        ops.head(self.logits, y, self.table, c.logit_scale)
        ops.argmax(self.following, self.logits)
