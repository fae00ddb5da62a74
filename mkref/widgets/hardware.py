"""Speeds of hardware with their sources: the one place from which widgets and lessons take them.

Labels: *measured* (we ran it), *derived* (computed from stated inputs), *simulated* (by a model of
ours), *quoted* (somebody else's statement: a data sheet, a publication).
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from mkref.errors import RequestError

__all__ = ["BANDWIDTHS", "LABELS", "TENSOR_CORES", "Bandwidth", "TensorCores", "bandwidth"]

LABELS = ("measured", "derived", "simulated", "quoted")


@dataclass(frozen=True)
class Bandwidth:
    """Bytes per second that a memory can deliver, and how we know."""

    key: str
    name: str
    tb_per_s: float
    label: str
    source: str

    def __post_init__(self) -> None:
        if not self.tb_per_s > 0:
            raise RequestError(f"bandwidth: {self.tb_per_s} TB/s of {self.name}; give more than 0")
        if self.label not in LABELS:
            raise RequestError(f"bandwidth: label {self.label!r}; give one of {', '.join(LABELS)}")

    @property
    def bytes_per_s(self) -> float:
        """The same in bytes per second."""
        return self.tb_per_s * 1e12


@dataclass(frozen=True)
class TensorCores:
    """Dense bfloat16 arithmetic that a GPU can do, and how we know."""

    key: str
    tflop_per_s: float
    label: str
    source: str


_FILE = json.loads(Path(__file__).with_suffix(".json").read_text(encoding="utf-8"))
BANDWIDTHS: dict[str, Bandwidth] = {
    entry["key"]: Bandwidth(**entry)
    for entry in sorted(_FILE["bandwidths"], key=lambda entry: entry["tb_per_s"])
}
"""All bandwidths by key, slowest first."""
TENSOR_CORES: dict[str, TensorCores] = {
    entry["key"]: TensorCores(**entry) for entry in _FILE["tensor_cores"]
}
"""Arithmetic by key of a GPU."""


def bandwidth(key: str) -> Bandwidth:
    """One entry.

    Raises:
        RequestError: no such key.

    >>> bandwidth("h100").tb_per_s
    3.35
    """
    if key not in BANDWIDTHS:
        raise RequestError(f"bandwidth: no entry {key!r}; there are {', '.join(BANDWIDTHS)}")
    return BANDWIDTHS[key]
