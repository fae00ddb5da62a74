"""Mistakes below the engine: what a machine is fed is checked before it runs."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from mkref.errors import MachineError
from mkref.machine.base import StepInputs
from tests.engines import refused, tiny_engine


@pytest.mark.parametrize("machine", ["interpreter", "torch", "host"])
class TestStep:
    """What a machine is fed, below the engine."""

    @pytest.mark.parametrize("rows", [0, 9])
    def test_batch_size(self, machine: str, rows: int) -> None:
        """No row, or more rows than a step has."""
        with tiny_engine(machine) as engine:
            zeros = np.zeros(rows, np.int32)
            inputs = StepInputs(zeros, zeros, np.zeros((2, rows, 4), np.int32))
            refused(
                MachineError,
                lambda: engine.machine.step(inputs),
                f"batch: {rows} rows",
                "1 to 8",
            )

    @pytest.mark.parametrize(
        ("change", "parts"),
        [
            ({"tokens": [97]}, ("tokens: row 0 has 97", "0..96")),
            ({"positions": [256]}, ("positions: row 0 has 256", "0..255")),
            ({"positions": [3, 4]}, ("positions: 2 values for 1 tokens",)),
            ({"page_table": [[[-1]], [[0]]]}, ("page_table: row 0", "full pages", "-1")),
            ({"page_table": [[[0]], [[99]]]}, ("page_table: row 0", "sliding pages", "99")),
            ({"temperatures": [np.nan]}, ("temperatures: row 0 has nan",)),
            ({"seeds": [1, 2]}, ("seeds: 2 values for 1 tokens",)),
            ({"earlier": [1]}, ("earlier: row 0 has 1; must be 0",)),
        ],
    )
    def test_values(self, machine: str, change: dict[str, Any], parts: tuple[str, ...]) -> None:
        """Values that would make the kernel read outside of its memory."""
        with tiny_engine(machine) as engine:
            good: dict[str, Any] = {
                "tokens": [5],
                "positions": [3],
                "page_table": [[[0]], [[0]]],
                "temperatures": [0],
                "seeds": [0],
                "earlier": [0],
            }
            given = {**good, **change}
            types = (np.int32, np.int32, np.int32, np.float32, np.uint64, np.int32)
            inputs = StepInputs(
                *(np.asarray(v, t) for v, t in zip(given.values(), types, strict=True))
            )
            refused(MachineError, lambda: engine.machine.step(inputs), *parts)

    @pytest.mark.parametrize(
        ("name", "value", "parts"),
        [
            ("tokens", np.array([np.nan]), ("tokens: float64", "whole numbers")),
            ("tokens", [5], ("tokens: list", "NumPy array")),
            ("tokens", np.zeros((1, 1), np.int32), ("tokens: 2 dimensions", "must have 1")),
            ("page_table", np.full((2, 1, 4), np.nan), ("page_table: float64", "whole numbers")),
            ("temperatures", np.array(["hot"]), ("temperatures: <U3", "numbers")),
        ],
    )
    def test_kinds_of_numbers(
        self, machine: str, name: str, value: Any, parts: tuple[str, ...]
    ) -> None:
        """Not a number passes every comparison, and what is no array has no type."""
        with tiny_engine(machine) as engine:
            one = np.ones(1, np.int32)
            good = StepInputs(5 * one, 3 * one, np.zeros((2, 1, 4), np.int32), 0.0 * one)
            inputs = replace(good, **{name: value})
            refused(MachineError, lambda: engine.machine.step(inputs), *parts)
