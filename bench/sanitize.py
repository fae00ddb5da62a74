"""`compute-sanitizer` over the kernel: memcheck, racecheck and synccheck on a few decode steps.

    python bench/sanitize.py            all three tools, one line each, record in $OUT or
    bench/results/
    python bench/sanitize.py --target   what the tools run: ragged rows across pages, greedy and
    sampled

Needs a GPU and `compute-sanitizer` of the CUDA toolkit.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from bench.provenance import provenance

TOOLS = ("memcheck", "racecheck", "synccheck")
STEPS = 2


def target() -> None:
    """Decode a few tokens of nano (if it is there, else of a synthetic model of its shape) on 16
    SMs: four rows, and one, which has a build of its own.
    """
    import numpy as np

    from mkref.machine.cuda import CudaMachine
    from mkref.paths import models_root
    from mkref.weights.checkpoint import load_checkpoint
    from tests.decode import drive, small_model

    nano = models_root() / "nano"
    weights = load_checkpoint(nano) if (nano / "model.safetensors").is_file() else small_model()[1]
    machine = CudaMachine(checked="--checked" in sys.argv)
    machine.timeout_s = 300.0  # the tools slow the kernel down a hundred times and more
    prompts = [[5, 77, 300], [9, 8, 7], [400, 1], [3]]
    temperatures, seeds = [0.0, 1.0, 0.0, 0.5], [1, 2, 3, 4]
    for n in (4, 1):
        run = drive(
            machine, weights, prompts[:n], STEPS, n_sm=16, temperatures=temperatures[:n],
            seeds=seeds[:n],
        )  # fmt: skip
        assert np.isfinite(run.logits).all()
    print("target: steps done")


def main() -> int:
    """Run the tools; exit status 1 if one of them reports anything."""
    if "--target" in sys.argv:
        target()
        return 0
    tool_path = shutil.which("compute-sanitizer")
    if tool_path is None:
        print("sanitize: compute-sanitizer is not on the PATH; it comes with the CUDA toolkit")
        return 2
    rows = []
    for tool in TOOLS:
        command = [
            tool_path,
            "--tool",
            tool,
            "--kernel-name",
            "kns=megakernel",
            sys.executable,
            __file__,
            "--target",
            *(["--checked"] if tool == "racecheck" else []),
        ]
        done = subprocess.run(
            command, capture_output=True, text=True, check=False, cwd=ROOT, timeout=500
        )
        text = done.stdout + done.stderr
        summary = re.findall(r"(?:ERROR|RACECHECK) SUMMARY: .*", text)
        clean = (
            bool(summary)
            and all(re.search(r"SUMMARY: 0 ", s) for s in summary)
            and "steps done" in text
        )
        rows.append({"tool": tool, "clean": clean, "summary": summary, "status": done.returncode})
        print(tool, "clean" if clean else "NOT CLEAN", summary, flush=True)
        if not clean:
            print("\n".join(text.splitlines()[:60]))
    folder = Path(os.environ.get("OUT", ROOT / "bench/results/h200"))
    record = {"provenance": provenance(), "tools": rows}
    (folder / "sanitizer.json").write_text(json.dumps(record, indent=1) + "\n")
    return 0 if all(row["clean"] for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
