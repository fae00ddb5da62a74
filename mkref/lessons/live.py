"""Measure here what a lesson shows as recorded on an H200, and draw both side by side.

    rungs("de")           rungs of the ladder: `mkref bench ladder`
    batches()             tokens per second with 1, 2, 4 and 8 rows: `mkref bench decode`
    tasks("ATTENTION")    operations of a step with time stamps: `mkref.lessons.live_run`
    draws()               a token drawn by the kernel, and by the sampler: likewise
    bandwidth()           a plain read of the memory: likewise

Without a GPU each of them prints one sentence. With a GPU another process measures
(`mkref.lessons.live_measure`), and what goes wrong there is one line here. `MKREF_MEASURE=off` in
the environment does as if there were no GPU.

The recorded runs are of the full geometry with synthetic weights. Where that does not fit, the
small model nano is measured, and the picture shows ratios, since times of two geometries cannot be
compared.
"""

from __future__ import annotations

import math
import os
import statistics
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from mkref.errors import MachineError, MkrefError
from mkref.lessons.live_figure import Pair, pairs_figure
from mkref.lessons.live_measure import (
    Record,
    forget,
    free_bytes,
    geometry_for,
    measured,
    one_line,
)
from mkref.lessons.recorded import bench_record, recorded_trace
from mkref.machine.kernels import usable_gpu
from mkref.trace.summary import by_op

if TYPE_CHECKING:
    from mkref.widgets.figure import Figure

__all__ = ["NO_GPU", "bandwidth", "batches", "draws", "rungs", "tasks"]

NO_GPU = "No GPU to measure on here: the recorded numbers above stand."
SWITCH = "MKREF_MEASURE"
LAST, STEP = "h  next token on the device", "the step"


def rungs(letters: str = "abcdefgh", *, every: bool = False) -> Figure | None:
    """Time per step of rungs of the ladder, batch 1.

    Args:
        letters: of the rungs.
        every: all groupings of launches, but for two blocks per SM; else only the grouping that was
            the best of its letter in the record.
    """

    def chosen(row: Record) -> bool:
        grouping = "2 per SM" not in row["name"] if every else row["best"]
        return row["batch"] == 1 and row["rung"] in letters and grouping

    def make(geometry: str, note: str) -> Figure:
        old, new = bench_record("h200/ladder.json"), measured("ladder", geometry)
        single = [row for row in new["rows"] if row["batch"] == 1]
        times = {_rung(row): row["ms_per_step"] for row in old["rows"] if row["batch"] == 1}
        wanted = [_rung(row) for row in old["rows"] if chosen(row)]
        here = {_rung(row): row.get("ms_per_step") for row in single}
        whys = {_rung(row): row["error"] for row in single if "error" in row}
        for row in single:
            if row.get("same_tokens") is False:
                here[_rung(row)], whys[_rung(row)] = None, "it computed other tokens"
        pairs, missing = _pairs({name: times[name] for name in wanted}, here, whys)
        base = _base(LAST, times, here, whys) if note else None
        notes = [f"Not measured here: {'; '.join(missing)}."] if missing else []
        return pairs_figure(
            pairs, head="time per step", unit="ms", labels=_labels(old, new),
            base=base and replace(base, name="h"), notes=[*notes, note] if note else notes,
        )  # fmt: skip

    return _shown(make)


def batches() -> Figure | None:
    """Tokens per second with 1, 2, 4 and 8 sequences, all of them as long."""

    def rates(rows: Iterable[Record]) -> dict[str, float]:
        return {
            f"{row['batch']} row{'s' if row['batch'] > 1 else ''}": row["tokens_per_s"]
            for row in rows
            if row["kind"] == "even" and row["plan_rows"] == 8
        }

    def make(geometry: str, note: str) -> Figure:
        old, new = bench_record("h200/decode.json"), measured("decode", geometry)
        sides = rates(old["rows"]), rates(new["rows"])
        return _figure(sides, (old, new), note, "1 row", head="tokens per second", unit="tokens/s")

    return _shown(make)


def draws() -> Figure | None:
    """Time per token, drawn by the kernel and by the sampler, batch 1."""

    def make(geometry: str, note: str) -> Figure:
        old, new = bench_record("h200/sampler.json"), measured("draw", geometry)
        samples = next(row["ms_per_step"] for row in old["steps"] if row["rows"] == 1)
        times = {way: statistics.median(each) for way, each in samples.items()}
        sides = times, {row["name"]: row["ms_per_step"] for row in new["rows"]}
        return _figure(sides, (old, new), note, "kernel", head="time per token", unit="ms")

    return _shown(make)


