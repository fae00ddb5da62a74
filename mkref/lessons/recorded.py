"""Numbers of a lesson that were not computed in it: recorded runs, with what they were recorded on.

They lie in `notebooks/data/` as JSON, next to the notebooks that use them; every file says under
"provenance" where its numbers come from. Nothing here measures.
"""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mkref.errors import RequestError
from mkref.trace.storage import load_trace

if TYPE_CHECKING:
    from mkref.trace.events import Trace

__all__ = ["data_folder", "evidence", "recorded_trace"]


def data_folder() -> Path:
    """The folder of recorded data: beside the notebook, else in the checkout of this package.

    Raises:
        RequestError: neither place has one.
    """
    checkout = Path(__file__).resolve().parents[2] / "notebooks"
    for place in (Path.cwd(), checkout):
        if (place / "data").is_dir():
            return place / "data"
    raise RequestError(f"data: no folder data in {Path.cwd()} or {checkout}; use a whole checkout")


def evidence(name: str) -> dict[str, Any]:
    """The content of one file of recorded numbers.

    Args:
        name: file name below `notebooks/data/`, ending in .json or .json.gz.

    Raises:
        RequestError: no such file, or it does not say where its numbers come from.
    """
    path = data_folder() / name
    try:
        raw = path.read_bytes()
    except OSError as error:
        there = ", ".join(sorted(p.name for p in path.parent.glob("*.json*")))
        raise RequestError(f"data: no {name!r} in notebooks/data; there are {there}") from error
    data = json.loads(gzip.decompress(raw) if path.suffix == ".gz" else raw)
    if not isinstance(data, dict) or not data.get("provenance"):
        raise RequestError(f"data: {name} does not say under 'provenance' where it comes from")
    return data


def recorded_trace(*names: str) -> Trace:
    """The first of the named recordings that is there.

    Args:
        names: file names below `notebooks/data/`, the wanted one first.

    Raises:
        RequestError: none of them is there.
    """
    for name in names:
        if (data_folder() / name).is_file():
            return load_trace(data_folder() / name)
    raise RequestError(f"data: none of {', '.join(names)} in notebooks/data")
