"""`mkref bench`: how fast whole decode steps are, and what each part of the design brings.

`bench decode` runs on any machine, `bench ladder` on a GPU, `bench serve` against an endpoint
(`mkref.cli.bench_serve`). A record is written as JSON after every
case, so that an interrupted run leaves what it has.

What it does not do: fill tables (`scripts/fill_tables.py`).
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mkref.cli.arguments import whole, wholes
from mkref.cli.bench_serve import add_serve
from mkref.errors import MachineError, RequestError
from mkref.machine import MACHINES

if TYPE_CHECKING:
    from mkref.config import NorthConfig
    from mkref.measure.decode import Case

__all__ = ["add_commands"]

CONTEXT = 8192
NORTH = ("north", "north-mini-code")


def add_commands(commands: Any) -> None:
    """Add `bench decode`, `bench ladder` and `bench serve` to the parser."""
    group = commands.add_parser("bench", help="measure whole decode steps, or a server")
    kinds = group.add_subparsers(dest="what", metavar="WHAT", required=True)

    parser = kinds.add_parser("decode", help="time per step by batch and context")
    _add_common(parser, batch="1,2,4,8")
    parser.add_argument(
        "--steps", metavar="N", type=whole(1), default=256,
        help="steps of a case that count, after a warm-up (default: %(default)s)",
    )  # fmt: skip
    parser.add_argument(
        "--machine", metavar="M", default="auto",
        help=f"auto, {', '.join(name for name in MACHINES if name != 'torch')}",
    )  # fmt: skip
    parser.add_argument(
        "--rows", metavar="8|16|32", type=int, choices=(8, 16, 32), default=8,
        help="rows that the kernel is built for, more for larger batches (default: %(default)s)",
    )  # fmt: skip
    parser.add_argument(
        "--ragged", action="store_true", help="also rows of other lengths with the same mean"
    )
    parser.add_argument(
        "--prompt", metavar="R,..", type=wholes(1), default=[],
        help="also prompts, R consecutive tokens of one sequence in a step",
    )  # fmt: skip
    parser.set_defaults(run=run_decode)

    parser = kinds.add_parser("ladder", help="the same tasks, from a launch each to one launch")
    _add_common(parser, batch="1,4,8")
    parser.add_argument(
        "--rounds", metavar="R", type=whole(1), default=10,
        help="turns that count; a turn is 32 steps of every rung (default: %(default)s)",
    )  # fmt: skip
    parser.add_argument(
        "--only", metavar="a,b,..", default="", help="letters of the rungs (default: all)"
    )
    parser.set_defaults(run=run_ladder)
    add_serve(kinds)


def _add_common(parser: argparse.ArgumentParser, batch: str) -> None:
    parser.add_argument(
        "--geometry", metavar="north|NAME|PATH", default="north",
        help="north with synthetic weights, a model that comes with mkref, or a folder with "
        "config.json and safetensors (default: %(default)s)",
    )  # fmt: skip
    parser.add_argument(
        "--batch", metavar="N,..", type=wholes(1), default=batch, help="default: %(default)s"
    )
    parser.add_argument(
        "--context", metavar="N,..", type=wholes(4),
        help=f"default: {CONTEXT}, or what the model has room for",
    )  # fmt: skip
    parser.add_argument("--sms", metavar="K", type=whole(1, 1024), help="default: all")
    parser.add_argument("--json", metavar="FILE", help="write the record there")


def _model(options: argparse.Namespace) -> tuple[NorthConfig, Path | None]:
    """Geometry, and the folder of the weights if they are not to be made."""
    from mkref.config import NORTH_MINI_CODE
    from mkref.engine.load import load_geometry, model_folder

    if options.geometry in NORTH:
        return NORTH_MINI_CODE, None
    return load_geometry(options.geometry), model_folder(options.geometry)


def _check(options: argparse.Namespace, config: NorthConfig) -> None:
    from mkref.measure.record import check_target

    check_target(options.json)
    most = config.max_position_embeddings
    options.context = options.context or [min(CONTEXT, most)]
    for context in options.context:
        if context > most:
            raise RequestError(f"--context: {context} tokens; the model has {most} positions")


def _cases(options: argparse.Namespace) -> list[Case]:
    """All cases in the order in which they run; the first one is the cold start."""
    from mkref.measure.decode import Case, rows_for

    out = []
    for context in options.context:
        for batch in options.batch:
            rows = rows_for(batch, options.rows)
            out.append(Case(batch, context, "even", rows))
            if options.ragged and batch > 1:
                out.append(Case(batch, context, "ragged", rows))
        for batch in options.prompt:
            if batch > context:
                raise RequestError(f"--prompt: {batch} tokens do not fit into {context}")
            out.append(Case(batch, context, "prompt", rows_for(batch, options.rows)))
    return out


def run_decode(options: argparse.Namespace) -> int:
    """Measure case after case; a case that fails is reported, and the exit status is 1."""
    from mkref.errors import MkrefError
    from mkref.measure.decode import HEADER, format_row
    from mkref.measure.record import provenance, write_record
    from mkref.measure.session import Session

    config, folder = _model(options)
    _check(options, config)
    cases = _cases(options)
    session = Session.begin(config, folder, options.machine, options.sms)
    rows: list[dict[str, Any]] = []
    failed = False
    print(HEADER)
    for case in cases:
        try:
            rows.append(session.run(case, options.steps))
        except MkrefError as error:
            failed = True
            first = str(error).partition("\n")[0]
            print(f"bench: batch {case.batch}, context {case.context}: {first}", file=sys.stderr)
            continue
        print(format_row(rows[-1]), flush=True)
        made = provenance(session.machine, geometry=options.geometry, **session.to_dict())
        write_record(options.json, made, rows)
    return int(failed or not rows)


def run_ladder(options: argparse.Namespace) -> int:
    """Measure batch after batch; the exit status is 1 if a rung failed or had other tokens."""
    from mkref.machine import resolve
    from mkref.measure.ladder import RUNGS, climb, format_ladder
    from mkref.measure.record import provenance, write_record
    from mkref.measure.session import Session

    config, folder = _model(options)
    _check(options, config)
    letters = set(options.only.split(",")) if options.only else {rung.letter for rung in RUNGS}
    rungs = [rung for rung in RUNGS if rung.letter in letters]
    if unknown := letters - {rung.letter for rung in RUNGS}:
        raise RequestError(f"--only: {', '.join(sorted(unknown))}; the rungs are a to h")
    if max(options.batch) > 8:
        raise RequestError(f"--batch: {max(options.batch)} rows; the ladder takes 1 to 8")
    if resolve("cuda") != "cuda":
        raise MachineError("bench ladder: needs an NVIDIA GPU")
    session = Session.begin(config, folder, "cuda", options.sms)
    rows: list[dict[str, Any]] = []
    for context in options.context:
        for batch in options.batch:
            new = climb(
                session.weights,
                batch,
                context,
                options.rounds,
                n_sm=session.n_sm,
                rungs=rungs,
                say=lambda line: print(f"bench: {line}", file=sys.stderr, flush=True),
            )
            rows += new
            print(f"batch {batch}, {context:,} tokens, {options.rounds} rounds")
            print(format_ladder(new), flush=True)
            made = provenance("cuda", geometry=options.geometry, n_sm=session.n_sm)
            write_record(options.json, made, rows)
    good = all("error" not in row and row.get("same_tokens") is not False for row in rows)
    return 0 if good else 1
