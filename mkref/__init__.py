"""mkref: a persistent decode kernel for North Mini Code, and everything around it.

Importing the package brings in nothing but the standard library; the names below are loaded when
they are first used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mkref.config import NORTH_MINI_CODE, NorthConfig
    from mkref.engine import Completion, Engine
    from mkref.errors import MkrefError

__all__ = [
    "NORTH_MINI_CODE", "Completion", "Engine", "MkrefError", "NorthConfig", "__version__",
]  # fmt: skip

__version__ = "0.1.0"

_HOME = {
    "Completion": "mkref.engine",
    "Engine": "mkref.engine",
    "NORTH_MINI_CODE": "mkref.config",
    "MkrefError": "mkref.errors",
    "NorthConfig": "mkref.config",
}


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'mkref' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOME[name]), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *_HOME])
