"""The PyTorch reference against transformers, and its contract mode against its plain mode."""

from __future__ import annotations

import itertools
import random
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import Cohere2MoeConfig, Cohere2MoeForCausalLM

from mkref.config import NorthConfig
from mkref.plan.build import MOST_SPLITS
from mkref.reference import rounding
from mkref.reference.model import KVCache, Reference
from mkref.weights.synthetic import synthetic_weights

N_CONFIGS = 40


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    """Tiny matrices: more threads only cost."""
    torch.set_num_threads(1)


def random_config(index: int) -> NorthConfig:
    """One of N_CONFIGS small geometries; together they take every branch of the model."""
    rng = random.Random(index)
    group = index % 8 + 1
    kv_heads = rng.choice([1, 2])
    layers = rng.randint(2, 5)
    experts = rng.choice([8, 12])
    raw: dict[str, Any] = {
        "vocab_size": rng.choice([40, 64]),
        "hidden_size": rng.choice([32, 48, 80]),
        "num_hidden_layers": layers,
        "num_attention_heads": kv_heads * group,
        "num_key_value_heads": kv_heads,
        "head_dim": rng.choice([16, 32]),
        "intermediate_size": rng.choice([16, 48]),
        "prefix_dense_intermediate_size": rng.choice([None, 32]),
        "first_k_dense_replace": index % 3,
        "prefix_dense_sliding_window_pattern": rng.choice([1, 1, 2]),
        "sliding_window_pattern": rng.choice([2, 3, 4]),
        "num_experts": experts,
        "num_experts_per_tok": index * 3 % 8 + 1,
        "norm_topk_prob": index % 2 == 0,
        "sliding_window": rng.choice([1, 3, 6, 100]),
        "rms_norm_eps": rng.choice([1e-6, 1e-3]),
        "rope_theta": rng.choice([10000.0, 50000.0]),
        "logit_scale": rng.choice([1.0, 0.25]),
        "expert_selection_fn": "sigmoid",
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    return NorthConfig.from_dict(raw)


def per_expert(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """transformers' module state under the names of a checkpoint: experts one by one."""
    out: dict[str, Tensor] = {}
    for name, tensor in state.items():
        prefix, fused, kind = name.rpartition(".experts.")
        if not fused:
            out[name] = tensor
            continue
        for e, matrix in enumerate(tensor):
            if kind == "down_proj":
                out[f"{prefix}.experts.{e}.down_proj.weight"] = matrix
            else:
                gate, up = matrix.chunk(2)
                out[f"{prefix}.experts.{e}.gate_proj.weight"] = gate
                out[f"{prefix}.experts.{e}.up_proj.weight"] = up
    return out


def hf_model(config: NorthConfig, seed: int, attention: str = "eager") -> Cohere2MoeForCausalLM:
    """A float32 model with weights large enough that every term counts."""
    torch.manual_seed(seed)
    hf_config = Cohere2MoeConfig(**{**config.to_dict(), "dtype": "float32"})
    model = Cohere2MoeForCausalLM._from_config(
        hf_config, attn_implementation=attention, dtype=torch.float32
    )
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim == 1:
                parameter.uniform_(0.7, 1.3)
            else:
                gain = 2.0 if "embed" in name or "mlp.gate." in name else 1.0
                parameter.normal_(0.0, gain / parameter.shape[-1] ** 0.5)
    return model.eval()


def test_random_configs_cover_every_branch() -> None:
    """The sweep contains what it claims to contain."""
    configs = [random_config(i) for i in range(N_CONFIGS)]
    assert {c.group_size for c in configs} == set(range(1, 9))
    assert {c.n_dense_layers for c in configs} == {0, 1, 2}
    assert {c.num_experts_per_tok for c in configs} == set(range(1, 9))
    assert {c.norm_topk_prob for c in configs} == {False, True}
    kinds = {
        (c.is_sliding(i), c.uses_rope(i), c.is_dense(i))
        for c in configs
        for i in range(c.num_hidden_layers)
    }
    # sliding layers always rotate; a full layer rotates only if it is dense
    assert kinds == {
        (True, True, False), (True, True, True), (False, False, False), (False, False, True),
        (False, True, True),
    }  # fmt: skip
    assert {c.sliding_window < 17 for c in configs} == {False, True}


@pytest.mark.parametrize("index", range(N_CONFIGS))
def test_equals_transformers_in_float32(index: int) -> None:
    """Logits within 1e-5, eager and sdpa, one pass, batched, and token by token."""
    config = random_config(index)
    model = hf_model(config, index, ("eager", "sdpa")[index // 8 % 2])
    reference = Reference(config, per_expert(model.state_dict()))
    tokens = torch.randint(3, config.vocab_size, (2, 17))
    with torch.no_grad():
        want = model(tokens).logits
    got = reference(tokens)
    assert got.dtype == torch.float32
    assert got.shape == want.shape
    assert want.std() > 0.1  # not everything is zero
    assert (got - want).abs().max() < 1e-5
    assert (reference(tokens[1]) - want[1]).abs().max() < 1e-5

    cache = KVCache()
    steps = [reference(tokens[:, :5], cache), reference(tokens[:, 5:6], cache)]
    steps += [reference(tokens[:, 6:9], cache)]
    steps += [reference(tokens[:, t : t + 1], cache, last_only=True) for t in range(9, 17)]
    assert cache.length == 17
    assert (torch.cat(steps, dim=1) - want).abs().max() < 1e-5


def test_bfloat16_follows_transformers() -> None:
    """The same roundings as transformers' eager bfloat16: all but a few logits are equal."""
    config = random_config(13)
    model = hf_model(config, 5).to(torch.bfloat16)
    # .to() rounds the rotary frequencies, which a loaded bfloat16 model keeps in float32.
    exponent = torch.arange(0, config.head_dim, 2, dtype=torch.float32) / config.head_dim
    model.model.rotary_emb.inv_freq = 1.0 / config.rope_theta**exponent
    model.set_experts_implementation("eager")
    weights = per_expert(model.state_dict())
    tokens = torch.randint(3, config.vocab_size, (2, 17))
    with torch.no_grad():
        want = model(tokens).logits.float()
    got = Reference(config, weights, dtype=torch.bfloat16)(tokens)
    exact = Reference(config, weights, dtype=torch.float64)(tokens)
    assert exact.dtype == torch.float64
    assert (got == want).float().mean() > 0.9
    assert (got - exact).abs().max() < 0.1
    assert (got - want).abs().max() < 0.1


def contract_config(index: int) -> NorthConfig:
    """Like random_config, with windows of a chunk or so and every expert chosen by every token.

    A rounding may change which expert comes last, and the logits jump; with k = E they cannot.
    """
    window = (150, 70, 300)[index % 3]
    limits = {"head_dim": 32, "num_experts": 8, "num_experts_per_tok": 8}
    return NorthConfig.from_dict(
        {**random_config(index).to_dict(), **limits, "sliding_window": window}
    )


@pytest.mark.parametrize("index", range(6))
def test_contract_mode_is_a_rounding_of_the_same_model(index: int) -> None:
    """Against float64 on the same bfloat16 weights, over several pages and chunks of keys.

    One bfloat16 rounding is a relative error of up to 2^-9 = 0.002; a layer adds about ten of them,
    independent, to a fraction of the residual stream, so the error of two to five layers stays near
    0.01 of the logits' spread (measured: at most 0.032 anywhere, 0.003 in the median).
    """
    config = contract_config(index)
    weights = synthetic_weights(config, seed=index)
    torch.manual_seed(index)
    tokens = torch.randint(0, config.vocab_size, (300,))
    exact = Reference(config, weights, dtype=torch.float64)(tokens)
    contract = Reference(config, weights, numerics="contract")
    got = contract(tokens)
    assert got.dtype == torch.float32
    error = (got - exact).abs() / exact.std()
    assert 0.0005 < float(error.median()) < 0.005
    assert float(error.max()) < 0.05

    cache = KVCache()
    steps = [contract(tokens[:190], cache), contract(tokens[190:193], cache)]
    steps += [contract(tokens[t : t + 1], cache) for t in range(193, 300)]
    difference = (torch.cat(steps) - got).abs() / exact.std()
    # torch adds sums of other lengths in another order; a last bit may flip a bfloat16 rounding.
    assert float(difference.median()) == 0
    assert float(difference.max()) < 0.05


def test_contract_attention_equals_plain_softmax() -> None:
    """Chunks and merge give softmax attention: within bfloat16 of float64, any window."""
    config = contract_config(0)
    contract = Reference(config, synthetic_weights(config), numerics="contract").rounding
    torch.manual_seed(1)
    q = torch.randn(2, 2, 3, 5, 32).to(torch.bfloat16)
    k, v = (torch.randn(2, 2, 400, 32).to(torch.bfloat16) for _ in range(2))
    positions = torch.tensor([64, 127, 128, 300, 399])
    for window in (1, 64, 150, 1000):
        keys = torch.arange(400)
        visible = (keys <= positions[:, None]) & (keys > positions[:, None] - window)
        got = contract.attend(q, k, v, visible)
        assert got.dtype == torch.bfloat16
        scores = q.double() @ k.double()[:, :, None].mT / 32**0.5
        weights = scores.masked_fill(~visible, float("-inf")).softmax(-1)
        want = weights @ v.double()[:, :, None]
        # p and the output are rounded: 2^-9 each of a convex sum of values below 4.5
        assert (got - want).abs().max() < 4.5 * 2**-8


def running_by_loops(m: list[float], n: int) -> list[float]:
    """Maxima of n chunks, each with those before it in its split."""
    out: list[float] = []
    for begin, end in itertools.pairwise(split * n // 33 for split in range(34)):
        out += itertools.accumulate(m[begin:end], max)
    return out


@pytest.mark.parametrize("window", [9999, 7000])
def test_contract_attention_over_splits_of_several_chunks(window: int) -> None:
    """More than 33 chunks: weights are rounded relative to the maximum of the split so far.

    Scores fall with the position, so a chunk's own maximum is another number.
    """
    assert rounding.MOST_SPLITS == MOST_SPLITS
    config = contract_config(0)
    contract = Reference(config, synthetic_weights(config), numerics="contract").rounding
    torch.manual_seed(1)
    n_keys = 60 * 128
    q = torch.ones(1, 1, 1, 4, 32).to(torch.bfloat16)
    k = torch.randn(1, 1, n_keys, 32) / 4 - torch.arange(n_keys)[:, None] / n_keys * 8
    k, v = k.to(torch.bfloat16), torch.randn(1, 1, n_keys, 32).to(torch.bfloat16)
    positions = torch.tensor([33 * 128 - 1, 34 * 128, 7200, n_keys - 1])
    keys = torch.arange(n_keys)
    visible = (keys <= positions[:, None]) & (keys > positions[:, None] - window)
    got = contract.attend(q, k, v, visible)[0, 0, 0]
    scores = (q.double() @ k.double()[:, :, None].mT / 32**0.5)[0, 0, 0]
    values = v[0, 0].double()
    for query, position in enumerate(positions.tolist()):
        first = max(0, position - window + 1) // 128
        n = position // 128 - first + 1
        seen = scores[query].masked_fill(~visible[query], float("-inf")) / np.log(2)
        chunks = list(seen.split(128)[first : first + n])
        own = [float(chunk.max()) for chunk in chunks]
        running = own if n <= 33 else running_by_loops(own, n)
        outputs = []
        for base in (running, own):
            p = [
                torch.exp2(s - m).to(torch.bfloat16).double()
                for s, m in zip(chunks, base, strict=True)
            ]
            scale = [2 ** (m - max(base)) for m in base]
            weights = torch.cat([s * x for s, x in zip(scale, p, strict=True)])
            out = weights @ values[first * 128 :][: 128 * n] / weights.sum()
            outputs.append(out.to(torch.bfloat16))
        right, wrong = ((got[query] == out).float().mean() for out in outputs)
        assert right > 0.95  # but for what float32 adds
        assert n < 50 or wrong < 0.9


def test_contract_chunks_are_aligned_to_positions(monkeypatch: pytest.MonkeyPatch) -> None:
    """A sliding layer attends from a multiple of 128 on, wherever its window begins."""
    config = NorthConfig.from_dict(
        {**contract_config(1).to_dict(), "layer_types": None, "sliding_window_pattern": 99}
    )
    contract = Reference(config, synthetic_weights(config), numerics="contract")
    attend, seen = contract.rounding.attend, set()

    def record(q: Tensor, k: Tensor, v: Tensor, visible: Tensor) -> Tensor:
        seen.add((q.shape[3], k.shape[2]))
        return attend(q, k, v, visible)

    monkeypatch.setattr(contract.rounding, "attend", record)
    contract(torch.zeros(300, dtype=torch.int64))
    # Window 70: queries 256..299 see keys from 187 on, the chunk of which begins at 128.
    assert seen == {(256, 256), (44, 300 - 128)}


def test_ties_go_to_the_lower_expert() -> None:
    """Equal router logits: the lower id is taken, and ids ascend."""
    config = NorthConfig.from_dict(
        {**random_config(1).to_dict(), "num_experts": 8, "num_experts_per_tok": 3,
         "mlp_layer_types": None}
    )  # fmt: skip
    weights = dict(synthetic_weights(config).items())
    gate = torch.zeros(8, config.hidden_size)
    gate[6] = 1.0
    weights["model.layers.0.mlp.gate.weight"] = gate
    for numerics in ("plain", "contract"):
        reference = Reference(config, weights, numerics=numerics)
        y = torch.ones(2, config.hidden_size)
        ids, scores = reference.route(0, torch.stack([y[0], -y[1]]))
        assert ids.tolist() == [[0, 1, 6], [0, 1, 2]]
        assert scores.shape == (2, 3)


def test_only_chosen_experts_are_asked_for() -> None:
    """A lazy mapping is asked for active experts only, so one token needs k of E experts."""
    config = NorthConfig.from_dict({**random_config(2).to_dict(), "num_experts_per_tok": 2})
    asked: list[str] = []

    class Counting(dict[str, Tensor]):
        def __getitem__(self, name: str) -> Tensor:
            asked.append(name)
            return super().__getitem__(name)

    Reference(config, Counting(synthetic_weights(config).items()))(torch.tensor([3]))
    gates = [name for name in asked if ".experts." in name and "gate_proj" in name]
    assert len(gates) == 2 * config.n_sparse_layers
    assert asked.count("model.embed_tokens.weight") == 1


def test_probe_sees_the_inside() -> None:
    """The probe is called with q, k, v, attention, router logits and x of each layer."""
    config = random_config(3)
    seen: dict[str, Tensor] = {}
    reference = Reference(config, synthetic_weights(config), probe=seen.__setitem__)
    reference(torch.tensor([3, 4]))
    last = config.num_hidden_layers - 1
    assert seen[f"layers.{last}.x"].shape == (1, 2, config.hidden_size)
    assert seen["layers.0.q"].shape == (1, config.num_attention_heads, 2, config.head_dim)
    assert seen[f"layers.{last}.router"].shape == (2, config.num_experts)
    assert seen["layers.0.attention"].shape == (1, 2, config.q_width)


def test_next_logits_are_the_last_ones() -> None:
    """Of every row, as NumPy; float32, whatever the model computes in."""
    config = random_config(0)
    weights = synthetic_weights(config)
    rows = [[3, 1, 4, 1], [5, 9, 2, 6]]
    for dtype in (torch.float32, torch.float64, torch.bfloat16):
        model = Reference(config, weights, dtype=dtype)
        right = model(torch.tensor(rows))[:, -1].float().numpy()
        got = model.next_logits(rows)
        assert "float32" == str(got.dtype)
        assert (2, config.vocab_size) == got.shape
        assert np.allclose(right, got, rtol=0, atol=1e-6)


def test_unknown_numerics_are_refused() -> None:
    """A typo does not silently become plain."""
    config = random_config(0)
    with pytest.raises(ValueError, match='numerics is \'exact\', must be "plain" or "contract"'):
        Reference(config, synthetic_weights(config), numerics="exact")  # type: ignore[arg-type]
