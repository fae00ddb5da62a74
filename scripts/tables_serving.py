"""The tables of README.md about serving: what it adds to a step, and prompts.

`scripts/fill_tables.py` writes them.
"""

from __future__ import annotations

from typing import Any

__all__ = ["prompts", "serving"]

Record = dict[str, Any]


def serving(record: Record, origin: str) -> list[str]:
    """Steps read by clients beside the bare step; `record` is h200/serve.json."""
    through = {"http": "over HTTP", "service": "from the service below the endpoint"}
    lines = [
        f"""\
Clients that generate at the same time, prompts of different lengths, against the bare decode step
of the same rows (measured, read {through[record["read_through"]]}:
`bench/results/h200/serve.json`; {origin}).
Times in ms; p50 and p99 of the time between two arrivals of tokens at a client; drawn: temperature
1.0, top_p 0.95, as the vendor recommends. tokens/s count prompts and clients that end early.
""",
        "| clients | bare step | greedy | more | p50 | p99 | tokens/s | drawn | more | tokens/s |",
        "|--:|--:|--:|--:|--:|--:|--:|--:|--:|--:|",
    ]
    drawn = {(row["draw"], row["concurrency"]): row for row in record["rows"]}
    for n in sorted({row["concurrency"] for row in record["rows"]}):
        plain, usual = drawn["greedy", n], drawn["default", n]
        between = plain["itl_ms"]
        lines.append(
            f"| {n} | {plain['bare_ms']:.3f} | {plain['steady_ms']:.3f} | "
            f"{plain['over_bare']:+.1%} | {between['p50']:.2f} | {between['p99']:.2f} | "
            f"{plain['tokens_per_s']:.0f} | "
            f"{usual['steady_ms']:.3f} | {usual['over_bare']:+.1%} | {usual['tokens_per_s']:.0f} |"
        )
    return lines


def prompts(record: Record, origin: str) -> list[str]:
    """Both ways of a prompt, and what a running row notices; `record` is h200/prefill.json."""
    rows = record["rows"]

    def of(part: str) -> list[Record]:
        return [row for row in rows if row["part"] == part]

    lengths = sorted({row["prompt"] for row in of("torch")})
    waits = {str(row["chunk"]): row["ms_median"] for row in of("latency")}
    lines = [
        f"""
Prompts (measured: `bench/results/h200/prefill.json`; {origin}): tokens/s by the length
of the prompt, and the median time between two tokens of a sequence that generates meanwhile
({waits["no prompt"]:.1f} ms without a prompt).
""",
        "| way | " + " | ".join(f"{n:,}" for n in lengths) + " | between tokens, ms |",
        "|--|" + "--:|" * (len(lengths) + 1),
    ]
    ways = [(f"kernel, {n} rows of a step", of("kernel"), "rows", n) for n in (8, 7)]
    ways += [
        (f"PyTorch, chunks of {chunk:,}", of("torch"), "chunk", chunk)
        for chunk in sorted({row["chunk"] for row in of("torch")})
    ]
    for name, found, key, value in ways:
        speed = {row["prompt"]: row["tokens_per_s"] for row in found if row[key] == value}
        wait = waits.get(f"{value} rows" if key == "rows" else str(value))
        cells = [f"{speed[n]:,.0f}" if n in speed else "" for n in lengths]
        cells.append("" if wait is None else f"{wait:.1f}")
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    return lines
