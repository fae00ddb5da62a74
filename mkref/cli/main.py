"""Arguments in, exit status out: the parser of all commands, and what every error looks like.

What it does not do: import a command's machinery before that command runs; `mkref --help` is quick.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from typing import NoReturn

import mkref
from mkref.cli import bench, chat, doctor, generate, plan, progress, serve, trace
from mkref.errors import MkrefError

__all__ = ["build_parser", "main"]

USAGE, INTERRUPTED, NOBODY_READS = 2, 130, 141


class Parser(argparse.ArgumentParser):
    """An argument parser whose errors are one line."""

    def error(self, message: str) -> NoReturn:
        """Exit with status 2."""
        self.exit(USAGE, f"{self.prog}: {_one_line(message)} ({self.prog} --help lists them all)\n")


def build_parser() -> argparse.ArgumentParser:
    """The parser of `mkref` with all commands."""
    parser = Parser(
        prog="mkref",
        description="A mixture-of-experts model in one persistent CUDA kernel, on a GPU or a CPU.",
    )
    parser.add_argument("--version", action="version", version=f"mkref {mkref.__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for group in (doctor, generate, serve, chat, plan, trace, bench, progress):
        group.add_commands(commands)
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command.

    Args:
        arguments: without the program's name; None takes those of the process.

    Returns:
        The exit status.
    """
    # Closed by the shell (`>&-`): Python has None for it, and print would take the other one.
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, "w", encoding="utf-8"))  # noqa: SIM115
    # Text of a model may hold any character, a terminal may not.
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="backslashreplace")
    try:
        try:
            options = build_parser().parse_args(arguments)
            status = int(options.run(options))
        finally:
            sys.stdout.flush()
        return status
    except SystemExit as left:  # argparse: --help and its errors
        return left.code if isinstance(left.code, int) else USAGE
    except MkrefError as error:
        return _mistake(str(error))
    except BrokenPipeError:
        # The interpreter flushes standard output once more when it ends.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return NOBODY_READS
    except OSError as error:
        return _mistake(f"{error.filename or 'output'}: {error.strerror or error}")
    except KeyboardInterrupt:
        return INTERRUPTED


def _mistake(message: str) -> int:
    print(f"mkref: {_one_line(message)}", file=sys.stderr)
    return USAGE


def _one_line(message: str) -> str:
    return " ".join(message.split())