def tasks(*ops: str) -> Figure | None:
    """Work and waiting of some operations in one step, the mean of all SMs, batch 1.

    Args:
        ops: names of operations, such as "ATTENTION".
    """

    def make(geometry: str, note: str) -> Figure:
        trace, new = recorded_trace("trace_north_h200.json.gz"), measured("trace", geometry)
        each, row = 1e3 * trace.n_sm, new["rows"][0]
        old = {STEP: trace.span_ns / 1e3}
        here = {STEP: row["span_us"]}
        for one in by_op(trace):
            if one.op in ops:
                old[f"{one.op} works"], old[f"{one.op} waits"] = (
                    one.work_ns / each, one.wait_ns / each,
                )  # fmt: skip
        for op in row["ops"]:
            for end, key in (("works", "work_us"), ("waits", "wait_us")):
                here[f"{op} {end}"] = row["ops"][op][key]
        made = {"provenance": trace.provenance}, new
        return _figure((old, here), made, note, STEP, head="time of the mean SM", unit="us a step")

    return _shown(make)


def bandwidth() -> Figure | None:
    """Bytes per second of the memory: the data sheet's, and those of a plain read."""

    def speeds(of: Mapping[str, Any]) -> dict[str, float]:
        names = {
            "data sheet [derived]": "datasheet_bytes_per_s",
            "plain read": "measured_bytes_per_s",
        }
        return {name: of[key] / 1e12 for name, key in names.items() if of[key] is not None}

    def make(geometry: str, _: str) -> Figure:
        old, new = bench_record("h200/decode.json"), measured("read", geometry)
        sides = speeds(old["provenance"]), speeds(new["rows"][0])
        # A read is one of any model: no note, no ratios.
        return _figure(sides, (old, new), "", head="bytes per second", unit="TB/s")

    return _shown(make)


# ---- what all of them do


def _shown(make: Callable[[str, str], Figure]) -> Figure | None:
    """The figure that `make` makes of a geometry and a note about it; or one line, and None."""
    if os.environ.get(SWITCH) == "off" or not usable_gpu():
        print(NO_GPU)
        return None
    try:
        return make(*geometry_for(free_bytes()))
    except MkrefError as error:
        why = one_line(str(error))
    except (LookupError, TypeError) as error:
        forget()
        why = one_line(f"the record has not the form that is expected ({error!r})")
    print(f"Not measured here: {why}. The recorded numbers above stand.")
    return None


def _figure(
    sides: tuple[Mapping[str, float], Mapping[str, Any]],
    made: tuple[Mapping[str, Any], Mapping[str, Any]],
    note: str,
    base: str = "",
    *,
    head: str,
    unit: str,
) -> Figure:
    """Values of both sides, which both must have.

    Args:
        sides: recorded, measured here; by name.
        made: both records.
        note: on the comparison; if there is one, ratios are shown.
        base: name of what they are ratios to.
        head, unit: of the picture.
    """
    pairs, missing = _pairs(*sides, {})
    if missing:
        raise MachineError(f"no measurement of {'; '.join(missing)}")
    by = _base(base, *sides, {}) if note else None
    shown = [pair for pair in pairs if pair.name != STEP]  # whose bar would dwarf the others
    notes = [note] if note else []
    return pairs_figure(shown, head=head, unit=unit, labels=_labels(*made), base=by, notes=notes)


def _pairs(
    recorded: Mapping[str, float], here: Mapping[str, Any], whys: Mapping[str, str]
) -> tuple[list[Pair], list[str]]:
    """What both sides have, in the order of the record, and the names of what was not measured.

    Raises:
        MachineError: a number that is none, or nothing is left.
    """
    pairs, missing = [], []
    for name, value in recorded.items():
        other = here.get(name)
        if other is None:
            missing.append(f"{name} ({one_line(whys.get(name, 'no number'))})")
        elif not math.isfinite(other) or other < 0:
            raise MachineError(f"{other} came out for {name}, which is no measurement")
        else:
            pairs.append(Pair(name, value, float(other)))
    if not pairs:
        raise MachineError(f"no measurement of {'; '.join(missing)}")
    return pairs, missing


def _base(
    name: str, recorded: Mapping[str, float], here: Mapping[str, Any], whys: Mapping[str, str]
) -> Pair:
    """What others are divided by: it must be there, and not be 0."""
    pairs, _ = _pairs({name: recorded[name]}, here, whys)
    if pairs[0].here == 0:
        raise MachineError(f"0 came out for {name}, which is no measurement")
    return pairs[0]


def _labels(old: Mapping[str, Any], new: Mapping[str, Any]) -> tuple[str, str]:
    made, here = old["provenance"], new["provenance"]["gpu"]
    gpu = made["gpu"].removeprefix("NVIDIA ")
    return f"[measured, {gpu} record, {made['date'][:10]}]", f"[measured here, {here}]"


def _rung(row: Record) -> str:
    return f"{row['rung']}  {row['name']}"
