"""`mkref bench serve`: load on an OpenAI-compatible endpoint, and what its clients notice.

    mkref bench serve --concurrency 1,2,4,8
    mkref bench serve --url http://gpu:8000/v1 --model north --rate 0.5,1,2 --token-ids 256000

Any endpoint with streamed completions can be the target, mkref's or not. Options that only some of
them know (`--ignore-eos`, `--token-ids`) are left out unless asked for.

What it does not do: start a server; the record's machine is the one that sends.
"""

from __future__ import annotations

import argparse
import asyncio
import math
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from mkref.cli.arguments import add_key, add_url, name, number, number_up_to, whole, wholes

if TYPE_CHECKING:
    from mkref.measure.load import Job
    from mkref.serve.target import HttpTarget

__all__ = ["add_serve"]

HEADER = (
    f"{'load':>12} {'failed':>9} {'req/s':>8} {'tokens/s':>9} "
    f"{'TTFT p50':>9} {'p90':>9} {'p99':>9} {'ITL p50':>9} {'p90':>9} {'p99':>9}  (ms)"
)


def _range(text: str) -> tuple[int, int]:
    """A type: `100`, or `16-200`."""
    low, dash, high = text.partition("-")
    try:
        least, most = int(low), int(high if dash else low)
    except ValueError:
        least, most = 0, 0
    if not 1 <= least <= most:
        raise argparse.ArgumentTypeError(
            f"{text!r}; must be a whole number of at least 1, or a range of them such as 16-200"
        )
    return least, most


def _rates(text: str) -> list[float]:
    """A type: positive numbers with commas between them."""
    rates = [number(part) for part in text.split(",")]
    if not all(1e-3 <= rate <= 1e4 for rate in rates):
        raise argparse.ArgumentTypeError(f"{text!r}; must be from 0.001 to 10000 a second")
    return rates


def add_serve(kinds: Any) -> None:
    """Add `serve` to the parser of `bench`."""
    parser = kinds.add_parser("serve", help="load on an OpenAI-compatible endpoint")
    add_url(parser)
    parser.add_argument(
        "--model", metavar="NAME", type=name, help="default: none, which mkref takes"
    )
    add_key(parser, "what the endpoint wants")
    how = parser.add_mutually_exclusive_group()
    how.add_argument(
        "--concurrency", metavar="N,..", type=wholes(1), default=[1],
        help="clients, each of which sends when it has its answer; default: 1",
    )  # fmt: skip
    how.add_argument(
        "--rate", metavar="R,..", type=_rates, help="requests a second, by Poisson arrivals"
    )
    parser.add_argument(
        "--requests", metavar="N", type=whole(1, 1_000_000), default=32,
        help="of each load; default: 32",
    )  # fmt: skip
    parser.add_argument(
        "--warm-up", metavar="N", type=whole(0, 1000), default=1,
        help="requests before, one by one, that do not count; default: 1",
    )  # fmt: skip
    parser.add_argument(
        "--prompt-tokens", metavar="N|N-M", type=_range, default=(16, 200),
        help="length of prompts; default: 16-200",
    )  # fmt: skip
    parser.add_argument(
        "--max-tokens", metavar="N|N-M", type=_range, default=(32, 64),
        help="longest answers; default: 32-64",
    )  # fmt: skip
    parser.add_argument(
        "--token-ids", metavar="V", type=whole(5),
        help="prompts are random token ids below V; default: text, of about that length",
    )  # fmt: skip
    parser.add_argument(
        "--ignore-eos", action="store_true", help="answers are as long as they may (mkref, vLLM)"
    )
    parser.add_argument(
        "--temperature", metavar="T", type=number_up_to(2), help="default: the endpoint's"
    )
    parser.add_argument(
        "--seed", metavar="S", type=whole(0, 2**32 - 1), default=0, help="of the load; default: 0"
    )
    parser.add_argument("--json", metavar="FILE", help="write the record there")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """One load after another; the exit status is 1 if a request failed."""
    from mkref.measure.record import check_target, provenance, write_record

    check_target(options.json)
    target = _target(options)
    loads: list[tuple[str, float]] = [("rate", rate) for rate in options.rate or ()] or [
        ("concurrency", n) for n in options.concurrency
    ]
    rows: list[dict[str, Any]] = []
    asyncio.run(_warm_up(options, target))
    print(HEADER)
    for kind, value in loads:
        load = _jobs(options, value if kind == "rate" else None, len(rows))
        rows.append({kind: value, **asyncio.run(_measure(target, load, kind, value))})
        print(format_row(kind, value, rows[-1]), flush=True)
        for error in rows[-1]["errors"]:
            print(f"{'':>12} {error}", flush=True)
        made = provenance(
            "client",
            url=options.url,
            model=options.model,
            prompts="text" if options.token_ids is None else "token ids",
            prompt_tokens=options.prompt_tokens,
            max_tokens=options.max_tokens,
            seed=options.seed,
            fields=target.fields,
        )
        made["command"] = _without_key(made["command"], options.api_key)
        write_record(options.json, made, rows)
    return int(any(row["failed"] for row in rows))


def _without_key(command: str, key: str | None) -> str:
    return command.replace(key, "KEY") if key else command


def _target(options: argparse.Namespace) -> HttpTarget:
    from mkref.serve.target import HttpTarget

    fields: dict[str, Any] = {}
    if options.temperature is not None:
        fields["temperature"] = options.temperature
    if options.ignore_eos:
        fields["ignore_eos"] = True
    if options.token_ids is not None:
        fields["return_token_ids"] = True  # a model without a tokenizer answers without text
    return HttpTarget(options.url, options.model, options.api_key, options.token_ids, fields)


def _jobs(options: argparse.Namespace, rate: float | None, index: int) -> list[Job]:
    """Other prompts in every load, or the last one's would be in the cache."""
    from mkref.measure.load import jobs

    made = jobs(
        options.requests, options.prompt_tokens, options.max_tokens, rate, options.seed + index
    )
    first = options.seed * 10_000_000 + (index + 1) * 1_000_000
    return [replace(job, number=first + job.number) for job in made]


async def _measure(target: HttpTarget, load: list[Job], kind: str, value: float) -> dict[str, Any]:
    from mkref.measure.load import run_load, summary

    samples, seconds = await run_load(target, load, int(value) if kind == "concurrency" else None)
    return summary(samples, seconds)


async def _warm_up(options: argparse.Namespace, target: HttpTarget) -> None:
    """Refuse to measure what does not answer."""
    from mkref.errors import MkrefError
    from mkref.measure.load import jobs, run_load

    load = jobs(options.warm_up, options.prompt_tokens, options.max_tokens, None, options.seed)
    samples, _ = await run_load(target, load, 1)
    for sample in samples:
        if sample.error is not None and sample.error != "no token came":
            raise MkrefError(f"bench serve: {options.url} does not answer: {sample.error}")


def format_row(kind: str, value: float, row: dict[str, Any]) -> str:
    """A row of the record as a line below `HEADER`."""

    def three(name: str) -> str:
        found = row[name] or dict.fromkeys(("p50", "p90", "p99"), math.nan)
        return " ".join(f"{found[p]:9.2f}" for p in ("p50", "p90", "p99"))

    load = f"{value:g}/s" if kind == "rate" else f"{value:g} clients"
    return (
        f"{load:>12} {row['failed']:>4}/{row['requests']:<4} {row['requests_per_s']:8.2f} "
        f"{row['tokens_per_s']:9.1f} {three('ttft_ms')} {three('itl_ms')}"
    )
