"""What the notebooks need beside the engine: predictions, checked exercises, code to read.

    predict, compare   commit to an answer before the run, see it beside the result after
    check              try an exercise's answer on named properties
    code               read a function out of the very file that runs

Lessons explain in prose and call mkref; what a lesson computes lives in the package, not here.
"""

from __future__ import annotations

from mkref.lessons.check import check
from mkref.lessons.code import code
from mkref.lessons.evidence import evidence
from mkref.lessons.predict import compare, predict

__all__ = ["check", "code", "compare", "evidence", "predict"]
