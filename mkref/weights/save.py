"""Writing a checkpoint folder that transformers loads unchanged.

Tensors are taken from a mapping one at a time, so a model that exists only in packed form
(`PackedWeights` is such a mapping) is written without a second copy of it in memory: at most one
shard is held.

What it does not do: write a tokenizer or generation settings.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

from safetensors.torch import save_file

from mkref.errors import CheckpointError
from mkref.weights.layout import PackedLayout

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor

    from mkref.config import NorthConfig

__all__ = ["INDEX", "save_checkpoint"]

INDEX = "model.safetensors.index.json"
SHARD_BYTES = 5 * 10**9


def save_checkpoint(
    path: str | Path,
    config: NorthConfig,
    tensors: Mapping[str, Tensor],
    *,
    shard_bytes: int = SHARD_BYTES,
) -> None:
    """Write config.json and the tensors, in one file or in shards with an index.

    Args:
        path: the folder, made if need be; a checkpoint that is already there is replaced.
        config: geometry.
        tensors: per-expert Hugging Face name -> tensor, of one type.
        shard_bytes: a new shard is begun before a shard grows beyond this.

    Raises:
        CheckpointError: a tensor is missing, misshapen or of another type than the others.
    """
    folder = Path(path)
    folder.mkdir(parents=True, exist_ok=True)
    shards: list[Path] = []
    held: dict[str, Tensor] = {}
    size = total = 0
    where: dict[str, int] = {}
    dtype = None

    def flush() -> None:
        nonlocal size
        shards.append(folder / f"model-{len(shards) + 1:05}.part")
        save_file(held, shards[-1], metadata={"format": "pt"})
        held.clear()
        size = 0

    for place in PackedLayout(config).placements():
        if place.name not in tensors:
            raise CheckpointError(f"checkpoint: tensor {place.name} is missing")
        tensor = tensors[place.name].detach().cpu().contiguous()
        if tuple(tensor.shape) != place.shape:
            raise CheckpointError(
                f"checkpoint: tensor {place.name} has shape {list(tensor.shape)}, "
                f"must be {list(place.shape)}"
            )
        dtype = dtype or tensor.dtype
        if tensor.dtype != dtype:
            raise CheckpointError(
                f"checkpoint: tensor {place.name} is {tensor.dtype}, must be {dtype} like the rest"
            )
        if held and size + tensor.nbytes > shard_bytes:
            flush()
        held[place.name] = tensor
        where[place.name] = len(shards)
        size += tensor.nbytes
        total += tensor.nbytes
    flush()

    for old in (folder / INDEX, *folder.glob("model*.safetensors")):
        old.unlink(missing_ok=True)  # shards or an index of before would be read too
    if len(shards) == 1:
        shards[0].rename(folder / "model.safetensors")
    else:
        names = [f"model-{i + 1:05}-of-{len(shards):05}.safetensors" for i in range(len(shards))]
        for shard, name in zip(shards, names, strict=True):
            shard.rename(folder / name)
        weight_map = {name: names[shard] for name, shard in where.items()}
        index = {"metadata": {"total_size": total}, "weight_map": weight_map}
        (folder / INDEX).write_text(json.dumps(index, indent=1) + "\n", encoding="utf-8")
    raw = {**config.to_dict(), "dtype": str(dtype).removeprefix("torch.")}
    (folder / "config.json").write_text(json.dumps(raw, indent=1) + "\n", encoding="utf-8")
