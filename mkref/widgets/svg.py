"""A small SVG writer: shapes, text and fill patterns, the same bytes for the same picture.

It sets a white background and its own font list, because the picture is shown as an image: neither
the page's style nor its dark theme reaches inside.
"""

from __future__ import annotations

from html import escape

__all__ = ["PATTERNS", "Svg", "number", "rect_path"]

FONT = "DejaVu Sans, Verdana, Helvetica, Arial, sans-serif"
PATTERNS: dict[str, str] = {
    "plain": "",
    "diagonal": "M-1 1l2-2M0 6l6-6M5 7l2-2",
    "horizontal": "M0 3h6",
    "vertical": "M3 0v6",
    "cross": "M0 3h6M3 0v6",
    "dots": "M1 1h2v2h-2z",
}
"""Strokes of each pattern on a 6 x 6 cell, as SVG path data; the browser uses the same."""


def number(value: float) -> str:
    """A coordinate with one decimal, without trailing zeros.

    >>> number(2.0), number(2.345), number(-0.01)
    ('2', '2.3', '0')
    """
    text = f"{value:.1f}".removesuffix(".0")
    return "0" if text == "-0" else text


def rect_path(x: float, y: float, width: float, height: float) -> str:
    """Path data of a rectangle: many of them make one element, which keeps the file small."""
    w, h = number(width), number(height)
    return f"M{number(x)} {number(y)}h{w}v{h}h-{w}z"


class Svg:
    """Collects elements; `render` returns the document."""

    def __init__(self, width: int, height: int, title: str) -> None:
        self.width, self.height, self.title = width, height, title
        self._patterns: dict[str, str] = {}
        self._body: list[str] = []

    def fill(self, color: str, pattern: str = "plain", stroke: str = "#00000055") -> str:
        """The value of a `fill` attribute for a colour with a pattern over it."""
        if pattern == "plain":
            return color
        key = f"{pattern}{color.strip('#')}"
        self._patterns[key] = (
            f'<pattern id="{key}" width="6" height="6" patternUnits="userSpaceOnUse">'
            f'<rect width="6" height="6" fill="{color}"/>'
            f'<path d="{PATTERNS[pattern]}" stroke="{stroke}" fill="none"/></pattern>'
        )
        return f"url(#{key})"

    def path(
        self,
        data: str,
        fill: str,
        *,
        stroke: str = "none",
        width: float = 0.5,
        dash: str = "",
        opacity: float = 1.0,
    ) -> None:
        """Path data in one style; `dash` is lengths of strokes and gaps."""
        more = f' stroke-dasharray="{dash}"' if dash else ""
        more += f' opacity="{opacity:g}"' if opacity != 1 else ""
        self._body.append(
            f'<path d="{data}" fill="{fill}" stroke="{stroke}" stroke-width="{width:g}"{more}/>'
        )

    def rect(
        self, x: float, y: float, width: float, height: float, fill: str, *, stroke: str = "none"
    ) -> None:
        """One rectangle."""
        self.path(rect_path(x, y, width, height), fill, stroke=stroke)

    def text(
        self,
        x: float,
        y: float,
        text: str,
        *,
        size: int = 12,
        anchor: str = "start",
        color: str = "#1a1a1a",
        bold: bool = False,
    ) -> None:
        """One line of text with its baseline at `y`; `anchor` is start, middle or end."""
        weight = ' font-weight="bold"' if bold else ""
        self._body.append(
            f'<text x="{number(x)}" y="{number(y)}" font-size="{size}" text-anchor="{anchor}" '
            f'fill="{color}"{weight}>{escape(text)}</text>'
        )

    def render(self) -> str:
        """The whole document."""
        defs = "".join(self._patterns[key] for key in sorted(self._patterns))
        return (
            f'<svg xmlns="http://www.w3.org/2000/svg" width="{self.width}" height="{self.height}" '
            f'viewBox="0 0 {self.width} {self.height}" role="img" font-family="{FONT}">'
            f"<title>{escape(self.title)}</title><defs>{defs}</defs>"
            f'<rect width="{self.width}" height="{self.height}" fill="#ffffff"/>'
            f"{''.join(self._body)}</svg>"
        )
