"""An announcement is only a hint: whoever looks too early finds words that are not there yet."""

from __future__ import annotations

import numpy as np
import pytest

from mkref.machine.base import StepInputs
from mkref.machine.host import HostMachine
from mkref.measure.launches import changed_kernel
from mkref.plan import build_plan
from tests.decode import small_model

NOBODY_WAITS = {"(uint32_t)arrivals / 32": "(uint32_t)arrivals"}
BLANK_EMBED = {"    make_absent(x_of(c, 1) + row * HIDDEN + k);\n": ""}
BLANK_DOWN = {"      make_absent(x_old + at);\n": ""}


def logits(changes: dict[str, str], seed: int) -> list[bytes]:
    """Of launches of three steps with changing numbers of rows. An odd number of layers: the last x
    of a step lies where EMBED makes words ABSENT.
    """
    _, weights = small_model(num_hidden_layers=5)
    plan = build_plan(weights.config, 4, full_pages=4, sliding_pages=4)
    machine = HostMachine(seed=seed)
    machine.timeout_s = 20.0
    found = []
    with changed_kernel(changes, {}):
        machine.load(plan, weights, 128)
    table = np.arange(4, dtype=np.int32).reshape(1, 2, 2).repeat(2, axis=0)
    length = np.zeros(2, np.int32)
    for launch, rows in enumerate((2, 1, 2, 1, 1, 2)):
        tokens = np.arange(rows, dtype=np.int32) * 61 + launch
        machine.decode(StepInputs(tokens, length[:rows].copy(), table[:, :rows]), 3)
        length[:rows] += 3
        found.append(machine.logits(rows).tobytes())
    machine.close()
    return found


def test_nobody_has_to_wait_for_an_announcement() -> None:
    """Without it the same bits, in two schedules."""
    expected = logits({}, 0)
    for seed in (1, 2):
        assert expected == logits(NOBODY_WAITS, seed)


@pytest.mark.parametrize("blank", [BLANK_EMBED, BLANK_DOWN], ids=["EMBED", "DOWN"])
def test_old_words_must_be_taken_away(blank: dict[str, str]) -> None:
    """Else whoever looks too early takes the x of another step or layer for its own."""
    expected = logits({}, 0)
    assert any(expected != logits({**NOBODY_WAITS, **blank}, seed) for seed in (1, 2, 3))
