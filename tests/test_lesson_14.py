"""What lesson 14 says about its session, its pictures' numbers, and its server."""

from __future__ import annotations

from functools import cache
from itertools import pairwise
from random import Random
from types import SimpleNamespace
from typing import Any, cast

import httpx
import pytest

from mkref.config import NORTH_MINI_CODE
from mkref.engine.kv import KvCache
from mkref.engine.scheduler import Scheduler
from mkref.lessons.lesson_14_figures import (
    LENGTHS,
    batching,
    batching_figure,
    pages_figure,
    share_of_pages,
)
from mkref.lessons.lesson_14_rows import next_rows
from mkref.lessons.lesson_14_server import start_server
from mkref.lessons.lesson_14_session import (
    Session,
    lost_and_found,
    measured_row,
    python_code,
    session,
)
from mkref.widgets.kv.model import kv_view


@cache
def played() -> Session:
    """The session, once."""
    return session()


def rows_of(step: int) -> str:
    """Letters of the rows of a step."""
    return "".join(use.name for use in played().history.moments[step].rows)


def test_what_the_reader_is_told_to_find() -> None:
    """The steps that the notebook names are those in which these things happen."""
    said = {step: kv_view(played().history, step).changes.said for step in (21, 26, 51, 52)}
    assert {"G begins", "E has ended"} == {*said[21]}
    assert "B begins, finds 64 tokens in the cache" in said[26]
    assert 1 == kv_view(played().history, 26).sums(0).shared
    assert {"D takes 1 full page", "H loses its pages and waits"} < {*said[51]}
    assert "H begins" in said[52]
    assert ["BCGHHHHH", "BGHHHHHH", "HHHHHHHH"] == [rows_of(step) for step in (52, 53, 54)]
    assert (21, 18, 4) == lost_and_found(played().history, "H")
    assert {"A", "C", "D", "E", "F"} == {*rows_of(10)}
    assert (1, 64) == (played().counters.preemptions, played().counters.cached_tokens)


def test_decode_never_stops() -> None:
    """Who runs has a row in every step; the engine keeps the rules of exercise 14.1."""
    for step, moment in enumerate(played().history.moments[:-1]):
        following = played().history.moments[step + 1]
        running = {held.name for held in moment.running}
        still = {held.name for held in following.running}
        assert running & still <= {use.name for use in following.rows}
        assert len(moment.rows) <= played().history.n_rows


def test_exercise_shares_as_the_engine_does() -> None:
    """The solution of 14.1 and the scheduler give the same rows, to the last odd one."""
    random = Random(5)
    for _ in range(300):
        rows = random.choice([4, 8, 16])
        ahead = [random.choice([0, 0, 1, 3, 40]) for _ in range(random.randint(1, rows))]
        engine = SimpleNamespace(roster=SimpleNamespace(rows=rows))
        active: Any = [SimpleNamespace(n_ahead=n) for n in ahead]
        expected = Scheduler._share_rows(cast("Scheduler", engine), active)
        n = random.randint(0, len(ahead))
        assert expected == next_rows(ahead[:n], ahead[n:], rows)


def test_full_layers_are_those_that_are_named() -> None:
    """Layers 0, 4, 8 ... 48 of North."""
    full = [n for n in range(49) if not NORTH_MINI_CODE.is_sliding(n)]
    assert [*range(0, 49, 4)] == full


@pytest.mark.parametrize("continuous", [False, True])
def test_batching_gives_every_answer_its_steps(continuous: bool) -> None:
    """Nobody is lost, nobody shares a row with another in the same step."""
    used = batching(LENGTHS, 4, continuous=continuous)
    spans = sorted(span for row in used for span in row)
    assert [*LENGTHS] == [end - begin for _, begin, end in spans]
    for row in used:
        assert all(a[2] <= b[1] for a, b in pairwise(row))


def test_pictures_say_what_they_show() -> None:
    """The sentences have the numbers that the notebook's prose has."""
    assert "take 26 steps" in batching_figure().summary
    assert "take 17 steps" in batching_figure().summary
    assert "11 and 6 at token 620" in pages_figure().summary


def test_pages_of_a_long_sequence() -> None:
    """13 full layers keep 1,025 pages; 36 sliding ones a window and a launch."""
    full, sliding, part = share_of_pages(65_536)
    assert (13 * 1025, 36 * 65) == (full, sliding)
    assert 0.31 < part < 0.32


def test_recorded_steps() -> None:
    """Rows of the record are found by what they are."""
    assert (8, 8) == (measured_row(8)["batch"], measured_row(1, "prompt")["tokens_per_step"])


def test_code_is_that_of_the_file() -> None:
    """Shown as Python, named by its path."""
    shown = python_code(Scheduler.step)
    assert "mkref/engine/scheduler.py" == shown.file
    assert "self._tell()" in shown.text
    assert "```python" in shown._repr_markdown_()
    assert "Scheduler.step" in repr(shown)
    assert "class KvCache" in python_code(KvCache).text


def test_server_can_be_started_and_stopped_again() -> None:
    """A cell that is run twice stops the first server; stopping twice does nothing."""
    with httpx.Client(trust_env=False) as client:
        first = start_server(max_context=64)
        assert 200 == client.get(f"{first.root}/health").status_code
        second = start_server(max_context=64)
        assert "nano, stopped" == repr(first)
        assert "nano, listening at 127.0.0.1" == repr(second)
        assert "mkref_running 0" in client.get(f"{second.root}/metrics").text
        second.stop()
        second.stop()
        with pytest.raises(httpx.ConnectError):
            client.get(f"{second.root}/health")
