"""Fill the tables between markers in README.md and the lessons' texts from the records under
bench/results/.

    python scripts/fill_tables.py           rewrite the tables
    python scripts/fill_tables.py --check   exit status 1 if a table does not say what the records
    say

A number in prose that has no record behind it does not belong there.
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "bench" / "results"
FILES = ("README.md",)
BANDWIDTH = 4.814e12
"""Bytes per second of the H200: memory clock times bus width as its driver reports them."""


def load(name: str) -> dict[str, Any]:
    """One record."""
    return json.loads((RESULTS / name).read_text())


def origin(record: dict[str, Any]) -> str:
    """Where a record comes from, in one phrase."""
    where = record["provenance"]
    return f"{where['gpu']}, {where['date'][:10]}, commit {where['commit'][:7]}"


def decode() -> list[str]:
    """Time per step at the full geometry."""
    record = load("h200/full_geometry.json")
    lines = [
        f"""\
One decode step of the 30-billion geometry, synthetic weights, host included (measured:
`bench/results/h200/full_geometry.json`; {origin(record)}).
This version of the kernel is written to be right and clear. The bound is bytes / 4.814 TB/s with
the experts that uniform routing hits (derived). Memory in use includes PyTorch's caches for the
comparison below.
""",
        "| context | batch | ms per step | tokens/s | bound, ms | of the bound | GPU memory, GB |",
        "|--:|--:|--:|--:|--:|--:|--:|",
    ]
    for row in record["rows"]:
        bound = row["bytes"] / BANDWIDTH * 1e3
        cells = (
            f"{row['context']:,}",
            row["batch"],
            f"{row['ms_per_step']:.2f}",
            f"{row['tokens_per_s']:.0f}",
            f"{bound:.2f}",
            f"{bound / row['ms_per_step']:.0%}",
            f"{row['device_memory_used_gb']:.0f}",
        )
        lines.append("| " + " | ".join(map(str, cells)) + " |")
    return lines


def accuracy() -> list[str]:
    """Distance of the kernel's logits from PyTorch at the full geometry."""
    record = load("h200/full_geometry.json")
    lines = [
        """\
Logits at 49 layers against PyTorch with float32 activations, on the same weights and cache
(measured, same file): relative error, median KL divergence in nats, share of equal greedy tokens.
The last three columns are the noise of bfloat16 itself: PyTorch in bfloat16 against the same.
""",
        "| context | batch | kernel: error | KL | greedy | bf16: error | KL | greedy |",
        "|--:|--:|--:|--:|--:|--:|--:|--:|",
    ]

    def cells(d: dict[str, float]) -> str:
        error, kl, same = d["relative_error"], d["kl_median"], d["greedy_agreement"]
        return f"{error:.3f} | {kl:.4f} | {same:.0%}"

    lines += [
        f"| {row['context']:,} | {row['batch']} | {cells(row['kernel_vs_float32'])} | "
        f"{cells(row['bf16_vs_float32'])} |"
        for row in record["rows"]
        if "kernel_vs_float32" in row
    ]
    return lines


def host() -> list[str]:
    """Speed of nano on a CPU."""
    record = load("host_speed.json")
    where = record["provenance"]
    lines = [
        f"""\
nano through the megakernel on a CPU (measured: `bench/results/host_speed.json`;
{where["processor"]}, {where["cores"]} cores, {where["date"][:10]}).
""",
        "| SMs | ms per token | tokens/s |",
        "|--:|--:|--:|",
    ]
    lines += [
        f"| {r['n_sm']} | {r['ms_per_token']:.1f} | {r['tokens_per_s']:.0f} |"
        for r in record["rows"]
    ]
    return lines


TABLES = {"decode": decode, "accuracy": accuracy, "host": host}


def filled(text: str) -> str:
    """The text with every known table renewed."""

    def renew(match: re.Match[str]) -> str:
        name = match["name"]
        return "\n".join([f"<!-- table:{name} -->", *TABLES[name](), f"<!-- /table:{name} -->"])

    return re.sub(
        r"<!-- table:(?P<name>\w+) -->.*?<!-- /table:(?P=name) -->", renew, text, flags=re.S
    )


def main() -> int:
    """Entry point."""
    check = "--check" in sys.argv
    stale = [
        name for name in FILES if filled((ROOT / name).read_text()) != (ROOT / name).read_text()
    ]
    if not check:
        for name in stale:
            (ROOT / name).write_text(filled((ROOT / name).read_text()))
    state = f"{'stale' if check else 'renewed'} in {', '.join(stale)}" if stale else "up to date"
    print(f"tables: {state}")
    return 1 if stale and check else 0


if __name__ == "__main__":
    sys.exit(main())
