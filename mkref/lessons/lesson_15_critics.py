"""Texts of lesson 15: criticism of megakernels beside what the records say, and pages of the log.

Every sentence takes its numbers from a record. Whether a critic is right is a judgement, and stands
here as one.
"""

from __future__ import annotations

import inspect
import re
import textwrap
from dataclasses import dataclass

from mkref.lessons.lesson_15_record import (
    DECODE,
    batches,
    best_rungs,
    chain_ratio,
    decode_rows,
    ladder,
    vllm_ms,
)
from mkref.lessons.recorded import CHECKOUT, bench_record, evidence
from mkref.measure.ladder import climb
from mkref.paths import cuda_root

__all__ = ["Sheet", "climb_source", "criticism", "log_points", "log_table", "way_of_kernels"]


@dataclass(frozen=True)
class Sheet:
    """A table that a notebook shows as Markdown.

    Attributes:
        head: names of the columns.
        rows: cells, ready for Markdown.
        note: a line below.
    """

    head: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    note: str = ""

    def _repr_markdown_(self) -> str:
        lines = [self.head, tuple("--" for _ in self.head), *self.rows]
        table = "\n".join(f"| {' | '.join(line)} |" for line in lines)
        return f"{table}\n\n{self.note}" if self.note else table

    def __repr__(self) -> str:
        return "\n\n".join(
            "\n".join(f"{name}: {cell}" for name, cell in zip(self.head, row, strict=True))
            for row in self.rows
        )


def _each(text: dict[int, str]) -> str:
    return ", ".join(f"{said} at batch {batch}" for batch, said in text.items())


def way_of_kernels(batch: int) -> float:
    """Which part of the way from a launch per operation to the last rung the best chain goes."""
    best = best_rungs(batch)
    return (best["a"].ms - best["c"].ms) / (best["a"].ms - best["h"].ms)


def _chain() -> tuple[str, str]:
    longer = _each({b: f"{chain_ratio(b) - 1:.0%}" for b in batches()})
    way = _each({b: f"{way_of_kernels(b):.0%}" for b in batches()})
    return (
        (
            f"the best chain takes longer by {longer} [measured]; of the way from a to h it goes "
            f"{way} [derived]; and a better chain could be written"
        ),
        "right about most of the way",
    )


def _persistent() -> tuple[str, str]:
    longer: dict[str, dict[int, str]] = {"d": {}, "e": {}}
    for batch in batches():
        best = best_rungs(batch)
        for letter, texts in longer.items():
            texts[batch] = f"{best[letter].ms / best['b'].ms - 1:+.0%}"
    here = (
        f"against the best graph, one launch with barriers takes {_each(longer['d'])}, with "
        f"counters in plain order {_each(longer['e'])} [measured]"
    )
    return here, "right"


def _baseline() -> tuple[str, str]:
    times = {}
    for batch in batches():
        ms = vllm_ms(batch)
        if ms is not None:
            times[batch] = f"{ms / decode_rows()[batch]['ms_per_step']:.2f} times"
    chain = _each({batch: f"{chain_ratio(batch):.2f} times" for batch in times})
    return (
        f"vLLM takes {_each(times)} as long as this kernel; the best chain {chain} [measured]",
        "right: give both",
    )


def _batch() -> tuple[str, str]:
    ratios = _each({b: f"{chain_ratio(b):.2f} times" for b in batches()})
    many = {r["batch"]: r for r in bench_record("h200/rows.json")["rows"]}
    shares = _each({b: f"{row['share_of_datasheet_bound']:.0%}" for b, row in many.items()})
    return (
        (
            f"chain over last rung: {ratios}; of the bound {shares}, where no chain was measured "
            "[measured]"
        ),
        "right",
    )


def _prefill() -> tuple[str, str]:
    return (
        (
            "a long prompt goes through the kernel as well, eight tokens a step, which is slow; "
            "with exact=False it runs in PyTorch, between steps, here too (lesson 14); everything "
            "in this lesson is decode"
        ),
        "right",
    )


def _compile() -> tuple[str, str]:
    start = bench_record(DECODE[0])["provenance"]["cold_start_s"]
    how = "from its cache" if start["kernel_from_cache"] else "compiled anew"
    return (
        (
            f"kernel {how} and loaded in {start['build_and_load']:.1f} s, first token "
            f"{start['since_process_start']:.0f} s after the start [measured]; sizes of the model "
            "are compiled in, the plan is data"
        ),
        "right, and a matter of seconds here",
    )


