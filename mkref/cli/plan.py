"""`mkref plan` and `mkref verify`: look at a plan, keep it in a file, check it.

Neither needs weights: a config.json is enough.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mkref.cli.arguments import add_json, add_machine, add_model, whole
from mkref.errors import MachineError, PlanError, RequestError

if TYPE_CHECKING:
    from mkref.plan.build import Plan

__all__ = ["CHECKED", "add_commands", "load_plan", "save_plan"]

ROWS = (8, 16, 32)
"""Rows of a batch that a plan can have room for (`mkref.plan.build.ROW_CHOICES`)."""
CHECKED = {
    "words": "opcodes, ranges, operands that the geometry fixes, weights inside the packed array",
    "counters": "as many arrivals as every wait asks for",
    "coverage": "every row block, slot and vocabulary row has exactly one owner",
    "release": "the place of the experts is given back, and not too early; layer follows layer",
    "progress": "no cycle, list order included: the plan runs to its end",
    "order": "every read after its writes, every reuse of memory after its last readers, "
    "within a step and from step to step",
    "buffers": "everything fits, for one sequence of the longest context at least",
}
"""What `mkref.plan.verify` proves; "buffers" needs to know the longest context."""


def add_commands(commands: Any) -> None:
    """Add `plan` and `verify` to the parser."""
    parser = commands.add_parser("plan", help="the tasks of a decode step, operation by operation")
    add_model(parser)
    add_machine(parser)
    parser.add_argument(
        "--rows", metavar="N", type=whole(1, ROWS[-1]), default=1,
        help="rows of the batch; beyond 8 the plan has room for 16 or 32; default: 1",
    )  # fmt: skip
    parser.add_argument(
        "--tokens", metavar="N", type=whole(1), help="in every row; default: 1024, or the context"
    )
    parser.add_argument("--out", metavar="FILE", help="write the plan itself, as JSON")
    add_json(parser, "the table")
    parser.set_defaults(run=run_plan)

    parser = commands.add_parser("verify", help="prove that a plan cannot race, hang or overrun")
    parser.add_argument("plan", nargs="?", metavar="PLAN", help="a file that `plan --out` wrote")
    add_model(parser)
    add_machine(parser)
    parser.add_argument(
        "--rows", metavar="8|16|32", type=int, choices=ROWS,
        help="rows that the plan has room for; default: 8, or the file's",
    )  # fmt: skip
    add_json(parser, "what was checked")
    parser.set_defaults(run=run_verify)


def load_plan(path: str | Path) -> Plan:
    """A plan from a file.

    Raises:
        PlanError: no such file, or no plan in it.
    """
    from mkref.plan.build import Plan

    try:
        data = json.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise PlanError(f"plan: cannot read {str(path)!r}: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise PlanError(f"plan: {path} is not JSON ({error})") from error
    if not isinstance(data, dict):
        raise PlanError(f"plan: {path} holds a {type(data).__name__}, not a plan")
    try:
        return Plan.from_dict(data)
    except (KeyError, TypeError, ValueError) as error:
        raise PlanError(f"plan: {path} is damaged ({error!r}); write it again") from error


def save_plan(plan: Plan, path: str | Path) -> None:
    """Write a plan to a file.

    Raises:
        PlanError: the file cannot be written.
    """
    try:
        Path(path).write_text(json.dumps(plan.to_dict()) + "\n", encoding="utf-8")
    except OSError as error:
        raise PlanError(f"plan: cannot write {path}: {error.strerror}") from error


def _planned(options: argparse.Namespace) -> tuple[Plan, int]:
    """The plan for a model and a number of SMs, and the longest sequence that it is for."""
    rows = next(choice for choice in ROWS if choice >= (options.rows or 1))
    from mkref.engine.load import load_geometry, sizes_for
    from mkref.machine import default_n_sm, resolve
    from mkref.plan.build import build_plan

    if options.machine == "torch":
        raise MachineError("plan: machine 'torch' runs no plan; give cuda, host or interpreter")
    config = load_geometry(options.model)
    sizes = sizes_for(config, options.context, rows=rows)
    # With --sms the machine does not matter, and need not run here.
    n_sm = options.sms or default_n_sm(resolve(options.machine))
    pages = {"full_pages": sizes.full_pages, "sliding_pages": sizes.sliding_pages}
    plan = build_plan(config, n_sm, **pages, rows=rows)
    return plan, sizes.max_context


def run_plan(options: argparse.Namespace) -> int:
    """Print the table, write the file."""
    from mkref.cli.plan_table import format_rows, op_rows
    from mkref.trace.summary import n_sms

    plan, max_context = _planned(options)
    tokens = min(1024, max_context) if options.tokens is None else options.tokens
    if tokens > max_context:
        raise RequestError(f"--tokens: {tokens}; must be at most {max_context}, the context")
    rows = op_rows(plan, rows=options.rows, context=tokens)
    if options.out:
        save_plan(plan, options.out)
    if options.json:
        report = {
            "n_sm": plan.n_sm,
            "tasks": plan.n_tasks,
            "counters": len(plan.counters),
            "rows": options.rows,
            "context": tokens,
            "ops": [row.to_dict() for row in rows[:-1]],
        }
        print(json.dumps(report))
        return 0
    print(
        f"{plan.n_tasks:,} tasks on {n_sms(plan.n_sm)}, {len(plan.counters):,} counters; "
        f"bytes of a step with {options.rows} of {plan.rows} rows, {tokens:,} tokens in each"
    )
    print(format_rows(rows))
    if options.out:
        print(f"written to {options.out}", file=sys.stderr)
    return 0


def _check_file(plan: Plan, options: argparse.Namespace) -> None:
    """Refuse to prove of a plan what it was not made for.

    Raises:
        RequestError: names the option.
    """
    most = plan.config.max_position_embeddings
    if options.context is not None and options.context > most:
        raise RequestError(f"--context: {options.context} tokens; the model has {most} positions")
    if options.rows not in (None, plan.rows):
        raise RequestError(f"--rows: {options.rows}; the plan in the file has {plan.rows}")


def run_verify(options: argparse.Namespace) -> int:
    """Check; a plan that fails is a `PlanError`."""
    from mkref.plan.verify import verify
    from mkref.trace.summary import n_sms

    if options.plan is not None:
        plan, max_context = load_plan(options.plan), options.context
        _check_file(plan, options)
    else:
        plan, max_context = _planned(options)
    report = verify(plan, max_context)
    checked = {name: what for name, what in CHECKED.items() if max_context or name != "buffers"}
    if options.json:
        sizes = {
            "ok": True,
            "n_sm": report.n_sm,
            "tasks": report.n_tasks,
            "counters": report.n_counters,
            "tasks_per_op": report.tasks_per_op,
            "max_context": max_context,
            "checked": list(checked),
        }
        print(json.dumps(sizes))
        return 0
    per_op = report.tasks_per_op.items()
    print(
        f"{report.n_tasks:,} tasks on {n_sms(report.n_sm)}, {report.n_counters:,} counters: "
        "no violation"
    )
    print(", ".join(f"{n:,} {name}" for name, n in per_op if n))
    print("\n".join(report.lines()[2:]))  # below the same two lines
    print("checked:")
    for name, what in checked.items():
        print(f"  {name:9} {what}")
    return 0
