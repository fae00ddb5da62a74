"""`mkref chat`: talk to a served model in the terminal.

    mkref serve          in one terminal
    mkref chat           in another

`/reset` forgets the conversation, `/quit` or Ctrl-D ends. Any OpenAI-compatible endpoint will do.
"""

from __future__ import annotations

import argparse
import sys
from typing import Any

from mkref.cli.arguments import add_url, number, whole

__all__ = ["add_commands"]


def add_commands(commands: Any) -> None:
    """Add `chat` to the parser."""
    parser = commands.add_parser("chat", help="talk to a served model")
    add_url(parser)
    parser.add_argument("--model", default="nano", help="what the endpoint calls it; default: nano")
    parser.add_argument("--api-key", metavar="KEY", default="")
    parser.add_argument("--system", metavar="TEXT", help="how the model is to behave")
    parser.add_argument(
        "--max-tokens", type=whole(1), default=256, metavar="N", help="default: 256"
    )
    parser.add_argument("--temperature", type=number, metavar="T", help="default: the endpoint's")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Read a line, print the answer as it comes, until the input ends."""
    from mkref.serve.client import answers

    opening = [{"role": "system", "content": options.system}] if options.system else []
    turns: list[dict[str, str]] = [*opening]
    while True:
        print("> ", end="", flush=True)
        line = sys.stdin.readline()
        said = line.strip()
        if not line or said == "/quit":
            print()
            return 0
        if said == "/reset":
            turns = [*opening]
        elif said:
            turns.append({"role": "user", "content": said})
            answer = ""
            for piece in answers(
                options.url,
                options.api_key,
                model=options.model,
                messages=turns,
                max_tokens=options.max_tokens,
                temperature=options.temperature,
            ):
                print(piece, end="", flush=True)
                answer += piece
            print()
            turns.append({"role": "assistant", "content": answer})
