"""The interpreter and the kernel on a CPU: every buffer, bit for bit, after the same steps."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import numpy as np
import pytest

from mkref.errors import MachineError
from mkref.machine.base import KernelMachine, StepInputs
from mkref.machine.host import HOST_RING, HostMachine
from mkref.machine.interpreter import InterpreterMachine
from mkref.machine.source import Ring
from mkref.plan import BUFFERS, build_plan
from mkref.reference.scalars import to_bf16
from mkref.weights.layout import PAGE, kv_tile, pack_kv_page
from mkref.weights.synthetic import synthetic_weights
from tests.decode import drive, drive_from, small_config, small_model

if TYPE_CHECKING:
    from mkref.config import NorthConfig
    from mkref.plan import Plan

POSITIONS = [0, 63, 64, 127, 130, 300, 510, 65]
OF_THE_PLAN = {"tasks", "task_offsets", "counters", "best_values", "best_tokens", "trace"}
"""Differ with the number of SMs."""


def random_cache(plan: Plan, n_tiles: int) -> np.ndarray:
    """Random keys and values everywhere, bfloat16 words [tiles, 256]."""
    return to_bf16(np.random.default_rng(2).standard_normal((n_tiles, 256)).astype(np.float32))


def cancelling_cache(plan: Plan, n_tiles: int) -> np.ndarray:
    """Pages 2 i and 2 i + 1, i below 8, have the same keys and opposite values, which are large."""
    words, config = random_cache(plan, n_tiles), plan.config
    rng, shape = np.random.default_rng(5), (PAGE, config.head_dim)
    for layer in range(config.num_hidden_layers):
        base = plan.pool.base(config, layer)
        for i in range(8):
            for head in range(config.num_key_value_heads):
                keys, values = rng.standard_normal((2, *shape)).astype(np.float32)
                for page, sign in ((2 * i, 1), (2 * i + 1, -1)):
                    at = kv_tile(base, page, head, config)
                    tiles = pack_kv_page(to_bf16(keys), to_bf16(values * (sign * 2.0**20)))
                    words[at : at + config.head_dim // 2] = tiles
    return words


def different_buffers(
    config: NorthConfig,
    steps: Sequence[StepInputs],
    pages: tuple[int, int],
    kernel: HostMachine,
    cache: Callable[[Plan, int], np.ndarray] = random_cache,
) -> set[str]:
    """Names of the buffers in which the kernel's bits differ from the interpreter's at the end.

    Args:
        config: of the model.
        steps: one after another.
        pages: budgets of full and sliding layers.
        kernel: on three SMs; the interpreter has five.
        cache: makes the keys and values before the first step.
    """
    weights = synthetic_weights(config, seed=3)
    max_context = steps[0].page_table.shape[2] * PAGE
    results = []
    for machine, n_sm in ((InterpreterMachine(order=3), 5), (kernel, 3)):
        plan = build_plan(config, n_sm, full_pages=pages[0], sliding_pages=pages[1])
        machine.load(plan, weights, max_context)
        machine.write("kv", cache(plan, machine.table["kv"].shape[0]))
        for inputs in steps:
            machine.step(inputs)
        results.append({name: machine.read(name) for name in BUFFERS})
        machine.close()
    interpreted, computed = results
    return {name for name in BUFFERS if interpreted[name].tobytes() != computed[name].tobytes()}


@pytest.mark.parametrize("ring", [HOST_RING, Ring(2, 8)], ids=["whole chunks", "keys first"])
def test_every_buffer_is_the_same_as_after_the_kernel(ring: Ring) -> None:
    """Eight rows, then fewer and more, each with the build for so many; lengths at edges of pages
    and chunks; poison stays where it was. A ring that does not hold a chunk takes its keys, then
    its values.
    """
    rng = np.random.default_rng(1)
    table = np.stack([rng.permutation(72 + 2 * kind)[:72].reshape(8, 9) for kind in (0, 1)])
    steps = [
        StepInputs(
            np.arange(rows, dtype=np.int32) * 61 + step,
            np.array(POSITIONS[:rows], dtype=np.int32) + step,
            table[:, :rows].astype(np.int32),
            np.array([0, 0.5, 1, 0, 2, 0, 1, 1][:rows], dtype=np.float32),
            np.arange(rows).astype(np.uint64) + (1 << 40),
        )
        for step, rows in enumerate((8, 1, 2, 5, 3))
    ]
    assert different_buffers(small_config(), steps, (72, 74), HostMachine(ring=ring)) <= OF_THE_PLAN


@pytest.mark.parametrize(
    "positions",
    [[4223], [4224], [9000], [9000, 511], [511, 140_000, 69_300, 300], [262_143]],
)
@pytest.mark.parametrize("changes", [{}, {"head_dim": 128, "sliding_window": 5000}], ids=str)
def test_long_rows(positions: list[int], changes: dict[str, int]) -> None:
    """33 splits of one chunk and of several, which the consumers merge where there is one row, the
    helper where there are more, between short rows; windows of few chunks, and of more than there
    are splits. The same few pages, again and again.
    """
    config = small_config(max_position_embeddings=262_144, **changes)
    pages = max(positions) // PAGE + 1
    table = np.tile(np.arange(pages, dtype=np.int32) % 7, (2, len(positions), 1))
    inputs = StepInputs(
        np.arange(len(positions), dtype=np.int32) + 40, np.array(positions, dtype=np.int32), table
    )
    assert different_buffers(config, [inputs], (7, 7), HostMachine()) <= OF_THE_PLAN


@pytest.mark.parametrize("rows", [1, 2])
def test_merge_adds_in_the_order_of_the_contract(rows: int) -> None:
    """33 splits of which 32 cancel, but for how their sums round: by the consumers and by the
    helper. Any other order shows.
    """
    order = np.random.default_rng(4).permutation(32) % 16
    table = np.append(order, 16).repeat(2).astype(np.int32)  # both pages of a chunk
    inputs = StepInputs(
        np.arange(rows, dtype=np.int32) + 40,
        np.full(rows, 33 * 128 - 1, dtype=np.int32),
        np.tile(table, (2, rows, 1)),
    )
    inputs.page_table[:, :, -1] = 16 + np.arange(rows)  # its last key is appended here
    config = small_config(max_position_embeddings=8192)
    kernel = HostMachine()
    found = different_buffers(config, [inputs], (18, 18), kernel, cancelling_cache)
    assert found <= OF_THE_PLAN


def test_a_width_that_no_layer_has_does_not_matter() -> None:
    """Only dense layers: experts of any width are fine, as there are none."""
    _, weights = small_model(num_hidden_layers=2, first_k_dense_replace=2, intermediate_size=50)
    expected = drive(InterpreterMachine(), weights, [[5], [6]], 3, n_sm=2)
    actual = drive(HostMachine(), weights, [[5], [6]], 3, n_sm=2)
    assert np.isfinite(expected.logits).all()
    assert expected.logits.tobytes() == actual.logits.tobytes()


@pytest.mark.parametrize("make", [HostMachine, InterpreterMachine])
def test_what_a_row_does_not_see_is_never_used(make: type[KernelMachine]) -> None:
    """NaN before a window and after the token, in keys and values, does not change the logits."""
    weights = synthetic_weights(small_config(), seed=3)
    config, rows, pages = weights.config, 3, 4
    positions = np.array([200, 70, 130], dtype=np.int32)
    plan = build_plan(config, 2, full_pages=rows * pages, sliding_pages=rows * pages)
    table = np.arange(rows * pages, dtype=np.int32).reshape(1, rows, pages).repeat(2, axis=0)
    machine = make()
    machine.load(plan, weights, pages * PAGE)
    kv = to_bf16(np.random.default_rng(2).standard_normal(machine.table["kv"].shape))
    seen = np.zeros(kv.shape, dtype=np.uint16)
    for layer in range(config.num_hidden_layers):
        for row, last in enumerate(positions):
            first = max(0, last - config.sliding_window + 1) if config.is_sliding(layer) else 0
            for page in range(pages):
                key = page * PAGE + np.arange(PAGE)
                # Not the token of this step: its key and value come from the step itself.
                mask = ((key >= first) & (key < last)).astype(np.uint16)[:, None]
                mask = mask.repeat(config.head_dim, axis=1)
                for head in range(config.num_key_value_heads):
                    base = plan.pool.base(config, layer)
                    at = kv_tile(base, int(table[0, row, page]), head, config)
                    seen[at : at + config.head_dim // 2] = pack_kv_page(mask, mask)
    logits = []
    for cache in (kv, np.where(seen, kv, np.uint16(0x7FFF))):
        machine.write("kv", cache)
        machine.step(StepInputs(np.array([5, 6, 7], dtype=np.int32), positions, table))
        logits.append(machine.logits(rows))
    assert np.isfinite(logits[0]).all()
    assert logits[0].tobytes() == logits[1].tobytes()


@pytest.mark.parametrize("wrap", [2**31, 2**32])
@pytest.mark.parametrize("make", [HostMachine, InterpreterMachine])
def test_counters_go_on_beyond_their_width(make: type[KernelMachine], wrap: int) -> None:
    """Steps around the one in which a counter of four arrivals passes 2^31 and 2^32."""
    _, weights = small_model(num_hidden_layers=2)
    expected = drive_from(InterpreterMachine(), weights, 0, n_sm=4)
    assert expected == drive_from(make(), weights, wrap // 4 - 3, n_sm=4)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("make", [HostMachine, InterpreterMachine])
def test_a_router_that_is_not_finite_is_an_error(make: type[KernelMachine], value: float) -> None:
    """It must not just switch experts off."""
    _, weights = small_model(num_hidden_layers=2)
    at = weights.layout.layer(1)
    weights.tiles[at.router : at.qkv] = value
    with pytest.raises(MachineError, match="not finite"):
        drive_from(make(), weights, 0, n_sm=2)
