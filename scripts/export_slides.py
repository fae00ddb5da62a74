"""Slides from the notebooks' stored figures: one HTML file that needs no network: `make slides`.

    python scripts/export_slides.py                              build/slides.html
    python scripts/export_slides.py --lessons 02,05 --out a.html

One slide per figure: the lesson, the heading under which the figure stands, the picture, the
sentence with which the lesson goes on (or came to it), and the figure's own summary. A figure that
answers a prediction gives the answer away: let the room guess before the slide.

Keys: arrows, space, Home, End; a printer gets one slide per page.
"""

from __future__ import annotations

import argparse
import base64
import re
from dataclasses import dataclass
from html import escape, unescape
from pathlib import Path
from typing import Any

import nbformat

ROOT = Path(__file__).resolve().parent.parent
NOTEBOOKS = ROOT / "notebooks"
OUT = ROOT / "build" / "slides.html"
NO_SENTENCE = re.compile(r"\s*(#|\*?\(|\||<|[-\d]+\.? |```|\$\$|!\[|$)")
FIGURE = re.compile(r'<img alt="([^"]*)" src="data:image/svg\+xml;base64,([^"]+)"[^>]*>')
SENTENCE = re.compile(r"(?<=[.?!])\s+(?=[A-Z0-9\"*`(])")
LEADS_ON = re.compile(r"(Now|And) ")  # about what comes next, not about the figure
LEAST = 40
"""Characters of a key sentence; "Some, not most." takes the next one along."""

STYLE = """
* { box-sizing: border-box; }
body { margin: 0; background: #fff; color: #111; font-family: "DejaVu Sans", Verdana, sans-serif; }
section { min-height: 100vh; padding: 3vh 4vw; display: flex; flex-direction: column; gap: 1.6vh; }
.js section { display: none; height: 100vh; }
.js section.now { display: flex; }
h1 { margin: 0; font-size: 1.05rem; font-weight: normal; color: #444; }
h2 { margin: 0; font-size: 1.7rem; }
figure { margin: 0; flex: 1 1 0; min-height: 0; display: flex; justify-content: center; }
figure svg { width: 100%; height: 100%; max-height: 72vh; }
.key { margin: 0; font-size: 1.25rem; }
.summary { margin: 0; font-size: 0.85rem; color: #444; max-height: 12vh; overflow: auto; }
footer { font-size: 0.75rem; color: #555; display: flex; justify-content: space-between; }
@media print {
  @page { size: A4 landscape; margin: 10mm; }
  .js section, section { display: flex; min-height: 0; height: 185mm; padding: 0; }
  section { break-after: page; }
  figure svg { max-height: 120mm; }
  .summary { max-height: none; overflow: visible; }
}
"""

SCRIPT = """
(function () {
  "use strict";
  var slides = Array.prototype.slice.call(document.querySelectorAll("section"));
  var at = 0;
  function show(next) {
    slides[at].classList.remove("now");
    at = Math.max(0, Math.min(slides.length - 1, next));
    slides[at].classList.add("now");
    history.replaceState(null, "", "#" + slides[at].id);
  }
  function named() {
    return Math.max(0, slides.map(function (s) { return "#" + s.id; }).indexOf(location.hash));
  }
  var steps = { ArrowRight: 1, ArrowDown: 1, PageDown: 1, " ": 1,
                ArrowLeft: -1, ArrowUp: -1, PageUp: -1 };
  document.addEventListener("keydown", function (event) {
    if (event.ctrlKey || event.altKey || event.metaKey) return;
    if (event.key === "Home") show(0);
    else if (event.key === "End") show(slides.length - 1);
    else if (event.key in steps) show(at + steps[event.key]);
    else return;
    event.preventDefault();
  });
  window.addEventListener("hashchange", function () { show(named()); });
  document.documentElement.classList.add("js");
  show(named());
})();
"""


@dataclass(frozen=True)
class Slide:
    """One figure.

    Attributes:
        lesson: two digits.
        title: title of the lesson, with its number.
        heading: the heading under which the figure stands.
        alt: what the picture shows, as text.
        svg: the picture, an SVG document.
        key: the sentence of the lesson about it, or "".
    """

    lesson: str
    title: str
    heading: str
    alt: str
    svg: str
    key: str


def plain(markdown: str) -> str:
    """Markdown of a sentence as text.

    >>> plain("*Release*: see [the log](../bench/LOG.md), `x` and **two**.")
    'Release: see the log, x and two.'
    """
    text = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", markdown)
    return re.sub(r"\s+", " ", re.sub(r"\*\*|`|(?<!\w)\*|\*(?!\w)", "", text)).strip()


