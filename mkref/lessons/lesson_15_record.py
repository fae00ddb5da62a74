"""Numbers of lesson 15, out of the records: the ladder turn by turn, steps, shares, the path of a
recorded step, and the simulator's errors. Whichever batches a record has, it takes; nothing here
measures."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from statistics import mean, median
from typing import Any

from mkref.config import NORTH_MINI_CODE
from mkref.errors import RequestError
from mkref.jsonfile import read_json
from mkref.lessons.recorded import CHECKOUT, bench_record, evidence, recorded_trace
from mkref.trace.path import ACROSS, critical_path, totals

__all__ = ["CONTEXT", "LADDER", "LATE", "Rung", "batches", "best_rungs", "best_step", "bound_ms"]
__all__ += ["chain_ratio", "decode_rows", "held_out", "ladder", "ladder_source"]
__all__ += ["late_ratios", "late_turns", "most_disturbed", "most_turns"]
__all__ += ["of_path", "read_limits", "share_if", "simulated", "skeleton_ratio", "steps"]
__all__ += ["traced_and_not", "vllm_ms"]

READS = ("h200/decode.json", "h200/contexts.json", "h200/version_two/decode.json")
"""Records that also read an array as fast as the memory allows."""
LADDER = "h200/ladder.json"
CONTEXT = 8192
LATE = 1.0
"""Percent above its rung's median, from which on a turn is called late."""
DECODE = ("h200/decode.json", "h200/version_two/decode.json")
TRACE = "trace_north_h200.json.gz"


@dataclass(frozen=True)
class Rung:
    """One way to run a step, as recorded.

    Attributes:
        letter, name: of the rung.
        launches: per step.
        samples: ms per step, one per turn.
        best: the fastest of those with its letter.
        same_tokens: it made the same tokens as the last rung.
    """

    letter: str
    name: str
    launches: float
    samples: tuple[float, ...]
    best: bool
    same_tokens: bool

    @property
    def ms(self) -> float:
        """Median over the turns."""
        return median(self.samples)


@cache
def _ladders() -> dict[int, list[dict[str, Any]]]:
    """Rows of the record by batch, without those that could not be measured."""
    found: dict[int, list[dict[str, Any]]] = {}
    for row in bench_record(LADDER)["rows"]:
        if "error" not in row:
            found.setdefault(row["batch"], []).append(row)
    return dict(sorted(found.items()))


def batches() -> list[int]:
    """Batches of which the whole ladder was recorded."""
    return [*_ladders()]


def ladder(batch: int) -> list[Rung]:
    """Every rung of a batch, with its tunings.

    Raises:
        RequestError: there is no such batch.
    """
    if batch not in _ladders():
        raise RequestError(f"data: no ladder of batch {batch}; there are {batches()}")
    return [
        Rung(
            row["rung"], row["name"], row["launches_per_step"], tuple(row["samples_ms"]),
            row["best"], row["same_tokens"],
        )
        for row in _ladders()[batch]
    ]  # fmt: skip


def best_rungs(batch: int) -> dict[str, Rung]:
    """The fastest of every letter."""
    return {rung.letter: rung for rung in ladder(batch) if rung.best}


def most_turns() -> int:
    """The smallest of the batches that were measured in the largest number of turns."""
    return max(batches(), key=lambda batch: len(ladder(batch)[0].samples))


def _lateness(batch: int) -> list[float]:
    """For every turn, by how much it is late, in the mean of the fastest of each letter; 0.01 is
    1 %."""
    rungs = best_rungs(batch).values()
    ratios = zip(*([ms / r.ms for ms in r.samples] for r in rungs), strict=True)
    return [mean(late) - 1 for late in ratios]


def late_turns(batch: int) -> tuple[int, ...]:
    """Numbers of the two turns that are latest in the mean, from 0, in their order."""
    off = _lateness(batch)
    return tuple(sorted(sorted(range(len(off)), key=lambda turn: off[turn])[-2:]))


def most_disturbed() -> int:
    """The batch with the latest turn, in the mean of its rungs, among batches that were measured in
    the largest number of turns."""
    turns = len(ladder(most_turns())[0].samples)
    same = (b for b in batches() if len(ladder(b)[0].samples) == turns)
    return max(same, key=lambda batch: max(_lateness(batch)))


def late_ratios(batch: int, before: str, after: str) -> tuple[float, ...]:
    """Time of one rung over that of another within each of the two latest turns, as distances from
    the median of all turns; 0.01 is 1 %."""
    one, other = (best_rungs(batch)[letter].samples for letter in (before, after))
    ratios = [b / a for a, b in zip(one, other, strict=True)]
    return tuple(ratios[turn] / median(ratios) - 1 for turn in late_turns(batch))


def best_step(batch: int) -> str:
    """Letter of the persistent rung that takes most away from the one before it, in percent."""
    best = best_rungs(batch)
    return min("defgh", key=lambda letter: best[letter].ms / best[chr(ord(letter) - 1)].ms)


def ladder_source() -> str:
    """Which record it is from, in words."""
    made = bench_record(LADDER)["provenance"]
    return f"{LADDER.removeprefix('h200/')}, {made['gpu']}, {made['date'][:10]}"


def chain_ratio(batch: int) -> float:
    """Time of the best chain of kernels over that of the last rung."""
    best = best_rungs(batch)
    return best["c"].ms / best["h"].ms


