"""The parts of `Prefill`, each against a plain way to the same: unpacking, routes, products, pages,
tables, memory.
"""

from __future__ import annotations

import weakref
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from mkref.config import NORTH_MINI_CODE
from mkref.engine import prefill_layers
from mkref.engine.prefill import Prefill
from mkref.engine.prefill_layers import Workspace, workspace_bytes
from mkref.engine.prefill_moe import route, swiglu
from mkref.engine.prefill_pages import LayerPages, Places, page_words
from mkref.engine.prefill_products import (
    attend,
    attend_in_blocks,
    grouped,
    grouped_in_turn,
    product,
)
from mkref.engine.prefill_table import spans
from mkref.engine.prefill_weights import Operators, b_order, slab_words, unpack
from mkref.plan.build import build_plan
from mkref.reference.sampling import top_k
from mkref.weights.layout import pack_kv_page, to_b_order
from mkref.weights.packed import pack_into, to_words
from tests.decode import small_config, small_model
from tests.prefills import Lab, far_apart, prompt


def normal(*shape: int, seed: int = 0) -> Tensor:
    """bfloat16 noise."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator).to(torch.bfloat16)


def test_b_order_is_the_kernels() -> None:
    """Of float32 activations, as `to_b_order` puts them."""
    x = normal(5, 96)
    want = to_b_order(to_words(x)).transpose(1, 0, 2).reshape(5, 96)
    assert (want == to_words(b_order(x.float()))).all()


@pytest.mark.parametrize(("rows", "cols"), [(16, 16), (48, 96), (160, 32)])
def test_unpack_is_the_inverse_of_packing(rows: int, cols: int) -> None:
    """A matrix comes back with its columns in B order; the rest of the slab is not touched."""
    matrix = normal(rows, cols)
    tiles = torch.empty(rows * cols // 256, 256, dtype=torch.bfloat16)
    pack_into(tiles, matrix)
    slab = torch.full((rows * cols + 7,), 3.0, dtype=torch.bfloat16)
    assert torch.equal(b_order(matrix), unpack(tiles, cols, slab))
    assert (slab[rows * cols :] == 3).all()


def operators() -> tuple[Operators, dict[str, Tensor]]:
    """Of the small model, and its tensors by name."""
    config, weights = small_model()
    slab = torch.empty(slab_words(config), dtype=torch.bfloat16)
    found = Operators(weights.layout, weights.tiles, weights.gammas, slab)
    return found, {name.removeprefix("model."): weights[name] for name in weights}


def test_operators_are_the_models() -> None:
    """Every operator of a dense and of a sparse layer, expert by expert."""
    ops, tensors = operators()
    for layer in (0, 3):
        prefix, own = f"layers.{layer}.", []
        matrix, n_router = ops.router_qkv(layer)
        assert n_router == (16 if layer else 0)  # 12 experts, padded
        if layer:
            gate = b_order(tensors[prefix + "mlp.gate.weight"])
            assert torch.equal(gate, matrix[:12])
            assert (matrix[12:16] == 0).all()
        parts = [tensors[f"{prefix}self_attn.{name}_proj.weight"] for name in "qkv"]
        assert torch.equal(b_order(torch.cat(parts)), matrix[n_router:])
        assert torch.equal(b_order(tensors[prefix + "self_attn.o_proj.weight"]), ops.o(layer))
        own = [f"experts.{e}." for e in range(12)] if layer else [""]
        gate_up = ops.gate_up(layer).clone()
        down = ops.down(layer)
        assert len(own) == len(gate_up) == len(down)
        for e, name in enumerate(own):
            granules = gate_up[e].unflatten(0, (-1, 2, 8))
            for half, which in enumerate(("gate", "up")):
                want = b_order(tensors[f"{prefix}mlp.{name}{which}_proj.weight"])
                assert torch.equal(want, granules[:, half].flatten(0, 1))
            assert torch.equal(b_order(tensors[f"{prefix}mlp.{name}down_proj.weight"]), down[e])


def test_embeddings() -> None:
    """Every token of a vocabulary that is no multiple of 16."""
    ops, tensors = operators()
    everything = torch.arange(517)
    assert torch.equal(tensors["embed_tokens.weight"].float(), ops.embed(everything))


def test_routes_follow_the_contract() -> None:
    """The kernel's choice, ties to the lower id; pairs sorted by expert, and each found again."""
    config = small_config()
    logits = normal(40, 12, seed=4).float()
    logits[3] = 0.0
    logits[5, [2, 7, 9, 11]] = 9.0
    routes = route(config, logits)
    ends = routes.ends.tolist()
    assert 120 == ends[-1]
    sizes = np.diff(ends, prepend=0).tolist()
    experts = torch.tensor([e for e, size in enumerate(sizes) for _ in range(size)])
    for token in range(40):
        chosen = top_k(logits[token].numpy(), 3)
        assert sorted(chosen.tolist()) == experts[routes.places[token]].tolist()
        assert (routes.tokens[routes.places[token]] == token).all()
    want = torch.sigmoid(logits[routes.tokens, experts])
    assert torch.allclose(want, routes.scores, rtol=1e-6)


