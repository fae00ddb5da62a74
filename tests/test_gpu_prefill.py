"""`Prefill` on a GPU: cuBLAS, grouped GEMM and FlashAttention against the plain ways, and the whole
against the kernel on the same GPU.

Tolerances as in test_engine_prefill; a GPU also rounds the experts' products to bfloat16, which
test_engine_prefill_parts measures on a CPU: together below 2^-7 of the scale.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from mkref.engine.prefill import Prefill, workspace_bytes
from mkref.engine.prefill_products import attend, attend_in_blocks, grouped, product
from mkref.machine.base import StepInputs
from mkref.machine.cuda import CudaMachine
from mkref.weights.layout import kv_tile, pack_kv_page, unpack_kv_page
from tests.decode import small_model
from tests.prefills import Lab, far_apart, prompt

pytestmark = pytest.mark.gpu

ALL: dict[str, Any] = {"num_experts": 4, "num_experts_per_tok": 4}
LARGE: dict[str, Any] = {
    **ALL, "head_dim": 128, "hidden_size": 256, "num_attention_heads": 8, "intermediate_size": 96,
}  # fmt: skip
N = 300


def lab(weights: Any, seed: int = 0, **options: Any) -> Lab:
    """A sequence on the GPU."""
    return Lab.of(weights, seed=seed, machine=CudaMachine(), n_sm=8, **options)


def normal(*shape: int, seed: int = 0) -> Tensor:
    """bfloat16 noise, on the CPU."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator).to(torch.bfloat16)


def gap(ours: Tensor, theirs: Tensor) -> tuple[float, float, float]:
    """See `far_apart`."""
    return far_apart(ours.float().cpu().numpy(), theirs.float().cpu().numpy())


@pytest.mark.parametrize("window", [None, 1, 64, 130, 999, 1000])
@pytest.mark.parametrize("n", [1, 2, 129, 1000])
@pytest.mark.parametrize("dim", [32, 64, 128])
def test_flash_attention(dim: int, n: int, window: int | None) -> None:
    """The causal mask ends at the last key; a window counts the query's own key."""
    q, k, v = normal(n, 8, dim), normal(1000, 2, dim, seed=1), normal(1000, 2, dim, seed=2)
    got = attend(q.cuda(), k.cuda(), v.cuda(), window)
    want = attend_in_blocks(q, k, v, window)
    assert torch.bfloat16 == got.dtype
    assert gap(got, want)[1] < 2**-7


def test_products() -> None:
    """float32 sums of bfloat16 factors, not rounded to bfloat16."""
    y, w = normal(70, 256), normal(48, 256, seed=1)
    got = product(y.cuda(), w.cuda())
    assert torch.float32 == got.dtype
    assert gap(got, product(y, w))[0] < 1e-5


def test_grouped_products() -> None:
    """Empty groups, rounded once."""
    x, w = normal(100, 64), normal(6, 96, 64, seed=1)
    ends = torch.tensor([0, 40, 40, 41, 100, 100], dtype=torch.int32)
    assert gap(grouped(x.cuda(), w.cuda(), ends.cuda()), grouped(x, w, ends))[1] < 2**-8


@pytest.mark.parametrize("changes", [ALL, LARGE, {"first_k_dense_replace": 5}])
@pytest.mark.parametrize("sizes", [(), (1, 63, 100)])
def test_keys_and_values_are_the_kernels(changes: dict[str, Any], sizes: tuple[int, ...]) -> None:
    """In every layer, and the next token's logits; a window of 70, chunks that end anywhere."""
    config, weights = small_model(4, **changes)
    tokens = prompt(config.vocab_size, N)
    kernel, torched = lab(weights, 1), lab(weights, 2)
    kernel.kernel(tokens)
    torched.torch(tokens, sizes=sizes)
    for layer in range(config.num_hidden_layers):
        assert far_apart(torched.cache(N, layer), kernel.cache(N, layer))[1] < 2**-7
    ours, theirs = torched.logits(7, N), kernel.logits(7, N)
    assert far_apart(ours, theirs)[1] < 2**-6
    for each in (kernel, torched):
        each.close()


def test_what_lies_before_the_window_does_not_matter() -> None:
    """A page may begin with tokens that nobody sees: even NaN there changes nothing."""
    config, weights = small_model(4, **ALL)
    tokens, caches = prompt(config.vocab_size, N), []
    for spoiled in (False, True):
        each = lab(weights, 1)
        each.torch(tokens[:200])
        if spoiled:  # the window of token 200 begins at 131, its page at 128
            pool = each.machine.read("kv")
            for layer in filter(config.is_sliding, range(5)):
                base = each.machine.plan.pool.base(config, layer)
                page = int(each.table[1, 2])
                for head in range(config.num_key_value_heads):
                    tiles = pool[kv_tile(base, page, head, config) :][: config.head_dim // 2]
                    keys, values = unpack_kv_page(tiles, config.head_dim)
                    keys[:3] = values[:3] = 0x7FFF
                    tiles[:] = pack_kv_page(keys, values)
            each.machine.write("kv", pool)
        each.torch(tokens[200:], 200)
        caches.append([each.cache(N, layer, 200).tobytes() for layer in range(5)])
        each.close()
    assert caches[0] == caches[1]


def test_it_is_deterministic() -> None:
    """Twice the same bits in the whole pool, with experts chosen."""
    config, weights = small_model(3)
    tokens, bits = prompt(config.vocab_size, N), []
    for _ in range(2):
        each = lab(weights)
        each.torch(tokens, sizes=(130,))
        bits.append(each.machine.read("kv").tobytes())
        each.close()
    assert bits[0] == bits[1]


def test_a_stream_of_its_own() -> None:
    """The kernel on a stream that does not wait for torch's: each sees what the other wrote."""
    import cupy

    config, weights = small_model(3, **ALL)
    tokens = prompt(config.vocab_size, N)
    kernel = lab(weights, 1)
    kernel.kernel(tokens)
    want = kernel.logits(7, N)
    with cupy.cuda.Stream(non_blocking=True):
        mixed = lab(weights, 1)
        one = StepInputs(np.array([1], np.int32), np.array([0], np.int32), mixed.table[:, None])
        mixed.machine.start(one, 200)  # is under way when the chunk comes
        mixed.torch(tokens[:100])
        mixed.kernel(tokens[100:150], 100)
        mixed.torch(tokens[150:], 150)
        got = mixed.logits(7, N)
        mixed.close()
    assert far_apart(got, want)[1] < 2**-6
    kernel.close()


def test_memory_is_bounded() -> None:
    """Torch's peak while chunks run is below the formula."""
    config, weights = small_model(3, **LARGE, max_position_embeddings=8192)
    each = lab(weights, context=8192)
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    prefill = Prefill(each.machine, 2048)
    tokens = prompt(config.vocab_size, 6144)
    for begin in range(0, 6144, 2048):
        prefill.run(tokens[begin : begin + 2048], begin, each.table)
    taken = torch.cuda.max_memory_allocated() - before
    assert taken < workspace_bytes(config, 2048, 8192) == prefill.workspace_bytes
    each.close()
