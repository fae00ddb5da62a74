"""A time limit for a learner's Python: a loop that never ends must not take the notebook with it.

CUDA answers need none: they run in a process of their own, and their launches are bounded.
"""

from __future__ import annotations

import signal
import threading
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
    notebooks run their cells. Elsewhere, and where somebody else uses the alarm, there is no limit.

    Args:
        seconds: at most; None is no limit.

    Raises:
        EndlessError: time is up. Again every second, since an answer may have `except:`.
    """
    if seconds is None or not _is_free():
        yield
        return

    def stop(_number: int, _frame: Any) -> None:
        raise EndlessError

    before = signal.signal(signal.SIGALRM, stop)
    try:
        signal.setitimer(signal.ITIMER_REAL, seconds, 1.0)
        try:
            yield
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0.0)
    finally:
        signal.signal(signal.SIGALRM, before)


def _is_free() -> bool:
    return (
        hasattr(signal, "setitimer")
        and threading.current_thread() is threading.main_thread()
        and signal.getsignal(signal.SIGALRM) in (signal.SIG_DFL, signal.SIG_IGN)
    )
