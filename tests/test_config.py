"""Config: what config.json means, what is refused, and the arithmetic of sizes.

Oracle: transformers' Cohere2MoeConfig for defaults and derived lists, the published geometry of
North Mini Code for the tables.
"""

from __future__ import annotations

import dataclasses
import json
import random
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from transformers import Cohere2MoeConfig, Cohere2MoeForCausalLM
from transformers.models.cohere2_moe.modeling_cohere2_moe import Cohere2MoeAttention

import mkref
from mkref import errors
from mkref.config import NORTH_MINI_CODE, NorthConfig, check_kernel_limits
from mkref.config_json import CLASS_DEFAULTS, TOO_LARGE, TOO_SMALL

if TYPE_CHECKING:
    from pathlib import Path

# The least that turns the class defaults into a model that is not refused.
MINIMAL = {"rms_norm_eps": 1e-5, "expert_selection_fn": "sigmoid"}
TINY: dict[str, Any] = {
    **MINIMAL,
    "vocab_size": 96,
    "hidden_size": 64,
    "num_hidden_layers": 5,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "intermediate_size": 32,
    "num_experts": 8,
    "sliding_window": 8,
    "eos_token_id": 1,
    "bos_token_id": 2,
}


def test_class_defaults_are_those_of_transformers() -> None:
    """A key that is absent from config.json means what transformers takes it to mean."""
    theirs = {field.name: field.default for field in dataclasses.fields(Cohere2MoeConfig)}
    ours = {k: v for k, v in CLASS_DEFAULTS.items() if k != "first_k_dense_replace"}
    assert {name: theirs[name] for name in ours} == ours
    config = NorthConfig.from_dict(MINIMAL)
    hf = Cohere2MoeConfig(**MINIMAL)
    for name in ("vocab_size", "num_key_value_heads", "norm_topk_prob", "logit_scale"):
        assert getattr(hf, name) == getattr(config, name)
    assert hf.rope_parameters["rope_theta"] == config.rope_theta


def random_raw(rng: random.Random) -> dict[str, Any]:
    """A config.json with random layer patterns, in one of the spellings that occur."""
    layers = rng.randint(1, 12)
    raw = {**TINY, "num_hidden_layers": layers}
    if rng.random() < 0.6:
        raw["first_k_dense_replace"] = rng.randint(0, min(3, layers))
    if rng.random() < 0.5:
        raw["sliding_window_pattern"] = rng.randint(1, 5)
    if rng.random() < 0.5:
        raw["prefix_dense_sliding_window_pattern"] = rng.randint(1, 3)
    if rng.random() < 0.3:
        kinds = ["full_attention", "sliding_attention"]
        raw["layer_types"] = [rng.choice(kinds) for _ in range(layers)]
    if rng.random() < 0.3:
        raw["mlp_layer_types"] = [rng.choice(["dense", "sparse"]) for _ in range(layers)]
    if rng.random() < 0.3:
        raw["prefix_dense_intermediate_size"] = 48
    if rng.random() < 0.5:
        raw["rope_theta"] = rng.choice([10000, 50000.0])
    if rng.random() < 0.3:
        raw["rope_parameters"] = {"rope_type": "default", "rope_theta": 77000.0}
    return raw


def test_derivation_agrees_with_transformers_on_random_settings() -> None:
    """layer_types, mlp_layer_types, rope use and rope_theta over 300 random configs."""
    rng = random.Random(1)
    for _ in range(300):
        raw = random_raw(rng)
        ours, hf = NorthConfig.from_dict(raw), Cohere2MoeConfig(**json.loads(json.dumps(raw)))
        assert tuple(hf.layer_types) == ours.layer_types, raw
        assert tuple(hf.mlp_layer_types) == ours.mlp_layer_types, raw
        assert hf.rope_parameters["rope_theta"] == ours.rope_theta, raw


def test_rope_and_window_agree_with_transformers_attention() -> None:
    """uses_rope and is_sliding equal what transformers' attention layer decides."""
    rng = random.Random(2)
    for _ in range(20):
        raw = random_raw(rng)
        ours, hf = NorthConfig.from_dict(raw), Cohere2MoeConfig(**json.loads(json.dumps(raw)))
        for layer in range(ours.num_hidden_layers):
            with torch.device("meta"):
                attention = Cohere2MoeAttention(hf, layer)
            sliding = attention.sliding_window is not None
            assert sliding == ours.is_sliding(layer), raw
            assert (sliding or attention.force_rope) == ours.uses_rope(layer), raw


