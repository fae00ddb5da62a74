"""The config of the checkpoints that the tests of the weights write. No tests here."""

from __future__ import annotations

from mkref.config import NorthConfig

__all__ = ["CONFIG", "UP_2"]

CONFIG = NorthConfig.from_dict(
    {
        "vocab_size": 90, "hidden_size": 48, "num_hidden_layers": 3, "num_attention_heads": 4,
        "num_key_value_heads": 2, "head_dim": 32, "intermediate_size": 32, "num_experts": 5,
        "num_experts_per_tok": 2, "first_k_dense_replace": 1, "sliding_window": 8,
        "prefix_dense_intermediate_size": 64, "rms_norm_eps": 1e-6, "norm_topk_prob": False,
        "expert_selection_fn": "sigmoid", "eos_token_id": 1, "bos_token_id": 2, "logit_scale": 1.0,
    }
)  # fmt: skip
UP_2 = "model.layers.2.mlp.experts.2.up_proj.weight"
