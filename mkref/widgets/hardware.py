"""Memory bandwidths with their sources: the one place from which widgets and lessons take them.

Labels: *measured* (we ran it), *derived* (computed from stated inputs), *simulated* (a model of ours),
*quoted* (somebody else's statement: a data sheet, a publication).
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from mkref.errors import RequestError

__all__ = ["BANDWIDTHS", "LABELS", "Bandwidth", "bandwidth"]

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


def _read() -> dict[str, Bandwidth]:
    raw = json.loads(Path(__file__).with_suffix(".json").read_text(encoding="utf-8"))
    entries = [Bandwidth(**entry) for entry in raw["bandwidths"]]
    return {entry.key: entry for entry in sorted(entries, key=lambda entry: entry.tb_per_s)}


BANDWIDTHS: dict[str, Bandwidth] = _read()
"""All entries by key, slowest first."""


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
