"""`mkref trace`: run some tokens with a kernel that stamps its tasks, and write the last step.

The file is Chrome JSON: https://ui.perfetto.dev opens it. Printed are what the step adds up to, its
critical path and, where the kernel stamps it, how full the rings were. Stamps cost time, so a
traced step is slower than the same step without.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
from typing import Any

from mkref.cli.arguments import add_json, add_machine, add_model, whole
from mkref.cli.generate import add_prompt, prompt_of, room_for
from mkref.errors import MachineError, RequestError

__all__ = ["add_commands"]

PROMPT = "def add(a, b):\n"
DEFAULT_TOKENS = 4


def add_commands(commands: Any) -> None:
    """Add `trace` to the parser."""
    parser = commands.add_parser("trace", help="what every SM did in one decode step, for Perfetto")
    add_model(parser)
    add_prompt(parser, required=False)
    parser.add_argument(
        "--max-tokens", metavar="N", type=whole(1),
        help=f"tokens to run; the step of the last one is written (default: {DEFAULT_TOKENS})",
    )  # fmt: skip
    parser.add_argument("--out", metavar="FILE", default="trace.json", help="default: %(default)s")
    add_machine(parser)
    add_json(parser, "what was written")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Load with stamps, run, write."""
    from mkref.engine import Engine
    from mkref.trace.path import critical_path, path_report
    from mkref.trace.perfetto import write_perfetto
    from mkref.trace.record import take_trace
    from mkref.trace.ring import describe_ring
    from mkref.trace.summary import describe

    folder = os.path.dirname(options.out) or "."
    if not options.out or os.path.isdir(options.out) or not os.path.isdir(folder):
        raise RequestError(f"--out: {options.out!r}; must be a file in a folder that exists")
    if options.machine == "torch":
        raise MachineError("trace: machine 'torch' runs no tasks; give cuda, host or interpreter")
    with Engine.load(
        options.model, options.machine, options.sms, options.context, trace=True
    ) as engine:
        prompt = prompt_of(options, PROMPT if engine.tokenizer else [engine.config.vocab_size // 2])
        n_tokens = room_for(engine, prompt, options.max_tokens, DEFAULT_TOKENS)
        engine.generate(prompt, max_tokens=n_tokens, ignore_eos=True)
        provenance = {
            "machine": engine.machine.name,
            "model": str(options.model),
            "platform": platform.platform(),
        }
        trace = take_trace(engine.machine, provenance)
    write_perfetto(trace, options.out)
    if options.json:
        report = {"out": options.out, "machine": provenance["machine"], "n_sm": trace.n_sm}
        path = critical_path(trace)
        on_path = {
            "tasks": len(path),
            "work_ns": sum(link.work_ns for link in path),
            "wait_ns": sum(link.wait_ns for link in path),
        }
        sums = {"tasks": trace.n_tasks, "span_ns": trace.span_ns, "critical_path": on_path}
        print(json.dumps({**report, **sums}))
        return 0
    print(describe(trace))
    if trace.stages is not None:
        print(describe_ring(trace))
    print(f"\n{path_report(trace)}\n")
    print(f"written to {options.out}; open it at https://ui.perfetto.dev")
    return 0
