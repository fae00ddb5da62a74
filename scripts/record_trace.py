"""Record the trace of one decode step into a file that the lessons can show on any computer.

    python scripts/record_trace.py --hardware "2-core x86-64 CPU" \\
        --out notebooks/data/trace_nano_host.json.gz

The step recorded is the last of a few at the given context; stamps cost time, so its length is no
measurement of speed. The full geometry on a GPU is recorded by `bench/trace_north.py`.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from bench.provenance import provenance
from mkref import __version__
from mkref.engine import Engine
from mkref.trace.record import take_trace
from mkref.trace.ring import describe_ring
from mkref.trace.storage import save_trace
from mkref.trace.summary import describe

STEPS = 8  # the last one is recorded: caches are warm and the clock of a GPU is up


def main() -> None:
    """Record what the command line asks for."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="nano", help="nano, or a folder")
    parser.add_argument("--machine", default="host")
    parser.add_argument("--sms", type=int, default=None)
    parser.add_argument("--context", type=int, default=64, help="tokens before the recorded step")
    parser.add_argument("--hardware", required=True, help="what it ran on, in words")
    parser.add_argument("--out", type=Path, required=True, help="ends in .json or .json.gz")
    options = parser.parse_args()
    room = options.context + STEPS + 1
    with Engine.load(
        options.model, options.machine, options.sms, max_context=room, trace=True
    ) as engine:
        vocabulary = engine.config.vocab_size
        prompt = [(7 + 31 * i) % vocabulary for i in range(options.context)]
        engine.generate(prompt, max_tokens=STEPS, ignore_eos=True)
        made = provenance()
        recorded = {
            "label": "measured",
            "machine": f"{options.model} on {options.hardware}",
            "model": options.model,
            "context": str(options.context),
            "batch": "1",
            "date": made["date"][:10],
            "version": f"mkref {__version__}, commit {made['commit'][:7]}",
            "note": "one decode step with time stamps on; not a measurement of speed",
        }
        trace = take_trace(engine.machine, recorded)
    save_trace(trace, options.out)
    print(f"{options.out}: {options.out.stat().st_size / 1000:.0f} KB. {describe(trace)}")
    print(describe_ring(trace))


if __name__ == "__main__":
    main()
