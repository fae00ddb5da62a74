"""How fast nano writes on a CPU, through the megakernel: tokens per second by number of SMs.

    python bench/host_speed.py

Needs no GPU. Writes bench/results/host_speed.json with every step's time. Other work on the
computer counts against it.
"""

from __future__ import annotations

import json
import os
import platform
import sys
import time
from pathlib import Path

import numpy as np

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from bench.provenance import provenance
from mkref.engine import Engine

PROMPT = "class Stack:\n    def push(self, item):"
N_TOKENS, WARM_UP = 160, 32


def processor() -> str:
    """The CPU's own name where Linux tells it."""
    info = Path("/proc/cpuinfo")
    names = [x for x in info.read_text().splitlines() if "model name" in x] if info.exists() else []
    return names[0].split(":", 1)[1].strip() if names else platform.processor()


def main() -> int:
    """Measure 1, 2 and 4 SMs."""
    rows = []
    for n_sm in (1, 2, 4):
        with Engine.load("nano", machine="host", n_sm=n_sm, max_context=512) as engine:
            stamps = [time.perf_counter()]
            for _ in engine.stream(PROMPT, max_tokens=N_TOKENS, ignore_eos=True):
                stamps.append(time.perf_counter())
        ms = np.diff(stamps)[WARM_UP:] * 1e3
        rows.append(
            {
                "n_sm": n_sm,
                "ms_per_token": round(float(np.median(ms)), 2),
                "ms_p10_p90": [round(float(v), 2) for v in np.percentile(ms, [10, 90])],
                "tokens_per_s": round(1e3 / float(np.median(ms)), 1),
                "samples_ms": [round(float(v), 2) for v in ms],
            }
        )
        print({k: v for k, v in rows[-1].items() if k != "samples_ms"}, flush=True)
    made = {**provenance(), "processor": processor(), "cores": str(os.cpu_count())}
    target = ROOT / "bench" / "results" / "host_speed.json"
    target.write_text(json.dumps({"provenance": made, "rows": rows}) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