def _lines(*paths: str) -> int:
    texts = (path.read_text(encoding="utf-8") for name in paths for path in cuda_root().glob(name))
    return sum(bool(line.strip()) for text in texts for line in text.splitlines())


def _upkeep() -> tuple[str, str]:
    one, ops = _lines("megakernel.cu"), _lines("ops/*.cu", "ops/*.h")
    return (
        (
            f"{one:,} lines in one file, empty ones not counted, against {ops:,} of ordinary "
            "kernels that compute the same [derived]; one geometry and one GPU were measured"
        ),
        "right",
    )


def _numerics() -> tuple[str, str]:
    rungs = [rung for batch in batches() for rung in ladder(batch)]
    same, ways = sum(rung.same_tokens for rung in rungs), len({rung.name for rung in rungs})
    row = bench_record("h200/full_geometry.json")["rows"][0]
    kernel, bf16 = (
        row[name]["relative_error"] for name in ("kernel_vs_float32", "bf16_vs_float32")
    )
    return (
        (
            f"{same} of {len(rungs)} runs ({ways} rungs, with all groupings of launches, at "
            f"{len(batches())} batches) made the tokens of the last rung; error of the logits "
            f"{kernel:.2f}, of PyTorch in bfloat16 {bf16:.2f} [measured]"
        ),
        "a fair demand, met here",
    )


EVIDENCE = {
    "chain": _chain,
    "persistent": _persistent,
    "baseline": _baseline,
    "batch": _batch,
    "prefill": _prefill,
    "compile": _compile,
    "upkeep": _upkeep,
    "numerics": _numerics,
}
"""By the id of a criticism in `notebooks/data/critics.json`."""


def criticism() -> Sheet:
    """What critics say, what the records here say, and who is right."""
    rows = []
    for row in evidence("critics.json")["rows"]:
        here, verdict = EVIDENCE[row["id"]]()
        source = f"{row['says']} [{row['label']}: [{row['who']}]({row['url']})]"
        rows.append((source, here, verdict))
    return Sheet(("critics say", "the records here", "so"), tuple(rows))


@dataclass(frozen=True)
class Excerpt:
    """Lines of a Python file; a notebook shows them as a block of code."""

    file: str
    text: str

    def _repr_markdown_(self) -> str:
        return f"`{self.file}`:\n```python\n{self.text}\n```"

    def __repr__(self) -> str:
        return f"# {self.file}\n{self.text}"


def climb_source() -> Excerpt:
    """The loop of the ladder, from its first line to where a time is kept."""
    text = inspect.getsource(climb)
    begin, end = text.index("    for turn in"), text.index("    rows = _rows")
    return Excerpt("mkref/measure/ladder.py", textwrap.dedent(text[begin:end]).rstrip())


# ---- the log -------------------------------------------------------------------------------------


def _entry(number: int) -> str:
    text = (CHECKOUT / "bench" / "LOG.md").read_text(encoding="utf-8")
    found = re.search(rf"^## {number}\. .*?(?=^## |\Z)", text, re.M | re.S)
    return found[0] if found else ""


def log_table(number: int) -> Sheet:
    """The table of an entry of the log, as it stands there."""
    lines = [line for line in _entry(number).splitlines() if line.startswith("|")]
    head, _, *rows = (tuple(c.strip() for c in line.strip("|").split("|")) for line in lines)
    note = f"*[measured: [the log](../bench/LOG.md), entry {number}]*"
    return Sheet(head, tuple(rows), note)


def log_points(number: int, begins: str) -> Sheet:
    """The sentences of a point of the log that begins with `begins` in bold, one per row."""
    points = re.split(r"^- ", _entry(number), flags=re.M)
    point = next((one for one in points if one.startswith(f"**{begins}")), "")
    text = " ".join(point.split()).partition("** ")[2]
    rows = tuple((one,) for one in re.split(r"(?<=[.)])\s(?=[A-Z])", text) if one)
    note = f"*[measured: [the log](../bench/LOG.md), entry {number}]*"
    return Sheet((begins.strip(":"),), rows, note)
