"""A time limit for a learner's Python: a loop that never ends must not take the notebook with it.

CUDA answers need none: they run in a process of their own, and their launches are bounded.
"""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

__all__ = ["EndlessError", "deadline"]


class EndlessError(BaseException):
    """Time is up. Not an `Exception`, so that `except Exception` in an answer does not catch it."""


@contextmanager
def deadline(seconds: float | None) -> Iterator[None]:
    """Stop what runs inside after so many seconds.

    It works where Python has alarm signals (not on Windows) and in the main thread, which is where
    notebooks run their cells; elsewhere there is no limit. An alarm that somebody else has set is
    set again afterwards, and is left alone if it comes first.

    Args:
        seconds: at most; None is no limit.

    Raises:
        EndlessError: time is up. Again every second, since an answer may have `except:`.
    """
    if seconds is None or not _has_alarms():
        yield
        return
    others, interval = signal.getitimer(signal.ITIMER_REAL)
    if 0 < others <= seconds:
        yield
        return

    def stop(_number: int, _frame: Any) -> None:
        raise EndlessError

    begin = time.monotonic()
    before = signal.signal(signal.SIGALRM, stop)
    try:
        signal.setitimer(signal.ITIMER_REAL, seconds, 1.0)
        try:
            yield
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0.0)
    finally:
        signal.signal(signal.SIGALRM, before)
        if others:
            left = max(others - (time.monotonic() - begin), 1e-3)
            signal.setitimer(signal.ITIMER_REAL, left, interval)


def _has_alarms() -> bool:
    return hasattr(signal, "setitimer") and threading.current_thread() is threading.main_thread()