def test_routes_with_normalised_scores() -> None:
    """Scores of a token add up to 1."""
    routes = route(small_config(norm_topk_prob=True), normal(9, 12).float())
    total = routes.scores[routes.places].sum(1)
    assert torch.allclose(torch.ones(9), total, atol=1e-6)


def test_gather_adds_up_the_pairs_of_a_token() -> None:
    """In float32, whatever the outputs are."""
    routes = route(small_config(), normal(9, 12).float())
    outputs = normal(27, 32, seed=2)
    want = torch.zeros(9, 32)
    for pair in range(27):
        want[routes.tokens[pair]] += outputs[pair].float()
    got = routes.gather(outputs)
    assert torch.float32 == got.dtype
    assert torch.allclose(want, got, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("scored", [False, True])
def test_swiglu(dtype: torch.dtype, scored: bool) -> None:
    """silu(gate) * up * score, rounded once, in B order, from interleaved halves."""
    gate, up = normal(6, 48).float(), normal(6, 48, seed=1).float()
    scores = torch.rand(6) if scored else None
    halves = torch.stack([gate.view(6, 6, 8), up.view(6, 6, 8)], dim=2)
    want = torch.nn.functional.silu(gate) * (up if scores is None else up * scores[:, None])
    got = swiglu(halves.flatten(1).to(dtype), scores)
    assert torch.equal(b_order(want), got)


def test_grouped_products() -> None:
    """Empty groups at both ends and in the middle; torch's own grouped product agrees."""
    x, w = normal(10, 32), normal(5, 16, 32, seed=1)
    ends = torch.tensor([0, 4, 4, 10, 10], dtype=torch.int32)
    want = torch.cat([product(x[:4], w[1]), product(x[4:], w[3])])
    assert torch.allclose(want, grouped(x, w, ends), atol=1e-5)
    theirs = torch._grouped_mm(x, w.transpose(1, 2), offs=ends).float()
    assert far_apart(theirs.numpy(), want.numpy())[0] < 0.02


@pytest.mark.parametrize("window", [None, 1, 3, 40, 299, 300])
@pytest.mark.parametrize("n", [1, 7, 300])
def test_attention(window: int | None, n: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Softmax over what a query sees, in float64, whatever the size of the blocks."""
    q, k, v = normal(n, 6, 32), normal(300, 2, 32, seed=1), normal(300, 2, 32, seed=2)
    monkeypatch.setattr("mkref.engine.prefill_products.QUERY_BLOCK", 64)
    got = attend(q, k, v, window)
    keys, values = (t.double().repeat_interleave(3, dim=1) for t in (k, v))
    scores = torch.einsum("thd,shd->hts", q.double(), keys) / 32**0.5
    at, seen = torch.arange(300 - n, 300)[:, None], torch.arange(300)
    hidden = (seen > at) | (seen <= at - (window or 300))
    weights = scores.masked_fill(hidden, -torch.inf).softmax(-1)
    want = torch.einsum("hts,shd->thd", weights, values)
    assert torch.allclose(want, got.double(), rtol=2**-8, atol=1e-6)  # rounded once


def test_attention_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks of queries shrink as keys grow; the result stays."""
    q, k, v = normal(30, 4, 32), normal(90, 2, 32, seed=1), normal(90, 2, 32, seed=2)
    want = attend_in_blocks(q, k, v, None)
    monkeypatch.setattr("mkref.engine.prefill_products.SCORES", 90 * 4 * 3)
    got = attend_in_blocks(q, k, v, None)
    assert torch.allclose(want.float(), got.float(), rtol=2**-7, atol=1e-6)


@pytest.mark.parametrize("position", [0, 1, 63, 64, 150])
@pytest.mark.parametrize("dim", [32, 64, 128])
def test_pages_are_the_kernels(dim: int, position: int) -> None:
    """Written as `pack_kv_page` writes them, whole pages; read back as they were."""
    config = small_config(head_dim=dim, num_hidden_layers=1)
    plan = build_plan(config, 1, full_pages=9, sliding_pages=9)
    pool = torch.zeros(plan.pool.total_tiles(config), 256, dtype=torch.bfloat16)
    table = np.stack([np.random.default_rng(dim).permutation(9)[:5]] * 2)
    k, v = normal(320, 2, dim), normal(320, 2, dim, seed=1)
    pages, cpu = LayerPages(config, pool), torch.device("cpu")
    for begin, end in ((0, position), (position, 320)):
        if end > begin:
            span = spans(plan, table, begin, end - begin)[0]
            assert span is not None
            pages.write(Places.of(span, cpu), k[begin:end], v[begin:end])
    words = to_words(pool).reshape(9, 2, dim // 2, 256)
    for entry, page in enumerate(table[0]):
        for head in range(2):
            part = (slice(entry * 64, entry * 64 + 64), head)
            want = pack_kv_page(to_words(k[part].clone()), to_words(v[part].clone()))
            assert (want == words[page, head]).all()
    span = spans(plan, table, 300, 20)[0]
    assert span is not None
    back = [torch.empty(320, 2, dim, dtype=torch.bfloat16) for _ in range(2)]
    gathered = torch.empty(256, page_words(config), dtype=torch.bfloat16)
    pages.read(Places.of(span, cpu), back[0], back[1], gathered)
    assert torch.equal(k, back[0])
    assert torch.equal(v, back[1])


def test_many_pages_are_gathered_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """A limit of two pages at a time gives the same cache."""
    config, weights = small_model(3)
    tokens = prompt(config.vocab_size, 400)
    whole, parts = Lab.of(weights, seed=1), Lab.of(weights, seed=1)
    whole.torch(tokens, sizes=(350,))
    for module in ("prefill_pages", "prefill_layers"):
        monkeypatch.setattr(f"mkref.engine.{module}.GATHERED", 2)
    parts.torch(tokens, sizes=(350,))
    assert (whole.machine.read("kv") == parts.machine.read("kv")).all()


def test_spans_of_every_position() -> None:
    """Against a plain loop over tokens: what is read, what is written, where the keys begin."""
    config = small_config(sliding_window=70)
    plan = build_plan(config, 1, full_pages=20, sliding_pages=20)
    table = np.stack([np.arange(8), np.arange(8) + 8])
    for position in (0, 1, 57, 64, 69, 70, 133, 134, 200):
        for count in (1, 7, 64, 150):
            for kind, span in enumerate(spans(plan, table, position, count)):
                assert span is not None
                low = max(0, position - 69) if kind else 0
                assert (low, low // 64 * 64) == (span.low, span.first)
                tokens = range(span.first, position)
                assert sorted({table[kind, t // 64] for t in tokens}) == span.read.tolist()
                own = range(position, position + count)
                assert [table[kind, t // 64] for t in own] == span.write.tolist()
                assert [t % 64 for t in own] == span.slots.tolist()


def as_a_gpu(x: Tensor, w: Tensor, ends: Tensor) -> Tensor:
    """Experts' products rounded to bfloat16, as a grouped product of a GPU is."""
    return grouped_in_turn(x, w, ends).to(torch.bfloat16)


def test_rounded_products_of_experts(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a GPU rounds more than a CPU stays within a few roundings: 2^-8 per element and layer,
    which for the four sparse layers is 0.0039 * 2; measured is 0.003.
    """
    config, weights = small_model(4, num_experts=4, num_experts_per_tok=4)
    tokens = prompt(config.vocab_size, 150)
    exact, rounded = Lab.of(weights, seed=1), Lab.of(weights, seed=1)
    exact.torch(tokens)
    monkeypatch.setattr(prefill_layers, "grouped", as_a_gpu)
    rounded.torch(tokens)
    gaps = [far_apart(rounded.cache(150, i), exact.cache(150, i))[1] for i in range(5)]
    assert 0 == gaps[0] == gaps[1]  # nothing before them is rounded
    assert 0 < gaps[4] < 0.008


def test_workspace_is_what_the_formula_says() -> None:
    """The tensors that are made once, and North's total at 256K tokens."""
    config, context, chunk = small_config(), 1000, 64
    space = Workspace.of(config, context, "cpu")
    made = sum(t.nbytes for t in (space.slab, space.keys, space.values, space.gathered))
    whole, half = (workspace_bytes(config, n, context) for n in (chunk, chunk // 2))
    assert made + prefill_layers.LIBRARIES == 2 * half - whole
    for chunk, most in ((512, 1.6e9), (2048, 1.8e9), (4096, 2.1e9), (8192, 2.6e9)):
        assert workspace_bytes(NORTH_MINI_CODE, chunk, 262144) < most


class Live(TorchDispatchMode):
    """Bytes of the tensors that operations make within, as long as they live."""

    def __init__(self) -> None:
        super().__init__()
        self.sizes: dict[int, int] = {}
        self.peak = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Run it; count storages that were not there before."""
        given = [*tree_leaves((args, kwargs or {}))]
        before = {t.untyped_storage()._cdata for t in given if isinstance(t, Tensor)}
        out = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(out):
            if isinstance(tensor, Tensor):
                storage = tensor.untyped_storage()
                if storage._cdata not in before | self.sizes.keys():
                    self.sizes[storage._cdata] = storage.nbytes()
                    weakref.finalize(storage, self.sizes.pop, storage._cdata, None)
        self.peak = max(self.peak, sum(self.sizes.values()))
        return out


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"num_experts": 64, "num_experts_per_tok": 8, "intermediate_size": 96},
        {"first_k_dense_replace": 5, "prefix_dense_intermediate_size": 1024},
        {"num_attention_heads": 16, "head_dim": 128},
    ],
)
def test_a_chunk_takes_no_more_than_the_formula_says(
    changes: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Counted with products that allocate what they do on a GPU; the formula is not much too high,
    either.
    """

    def multiply(y: Tensor, w: Tensor) -> Tensor:
        return torch.zeros(len(y), len(w))

    def each(x: Tensor, w: Tensor, ends: Tensor) -> Tensor:
        return torch.zeros(len(x), w.shape[1], dtype=torch.bfloat16)

    def mix(q: Tensor, k: Tensor, v: Tensor, window: int | None) -> Tensor:
        return torch.zeros_like(q)

    for name, function in (("product", multiply), ("grouped", each), ("attend", mix)):
        monkeypatch.setattr(prefill_layers, name, function)
    config, weights = small_model(3, **changes)
    lab = Lab.of(weights, context=1024)
    prefill = Prefill(lab.machine)
    with Live() as live:
        prefill.run(prompt(config.vocab_size, 1000), 0, lab.table)
    bound = workspace_bytes(config, 2000, 1024) - workspace_bytes(config, 1000, 1024)
    assert 0.7 * bound < live.peak <= bound + 100_000  # and a hundred bytes a token for its pages
