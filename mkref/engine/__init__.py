"""The engine: a model on a machine, from prompt to text.

What it does not do: serve over a network, or draw traces.
"""

from __future__ import annotations

from mkref.engine.engine import Engine
from mkref.engine.request import Completion, Token

__all__ = ["Completion", "Engine", "Token"]
