"""What all widgets share: static forms that are safe everywhere, looks that need no colour."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import textwrap
from base64 import b64decode
from collections.abc import Callable
from html.parser import HTMLParser
from itertools import combinations
from typing import Any
from xml.etree import ElementTree

import pytest

from mkref.config import NORTH_MINI_CODE
from mkref.lessons.lesson_01 import engines
from mkref.plan.task import Op
from mkref.widgets import paged_kv, plan_explorer
from mkref.widgets.bars import Bar, bar_chart
from mkref.widgets.figure import Figure, Table
from mkref.widgets.hardware import bandwidth
from mkref.widgets.kv.model import kv_view
from mkref.widgets.kv.render import figure as kv
from mkref.widgets.light.model import speed_of_light
from mkref.widgets.light.render import figure as light
from mkref.widgets.palette import as_json, style_of
from mkref.widgets.plan.model import PlanView
from mkref.widgets.plan.progress import Progress
from mkref.widgets.plan.render import figure as plan
from mkref.widgets.plan.walk import PlanWalk
from mkref.widgets.ring.model import ring_view
from mkref.widgets.ring.render import figure as rings
from mkref.widgets.svg import PATTERNS
from mkref.widgets.timeline.compare import pair
from mkref.widgets.timeline.model import timeline
from mkref.widgets.timeline.render import figure as lanes
from mkref.widgets.timeline.render import figure_of_pair as lanes_of_two
from mkref.widgets.waves.model import WAYS, schedule
from mkref.widgets.waves.render import figure as waves
from mkref.widgets.waves.scenes import chain
from tests.example_histories import WRITTEN, recorded
from tests.example_traces import example_trace, small_plan

_LARGE = small_plan(40)
_WALK = PlanWalk(small_plan())
_WALK.run_layer(0)
_WALK.forward(0)
FIGURES: dict[str, Figure] = {
    "light": light(speed_of_light(NORTH_MINI_CODE), bandwidth("h100"), "North Mini Code"),
    "timeline": lanes(timeline(example_trace())),
    "timeline of a task": lanes(timeline(example_trace(), selected=20)),
    "critical path": lanes(timeline(example_trace(), path=True)),
    "two runs": lanes_of_two(pair(example_trace(), example_trace(seed=3), selected=20, path=True)),
    "plan": plan(PlanView(_WALK.progress, 1, _WALK.moment, selected=_WALK.moment.last + 1)),
    "plan, large": plan(PlanView(Progress(_LARGE), 1, Progress(_LARGE).start())),
    "kv": kv(kv_view(recorded(), selected="A")),
    "kv, by hand": kv(kv_view(WRITTEN)),
    "ring": rings(ring_view(example_trace(stages=True))),
    "engines": engines(),
    "waves": waves([schedule(chain(14, 3.0), 4, way, boundary_us=2.0) for way in WAYS]),
}
EACH = pytest.mark.parametrize("figure", FIGURES.values(), ids=FIGURES)
SVG = "{http://www.w3.org/2000/svg}"


class Collector(HTMLParser):
    """Tags and attributes of a piece of HTML, and whether every tag is closed."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[str, dict[str, str | None]]] = []
        self.open: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Note it."""
        self.seen.append((tag, dict(attrs)))
        if tag != "img":
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        """It closes the innermost open tag."""
        assert tag == self.open.pop()


def parsed(figure: Figure) -> Collector:
    """The figure's HTML, taken apart."""
    collector = Collector()
    collector.feed(figure.html())
    collector.close()
    return collector


@EACH
def test_html_survives_cleaning(figure: Figure) -> None:
    """Only tags and attributes that code hosts and JupyterLab leave in a notebook nobody trusts."""
    allowed = {
        "img": {"alt", "src", "style"}, "p": set(), "details": set(), "summary": set(),
        "table": set(), "thead": set(), "tbody": set(), "tr": set(), "td": set(), "th": {"scope"},
    }  # fmt: skip
    found = parsed(figure)
    assert [] == found.open
    for tag, attributes in found.seen:
        assert attributes.keys() <= allowed[tag]
        # Hosts may take it away; then the picture is as wide as it is drawn.
        assert attributes.get("style") in (None, "max-width:100%")


@EACH
def test_picture_has_a_text(figure: Figure) -> None:
    """The image's alternative text is the sentence under it, and says more than a title."""
    images = [attributes for tag, attributes in parsed(figure).seen if tag == "img"]
    assert [figure.summary] == [image["alt"] for image in images]
    assert len(figure.summary) > 60
    assert figure.summary.endswith(".")


@EACH
def test_picture_is_svg_on_white(figure: Figure) -> None:
    """The image decodes to well-formed SVG with a title and a white ground, without scripts."""
    source = next(a["src"] for tag, a in parsed(figure).seen if tag == "img")
    assert source is not None
    root = ElementTree.fromstring(b64decode(source.removeprefix("data:image/svg+xml;base64,")))
    assert f"{SVG}svg" == root.tag
    assert figure.summary == root.findtext(f"{SVG}title")
    ground = root.find(f"{SVG}rect")
    assert ground is not None
    assert (root.get("width"), "#ffffff") == (ground.get("width"), ground.get("fill"))
    assert {"svg", "title", "defs", "pattern", "rect", "path", "text"} >= {
        element.tag.removeprefix(SVG) for element in root.iter()
    }


