"""Record the trace of one decode step into a file that the lessons can show on any computer.

    python scripts/record_trace.py --hardware "2-core x86-64 CPU" \\
        --out notebooks/data/trace_nano_host.json.gz
    python scripts/record_trace.py --model north --machine cuda --context 8192 \\
        --hardware "NVIDIA H200" --out notebooks/data/trace_north_h200.json.gz

`north` is the geometry of North Mini Code with synthetic weights. The step recorded is the last of
a few at the given context; stamps cost time, so its length is no measurement of speed.
"""

from __future__ import annotations

import argparse
import datetime
import subprocess
from pathlib import Path

from mkref import __version__
from mkref.config import NORTH_MINI_CODE
from mkref.engine import Engine
from mkref.machine import resolve
from mkref.trace.events import Trace
from mkref.trace.storage import save_trace
from mkref.trace.summary import describe
from mkref.weights.synthetic import synthetic_weights

ROOT = Path(__file__).resolve().parent.parent
STEPS = 8  # the last one is recorded: caches are warm and the clock of a GPU is up


def load(model: str, machine: str, n_sm: int | None, context: int) -> Engine:
    """An engine with time stamps and room for the context."""
    room = context + STEPS + 1
    if model != "north":
        return Engine.load(model, machine, n_sm, max_context=room, trace=True)
    device = "cuda" if resolve(machine) == "cuda" else "cpu"
    weights = synthetic_weights(NORTH_MINI_CODE, device=device)
    return Engine.from_weights(
        NORTH_MINI_CODE,
        weights,
        machine,
        n_sm,
        max_context=room,
        trace=True,
        kv_pages=room // 64 + 2,
    )


def commit() -> str:
    """The checkout's commit; "unknown" outside of a git checkout."""
    done = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True
    )
    return done.stdout.strip() or "unknown"


def main() -> None:
    """Record what the command line asks for."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="nano", help="nano, a folder, or north (synthetic)")
    parser.add_argument("--machine", default="host")
    parser.add_argument("--sms", type=int, default=None)
    parser.add_argument("--context", type=int, default=64, help="tokens before the recorded step")
    parser.add_argument("--hardware", required=True, help="what it ran on, in words")
    parser.add_argument("--out", type=Path, required=True, help="ends in .json or .json.gz")
    options = parser.parse_args()
    with load(options.model, options.machine, options.sms, options.context) as engine:
        vocabulary = engine.config.vocab_size
        prompt = [(7 + 31 * i) % vocabulary for i in range(options.context)]
        engine.generate(prompt, max_tokens=STEPS, ignore_eos=True)
        stamps = engine.machine.stamps()
        if stamps is None:
            raise SystemExit(f"record_trace: {engine.machine.name} took no time stamps")
        provenance = {
            "label": "measured",
            "machine": f"{options.model} on {options.hardware}",
            "model": options.model,
            "context": str(options.context),
            "batch": "1",
            "date": datetime.date.today().isoformat(),
            "version": f"mkref {__version__}, commit {commit()}",
            "note": "one decode step with time stamps on; not a measurement of speed",
        }
        trace = Trace.from_plan(engine.plan, stamps, provenance)
    save_trace(trace, options.out)
    print(f"{options.out}: {options.out.stat().st_size / 1000:.0f} KB. {describe(trace)}")


if __name__ == "__main__":
    main()
