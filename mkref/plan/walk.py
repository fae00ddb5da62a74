"""One step of the interpreter, a task at a time, in whatever order the caller likes.

For those who want to look between two tasks: `Interpreter.run` does the same in one go. The rules
are the interpreter's own; it decides who can go on.

What it does not do: choose an order, or end a launch.
"""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np

from mkref.errors import PlanError
from mkref.plan import interpret_ops as ops
from mkref.plan.interpret import Interpreter, _Sm

if TYPE_CHECKING:
    from mkref.plan.memory import Buffers

__all__ = ["Walk"]


class Walk:
    """A step under way.

    Args:
        interpreter: with weights and inputs in its buffers; it is copied, so whoever runs it does
            not notice.
        targets: arrivals per step of every counter, as in the plan.
        rows: active rows.
    """

    def __init__(self, interpreter: Interpreter, targets: list[int], rows: int) -> None:
        buffers = {
            name: array if name in ("weights", "gammas") else array.copy()
            for name, array in interpreter.buffers.items()
        }
        self.interpreter = Interpreter(interpreter.config, buffers, interpreter.counters)
        # As many steps as the counters have seen: they never go back to zero.
        counted = next((i for i, target in enumerate(targets) if target), None)
        have = self._counters()
        index = 0 if counted is None else int(have[counted]) // targets[counted]
        self._before = [index * target for target in targets]
        self._step = ops.Step(
            interpreter.config, buffers, self.interpreter.weights, rows, index, launch_step=0
        )
        self._sms = [
            _Sm(sm, at, end, self.interpreter.sampled[sm])
            for sm, (at, end) in enumerate(pairwise(self.interpreter.offsets))
        ]

    def _counters(self) -> np.ndarray:
        return self.interpreter.buffers["counters"][:, 0]

    @property
    def buffers(self) -> Buffers:
        """The buffers, to look into."""
        return self.interpreter.buffers

    def arrivals(self) -> tuple[int, ...]:
        """Arrivals of this step, per counter."""
        have = self._counters().tolist()
        return tuple(n - before for n, before in zip(have, self._before, strict=True))

    def can_go(self, sm: int) -> bool:
        """Whether the next task of an SM lacks nothing."""
        state = self._sms[sm]
        return state.at < state.end and self.interpreter._blocked(state, self._step) is None

    def advance(self, sm: int) -> None:
        """Do the next task of an SM.

        Raises:
            PlanError: it is through, or its next task still waits.
        """
        if not self.can_go(sm):
            raise PlanError(f"walk: SM {sm} cannot go on; it is through, or it waits")
        with np.errstate(all="ignore"):  # infinity and NaN go their way, as in the kernel
            self.interpreter._run_task(self._sms[sm], self._step)

    def tokens(self) -> tuple[int, ...]:
        """The token of every row, once SM 0 has done its last task; empty before."""
        if self._sms[0].at < self._sms[0].end:
            return ()
        return tuple(int(token) for token in self.buffers["tokens_out"][0, : self._step.rows])