@EACH
def test_picture_stays_inside(figure: Figure) -> None:
    """No text begins outside of the picture."""
    root = ElementTree.fromstring(figure.svg)
    width, height = float(root.get("width", 0)), float(root.get("height", 0))
    for text in root.iter(f"{SVG}text"):
        assert 0 <= float(text.get("x", -1)) <= width
        assert 0 <= float(text.get("y", -1)) <= height


@EACH
def test_bundle_has_html_and_text(figure: Figure) -> None:
    """A reader without pictures gets sentence and table as plain text."""
    bundle = figure._repr_mimebundle_()
    assert {"text/html", "text/plain"} == bundle.keys()
    assert bundle["text/plain"] == repr(figure) == f"{figure.summary}\n\n{figure.table.text()}"


def test_text_is_escaped() -> None:
    """Signs of HTML in names and cells stay text."""
    nasty = '<script>"&'
    figure = Figure(
        bar_chart([Bar(nasty, 1, nasty)], title=nasty, head=nasty),
        nasty,
        Table((nasty,), ((nasty,),)),
    )
    assert "<script>" not in figure.html()
    ElementTree.fromstring(figure.svg)
    assert [] == parsed(figure).open


def test_table_aligns() -> None:
    """First column left, others right."""
    table = Table(("name", "n"), (("a", "10"), ("long", "7")))
    assert "name   n\na     10\nlong   7" == table.text()


def test_every_operation_has_its_own_look() -> None:
    """Two operations differ in letter, and in fill or pattern; unknown ones get a look too."""
    styles = {op.name: style_of(op.name) for op in Op}
    for a, b in combinations(styles.values(), 2):
        assert a.letter != b.letter
        assert (a.fill, a.pattern) != (b.fill, b.pattern)
    assert {style.pattern for style in styles.values()} <= PATTERNS.keys()
    assert {"name", "fill", "pattern", "letter", "ink"} == as_json("NEW_OP").keys()


def luminance(color: str) -> float:
    """Relative luminance of a colour `#rrggbb` (WCAG 2)."""
    channels = [int(color[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


@pytest.mark.parametrize("op", [op.name for op in Op])
def test_letters_can_be_read(op: str) -> None:
    """Letter and fill have a contrast of at least 4.5 to 1 (WCAG AA)."""
    dark, bright = sorted((luminance(style_of(op).fill), luminance(style_of(op).ink)))
    assert (bright + 0.05) / (dark + 0.05) >= 4.5


def test_without_widget_packages_there_is_a_figure() -> None:
    """Where ipywidgets and anywidget are not installed, all functions return static figures."""
    script = textwrap.dedent(
        """
        import sys
        sys.modules["ipywidgets"] = sys.modules["anywidget"] = None
        from tests.example_histories import WRITTEN
        from tests.example_traces import example_trace, small_plan
        from mkref.widgets import paged_kv, plan_explorer
        from mkref.widgets import ring_occupancy, sm_timeline, speed_of_light
        print(type(speed_of_light()).__name__, type(sm_timeline(example_trace())).__name__)
        print(type(ring_occupancy(example_trace(stages=True))).__name__)
        print(type(sm_timeline(example_trace(), example_trace(), path=True)).__name__)
        print(type(plan_explorer(small_plan())).__name__, type(paged_kv(WRITTEN)).__name__)
        import mkref.lessons
        print("IPython" in sys.modules, "traitlets" in sys.modules)
        """
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, env=_path()
    )
    figures = "Figure Figure\nFigure\nFigure\nFigure Figure\nFalse False\n"
    assert (figures, 0) == (done.stdout, done.returncode), done.stderr


@pytest.mark.parametrize("make", [lambda: plan_explorer(small_plan()), lambda: paged_kv(WRITTEN)])
def test_stage_carries_the_static_form(make: Callable[[], Any]) -> None:
    """Live view, HTML and text in one output, the same bytes twice, no address in memory; what it
    sends to the browser is JSON.
    """
    widget, again = make(), make()
    data, _ = widget._repr_mimebundle_()
    assert {"application/vnd.jupyter.widget-view+json", "text/html", "text/plain"} == data.keys()
    assert widget.static.text() == data["text/plain"] == repr(widget) == repr(again)
    assert widget.static.html() == data["text/html"] == again._repr_mimebundle_()[0]["text/html"]
    assert "0x" not in data["text/plain"]
    json.loads(json.dumps([widget.meta, widget.view]))


def test_stage_loads_nothing() -> None:
    """One module without imports or addresses: it works without a network."""
    widget = paged_kv(WRITTEN)
    script, style = str(widget._esm), str(widget._css)
    assert not re.search(r"\bimport\b|https?:|fetch\(|XMLHttpRequest", script + style)
    assert 1 == script.count("export default")
    assert ".mkref-stage" in style
    assert all(action["key"] == action["key"].lower() for action in widget.meta["actions"])


@pytest.mark.parametrize("make", [lambda: plan_explorer(small_plan()), lambda: paged_kv(WRITTEN)])
def test_no_two_actions_share_a_key(make: Callable[[], Any]) -> None:
    """Each key does one thing; ? is the list."""
    keys = [action["key"] for action in make().meta["actions"]]
    assert len(keys) == len({*keys, "?"}) - 1


def _path() -> dict[str, str]:
    """The environment of this process with its import path."""
    import os

    return dict(os.environ) | {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