def test_to_dict_round_trips_through_transformers(tmp_path: Path) -> None:
    """What to_dict writes is read back the same by us, and by us after transformers saved it."""
    rng = random.Random(3)
    for _ in range(20):
        config = NorthConfig.from_dict(random_raw(rng))
        assert NorthConfig.from_dict(config.to_dict()) == config
        (tmp_path / "config.json").write_text(json.dumps(config.to_dict()))
        assert NorthConfig.load(tmp_path) == config
        hf = Cohere2MoeConfig.from_pretrained(tmp_path)
        hf.save_pretrained(tmp_path / "saved")
        assert NorthConfig.load(tmp_path / "saved") == config
        assert NorthConfig.load(tmp_path / "saved" / "config.json") == config


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"rms_norm_eps": None}, "rms_norm_eps is null, must be set"),
        ({"rms_norm_eps": 0.0}, "rms_norm_eps is 0.0, must be a number > 0"),
        ({"rms_norm_eps": float("nan")}, "rms_norm_eps is NaN, must be a finite number"),
        ({"rms_norm_eps": 1e39}, "rms_norm_eps is 1e\\+39, must be a finite number"),
        ({"rms_norm_eps": 1e-50}, "rms_norm_eps is 1e-50, must be a number > 0"),
        ({"logit_scale": -1e39}, "logit_scale is -1e\\+39, must be a finite number"),
        ({"logit_scale": 10**400}, "logit_scale is 10*, must be a finite number"),
        ({"expert_selection_fn": "softmax"}, 'expert_selection_fn is "softmax", must be "sigmoid"'),
        ({"num_shared_experts": 1}, "num_shared_experts is 1, must be 0"),
        ({"attention_bias": True}, "attention_bias is true, must be false"),
        ({"tie_word_embeddings": False}, "tie_word_embeddings is false, must be true"),
        ({"hidden_act": "gelu"}, 'hidden_act is "gelu", must be "silu"'),
        ({"model_type": "cohere2"}, 'model_type is "cohere2", must be "cohere2_moe"'),
        ({"use_qk_norm": True}, "use_qk_norm is true, must be false"),
        ({"use_parallel_block": False}, "use_parallel_block is false, must be true"),
        ({"quantization_config": {"bits": 8}}, 'quantization_config is {"bits": 8}, must be'),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4}}, "rope_scaling is .*yarn.*must be"),
        (
            {"rope_parameters": {"rope_type": "linear", "factor": 2.0}},
            "rope_parameters is .*linear",
        ),
        ({"rope_parameters": {"partial_rotary_factor": 0.5}}, "rope_parameters is .*0.5"),
        ({"rope_parameters": {"full_attention": {"rope_theta": 1e4}}}, "rope_parameters is"),
        ({"rope_theta": 0}, "rope_theta is 0, must be a number > 0"),
        ({"rope_theta": "big"}, 'rope_theta is "big", must be a finite number'),
        ({"hidden_size": 64.0}, "hidden_size is 64.0, must be an integer >= 1"),
        ({"hidden_size": True}, "hidden_size is true, must be an integer >= 1"),
        ({"vocab_size": 0}, "vocab_size is 0, must be an integer >= 1"),
        ({"vocab_size": 2**31}, "vocab_size is 2147483648, must be an integer >= 1 \\(in int32\\)"),
        ({"sliding_window": None}, "sliding_window is null, must be an integer >= 1"),
        ({"norm_topk_prob": 1}, "norm_topk_prob is 1, must be true or false"),
        ({"num_key_value_heads": 3}, "num_key_value_heads is 3, must be a divisor of"),
        ({"num_experts_per_tok": 9}, "num_experts_per_tok is 9, must be at most num_experts = 8"),
        ({"head_dim": 33}, "head_dim is 33, must be even"),
        ({"layer_types": ["full_attention"]}, "layer_types has 1 entries, must have .* = 5"),
        ({"layer_types": ["chunked"] * 5}, "layer_types is .*chunked.*must be a list of"),
        ({"mlp_layer_types": ["dense"] * 4}, "mlp_layer_types has 4 entries, must have .* = 5"),
        ({"first_k_dense_replace": 6}, "first_k_dense_replace is 6, must be at most"),
        ({"sliding_window_pattern": 0}, "sliding_window_pattern is 0, must be an integer >= 1"),
        ({"eos_token_id": "</s>"}, 'eos_token_id is "</s>", must be a token id >= 0 or null'),
        ({"eos_token_id": [1, -2]}, "eos_token_id is -2, must be a token id >= 0 or null"),
    ],
)
def test_refusals_name_field_value_and_what_would_be_right(
    change: dict[str, Any], message: str
) -> None:
    """One line naming the field, its value and what would be right."""
    with pytest.raises(errors.ConfigError, match="^config: " + message) as caught:
        NorthConfig.from_dict({**TINY, **change})
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("theta", [0, -1.0, 1e39])
def test_rope_theta_is_checked_without_a_config_file(theta: float) -> None:
    """Also a config that is built directly has a base that positions can use."""
    with pytest.raises(errors.ConfigError, match="^config: rope_theta is"):
        dataclasses.replace(NORTH_MINI_CODE, rope_theta=theta)


