"""Numbers of a lesson that were not computed in it: recorded runs, with what they were recorded on.

They lie as JSON in `notebooks/data/`, next to the notebooks that use them, or in `bench/results/`,
where `bench/` wrote them; every file says under "provenance" where its numbers come from. Nothing
here measures.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mkref.errors import RequestError
from mkref.jsonfile import read_json
from mkref.trace.storage import load_trace

if TYPE_CHECKING:
    from mkref.trace.events import Trace

__all__ = ["bench_record", "data_folder", "evidence", "recorded_trace"]

CHECKOUT = Path(__file__).resolve().parents[2]


def data_folder() -> Path:
    """The folder of recorded data: beside the notebook, else in the checkout of this package.

    Raises:
        RequestError: neither place has one.
    """
    checkout = CHECKOUT / "notebooks"
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
        data = read_json(path)
    except OSError as error:
        there = ", ".join(sorted(p.name for p in path.parent.glob("*.json*")))
        raise RequestError(f"data: no {name!r} in notebooks/data; there are {there}") from error
    return _checked(data, name)


def bench_record(name: str) -> dict[str, Any]:
    """The content of one record of this repository's own benchmarks.

    Args:
        name: file name below `bench/results/`, such as "h200/full_geometry.json".

    Raises:
        RequestError: no such file, or it does not say where its numbers come from.
    """
    places = [place / "bench" / "results" / name for place in (Path.cwd().parent, CHECKOUT)]
    path = next((place for place in places if place.is_file()), None)
    if path is None:
        raise RequestError(f"data: no {name!r} in bench/results; use a whole checkout")
    return _checked(json.loads(path.read_text(encoding="utf-8")), name)


def _checked(data: Any, name: str) -> dict[str, Any]:
    if not isinstance(data, dict) or not data.get("provenance"):
        raise RequestError(f"data: {name} does not say under 'provenance' where it comes from")
    return data


def recorded_trace(name: str) -> Trace:
    """A recorded step.

    Args:
        name: file name below `notebooks/data/`.

    Raises:
        RequestError: no such file.
    """
    path = data_folder() / name
    if not path.is_file():
        there = ", ".join(sorted(p.name for p in path.parent.glob("trace_*")))
        raise RequestError(f"data: no {name!r} in notebooks/data; there are {there}")
    return load_trace(path)
