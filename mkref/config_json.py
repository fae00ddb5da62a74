"""Reading a config.json: defaults, derived lists, and refusals.

Missing keys take the default of transformers' `Cohere2MoeConfig`; `layer_types` and
`mlp_layer_types` are derived the way that class derives them. A setting that mkref does not
implement is refused with its name and value: running a LayerNorm or softmax-router model as if it
were North gives fluent nonsense, not an error.

What it does not do: hold the result (`mkref.config.NorthConfig` does), or read files.

Sources: transformers `models/cohere2_moe/configuration_cohere2_moe.py` (5.24) for names, defaults
and derivation.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from mkref.errors import ConfigError

__all__ = [
    "DENSE", "FULL", "SLIDING", "SPARSE",
    "integer", "kinds", "number", "positive", "read", "refuse",
]  # fmt: skip

FULL, SLIDING = "full_attention", "sliding_attention"
DENSE, SPARSE = "dense", "sparse"
# The kernel's constants are float32: what rounds to infinity from here on, and to 0 up to here.
TOO_LARGE, TOO_SMALL = 2.0**128 - 2.0**103, 2.0**-150

# Defaults of Cohere2MoeConfig: what a key that is absent from config.json means.
CLASS_DEFAULTS: dict[str, Any] = {
    "vocab_size": 256000,
    "hidden_size": 8192,
    "intermediate_size": 22528,
    "logit_scale": 0.0625,
    "num_hidden_layers": 40,
    "num_attention_heads": 64,
    "num_key_value_heads": None,
    "head_dim": 128,
    "hidden_act": "silu",
    "max_position_embeddings": 8192,
    "pad_token_id": 0,
    "bos_token_id": 5,
    "eos_token_id": 255001,
    "tie_word_embeddings": True,
    "rope_theta": 10000.0,
    "attention_bias": False,
    "sliding_window": 4096,
    "num_experts_per_tok": 2,
    "num_experts": 8,
    "num_shared_experts": 0,
    "expert_selection_fn": "softmax",
    "layer_types": None,
    "mlp_layer_types": None,
    "first_k_dense_replace": 0,
    "prefix_dense_sliding_window_pattern": 1,
    "norm_topk_prob": True,
    "prefix_dense_intermediate_size": None,
    "rms_norm_eps": None,
    "sliding_window_pattern": 4,
}

# Settings with one implemented value. `None` in the tuple: null (or an absent key) is fine too.
ONLY_IMPLEMENTED: dict[str, tuple[tuple[Any, ...], str]] = {
    "model_type": (("cohere2_moe", None), '"cohere2_moe"'),
    "hidden_act": (("silu",), '"silu"'),
    "attention_bias": ((False,), "false: the projections have no biases"),
    "tie_word_embeddings": ((True, None), "true: the LM head is the embedding"),
    "num_shared_experts": ((0, None), "0: there are no shared experts"),
    "expert_selection_fn": (("sigmoid",), '"sigmoid"'),
    "use_qk_norm": ((False, None), "false: q and k are not normalised"),
    "use_parallel_block": ((True, None), "true: attention and experts share one norm"),
    "use_gated_activation": ((True, None), "true: the experts are SwiGLU"),
    "quantization_config": ((None,), "absent: weights are bfloat16"),
}


def refuse(field: str, value: object, right: str) -> ConfigError:
    """The error that names a field, its value and what would be right."""
    return ConfigError(f"config: {field} is {json.dumps(value, default=str)}, must be {right}")


def integer(values: Mapping[str, Any], field: str, least: int) -> int:
    """The field as an integer of at least `least`; the kernel's integers have 32 bits."""
    value = values[field]
    right_type = isinstance(value, int) and not isinstance(value, bool)
    if not right_type or not least <= value < 1 << 31:
        raise refuse(field, value, f"an integer >= {least} (in int32)")
    return value


def number(values: Mapping[str, Any], field: str) -> float:
    """The field as a float that is finite in float32."""
    value = values[field]
    right_type = isinstance(value, int | float) and not isinstance(value, bool)
    if not right_type or not abs(value) < TOO_LARGE:  # an int of any size; NaN is not below
        raise refuse(field, value, "a finite number (in float32)")
    return float(value)


def positive(values: Mapping[str, Any], field: str) -> float:
    """The field as a float that is finite and above 0 in float32."""
    value = number(values, field)
    if value <= TOO_SMALL:
        raise refuse(field, values[field], "a number > 0 (in float32)")
    return value


