"""Reading a checkpoint folder: config.json and safetensors files, into the packed layout.

Files are memory-mapped and read tensor by tensor in layout order. Before the first byte of data is
read, the headers of all files are compared with the config, so a wrong checkpoint fails at once and
by name. Accepted are `model.safetensors`, the shards of `model.safetensors.index.json`, or any
`model-*.safetensors` and `worker-*.safetensors`; experts one by one (`experts.E.gate_proj.weight`)
or fused per layer (`experts.gate_up_proj`, gate rows first).

Ignored: rotary `inv_freq` buffers; biases that are all zero; an `lm_head.weight` that equals the
embedding. Any other surplus tensor is an error: it would change the result if it were used.

What it does not do: download, dequantise, or accept another type than bfloat16 unless told to.

Notation: E experts, I expert width, H hidden size, L layers.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from mkref.config import NorthConfig
from mkref.errors import CheckpointError
from mkref.weights.layout import TILE_WORDS, PackedLayout, Placement
from mkref.weights.packed import PackedWeights, pack_into, to_words
from mkref.weights.save import INDEX, save_checkpoint

if TYPE_CHECKING:
    from collections.abc import Callable

    from mkref.weights.layout import Words

__all__ = ["Checkpoint", "load_checkpoint", "save_checkpoint"]

PATTERNS = ("model.safetensors", "model-*.safetensors", "worker-*.safetensors")
CASTABLE = ("BF16", "F16", "F32", "F64")
EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"


@dataclass(frozen=True)
class _Source:
    """Where a tensor is stored: whole, or a part of a fused tensor."""

    stored: str
    expert: int | None = None
    rows: slice | None = None


class Checkpoint:
    """An opened checkpoint that fits its config.

    Args:
        path: the folder.
        config: geometry; None reads config.json from the folder.
        cast: round float16, float32 and float64 tensors to bfloat16 instead of refusing them.

    Raises:
        CheckpointError: a file is missing or damaged, or a tensor is missing, surplus, misshapen or
            of a wrong type; one line that names it.
        ConfigError: config.json describes a model that mkref does not implement.
    """

    def __init__(
        self, path: str | Path, config: NorthConfig | None = None, *, cast: bool = False
    ) -> None:
        self.folder = Path(path)
        if not self.folder.is_dir():
            raise CheckpointError(f"checkpoint: no folder {self.folder}")
        self.config = NorthConfig.load(self.folder) if config is None else config
        self.layout = PackedLayout(self.config)
        self.cast = cast
        self._files: dict[str, Any] = {}  # stored name -> open safetensors file
        for file in self._find_files():
            self._open(file)
        self._sources = self._match()

    def _find_files(self) -> list[Path]:
        index = self.folder / INDEX
        if not index.is_file():
            found = [file for pattern in PATTERNS for file in sorted(self.folder.glob(pattern))]
            if not found:
                raise CheckpointError(f"checkpoint: no {' or '.join(PATTERNS)} in {self.folder}")
            return found
        try:
            names = set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
            return [self.folder / name for name in sorted(names)]
        except (OSError, ValueError, RecursionError) as error:
            raise CheckpointError(f"checkpoint: cannot read {index}: {error}") from error
        except (AttributeError, KeyError, TypeError) as error:
            raise CheckpointError(
                f'checkpoint: {index} has no "weight_map" from tensors to files'
            ) from error

    def _open(self, file: Path) -> None:
        try:
            handle = safe_open(file, framework="pt")
            names = handle.keys()
        except (OSError, SafetensorError) as error:
            raise CheckpointError(f"checkpoint: cannot read {file}: {error}") from error
        for name in names:
            if name in self._files:
                raise CheckpointError(f"checkpoint: tensor {name} is stored twice, also in {file}")
            self._files[name] = handle

    def _match(self) -> dict[str, _Source]:
        """Find a source for every tensor of the layout and complain about the rest."""
        sources: dict[str, _Source] = {}
        problems: list[str] = []
        checked: set[str] = set()
        for place in self.layout.placements():
            source = self._locate(place)
            if source is None:
                problems.append(f"tensor {place.name} is missing, must be {list(place.shape)}")
                continue
            sources[place.name] = source
            if source.stored not in checked:
                checked.add(source.stored)
                problems += self._check_header(place, source)
        for name in self._files:
            if name not in checked and not self._ignorable(name):
                problems.append(f"tensor {name} is no part of the model in config.json")
        if problems:
            more = f" (and {len(problems) - 1} more)" if len(problems) > 1 else ""
            raise CheckpointError(f"checkpoint: {problems[0]}{more} (in {self.folder})")
        return sources

    def _locate(self, place: Placement) -> _Source | None:
        if place.name in self._files:
            return _Source(place.name)
        prefix, found, rest = place.name.partition(".experts.")
        if not found:
            return None
        expert, kind, _ = rest.split(".")
        fused = "down_proj" if kind == "down_proj" else "gate_up_proj"
        stored = f"{prefix}.experts.{fused}"
        if stored not in self._files:
            return None
        width = self.config.intermediate_size
        rows = {"gate_proj": slice(0, width), "up_proj": slice(width, 2 * width)}
        return _Source(stored, int(expert), rows.get(kind))

    def _check_header(self, place: Placement, source: _Source) -> list[str]:
        view = self._files[source.stored].get_slice(source.stored)
        shape = list(place.shape)
        if source.expert is not None:
            rows = place.rows if place.half is None else 2 * place.rows
            shape = [self.config.num_experts, rows, place.cols]
        if view.get_shape() != shape:
            return [f"tensor {source.stored} has shape {view.get_shape()}, must be {shape}"]
        kind = view.get_dtype()
        if kind == "BF16" or (self.cast and kind in CASTABLE):
            return []
        hint = " (cast=True rounds it)" if kind in CASTABLE else ""
        return [f"tensor {source.stored} is {kind}, must be BF16{hint}"]

    def _ignorable(self, name: str) -> bool:
        if name.endswith("rotary_emb.inv_freq"):
            return True
        if name.endswith(".bias"):
            return not self._files[name].get_tensor(name).any()
        if name == HEAD and EMBEDDING in self._files:
            return torch.equal(
                self._files[HEAD].get_tensor(HEAD), self._files[EMBEDDING].get_tensor(EMBEDDING)
            )
        return False

    def tensor(self, name: str) -> Tensor:
        """One tensor by its per-expert name, bfloat16 on the CPU (memory-mapped if it can be).

        Raises:
            CheckpointError: its data cannot be read.
            KeyError: the model has no tensor of that name.
        """
        source = self._sources[name]
        handle = self._files[source.stored]
        try:
            if source.expert is None:
                tensor = handle.get_tensor(source.stored)
            else:
                tensor = handle.get_slice(source.stored)[source.expert, source.rows or slice(None)]
        except (OSError, SafetensorError) as error:
            raise CheckpointError(f"checkpoint: cannot read tensor {name}: {error}") from error
        return tensor.to(torch.bfloat16)

    def _finite(self, place: Placement, tensor: Tensor) -> Tensor:
        good = tensor.isfinite()
        if not good.all():
            at = (~good).nonzero()[0].tolist()
            value = float(tensor[tuple(at)])
            raise CheckpointError(
                f"checkpoint: tensor {place.name} is {value} at {at}, must be finite "
                f"(in {self.folder})"
            )
        return tensor

    def load(self, device: str | torch.device = "cpu") -> PackedWeights:
        """Read everything into packed weights on a device; a matrix is packed where it ends up.

        Raises:
            CheckpointError: a tensor holds infinities or NaN, or cannot be read.
        """
        packed = PackedWeights.empty(self.config, device)
        for place in self.layout.placements():
            packed.put(place, self._finite(place, self.tensor(place.name).to(device)))
        return packed

    def stream(self, write: Callable[[int, Words], None]) -> Words:
        """Read everything, one region at a time, through a function that stores tiles.

        Args:
            write: called with the first tile of a region and its tiles, uint16 [n, 256], which are
                only valid during the call; each tile is written once, in ascending order.

        Returns:
            The gammas, uint16 [L + 1, H].

        Raises:
            CheckpointError: a tensor holds infinities or NaN, or cannot be read.
        """
        gammas = torch.empty(self.config.num_hidden_layers + 1, self.config.hidden_size)
        rows = gammas.to(torch.bfloat16)
        region = torch.empty(0, TILE_WORDS, dtype=torch.bfloat16)
        for place in self.layout.placements():
            tensor = self._finite(place, self.tensor(place.name))
            if place.gamma:
                rows[place.tile] = tensor
                continue
            if place.half != 1:  # up follows its gate and completes the same region
                region = torch.empty(place.n_tiles, TILE_WORDS, dtype=torch.bfloat16)
            pack_into(region, tensor, place.half)
            if place.half != 0:
                write(place.tile, to_words(region))
        return to_words(rows)


def load_checkpoint(
    path: str | Path, device: str | torch.device = "cpu", *, cast: bool = False
) -> PackedWeights:
    """Packed weights of a checkpoint folder; see `Checkpoint` for what is accepted and refused."""
    return Checkpoint(path, cast=cast).load(device)
