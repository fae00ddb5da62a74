"""`make bench`: everything that is measured on a GPU, in one go.

Accuracy at the full geometry (needs 80 GB), speed and the ladder, a trace of one step, and the
agreement of nano with the CPU's record. Arguments go to `bench/full_geometry.py`. Records go to
$OUT, or to bench/results/h200.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
LONG = "1024,32768,131072,262144"


def main() -> int:
    """Run the parts one after another; the exit status is that of the first part that fails."""
    folder = Path(os.environ.get("OUT", HERE / "results" / "h200")).resolve()
    bench = ("-m", "mkref", "bench")
    parts = (
        [HERE / "agreement.py", "--machines", "cuda"],
        [*bench, "decode", "--ragged", "--prompt", "8,16,32", "--json", folder / "decode.json"],
        [*bench, "decode", "--batch", "1", "--context", LONG, "--json", folder / "contexts.json"],
        [*bench, "decode", "--batch", "16,32", "--json", folder / "rows.json"],
        [*bench, "ladder", "--json", folder / "ladder.json"],
        [HERE / "full_geometry.py", *sys.argv[1:]],
        [HERE / "trace_north.py"],
    )
    status = 0
    for part in parts:
        command = [str(word) for word in part]
        print(f"bench: {' '.join(command)}", flush=True)
        done = subprocess.run([sys.executable, *command], check=False, cwd=HERE.parent)
        status = status or done.returncode
    return status


if __name__ == "__main__":
    sys.exit(main())
