"""Between the training form of `nano` and the files that are shipped.

What it does: the tensors of a real `Cohere2MoeForCausalLM` checkpoint (one tensor an expert matrix,
bfloat16, tied head not stored) from a `NanoModel` and back, and the config.json that transformers
5.17 and 5.24 load unchanged.

What it does not do: train, or decide what is good enough to ship.

Source: tensor names as transformers saves them; see also `mkref.weights`.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import torch
from nano_model import Attention, Experts, Layer, NanoModel, Shape
from safetensors.torch import load_file, save
from torch import Tensor

__all__ = ["config_json", "load_model", "save_model", "to_tensors", "weights_sha256"]


def to_tensors(model: NanoModel) -> dict[str, Tensor]:
    """Checkpoint tensors, bfloat16 on the CPU, each with its own memory."""
    return {
        name: part.detach().to("cpu", torch.bfloat16).contiguous().clone()
        for part, name in _named_parts(model)
    }


def save_model(model: NanoModel, folder: Path) -> str:
    """Writes model.safetensors and config.json; returns the sha256 of the former."""
    folder.mkdir(parents=True, exist_ok=True)
    data = save(to_tensors(model), metadata={"format": "pt"})
    (folder / "model.safetensors").write_bytes(data)
    text = json.dumps(config_json(model.shape), indent=2) + "\n"
    (folder / "config.json").write_text(text, encoding="utf-8")
    return hashlib.sha256(data).hexdigest()


def load_model(folder: Path) -> NanoModel:
    """The shipped (rounded) weights in the training form, float32, evaluation mode."""
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    model = NanoModel(Shape(**{name: config[name] for name in Shape.__dataclass_fields__}))
    tensors = load_file(str(folder / "model.safetensors"))
    with torch.no_grad():
        for target, name in _named_parts(model):
            target.copy_(tensors.pop(name).float())
    if tensors:
        raise ValueError(f"{folder}/model.safetensors: unexpected tensor {next(iter(tensors))}")
    return model.eval()


def weights_sha256(model: NanoModel) -> str:
    """A hash of the float32 parameters, for comparing two training runs bit by bit."""
    digest = hashlib.sha256()
    for name, p in sorted(model.named_parameters()):
        digest.update(name.encode())
        digest.update(p.detach().cpu().contiguous().numpy().tobytes())
    return digest.hexdigest()


def config_json(shape: Shape) -> dict[str, Any]:
    """The config of the checkpoint; every field that the real model sets is set here too."""
    layers = range(shape.num_hidden_layers)
    return {
        "architectures": ["Cohere2MoeForCausalLM"],
        "model_type": "cohere2_moe",
        "dtype": "bfloat16",
        "vocab_size": shape.vocab_size,
        "hidden_size": shape.hidden_size,
        "num_hidden_layers": shape.num_hidden_layers,
        "num_attention_heads": shape.num_attention_heads,
        "num_key_value_heads": 1,
        "head_dim": shape.head_dim,
        "intermediate_size": shape.intermediate_size,
        "prefix_dense_intermediate_size": shape.prefix_dense_intermediate_size,
        "prefix_dense_sliding_window_pattern": 1,
        "num_experts": shape.num_experts,
        "num_experts_per_tok": shape.num_experts_per_tok,
        "num_shared_experts": 0,
        "shared_expert_combination_strategy": "average",
        "expert_selection_fn": "sigmoid",
        "norm_topk_prob": False,
        "hidden_act": "silu",
        "layer_types": [
            "sliding_attention" if shape.is_sliding(n) else "full_attention" for n in layers
        ],
        "mlp_layer_types": ["dense" if shape.is_dense(n) else "sparse" for n in layers],
        "sliding_window": shape.sliding_window,
        "sliding_window_pattern": 4,
        "rms_norm_eps": shape.rms_norm_eps,
        "layer_norm_eps": 1e-5,
        "rope_theta": shape.rope_theta,
        "rope_parameters": {"rope_type": "default", "rope_theta": shape.rope_theta},
        "attention_bias": False,
        "attention_dropout": 0.0,
        "logit_scale": 1.0,
        "max_position_embeddings": shape.max_position_embeddings,
        "initializer_range": 0.02,
        "use_cache": True,
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }


def _expert_parts(experts: Experts) -> list[tuple[Tensor, Tensor, Tensor]]:
    """(gate [I, H], up [I, H], down [H, I]) of every expert, views of the wide matrices."""
    gates, ups = experts.gate_up.weight.chunk(2)
    return list(
        zip(
            gates.split(experts.width),
            ups.split(experts.width),
            experts.down.weight.split(experts.width, dim=1),
            strict=True,
        )
    )


def _named_parts(model: NanoModel) -> list[tuple[Tensor, str]]:
    """Every slice of a parameter that is one tensor of the checkpoint, with that tensor's name."""
    shape = model.shape
    pairs: list[tuple[Tensor, str]] = [
        (model.embedding, "model.embed_tokens.weight"),
        (model.norm.weight, "model.norm.weight"),
    ]
    for n, layer in enumerate(model.layers):
        assert isinstance(layer, Layer)
        assert isinstance(layer.attention, Attention)
        prefix = f"model.layers.{n}"
        width = shape.num_attention_heads * shape.head_dim
        q, k, v = layer.attention.qkv.weight.split([width, shape.head_dim, shape.head_dim])
        pairs.append((layer.norm.weight, f"{prefix}.input_layernorm.weight"))
        for name, part in (("q", q), ("k", k), ("v", v), ("o", layer.attention.o.weight)):
            pairs.append((part, f"{prefix}.self_attn.{name}_proj.weight"))
        if layer.experts.router is not None:
            pairs.append((layer.experts.router.weight, f"{prefix}.mlp.gate.weight"))
        for e, parts in enumerate(_expert_parts(layer.experts)):
            stem = f"{prefix}.mlp" if shape.is_dense(n) else f"{prefix}.mlp.experts.{e}"
            for part, name in zip(parts, ("gate", "up", "down"), strict=True):
                pairs.append((part, f"{stem}.{name}_proj.weight"))
    return pairs
