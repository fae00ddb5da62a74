"""`mkref progress`: which exercises of the workbook are solved, and how far predictions were off.

It reads the one file that the lessons keep on this computer, and deletes it if asked to.
"""

from __future__ import annotations

import argparse
import json
from typing import Any

from mkref.cli.arguments import add_json
from mkref.errors import RequestError

__all__ = ["add_commands"]

WHERE = """The file is $XDG_STATE_HOME/mkref/progress.json, else ~/.local/state/mkref/progress.json.
MKREF_PROGRESS=/path/to/file.json names another one, MKREF_PROGRESS=off keeps nothing.
Nothing is sent anywhere."""


def add_commands(commands: Any) -> None:
    """Add `progress` to the parser."""
    parser = commands.add_parser(
        "progress",
        help="what you have solved and predicted in the workbook",
        epilog=WHERE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add_json(parser, "all lessons")
    parser.add_argument(
        "--reset", action="store_true", help="delete the file, after saying which; asks nothing"
    )
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Print the table, or delete the file."""
    from mkref.lessons.progress import progress
    from mkref.lessons.progress_file import reset

    if options.reset:
        reset()
        return 0
    told = progress()
    if told.trouble:
        raise RequestError(told.trouble)
    print(json.dumps(told.to_json()) if options.json else told)
    return 0
