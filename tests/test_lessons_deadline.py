"""An answer in Python that never ends must not take the notebook with it."""

from __future__ import annotations

import contextlib
import signal
import threading
import time
from typing import TYPE_CHECKING, Any

from mkref.lessons import check
from mkref.lessons.deadline import deadline

if TYPE_CHECKING:
    import pytest


def test_endless_answer_is_stopped(monkeypatch: pytest.MonkeyPatch) -> None:
    """A loop that never ends, even one that catches every error, becomes a finding; what follows is
    not tried, no mistake is recognised, and the alarm is given back.
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
    assert signal.SIG_DFL == signal.getsignal(signal.SIGALRM)
    assert (0.0, 0.0) == signal.getitimer(signal.ITIMER_REAL)


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
