"""Wave quantization: who does which tile when, the pictures of it, the controls."""

from __future__ import annotations

import re
import subprocess
import sys
import textwrap
from collections import defaultdict
from itertools import pairwise
from typing import Any
from xml.etree import ElementTree

import pytest

from mkref.config import NORTH_MINI_CODE
from mkref.errors import RequestError
from mkref.widgets import wave_quantization
from mkref.widgets.waves.model import WAYS, Operation, Schedule, Way, schedule, utilisation, waves
from mkref.widgets.waves.render import figure, joined
from mkref.widgets.waves.scenes import SCENES, apart, chain, layer, operations

SVG = "{http://www.w3.org/2000/svg}"
EACH_WAY = pytest.mark.parametrize("way", WAYS)
SHARE = 4.6e6 / 132
SCENE_OPERATIONS = {
    name: operations(name, NORTH_MINI_CODE, 70, 1.5, 8192, SHARE) for name in SCENES
}
EACH_SCENE = pytest.mark.parametrize("scene", SCENES)


def all_ways(scene: str, n_sm: int = 132) -> list[Schedule]:
    """A scene in the three ways."""
    each = SCENE_OPERATIONS[scene]
    return [schedule(each, n_sm, way, boundary_us=1, hand_over_us=1) for way in WAYS]


@pytest.mark.parametrize(
    ("tiles", "n_waves", "used"), [(1, 1, 1 / 132), (132, 1, 1.0), (133, 2, 133 / 264)]
)
def test_one_tile_too_many_is_another_wave(tiles: int, n_waves: int, used: float) -> None:
    """132 tiles fill 132 SMs; one more takes twice as long and leaves half of them idle."""
    assert n_waves == waves(tiles, 132)
    assert used == pytest.approx(utilisation(tiles, 132))
    made = schedule([Operation("QKV", tiles, 2.0)], 132, "grids")
    assert 2.0 * n_waves == made.end_us
    assert used == pytest.approx(made.used)


def test_boundaries_lie_between_grids() -> None:
    """Three operations of two waves take six tiles and two boundaries, as grids."""
    made = schedule(chain(10, 2.0), 8, "grids", boundary_us=1.5)
    assert 3 * 2 * 2.0 + 2 * 1.5 == made.end_us
    assert [4.0, 9.5, 15.0] == made.ends()


def test_a_queue_fills_waves_of_what_is_independent() -> None:
    """Without needs a queue has no waves: 30 tiles on 8 SMs are four rounds; grids need six."""
    assert 8.0 == schedule(apart(10, 2.0), 8, "queue", hand_over_us=9).end_us
    assert 12.0 == schedule(apart(10, 2.0), 8, "grids").end_us


def test_a_queue_does_not_help_a_chain() -> None:
    """Where each needs all of the one before, the waves stay, whoever hands out the tiles."""
    ends = {way: schedule(chain(10, 2.0), 8, way).end_us for way in WAYS}
    assert dict.fromkeys(WAYS, 12.0) == ends


def test_back_fill_hides_hand_overs() -> None:
    """Work that is ready is done while results are on their way: the queue alone waits."""
    plain, filled = (
        schedule(layer(NORTH_MINI_CODE, context=8192, bytes_per_us_of_sm=SHARE), 132, way,
                 hand_over_us=2.0)
        for way in ("queue", "back-fill")
    )  # fmt: skip
    assert filled.end_us < plain.end_us - 1.5
    assert filled.used > plain.used + 0.04


@EACH_SCENE
@EACH_WAY
def test_schedules_are_possible(scene: str, way: Way) -> None:
    """Every tile is done once, an SM does one at a time, and nothing begins before its inputs."""
    each = SCENE_OPERATIONS[scene]
    made = schedule(each, 17, way, boundary_us=0.7, hand_over_us=0.3)
    assert [op.tiles for op in each] == [
        sum(bar.op == number for bar in made.bars) for number in range(len(each))
    ]
    on_sm = defaultdict(list)
    for bar in made.bars:
        on_sm[bar.sm].append((bar.begin, bar.end))
        assert bar.end - bar.begin == pytest.approx(each[bar.op].tile_us)
    for times in on_sm.values():
        assert all(a[1] <= b[0] + 1e-9 for a, b in pairwise(sorted(times)))
    ends = dict(zip((op.name for op in each), made.ends(), strict=True))
    pause = 0.7 if way == "grids" else 0.3
    for bar in made.bars:
        for need in each[bar.op].needs:
            assert bar.begin >= ends[need] + pause - 1e-9
    assert made.used <= 1 + 1e-12
    assert made.end_us >= sum(op.work_us for op in each) / 17 - 1e-9


def test_tiles_of_the_layer_are_those_of_the_plan() -> None:
    """Row blocks, chunks and granules as the kernel's plan has them; all bytes of a layer."""
    each = {op.name: op for op in SCENE_OPERATIONS["layer"]}
    assert {"QKV": 320, "ATTENTION": 256, "O_PROJ": 128, "GATE_UP": 768, "DOWN": 128} == {
        name: op.tiles for name, op in each.items()
    }
    c = NORTH_MINI_CODE
    experts = 8 * 3 * c.hidden_size * c.intermediate_size
    attention = c.hidden_size * (2 * c.q_width + 2 * c.kv_width) + 8192 * 2 * c.kv_width
    n_bytes = sum(op.work_us for op in each.values()) * SHARE
    assert 2 * (experts + attention) == pytest.approx(n_bytes)


