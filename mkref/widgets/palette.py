"""How operations look: a colour, a pattern and a letter, so that nothing hangs on colour alone.

Colours are those of Okabe and Ito (2008), which stay apart for colour-blind readers; black ink
reads on all of them but blue. Operations that share a colour differ in pattern. The browser draws
from the same table (`as_json`).
"""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["GRID", "INK", "OUTLINE", "WAIT", "OpStyle", "as_json", "style_of"]

INK = "#1a1a1a"
GRID = "#d0d0d0"
OUTLINE = "#333333"
WAIT = "#8a8a8a"
"""Colour of the hatching that stands for waiting."""


@dataclass(frozen=True)
class OpStyle:
    """Fill colour, pattern name (`svg.PATTERNS`), one-letter label and its colour."""

    fill: str
    pattern: str
    letter: str
    ink: str = INK


_ORANGE, _SKY, _GREEN, _YELLOW = "#E69F00", "#56B4E9", "#009E73", "#F0E442"
_BLUE, _VERMILLION, _PURPLE, _GREY = "#0072B2", "#D55E00", "#CC79A7", "#C8C8C8"

_STYLES = {
    "EMBED": OpStyle(_GREY, "plain", "E"),
    "ROUTER": OpStyle(_YELLOW, "dots", "R"),
    "QKV": OpStyle(_BLUE, "plain", "Q", "#ffffff"),
    "ATTENTION": OpStyle(_ORANGE, "plain", "A"),
    "MERGE": OpStyle(_ORANGE, "cross", "M"),
    "GATE_UP": OpStyle(_GREEN, "plain", "G"),
    "O_PROJ": OpStyle(_SKY, "vertical", "O"),
    "DOWN": OpStyle(_PURPLE, "horizontal", "D"),
    "HEAD": OpStyle(_VERMILLION, "plain", "H"),
    "SAMPLE": OpStyle(_GREY, "dots", "S"),
}


def style_of(op: str) -> OpStyle:
    """The look of an operation; one that the table does not know is grey and hatched.

    >>> style_of("QKV").letter, style_of("SOMETHING").letter
    ('Q', 'S')
    """
    return _STYLES.get(op) or OpStyle(_GREY, "diagonal", op[:1] or "?")


def as_json(op: str) -> dict[str, str]:
    """The same for the browser."""
    style = style_of(op)
    return {
        "name": op, "fill": style.fill, "pattern": style.pattern,
        "letter": style.letter, "ink": style.ink,
    }  # fmt: skip
