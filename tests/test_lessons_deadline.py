"""An answer in Python that never ends must not take the notebook with it."""

from __future__ import annotations

import contextlib
import signal
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest

from mkref.lessons import check
from mkref.lessons.deadline import EndlessError, deadline


def test_endless_answer_is_stopped(monkeypatch: pytest.MonkeyPatch) -> None:
    """A loop that never ends, even one that catches every error, becomes a finding; what follows is
    not tried, no mistake is recognised, and no alarm is left.
    """

    def endless(*_: Any) -> int:
        while True:
            with contextlib.suppress(Exception):
                sum(range(1000))

    monkeypatch.setattr("mkref.lessons.exercise.TRIAL_S", 0.2)
    report = check("01.1", endless)
    assert report.results[0][1].startswith("it has not ended after")
    assert {"not tried after that"} == {wrong for _, wrong in report.results[1:]}
    assert "" == report.hint


@pytest.fixture
def rings() -> Iterator[list[int]]:
    """An alarm of somebody else: what it has been told. The test runner's own is kept for later."""
    told: list[int] = []
    runners = signal.getitimer(signal.ITIMER_REAL)
    before = signal.signal(signal.SIGALRM, lambda *_: told.append(1))
    yield told
    signal.setitimer(signal.ITIMER_REAL, 0.0)
    signal.signal(signal.SIGALRM, before)
    signal.setitimer(signal.ITIMER_REAL, *runners)


def test_alarm_of_others_is_kept(rings: list[int]) -> None:
    """It rings when it would have, whether or not an answer was stopped before."""
    signal.setitimer(signal.ITIMER_REAL, 0.6)
    with contextlib.suppress(EndlessError), deadline(0.1):
        time.sleep(1)
    assert [] == rings
    assert 0.1 < signal.getitimer(signal.ITIMER_REAL)[0] < 0.55
    time.sleep(0.7)
    assert [1] == rings


def test_alarm_of_others_comes_first(rings: list[int]) -> None:
    """One that is due before the limit is not put off; then there is no limit."""
    signal.setitimer(signal.ITIMER_REAL, 0.1)
    with deadline(0.3):
        time.sleep(0.6)
    assert [1] == rings


def test_no_limit_in_another_thread() -> None:
    """Alarms reach the main thread only; elsewhere an answer runs as long as it takes."""
    done: list[bool] = []

    def run() -> None:
        with deadline(0.01):
            time.sleep(0.1)
        done.append(True)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert done == [True]
