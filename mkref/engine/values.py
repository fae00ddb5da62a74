"""Values that a user gave: checked, and shown on one line.

What it does not do: know what a value is for.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

from mkref.errors import RequestError

__all__ = ["each", "listed", "show", "whole_number"]


def whole_number(name: str, value: Any, least: int, most: int, why: str = "") -> int:
    """`value` as an int, or the error that names it; `why` explains the upper limit."""
    try:
        number = operator.index(value)
    except TypeError:
        number = None
    if number is None or isinstance(value, bool) or not least <= number <= most:
        limits = f"a whole number from {least} to {most}"
        raise RequestError(f"{name}: {show(value)}; must be {limits}{f' ({why})' if why else ''}")
    return number


def show(value: Any) -> str:
    """A value on one line, not too long."""
    try:
        text = " ".join(repr(value).split())
    except ValueError:  # Python prints no int of more than 4300 digits
        return "a number of thousands of digits"
    return text if len(text) <= 60 else text[:57] + "..."


def listed(value: Any) -> list[Any] | None:
    """The values of a list, an array or whatever can be iterated; None for one value or a text."""
    if isinstance(value, str | bytes):
        return None
    try:
        return list(value)
    except TypeError:
        return None


def each(name: str, value: Any, n: int) -> Sequence[Any]:
    """One value per prompt, of one for all or of `n`."""
    values = listed(value)
    if values is None:
        return [value] * n
    if len(values) != n:
        raise RequestError(f"{name}: {len(values)} values for {n} prompts; give one or {n}")
    return values
