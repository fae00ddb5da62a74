"""`mkref serve`: the OpenAI-compatible endpoint, until Ctrl-C or SIGTERM.

Without arguments it serves the model that comes with mkref, on this computer only. Log lines go to
standard error as JSON; the address goes to standard output once it listens.
"""

from __future__ import annotations

import argparse
import os
from typing import TYPE_CHECKING, Any

from mkref.cli.arguments import add_key, add_machine, add_model, name, number_up_to, whole

if TYPE_CHECKING:
    from mkref.engine import Engine

__all__ = ["add_commands"]

PORT = 8000


def add_commands(commands: Any) -> None:
    """Add `serve` to the parser."""
    parser = commands.add_parser("serve", help="an OpenAI-compatible endpoint")
    what = parser.add_mutually_exclusive_group()
    add_model(what)
    what.add_argument(
        "--geometry", choices=("north",),
        help="instead of a model: North with synthetic weights, for prompts of token ids",
    )  # fmt: skip
    parser.add_argument(
        "--host", type=name, default="127.0.0.1", help="default: 127.0.0.1, this computer"
    )
    parser.add_argument(
        "--port", type=whole(0, 65535), default=PORT, metavar="N",
        help=f"default: {PORT}; 0 takes a free one",
    )  # fmt: skip
    add_key(parser, "what clients must send")
    parser.add_argument("--model-id", metavar="NAME", type=name, help="what clients call the model")
    parser.add_argument(
        "--rows", type=int, choices=(8, 16, 32), default=8, help="most rows of a step; default: 8"
    )
    how = parser.add_mutually_exclusive_group()
    how.add_argument(
        "--exact", action="store_true",
        help="prompts go through the kernel only: the same tokens alone and in any batch",
    )  # fmt: skip
    how.add_argument(
        "--fast", dest="exact", action="store_false",
        help="long prompts go through PyTorch, which is faster and rounds otherwise; the default",
    )  # fmt: skip
    parser.add_argument(
        "--max-queue", type=whole(1), default=256, metavar="N",
        help="requests that may wait; more are refused with 429; default: 256",
    )  # fmt: skip
    parser.add_argument(
        "--request-timeout", type=number_up_to(1e9, 1e-3), metavar="S",
        help="seconds of a request; default: no end",
    )  # fmt: skip
    parser.add_argument(
        "--log-level", choices=("debug", "info", "warning", "error"), default="info"
    )
    add_machine(parser)
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Load, listen, serve."""
    from mkref.serve.app import create_app
    from mkref.serve.logs import configure_logs
    from mkref.serve.run import open_socket, serve
    from mkref.serve.service import Service
    from mkref.serve.settings import Settings

    settings = Settings(
        model=options.model_id
        or options.geometry
        or os.path.basename(os.path.normpath(options.model)),
        api_key=options.api_key,
        request_timeout_s=options.request_timeout,
    )
    listening = open_socket(options.host, options.port)  # before anything is loaded
    try:
        engine = _engine(options)
        configure_logs(level=options.log_level)
        with engine:
            engine.machine.get_ready()  # else a client waits for a compiler
            service = Service(engine, max_queue=options.max_queue)
            app = create_app(service, settings)
            host, port = listening.getsockname()[:2]
            where = f"[{host}]" if ":" in host else host
            print(
                f"{settings.model} on {engine.machine.name}: http://{where}:{port}/v1", flush=True
            )
            try:
                serve(app, settings, listening)
            finally:
                service.close()
    finally:
        listening.close()
    return 0


def _engine(options: argparse.Namespace) -> Engine:
    from mkref.engine import Engine

    sizes = (options.machine, options.sms, options.context)
    how = {"rows": options.rows, "exact": options.exact}
    if options.geometry is None:
        return Engine.load(options.model, *sizes, **how)
    from mkref.config import NORTH_MINI_CODE
    from mkref.machine import resolve
    from mkref.measure.session import make_weights

    weights = make_weights(NORTH_MINI_CODE, "cuda" if resolve(options.machine) == "cuda" else "cpu")
    return Engine.from_weights(NORTH_MINI_CODE, weights, *sizes, **how)
