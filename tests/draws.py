"""Drive the sampler's kernels on logits of a test's own, without a model.

`Rig` gives a host or a GPU machine the few buffers that the sampler reads, so that its kernels run
there as they do behind a step. `oracle` is what NumPy says to the same settings.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np

from mkref.machine.draw import TOP_LOGPROBS, Draw, LogProbs
from mkref.machine.draw_rows import draw_rows
from mkref.machine.sampler import Sampler
from mkref.plan.buffers import MAX_LAUNCH_STEPS, STATUS_WORDS, STOP_IDS, Buffer

__all__ = ["Rig", "Settings", "agree", "example", "likely", "same_told"]


class Settings:
    """All that a draw of n rows depends on, but logits and counts.

    Args:
        rows: n.
        changes: arrays or values of `Draw`, of temperatures, seeds, positions or stop ids.
    """

    def __init__(self, rows: int, **changes: Any) -> None:
        self.draw = Draw.neutral(rows)
        self.temperatures = np.ones(rows, np.float32)
        self.seeds = np.arange(rows, dtype=np.uint64) * 7919 + 5
        self.positions = np.arange(rows, dtype=np.int32) * 3 + 1
        self.stop_ids = np.full((rows, STOP_IDS), -1, np.int32)
        mask = changes.pop("mask", None)
        for name, value in changes.items():
            array = getattr(self if hasattr(self, name) else self.draw, name)
            array[...] = value
        if mask is not None:
            self.draw = self.draw.masked(mask)

    def oracle(self, logits: np.ndarray, counts: np.ndarray) -> tuple[np.ndarray, LogProbs]:
        """Tokens and log probabilities by `mkref.reference.drawing`; counts change."""
        return draw_rows(
            logits,
            self.draw,
            temperatures=self.temperatures,
            seeds=self.seeds,
            positions=self.positions,
            stop_ids=self.stop_ids,
            ban_until=self.draw.ban_until,
            counts=counts,
        )


class Rig:
    """The sampler on a machine that has no model.

    Args:
        machine: a `HostMachine` or a `CudaMachine`, not loaded.
        rows: rows of its buffers.
        vocab: V.
    """

    def __init__(self, machine: Any, rows: int, vocab: int) -> None:
        self.machine, self.rows, self.vocab = machine, rows, vocab
        config = SimpleNamespace(vocab_size=vocab)
        machine.plan = SimpleNamespace(rows=rows, n_sm=132, config=config)
        machine.table = {
            "logits": Buffer("float32", (rows, vocab)),
            "tokens": Buffer("int32", (rows,)),
            "positions": Buffer("int32", (rows,)),
            "temperatures": Buffer("float32", (rows,)),
            "seeds": Buffer("uint64", (rows,)),
            "stop_ids": Buffer("int32", (rows, STOP_IDS)),
            "status": Buffer("int32", (STATUS_WORDS,)),
        }
        machine.buffers = {name: machine.allocate(b, 0) for name, b in machine.table.items()}
        for name, shape in (("tokens_out", (MAX_LAUNCH_STEPS, rows)), ("progress", (2,))):
            machine.buffers[name] = memory = machine.allocate_shared(4 * int(np.prod(shape)))
            machine.shared[name] = memory.view(np.int32).reshape(shape)
        self.sampler = Sampler(machine)

    def put(self, name: str, array: np.ndarray) -> None:
        """Write the first rows of a buffer."""
        kind = np.dtype(self.machine.table[name].dtype)
        self.machine.put(self.machine.buffers[name], np.ascontiguousarray(array, kind))

    def get(self, name: str) -> np.ndarray:
        """Copy a buffer."""
        return np.asarray(self.machine.get(self.machine.buffers[name], self.machine.table[name]))

    def begin(self, logits: np.ndarray, settings: Settings, stop_after: int = 0) -> None:
        """Give a launch its inputs."""
        for name in ("temperatures", "seeds", "positions", "stop_ids"):
            self.put(name, getattr(settings, name))
        self.put("logits", logits)
        self.machine.shared["progress"][:] = 0
        self.sampler.send(settings.draw, settings.draw.ban_until, stop_after)

    def run(self, step: int = 0) -> tuple[np.ndarray, LogProbs | None]:
        """Draw for one step of the launch: tokens int32 [n] and log probabilities."""
        self.machine.begin_draw(self.sampler, step)
        if self.machine.name == "cuda":
            self.machine.cupy.cuda.get_current_stream().synchronize()
        tokens = self.machine.shared["tokens_out"][step, : self.sampler.draw.rows].copy()
        return tokens, self.sampler.told(step)

    def step(self, logits: np.ndarray, settings: Settings) -> tuple[np.ndarray, LogProbs | None]:
        """A launch of one step."""
        self.begin(logits, settings)
        return self.run()


def likely(rows: int, vocab: int, seed: int = 0) -> np.ndarray:
    """Logits as a language model gives them, with ties: float32 [rows, vocab].

    A few tokens stand out, every fifth value is rounded to quarters.
    """
    rng = np.random.default_rng(seed)
    logits = rng.normal(0, 2.5, (rows, vocab)).astype(np.float32)
    peaks = rng.integers(0, vocab, (rows, 12))
    np.put_along_axis(logits, peaks, (8 + 5 * rng.random((rows, 12))).astype(np.float32), axis=1)
    logits[:, ::5] = np.round(logits[:, ::5] * 4) / 4
    return logits


def example(rows: int, vocab: int, seed: int) -> tuple[Settings, np.ndarray]:
    """Rows with settings of every kind at random, neutral ones among them, and their counts."""
    rng = np.random.default_rng(seed)

    def some(values: np.ndarray | list[float], neutral: float) -> np.ndarray:
        return np.where(rng.random(rows) < 0.4, rng.choice(np.asarray(values), rows), neutral)

    settings = Settings(
        rows,
        temperatures=some([0.0, 0.3, 0.7, 2.5, 40.0], 1.0),
        seeds=rng.integers(0, 2**63, rows),
        positions=rng.integers(0, 5000, rows),
        stop_ids=np.where(
            rng.random((rows, STOP_IDS)) < 0.5, rng.integers(0, vocab, rows)[:, None], -1
        ),
        top_k=some([1, 2, 5, 40, vocab - 1, vocab, 10 * vocab], 0),
        top_p=some([1e-6, 0.1, 0.5, 0.9, 0.95, 0.999], 1),
        min_p=some([0.001, 0.05, 0.3, 1.0], 0),
        presence=some([-2, 0.5, 2], 0),
        frequency=some([-1, 0.1, 2], 0),
        repetition=some([0.5, 1.1, 2], 1),
        ban_until=some([10000], 0),
        logprobs=some(np.arange(TOP_LOGPROBS + 1), -1),
    )
    for row in range(rows):
        n = int(rng.choice([0, 0, 3, min(300, vocab)]))
        settings.draw.bias_ids[row, :n] = np.sort(rng.choice(vocab, n, replace=False))
        settings.draw.bias_values[row, :n] = rng.normal(0, 5, n)
    if rng.random() < 0.5:
        words = rng.integers(0, 2**32, (rows, -(-vocab // 32)), np.uint32)
        words[rng.random(rows) < 0.5] = 0xFFFFFFFF
        words[:, 0] |= 0xFF  # enough to be left when stop ids are banned
        settings.draw = settings.draw.masked(words)
    counts = rng.choice([0, 0, 0, 1, 2, 40, 0x8000, 0x8003, 0x7FFF], (rows, vocab)).astype(
        np.uint16
    )
    return settings, counts


def same_told(one: LogProbs | None, other: LogProbs | None) -> bool:
    """Are log probabilities equal bit for bit, where they are told?"""
    if one is None or other is None:
        return one is other
    return all(
        np.array_equal(getattr(one, name), getattr(other, name), equal_nan=name != "top_ids")
        for name in ("token", "top_ids", "top")
    )


def agree(kernels: Rig, logits: np.ndarray, settings: Settings, counts: np.ndarray) -> np.ndarray:
    """Draw on both sides; tokens, counts and log probabilities are equal bit for bit."""
    n = len(logits)
    given = np.zeros((kernels.rows, kernels.vocab), np.uint16)
    given[:n] = counts
    kernels.put("counts", given)
    tokens, told = kernels.step(logits, settings)
    expected, expected_told = settings.oracle(logits, given)
    assert expected.tolist() == tokens.tolist()
    assert given.tobytes() == kernels.get("counts").tobytes()
    asked = (settings.draw.logprobs >= 0).any()
    assert same_told(expected_told if asked else None, told)
    return tokens
