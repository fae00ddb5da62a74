"""The KV view: its data, what it says of them, what it draws, its controls, the recorder."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from mkref.engine.kv import KvCache
from mkref.errors import RequestError
from mkref.widgets import paged_kv
from mkref.widgets.kv.changes import changes, describe_changes
from mkref.widgets.kv.history import Held, History, Moment, load_history, save_history
from mkref.widgets.kv.looks import look_of
from mkref.widgets.kv.model import STEPS, kv_view
from mkref.widgets.kv.picture import MAX_PAGES, KvPicture
from mkref.widgets.kv.record import KvRecorder
from mkref.widgets.kv.render import figure
from tests.example_histories import WRITTEN, prompts, recorded
from tests.fakes import fake_engine
from tests.test_widgets_static import luminance


@pytest.mark.parametrize("name", ["session.json", "session.json.gz"])
def test_history_survives_a_file(tmp_path: Path, name: str) -> None:
    """Written and read it is equal; equal histories give equal bytes."""
    path = save_history(recorded(), tmp_path / name)
    assert recorded() == load_history(path)
    assert path.read_bytes() == save_history(recorded(), tmp_path / f"again_{name}").read_bytes()
    assert WRITTEN == History.from_dict(json.loads(json.dumps(WRITTEN.to_dict())))


def test_damaged_files_are_refused(tmp_path: Path) -> None:
    """Missing, not JSON, another format, a part that is not there: one line each."""
    with pytest.raises(RequestError, match="cannot read"):
        load_history(tmp_path / "none.json")
    (tmp_path / "bad.json").write_text("{")
    with pytest.raises(RequestError, match="cannot read"):
        load_history(tmp_path / "bad.json")
    (tmp_path / "list.json").write_text("[]")
    with pytest.raises(RequestError, match="holds none"):
        load_history(tmp_path / "list.json")
    with pytest.raises(RequestError, match="format 'other'"):
        History.from_dict({"format": "other"})
    data = WRITTEN.to_dict()
    del data["moments"][0]["rows"]
    with pytest.raises(RequestError, match="damaged"):
        History.from_dict(data)


NOTHING: tuple[tuple[int, ...], tuple[int, ...]] = ((), ())
A = Held("A", 1, 1, 0, (0, 0), ((0,), ()))


@pytest.mark.parametrize(
    ("moment", "says"),
    [
        (Moment((), (A,), (), ((0,), ())), "full pages [0] are used and cached"),
        (Moment((), (replace(A, pages=((9,), ())),), (), NOTHING), "[9] are not among 4"),
        (Moment((), (A,), ("A",), NOTHING), "request 'A' is there twice"),
        (Moment((WRITTEN.moments[0].rows[0],) * 3, (), (), NOTHING), "3 rows, a step has 2"),
    ],
)
def test_impossible_moments_are_refused(moment: Moment, says: str) -> None:
    """A page that is two things, or none of the pool; a request twice; too many rows."""
    with pytest.raises(RequestError, match=re.escape(says)):
        replace(WRITTEN, moments=(moment,))
    with pytest.raises(RequestError, match="no moments"):
        replace(WRITTEN, moments=())


def test_sums_count_every_page_once() -> None:
    """Free, cached and used pages are all; a shared page is one."""
    for at in range(len(recorded().moments)):
        for kind in (0, 1):
            sums = kv_view(recorded(), at).sums(kind)
            assert recorded().n_pages[kind] == sums.free + sums.cached + sums.used
    sums = kv_view(WRITTEN, 1).sums(0)
    assert (4, 0, 0, 4, 1) == (sums.total, sums.free, sums.cached, sums.used, sums.shared)


def test_changes_in_words() -> None:
    """Who begins and finds what, takes, gives back, loses its pages, ends, lines up."""
    said = [kv_view(WRITTEN, at).changes.said for at in range(4)]
    assert [
        (),
        (
            "A takes 1 full page", "A takes 1 sliding page", "A gives 1 sliding page back",
            "B begins, finds 64 tokens in the cache",
        ),
        ("A loses its pages and waits",),
        ("B has ended", "2 cached sliding pages are given up"),
    ] == said  # fmt: skip
    assert "" == describe_changes(kv_view(WRITTEN, 0).changes)
    found = changes(WRITTEN.moments[0], WRITTEN.moments[1], 64)
    assert (frozenset({2, 3}), frozenset({2, 3})) == found.taken
    lined = changes(WRITTEN.moments[3], WRITTEN.moments[0], 64)
    assert {"A begins", "B lines up"} < set(lined.said)


def test_found_pages_are_not_given_up() -> None:
    """A cached page that somebody finds again was of use."""
    cached = Moment((), (), (), ((0, 1), (0, 1)))
    finds = Moment((), (Held("A", 64, 66, 64, (0, 0), ((0, 2), (0, 2))),), (), ((1,), ()))
    found = changes(cached, finds, 64)
    assert (set(), {1}) == (set(found.evicted[0]), set(found.evicted[1]))


def test_busiest_moment_is_shown_first() -> None:
    """Without a wish it is the first with most requests and pages; wrong wishes are refused."""
    assert 1 == kv_view(WRITTEN).at
    assert 3 == kv_view(WRITTEN, -1).at
    with pytest.raises(RequestError, match="step 4 of a history with steps 0 to 3"):
        kv_view(WRITTEN, 4)
    with pytest.raises(RequestError, match="request 'Z'; the history has A, B"):
        kv_view(WRITTEN, 0, "Z")


def test_steps_are_a_window_around_the_moment() -> None:
    """At most so many, the moment among them, at the ends as everywhere."""
    n = len(recorded().moments)
    assert n > STEPS
    for at in (0, n // 2, n - 1):
        steps = kv_view(recorded(), at).steps
        assert STEPS == len(steps)
        assert at in steps


def test_picture_shows_every_page() -> None:
    """A square per page of both kinds, in the owner's colour, dotted, or white; letters and
    counts of sharers; page numbers in the tables.
    """
    svg = figure(kv_view(WRITTEN, 1)).svg
    squares = re.findall(r'<path d="M[\d.]+ [\d.]+h22v22h-22z" fill="([^"]*)"', svg)
    blue, orange = look_of(0, "A").fill, look_of(1, "B").fill
    whole = [fill for fill in squares if fill != "none"]
    # Full: a shared page in halves, A, A, B; sliding: B, A, A, B.
    assert [blue, blue, orange, orange, blue, blue, orange] == whole
    halves = re.findall(r'h11v22h-11z" fill="([^"]*)"', svg)
    assert [blue, orange] == halves
    assert 1 == svg.count(">x2<")
    tables = re.findall(r'font-size="10" text-anchor="middle" fill="[^"]*">(\d+)<', svg)
    assert ["0", "1", "2", "1", "2", "0", "3", "0", "3"] == tables[:9]
    cached = figure(kv_view(WRITTEN, 3)).svg
    dotted = re.findall(r'h22v22h-22z" fill="url\(#dots', cached)
    assert 3 == len(dotted)


def test_pages_that_change_have_a_frame() -> None:
    """Taken or given back in this step."""

    def frames(at: int) -> int:
        svg = figure(kv_view(WRITTEN, at)).svg
        return len(re.findall(r'h22v22h-22z" fill="none" stroke="#1a1a1a" stroke-width="2.5"', svg))

    assert (0, 4) == (frames(0), frames(1))


def test_large_pool_is_one_bar() -> None:
    """Thousands of pages do not become thousands of squares."""
    large = replace(WRITTEN, n_pages=(MAX_PAGES + 1, 100_000))
    made = figure(kv_view(large, 1))
    assert "h22v22h-22z" not in made.svg
    assert "Of 100000 sliding pages 4 are used" in made.summary


def test_figure_is_small_and_the_same_twice() -> None:
    """Of a session of some hundred steps."""
    made = figure(kv_view(recorded()))
    assert len(made.svg) < 150_000
    assert made == figure(kv_view(recorded()))
    assert made.summary.startswith("fake [simulated]: step ")


def test_table_lists_requests() -> None:
    """Who runs, with pages, and who waits."""
    rows = figure(kv_view(WRITTEN, 2)).table.rows
    assert ("B", "1 of its answer", "66", "66", "64", "0, 3", "0, 3", "0") == rows[0]
    assert ("A", "waits") == rows[1][:2]


def test_requests_look_different() -> None:
    """28 requests differ in fill or pattern, and every letter can be read on its fill."""
    looks = [look_of(i, "A") for i in range(28)]
    assert 28 == len({(look.fill, look.pattern) for look in looks})
    for look in looks:
        dark, bright = sorted((luminance(look.fill), luminance(look.ink)))
        assert (bright + 0.05) / (dark + 0.05) >= 4.5


def tell(widget: Any, name: str, value: int = 0) -> None:
    """What the browser would send."""
    widget._hear(None, {"do": name, "value": value}, [])


def test_widget_moves_and_selects() -> None:
    """Keys, slider and clicks; nothing leaves the session."""
    widget = paged_kv(WRITTEN, at=0)
    for name, expected in (
        ("before", 0), ("next", 1), ("last", 3), ("next", 3), ("left", 0), ("event", 1),
        ("event_before", 0), ("event_before", 0), ("first", 0),
    ):  # fmt: skip
        tell(widget, name)
        assert expected == widget.at, name
    tell(widget, "step", 99)
    assert 3 == widget.at
    tell(widget, "step", 1)
    tell(widget, "down")
    tell(widget, "down")
    assert "B" == widget.selected
    tell(widget, "request", 0)
    assert "A" == widget.selected
    assert "Selected: A holds 3 full and 2 sliding pages." in repr(widget)
    tell(widget, "nothing")
    assert "" == widget.selected
    assert figure(kv_view(WRITTEN, 1)).text() == repr(widget)


def test_widget_ignores_what_it_does_not_offer() -> None:
    """Unknown names, places that are not in the picture, values that are no numbers."""
    widget = paged_kv(WRITTEN, at=0)
    for content in ({"do": "request", "value": 7}, {"do": "nonsense"}, {"do": 3}, {},
                    {"do": "step", "value": "1"}):  # fmt: skip
        widget._hear(None, content, [])
    assert (0, "") == (widget.at, widget.selected)


def test_regions_are_on_the_picture() -> None:
    """Each place that can be clicked lies on the page and names a request or a step."""
    picture = KvPicture(kv_view(recorded()), "title")
    width, height = (int(n) for n in re.findall(r'width="(\d+)" height="(\d+)"', picture.svg)[0])
    for x, y, w, h, name in picture.regions:
        assert 0 <= x <= x + w <= width + 1
        assert 0 <= y <= y + h <= height
        assert re.fullmatch(r"(request|step) \d+", name)


@pytest.mark.parametrize("full_pages", [64, 14, 9])
def test_recorder_sees_what_the_cache_is(full_pages: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """At every moment, sums are those of the cache itself; rows follow one another."""
    stats = []
    look = KvRecorder._look

    def look_and_count(self: KvRecorder, rows: Any) -> None:
        look(self, rows)
        stats.append(self._kv.stats())

    monkeypatch.setattr(KvRecorder, "_look", look_and_count)
    recorded.cache_clear()
    history = recorded(full_pages)
    recorded.cache_clear()
    assert len(history.moments) == len(stats) > 100
    for at, each in enumerate(stats):
        for kind, pages in enumerate((each.full, each.sliding)):
            sums = kv_view(history, at).sums(kind)
            assert (pages.free, pages.cached, pages.used) == (sums.free, sums.cached, sums.used)
    assert ("A", "B", "C", "D", "E", "F") == history.names
    fed: dict[str, int] = {}
    for moment in history.moments:
        for use in moment.rows:
            held = moment.of(use.name)
            began = fed.get(use.name, 0) != use.position
            assert not began or held is None or held.found or use.position in (0, 64, 128)
            fed[use.name] = use.position + 1
    for name, prompt, n in zip("ABCDEF", prompts(), [40, 90, 60, 30, 20, 100], strict=True):
        assert len(prompt) + n - 1 == fed[name]


def test_recorder_sees_sharing_waiting_and_giving_back() -> None:
    """The session has what the view is there to show."""
    said = {
        text
        for at in range(len(recorded().moments))
        for text in kv_view(recorded(), at).changes.said
    }
    assert any("finds 128 tokens in the cache" in text for text in said)
    assert any("sliding page back" in text for text in said)
    assert any("has ended" in text for text in said)
    assert any(moment.waiting for moment in recorded().moments)
    assert any(kv_view(recorded(), at).sums(0).shared for at in range(len(recorded().moments)))


def test_recorder_leaves_no_trace() -> None:
    """Outside of it the engine is as before; its answers are those without it."""
    engine, _ = fake_engine(full_pages=14, sliding_pages=16)
    before = dict(vars(engine.scheduler))
    alone = engine.generate_batch(prompts(), max_tokens=20, ignore_eos=True)
    assert before.keys() == vars(engine.scheduler).keys()
    watched, _ = fake_engine(full_pages=14, sliding_pages=16)
    with KvRecorder(watched) as recorder:
        again = watched.generate_batch(prompts(), max_tokens=20, ignore_eos=True)
    assert [c.token_ids for c in alone] == [c.token_ids for c in again]
    assert before.keys() == vars(watched.scheduler).keys()
    n = len(recorder.history().moments)
    watched.generate([1, 2, 3], max_tokens=5)
    assert n == len(recorder.history().moments)
    assert isinstance(watched.kv, KvCache)


def test_recorder_without_steps_says_so() -> None:
    """And a bound on the number of steps holds."""
    engine, _ = fake_engine()
    with pytest.raises(RequestError, match="nothing was recorded"):
        KvRecorder(engine).history()
    with KvRecorder(engine, most=3) as recorder:
        engine.generate([1, 2, 3], max_tokens=9, ignore_eos=True)
    assert 3 == len(recorder.history().moments)


def test_text_can_be_read() -> None:
    """No text is smaller than 10 px, and numbers of who waits do not touch each other."""
    idle = Moment(rows=(), running=(), waiting=tuple(f"r{i}" for i in range(100)), cached=((), ()))
    crowd = replace(WRITTEN, moments=(idle,) * STEPS)
    for view in (kv_view(crowd, 0), kv_view(recorded())):
        svg = KvPicture(view, "title").svg
        assert min(map(int, re.findall(r'font-size="(\d+)"', svg))) >= 10
    svg = KvPicture(kv_view(crowd, 0), "title").svg
    at = [float(x) for x in re.findall(r'<text x="([\d.]+)"[^>]*>100</text>', svg)]
    assert at
    assert all(b - a >= 18 for a, b in pairwise(at))
