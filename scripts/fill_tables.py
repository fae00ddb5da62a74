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
"""Bytes per second, data sheet of the H200: memory clock times bus width."""


def load(name: str) -> dict[str, Any]:
    """One record."""
    return json.loads((RESULTS / name).read_text())  # type: ignore[no-any-return]


def origin(record: dict[str, Any]) -> str:
    """Where a record comes from, in one phrase."""
    where = record["provenance"]
    return f"{where['gpu']}, {where['date'][:10]}, commit {where['commit'][:7]}"


def decode() -> list[str]:
    """Time per step at the full geometry."""
    record = load("h200/full_geometry.json")
    lines = [
        "One decode step of the 30-billion geometry, synthetic weights, host included (measured: "
        f"`bench/results/h200/full_geometry.json`; {origin(record)}). Version one of the kernel is written to be right "
        "and clear; the bound is bytes / 4.814 TB/s (derived).",
        "",
        "| context | batch | ms per step | tokens/s | bound, ms | share of the bound | memory, GB |",
        "|--:|--:|--:|--:|--:|--:|--:|",
    ]
    for row in record["rows"]:
        bound = row["bytes"] / BANDWIDTH * 1e3
        lines.append(
            f"| {row['context']:,} | {row['batch']} | {row['ms_per_step']:.2f} | {row['tokens_per_s']:.0f} | "
            f"{bound:.2f} | {bound / row['ms_per_step']:.0%} | {row['device_memory_used_gb']:.0f} |"
        )
    return lines


def accuracy() -> list[str]:
    """Distance of the kernel's logits from PyTorch at the full geometry."""
    record = load("h200/full_geometry.json")
    lines = [
        "Logits at 49 layers against PyTorch on the same weights and cache (measured, same file). The right column is the "
        "noise of bf16 itself: PyTorch in bf16 against PyTorch with float32 activations.",
        "",
        "| context | batch | kernel vs float32: error, median KL, same token | bf16 vs float32: error, median KL, same token |",
        "|--:|--:|---|---|",
    ]

    def cell(d: dict[str, float]) -> str:
        return f"{d['relative_error']:.3f}, {d['kl_median']:.4f}, {d['greedy_agreement']:.0%}"

    lines += [
        f"| {r['context']:,} | {r['batch']} | {cell(r['kernel_vs_float32'])} | {cell(r['bf16_vs_float32'])} |"
        for r in record["rows"]
        if "kernel_vs_float32" in r
    ]
    return lines


TABLES = {"decode": decode, "accuracy": accuracy}


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
    stale = []
    for name in FILES:
        path = ROOT / name
        text = path.read_text()
        new = filled(text)
        if new != text:
            stale.append(name)
            if "--check" not in sys.argv:
                path.write_text(new)
    print(
        f"tables: {'stale' if '--check' in sys.argv else 'renewed'} in {', '.join(stale)}"
        if stale
        else "tables: up to date"
    )
    return 1 if stale and "--check" in sys.argv else 0


if __name__ == "__main__":
    sys.exit(main())
