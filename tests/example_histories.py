"""Made-up sessions of a KV cache: one written by hand, one recorded from a machine that computes
nothing. No tests here.
"""

from __future__ import annotations

from functools import cache
from random import Random

from mkref.widgets.kv.history import Held, History, Moment, Use
from mkref.widgets.kv.record import KvRecorder
from tests.fakes import fake_engine

__all__ = ["WRITTEN", "prompts", "recorded"]

WRITTEN = History(
    n_pages=(4, 4),
    n_rows=2,
    page_tokens=64,
    window=64,
    moments=(
        Moment(
            rows=(Use("A", 63, True), Use("A", 64, True)),
            running=(Held("A", 65, 66, 0, (0, 0), ((0, 1), (0, 1))),),
            waiting=("B",),
            cached=((), ()),
        ),
        # B finds A's first page; A's window has passed its first sliding page.
        Moment(
            rows=(Use("A", 128, False), Use("B", 64, True)),
            running=(
                Held("A", 129, 66, 0, (0, 1), ((0, 1, 2), (1, 2))),
                Held("B", 65, 66, 64, (0, 0), ((0, 3), (0, 3))),
            ),
            waiting=(),
            cached=((), ()),
        ),
        Moment(
            rows=(Use("B", 65, False),),
            running=(Held("B", 66, 66, 64, (0, 0), ((0, 3), (0, 3))),),
            waiting=("A",),
            cached=((1,), (1, 2)),
        ),
        Moment(rows=(), running=(), waiting=(), cached=((0, 1), (0,))),
    ),
    provenance={"machine": "made up", "label": "simulated"},
)
"""Two requests: one shares a page of the other, which loses its own."""


def prompts() -> list[list[int]]:
    """Six prompts; three begin with the same tokens."""
    random = Random(1)
    base = [random.randrange(3, 500) for _ in range(200)]
    return [
        [*base[:150], 1, 2, 3],
        base[:140],
        [random.randrange(3, 500) for _ in range(330)],
        [random.randrange(3, 500) for _ in range(20)],
        [*base[:150], 7, 8, 9],
        [5, 6, 7],
    ]


@cache
def recorded(full_pages: int = 14) -> History:
    """A session of a pool that is a little too small for all at once."""
    engine, _ = fake_engine(full_pages=full_pages, sliding_pages=16)
    with KvRecorder(engine, {"label": "simulated"}) as recorder:
        engine.generate_batch(prompts(), max_tokens=[40, 90, 60, 30, 20, 100], ignore_eos=True)
    return recorder.history()
