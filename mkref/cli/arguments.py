"""Arguments that several commands have, and the types that read them.

A type complains with what it got and what would be right; argparse puts the option's name in front.
"""

from __future__ import annotations

import argparse
import math
import os
from collections.abc import Callable
from typing import Any

from mkref.machine import MACHINES

__all__ = [
    "add_json", "add_key", "add_machine", "add_model", "add_url", "name", "number", "number_up_to",
    "token_ids", "url", "whole", "wholes",
]  # fmt: skip


ENDPOINT = "http://127.0.0.1:8000/v1"
"""Where `mkref serve` listens unless told otherwise."""


def whole(least: int, most: int | None = None) -> Callable[[str], int]:
    """A type: whole numbers in a range."""
    limits = f"from {least} to {most}" if most is not None else f"of at least {least}"

    def read(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            value = least - 1
        if value < least or (most is not None and value > most):
            raise argparse.ArgumentTypeError(f"{text!r}; must be a whole number {limits}")
        return value

    return read


def number(text: str) -> float:
    """A type: finite numbers from 0 up."""
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 <= value < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r}; must be 0 or a positive number")
    return value


def number_up_to(most: float, least: float = 0.0) -> Callable[[str], float]:
    """A type: numbers in a range."""

    def read(text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            value = math.nan
        if not least <= value <= most:
            raise argparse.ArgumentTypeError(
                f"{text!r}; must be a number from {least:g} to {most:g}"
            )
        return value

    return read


def name(text: str) -> str:
    """A type: text that is not blank."""
    if not text.strip():
        raise argparse.ArgumentTypeError(f"{text!r}; must be a name")
    return text


def key(text: str) -> str:
    """A type: a bearer token. It is a secret, so no message repeats it."""
    if not text or not all("!" <= letter <= "~" for letter in text):
        raise argparse.ArgumentTypeError("must be printable ASCII without spaces")
    return text


def url(text: str) -> str:
    """A type: the address of an endpoint."""
    from mkref.serve.client import is_url

    if not is_url(text):
        raise argparse.ArgumentTypeError(f"{text!r}; must be like {ENDPOINT}, up to and with /v1")
    return text


def wholes(least: int) -> Callable[[str], list[int]]:
    """A type: whole numbers from `least` up, with commas between them."""
    one = whole(least)

    def read(text: str) -> list[int]:
        return [one(part) for part in text.split(",")]

    return read


def token_ids(text: str) -> list[int]:
    """A type: token ids with commas between them."""
    try:
        return [int(part) for part in text.split(",")]
    except ValueError:
        raise argparse.ArgumentTypeError(
            f"{text!r}; must be token ids with commas between them, such as 1,2,3"
        ) from None


def add_model(parser: Any, **settings: Any) -> None:
    """`--model`."""
    parser.add_argument(
        "--model",
        metavar="NAME|PATH",
        default="nano",
        help="a model that comes with mkref, or a folder with config.json and safetensors "
        "(default: %(default)s)",
        **settings,
    )


def add_machine(parser: argparse.ArgumentParser) -> None:
    """`--machine`, `--sms` and `--context`."""
    parser.add_argument(
        "--machine",
        metavar="M",
        default="auto",
        help=f"auto, {', '.join(MACHINES)} (default: the best that runs here)",
    )
    parser.add_argument(
        "--sms",
        metavar="K",
        type=whole(1, 1024),
        help="SMs that run the kernel (default: all of the GPU, up to four cores of the CPU)",
    )
    parser.add_argument(
        "--context",
        "--max-context",
        dest="context",
        metavar="N",
        type=whole(2),
        help="longest prompt and answer, in tokens (default: 4096, or what the model allows)",
    )


def add_url(parser: argparse.ArgumentParser) -> None:
    """`--url`, of the endpoint that a client talks to."""
    parser.add_argument("--url", type=url, default=ENDPOINT, help=f"default: {ENDPOINT}")


def add_key(parser: argparse.ArgumentParser, what: str) -> None:
    """`--api-key`."""
    parser.add_argument(
        "--api-key", metavar="KEY", type=key, default=os.environ.get("MKREF_API_KEY") or None,
        help=f"{what}; default: $MKREF_API_KEY, else nothing",
    )  # fmt: skip


def add_json(parser: argparse.ArgumentParser, what: str) -> None:
    """`--json`."""
    parser.add_argument("--json", action="store_true", help=f"print {what} as one JSON object")
