"""What a learner has solved and guessed, in one small JSON file on the learner's own disk.

The file is `$XDG_STATE_HOME/mkref/progress.json`, else `~/.local/state/mkref/progress.json`. The
variable MKREF_PROGRESS names another one; "off" keeps nothing. Nothing is sent anywhere.

A file appears by an atomic rename, under a lock, so two notebooks at once lose nothing. Who writes
into it is `mkref.lessons.progress_note`.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import IO

from mkref.errors import RequestError

__all__ = ["Guess", "Kept", "Solved", "locked", "progress_path", "read_kept", "reset", "write_kept"]

FORMAT = "mkref-progress-1"
OFF = "off"
PATIENCE_S = 2.0
"""How long to wait for another notebook that is writing; it takes a millisecond."""


@dataclass(frozen=True)
class Solved:
    """An exercise that was solved: the edition that it had (`Exercise.edition`), and the day."""

    edition: str
    day: str


@dataclass(frozen=True)
class Guess:
    """A prediction that was compared: what was said, what it was, unit, and the day."""

    said: float | str
    was: float | str
    unit: str
    day: str


@dataclass
class Kept:
    """The content of the file: exercises and predictions by id."""

    exercises: dict[str, Solved] = field(default_factory=dict)
    predictions: dict[str, Guess] = field(default_factory=dict)


def progress_path() -> Path | None:
    """The file, whether it exists or not; None if nothing is to be kept.

    Raises:
        RequestError: this user has no home folder.
    """
    explicit = os.environ.get("MKREF_PROGRESS", "")
    if explicit.strip().lower() == OFF:
        return None
    base = os.environ.get("XDG_STATE_HOME", "")
    if not os.path.isabs(base):  # nor set: the standard of this variable wants a whole path
        base = "~/.local/state"
    try:
        path = Path(explicit or f"{base}/mkref/progress.json").expanduser()
    except RuntimeError:
        raise RequestError("no home folder; name a file in MKREF_PROGRESS") from None
    return Path(os.path.realpath(path))  # a link stays one


def read_kept(path: Path | None) -> Kept:
    """What the file holds; nothing if there is none.

    Raises:
        RequestError: it is damaged, or no progress file.
        OSError: it cannot be read.
    """
    if path is None or not path.exists():
        return Kept()
    if not path.is_file():
        raise RequestError(f"{path} is no file")
    raw = path.read_bytes()
    try:
        return _parsed(raw) if raw.strip() else Kept()
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        raise RequestError(
            f"{path} is damaged or no progress file; `mkref progress --reset` deletes it"
        ) from None


def reset(say: Callable[[str], object] = print) -> None:
    """Delete the file.

    Args:
        say: is told in one line what will be deleted, before it is.

    Raises:
        RequestError: what lies there is not a progress file, so it stays.
        OSError: it cannot be deleted.
    """
    path = progress_path()
    if path is None:
        say("nothing to delete: MKREF_PROGRESS is off")
        return
    if not path.exists():
        say(f"nothing to delete: there is no {path}")
        return
    if not path.is_file() or (path.stat().st_size and FORMAT[:-1] not in _head(path)):
        raise RequestError(f"{path} is no progress file of mkref, so it stays")
    with locked(path):
        try:
            kept = read_kept(path)
            what = f"exercises: {len(kept.exercises)}, predictions: {len(kept.predictions)}"
        except RequestError:
            what = "damaged"
        say(f"deleting {path} ({what})")
        path.unlink()


@contextlib.contextmanager
def locked(path: Path) -> Iterator[None]:
    """Hold the file: its lock, and that it is still the file that has this name."""
    path.parent.mkdir(parents=True, exist_ok=True)
    while sys.platform != "win32":
        with path.open("ab") as file:
            _lock(file, path)
            try:
                same = os.path.samestat(os.fstat(file.fileno()), path.stat())
            except FileNotFoundError:  # deleted while we waited
                same = False
            if same:
                yield
                return
    yield


def _lock(file: IO[bytes], path: Path) -> None:
    if sys.platform == "win32":
        return
    import fcntl

    end = time.monotonic() + PATIENCE_S
    while True:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except BlockingIOError:
            if time.monotonic() > end:
                raise TimeoutError(errno.ETIMEDOUT, "another program holds it", path) from None
            time.sleep(0.005)
        except OSError:  # a file system without locks: writes are whole all the same
            return


def write_kept(path: Path, kept: Kept) -> None:
    """Put a whole file in the place of the old one."""
    data = {"format": FORMAT, **asdict(kept)}
    number, scratch = tempfile.mkstemp(dir=path.parent, prefix=".progress-")
    try:
        with os.fdopen(number, "w", encoding="utf-8") as file:
            json.dump(data, file, indent=1)
            file.flush()
            os.fsync(file.fileno())
        os.replace(scratch, path)
    finally:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(scratch)


def _parsed(raw: bytes) -> Kept:
    data = json.loads(raw)
    if data["format"] != FORMAT:
        raise ValueError(data["format"])
    kept = Kept(
        {name: Solved(**one) for name, one in data["exercises"].items()},
        {name: Guess(**one) for name, one in data["predictions"].items()},
    )
    for solved in kept.exercises.values():
        if not {type(solved.edition), type(solved.day)} <= {str}:
            raise TypeError(solved)
    for guess in kept.predictions.values():
        if not {type(guess.said), type(guess.was)} <= {str, int, float}:
            raise TypeError(guess)
        if not {type(guess.unit), type(guess.day)} <= {str}:
            raise TypeError(guess)
    return kept


def _head(path: Path) -> str:
    with path.open("rb") as file:
        return file.read(1000).decode("utf-8", "replace")
