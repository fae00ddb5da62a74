"""`mkref chat`: talk to a model in the terminal.

    mkref chat                                     nano, in this process
    mkref chat --url http://127.0.0.1:8000/v1      what is served there

`/reset` forgets the conversation, `/quit` or Ctrl-D ends. Any OpenAI-compatible endpoint will do.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

from mkref.cli.arguments import add_key, add_machine, name, number_up_to, url, whole
from mkref.errors import RequestError

__all__ = ["add_commands"]


def add_commands(commands: Any) -> None:
    """Add `chat` to the parser."""
    parser = commands.add_parser("chat", help="talk to a model, loaded here or served")
    parser.add_argument(
        "--url", type=url, help="of an endpoint; default: none, the model is loaded here"
    )
    parser.add_argument(
        "--model", metavar="NAME|PATH", type=name, default="nano",
        help="what to load, or what the endpoint calls it; default: nano",
    )  # fmt: skip
    add_key(parser, "what the endpoint wants")
    parser.add_argument("--system", metavar="TEXT", help="how the model is to behave")
    parser.add_argument(
        "--max-tokens", type=whole(1), default=256, metavar="N", help="of an answer; default: 256"
    )
    parser.add_argument(
        "--temperature", type=number_up_to(2), metavar="T", help="default: the endpoint's, or 1"
    )
    add_machine(parser)
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Load or find the model, and talk."""
    if options.url is not None:
        here = {"--machine": options.machine != "auto", "--sms": options.sms}
        here["--context"] = options.context
        if given := [option for option, value in here.items() if value]:
            raise RequestError(f"{given[0]}: not with --url; the model there is loaded already")
        from mkref.serve.client import answers

        return talk(options, partial(answers, options.url, options.api_key or ""))
    from mkref.serve.app import require

    require("pydantic", "llguidance", "cohere_melody")
    from mkref.engine import Engine
    from mkref.serve.embedded import EmbeddedChat

    with (
        Engine.load(options.model, options.machine, options.sms, options.context) as engine,
        EmbeddedChat(engine) as chat,
    ):
        return talk(options, lambda **fields: chat.answers(**{**fields, "model": None}))


def talk(options: argparse.Namespace, answer: Callable[..., Iterator[str]]) -> int:
    """Read a line, print the answer as it comes, until the input ends."""
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
            answered = ""
            for piece in answer(
                model=options.model,
                messages=turns,
                max_tokens=options.max_tokens,
                temperature=options.temperature,
            ):
                print(piece, end="", flush=True)
                answered += piece
            print()
            turns.append({"role": "assistant", "content": answered})
