"""Try a CUDA answer in a process of its own, which a crash or an endless loop may end.

    python -m mkref.lessons.worker < request

The request is one line of JSON: "exercise", "answer", "machine", "first" (property to begin with),
"sanitize", "among" (answers that are compiled together).

It answers with a line of JSON per event: what the compiler says, which property begins, what came
of it. `mkref.lessons.trials` starts it and reads them.
"""

from __future__ import annotations

import json
import os
import sys

from mkref.errors import MachineError
from mkref.lessons.check import exercise
from mkref.lessons.cuda_exercise import CudaExercise
from mkref.lessons.exercise import finding
from mkref.lessons.program import HANGS


def main() -> None:
    """Serve the one request on standard input."""
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what a kernel prints is no event

    def say(**event: object) -> None:
        print(json.dumps(event), file=out, flush=True)

    request = json.load(sys.stdin)
    task = exercise(request["exercise"])
    if not isinstance(task, CudaExercise):
        raise SystemExit(f"{task.id} is no exercise in CUDA")
    try:
        program = task.program(
            request["answer"],
            request["machine"],
            sanitize=request["sanitize"],
            among=request["among"],
        )
    except MachineError as error:
        say(error=str(error))
        return
    for number, one in enumerate(task.properties[request["first"] :], request["first"]):
        say(begin=number)
        wrong = finding(one.trial, program)
        say(wrong=wrong)
        # One property is looked at closely, not all; and where one hangs, others will.
        if request["sanitize"] or wrong.startswith(HANGS):
            return


if __name__ == "__main__":
    main()
