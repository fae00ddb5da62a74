"""Show a function of the kernel out of the file that runs, so that no lesson holds an old copy.

It finds functions and structs by their name and the braces after it, and sections by their heading;
it is no C++ parser and needs none for the style of this repository.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from mkref.errors import RequestError
from mkref.paths import cuda_root, lessons_root

__all__ = ["Code", "cited", "code", "file_text", "find_block", "section"]


@dataclass(frozen=True)
class Code:
    """A piece of a source file; a notebook shows it as a block of code.

    Attributes:
        file: path below `cuda/`, or of a lesson's own file below `mkref/lessons/cuda/`.
        line: of its first line, from 1.
        text: its lines, word for word.
    """

    file: str
    line: int
    text: str

    def _repr_markdown_(self) -> str:
        return f"`{cited(self.file)}`, line {self.line}:\n```cpp\n{self.text}\n```"

    def __repr__(self) -> str:
        return f"// {cited(self.file)}, line {self.line}\n{self.text}"


def file_text(file: str) -> str:
    """The text of a CUDA file, as it lies on disk.

    Args:
        file: path below `cuda/`, such as "ops/03_rmsnorm.cu", or name of a lesson's own file below
            `mkref/lessons/cuda/`.

    Raises:
        RequestError: neither folder has it.
    """
    for root in (cuda_root(), lessons_root()):
        if (root / file).is_file():
            return (root / file).read_text(encoding="utf-8")
    raise RequestError(f"code: neither cuda/ nor mkref/lessons/cuda/ has a file {file!r}")


def cited(file: str) -> str:
    """The path of a file from the root of the repository, as lessons name it."""
    return f"cuda/{file}" if (cuda_root() / file).is_file() else f"mkref/lessons/cuda/{file}"


def code(name: str, file: str = "megakernel.cu") -> Code:
    """The function or struct `name` with the comment above it.

    Args:
        name: name of a function, also of a member function, or of a struct.
        file: path below `cuda/`, or name of a lesson's own file.

    Raises:
        RequestError: the file has no such function.
    """
    lines = file_text(file).splitlines()
    found = find_block(lines, name)
    if found is None:
        raise RequestError(f"code: {cited(file)} has no function {name!r}")
    first, last = found
    return Code(file, first + 1, "\n".join(lines[first : last + 1]))


def find_block(lines: Sequence[str], name: str) -> tuple[int, int] | None:
    """First and last line, counted from 0, of a function or struct with the comment above it."""
    word = re.escape(name)
    function = rf"(?! *//)[\w *&:<>,()\"]*\b{word}\([^;]*\)[^;]*{{"
    record = rf" *(?:struct|enum)[^;{{(]*\b{word}\b[^;(]*{{"
    head = re.compile(f"{function}|{record}")
    # The parameters may go on in the next lines.
    heads = ("\n".join(lines[i : i + 4]) for i in range(len(lines)))
    at = next((i for i, text in enumerate(heads) if head.match(text)), None)
    if at is None:
        return None
    first = at
    while first and re.match(r"\s*(//|template <|extern \"C\" .*[^;{}]$)", lines[first - 1]):
        first -= 1
    depth, begun, last = 0, False, at
    for last in range(at, len(lines)):
        plain = re.sub(r'"(\\.|[^"])*"|//.*', "", lines[last])
        depth += plain.count("{") - plain.count("}")
        begun = begun or "{" in plain
        if begun and depth == 0:
            break
    return first, last


def section(number: int, file: str = "megakernel.cu") -> str:
    """The text of a numbered section, from its heading `// ---- 3 arithmetic ---` to the next.

    Raises:
        RequestError: the file has no such section.
    """
    found = re.search(
        rf"^// ---- {number} .*?(?=^// ---- |\Z)", file_text(file), re.DOTALL | re.MULTILINE
    )
    if found is None:
        raise RequestError(f"code: {cited(file)} has no section {number}")
    return found[0].rstrip() + "\n"
