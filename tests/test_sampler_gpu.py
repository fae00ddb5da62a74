"""The sampler on a GPU: the bits of NumPy and of the CPU, however much is queued."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from mkref.errors import MachineError
from mkref.machine.cuda import CudaMachine, device_sms
from mkref.machine.draw import Draw
from mkref.machine.inputs import StepInputs
from tests.draw_machines import (
    full_settings,
    inputs,
    loaded,
    one_by_one,
    ready,
    stop_ids,
    table,
    taken,
)
from tests.draws import Rig, Settings, agree, example, likely, same_told

pytestmark = pytest.mark.gpu

N = 60
NORTH_VOCAB = 262144


def on_gpu(n_sm: int = 0, **options: Any) -> CudaMachine:
    """The tiny model on the GPU."""
    machine = loaded("cuda", n_sm=n_sm or device_sms(), **options)
    assert isinstance(machine, CudaMachine)
    return machine


@pytest.mark.parametrize("vocab", [7, 517, 2048, 50000])
def test_gpu_sampler_equals_numpy(vocab: int) -> None:
    """Rows with all kinds of settings side by side; ordinary, equal and huge logits."""
    kernels = Rig(CudaMachine(), 8, vocab)
    for seed in range(24):
        settings, counts = example(8, vocab, seed)
        logits = likely(8, vocab, seed)
        if seed % 6 == 3:
            logits[:] = -2.5
        if seed % 6 == 4:
            logits *= 1000
        agree(kernels, logits, settings, counts)


@pytest.mark.parametrize(
    "changes",
    [
        {"temperatures": 0},
        {},
        {"top_p": 0.95},
        {"top_p": 0.95, "temperatures": 0.3, "min_p": 0.01},
        {"top_p": 0.9999, "temperatures": 5},
        {"top_k": 50, "top_p": 0.9},
        {"top_k": 200000, "top_p": 0.999, "temperatures": 3},
        {"top_p": 0.95, "presence": 0.5, "frequency": 0.2, "repetition": 1.2, "logprobs": 20},
    ],
    ids=str,
)
def test_gpu_sampler_at_full_vocabulary(changes: dict[str, Any]) -> None:
    """The vocabulary of North: each kind of settings, one to eight rows, some positions."""
    kernels = Rig(CudaMachine(), 8, NORTH_VOCAB)
    counts = np.random.default_rng(0).choice([0, 0, 0, 1, 0x8000], (8, NORTH_VOCAB))
    for rows in (1, 3, 8):
        for position in range(0, 4000, 2000):
            settings = Settings(rows, positions=position, **changes)
            logits = likely(rows, NORTH_VOCAB, seed=position)
            agree(kernels, logits, settings, counts[:rows].astype(np.uint16))


def test_gpu_any_number_of_blocks() -> None:
    """One block of a row to 128, and again: the same bits, also with 32 rows."""
    settings, counts = example(32, 20000, 3)
    settings.draw.logprobs[:] = 20
    found = []
    for blocks in (1, 2, 16, 33, 128, 16):
        machine = CudaMachine()
        machine.draw_blocks = blocks
        kernels = Rig(machine, 32, 20000)
        kernels.put("counts", counts)
        tokens, told = kernels.step(likely(32, 20000), settings)
        assert told is not None
        found.append((tokens.tobytes(), told.token.tobytes(), told.top.tobytes()))
    assert 1 == len({*found})


@pytest.mark.parametrize("ahead", [1, 2, 5])
def test_gpu_pipelined_launch_equals_single_steps(ahead: int) -> None:
    """Many steps queued ahead and each step a launch of its own: tokens, log probabilities, counts
    and logits; the CPU has the same tokens.
    """
    single, several = ready(on_gpu()), ready(on_gpu())
    assert isinstance(single, CudaMachine)
    assert isinstance(several, CudaMachine)
    several.steps_ahead = ahead
    expected, expected_told = one_by_one(single, N, full_settings())
    for _ in range(3):
        ready(several)
        tokens, told = taken(several.start(inputs(), N, draw=full_settings()))
        assert expected == tokens
        assert all(same_told(one, other) for one, other in zip(expected_told, told, strict=True))
        assert single.read("counts").tobytes() == several.read("counts").tobytes()
        assert single.logits(3).tobytes() == several.logits(3).tobytes()
    host = ready(loaded("host"))
    assert expected == host.decode(inputs(), N, draw=full_settings()).tolist()


def test_gpu_neutral_settings_change_nothing() -> None:
    """Greedy and temperature: the tokens that the kernel draws by itself, launch by launch."""
    machine = on_gpu()
    alone = machine.decode(inputs(), 200).tolist()
    for _ in range(5):
        assert alone == machine.decode(inputs(), 200, draw=Draw.neutral(3)).tolist()
        assert alone == machine.decode(inputs(), 200).tolist()


def test_gpu_what_is_queued_behind_the_end() -> None:
    """Stop ids and a cancellation while steps are queued: the next launch goes on as if alone."""
    machine, draw = on_gpu(), Draw.neutral(3)
    machine.steps_ahead = 4
    expected = machine.decode(inputs(), N).tolist()
    column = [tokens[2] for tokens in expected]
    at = next(i for i in range(5, N) if column[i] not in column[:i])
    stops = stop_ids(-1, -1, column[at])
    for _ in range(5):
        done = machine.decode(inputs(), N, stop_ids=stops, stop_after=1, draw=draw)
        assert expected[: at + 1] == done.tolist()
        rest = machine.decode(inputs(expected[at], [at + 1] * 3), N - at - 1, draw=draw)
        assert expected[at + 1 :] == rest.tolist()
        first = machine.decode(inputs(), N, draw=draw, on_tokens=lambda step, _: step == 3)
        n = len(first)
        assert 4 <= n <= 8
        assert expected[:n] == first.tolist()
        launch = machine.start(inputs(), N, draw=draw)
        assert expected[0] == next(launch).tolist()
        n = int(machine.read("progress")[0])
        assert expected[1:n] == taken(launch)[0]


def test_gpu_survives_nan_in_a_launch_that_draws() -> None:
    """An error that names the row, no token of that step, and the next launch is right."""
    machine, draw = on_gpu(), Draw.neutral(3)
    draw.top_p[:] = 0.9
    good = machine.decode(inputs(), 8, draw=draw).tolist()
    machine.write("kv", np.full_like(machine.read("kv"), 0x7FC0))
    astray = inputs(positions=(0, 62, 0), page_table=table(0, 11, 2))
    launch = machine.start(astray, 8, draw=draw)
    with pytest.raises(MachineError, match="row 1 is not finite"):
        next(launch)
    assert good == machine.decode(inputs(), 8, draw=draw).tolist()


def test_gpu_masks_and_rows_of_a_prompt() -> None:
    """A new mask in every step, and several rows of a sequence in a step: as on the CPU."""
    found = []
    for machine in (on_gpu(), loaded("host")):
        tokens, fed = [], [5, 40, 77]
        rng = np.random.default_rng(2)
        for position in range(12):
            mask = rng.integers(0, 2**32, (3, 4), np.uint32) | np.uint32(1)
            given = inputs(fed, [position] * 3)
            fed = machine.decode(given, draw=Draw.neutral(3).masked(mask))[0].tolist()
            tokens.append(fed)
        draw = Draw.neutral(4)
        draw.top_k[3] = 5
        block = StepInputs(
            np.asarray([5, 9, 61, 7], np.int32),
            np.arange(4, dtype=np.int32),
            table(1, 1, 1, 1),
            np.asarray([0, 0, 0, 1.5], np.float32),
            np.asarray([0, 0, 0, 8], np.uint64),
            np.arange(4, dtype=np.int32),
        )
        tokens.append(machine.decode(block, draw=draw)[0].tolist())
        found.append(tokens)
    assert found[0] == found[1]
