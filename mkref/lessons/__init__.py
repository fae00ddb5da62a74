"""What the notebooks need beside the engine: predictions, checked exercises, code to read.

    predict, compare           commit to an answer before the run, see it beside the result after
    check                      try an exercise's answer on named properties
    progress                   what has been solved and predicted so far
    code                       read a function out of the very file that runs
    evidence, recorded_trace   numbers and runs recorded on real hardware

Lessons explain in prose and call mkref; what a lesson computes lives in the package, not here.
"""

from __future__ import annotations

from mkref.lessons.check import check
from mkref.lessons.predictions import compare, predict
from mkref.lessons.progress import progress
from mkref.lessons.recorded import evidence, recorded_trace
from mkref.lessons.source import code

__all__ = ["check", "code", "compare", "evidence", "predict", "progress", "recorded_trace"]
