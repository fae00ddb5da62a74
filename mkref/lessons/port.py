"""A port to try before it is in the product: a diff, applied to private copies of what it changes.

    port = Port.read("my_port.diff")        # `git diff > my_port.diff` in your branch
    port.module("plan.build").build_plan    # the plan with your tasks in it
    port.kernel                             # the kernel with your code in it

The files of this checkout stay as they are, and so do the modules that are loaded from them. A
private copy of a module imports the private copies of the others, so plans, verifier, interpreter
and machines of a port know its operations, and nobody else does.

What it does not do: add files, or merge: a hunk whose old lines are not in the file exactly once is
refused. Nor does it guard against what a diff contains: its Python code is run.
"""

from __future__ import annotations

import importlib
import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from importlib.abc import ExecutionLoader, MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from types import ModuleType

from mkref.errors import RequestError
from mkref.lessons.source import file_text
from mkref.paths import lessons_root

__all__ = ["Change", "Hunk", "Port"]

KERNEL = "cuda/megakernel.cu"
PRIVATE = (
    *("plan", "machine", "simulate", "trace", "weights"),
    *("measure.rungs", "lessons.steps"),
)
"""Parts of mkref of which a port has copies: those that know operations, plans or weights."""
_IMPORT = re.compile(
    rf"^( *)(from|import) mkref\.(?=(?:{'|'.join(map(re.escape, PRIVATE))})\b)", re.MULTILINE
)


@dataclass(frozen=True)
class Hunk:
    """Lines that stand in a file, and what they become."""

    old: str
    new: str
    lines: tuple[str, ...]

    def apply(self, text: str, file: str) -> str:
        """The text with the change.

        Raises:
            RequestError: the old lines are not there exactly once.
        """
        if (n := text.count(self.old)) != 1:
            raise RequestError(
                f"port: {file} has these lines {n} times, not once; has the file changed since the "
                f"diff was made?\n{self.old}"
            )
        return text.replace(self.old, self.new)


@dataclass(frozen=True)
class Change:
    """What a port changes in one file; a notebook shows it as a diff.

    Attributes:
        file: path from the root of the repository.
        hunks: in the order of the file.
    """

    file: str
    hunks: tuple[Hunk, ...]

    @property
    def added(self) -> int:
        """Lines that are new."""
        return sum(line.startswith("+") for hunk in self.hunks for line in hunk.lines)

    @property
    def removed(self) -> int:
        """Lines that are gone."""
        return sum(line.startswith("-") for hunk in self.hunks for line in hunk.lines)

    def _repr_markdown_(self) -> str:
        return f"`{self.file}`:\n```diff\n{self._text()}\n```"

    def __repr__(self) -> str:
        return f"{self.file}\n{self._text()}"

    def _text(self) -> str:
        return "\n...\n".join("\n".join(hunk.lines) for hunk in self.hunks)


