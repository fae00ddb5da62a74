"""Compiled kernels on disk, keyed by content. Safe for several processes at once.

It compiles nothing: `mkref.machine.cuda` and `mkref.machine.compiler` do.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable
from pathlib import Path

from mkref.errors import MachineError

__all__ = ["cache_dir", "cached"]


def cache_dir() -> Path:
    """`$MKREF_CACHE`, else `$XDG_CACHE_HOME/mkref`, else `~/.cache/mkref`."""
    if explicit := os.environ.get("MKREF_CACHE"):
        return Path(explicit)
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "mkref"


def cached(name: str, make: Callable[[Path], None], folder: Path | None = None) -> Path:
    """The file `name` of the cache, made if it is not there.

    Args:
        name: contains a hash of everything that the file depends on.
        make: writes the file to the path that it is given; other files beside it are thrown away.
        folder: default `cache_dir()`.

    Returns:
        The file. It appears by an atomic rename: others see no file, or a whole one.

    Raises:
        MachineError: the folder cannot be written.
    """
    folder = folder or cache_dir()
    target = folder / name
    if target.exists():
        return target
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder, prefix=".build-") as scratch:
            product = Path(scratch) / "product"
            make(product)
            os.replace(product, target)
    except OSError as error:
        raise MachineError(f"cannot write the build cache {folder}: {error}") from error
    return target
