"""Try the exercises of a lesson as learners will, and keep what typical mistakes lead to.

    python scripts/try_lesson.py 03            every exercise of lesson 03
    python scripts/try_lesson.py 03.1 05.2     some

For each: the solution must pass, the starter must fail, every mistake must fail and look unlike all
others. Reports are printed, as a learner sees them. What the mistakes of CUDA exercises lead to is
written to mkref/lessons/cuda/mistakes_NN.json, from which `check` recognises them; run this after
any change of an exercise. Tests do the same and compare with the file.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from typing import TYPE_CHECKING

from mkref.lessons.check import Report, exercise, exercises
from mkref.lessons.cuda_exercise import CudaExercise, fingerprint, known_mistakes
from mkref.paths import lessons_root

if TYPE_CHECKING:
    from mkref.lessons.exercise import Exercise


def cell_value(task: Exercise, source: str) -> object:
    """What a cell with this source defines, in an empty notebook."""
    namespace: dict[str, object] = {}
    exec(source, namespace)
    return namespace[task.name]


def show(title: str, task: Exercise, answer: object) -> Report:
    """Judge an answer and print the report and how long it took."""
    begin = time.monotonic()
    results, hint = task.judge(answer)
    report = Report(f"{task.id} {title}", results, hint, "")
    print(f"{report}\n    ({time.monotonic() - begin:.1f} s)\n", flush=True)
    return report


def try_exercise(task: Exercise) -> list[str]:
    """Everything about one exercise.

    Returns:
        Fingerprints of the mistakes of an exercise in CUDA.

    Raises:
        SystemExit: the exercise is not as it must be; the text says what.
    """
    if not show("solution", task, cell_value(task, task.solution_cell)).passed:
        raise SystemExit(f"{task.id}: the solution does not pass")
    if show("starter", task, cell_value(task, task.starter)).passed:
        raise SystemExit(f"{task.id}: the starter passes")
    seen: dict[str, int] = {}
    together = task.judge_mistakes() if isinstance(task, CudaExercise) else []
    for number in range(task.n_mistakes):
        answer, says = task.mistake(number)
        title = f"mistake {number}: {says}"
        if together:
            report = Report(f"{task.id} {title}", together[number][0], "", "")
            print(f"{report}\n", flush=True)
        else:
            report = show(title, task, answer)
        if report.passed:
            raise SystemExit(f"{task.id}: mistake {number} passes: add a property that it violates")
        mark = fingerprint(report.results)
        if mark in seen:
            raise SystemExit(
                f"{task.id}: mistakes {seen[mark]} and {number} look the same: add a property that "
                "tells them apart, or make them one"
            )
        seen[mark] = number
    return list(seen)


def main() -> None:
    """Try what the command line names."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("which", nargs="+", help="lesson (03) or exercise (03.1)")
    os.environ["MKREF_PROGRESS"] = "off"  # nobody has learnt anything
    os.environ["MKREF_MEASURE"] = "off"
    for which in parser.parse_args().which:
        ids = [one for one in exercises() if one == which or one.startswith(f"{which}.")]
        if not ids:
            raise SystemExit(f"there is no exercise {which}; there are {', '.join(exercises())}")
        for one in ids:
            marks, lesson = try_exercise(exercise(one)), one[:2]
            if isinstance(exercise(one), CudaExercise) and marks:
                kept = known_mistakes(lesson) | {one: marks}
                path = lessons_root() / f"mistakes_{lesson}.json"
                path.write_text(json.dumps(dict(sorted(kept.items())), indent=1) + "\n")
                print(f"kept in {path.relative_to(ROOT)}\n")


if __name__ == "__main__":
    main()