def test_limits_of_float32_are_those_of_numpy() -> None:
    """The last number that float32 holds is accepted, the next one is not."""
    for value in (TOO_LARGE, TOO_SMALL):
        with np.errstate(over="ignore"):
            assert np.float32(value) in (np.inf, 0)
    most = np.nextafter(TOO_LARGE, 0)
    least = np.nextafter(TOO_SMALL, 1)
    assert np.isfinite(np.float32(most))
    assert np.float32(least) > 0
    dataclasses.replace(NORTH_MINI_CODE, logit_scale=most, rms_norm_eps=least)


@pytest.mark.parametrize("field", ["rms_norm_eps", "expert_selection_fn"])
def test_class_defaults_that_are_not_north_are_refused(field: str) -> None:
    """A config.json without these keys is a LayerNorm or softmax-router model."""
    raw = {k: v for k, v in TINY.items() if k != field}
    with pytest.raises(errors.ConfigError, match=f"^config: {field} is"):
        NorthConfig.from_dict(raw)


def test_load_names_the_file(tmp_path: Path) -> None:
    """A missing, damaged or unsuitable config.json is named."""
    with pytest.raises(errors.ConfigError, match=r"cannot read .*nowhere"):
        NorthConfig.load(tmp_path / "nowhere")
    file = tmp_path / "config.json"
    file.write_text("{")
    with pytest.raises(errors.ConfigError, match=r"config\.json is not JSON"):
        NorthConfig.load(tmp_path)
    file.write_text("[" * 200_000)
    with pytest.raises(errors.ConfigError, match=r"config\.json is not JSON"):
        NorthConfig.load(tmp_path)
    file.write_text("[1]")
    with pytest.raises(errors.ConfigError, match="a list, must be a JSON object"):
        NorthConfig.load(tmp_path)
    file.write_text(json.dumps({**TINY, "num_experts": 0}))
    with pytest.raises(errors.ConfigError, match=r"num_experts is 0.*\(in .*config\.json\)"):
        NorthConfig.load(tmp_path)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"hidden_size": 72}, "hidden_size is 72, must be a multiple of 16"),
        ({"intermediate_size": 40}, "intermediate_size is 40, must be a multiple of 16"),
        (
            {"first_k_dense_replace": 1, "prefix_dense_intermediate_size": 24},
            "prefix_dense_intermediate_size is 24, must be a multiple of 16",
        ),
        ({"head_dim": 16}, "head_dim is 16, must be 32, 64 or 128"),
        ({"head_dim": 256}, "head_dim is 256, must be 32, 64 or 128"),
        (
            {"num_attention_heads": 18, "num_key_value_heads": 2},
            "num_key_value_heads is 2, must be at least 3",
        ),
        ({"num_experts": 129}, "num_experts is 129, must be at most 128"),
        (
            {"num_experts": 16, "num_experts_per_tok": 9},
            "num_experts_per_tok is 9, must be at most 8",
        ),
    ],
)
def test_kernel_limits(change: dict[str, Any], message: str) -> None:
    """What the kernel cannot be built for is refused, though the config itself is fine."""
    config = NorthConfig.from_dict({**TINY, **change})
    with pytest.raises(errors.ConfigError, match="^config: " + message):
        check_kernel_limits(config)


def test_kernel_limits_accept_what_is_unused() -> None:
    """A width that no layer has does not matter."""
    check_kernel_limits(NORTH_MINI_CODE)
    dense = {**TINY, "first_k_dense_replace": 5, "prefix_dense_intermediate_size": 32}
    check_kernel_limits(NorthConfig.from_dict({**dense, "intermediate_size": 40}))
    check_kernel_limits(NorthConfig.from_dict({**TINY, "prefix_dense_intermediate_size": 24}))


def test_north_geometry() -> None:
    """49 layers: 13 full, 36 sliding, 12 without positions, one dense; GQA 8:1."""
    north = NORTH_MINI_CODE
    layers = range(north.num_hidden_layers)
    assert [i for i in layers if not north.is_sliding(i)] == list(range(0, 49, 4))
    assert [i for i in layers if not north.uses_rope(i)] == list(range(4, 49, 4))
    assert [i for i in layers if north.is_dense(i)] == [0]
    assert (8, 4096, 512) == (north.group_size, north.q_width, north.kv_width)
    assert (3072, 768) == (north.mlp_width(0), north.mlp_width(1))
    assert (1, 48) == (north.n_dense_layers, north.n_sparse_layers)
    assert north.eos_token_ids == (255001,)
    raw = {**north.to_dict(), "layer_types": None, "mlp_layer_types": None}
    assert NorthConfig.from_dict({**raw, "first_k_dense_replace": 1}) == north


