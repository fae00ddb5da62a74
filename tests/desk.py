"""One operation of the interpreter on poisoned buffers. No tests here.

Tolerances. One mma cuts 17 terms below 2^-25 of the largest exponent (a term is below 4 of these)
and its sum below 2^-23, so a chain of s steps is off by less than s * 2^-19 of the sum of absolute
values; here s is at most 2, and eight partial sums add 8 * 2^-24: together below 2^-17. Rounding to
bfloat16 adds 2^-8 of the value. exp2 is good to 2^-22.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from mkref.plan import Interpreter, Op, Task, build_plan
from mkref.plan import interpret_ops as ops
from mkref.plan.memory import UnpackedWeights
from mkref.reference.scalars import from_bf16, rmsnorm
from mkref.weights.layout import PackedLayout
from mkref.weights.synthetic import synthetic_weights
from tests.decode import small_config

if TYPE_CHECKING:
    from mkref.plan.runtime import Route

__all__ = ["BF16", "POSITIONS", "PRODUCT", "Desk", "Wide", "close", "every", "outputs", "product"]
__all__ += ["silu", "untouched"]

Wide = npt.NDArray[np.float64]
PRODUCT = 2.0**-17
BF16 = 2.0**-8
MAX_CONTEXT = 384
POSITIONS = [0, 63, 64, 200, 127]


class Desk:
    """Poisoned buffers, weights, and a step of five rows; `batch` is what the plan has room for."""

    def __init__(
        self, rows: int = 5, /, *, batch: int = 8, context: int = MAX_CONTEXT, **changes: object
    ) -> None:
        self.config = small_config(**changes)
        self.packed = synthetic_weights(self.config, seed=3)
        plan = build_plan(self.config, 3, full_pages=40, sliding_pages=40, rows=batch)
        machine = Interpreter.of(plan, context)
        self.buffers = machine.buffers
        self.buffers["weights"][...], self.buffers["gammas"][...] = self.packed.words()
        weights = UnpackedWeights(self.buffers["weights"])
        self.step = ops.Step(self.config, self.buffers, weights, rows, 0)
        self.sampled = np.full(batch, -1, dtype=np.int64)
        self.plan, self.rows, self.layout = plan, rows, PackedLayout(self.config)
        self.random = np.random.default_rng(11)
        self.buffers["positions"][:rows] = POSITIONS[:rows]
        self.buffers["earlier"][:rows] = 0

    def weight(self, name: str) -> Wide:
        """A matrix of the model."""
        return np.asarray(self.packed[name].double().numpy())

    def task(self, op: Op, layer: int) -> Task:
        """The task of SM 1."""
        return next(t for t in self.plan.tasks[1] if (t.op, t.layer) == (op, layer))

    def normal(self, *shape: int) -> npt.NDArray[np.float32]:
        """Random numbers."""
        return self.random.standard_normal(shape).astype(np.float32)

    def set_x(self, layer: int) -> npt.NDArray[np.float32]:
        """Random x for the active rows."""
        x = self.buffers["x"][layer & 1]
        x[: self.rows] = self.normal(self.rows, self.config.hidden_size)
        return x[: self.rows].copy()

    def normed(self, layer: int) -> Wide:
        """The bfloat16 activations that products of a layer read."""
        x = self.buffers["x"][layer & 1, : self.rows]
        words = rmsnorm(x, self.buffers["gammas"][layer], self.config.rms_norm_eps)
        return from_bf16(words).astype(np.float64)

    def run(self, *names: str, do: Callable[[], None]) -> None:
        """Run an operation; no other buffers than the named ones may change."""
        before = {name: array.tobytes() for name, array in self.buffers.items()}
        with np.errstate(all="ignore"):
            do()
        changed = {n for n, array in self.buffers.items() if array.tobytes() != before[n]}
        assert set(names) == changed


def every(do: Callable[..., None], desk: Desk, tasks: Iterable[Task], *more: Route) -> None:
    """The same operation on all SMs."""
    for task in tasks:
        do(desk.step, task, *more)


def untouched(array: npt.NDArray[np.generic]) -> bool:
    """Is it still poison?"""
    return len(array) > 0 and set(array.tobytes()) == {0xFF}


def product(x: Wide, w: Wide) -> tuple[Wide, Wide]:
    """x W^T, and how far off the kernel's sums may be."""
    return x @ w.T, PRODUCT * (np.abs(x) @ np.abs(w).T) + 2.0**-126


def close(expected: Wide, got: npt.NDArray[np.generic], tolerance: Wide | float) -> bool:
    """Within tolerance everywhere; NaN never is."""
    assert expected.shape == got.shape
    return bool(np.all(np.abs(expected - got.astype(np.float64)) <= tolerance))


def outputs(task: Task) -> slice:
    """The task's output rows."""
    return slice(task.first * 16, (task.first + task.count) * 16)


def silu(x: Wide) -> Wide:
    """x / (1 + e^-x)."""
    return x / (1 + np.exp(-x))
