"""What a chunk's time consists of, and how far torch and kernel are apart, for bench/prefill.py.

Each part runs alone, all layers of its kind after one another, and the GPU is waited for at the end
only: times add up to a little more than a chunk takes as a whole.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from bench.prefill_desk import PROMPT, SECOND, Desk
from mkref.engine.prefill_moe import route
from mkref.engine.prefill_products import attend, grouped, product
from mkref.weights.layout import PAGE, TILE_WORDS, unpack_kv_page

if TYPE_CHECKING:
    from mkref.engine.prefill import Prefill

__all__ = ["distance", "parts"]

REPEATS = 3
COMPARED = 520


def timed(call: Callable[[], object], on_gpu: bool) -> float:
    """Milliseconds: the best of some runs, after one that does not count."""
    best = float("inf")
    for _ in range(REPEATS + 1):
        if on_gpu:
            torch.cuda.synchronize()
        begin = time.perf_counter()
        call()
        if on_gpu:
            torch.cuda.synchronize()
        best = min(best, time.perf_counter() - begin)
    return best * 1e3


@torch.inference_mode()
def parts(desk: Desk, prefill: Prefill, context: int) -> dict[str, Any]:
    """Milliseconds of each part for a whole chunk that ends at `context`."""
    config, layers, n = desk.config, prefill.layers(), prefill.chunk
    ops, n_layers = layers.operators, config.num_hidden_layers
    n_sliding = sum(map(config.is_sliding, range(n_layers)))
    device = ops.tiles.device

    def noise(*shape: int) -> torch.Tensor:
        return torch.randn(shape, device=device).to(torch.bfloat16)

    def again(times: int, call: Callable[[], object]) -> float:
        return timed(lambda: [call() for _ in range(times)], desk.on_gpu)

    def unpack() -> None:
        for layer in range(n_layers):
            ops.router_qkv(layer)
            ops.gate_up(layer)
            ops.o(layer)
            ops.down(layer)

    found = {"unpack": again(1, unpack)}
    # What is unpacked lasts until the next operator: use it first.
    y, attended = noise(n, config.hidden_size), noise(n, config.q_width)
    matrix, _ = ops.router_qkv(n_layers - 1)
    found["products_router_qkv"] = again(n_layers, partial(product, y, matrix))
    matrix = ops.o(n_layers - 1)
    found["products_o"] = again(n_layers, partial(product, attended, matrix))
    if not config.is_dense(n_layers - 1):
        routes = route(config, torch.randn(n, config.num_experts, device=device))
        x, h = y[routes.tokens], noise(len(routes.tokens), config.intermediate_size)
        matrix = ops.gate_up(n_layers - 1)
        found["experts_gate_up"] = again(
            config.n_sparse_layers, partial(grouped, x, matrix, routes.ends)
        )
        matrix = ops.down(n_layers - 1)
        found["experts_down"] = again(
            config.n_sparse_layers, partial(grouped, h, matrix, routes.ends)
        )
    q = attended.view(n, -1, config.head_dim)
    k, v = (t[:context].normal_() for t in (layers.space.keys, layers.space.values))
    found["attention_full"] = again(n_layers - n_sliding, partial(attend, q, k, v, None))
    low = max(0, context - n - config.sliding_window + 1)
    sliding = partial(attend, q, k[low:], v[low:], config.sliding_window)
    found["attention_sliding"] = again(n_sliding, sliding)
    whole = again(1, partial(desk.chunk, prefill, context - n, n))
    moved = 2 * ops.layout.head * TILE_WORDS * 2  # read and written, two bytes each
    return {
        "chunk": n,
        "context": context,
        "ms_whole_chunk": round(whole, 3),
        "ms": {name: round(ms, 3) for name, ms in found.items()},
        "unpack_bytes_per_s": round(moved / found["unpack"] * 1e3),
    }


def distance(desk: Desk, prefill: Prefill) -> dict[str, Any]:
    """The same tokens by both ways: root mean square differences in units of the values' own."""
    n = min(COMPARED, prefill.chunk)
    for begin in range(0, n, 8):
        desk.prompt_step(begin, min(8, n - begin), SECOND)
    desk.chunk(prefill, 0, n)
    rms = []
    for layer in range(desk.config.num_hidden_layers):
        ours, theirs = (cache(desk, layer, n, sequence) for sequence in (PROMPT, SECOND))
        rms.append(relative(ours, theirs))
    ours, theirs = (desk.next_logits(n, sequence) for sequence in (PROMPT, SECOND))
    return {
        "tokens": n,
        "cache_rms_by_layer": [round(value, 5) for value in rms],
        "logits_rms": round(relative(ours, theirs), 5),
        "same_next_token": bool(ours.argmax() == theirs.argmax()),
    }


def relative(ours: np.ndarray, theirs: np.ndarray) -> float:
    """Root mean square of the difference over that of `theirs`."""
    gap = np.square(ours.astype(np.float64) - theirs).mean()
    return float(np.sqrt(gap / np.square(theirs.astype(np.float64)).mean()))


def cache(desk: Desk, layer: int, n: int, sequence: int) -> np.ndarray:
    """Keys and values of the first `n` tokens of a layer, as float32, page by page."""
    config, machine = desk.config, desk.machine
    base = machine.plan.pool.base(config, layer)
    per_page = config.num_key_value_heads * config.head_dim // 2
    memory: Any = machine.buffers["kv"]
    out = []
    pages = desk.tables[sequence][int(config.is_sliding(layer)), : n // PAGE]
    for page in pages.tolist():
        begin = (base + page * per_page) * 512
        raw = memory[begin : begin + per_page * 512]
        words = (raw.get() if desk.on_gpu else raw.copy()).view(np.uint16)
        for head in words.reshape(config.num_key_value_heads, -1, 256):
            out.append(np.stack(unpack_kv_page(head, config.head_dim)))
    return (np.stack(out).astype(np.uint32) << 16).view(np.float32)
