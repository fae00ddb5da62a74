"""The sampler's kernels on the CPU against NumPy: each setting, all of them, any launch shape."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from mkref.machine.host import HostMachine
from mkref.machine.sampler import SHARED_BYTES, sampler_source
from mkref.machine.sanitize import run_sanitized
from tests.draws import Rig, Settings, agree, example, likely

if TYPE_CHECKING:
    from pathlib import Path

    from mkref.machine.compiler import Sanitizer

VOCAB = 517  # no multiple of four: the last quad is not whole

SETTINGS: dict[str, dict[str, Any]] = {
    "neutral": {},
    "greedy": {"temperatures": 0},
    "temperature": {"temperatures": [0.3, 1.0, 40.0]},
    "top_p": {"top_p": [0.95, 0.5, 1e-6]},
    "top_k": {"top_k": [5, 1, 300]},
    "min_p": {"min_p": [0.05, 0.001, 1.0]},
    "top_k and top_p": {"top_k": [3, 40, 516], "top_p": [0.9, 0.999, 0.3]},
    "all filters": {"top_k": 30, "top_p": [0.9, 0.999, 0.3], "min_p": 0.01, "temperatures": 1.7},
    "presence": {"presence": [0.5, 2.0, -2.0]},
    "frequency": {"frequency": [0.5, 2.0, -2.0], "temperatures": 0},
    "repetition": {"repetition": [1.1, 2.0, 0.5]},
    "bans": {"ban_until": [0, 100, 100], "stop_ids": np.arange(24).reshape(3, 8), "top_k": 9},
    "logprobs": {"logprobs": [-1, 0, 20], "temperatures": 0.8},
    "logprobs with penalties": {"logprobs": [1, 7, 20], "presence": 1.5, "top_p": 0.9},
}


def rig(vocab: int, shape: tuple[int, int] = (2, 64), rows: int = 8) -> Rig:
    """The sampler on the CPU: blocks of a row, threads of a block."""
    machine = HostMachine()
    machine.draw_shape = shape
    return Rig(machine, rows, vocab)


def some_counts(rows: int, vocab: int) -> np.ndarray:
    """Counts of every kind, most of them 0: uint16 [rows, vocab]."""
    kinds = [0, 0, 0, 1, 2, 40, 0x8000, 0x8003, 0x7FFF]
    return np.random.default_rng(4).choice(kinds, (rows, vocab)).astype(np.uint16)


@pytest.mark.parametrize("name", SETTINGS)
@pytest.mark.parametrize("vocab", [VOCAB, 2048])
def test_setting_equals_oracle(name: str, vocab: int) -> None:
    """One setting at a time, in three rows, at twenty positions."""
    kernels, counts = rig(vocab), some_counts(3, vocab)
    drawn = set()
    for position in range(20):
        settings = Settings(3, positions=position, **SETTINGS[name])
        drawn.add(tuple(agree(kernels, likely(3, vocab), settings, counts).tolist()))
    frozen = name in ("greedy", "frequency")
    assert (len(drawn) == 1) == frozen


def test_bias_and_mask_equal_oracle() -> None:
    """300 biases in one row and one in another; a mask that leaves a hundredth, and one token."""
    rng = np.random.default_rng(0)
    settings = Settings(4, top_p=0.9)
    settings.draw.bias_ids[0] = np.sort(rng.choice(VOCAB, 300, replace=False))
    settings.draw.bias_values[0] = rng.normal(0, 4, 300)
    settings.draw.bias_ids[1, 0], settings.draw.bias_values[1, 0] = 516, 100
    mask = np.zeros((4, -(-VOCAB // 32)), np.uint32)
    mask[:2] = 0xFFFFFFFF
    mask[2, ::3] = 0x10001
    mask[3, 16] = 1 << 4
    settings.draw = settings.draw.masked(mask)
    tokens = agree(rig(VOCAB), likely(4, VOCAB), settings, some_counts(4, VOCAB)).tolist()
    assert [516, 516] == [tokens[1], tokens[3]]
    assert (tokens[2] // 32 % 3, tokens[2] % 16) == (0, 0)


@pytest.mark.parametrize("seed", range(12))
def test_everything_together(seed: int) -> None:
    """Rows with all kinds of settings side by side, vocabularies from tiny to larger ones."""
    vocab = (7, 33, VOCAB, 2048)[seed % 4]
    settings, counts = example(8, vocab, seed)
    logits = likely(8, vocab, seed)
    if seed % 3 == 1:
        logits *= 1000  # far beyond the bins
    agree(rig(vocab), logits, settings, counts)


@pytest.mark.parametrize("name", ["top_p", "top_k", "top_k and top_p", "all filters", "logprobs"])
def test_equal_logits_stay_together(name: str) -> None:
    """With all logits equal no filter leaves anything out: the noise alone decides."""
    logits = np.full((3, 2048), 1.5, np.float32)
    kernels, counts = rig(2048), np.zeros((3, 2048), np.uint16)
    filtered = Settings(3, **SETTINGS[name])
    plain = Settings(3)
    assert (
        agree(kernels, logits, filtered, counts).tolist() == kernels.step(logits, plain)[0].tolist()
    )


@pytest.mark.parametrize("top_k", [0, 3, 60, 400])
@pytest.mark.parametrize("top_p", [1.0, 0.9, 0.4, 0.02])
@pytest.mark.parametrize("min_p", [0.0, 0.96])
def test_where_filters_end(top_k: int, top_p: float, min_p: float) -> None:
    """Hundreds of almost equal logits, with ties, in a few bins: filters end in the middle of one.

    Each token that is kept wrongly, or left out, has about the chance of the others to be noticed.
    """
    rng, kernels = np.random.default_rng(7), rig(VOCAB)
    logits = rng.uniform(1, 1 + rng.choice([0.01, 0.05, 0.3], (8, 1)), (8, VOCAB))
    logits[:, ::3] = logits[:, 1:2]
    logits[::2] *= 30
    logits, counts = logits.astype(np.float32), np.zeros((8, VOCAB), np.uint16)
    warm = [1, 30, 1, 1, 2, 1, 30, 1]
    for position in range(15):
        settings = Settings(
            8, top_k=top_k, top_p=top_p, min_p=min_p, positions=position, temperatures=warm
        )
        agree(kernels, logits, settings, counts)


@pytest.mark.parametrize("top_k", [0, 5000])
def test_more_almost_equal_logits_than_fit(top_k: int) -> None:
    """Lists beyond the room in shared memory, whose keys differ in few bits or in none."""
    rng, vocab = np.random.default_rng(8), 9000
    logits = rng.uniform(1, 1 + np.array([[0.003], [1e-6], [0.0]]), (3, vocab)).astype(np.float32)
    kernels, counts = rig(vocab, (5, 64), rows=3), np.zeros((3, vocab), np.uint16)
    for position in range(5):
        settings = Settings(3, top_k=top_k, top_p=[0.6, 0.3, 0.9], positions=position)
        agree(kernels, logits, settings, counts)


def test_ties_and_overflow() -> None:
    """Of equal logits the first; what overflows when it is divided by the temperature is finite."""
    logits = np.full((4, VOCAB), -3e38, np.float32)
    logits[:, 300:] = 2e38
    logits[0, 400], logits[1, 17] = 3e38, -1
    settings = Settings(4, temperatures=[0, 1e-3, 1e-3, 1e-3], top_p=0.9, min_p=[0, 0.5, 0, 0])
    settings.draw.top_k[3] = 2
    drawn = agree(rig(VOCAB), logits, settings, np.zeros((4, VOCAB), np.uint16)).tolist()
    assert [400, True, True, True] == [drawn[0], *(token >= 300 for token in drawn[1:])]
    greedy = Settings(4, temperatures=0)
    drawn = agree(rig(VOCAB), logits[[1] * 4], greedy, np.zeros((4, VOCAB), np.uint16)).tolist()
    assert [300] * 4 == drawn


def test_bans_end_where_they_should() -> None:
    """Below the position the most likely token does not come, from it on it does."""
    logits, kernels = likely(3, VOCAB), rig(VOCAB)
    best = logits.argmax(axis=1)
    stops = np.full((3, 8), -1)
    stops[:, 5] = best
    settings = Settings(3, temperatures=0, stop_ids=stops, ban_until=10, positions=[9, 10, 11])
    drawn = agree(kernels, logits, settings, np.zeros((3, VOCAB), np.uint16))
    assert [False, True, True] == (drawn == best).tolist()


def test_any_number_of_blocks() -> None:
    """From one block to more than there are quads, of one warp and of several: the same bits."""
    settings, counts = example(6, VOCAB, 3)
    settings.draw.logprobs[:] = 20
    found = []
    for shape in ((1, 32), (2, 64), (5, 96), (128, 32), (3, 512)):
        kernels = rig(VOCAB, shape, rows=6)
        kernels.put("counts", counts)
        tokens, told = kernels.step(likely(6, VOCAB), settings)
        assert told is not None
        found.append((tokens.tobytes(), told.token.tobytes(), told.top.tobytes()))
    assert 1 == len({*found})


def test_rows_do_not_depend_on_neighbours() -> None:
    """A row alone, in another place and among others draws the same token."""
    settings, counts = example(8, VOCAB, 5)
    logits, kernels = likely(8, VOCAB), rig(VOCAB)
    together = agree(kernels, logits, settings, counts).tolist()
    for row in (0, 3, 7):
        rows = [7, row] if row != 7 else [row]
        alone = Settings(len(rows))
        for name in ("temperatures", "seeds", "positions", "stop_ids"):
            getattr(alone, name)[:] = getattr(settings, name)[rows]
        for name in ("top_k", "top_p", "min_p", "presence", "frequency", "repetition"):
            getattr(alone.draw, name)[:] = getattr(settings.draw, name)[rows]
        for name in ("bias_ids", "bias_values", "ban_until"):
            getattr(alone.draw, name)[:] = getattr(settings.draw, name)[rows]
        if settings.draw.mask is not None:
            alone.draw = alone.draw.masked(settings.draw.mask[rows])
        tokens = agree(kernels, logits[rows], alone, counts[rows]).tolist()
        assert together[row] == tokens[-1]


def test_steps_of_a_launch() -> None:
    """Tokens and positions go into the inputs; enough stop ids end the launch, and what is queued
    behind changes nothing.
    """
    logits, kernels = likely(3, VOCAB), rig(VOCAB)
    settings = Settings(3, top_p=0.9, presence=[0, 1, 0])
    wanted = []
    for step in range(4):
        later = Settings(3, top_p=0.9, positions=settings.positions + step)
        wanted.append(kernels.step(logits, later)[0].tolist())
    settings.stop_ids[:, 3] = [wanted[1][0], -1, wanted[2][2]]
    settings.draw.presence[:] = 0
    first = next(s for s in range(4) if wanted[s][0] == wanted[1][0])
    last = next(s for s in range(first, 4) if wanted[s][2] == wanted[2][2])
    kernels.begin(logits, settings, stop_after=2)
    progress = kernels.machine.shared["progress"]
    for step in range(4):
        kernels.run(step)
        done = min(step, last) + 1
        moved = done - (step >= last)
        assert [done, int(step >= last)] == progress.tolist()
        assert (settings.positions + moved).tolist() == kernels.get("positions")[:3].tolist()
        if moved:
            assert wanted[moved - 1] == kernels.get("tokens")[:3].tolist()
    assert wanted[: last + 1] == kernels.machine.shared["tokens_out"][: last + 1, :3].tolist()


def test_a_failed_step_draws_nothing() -> None:
    """What the kernel reports is told to the host; inputs and progress stay."""
    kernels, settings = rig(VOCAB), Settings(3, top_p=0.9)
    kernels.begin(likely(3, VOCAB), settings)
    status = np.asarray([5, 1, 2, 3, 4, 5, 6, 7])
    kernels.put("status", status)
    kernels.run()
    assert status.tolist() == kernels.sampler.host["status_out"].tolist()
    assert [0, 0] == kernels.machine.shared["progress"].tolist()
    assert settings.positions.tolist() == kernels.get("positions")[:3].tolist()


class SanitizedMachine(HostMachine):
    """A host machine whose sampler runs in instrumented programs."""

    def __init__(self, sanitize: Sanitizer, cache: Path, fault: tuple[str, str]) -> None:
        super().__init__()
        self.sanitize, self.cache, self.fault = sanitize, cache, fault
        self.reports: list[tuple[int, str]] = []

    def launch_draw(self, name: str, rows: int, record: np.ndarray) -> None:
        """Run one kernel and keep the sanitizer's words."""
        source = sampler_source()
        assert self.fault[0] in source
        report = run_sanitized(
            source.replace(*self.fault),
            name,
            (3, rows),
            (64,),
            (record[0],),
            SHARED_BYTES,
            sanitize=self.sanitize,
            buffers=list(self.buffers.values()),
            cache_dir=self.cache,
            unit="sampler",
        )
        self.reports.append(report)


@pytest.mark.parametrize(
    ("sanitize", "fault"),
    [
        ("address", ("", "")),
        ("thread", ("", "")),
        ("thread", ("  __syncthreads();  // what this block has written\n", "")),
    ],
    ids=["memory", "order", "planted"],
)
def test_sanitizers(sanitize: Sanitizer, fault: tuple[str, str], tmp_path: Path) -> None:
    """Nothing beyond a buffer, no undefined behaviour, no race; a barrier taken out is seen."""
    settings, counts = example(4, 150, 2)
    settings.draw.logprobs[:] = 3
    settings.temperatures[:2], settings.draw.top_k[:2] = 1, 30
    machine = SanitizedMachine(sanitize, tmp_path, fault)
    kernels = Rig(machine, 4, 150)
    kernels.put("counts", counts)
    tokens, _ = kernels.step(likely(4, 150), settings)
    assert bool(fault[0]) == any(code != 0 for code, _ in machine.reports), machine.reports
    if not fault[0]:
        assert settings.oracle(likely(4, 150), counts)[0].tolist() == tokens.tolist()
