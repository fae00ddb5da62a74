"""What lesson 14 runs: eight requests that share rows and six pages, and the same ones alone.

Everything is drawn with seeds, so what is shown is the same on every machine, to the last token.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mkref.engine import Engine
from mkref.lessons.recorded import CHECKOUT, bench_record
from mkref.machine import resolve
from mkref.widgets.kv.record import KvRecorder

if TYPE_CHECKING:
    from mkref.engine.counters import Counters
    from mkref.widgets.kv.history import History

__all__ = ["PythonCode", "Session", "alone", "load_nano", "long_prompt", "python_code", "session"]
__all__ += ["lost_and_found", "measured_row", "over_http", "ways_of_a_prompt"]

SHARED = """import os
import sys


def read(path):
    with open(path) as file:
        return file.read()


def lines(path):
    return read(path).splitlines()


def count(path):
    return len(lines(path))


def words(path):
    return read(path).split()


"""
"""What the prompts of A and B begin with: a little more than one page."""
REQUESTS = (
    (SHARED + "def main():\n", 12),
    (SHARED + "def letters(path):\n", 27),
    ("def add(a, b):\n", 50),
    ("class Tree:\n    def __init__(self, left, right):\n        self.size = 1\n", 40),
    ("def f(x):\n", 18),
    ("try:\n", 24),
    ("import re\n", 32),
    ("if x:\n", 20),
)
"""Prompt and tokens of the answer of requests A, B, C ..., which come in this order."""
TEMPERATURE = 0.8
KV_PAGES = 6
MAX_CONTEXT = 256


@dataclass(frozen=True)
class Session:
    """The requests together.

    Attributes:
        answers: token ids of each request, by its letter.
        history: pages and rows, step by step.
        counters: what the scheduler counted.
    """

    answers: dict[str, tuple[int, ...]]
    history: History
    counters: Counters


def load_nano(**settings: Any) -> Engine:
    """nano on the best machine that runs here; on a CPU one pretended SM, so one core is enough."""
    n_sm = None if resolve("auto") == "cuda" else 1
    return Engine.load("nano", n_sm=n_sm, **{"max_context": MAX_CONTEXT, **settings})


def session() -> Session:
    """All eight in one engine with six pages, which is too few; nothing is kept in reserve."""
    prompts, lengths = zip(*REQUESTS, strict=True)
    with load_nano(kv_pages=KV_PAGES) as engine:
        engine.scheduler.roster.spare = 0
        with KvRecorder(
            engine, {"machine": "nano, eight requests", "label": "measured"}
        ) as recorder:
            completions = engine.generate_batch(
                prompts, lengths, TEMPERATURE, [*range(len(prompts))], ignore_eos=True
            )
        answers = {chr(65 + n): each.token_ids for n, each in enumerate(completions)}
        return Session(answers, recorder.history(), engine.scheduler.counters)


def lost_and_found(history: History, letter: str) -> tuple[int, int, int]:
    """A request that loses its pages once: how much it had, and how long that took.

    Args:
        history: of a session.
        letter: of the request.

    Returns:
        Tokens in its cache at the end, steps that they took, steps until it has as many again.
    """
    tokens = [
        next((held.tokens for held in moment.running if held.name == letter), 0)
        for moment in history.moments
    ]
    begin = next(i for i, n in enumerate(tokens) if n)
    gone = next(i for i in range(begin, len(tokens)) if not tokens[i])
    again = next(i for i in range(gone, len(tokens)) if tokens[i])
    there = next(i for i in range(again, len(tokens)) if tokens[i] >= tokens[gone - 1])
    return tokens[gone - 1], gone - begin, there + 1 - again


def alone(letters: str) -> dict[str, tuple[int, ...]]:
    """The same requests one after another, in an engine that does nothing else and keeps nothing.

    Args:
        letters: of the requests, such as "AH".
    """
    found = {}
    with load_nano(reuse=False) as engine:
        for letter in letters:
            seed = ord(letter) - 65
            prompt, length = REQUESTS[seed]
            answer = engine.generate(prompt, length, TEMPERATURE, seed, ignore_eos=True)
            found[letter] = answer.token_ids
    return found


def long_prompt(*, exact: bool) -> tuple[Counters, tuple[int, ...]]:
    """A prompt of three pages, and four tokens of its answer.

    Args:
        exact: through the kernel, row by row; else in chunks by PyTorch.
    """
    with load_nano(exact=exact) as engine:
        answer = engine.generate(3 * SHARED, 4, ignore_eos=True)
        return engine.scheduler.counters, answer.token_ids


@dataclass(frozen=True)
class PythonCode:
    """A function of this package, read out of its file; a notebook shows it as a block of code.

    Attributes:
        file: path from the root of the repository.
        name: of the function.
        text: its lines.
    """

    file: str
    name: str
    text: str

    def _repr_markdown_(self) -> str:
        return f"`{self.file}`:\n```python\n{self.text}\n```"

    def __repr__(self) -> str:
        return f"{self.file}: {self.name}, {len(self.text.splitlines())} lines"


def python_code(function: Callable[..., Any] | type) -> PythonCode:
    """The function as it stands in the file that runs."""
    file = Path(inspect.getsourcefile(function) or "").resolve().relative_to(CHECKOUT)
    text = inspect.getsource(function).rstrip()
    return PythonCode(file.as_posix(), function.__qualname__, text)


@cache
def _rows() -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = bench_record("h200/decode.json")["rows"]
    return rows


def measured_row(batch: int, kind: str = "even") -> dict[str, Any]:
    """A recorded decode step of North's geometry with 8K of context and a plan of eight rows.

    Args:
        batch: sequences in it.
        kind: "even", all of them as long; "ragged"; or "prompt", rows of one prompt.
    """
    wanted = {"batch": batch, "kind": kind, "plan_rows": 8, "context": 8192}
    return next(row for row in _rows() if wanted.items() <= row.items())


def over_http(draw: str, users: int) -> float:
    """How much longer a token takes over HTTP than the step itself, on an H200; 0.01 is 1 %.

    Args:
        draw: "greedy", or "default", which is temperature 1.0 and top_p 0.95.
        users: at a time.
    """
    rows = bench_record("h200/serve.json")["rows"]
    wanted = {"draw": draw, "concurrency": users}
    return float(next(row["over_bare"] for row in rows if wanted.items() <= row.items()))


def ways_of_a_prompt() -> dict[str, tuple[float, float]]:
    """The longest recorded prompt of North's geometry on an H200, in the rows and by PyTorch.

    Returns:
        Per way: seconds for the prompt, beside somebody who generates; and the time from token to
        token of that one, median, in milliseconds.
    """
    rows = bench_record("h200/prefill.json")["rows"]
    found = {row["chunk"]: row for row in rows if row["part"] == "latency"}
    names = {"in seven rows": "7 rows", "by PyTorch": 2048}
    return {
        name: (float(found[chunk]["prompt_s"]), float(found[chunk]["ms_median"]))
        for name, chunk in names.items()
    }
