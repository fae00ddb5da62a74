"""What every machine offers: load a plan and weights, run decode steps, read any buffer.

`Machine` is the interface that the engine uses.

What it does not do: anything; the machines are in modules of their own.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import ArrayLike

    from mkref.machine.draw import Draw
    from mkref.machine.inputs import StepInputs
    from mkref.machine.launch import Launch
    from mkref.plan.build import Plan
    from mkref.weights.packed import PackedWeights

__all__ = ["Machine"]


class Machine(ABC):
    """Runs decode steps of one loaded plan."""

    name: str
    plan: Plan
    max_context: int

    @abstractmethod
    def load(self, plan: Plan, weights: PackedWeights, max_context: int) -> None:
        """Make the machine ready: build the kernel, allocate and poison the buffers.

        Args:
            plan: verified by the caller.
            weights: packed weights; kept by reference where the machine can read them in place.
            max_context: longest sequence in tokens.
        """

    @abstractmethod
    def start(
        self,
        inputs: StepInputs,
        n_steps: int = 1,
        *,
        stop_ids: np.ndarray | None = None,
        stop_after: int = 0,
        draw: Draw | None = None,
    ) -> Launch:
        """Begin up to `n_steps` decode steps; iterate for the tokens of each as they come.

        Step `t` feeds every row at `positions + t`: the first the given tokens, a later one those
        that came out of the step before. One launch is under way at a time: starting the next one,
        or reading or writing a buffer, ends an earlier one after the step that it is at.

        Args:
            inputs: of the first step; `page_table` must cover all steps.
            n_steps: 1 to 256.
            stop_ids: int32 [rows, 8], token ids after which a row counts as stopped; -1 is none.
            stop_after: end when so many rows have stopped, 0 for never. All rows go on until then.
            draw: how tokens are drawn beyond temperature and noise; None: not at all.

        Raises:
            MachineError: bad inputs.
        """

    @abstractmethod
    def set_counts(self, row: int, prompt_ids: ArrayLike, output_ids: ArrayLike) -> None:
        """Tell what a row's sequence has so far, for the penalties of `Draw`.

        From then on the tokens that the row draws with penalties are counted, too.

        Args:
            row: 0 to `Plan.rows` - 1.
            prompt_ids: tokens of the prompt, for the repetition penalty.
            output_ids: tokens of the answer.

        Raises:
            MachineError: no such row or token.
        """

    def decode(
        self,
        inputs: StepInputs,
        n_steps: int = 1,
        *,
        stop_ids: np.ndarray | None = None,
        stop_after: int = 0,
        draw: Draw | None = None,
        on_tokens: Callable[[int, np.ndarray], bool] | None = None,
    ) -> np.ndarray:
        """Run up to `n_steps` steps to their end; int32 [steps done, rows], the tokens.

        Args:
            inputs, n_steps, stop_ids, stop_after, draw: as for `start`.
            on_tokens: called with the step, counted from 0, and its tokens, int32 [rows], while the
                kernel goes on where the machine can; True asks for an end after the step that is
                running, so a step or two more may come.

        Raises:
            HangError: a wait inside the kernel ran out.
            MachineError: bad inputs, or logits that are not finite.
        """
        launch = self.start(inputs, n_steps, stop_ids=stop_ids, stop_after=stop_after, draw=draw)
        done: list[np.ndarray] = []
        try:
            for tokens in launch:
                done.append(tokens)
                if on_tokens is not None and on_tokens(len(done) - 1, tokens):
                    launch.cancel()
        finally:
            launch.close()
        return np.stack(done)

    def step(self, inputs: StepInputs) -> np.ndarray:
        """Run one decode step; int32 [rows], the next token of each row. Errors as in `decode`."""
        launch = self.start(inputs)
        try:
            return next(launch)
        finally:
            launch.close()

    @abstractmethod
    def read(self, name: str) -> np.ndarray:
        """A copy of one buffer of `mkref.plan.buffers`."""

    @abstractmethod
    def write(self, name: str, array: np.ndarray) -> None:
        """Overwrite one buffer."""

    def logits(self, rows: int) -> np.ndarray:
        """Logits of the last step: float32 [rows, V]."""
        return self.read("logits")[:rows]

    def stamps(self) -> np.ndarray | None:
        """Time stamps of the last step, uint64 [n_tasks, 4] in ns, or None if not traced.

        Columns: consumers took the task; its inputs were ready; its outputs were signalled; the
        loader had issued its last copy.
        """
        return None

    def get_ready(self) -> None:  # noqa: B027 - a machine that compiles nothing is ready
        """Compile now what a later step would wait for: for any number of rows, with a `Draw` or
        without.
        """

    def close(self) -> None:  # noqa: B027 - a machine without memory of its own has nothing to do
        """Give memory back."""
