"""Compiled kernels on disk, keyed by content. Safe for several processes at once."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable
from pathlib import Path

__all__ = ["cache_dir", "cached"]


def cache_dir() -> Path:
    """`$MKREF_CACHE`, else `$XDG_CACHE_HOME/mkref`, else `~/.cache/mkref`."""
    if explicit := os.environ.get("MKREF_CACHE"):
        return Path(explicit)
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "mkref"


def cached(name: str, make: Callable[[], bytes]) -> Path:
    """The file `name` of the cache; `make` provides its bytes if it is not there.

    The name must contain a hash of everything that the bytes depend on. The file appears by an
    atomic rename, so nobody ever reads half of it.
    """
    path = cache_dir() / name
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        data = make()
        with tempfile.NamedTemporaryFile(dir=path.parent, delete=False) as file:
            file.write(data)
        os.replace(file.name, path)
    return path