class Port:
    """A diff and the private copies that it is applied to.

    Args:
        diff: text of a unified diff with paths from the root of the repository.
        name: of the package of private copies; another for every port.

    Raises:
        RequestError: it is no such diff.
    """

    def __init__(self, diff: str, name: str) -> None:
        self.diff, self.name = diff, name
        self.changes = _parse(diff)
        if not self.changes:
            raise RequestError(f"port {name!r}: the diff changes no file")

    @classmethod
    def read(cls, path: str | Path) -> Port:
        """A port from a file, also by its bare name in `mkref/lessons/cuda/`.

        Raises:
            RequestError: there is no such file, or it is no diff.
        """
        places = (Path(path), lessons_root() / path)
        found = next((place for place in places if place.is_file()), None)
        if found is None:
            raise RequestError(f"port: there is no {path}")
        return cls(found.read_text(encoding="utf-8"), re.sub(r"\W", "_", f"port_{found.stem}"))

    def __getitem__(self, file: str) -> Change:
        """What changes in a file."""
        found = next((change for change in self.changes if change.file == file), None)
        if found is None:
            files = ", ".join(change.file for change in self.changes)
            raise RequestError(f"port: {file!r} is not changed; {files} are")
        return found

    def text(self, file: str, original: str) -> str:
        """A file's text with the changes of the port, if it has any."""
        for change in self.changes:
            for hunk in change.hunks if change.file == file else ():
                original = hunk.apply(original, file)
        return original

    @cached_property
    def kernel(self) -> str:
        """The kernel with the changes."""
        return self.text(KERNEL, file_text("megakernel.cu"))

    def module(self, name: str) -> ModuleType:
        """The private copy of a module, such as "plan.build" of `mkref.plan.build`."""
        if not any(isinstance(f, _Finder) and f.port.name == self.name for f in sys.meta_path):
            sys.meta_path.append(_Finder(self))
            # The copy of `kernel_source` reads the kernel from a folder of its own.
            source = importlib.import_module(f"{self.name}.machine.source")
            source.__dict__["cuda_root"] = lambda: self._folder
        return importlib.import_module(f"{self.name}.{name}")

    @cached_property
    def _folder(self) -> Path:
        self._kept = TemporaryDirectory()  # until the process ends
        folder = Path(self._kept.name)
        (folder / "megakernel.cu").write_text(self.kernel, encoding="utf-8")
        return folder


def _parse(diff: str) -> tuple[Change, ...]:
    changes = []
    for part in re.split(r"^diff --git .*\n", diff, flags=re.MULTILINE):
        found = re.search(r"^\+\+\+ (?:b/)?(\S+)", part, re.MULTILINE)
        if found is None:
            continue
        hunks = re.split(r"^@@ .*\n", part, flags=re.MULTILINE)[1:]
        changes.append(Change(found[1], tuple(_hunk(text.splitlines()) for text in hunks)))
    return tuple(changes)


def _hunk(lines: Sequence[str]) -> Hunk:
    kept = [line for line in lines if not line.startswith("\\")]
    old, new = (
        "".join(f"{line[1:]}\n" for line in kept if not line.startswith(sign)) for sign in "+-"
    )
    return Hunk(old, new, tuple(kept))


class _Finder(MetaPathFinder, ExecutionLoader):
    """Finds and loads the private copies of a port."""

    def __init__(self, port: Port) -> None:
        self.port = port

    def _original(self, fullname: str) -> str:
        return f"mkref{fullname.removeprefix(self.port.name)}"

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Only what lies below the package of the port."""
        if fullname != self.port.name and not fullname.startswith(f"{self.port.name}."):
            return None
        # Without a folder to search: nobody but this finder finds what is in the package.
        spec = ModuleSpec(
            fullname, self, origin=self._file(fullname), is_package=self.is_package(fullname)
        )
        spec.has_location = True  # `__file__` is the original's: data lie beside it
        return spec

    def is_package(self, fullname: str) -> bool:
        """As the original is."""
        spec = find_spec(self._original(fullname))
        if spec is None:
            raise ImportError(f"there is no {self._original(fullname)}", name=fullname)
        return spec.submodule_search_locations is not None

    def get_filename(self, fullname: str) -> str:
        """The file that the copy is made from: tracebacks name it."""
        return self._file(fullname)

    def _file(self, fullname: str) -> str:
        spec = find_spec(self._original(fullname))
        assert spec is not None
        assert spec.origin is not None, "mkref has no namespace packages"
        return spec.origin

    def get_source(self, fullname: str) -> str:
        """The original's text with the changes, importing other copies."""
        part = self._original(fullname).removeprefix("mkref").removeprefix(".")
        if not any(f"{part}.".startswith(f"{one}.") for one in PRIVATE):
            return ""  # a package of which only some modules are copied
        path = Path(self.get_filename(fullname))
        package = Path(sys.modules["mkref"].__path__[0]).parent
        text = self.port.text(
            path.relative_to(package).as_posix(), path.read_text(encoding="utf-8")
        )
        return _IMPORT.sub(rf"\1\2 {self.port.name}.", text)
