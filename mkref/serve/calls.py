"""The calls in an action block, read while they come.

The block is a JSON array of objects with `tool_call_id`, `tool_name` and `parameters`. A call is
told as soon as its name is known, its arguments as they are spelled. Members may come in any order,
the id may be missing (clients get ids of our own anyway), a comma between calls too; no parameters
are `{}`. What is not such an array is given back as text, so that nothing gets lost.

What it does not do: check a call against the tools.
"""

from __future__ import annotations

import json
from dataclasses import dataclass

__all__ = ["CallPart", "CallReader"]

NAMES = ("tool_name", "name")
ARGUMENTS = ("parameters", "arguments")


@dataclass(frozen=True)
class CallPart:
    """A piece of a call: `name` when it begins, then `arguments`, piece by piece."""

    index: int
    name: str | None = None
    arguments: str = ""


class CallReader:
    """Reads the text of an action block piece by piece.

    Args:
        first: number of its first call.

    Attributes:
        n_calls: calls that were told so far, those before the block included.
    """

    def __init__(self, first: int = 0) -> None:
        self.n_calls = first
        self._outside = ""  # text outside of objects
        self._lost: list[str] = []  # objects that are no calls
        self._depth = 0  # of open brackets, from the object's own; 0 outside of one
        self._in_string = self._escaped = False
        self._begin()

    def _begin(self) -> None:
        self._object: list[str] = []  # letters of the present object
        self._key: str | None = None  # the member whose value is being read
        self._member: list[str] = []  # letters of a key or a value
        self._space: list[str] = []  # white space behind them
        self._name: str | None = None
        self._held: list[str] = []  # letters of arguments that were not told yet
        self._has_arguments = False

    def push(self, text: str) -> list[CallPart]:
        """The pieces that this text completes."""
        parts: list[CallPart] = []
        for letter in text:
            if self._depth:
                self._inside(letter, parts)
            elif letter == "{":
                self._depth, self._object = 1, [letter]
            else:
                self._outside += letter
        self._tell(parts)
        return parts

    def finish(self) -> str:
        """Text of the block that was no call, now that no more comes.

        A call that was cut off before its name is gone; one that was cut off later counts.
        """
        if self._depth and self._name is not None:
            self.n_calls += 1
        self._depth = 0
        outside = self._outside if self._outside.strip(" \t\r\n[],") else ""
        return outside + "".join(self._lost)

    def _inside(self, letter: str, parts: list[CallPart]) -> None:
        """One letter of an object."""
        self._object.append(letter)
        if self._in_string:
            self._in_string = self._escaped or letter != '"'
            self._escaped = letter == "\\" and not self._escaped
        elif letter == '"':
            self._in_string = True
        elif letter in "{[":
            self._depth += 1
        elif letter in "}]":
            self._depth -= 1
        if self._depth == 0 or (self._depth == 1 and letter == "," and not self._in_string):
            self._end_member(parts)
        elif self._depth == 1 and letter == ":" and not self._in_string and self._key is None:
            self._key, self._member, self._space = _spelled(self._member) or "", [], []
        elif self._depth == 1 and letter in " \t\r\n" and not self._in_string:
            self._space.append(letter)
        else:
            more = [*self._space, letter] if self._member else [letter]
            self._space = []
            self._member += more
            if self._key in ARGUMENTS:
                self._held += more
        if self._depth == 0:
            self._end_object(parts)

    def _end_member(self, parts: list[CallPart]) -> None:
        if self._key in NAMES and self._name is None:
            self._name = _spelled(self._member)
            if self._name is not None:
                parts.append(CallPart(self.n_calls, self._name))
        self._key, self._member, self._space = None, [], []

    def _end_object(self, parts: list[CallPart]) -> None:
        if self._name is None:
            self._lost.append("".join(self._object))
        else:
            self._tell(parts)
            if not self._has_arguments:
                parts.append(CallPart(self.n_calls, arguments="{}"))
            self.n_calls += 1
        self._begin()

    def _tell(self, parts: list[CallPart]) -> None:
        """Tell arguments, if the name is known."""
        if self._name is not None and self._held:
            self._has_arguments = True
            parts.append(CallPart(self.n_calls, arguments="".join(self._held)))
            self._held = []


def _spelled(letters: list[str]) -> str | None:
    """The string that a JSON value spells, if it is one and not empty."""
    try:
        text = json.loads("".join(letters))
    except ValueError:
        return None
    return text if isinstance(text, str) and text else None
