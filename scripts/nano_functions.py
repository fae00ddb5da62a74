"""Finds functions in Python text by indentation, and cuts completions the same way.

What it does: `find_functions` gives each `def` with its signature, docstring and body as spans of
lines; `cut_completion` decides where a generated body ends; `parses` asks `ast.parse`.

What it does not do: parse. The rules are textual so that the split between header and body does not
depend on the version of Python that runs them.
"""

from __future__ import annotations

import ast
import re
import textwrap
import warnings
from dataclasses import dataclass

__all__ = ["Completion", "Function", "cut_completion", "find_functions", "parses"]

DEF = re.compile(r"( *)(?:async )?def \w+\(")
DOCSTRING = re.compile(r"""\s*[rRbBuU]?(\"{3}|'{3})""")
MAX_SIGNATURE_LINES = 12
# a line at the body's own depth that begins so belongs to the statement above it
CONTINUES = ("else:", "elif ", "except", "finally:", ")", "]", "}")


@dataclass(frozen=True)
class Function:
    """One function of a file; line numbers count from 0, ends are exclusive."""

    start: int
    body: int  # first line after signature and docstring
    end: int  # first line after the function
    indent: int  # of the `def` line, in spaces


@dataclass(frozen=True)
class Completion:
    """A generated body after the cut."""

    body: str
    ended: bool  # True: by a dedent or the end token; False: by the token limit


def find_functions(lines: list[str]) -> list[Function]:
    """All functions and methods with a body of their own below the signature line."""
    found = []
    for start, line in enumerate(lines):
        match = DEF.match(line)
        if match is None:
            continue
        after = _signature_end(lines, start)
        if after is None:
            continue
        indent = len(match.group(1))
        body = _docstring_end(lines, after)
        end = body
        while end < len(lines) and (not lines[end].strip() or _indent(lines[end]) > indent):
            end += 1
        while end > body and not lines[end - 1].strip():
            end -= 1  # blank lines after a function belong to what follows
        if end > body:
            found.append(Function(start, body, end, indent))
    return found


def cut_completion(text: str, indent: int, ended: bool) -> Completion:
    """Cuts generated text to the body of a function whose `def` line has `indent` spaces.

    The body ends before the first non-blank line that is indented no deeper than the `def` (a
    dedent), or where the end token came. If neither came, the token limit cut it: then the last
    statement at the body's own depth is unfinished and is dropped, with everything inside it.

    Args:
      text: what was generated after the header (and docstring), from the start of a line.
      indent: spaces before `def`.
      ended: whether the model gave the end token.
    """
    lines = text.split("\n")
    for n, line in enumerate(lines):
        # the last line has no newline yet: it counts as a dedent only once it has a sign
        if line.strip() and _indent(line) <= indent:
            return Completion("\n".join(lines[:n]), True)
    if ended:
        return Completion("\n".join(lines), True)
    depths = [_indent(line) for line in lines if line.strip()]
    if not depths:
        return Completion("", False)
    own = depths[0]
    tops = [
        n
        for n, line in enumerate(lines)
        if line.strip() and _indent(line) <= own and not line.lstrip().startswith(CONTINUES)
    ]
    return Completion("\n".join(lines[: tops[-1] if tops else 0]), False)


def parses(header: str, completion: Completion) -> bool:
    """Whether header and body are one function for `ast.parse`, and the body is not empty."""
    if not completion.body.strip():
        return False
    source = textwrap.dedent(header) if header.endswith("\n") else textwrap.dedent(header) + "\n"
    shift = _indent(header.split("\n", 1)[0])
    body = "\n".join(line[shift:] for line in completion.body.split("\n"))
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", SyntaxWarning)
            tree = ast.parse(source + body + "\n")
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return False
    if len(tree.body) != 1 or not isinstance(tree.body[0], ast.FunctionDef | ast.AsyncFunctionDef):
        return False
    statements = tree.body[0].body
    docstring = ast.get_docstring(tree.body[0]) is not None
    return len(statements) > int(docstring)


def _indent(line: str) -> int:
    return len(line) - len(line.lstrip(" "))


def _signature_end(lines: list[str], start: int) -> int | None:
    """The line after the colon that ends the signature; None for one-liners and odd ones."""
    depth = 0
    for n in range(start, min(start + MAX_SIGNATURE_LINES, len(lines))):
        code = lines[n].split(" #")[0].rstrip()
        depth += sum(code.count(c) for c in "([{") - sum(code.count(c) for c in ")]}")
        if depth == 0:
            return n + 1 if code.endswith(":") else None
    return None


def _docstring_end(lines: list[str], first: int) -> int:
    """The line after a docstring that starts at `first`, or `first` if there is none."""
    match = DOCSTRING.match(lines[first]) if first < len(lines) else None
    if match is None:
        return first
    quote = match.group(1)
    if quote in lines[first][match.end() :]:
        return first + 1
    for n in range(first + 1, len(lines)):
        if quote in lines[n]:
            return n + 1
    return first
