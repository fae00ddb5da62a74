"""The kernel on a GPU, against the same file on a CPU: bit for bit. Run by `make test-gpu`."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from mkref.errors import HangError, MachineError
from mkref.machine.base import StepInputs
from mkref.machine.cuda import CudaMachine, device_sms
from mkref.machine.host import HostMachine
from mkref.machine.source import Ring
from mkref.plan.build import PAGE, build_plan
from mkref.reference.scalars import to_bf16
from tests.decode import drive, drive_from, drive_launches, small_model

pytestmark = pytest.mark.gpu

OF_ATTENTION = ("part_o", "part_ml", "attn", "kv", "logits")
PROMPTS = [
    [5, 77, 300, 12],
    [9, 8, 7, 6, 5, 4, 3, 2, 1],
    [400],
    [1, 1, 2, 3, 5, 8, 13, 21, 34, 55, 89, 144],
]
GEOMETRIES = {
    "small": {},
    "one head per kv head": {"num_attention_heads": 3, "num_key_value_heads": 3, "head_dim": 64},
    "wide heads": {
        "num_attention_heads": 8,
        "num_key_value_heads": 1,
        "head_dim": 128,
        "num_hidden_layers": 3,
    },
    "128 experts": {
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "intermediate_size": 16,
        "num_hidden_layers": 3,
    },
    "no dense layer": {"first_k_dense_replace": 0, "norm_topk_prob": True, "sliding_window": 5},
}


@pytest.mark.parametrize("name", GEOMETRIES)
def test_gpu_equals_cpu_bit_for_bit(name: str) -> None:
    """The same logits on the GPU with all SMs and on the CPU with two, for ragged prompts across
    pages.
    """
    _, weights = small_model(**GEOMETRIES[name])
    steps = 140 if name == "small" else 20
    gpu = drive(CudaMachine(), weights, PROMPTS, steps, n_sm=device_sms())
    cpu = drive(HostMachine(), weights, PROMPTS, steps, n_sm=2)
    assert np.isfinite(cpu.logits).all()
    assert cpu.tokens.tolist() == gpu.tokens.tolist()
    assert cpu.logits.tobytes() == gpu.logits.tobytes()


def test_gpu_runs_are_equal() -> None:
    """Repeated runs, other SM counts, rings, pages and neighbours: the same bits for the same
    request.
    """
    _, weights = small_model()
    first = drive(CudaMachine(), weights, PROMPTS, 70, n_sm=device_sms())
    for n_sm, ring, page_seed in (
        (device_sms(), None, 7),
        (1, None, 1),
        (7, Ring(2, 16), 2),
        (64, Ring(9, 8), 3),
    ):
        again = drive(CudaMachine(ring=ring), weights, PROMPTS, 70, n_sm=n_sm, page_seed=page_seed)
        assert first.logits.tobytes() == again.logits.tobytes()
    alone = drive(CudaMachine(), weights, PROMPTS[1:2], 70, n_sm=device_sms())
    assert first.bits(1) == alone.bits(0)
    eight = drive(CudaMachine(), weights, [*PROMPTS[::-1], *PROMPTS], 70, n_sm=device_sms())
    assert first.bits(1) == eight.bits(2) == eight.bits(5)


def test_gpu_builds_take_turns() -> None:
    """Each number of rows has its build of the kernel; all work on the same buffers."""
    _, weights = small_model()
    logits: dict[str, list[bytes]] = {"cuda": [], "host": []}
    for machine, n_sm in ((CudaMachine(), device_sms()), (HostMachine(), 2)):
        plan = build_plan(weights.config, n_sm, full_pages=16, sliding_pages=16)
        machine.load(plan, weights, 128)
        table = np.arange(16, dtype=np.int32).reshape(1, 8, 2).repeat(2, axis=0)
        length = np.zeros(8, np.int32)
        for step, rows in enumerate((8, 1, 2, 3, 1, 5, 2, 8)):
            at = length[:rows].copy()
            length[:rows] += 1
            tokens = np.arange(rows, dtype=np.int32) * 61 + step
            machine.step(StepInputs(tokens, at, table[:, :rows]))
            logits[machine.name].append(machine.logits(rows).tobytes())
    assert logits["host"] == logits["cuda"]


@pytest.mark.parametrize(
    "positions",
    [
        [4224],
        [9000],
        [262_143],
        [9000, 511],
        [511, 140_000, 69_300, 300],
        [5000, 300, 5100, 400, 5200, 200, 500, 600],
    ],
)
def test_gpu_long_rows(positions: list[int]) -> None:
    """Rows of more chunks than splits, between short ones: the buffers of attention and the logits
    are those of the CPU. The same few pages, again and again.
    """
    config, weights = small_model(max_position_embeddings=262_144)
    pages = max(positions) // PAGE + 1
    table = np.tile(np.arange(pages, dtype=np.int32) % 7, (2, len(positions), 1))
    tokens = np.arange(len(positions), dtype=np.int32) + 40
    inputs = StepInputs(tokens, np.array(positions, dtype=np.int32), table)
    results = []
    for machine, n_sm in ((CudaMachine(), device_sms()), (HostMachine(), 2)):
        plan = build_plan(config, n_sm, full_pages=7, sliding_pages=7)
        machine.load(plan, weights, pages * PAGE)
        kv = np.random.default_rng(2).standard_normal(machine.table["kv"].shape)
        machine.write("kv", to_bf16(kv.astype(np.float32)))
        machine.step(inputs)
        results.append({name: machine.read(name).tobytes() for name in OF_ATTENTION})
        machine.close()
    gpu, cpu = results
    assert [name for name in OF_ATTENTION if gpu[name] != cpu[name]] == []


def test_gpu_samples_like_cpu() -> None:
    """With a temperature, the tokens depend on seed and position only, and are those of the CPU."""
    _, weights = small_model()
    settings: dict[str, Any] = {
        "temperatures": [1.0, 0.7, 0.0, 2.0],
        "seeds": [1, 2, 3, 2**63 + 11],
    }
    gpu = drive(CudaMachine(), weights, PROMPTS, 40, n_sm=device_sms(), **settings)
    cpu = drive(HostMachine(), weights, PROMPTS, 40, n_sm=3, **settings)
    greedy = drive(CudaMachine(), weights, PROMPTS, 40, n_sm=device_sms())
    assert cpu.tokens.tolist() == gpu.tokens.tolist()
    assert greedy.tokens[:, 0].tolist() != gpu.tokens[:, 0].tolist()


def test_gpu_reports_a_hang_and_goes_on() -> None:
    """A counter that never comes ends in a report within the time limit, and the process can launch
    again.
    """
    _, weights = small_model()
    machine = CudaMachine()
    machine.timeout_s = 0.2
    machine.load(build_plan(weights.config, 8, full_pages=4, sliding_pages=4), weights, 64)
    table = np.zeros((2, 1, 1), np.int32)
    inputs = StepInputs(np.asarray([5]), np.asarray([0]), table)
    expected = machine.step(inputs)
    counters = machine.read("counters")
    machine.write("counters", counters - 1000 * (np.arange(len(counters))[:, None] == 3))
    with pytest.raises(HangError, match="waits for counter"):
        machine.step(inputs)
    machine.load(machine.plan, weights, 64)
    assert expected.tolist() == machine.step(inputs).tolist()


def test_gpu_refuses_logits_that_are_not_finite() -> None:
    """A NaN in the weights is an error that names the row, not a token."""
    _, weights = small_model()
    weights.gammas[-1, 5] = float("nan")
    machine = CudaMachine()
    machine.load(build_plan(weights.config, 8, full_pages=4, sliding_pages=4), weights, 64)
    with pytest.raises(MachineError, match="row 0 is not finite"):
        machine.step(StepInputs(np.asarray([5]), np.asarray([0]), np.zeros((2, 1, 1), np.int32)))


def test_gpu_refuses_more_sms_than_there_are() -> None:
    """All blocks must be resident at once."""
    _, weights = small_model()
    n = device_sms() + 1
    with pytest.raises(MachineError, match=f"the plan has {n} SMs"):
        CudaMachine().load(
            build_plan(weights.config, n, full_pages=4, sliding_pages=4), weights, 64
        )


@pytest.mark.parametrize("wrap", [2**31, 2**32])
def test_gpu_counters_go_on_beyond_their_width(wrap: int) -> None:
    """Steps around the one in which a counter of four arrivals passes 2^31 and 2^32."""
    _, weights = small_model(num_hidden_layers=2)
    expected = drive_from(CudaMachine(), weights, 0, n_sm=4)
    assert expected == drive_from(CudaMachine(), weights, wrap // 4 - 3, n_sm=4)


@pytest.mark.parametrize("name", GEOMETRIES)
def test_gpu_long_launches_equal_single_steps(name: str) -> None:
    """Launches of one to 37 steps on the GPU, single steps on the CPU: the same tokens and bits."""
    _, weights = small_model(**GEOMETRIES[name])
    steps = 140 if name == "small" else 40
    first = [prompt[:1] for prompt in PROMPTS]
    settings: dict[str, Any] = {"temperatures": [0.0, 0.7, 0.0, 2.0], "seeds": [1, 2, 3, 4]}
    cpu = drive(HostMachine(), weights, first, steps, n_sm=2, **settings)
    tokens, logits = drive_launches(
        CudaMachine(), weights, first, steps, n_sm=device_sms(), **settings
    )
    assert cpu.tokens.tolist() == tokens.tolist()
    assert cpu.logits[-1].tobytes() == logits.tobytes()


def launched(n_steps: int, **settings: Any) -> tuple[CudaMachine, np.ndarray]:
    """A small model on all SMs, and what a launch from position 0 gave."""
    _, weights = small_model()
    machine = CudaMachine()
    plan = build_plan(weights.config, device_sms(), full_pages=8, sliding_pages=8)
    machine.load(plan, weights, 512)
    return machine, machine.decode(launch_inputs(), n_steps, **settings)


def launch_inputs() -> StepInputs:
    """One sequence at position 0."""
    table = np.arange(8, dtype=np.int32).reshape(1, 1, 8).repeat(2, axis=0)
    return StepInputs(np.asarray([5]), np.asarray([0]), table)


def test_gpu_gives_tokens_while_the_kernel_runs() -> None:
    """The host hears of the first steps before the last is done."""
    machine, expected = launched(200)
    launch = machine.start(launch_inputs(), 200)
    first = next(launch)
    n_done = int(machine.shared["progress"][0])
    assert expected[0].tolist() == first.tolist()
    assert n_done < 200
    assert expected[1:].tolist() == [tokens.tolist() for tokens in launch]


def test_gpu_launch_ends_early() -> None:
    """By a stop id, by the host, and by reading a buffer; the next launch is as if alone."""
    machine, expected = launched(200)
    tokens = expected[:, 0].tolist()
    at = next(i for i in range(20, 200) if tokens[i] not in tokens[:i])
    stops = np.full((1, 8), -1, np.int32)
    stops[0, 7] = tokens[at]
    stopped = machine.decode(launch_inputs(), 200, stop_ids=stops, stop_after=1)
    assert tokens[: at + 1] == stopped[:, 0].tolist()
    cancelled = machine.decode(launch_inputs(), 200, on_tokens=lambda step, _: step == 3)
    assert 4 <= len(cancelled) < 200
    assert tokens[: len(cancelled)] == cancelled[:, 0].tolist()
    launch = machine.start(launch_inputs(), 200)
    n_done = int(machine.read("progress")[0])
    assert 1 <= n_done < 200
    assert tokens[:n_done] == [int(t[0]) for t in launch]
    assert expected.tolist() == machine.decode(launch_inputs(), 200).tolist()


def test_gpu_survives_nan_in_a_long_launch() -> None:
    """No token is made of NaN and none is looked up: the launch ends, the device goes on."""
    machine, expected = launched(50)
    gammas = machine.read("gammas")
    machine.write("gammas", np.full_like(gammas, 0x7FC0))
    with pytest.raises(MachineError, match="row 0 is not finite"):
        machine.decode(launch_inputs(), 50)
    machine.write("gammas", gammas)
    assert expected.tolist() == machine.decode(launch_inputs(), 50).tolist()


@pytest.mark.parametrize("rows", [16, 32])
def test_gpu_prompt_in_blocks(rows: int) -> None:
    """A prompt in blocks of as many tokens as a step has rows, and one by one: the same bits."""
    _, weights = small_model()
    prompt = np.random.default_rng(0).integers(3, 500, 150).astype(np.int32)
    table = np.arange(8, dtype=np.int32).reshape(1, 1, 8).repeat(2, axis=0)
    logits = []
    for block in (1, rows):
        machine = CudaMachine()
        plan = build_plan(weights.config, device_sms(), full_pages=8, sliding_pages=8, rows=rows)
        machine.load(plan, weights, 512)
        seen = []
        for at in range(0, len(prompt), block):
            tokens = prompt[at : at + block]
            n = len(tokens)
            here = np.arange(n, dtype=np.int32)
            machine.step(StepInputs(tokens, at + here, table.repeat(n, axis=1), earlier=here))
            seen.append(machine.logits(n))
        logits.append(np.concatenate(seen))
    assert np.isfinite(logits[0]).all()
    assert logits[0].tobytes() == logits[1].tobytes()
