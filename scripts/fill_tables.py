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
sys.path.insert(0, str(ROOT / "scripts"))

from tables_serving import prompts, serving

RESULTS = ROOT / "bench" / "results"
FILES = ("README.md",)
BANDWIDTH = 4.814e12
"""Bytes per second of the H200: memory clock times bus width as its driver reports them."""


MORE = ("h200/contexts.json", "h200/rows.json")
"""Records of the same form as h200/decode.json: other contexts, larger batches."""


def load(name: str) -> dict[str, Any]:
    """One record.

    Raises:
        SystemExit: it is not there; says how it is made.
    """
    file = RESULTS / name
    if not file.is_file():
        raise SystemExit(
            f"tables: the record bench/results/{name} is missing; `make bench` on a machine with "
            "an NVIDIA GPU makes it"
        )
    return json.loads(file.read_text())


def origin(record: dict[str, Any]) -> str:
    """Where a record comes from, in one phrase."""
    where = record["provenance"]
    return f"{where['gpu']}, {where['date'][:10]}, commit {where['commit'][:7]}"


def decode() -> list[str]:
    """Time per step at the full geometry, and the ladder if it was measured."""
    if not (RESULTS / "h200" / "decode.json").is_file():
        return first_version()
    record = load("h200/decode.json")
    made = record["provenance"]
    bandwidth, read = made["datasheet_bytes_per_s"] / 1e12, made["measured_bytes_per_s"]
    plain = f"; a plain read gets {read / 1e12:.2f} TB/s" if read else ""
    cold = made["cold_start_s"]
    lines = [
        f"""\
Whole decode steps of the 30-billion geometry, from token ids to the next token ids, host included:
bfloat16, synthetic weights, the kernel's own routing, greedy (measured:
`bench/results/h200/decode.json`; {origin(record)}). Bytes are counted from the experts that were
hit. The bound is bytes / {bandwidth:.3f} TB/s, the data sheet{plain}.
Ragged rows are from a quarter to seven quarters of the context long. A prompt's tokens share a
step. Other: GB in use beside weights and KV cache. The first
token came {cold["since_process_start"]:.0f} s after the process was started.
""",
        "| context | batch | ms/step | spread | tokens/s | GB/step | of bound | of read | other |",
        "|--:|--:|--:|--:|--:|--:|--:|--:|--:|",
    ]
    more = [name for name in MORE if (RESULTS / name).is_file()]
    for row in [*record["rows"], *(row for name in more for row in load(name)["rows"])]:
        batch = {
            "even": f"{row['batch']}",
            "ragged": f"{row['batch']} ragged",
            "prompt": f"{row['tokens_per_step']} of a prompt",
        }[row["kind"]]
        other = (row["device_bytes"] - row["weights_bytes"] - row["kv_bytes"]) / 1e9
        cells = (
            f"{row['context']:,}",
            batch,
            f"{row['ms_per_step']:.3f}",
            f"{row['spread_ms']:.3f}",
            f"{row['tokens_per_s']:.0f}",
            f"{row['bytes'] / 1e9:.2f}",
            f"{row['share_of_datasheet_bound']:.1%}",
            f"{row['share_of_measured_bandwidth']:.1%}" if read else "-",
            f"{other:.2f}",
        )
        lines.append("| " + " | ".join(cells) + " |")
    return lines + (ladder() if (RESULTS / "h200" / "ladder.json").is_file() else [])


def ladder() -> list[str]:
    """The same tasks from a launch per operation to many steps in one launch: ms per step."""
    record = load("h200/ladder.json")
    now, then = (r["provenance"].get("kernel") for r in (load("h200/decode.json"), record))
    older = "" if now == then else " It is of an earlier kernel than the table above."
    batches = sorted({row["batch"] for row in record["rows"]})
    lines = [
        f"""
The same tasks, step by step from a launch for each operation to one launch for many steps: ms per
step, measured in turns in one run (`bench/results/h200/ladder.json`; {origin(record)}). Where
several groupings of operations were tried, the best one stands here.{older}
""",
        "| | form | " + " | ".join(f"batch {b}" for b in batches) + " |",
        "|--|--|" + "--:|" * len(batches),
    ]
    forms = {
        "a": "one launch per operation",
        "b": "in a CUDA graph",
        "c": "graph and programmatic dependent launch",
        "d": "one launch, barriers between operations",
        "e": "counters between tasks",
        "f": "balanced, back-filled order",
        "g": "the loader ahead of dependencies",
        "h": "the next token on the device",
    }
    best = {(r["rung"], r["batch"]): r for r in record["rows"] if r.get("best")}
    for letter, form in forms.items():
        found = [best.get((letter, batch)) for batch in batches]
        cells = ["failed" if row is None else f"{row['ms_per_step']:.3f}" for row in found]
        lines.append(f"| {letter} | {form} | " + " | ".join(cells) + " |")
    return lines


def first_version() -> list[str]:
    """Time per step from the record of accuracy, whose steps are launches of their own."""
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


def served() -> list[str]:
    """What the endpoint adds to a step, and how prompts are taken in."""
    lines = []
    for name, table in (("h200/serve.json", serving), ("h200/prefill.json", prompts)):
        record = load(name)
        lines += table(record, origin(record))
    return lines


TABLES = {"decode": decode, "accuracy": accuracy, "host": host, "serving": served}


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