def kinds(field: str, value: object, allowed: tuple[str, str], n_layers: int) -> tuple[str, ...]:
    """A list with one of two kinds per layer."""
    if not isinstance(value, list | tuple) or not all(kind in allowed for kind in value):
        raise refuse(field, value, f"a list of {allowed[0]!r} and {allowed[1]!r}")
    if len(value) != n_layers:
        raise ConfigError(
            f"config: {field} has {len(value)} entries, must have num_hidden_layers = {n_layers}"
        )
    return tuple(value)


def _layer_types(values: Mapping[str, Any], n_layers: int, n_prefix: int) -> tuple[str, ...]:
    """The explicit list, or the one that Cohere2MoeConfig derives from the two patterns."""
    if values["layer_types"] is not None:
        return kinds("layer_types", values["layer_types"], (FULL, SLIDING), n_layers)
    if n_prefix > n_layers:
        raise refuse("first_k_dense_replace", n_prefix, f"at most num_hidden_layers = {n_layers}")
    pattern = integer(values, "sliding_window_pattern", 1)
    prefix_pattern = integer(values, "prefix_dense_sliding_window_pattern", 1)

    def derived(count: int, period: int) -> tuple[str, ...]:
        return tuple(SLIDING if (i + 1) % period else FULL for i in range(count))

    # The prefix and the rest count their periods each from its own first layer.
    return derived(n_prefix, prefix_pattern) + derived(n_layers - n_prefix, pattern)


def _rope_theta(raw: Mapping[str, Any]) -> float:
    """The base, from `rope_parameters` (transformers 5) or `rope_theta`; any scaling is refused."""
    # transformers lets a rope_scaling dict win over rope_parameters.
    field = "rope_scaling" if raw.get("rope_scaling") else "rope_parameters"
    rope = raw.get(field) or {}
    if not isinstance(rope, Mapping):
        raise refuse(field, rope, "an object with rope_type and rope_theta")
    kind = rope.get("rope_type", rope.get("type", "default"))
    plain = kind == "default" and not any(isinstance(v, Mapping) for v in rope.values())
    factors = (rope.get("partial_rotary_factor"), raw.get("partial_rotary_factor"))
    if not plain or any(factor not in (None, 1, 1.0) for factor in factors):
        raise refuse(field, rope or factors[1], 'plain rotary positions ("rope_type": "default")')
    theta = rope.get("rope_theta", raw.get("rope_theta", CLASS_DEFAULTS["rope_theta"]))
    return positive({"rope_theta": theta}, "rope_theta")


def read(raw: Mapping[str, Any]) -> dict[str, Any]:
    """Values of every field of NorthConfig (and more), from a decoded config.json.

    Raises:
        ConfigError: a setting is malformed or not implemented.
    """
    if not isinstance(raw, Mapping):
        raise ConfigError(f"config: a {type(raw).__name__}, must be a JSON object")
    values = {**CLASS_DEFAULTS, **raw}
    for field, (allowed, right) in ONLY_IMPLEMENTED.items():
        value = values.get(field)
        # `1 == True` in Python: compare the types too.
        if not any(value == ok and type(value) is type(ok) for ok in allowed):
            raise refuse(field, value, right)
    if values["rms_norm_eps"] is None:
        raise refuse(
            "rms_norm_eps", None, "set: without it transformers builds a mean-centred LayerNorm"
        )
    if values["num_key_value_heads"] is None:
        values["num_key_value_heads"] = values["num_attention_heads"]
    n_layers = integer(values, "num_hidden_layers", 1)
    n_prefix = integer(values, "first_k_dense_replace", 0)
    values["layer_types"] = _layer_types(values, n_layers, n_prefix)
    if values["mlp_layer_types"] is None:
        values["mlp_layer_types"] = [DENSE if i < n_prefix else SPARSE for i in range(n_layers)]
    mlp_types = kinds("mlp_layer_types", values["mlp_layer_types"], (DENSE, SPARSE), n_layers)
    values["mlp_layer_types"] = mlp_types
    values["rope_theta"] = _rope_theta(raw)
    values["rms_norm_eps"] = positive(values, "rms_norm_eps")
    values["logit_scale"] = number(values, "logit_scale")
    if isinstance(values["eos_token_id"], list):
        values["eos_token_id"] = tuple(values["eos_token_id"])
    return values
