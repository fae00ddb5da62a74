"""Geometry of a Cohere2Moe model, as its config.json states it.

`NorthConfig` keeps the fields under the names that config.json uses and checks them; what follows
from them it has from `Geometry`. `check_kernel_limits` refuses what the kernel cannot be built for.

What it does not do: read weights, know about packing, or run anything.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mkref import config_json
from mkref.config_json import (
    DENSE,
    FULL,
    SLIDING,
    SPARSE,
    integer,
    kinds,
    number,
    positive,
    refuse,
)
from mkref.errors import ConfigError
from mkref.geometry import Geometry

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["NORTH_MINI_CODE", "NorthConfig", "check_kernel_limits"]


@dataclass(frozen=True)
class NorthConfig(Geometry):
    """Geometry of one model; fields are named as in config.json.

    Attributes:
        prefix_dense_intermediate_size: width of dense layers; None means `intermediate_size`.
        prefix_dense_sliding_window_pattern: 1 makes every dense layer use rotary positions.
        layer_types: per layer, "full_attention" or "sliding_attention".
        mlp_layer_types: per layer, "dense" or "sparse".
        eos_token_id: one id, several, or None.

    Raises:
        ConfigError: a field has a value that cannot describe a model.

    >>> NORTH_MINI_CODE.group_size, NORTH_MINI_CODE.q_width, NORTH_MINI_CODE.uses_rope(4)
    (8, 4096, False)
    """

    vocab_size: int
    hidden_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    intermediate_size: int
    prefix_dense_intermediate_size: int | None
    num_experts: int
    num_experts_per_tok: int
    norm_topk_prob: bool
    sliding_window: int
    layer_types: tuple[str, ...]
    mlp_layer_types: tuple[str, ...]
    prefix_dense_sliding_window_pattern: int
    rms_norm_eps: float
    rope_theta: float
    logit_scale: float
    max_position_embeddings: int
    bos_token_id: int | None
    eos_token_id: int | tuple[int, ...] | None
    pad_token_id: int | None

    def __post_init__(self) -> None:
        own = {field.name: getattr(self, field.name) for field in fields(self)}
        for name in (
            "vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads",
            "num_key_value_heads", "head_dim", "intermediate_size", "num_experts",
            "num_experts_per_tok", "sliding_window", "prefix_dense_sliding_window_pattern",
            "max_position_embeddings",
        ):  # fmt: skip
            integer(own, name, 1)
        if self.prefix_dense_intermediate_size is not None:
            integer(own, "prefix_dense_intermediate_size", 1)
        if not isinstance(self.norm_topk_prob, bool):
            raise refuse("norm_topk_prob", self.norm_topk_prob, "true or false")
        positive(own, "rope_theta")
        positive(own, "rms_norm_eps")
        number(own, "logit_scale")
        kinds("layer_types", self.layer_types, (FULL, SLIDING), self.num_hidden_layers)
        kinds("mlp_layer_types", self.mlp_layer_types, (DENSE, SPARSE), self.num_hidden_layers)
        if self.num_attention_heads % self.num_key_value_heads:
            raise refuse(
                "num_key_value_heads",
                self.num_key_value_heads,
                f"a divisor of num_attention_heads = {self.num_attention_heads}",
            )
        if self.head_dim % 2:
            raise refuse("head_dim", self.head_dim, "even: rotary positions turn pairs")
        if self.num_experts_per_tok > self.num_experts:
            raise refuse(
                "num_experts_per_tok",
                self.num_experts_per_tok,
                f"at most num_experts = {self.num_experts}",
            )
        self._check_token_ids()

    def _check_token_ids(self) -> None:
        eos = self.eos_token_id if isinstance(self.eos_token_id, tuple) else (self.eos_token_id,)
        ids = [("bos_token_id", self.bos_token_id), ("pad_token_id", self.pad_token_id)]
        for name, value in ids + [("eos_token_id", token) for token in eos]:
            wrong_type = isinstance(value, bool) or not isinstance(value, int | None)
            if wrong_type or (value is not None and value < 0):
                raise refuse(name, value, "a token id >= 0 or null")

    @classmethod
    def from_dict(cls, raw: Mapping[str, Any]) -> NorthConfig:
        """Read the content of a config.json.

        Args:
            raw: the decoded JSON object; unknown keys are ignored, missing ones take the default
                of Cohere2MoeConfig.

        Raises:
            ConfigError: a setting is malformed or not implemented.
        """
        values = config_json.read(raw)
        return cls(**{field.name: values[field.name] for field in fields(cls)})

    @classmethod
    def load(cls, path: str | Path) -> NorthConfig:
        """Read a config.json, given itself or the folder that holds it.

        Raises:
            ConfigError: no such file, not JSON, or not a model that mkref implements.
        """
        file = Path(path)
        file = file / "config.json" if file.is_dir() else file
        try:
            raw = json.loads(file.read_text(encoding="utf-8"))
        except OSError as error:
            raise ConfigError(f"config: cannot read {file}: {error.strerror or error}") from error
        except (ValueError, RecursionError) as error:
            raise ConfigError(f"config: {file} is not JSON: {error}") from error
        try:
            return cls.from_dict(raw)
        except ConfigError as error:
            raise ConfigError(f"{error} (in {file})") from error

    def to_dict(self) -> dict[str, Any]:
        """Content of a config.json that transformers turns into the same model."""
        out: dict[str, Any] = {
            "architectures": ["Cohere2MoeForCausalLM"],
            "model_type": "cohere2_moe",
            "dtype": "bfloat16",
            "hidden_act": "silu",
            "attention_bias": False,
            "tie_word_embeddings": True,
            "num_shared_experts": 0,
            "expert_selection_fn": "sigmoid",
        }
        for field in fields(self):
            value = getattr(self, field.name)
            out[field.name] = list(value) if isinstance(value, tuple) else value
        # Both spellings: transformers 5 reads rope_parameters, others read rope_theta.
        out["rope_parameters"] = {"rope_type": "default", "rope_theta": self.rope_theta}
        return out


def check_kernel_limits(config: NorthConfig) -> None:
    """Refuse a geometry that the kernel cannot be built for.

    Raises:
        ConfigError: names the field, its value and the limit.
    """
    widths = {"hidden_size": config.hidden_size}
    if config.n_sparse_layers:
        widths["intermediate_size"] = config.intermediate_size
    if config.n_dense_layers:
        dense = config.prefix_dense_intermediate_size
        field = "intermediate_size" if dense is None else "prefix_dense_intermediate_size"
        widths[field] = config.intermediate_size if dense is None else dense
    for field, width in widths.items():
        if width % 16:
            raise refuse(field, width, "a multiple of 16: the kernel works in 16 x 16 tiles")
    if config.head_dim not in (32, 64, 128):
        raise refuse("head_dim", config.head_dim, "32, 64 or 128")
    if config.group_size > 8:
        raise refuse(
            "num_key_value_heads",
            config.num_key_value_heads,
            f"at least {-(-config.num_attention_heads // 8)}: at most 8 query heads share one",
        )
    if config.num_experts > 128:
        raise refuse("num_experts", config.num_experts, "at most 128")
    if config.num_experts_per_tok > 8:
        raise refuse("num_experts_per_tok", config.num_experts_per_tok, "at most 8")


NORTH_MINI_CODE = NorthConfig(
    vocab_size=262144,
    hidden_size=2048,
    num_hidden_layers=49,
    num_attention_heads=32,
    num_key_value_heads=4,
    head_dim=128,
    intermediate_size=768,
    prefix_dense_intermediate_size=3072,
    num_experts=128,
    num_experts_per_tok=8,
    norm_topk_prob=False,
    sliding_window=4096,
    layer_types=tuple(SLIDING if i % 4 else FULL for i in range(49)),
    mlp_layer_types=(DENSE,) + (SPARSE,) * 48,
    prefix_dense_sliding_window_pattern=1,
    rms_norm_eps=1e-6,
    rope_theta=50000.0,
    logit_scale=1.0,
    max_position_embeddings=500000,
    bos_token_id=5,
    eos_token_id=255001,
    pad_token_id=0,
)
