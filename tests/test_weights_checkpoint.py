"""Checkpoints: both ways with transformers, sharded or not, and one clear error for each defect."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, Cohere2MoeConfig, Cohere2MoeForCausalLM

from mkref.errors import CheckpointError, ConfigError
from mkref.reference.model import Reference
from mkref.weights.checkpoint import Checkpoint, load_checkpoint, save_checkpoint
from mkref.weights.layout import PackedLayout
from mkref.weights.packed import PackedWeights
from mkref.weights.synthetic import synthetic_weights
from tests.checkpoints import CONFIG, UP_2

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from mkref.weights.layout import Words

TOKENS = torch.arange(3, 23)
NORM = "model.norm.weight"
EMBEDDING = "model.embed_tokens.weight"


@pytest.fixture(scope="module")
def weights() -> PackedWeights:
    """Synthetic weights of CONFIG."""
    return synthetic_weights(CONFIG, seed=3)


@pytest.fixture
def folder(tmp_path: Path, weights: PackedWeights) -> Path:
    """A good checkpoint of them in one file."""
    save_checkpoint(tmp_path / "checkpoint", CONFIG, weights)
    return tmp_path / "checkpoint"


def equal(a: PackedWeights, b: PackedWeights) -> bool:
    """Bit equality of tiles and gammas."""
    return all(map(np.array_equal, a.words(), b.words()))


def edit(folder: Path, change: Callable[[dict[str, Tensor]], object]) -> None:
    """Rewrite model.safetensors after a change to its tensors."""
    file = folder / "model.safetensors"
    tensors = load_file(file)
    change(tensors)
    save_file(tensors, file, metadata={"format": "pt"})


# Both ways with transformers


def test_transformers_loads_what_we_save(folder: Path, weights: PackedWeights) -> None:
    """No missing or unexpected tensors, and the float32 logits of our reference."""
    model, info = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, output_loading_info=True
    )
    assert isinstance(model, Cohere2MoeForCausalLM)
    assert {key: list(value) for key, value in info.items() if value} == {}
    with torch.no_grad():
        want = model(TOKENS[None]).logits[0]
    assert (Reference(CONFIG, weights)(TOKENS) - want).abs().max() < 1e-5
    assert AutoModelForCausalLM.from_pretrained(folder).dtype == torch.bfloat16


@pytest.mark.parametrize("shard", ["50GB", "20KB"])
def test_we_load_what_transformers_saves(tmp_path: Path, shard: str) -> None:
    """One file or many: every tensor bit by bit, and equal logits."""
    torch.manual_seed(1)
    hf_config = Cohere2MoeConfig(**CONFIG.to_dict())
    model = Cohere2MoeForCausalLM._from_config(hf_config, dtype=torch.bfloat16).eval()
    model.save_pretrained(tmp_path, max_shard_size=shard)
    assert (tmp_path / "model.safetensors.index.json").exists() == (shard == "20KB")
    packed = load_checkpoint(tmp_path)
    assert packed.config == CONFIG
    state = model.state_dict()
    for layer in (1, 2):
        fused = state[f"model.layers.{layer}.mlp.experts.gate_up_proj"]
        for e in range(5):
            prefix = f"model.layers.{layer}.mlp.experts.{e}."
            pair = [packed[prefix + "gate_proj.weight"], packed[prefix + "up_proj.weight"]]
            assert torch.equal(torch.cat(pair), fused[e])
    for name in set(packed) & set(state):
        assert torch.equal(packed[name], state[name]), name
    wide = Cohere2MoeForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    with torch.no_grad():
        want = wide(TOKENS[None]).logits[0]
    assert (Reference(CONFIG, packed)(TOKENS) - want).abs().max() < 1e-5


def test_fused_experts_are_accepted(folder: Path, weights: PackedWeights) -> None:
    """Per layer, experts may be one tensor [E, 2I, H] (gate rows first) and one [E, H, I]."""

    def fuse(tensors: dict[str, Tensor]) -> None:
        prefix = "model.layers.1.mlp.experts."
        get = lambda e, kind: tensors.pop(f"{prefix}{e}.{kind}_proj.weight")  # noqa: E731
        up = [torch.cat([get(e, "gate"), get(e, "up")]) for e in range(5)]
        tensors[prefix + "gate_up_proj"] = torch.stack(up)
        tensors[prefix + "down_proj"] = torch.stack([get(e, "down") for e in range(5)])

    edit(folder, fuse)
    assert equal(weights, load_checkpoint(folder))
    edit(
        folder, lambda t: t.update({"model.layers.1.mlp.experts.down_proj": torch.ones(5, 48, 16)})
    )
    with pytest.raises(CheckpointError, match=r"experts\.down_proj has shape \[5, 48, 16\]"):
        load_checkpoint(folder)


# Round trips and streaming


def test_round_trip_sharded_and_not(tmp_path: Path, weights: PackedWeights) -> None:
    """Saved and loaded bit by bit; saving again replaces a checkpoint of another shape."""
    for shard_bytes in (20_000, 10**9, 40_000):
        save_checkpoint(tmp_path, CONFIG, weights, shard_bytes=shard_bytes)
        files = sorted(file.name for file in tmp_path.glob("*.safetensors*"))
        if shard_bytes == 10**9:
            assert files == ["model.safetensors"]
        else:
            assert files[-1] == "model.safetensors.index.json"
            assert all(f.stat().st_size < 44_000 for f in tmp_path.glob("*.safetensors"))
        assert equal(weights, load_checkpoint(tmp_path))


def test_shards_without_index_and_worker_files(folder: Path, weights: PackedWeights) -> None:
    """`worker-*` and `model-*` files are found by their names when there is no index."""
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    names = sorted(tensors)
    for number, part in enumerate((names[:30], names[30:])):
        kind = ("worker", "model")[number]
        save_file({n: tensors[n] for n in part}, folder / f"{kind}-{number}.safetensors")
    assert equal(weights, load_checkpoint(folder))


def test_stream_writes_each_tile_once(folder: Path, weights: PackedWeights) -> None:
    """The writer sees ascending regions that cover the array; gate and up come together."""
    tiles = np.full((PackedLayout(CONFIG).total_tiles, 256), 0xDEAD, dtype=np.uint16)
    position = 0

    def write(tile: int, part: Words) -> None:
        nonlocal position
        assert tile == position
        tiles[tile : tile + len(part)] = part
        position += len(part)

    gammas = Checkpoint(folder).stream(write)
    assert position == len(tiles)
    assert np.array_equal(weights.words()[0], tiles)
    assert np.array_equal(weights.words()[1], gammas)
    assert equal(weights, PackedWeights.from_words(CONFIG, tiles, gammas))


def test_cast_rounds_other_types(folder: Path, weights: PackedWeights) -> None:
    """float32 is refused by name, and rounded to bfloat16 if asked."""
    edit(folder, lambda t: t.update({n: v.float() * 1.0005 for n, v in t.items()}))
    with pytest.raises(CheckpointError, match=r"tensor .* is F32, must be BF16 \(cast=True"):
        load_checkpoint(folder)
    packed = load_checkpoint(folder, cast=True)
    want = (weights[UP_2].float() * 1.0005).to(torch.bfloat16)
    assert torch.equal(want, packed[UP_2])


def test_surplus_that_changes_nothing_is_ignored(folder: Path, weights: PackedWeights) -> None:
    """An equal LM head, zero biases and rotary buffers; each is an error when it says otherwise."""
    zero = torch.zeros(128, dtype=torch.bfloat16)
    bias, head = "model.layers.0.self_attn.q_proj.bias", "lm_head.weight"
    edit(folder, lambda t: t.update({head: t[EMBEDDING].clone(), bias: zero}))
    edit(folder, lambda t: t.update({"model.rotary_emb.inv_freq": torch.ones(16)}))
    assert equal(weights, load_checkpoint(folder))
    edit(folder, lambda t: t.update({bias: zero + 1}))
    with pytest.raises(CheckpointError, match="tensor model.layers.0.self_attn.q_proj.bias is no"):
        load_checkpoint(folder)
    edit(folder, lambda t: t.update({bias: zero, head: -t[EMBEDDING]}))
    with pytest.raises(CheckpointError, match="tensor lm_head.weight is no part of the model"):
        load_checkpoint(folder)


# Defects


def drop(name: str) -> Callable[[dict[str, Tensor]], object]:
    """A change that removes a tensor."""
    return lambda tensors: tensors.pop(name)


def put(name: str, tensor: Tensor) -> Callable[[dict[str, Tensor]], object]:
    """A change that sets a tensor."""
    return lambda tensors: tensors.update({name: tensor})


def poison(name: str, at: tuple[int, ...], value: float) -> Callable[[dict[str, Tensor]], object]:
    """A change of one value."""
    return lambda tensors: tensors[name].__setitem__(at, value)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (drop(NORM), r"tensor model\.norm\.weight is missing, must be \[48\]"),
        (
            drop(UP_2),
            r"2\.mlp\.experts\.2\.up_proj\.weight is missing, must be \[32, 48\]",
        ),
        (put("model.layers.3.input_layernorm.weight", torch.ones(48)), "tensor model.layers.3.*no"),
        (
            put(NORM, torch.ones(47).bfloat16()),
            r"norm\.weight has shape \[47\], must be \[48",
        ),
        (
            put(EMBEDDING, torch.ones(48, 90).bfloat16()),
            r"embed_tokens\.weight has shape \[48, 90\], must be \[90, 48\]",
        ),
        (put(NORM, torch.ones(48).half()), r"model\.norm\.weight is F16, must be BF16 \(cast=True"),
        (
            put(NORM, torch.ones(48, dtype=torch.int8)),
            r"norm\.weight is I8, must be BF16 \(in",
        ),
        (poison(NORM, (7,), float("nan")), r"model\.norm\.weight is nan at \[7\], must be finite"),
        (poison(UP_2, (31, 5), float("-inf")), r"up_proj\.weight is -inf at \[31, 5\], must be"),
        (poison(EMBEDDING, (89, 47), float("inf")), r"weight is inf at \[89, 47\], must be finite"),
    ],
)
def test_one_error_names_the_tensor(
    folder: Path, change: Callable[[dict[str, Tensor]], object], message: str
) -> None:
    """A missing, surplus, misshapen, mistyped or non-finite tensor, by load and by stream."""
    edit(folder, change)
    for read in (load_checkpoint, lambda path: Checkpoint(path).stream(lambda tile, part: None)):
        with pytest.raises(CheckpointError, match="^checkpoint: .*" + message) as caught:
            read(folder)
        assert "\n" not in str(caught.value)


def test_further_problems_are_counted(folder: Path) -> None:
    """One line, the first problem, and how many more there are."""
    edit(folder, lambda t: [t.pop(name) for name in list(t) if "experts.4." in name])
    with pytest.raises(CheckpointError, match=r"experts\.4\.gate.* is missing.*\(and 5 more\)"):
        load_checkpoint(folder)


def test_values_that_overflow_bfloat16_are_not_finite(folder: Path) -> None:
    """A cast that makes an infinity is an error too."""
    edit(folder, put(NORM, torch.full((48,), 3.4e38)))
    with pytest.raises(CheckpointError, match=r"model\.norm\.weight is inf at \[0\]"):
        load_checkpoint(folder, cast=True)


def test_damaged_files_are_named(folder: Path, tmp_path: Path) -> None:
    """Missing folder, no weights, truncated or empty file, damaged config."""
    with pytest.raises(CheckpointError, match=r"no folder .*nowhere"):
        load_checkpoint(tmp_path / "nowhere")
    with pytest.raises(CheckpointError, match=r"no folder .*model\.safetensors"):
        load_checkpoint(folder / "model.safetensors")
    file = folder / "model.safetensors"
    data = file.read_bytes()
    for bad in (data[:-1], data[:100], data[:4], b""):
        file.write_bytes(bad)
        with pytest.raises(CheckpointError, match=r"cannot read .*model\.safetensors: "):
            load_checkpoint(folder)
    file.unlink()
    with pytest.raises(CheckpointError, match=r"no model\.safetensors or .* in .*checkpoint"):
        load_checkpoint(folder)
    (folder / "config.json").write_text("{")
    with pytest.raises(ConfigError, match=r"config\.json is not JSON"):
        load_checkpoint(folder)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "cannot read .*index.json"),
        ("[]", 'index.json has no "weight_map"'),
        ('{"weight_map": [1]}', 'index.json has no "weight_map"'),
        ('{"weight_map": {"a": 1}}', 'index.json has no "weight_map"'),
        ('{"weight_map": {"a": "model-9.safetensors"}}', "cannot read .*model-9.safetensors"),
    ],
)
def test_damaged_index_is_named(folder: Path, content: str, message: str) -> None:
    """An index that is not JSON, not an index, or names a file that is not there."""
    (folder / "model.safetensors.index.json").write_text(content)
    with pytest.raises(CheckpointError, match="^checkpoint: .*" + message):
        load_checkpoint(folder)


def test_a_tensor_stored_twice_is_an_error(folder: Path) -> None:
    """Two files with one name: which of them would be right?"""
    save_file({NORM: torch.ones(48).bfloat16()}, folder / "worker-0.safetensors")
    with pytest.raises(CheckpointError, match=r"model\.norm\.weight is stored twice.*worker-0"):
        load_checkpoint(folder)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({NORM: None}, r"model\.norm\.weight is missing"),
        ({NORM: torch.ones(2, 24).bfloat16()}, r"norm\.weight has shape \[2, 24\], must be \[48\]"),
        ({NORM: torch.ones(48)}, r"model\.norm\.weight is torch\.float32, must be torch\.bfloat16"),
    ],
)
def test_save_refuses_what_would_not_load(
    tmp_path: Path, weights: PackedWeights, change: dict[str, Any], message: str
) -> None:
    """A missing, misshapen or mixed-type tensor is refused before config.json is written."""
    tensors = {**weights, **change}
    tensors = {name: tensor for name, tensor in tensors.items() if tensor is not None}
    with pytest.raises(CheckpointError, match="^checkpoint: tensor .*" + message):
        save_checkpoint(tmp_path, CONFIG, tensors)
    assert not (tmp_path / "config.json").exists()


def test_saved_type_is_in_the_config(tmp_path: Path, weights: PackedWeights) -> None:
    """float32 tensors are saved as they are, and config.json says so."""
    save_checkpoint(tmp_path, CONFIG, {name: t.float() for name, t in weights.items()})
    assert json.loads((tmp_path / "config.json").read_text())["dtype"] == "float32"
    assert AutoModelForCausalLM.from_pretrained(tmp_path).dtype == torch.float32
