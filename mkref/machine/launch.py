"""Steps under way: what `Machine.start` gives back, to be read token by token.

A launch runs several decode steps. `Launch` hands out the tokens of each as soon as they are known,
while the kernel goes on with the next step where the machine can do that.

What it does not do: start anything (`Machine.start`), or know how a machine waits for its kernel
(`RunsKernels.wait`).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Generator, Iterator
from typing import TYPE_CHECKING, Protocol

import numpy as np

from mkref.errors import MachineError, MkrefError

if TYPE_CHECKING:
    from mkref.machine.draw import LogProbs

__all__ = ["KernelLaunch", "Launch", "LazyLaunch"]


class Launch(ABC, Iterator[np.ndarray]):
    """Iterate for the next tokens, int32 [rows], of every step in order.

    Attributes:
        n_steps: steps that were asked for; stop ids or `cancel` may end it earlier.
        logprobs: of the tokens that came last, if somebody asked for some (`Draw.logprobs`).

    Raises:
        MachineError: while iterating, after the last step that went well: the launch failed.
    """

    n_steps: int
    logprobs: LogProbs | None = None

    def __iter__(self) -> Launch:
        return self

    @abstractmethod
    def cancel(self) -> None:
        """Ask for an end after the step that is running; steps that were finished still come."""

    @abstractmethod
    def close(self) -> None:
        """Cancel, wait for the end, and give out nothing more. Does not say what failed."""


class LazyLaunch(Launch):
    """Steps that run only when their tokens are asked for, so nothing is ever under way.

    Args:
        steps: a generator of the tokens and their log probabilities.
        n_steps: how many it has at most.
    """

    def __init__(
        self, steps: Generator[tuple[np.ndarray, LogProbs | None], None, None], n_steps: int
    ) -> None:
        self._steps, self.n_steps = steps, n_steps

    def __next__(self) -> np.ndarray:
        tokens, self.logprobs = next(self._steps)
        return tokens

    def cancel(self) -> None:
        """See `Launch.cancel`: no step is running, so this is the end."""
        self._steps.close()

    def close(self) -> None:
        """See `Launch.close`."""
        self._steps.close()


class RunsKernels(Protocol):
    """What a launch needs of its machine; see `mkref.machine.base.KernelMachine`."""

    name: str
    shared: dict[str, np.ndarray]
    steps: int
    unfinished: bool
    under_way: KernelLaunch | None

    def wait(self, seen: int) -> bool:
        """Wait until more than `seen` steps are finished, or the kernel has ended: then True."""

    def check_status(self) -> None:
        """Raise what the kernel reported, if it did."""


class KernelLaunch(Launch):
    """A launch of the kernel, which writes tokens and progress where the host can see them.

    Args:
        machine: has started it, or is about to.
        rows: active rows.
        n_steps: as in `Launch`.
    """

    def __init__(self, machine: RunsKernels, rows: int, n_steps: int) -> None:
        self._machine, self._rows, self.n_steps = machine, rows, n_steps
        self._tokens: np.ndarray | None = None  # of all finished steps, once it has ended
        self._taken = 0
        self._broken = False  # something else than the kernel interrupted it
        self._error: MkrefError | None = None

    @property
    def ended(self) -> bool:
        """Is the kernel over, and the machine ready for the next launch?"""
        return self._tokens is not None

    def __next__(self) -> np.ndarray:
        while self._taken >= self._n_done():
            if self.ended:
                self._raise_error()
                raise StopIteration
            self._wait(self._taken)
        shared = self._machine.shared["tokens_out"] if self._tokens is None else self._tokens
        tokens = shared[self._taken, : self._rows].copy()
        self._taken += 1
        if self._taken == self.n_steps:  # the rest takes microseconds, and may be an error
            self.finish()
            self._raise_error()
        return tokens

    def cancel(self) -> None:
        """See `Launch.cancel`: the kernel looks for this word once per step."""
        if not self.ended:
            self._machine.shared["progress"][1] = 1

    def finish(self) -> None:
        """Wait for the end. What failed is kept for whoever iterates."""
        while not self.ended:
            self._wait(self.n_steps)

    def close(self) -> None:
        """See `Launch.close`."""
        self.cancel()
        self.finish()
        self._taken, self._error = max(self._taken, self._n_done()), None

    def _n_done(self) -> int:
        if self._tokens is None:
            return int(self._machine.shared["progress"][0])
        return len(self._tokens)

    def _n_run(self) -> int:
        """Steps that the counters have seen, once it has ended."""
        return self._n_done()

    def _raise_error(self) -> None:
        error, self._error = self._error, None
        if error is not None:
            raise error

    def _wait(self, seen: int) -> None:
        try:
            over = self._machine.wait(seen)
        except MkrefError as error:
            over, self._error = True, error
        except BaseException:  # Ctrl-C: the kernel may go on, and `finish` comes back for it
            self._broken = True
            self.cancel()
            raise
        if over:
            self._conclude()

    def _conclude(self) -> None:
        """The kernel is over: keep its tokens, read its status, free the machine."""
        machine = self._machine
        self._tokens = machine.shared["tokens_out"][: self._n_done(), : self._rows].copy()
        machine.under_way = None
        machine.steps += self._n_run()
        try:
            if self._error is None:
                machine.check_status()
                if not len(self._tokens):
                    raise MachineError(f"machine {machine.name!r}: the launch ran no step")
        except MkrefError as error:
            self._error = error
        machine.unfinished = self._broken or self._error is not None
