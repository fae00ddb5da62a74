"""Serving: an engine that many clients share, through OpenAI's HTTP interface.

    app = create_app(Service(Engine.load("nano")), Settings())

What it does not do: run a model (`mkref.engine`), or import a web framework before it is needed.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mkref.serve.app import create_app
    from mkref.serve.service import Service
    from mkref.serve.settings import Settings

__all__ = ["Service", "Settings", "create_app"]

_HOME = {
    "Service": "mkref.serve.service",
    "Settings": "mkref.serve.settings",
    "create_app": "mkref.serve.app",
}


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'mkref.serve' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOME[name]), name)