def sentences(markdown: str) -> list[str]:
    r"""What the paragraphs of a text begin with: whole sentences, `LEAST` characters or more.

    Headings, notes in parentheses, lists, tables and folded parts are left out, and so is what
    leads up to something else with a colon.

    >>> sentences("*(a note)*\n\nSome, not most. The third bar gains more. And on.\n\nLook here:")
    ['Some, not most. The third bar gains more.']
    """
    found = []
    for paragraph in markdown.split("\n\n"):
        said = ""
        for sentence in (
            SENTENCE.split(plain(paragraph)) if not NO_SENTENCE.match(paragraph) else ()
        ):
            said = f"{said} {sentence}".strip()
            if len(said) >= LEAST:
                break
        if said and not said.endswith(":"):
            found.append(said)
    return found


def key_sentence(before: str, after: str) -> str:
    """What a lesson says about a figure: directly after it, else last before it.

    >>> key_sentence("Here is what a barrier costs, in a picture without a clock.", "## Predict")
    'Here is what a barrier costs, in a picture without a clock.'
    """
    here = sentences("" if after.startswith("#") else after.split("\n#")[0])[:1]
    here = [said for said in here if not LEADS_ON.match(said)]
    return (here or sentences(before)[-1:] or [""])[0]


def figures(html: str) -> list[tuple[str, str]]:
    """Alternative text and SVG of every picture of an HTML output."""
    return [
        (unescape(alt), base64.b64decode(data).decode("utf-8"))
        for alt, data in FIGURE.findall(html)
    ]


def slides_of(notebook: Any, lesson: str) -> list[Slide]:
    """The slides of a notebook, in its order."""
    made: list[Slide] = []
    title = heading = before = ""
    cells = notebook.cells
    for number, cell in enumerate(cells):
        if cell.cell_type == "markdown":
            for level, text in re.findall(r"^(#+) (.+)$", cell.source, re.MULTILINE):
                title, heading = (plain(text), "") if level == "#" else (title, plain(text))
            before = cell.source
            continue
        after = [next_ for next_ in cells[number + 1 : number + 2] if next_.cell_type == "markdown"]
        said = key_sentence(before, after[0].source if after else "")
        for output in cell.outputs:
            for alt, svg in figures(output.get("data", {}).get("text/html", "")):
                made.append(Slide(lesson, title, heading or title, alt, svg, said))
    return made


def inline(svg: str, prefix: str) -> str:
    """An SVG to stand within HTML: ids of its own, scaled to its place, no name space."""
    svg = re.sub(r'\bid="', f'id="{prefix}', svg)
    svg = re.sub(r'url\(#|href="#', lambda found: found[0] + prefix, svg)
    head, rest = svg.split(">", 1)
    head = re.sub(r' (xmlns(:\w+)?|width|height)="[^"]*"', "", head)
    return f"{head}>{rest}"


def section(slide: Slide, number: int, of: int) -> str:
    """The HTML of one slide."""
    key = f'<p class="key">{escape(slide.key)}</p>' if slide.key else ""
    return (
        f'<section id="s{number}" aria-label="slide {number} of {of}">'
        f"<h1>{escape(slide.title)}</h1><h2>{escape(slide.heading)}</h2>"
        f'<figure role="img" aria-label="{escape(slide.alt)}">'
        f"{inline(slide.svg, f's{number}-')}</figure>"
        f'{key}<p class="summary">{escape(slide.alt)}</p>'
        f"<footer><span>lesson {slide.lesson}</span><span>{number} / {of}</span></footer></section>"
    )


def page(slides: list[Slide]) -> str:
    """The whole file."""
    sections = "\n".join(section(s, i, len(slides)) for i, s in enumerate(slides, 1))
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>mkref: figures of the lessons</title>\n<style>{STYLE}</style>\n</head>\n"
        f"<body>\n{sections}\n<script>{SCRIPT}</script>\n</body>\n</html>\n"
    )


def chosen(lessons: str) -> list[Path]:
    """Notebooks of a list such as "02,05"; all if it is empty.

    Raises:
        SystemExit: a lesson does not exist; says which do.
    """
    paths = {path.stem[:2]: path for path in sorted(NOTEBOOKS.glob("*.ipynb"))}
    wanted = [one.strip().zfill(2) for one in lessons.split(",") if one.strip()] or [*paths]
    for one in wanted:
        if one not in paths:
            raise SystemExit(f"slides: there is no lesson {one}; there are {', '.join(paths)}")
    return [paths[one] for one in wanted]


def main(arguments: list[str] | None = None) -> None:
    """Write the slides that the command line names."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--lessons", default="", help="such as 02,05; without it, all")
    parser.add_argument("--out", type=Path, default=OUT, help="file to be written")
    given = parser.parse_args(arguments)
    slides = [
        slide
        for path in chosen(given.lessons)
        for slide in slides_of(nbformat.read(path, as_version=4), path.stem[:2])
    ]
    if not slides:
        raise SystemExit(
            "slides: these lessons have no stored figure; `make notebooks` stores them"
        )
    given.out.parent.mkdir(parents=True, exist_ok=True)
    given.out.write_text(page(slides), encoding="utf-8")
    print(f"{given.out}: {len(slides)} slides")


if __name__ == "__main__":
    main()
