"""JSON files, compressed if their name ends in `.gz`.

What it does not do: know what is in them, or turn errors into ours; whoever asks knows what the
file was to be.
"""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

__all__ = ["read_json", "write_json"]


def write_json(path: str | Path, data: Any) -> Path:
    """Write it in one line; the same data give the same bytes."""
    path = Path(path)
    raw = json.dumps(data, separators=(",", ":"), sort_keys=True).encode()
    # mtime=0 and no file name: nothing of when and where.
    path.write_bytes(gzip.compress(raw, 9, mtime=0) if path.suffix == ".gz" else raw)
    return path


def read_json(path: str | Path) -> Any:
    """The content of a file.

    Raises:
        OSError: it cannot be read.
        EOFError: it ends within what is compressed.
        ValueError: it is no JSON, or not compressed although it is called so.
    """
    path = Path(path)
    raw = path.read_bytes()
    if path.suffix == ".gz":
        try:
            raw = gzip.decompress(raw)
        except gzip.BadGzipFile as error:  # an OSError, though the file can be read
            raise ValueError(str(error)) from error
    return json.loads(raw)
