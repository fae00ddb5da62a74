"""Draw a recorded trace as an SVG file, the picture that the notebooks show without a kernel.

    python scripts/draw_trace.py notebooks/data/trace_nano_host.json.gz docs/timeline.svg

Of a large trace it draws 16 SMs and the beginning of the step; `--sms 0-7` and `--window 0-60000`
(nanoseconds) choose something else. With `--ring` it draws the rings instead, of a trace that has
their stages. It prints the sentence that belongs under the picture.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from mkref.trace.storage import load_trace
from mkref.widgets.ring.model import ring_view
from mkref.widgets.ring.render import figure as ring_figure
from mkref.widgets.timeline.model import timeline
from mkref.widgets.timeline.render import figure


def pair(text: str) -> tuple[int, int]:
    """Two whole numbers with a minus between them."""
    begin, end = text.split("-")
    return int(begin), int(end)


def main() -> None:
    """Draw what the command line names."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("trace", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--sms", type=pair, default=None, metavar="FIRST-LAST")
    parser.add_argument("--window", type=pair, default=None, metavar="BEGIN-END")
    parser.add_argument("--ring", action="store_true", help="the rings instead of the tasks")
    options = parser.parse_args()
    sms = None if options.sms is None else range(options.sms[0], options.sms[1] + 1)
    trace = load_trace(options.trace)
    if options.ring:
        made = ring_figure(ring_view(trace, sms=sms, window=options.window))
    else:
        made = figure(timeline(trace, sms=sms, window=options.window))
    options.out.write_text(made.svg + "\n", encoding="utf-8")
    print(made.summary)


if __name__ == "__main__":
    main()
