"""A launch whose tokens the sampler draws: pairs of kernel and sampler, some of them queued ahead.

A step of the kernel is followed by `cuda/sampler/`, which writes the drawn tokens and positions
into the inputs of the next step. So the next pair can be queued before the host has seen a token,
and the GPU waits for nobody. When stop ids end the launch, what is still queued changes nothing.

What it does not do: know how a machine queues a pair (`KernelMachine.queue_step`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from mkref.errors import MkrefError
from mkref.machine.launch import KernelLaunch, RunsKernels

if TYPE_CHECKING:
    import numpy as np

    from mkref.machine.draw import LogProbs

__all__ = ["DrawLaunch", "DrawsTokens"]


class DrawsTokens(RunsKernels, Protocol):
    """What such a launch needs of its machine, too."""

    steps_ahead: int
    """Pairs that may be queued beyond the steps whose tokens have been taken."""

    def queue_step(self, step: int) -> None:
        """Queue the kernel for one step, and the sampler behind it."""

    def told(self, step: int) -> LogProbs | None:
        """Log probabilities of a finished step, if somebody asked for some."""


class DrawLaunch(KernelLaunch):
    """A launch of pairs.

    Args:
        machine: has the inputs, and waits for `queue`.
        rows: active rows.
        n_steps: as in `Launch`.
    """

    _machine: DrawsTokens

    def __init__(self, machine: DrawsTokens, rows: int, n_steps: int) -> None:
        super().__init__(machine, rows, n_steps)
        self._n_queued = 0
        self._closing = False
        self._told: list[LogProbs | None] = []  # of all finished steps, once it has ended

    def queue(self) -> None:
        """Queue pairs as far ahead as the machine wants."""
        ahead = self._machine.steps_ahead
        while self._wants_more() and self._n_queued < self._taken + ahead:
            try:
                self._machine.queue_step(self._n_queued)
            except MkrefError as error:
                self._error = error
            except BaseException:  # Ctrl-C: half a pair may be queued
                self._broken = True
                self.cancel()
                raise
            else:
                self._n_queued += 1

    def __next__(self) -> np.ndarray:
        self.queue()
        tokens = super().__next__()
        step = self._taken - 1
        self.logprobs = self._told[step] if self.ended else self._machine.told(step)
        return tokens

    def cancel(self) -> None:
        """See `Launch.cancel`: what is queued still runs, and its steps come."""
        self._closing = True

    def _wants_more(self) -> bool:
        stopped = self.ended or self._closing or self._error is not None
        # The sampler says in the second word that stop ids have ended the launch.
        return not (
            stopped or self._n_queued == self.n_steps or self._machine.shared["progress"][1]
        )

    def _wait(self, seen: int) -> None:
        self.queue()
        super()._wait(seen)

    def _n_run(self) -> int:
        return self._n_queued

    def _conclude(self) -> None:
        """All that was queued is over; the launch is, too, unless there is more to queue."""
        if self._wants_more() and self._n_done() == self._n_queued:
            return
        self._told = [self._machine.told(step) for step in range(self._n_done())]
        super()._conclude()
