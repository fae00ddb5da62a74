"""`mkref generate`: a prompt through the kernel, its text to standard output while it comes.

What the run was like goes to standard error, so that the text can be piped.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from statistics import median
from typing import TYPE_CHECKING, Any

from mkref.cli.arguments import add_json, add_machine, add_model, number, token_ids, whole

if TYPE_CHECKING:
    from mkref.engine import Engine

__all__ = ["add_commands", "add_prompt", "prompt_of", "room_for"]

DEFAULT_TOKENS = 64
MAX_SEED = 2**64 - 1


def add_prompt(parser: argparse.ArgumentParser, *, required: bool = True) -> None:
    """`--prompt` and `--prompt-ids`."""
    prompt = parser.add_mutually_exclusive_group(required=required)
    prompt.add_argument("--prompt", metavar="TEXT", help="text to go on from")
    prompt.add_argument(
        "--prompt-ids", metavar="1,2,3", type=token_ids, help="the same as token ids"
    )


def prompt_of(options: argparse.Namespace, default: str | list[int] | None = None) -> Any:
    """Text or token ids, whichever was given."""
    if options.prompt_ids is not None:
        return options.prompt_ids
    return default if options.prompt is None else options.prompt


def room_for(engine: Engine, prompt: Any, asked: int | None, default: int) -> int:
    """Tokens of the answer: as many as asked for; else the default, if the context has room."""
    if asked is not None:
        return asked  # too many is the user's mistake, and the engine says so
    if isinstance(prompt, str):
        if engine.tokenizer is None:
            return default
        prompt = engine.tokenizer.encode(prompt)
    return max(min(default, engine.max_context - len(prompt)), 1)


def add_commands(commands: Any) -> None:
    """Add `generate` to the parser."""
    parser = commands.add_parser("generate", help="go on from a prompt")
    add_model(parser)
    add_prompt(parser)
    parser.add_argument(
        "--max-tokens", metavar="N", type=whole(1),
        help=f"default: {DEFAULT_TOKENS}, or what the context has room for",
    )  # fmt: skip
    parser.add_argument(
        "--temperature", metavar="T", type=number, default=0.0, help="default: 0, greedy"
    )
    parser.add_argument(
        "--seed", metavar="S", type=whole(0, MAX_SEED), default=0, help="of the draw; default: 0"
    )
    parser.add_argument(
        "--stop", metavar="TEXT", action="append", help="ends the text; may be given several times"
    )
    parser.add_argument(
        "--ignore-eos", action="store_true", help="go on after a token that ends a text"
    )
    add_machine(parser)
    add_json(parser, "token_ids, text, finish_reason, machine, ms_per_token and more")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Load, generate, print."""
    from mkref.engine import Engine

    with Engine.load(options.model, options.machine, options.sms, options.context) as engine:
        settings = {
            "max_tokens": room_for(engine, prompt_of(options), options.max_tokens, DEFAULT_TOKENS),
            "temperature": options.temperature,
            "seed": options.seed,
            "stop": options.stop,
            "ignore_eos": options.ignore_eos,
        }
        if options.json:
            _print_json(engine, prompt_of(options), settings)
        else:
            _print_text(engine, prompt_of(options), settings)
    return 0


def _print_json(engine: Engine, prompt: Any, settings: dict[str, Any]) -> None:
    done = engine.generate(prompt, **settings)
    report = {
        "token_ids": done.token_ids,
        "text": done.text,
        "prompt_token_ids": done.prompt_token_ids,
        "finish_reason": done.finish_reason,
        "machine": done.machine,
        "n_sm": engine.plan.n_sm,
        "ms_per_token": round(done.ms_per_token, 4),
    }
    print(json.dumps(report))


def _print_text(engine: Engine, prompt: Any, settings: dict[str, Any]) -> None:
    """Stream; a model without a tokenizer shows token ids."""
    times: list[float] = []
    begin = time.perf_counter()
    for token in engine.stream(prompt, **settings):
        now = time.perf_counter()
        times.append(now - begin)
        begin = now
        shown = token.text if engine.tokenizer else f"{token.id} "
        print(shown, end="", flush=bool(shown))
    print()
    # The first one carries the prompt.
    ms = 1e3 * median(times[1:] or times)
    print(
        f"{len(times)} tokens, {ms:.2f} ms/token ({1e3 / ms:.1f} tokens/s) on {engine.machine.name}"
        f"{'' if engine.machine.name == 'torch' else f' (n_sm = {engine.plan.n_sm})'}",
        file=sys.stderr,
    )