def test_north_parameters() -> None:
    """The table of parameters, to the last one."""
    north = NORTH_MINI_CODE
    assert north.n_parameters() == 30_484_303_872
    assert north.active_parameters() == 3_305_213_952
    assert north.expert_parameters == 4_718_592
    assert north.weight_bytes_per_token() == 6_610_427_904
    assert north.weight_bytes_per_token(128) == 60_968_607_744
    with torch.device("meta"):
        model = Cohere2MoeForCausalLM(Cohere2MoeConfig(**north.to_dict()))
    assert sum(p.numel() for p in model.parameters()) == north.n_parameters()


@pytest.mark.parametrize(
    ("context_k", "kv", "total_gb", "ms"),
    [
        (1, 102_760_448, 6.713, 2.004),
        (2, 205_520_896, 6.816, 2.035),
        (4, 411_041_792, 7.021, 2.096),
        (8, 520_093_696, 7.131, 2.129),
        (16, 738_197_504, 7.349, 2.194),
        (32, 1_174_405_120, 7.785, 2.324),
        (64, 2_046_820_352, 8.657, 2.584),
        (128, 3_791_650_816, 10.402, 3.105),
        (256, 7_281_311_744, 13.892, 4.147),
    ],
)
def test_north_kv_and_bytes_of_a_step(context_k: int, kv: int, total_gb: float, ms: float) -> None:
    """KV bytes exactly; weights + KV of a step, and its time at 3.35 TB/s, as printed."""
    context = context_k * 1024
    assert NORTH_MINI_CODE.kv_bytes(context) == kv
    total = NORTH_MINI_CODE.weight_bytes_per_token() + kv
    assert total_gb == round(total / 1e9, 3)
    assert ms == round(total / 3.35e9, 3)


@pytest.mark.parametrize(
    ("rows", "distinct", "weights_gb", "tokens_per_s"),
    [
        (1, 8.0, 6.61, 469.8),
        (2, 15.5, 10.01, 606.4),
        (4, 29.12, 16.18, 733.9),
        (8, 51.62, 26.37, 877.8),
    ],
)
def test_north_batches(rows: int, distinct: float, weights_gb: float, tokens_per_s: float) -> None:
    """Uniform routing: distinct experts, weight bytes and the bound with 8K of KV per row."""
    north = NORTH_MINI_CODE
    experts = north.expected_distinct_experts(rows)
    assert distinct == round(experts, 2)
    weights = north.weight_bytes_per_token(experts)
    assert weights_gb == round(weights / 1e9, 2)
    step = weights + rows * north.kv_bytes(8192)
    assert tokens_per_s == round(rows * 3.35e12 / step, 1)


def test_tiny_parameters_agree_with_transformers() -> None:
    """Counts of random geometries equal those of the module that transformers builds."""
    rng = random.Random(4)
    for _ in range(10):
        config = NorthConfig.from_dict(random_raw(rng))
        with torch.device("meta"):
            model = Cohere2MoeForCausalLM(Cohere2MoeConfig(**config.to_dict()))
        assert sum(p.numel() for p in model.parameters()) == config.n_parameters()


def test_errors_are_one_family() -> None:
    """Every public error is a MkrefError; a hang says what it waited for."""
    for name in errors.__all__:
        assert issubclass(getattr(errors, name), errors.MkrefError)
    hang = errors.HangError(code=3, sm=7, task=12, counter=40, have=5, want=8)
    assert isinstance(hang, errors.MachineError)
    expected = (3, 7, 12, 40, 5, 8)
    assert expected == (hang.code, hang.sm, hang.task, hang.counter, hang.have, hang.want)
    assert str(hang) == "hang: SM 7, task 12: wait code 3 on 40; it has 5, wants 8"
    named = errors.HangError(code=3, sm=7, task=12, counter=40, have=5, want=8, detail="o, layer 2")
    assert str(named) == "hang: SM 7, task 12: o, layer 2; it has 5, wants 8"


def test_package_names_are_lazy() -> None:
    """`import mkref` offers its names without importing their modules first."""
    assert mkref.NorthConfig is NorthConfig
    assert "NORTH_MINI_CODE" in dir(mkref)
    with pytest.raises(AttributeError, match="no attribute 'nonsense'"):
        _ = mkref.nonsense
