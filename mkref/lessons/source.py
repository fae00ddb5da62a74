"""Show a function of the kernel out of the file that runs, so that no lesson holds an old copy.

It finds functions by their name and the braces after it; it is no C++ parser and needs none for the
style of this repository.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from mkref.errors import RequestError
from mkref.paths import cuda_root

__all__ = ["Code", "code"]


@dataclass(frozen=True)
class Code:
    """A piece of a source file; a notebook shows it as a block of code."""

    file: str
    line: int
    text: str

    def _repr_markdown_(self) -> str:
        return f"`cuda/{self.file}`, line {self.line}:\n```cpp\n{self.text}\n```"

    def __repr__(self) -> str:
        return f"// cuda/{self.file}, line {self.line}\n{self.text}"


def code(name: str, file: str = "megakernel.cu") -> Code:
    """The function `name` with the comment above it.

    Args:
        name: name of a function.
        file: path below `cuda/`.

    Raises:
        RequestError: the file has no such function.
    """
    lines = (cuda_root() / file).read_text(encoding="utf-8").splitlines()
    head = re.compile(rf"^(?! *//)[\w *&:<>,()\"]*\b{re.escape(name)}\([^;]*\)[^;]*{{")
    # The parameters may go on in the next lines.
    heads = ("\n".join(lines[i : i + 3]) for i in range(len(lines)))
    at = next((i for i, text in enumerate(heads) if head.match(text)), None)
    if at is None:
        raise RequestError(f"code: cuda/{file} has no function {name!r}")
    first = at
    while first and lines[first - 1].lstrip().startswith("//"):
        first -= 1
    depth, begun, last = 0, False, at
    for last in range(at, len(lines)):
        plain = re.sub(r'"(\\.|[^"])*"|//.*', "", lines[last])
        depth += plain.count("{") - plain.count("}")
        begun = begun or "{" in plain
        if begun and depth == 0:
            break
    return Code(file, first + 1, "\n".join(lines[first : last + 1]))