@pytest.mark.parametrize(
    ("each", "n_sm", "times", "says"),
    [
        ([], 4, {}, "0 tiles on 4 SMs"),
        (chain(2, 1.0), 0, {}, "on 0 SMs"),
        (chain(2, 1.0), 4, {"boundary_us": -1.0}, "boundary and hand-over of -1.0"),
        (chain(2, 1.0), 4, {"hand_over_us": float("nan")}, "give times from 0 on"),
        (chain(2, 1.0)[1:], 4, {}, "GATE_UP needs QKV"),
        (chain(20_000, 1.0), 4, {}, "60000 tiles"),
    ],
)
def test_refuses_what_makes_no_sense(
    each: list[Operation], n_sm: int, times: dict[str, float], says: str
) -> None:
    """One line names the value and what would be right."""
    with pytest.raises(RequestError, match=says):
        schedule(each, n_sm, "queue", **times)


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ({"scene": "tree"}, "no scene 'tree'; there are chain"),
        ({"tiles": 0}, "QKV has 0 tiles"),
        ({"tile_us": 0.0}, "tiles of 0.0 us"),
        ({"scene": "layer", "context": 0}, "context 0"),
        ({"gpu": "abacus"}, "no entry 'abacus'"),
        ({"n_sm": 0}, "on 0 SMs"),
    ],
)
def test_front_door_refuses(wrong: dict[str, Any], says: str) -> None:
    """The same for the function that notebooks call, before any widget is made."""
    with pytest.raises(RequestError, match=says):
        wave_quantization(**wrong)


@EACH_SCENE
@pytest.mark.parametrize("n_sm", [3, 132])
def test_picture_says_it_in_words_too(scene: str, n_sm: int) -> None:
    """Sentence, table and picture name all three ways with the same times."""
    made = all_ways(scene, n_sm)
    drawn = figure(made)
    for each in made:
        assert drawn.summary.count(f"{each.end_us:.2f} us") >= 1
    assert drawn.summary.endswith("[derived].")
    n_ops = len(made[0].operations)
    assert n_ops + 2 == len(drawn.table.rows)
    assert [f"{end:.2f}" for end in made[2].ends()] == [row[-1] for row in drawn.table.rows[:n_ops]]
    texts = [text.text or "" for text in ElementTree.fromstring(drawn.svg).iter(f"{SVG}text")]
    for each in made:
        assert any(f"{each.end_us:.2f} us, {each.used:.0%} used" in text for text in texts)
    assert {op.name for op in made[0].operations} < set(texts)


@EACH_SCENE
def test_picture_stays_inside_and_small(scene: str) -> None:
    """All of it is on the page, and the page has less than 70 KB also for 132 SMs."""
    drawn = figure(all_ways(scene)).svg
    root = ElementTree.fromstring(drawn)
    width, height = float(root.get("width", 0)), float(root.get("height", 0))
    for text in root.iter(f"{SVG}text"):
        assert 0 <= float(text.get("x", -1)) <= width
        assert 0 <= float(text.get("y", -1)) <= height
    for x, y, w, h in re.findall(r"M([\d.]+) ([\d.]+)h([\d.]+)v([\d.]+)", drawn):
        assert float(x) + float(w) <= width + 0.2
        assert float(y) + float(h) <= height + 0.2
    assert len(drawn) < 70_000


def test_patterns_do_not_hang_on_colour() -> None:
    """Operations of a picture differ in pattern or letter, and idle time is hatched."""
    drawn = figure(all_ways("chain", 8)).svg
    letters = re.findall(r'text-anchor="middle" fill="[^"]*">([A-Z])<', drawn)
    assert {"Q", "G", "D"} == set(letters)
    assert "diagonal" in drawn


def test_joined_blocks_cover_the_same() -> None:
    """Where tiles are drawn as blocks, no time of any SM is lost or doubled."""
    for made in all_ways("layer"):
        blocks = joined(made.bars)
        assert len(blocks) < len(made.bars) / 4
        area = sum((block.end - block.begin) * block.n_sm for block in blocks)
        assert sum(bar.end - bar.begin for bar in made.bars) == pytest.approx(area)


def test_widget_follows_its_controls() -> None:
    """More SMs, another scene, a longer boundary: the sentence follows. A layer sets its tiles."""
    widget = wave_quantization()
    assert "chain" == widget.scene.value
    before = widget.figure.summary
    assert before in widget.view.value
    widget.n_sm.value = 10
    assert "Tiles on 10 SMs" in widget.view.value
    assert 1.0 == schedule(widget.operations, 10, "grids").used
    widget.scene.value = "layer"
    assert (True, True) == (widget.tiles.disabled, widget.tile_us.disabled)
    assert "O_PROJ 128" in widget.view.value
    widget.scene.value = "chain"
    assert not widget.tiles.disabled
    widget.n_sm.value = 8
    assert before in widget.view.value
    widget.boundary_us.value = 3.0
    assert before not in widget.view.value


def test_widget_keeps_its_picture_in_the_notebook() -> None:
    """The stored output has the static picture and text, with the state of the controls."""
    widget = wave_quantization(tiles=12, n_sm=5, scene="apart")
    bundle = widget._repr_mimebundle_()
    assert bundle["text/plain"] == repr(widget) == widget.figure.text()
    assert widget.figure.summary.replace("&", "&amp;") in bundle["text/html"]


def test_without_ipywidgets_there_is_a_figure() -> None:
    """Where ipywidgets is not installed the function returns the static figure."""
    script = textwrap.dedent(
        """
        import sys
        sys.modules["ipywidgets"] = None
        from mkref.widgets import wave_quantization
        print(type(wave_quantization(scene="layer", n_sm=132)).__name__)
        """
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert ("Figure\n", 0) == (done.stdout, done.returncode), done.stderr
