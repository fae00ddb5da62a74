"""The megakernel itself under AddressSanitizer, UndefinedBehaviorSanitizer and ThreadSanitizer.

A step of a small model, clean in all of them; and the same step with one piece of the protocol
taken out, which ThreadSanitizer must see even where the numbers come out right.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pytest

from mkref.machine.base import StepInputs
from mkref.machine.host import HOST_RING, HostMachine
from mkref.machine.sanitize import TSAN_EXIT, run_sanitized
from mkref.machine.source import THREADS, build_rows, kernel_source, shared_bytes
from mkref.plan.build import build_plan
from tests.decode import small_model

if TYPE_CHECKING:
    from pathlib import Path

    from mkref.machine.compiler import Sanitizer

MODEL = {"num_hidden_layers": 2, "hidden_size": 64, "vocab_size": 50, "sliding_window": 40}
POSITIONS = (0, 63, 130)

FAULTS = {
    "a task does not wait for its inputs": (
        "if (c.lane == 0 && task.wait >= 0)\n        wait_counter(",
        "if (c.lane == 0 && task.wait < -9)\n        wait_counter(",
    ),
    "a warp says that it is done before all its lanes are": (
        "  __syncwarp();\n  if (CHECKED || c.lane == 0) ptx::mbar_arrive(bar);",
        "  if (CHECKED || c.lane == 0) ptx::mbar_arrive(bar);",
    ),
    "the helper does not wait for its inputs": (
        "if (c.lane == 0 && !routed && task.wait >= 0) wait_counter(",
        "if (c.lane == 0 && !routed && task.wait < -9) wait_counter(",
    ),
    "the loader does not wait for a free stage": (
        "wait_barrier(c, &c.s.empty[c.ring.slot], c.ring.phase ^ 1);",
        "",
    ),
    "the loader does not wait for the experts": (
        "wait_barrier(c, &c.s.route_full, route_phase);\n        c.stopped =",
        "c.stopped =",
    ),
    "nobody waits for the scores of the experts": (
        "wait_barrier(c, &c.s.route_scored, route_phase ^ 1);",
        ";",
    ),
    "the place of the experts is used again too soon": (
        "wait_barrier(c, &c.s.route_empty, phase ^ 1);",
        "",
    ),
}


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One build per source and sanitizer."""
    return tmp_path_factory.mktemp("cache")


class SanitizedMachine(HostMachine):
    """A host machine whose launches run in an instrumented program."""

    def __init__(self, cache: Path, sanitize: Sanitizer, fault: str, seed: int) -> None:
        super().__init__()
        self.cache, self.sanitize, self.fault, self.program_seed = cache, sanitize, fault, seed
        self.code, self.text = -1, ""

    def launch(self, params: np.ndarray) -> None:
        """Run the kernel, with the fault in it, and keep the sanitizer's words."""
        most_rows = build_rows(int(params["rows"][0]))
        source = kernel_source(self.plan.config, HOST_RING, self.plan.rows, most_rows)
        if self.fault:
            whole, left = FAULTS[self.fault]
            assert 1 == source.count(whole)
            source = source.replace(whole, left)
        self.code, self.text = run_sanitized(
            source,
            "megakernel",
            (self.plan.n_sm,),
            (THREADS,),
            (params[0],),
            shared_bytes(self.plan.config, HOST_RING, most_rows),
            sanitize=self.sanitize,
            buffers=list(self.buffers.values()),
            seed=self.program_seed,
            cache_dir=self.cache,
        )


def step(machine: HostMachine, n_sm: int = 3, rows: int = 3) -> np.ndarray:
    """Logits of one step of up to three ragged rows; the cache holds finite numbers."""
    _, weights = small_model(**MODEL)
    plan = build_plan(weights.config, n_sm, full_pages=9, sliding_pages=9)
    machine.load(plan, weights, 192)
    machine.write("kv", np.full(machine.table["kv"].shape, 0x3C00, np.uint16))
    table = np.arange(9, dtype=np.int32).reshape(1, 3, 3).repeat(2, axis=0)[:, -rows:]
    positions = np.array(POSITIONS[-rows:], np.int32)
    machine.step(StepInputs(np.array([5, 6, 7], np.int32)[-rows:], positions, table))
    return machine.logits(rows)


@pytest.mark.parametrize(("seed", "n_sm", "rows"), [(0, 3, 3), (1, 3, 2), (2, 3, 1), (0, 1, 3)])
@pytest.mark.parametrize("sanitize", ["address", "thread"])
def test_the_megakernel_is_clean(
    cache: Path, sanitize: Sanitizer, seed: int, n_sm: int, rows: int
) -> None:
    """Nothing to report, and the bits of an ordinary run; one SM is seen thread by thread.

    With one row the consumers do MERGE, with more the helper; with two or one, x is read early.
    """
    machine = SanitizedMachine(cache, sanitize, "", seed)
    logits = step(machine, n_sm, rows)
    assert (0, "") == (machine.code, machine.text)
    assert step(HostMachine(), rows=rows).tobytes() == logits.tobytes()


@pytest.mark.parametrize("fault", FAULTS)
def test_a_missing_piece_of_the_protocol_is_a_race(cache: Path, fault: str) -> None:
    """ThreadSanitizer names a race for at least one of three schedules. With more than one row the
    helper's MERGE comes after its scores and orders them, so one of the three has one.
    """
    codes = set()
    for seed, rows in ((0, 3), (1, 1), (2, 3)):
        machine = SanitizedMachine(cache, "thread", fault, seed)
        try:
            step(machine, rows=rows)
        except Exception as error:  # the numbers of a racing step may be anything
            print(error)
        codes.add(machine.code)
        if machine.code == TSAN_EXIT:
            assert "data race" in machine.text
            break
    assert TSAN_EXIT in codes
