"""`make bench`: everything that is measured on a GPU, in one go.

Accuracy, memory and time at the full geometry (needs 80 GB), a trace of one step, and the agreement
of nano with the CPU's record. Arguments go to `bench/full_geometry.py`.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent


def main() -> int:
    """Run the parts one after another; the exit status is that of the first part that fails."""
    parts = (
        ["agreement.py", "--machines", "cuda"],
        ["full_geometry.py", *sys.argv[1:]],
        ["trace_north.py"],
    )
    status = 0
    for name, *arguments in parts:
        print(f"bench: {name} {' '.join(arguments)}".rstrip(), flush=True)
        status = (
            status
            or subprocess.run([sys.executable, HERE / name, *arguments], check=False).returncode
        )
    return status


if __name__ == "__main__":
    sys.exit(main())
