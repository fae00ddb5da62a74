"""The static form of every widget: a picture, one sentence that says the same, and a table.

It shows wherever notebooks are read: JupyterLab without a kernel (also in a notebook that is not
yet trusted), code hosts, PDF. The picture travels as an image, because pages that clean HTML remove
inline SVG, and because two inline pictures would share the names of their patterns.
"""

from __future__ import annotations

from base64 import b64encode
from dataclasses import dataclass
from html import escape
from typing import Any

from mkref.trace.summary import aligned

__all__ = ["Figure", "Table"]


@dataclass(frozen=True)
class Table:
    """A data table: column heads, rows of ready texts; the first column names the row."""

    head: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]

    def html(self) -> str:
        """An HTML table with header cells for columns and rows."""
        head = "".join(f'<th scope="col">{escape(cell)}</th>' for cell in self.head)
        body = "".join(
            f'<tr><th scope="row">{escape(row[0])}</th>'
            + "".join(f"<td>{escape(cell)}</td>" for cell in row[1:])
            + "</tr>"
            for row in self.rows
        )
        return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"

    def text(self) -> str:
        """The same in columns of plain text."""
        return aligned([self.head, *self.rows])


@dataclass(frozen=True)
class Figure:
    """A picture that can be read in three ways.

    Attributes:
        svg: the SVG document.
        summary: one sentence, which is also the picture's alternative text.
        table: the numbers behind it.
        fits: the picture becomes no wider than its place. A notebook's page sees to that by itself
            in outputs, but not in widgets.
    """

    svg: str
    summary: str
    table: Table
    fits: bool = False

    def html(self) -> str:
        """Picture, sentence, and the table folded away."""
        image = b64encode(self.svg.encode()).decode()
        style = ' style="max-width:100%"' if self.fits else ""
        return (
            f'<img alt="{escape(self.summary)}" src="data:image/svg+xml;base64,{image}"{style}>'
            f"<p>{escape(self.summary)}</p>"
            f"<details><summary>The same as a table</summary>{self.table.html()}</details>"
        )

    def text(self) -> str:
        """Sentence and table."""
        return f"{self.summary}\n\n{self.table.text()}"

    def bundle(self) -> dict[str, str]:
        """What a notebook stores: HTML, and plain text for readers without it."""
        return {"text/html": self.html(), "text/plain": self.text()}

    def _repr_mimebundle_(self, **_: Any) -> dict[str, str]:
        return self.bundle()

    def __repr__(self) -> str:
        return self.text()
