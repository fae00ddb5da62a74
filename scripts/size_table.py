"""Print how large each part of the project is, so that growth is seen and no page claims a number.

    python scripts/size_table.py            one line for each part
    python scripts/size_table.py mkref      one line for each file below mkref/

Lines are counted as they stand, blank ones included. Comment lines are those that begin with the
language's comment sign; docstrings count as code. It judges nothing: tests/test_project.py has the
limits.
"""

from __future__ import annotations

import statistics
import sys
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent

PARTS = {
    "mkref": "mkref/**/*.py",
    "scripts": "scripts/*",
    "bench": "bench/**/*.py",
    "tests": "tests/**/*.py",
    "cuda": "cuda/*.cu",
    "cuda/ops": "cuda/ops/*.cu",
    "cuda/sampler": "cuda/sampler/*.cu",
    "cuda/host": "cuda/host/**/*",
}
COMMENT_SIGNS = {".py": "#", ".sh": "#", ".cu": "//", ".h": "//", ".hpp": "//", ".cpp": "//"}


@dataclass(frozen=True)
class Size:
    """One source file: its path below the root, its lines, its comment lines, its widest line."""

    path: str
    lines: int
    comments: int
    width: int


def size_of(path: Path) -> Size:
    """Measure one file."""
    text = path.read_text(encoding="utf-8").splitlines()
    sign = COMMENT_SIGNS[path.suffix]
    return Size(
        path=path.relative_to(ROOT).as_posix(),
        lines=len(text),
        comments=sum(line.lstrip().startswith(sign) for line in text),
        width=max(map(len, text), default=0),
    )


def sizes(part: str) -> list[Size]:
    """Every source file of a part, by path."""
    found = sorted(path for path in ROOT.glob(PARTS[part]) if path.suffix in COMMENT_SIGNS)
    return [size_of(path) for path in found]


def part_line(part: str, files: list[Size]) -> str:
    """Name, files, lines, median and longest file, comments per 100 lines."""
    lines = [size.lines for size in files]
    comments = 100 * sum(size.comments for size in files) / max(sum(lines), 1)
    return (
        f"{part:<12}{len(files):>6}{sum(lines):>8}{statistics.median(lines):>8.0f}"
        f"{max(lines):>9}{comments:>10.1f}"
    )


def main(arguments: list[str]) -> int:
    """Print the table of all parts, or of the files of one."""
    if arguments:
        if arguments[0] not in PARTS:
            print(
                f"size_table: no part {arguments[0]!r}; one of {', '.join(PARTS)}", file=sys.stderr
            )
            return 2
        for size in sizes(arguments[0]):
            print(f"{size.lines:>6}  {size.path}")
        return 0
    print(f"{'part':<12}{'files':>6}{'lines':>8}{'median':>8}{'longest':>9}{'comments':>10}")
    for part in PARTS:
        if files := sizes(part):
            print(part_line(part, files))
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