# ---- steps and bytes -----------------------------------------------------------------------------


def decode_rows(kind: str = "even", name: str = DECODE[0]) -> dict[int, dict[str, Any]]:
    """Rows of the benchmark at 8,192 tokens, by batch."""
    rows = bench_record(name)["rows"]
    return {r["batch"]: r for r in rows if r["kind"] == kind and r["context"] == CONTEXT}


def bound_ms(batch: int) -> float:
    """Milliseconds that the counted bytes of a step need at the bandwidth of the data sheet."""
    row = decode_rows()[batch]
    rate = bench_record(DECODE[0])["provenance"]["datasheet_bytes_per_s"]
    return 1e3 * float(row["bytes"]) / float(rate)


def share_if(batch: int, experts: float) -> float:
    """Share of the data-sheet bound, had a step read so many experts per layer."""
    north, row = NORTH_MINI_CODE, decode_rows()[batch]
    rate = bench_record(DECODE[0])["provenance"]["datasheet_bytes_per_s"]
    counted = north.weight_bytes_per_token(row["experts_per_layer"])
    n_bytes = row["bytes"] - counted + north.weight_bytes_per_token(experts)
    return float(1e3 * n_bytes / rate / row["ms_per_step"])


def read_limits() -> dict[str, float]:
    """TB/s of a plain read, by the record in which it was measured."""
    found = {}
    for name in READS:
        try:
            made = bench_record(name)["provenance"]
        except RequestError:
            continue
        found[name.removeprefix("h200/")] = made["measured_bytes_per_s"] / 1e12
    return found


def steps(batch: int = 1) -> list[float]:
    """Consecutive steps of one kernel after its start, ms: one launch each."""
    rows = bench_record("h200/full_geometry.json")["rows"]
    return [float(x) for x in next(row for row in rows if row["batch"] == batch)["samples_ms"]]


def vllm_ms(batch: int) -> float | None:
    """Milliseconds of a step of vLLM with its own router; None if this batch was not recorded."""
    for row in evidence("decode_speed.json")["rows"]:
        if row["who"].startswith("vLLM") and (row["context"], row["batch"]) == (CONTEXT, batch):
            return float(row["ms"])
    return None


def skeleton_ratio(batch: int = 1) -> float:
    """Time of the skeleton in a graph over that of the persistent skeleton."""
    rows = evidence("decode_speed.json")["rows"]
    ms = {row["who"]: row["ms"] for row in rows if row["batch"] == batch}
    return float(ms["skeleton, one kernel per phase"] / ms["skeleton, one persistent kernel"])


# ---- the recorded step ---------------------------------------------------------------------------


def traced_and_not() -> tuple[float, float | None]:
    """ms of the recorded step with its stamps, and of a step of the same kernel without any; None
    where no record is known to be of that kernel."""
    trace = recorded_trace(TRACE)
    made = trace.provenance
    commits = {made.get("commit")}
    for name in ("h200/full_geometry.json", "h200/sanitizer.json", "h200/agreement.json"):
        other = bench_record(name)["provenance"]
        if made.get("sources") and other.get("sources") == made["sources"]:
            commits.add(other["commit"])
    ladder_of = bench_record(LADDER)["provenance"]
    kernels = {ladder_of["kernel"]} if ladder_of["commit"] in commits else set()
    for name in DECODE:
        try:
            record = bench_record(name)
        except RequestError:
            continue
        of = record["provenance"]
        if of["commit"] in commits or of.get("kernel") in kernels:
            return trace.span_ns / 1e6, float(decode_rows(name=name)[1]["ms_per_step"])
    return trace.span_ns / 1e6, None


def of_path() -> dict[str, float]:
    """ms on the critical path of the recorded step: work by kind, hand-overs by kind."""
    trace = recorded_trace(TRACE)
    work, hops = totals(trace, critical_path(trace))
    ns = {row.name: row.ns for row in work}
    head, small = ns.pop("HEAD"), sum(ns.pop(op, 0) for op in ("EMBED", "SAMPLE"))
    across = sum(row.ns for row in hops if row.name.endswith(ACROSS))
    parts = {
        "experts": ns.pop("GATE_UP") + ns.pop("DOWN"),
        "projections, router": ns.pop("QKV") + ns.pop("O_PROJ") + ns.pop("ROUTER", 0),
        "attention, merge": sum(ns.values()),
        "head": head,
        "embedding, sample": small,
        "hand-over to another SM": across,
        "hand-over in an SM": sum(row.ns for row in hops) - across,
    }
    return {name: value / 1e6 for name, value in parts.items()}


# ---- the simulator -------------------------------------------------------------------------------


@cache
def simulated() -> dict[str, Any]:
    """The record of the simulator against measurements; each case says where it was measured."""
    record: dict[str, Any] = read_json(CHECKOUT / "bench" / "results" / "simulator.json")
    return record


def held_out() -> dict[str, list[float]]:
    """Errors of the cases that no constant was fitted to, by record and kernel; 0.01 is 1 %."""
    groups: dict[str, list[float]] = {}
    for case in simulated()["cases"]:
        if case["role"] == "held out":
            record = case["case"].partition(":")[0]
            groups.setdefault(f"{record}, {case['kernel']}", []).append(float(case["error"]))
    return groups
