"""A machine that computes nothing and still notices every mistake of a scheduler.

Its "keys and values" are hashes of all tokens up to a position, kept in the pages that a launch
names. The next token of a row is a hash of what it reads there: at the position before, and at
several others of its history, in full and sliding pages. A wrong page, a page that somebody else
wrote over, a token that was fed twice or never, wrong counts for penalties: each gives other
tokens than the same request gets alone. A step takes microseconds.

As the GPU does, it finishes a step or two more after `cancel`.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from types import SimpleNamespace
from typing import Any, cast

import numpy as np

from mkref.engine import Engine
from mkref.errors import MachineError
from mkref.machine.draw import TOP_LOGPROBS, Draw, LogProbs, check_draw
from mkref.machine.inputs import StepInputs, check_launch, check_stops
from mkref.machine.launch import Launch
from mkref.plan.build import PAGE
from tests.decode import small_config

__all__ = ["VOCAB", "FakeLaunch", "FakeMachine", "FakePrefill", "fake_engine"]

VOCAB = 517
_BITS = (1 << 61) - 1
_LOOKS = 3
"""Earlier positions that a row reads, per kind of layer."""


def mix(*values: int) -> int:
    """A number that depends on all of them."""
    state = 0x9E3779B97F4A7C15
    for value in values:
        state = (state ^ (value & _BITS)) * 0xBF58476D1CE4E5B9 & _BITS
        state ^= state >> 29
    return state


class FakeMachine:
    """See above; the part of `mkref.machine.base.Machine` that a scheduler uses.

    Args:
        rows, full_pages, sliding_pages, max_context, window: as in a plan.
        lag: most steps that are finished after `cancel`.

    Attributes:
        steps, launches: so far.
        fail_at: number of the step that fails, or -1.
    """

    name = "fake"

    def __init__(
        self,
        rows: int = 8,
        full_pages: int = 64,
        sliding_pages: int = 64,
        max_context: int = 1024,
        window: int = 100,
        lag: int = 2,
    ) -> None:
        config = small_config(sliding_window=window)
        self.plan: Any = SimpleNamespace(
            config=config,
            rows=rows,
            pool=SimpleNamespace(full_pages=full_pages, sliding_pages=sliding_pages),
            n_sm=1,
        )
        self.max_context = max_context
        self.window = window
        self.lag = lag
        self.steps = self.launches = 0
        self.fail_at = -1
        self.closed = False
        self._random = random.Random(0)
        self.pools = [[-1] * (n * PAGE) for n in (full_pages, sliding_pages)]
        self.counts: list[int] = [-1] * rows  # poison: nobody has told
        self.under_way: FakeLaunch | None = None
        self.last_logits = np.zeros((0, VOCAB), np.float32)

    def start(
        self,
        inputs: StepInputs,
        n_steps: int = 1,
        *,
        stop_ids: np.ndarray | None = None,
        stop_after: int = 0,
        draw: Draw | None = None,
    ) -> Launch:
        """As `Machine.start`."""
        check_launch(inputs, self.plan, self.max_context, n_steps)
        check_stops(stop_ids, stop_after, inputs.rows)
        if draw is not None:
            check_draw(draw, inputs, n_steps, VOCAB)
        assert self.under_way is None, "the launch before was not taken to its end"
        self.launches += 1
        stops = None if stop_ids is None else stop_ids.tolist()
        self.under_way = FakeLaunch(self, inputs, n_steps, stops, stop_after, draw)
        return self.under_way

    def set_counts(self, row: int, prompt_ids: np.ndarray, output_ids: np.ndarray) -> None:
        """As `Machine.set_counts`."""
        self.counts[row] = sum(prompt_ids.tolist()) * 1000 + sum(
            mix(t) % 1009 for t in output_ids.tolist()
        )

    def logits(self, rows: int) -> np.ndarray:
        """Something of the right shape."""
        return self.last_logits[:rows]

    def take_in(self, table: np.ndarray, position: int, token: int) -> int:
        """Put one token into the cache; the hash of the history."""
        state = token + 1
        if position:
            looks = [position - 1]
            state = mix(state, self._read(table, 0, position - 1))
            for i in range(_LOOKS):
                looks.append(mix(position, i) % position)
            for look in looks:
                state = mix(state, self._read(table, 0, look))
            first = max(0, position - self.window + 1)
            for look in (first, position - 1, first + mix(position, 7) % (position - first)):
                state = mix(state, self._read(table, 1, look))
        for kind in (0, 1):
            page = int(table[kind, position // PAGE])
            assert page >= 0, f"no page of kind {kind} for position {position}"
            self.pools[kind][page * PAGE + position % PAGE] = state
        return state

    def _read(self, table: np.ndarray, kind: int, position: int) -> int:
        page = int(table[kind, position // PAGE])
        assert page >= 0, f"no page of kind {kind} for position {position}"
        value = self.pools[kind][page * PAGE + position % PAGE]
        assert value >= 0, f"nobody wrote position {position} of kind {kind}"
        return value

    def close(self) -> None:
        """Nothing to give back."""
        self.closed = True


class FakeLaunch(Launch):
    """Steps that are computed when they are asked for, and some more when it is cancelled."""

    def __init__(
        self,
        machine: FakeMachine,
        inputs: StepInputs,
        n_steps: int,
        stops: list[list[int]] | None,
        stop_after: int,
        draw: Draw | None,
    ) -> None:
        self.n_steps = n_steps
        self.logprobs: LogProbs | None = None
        self.machine, self.inputs, self.draw = machine, inputs, draw
        self._stops, self._stop_after = stops, stop_after
        self._left = n_steps
        self._tokens = inputs.tokens.tolist()
        self._steps = self._run()

    def __next__(self) -> np.ndarray:
        if self._left <= 0:
            self._end()
            raise StopIteration
        self._left -= 1
        try:
            tokens, self.logprobs = next(self._steps)
        except BaseException:
            self._end()
            raise
        if self._left <= 0:
            self._end()
        return tokens

    def _end(self) -> None:
        self._left = 0
        if self.machine.under_way is self:
            self.machine.under_way = None

    def cancel(self) -> None:
        """Some more steps come, as on a GPU."""
        if self.n_steps > 1:
            self._left = min(self._left, self.machine._random.randint(0, self.machine.lag))

    def close(self) -> None:
        """Nothing more."""
        self._end()

    def _run(self) -> Iterator[tuple[np.ndarray, LogProbs | None]]:
        machine, inputs = self.machine, self.inputs
        # The scheduler's arrays are its own again as soon as the launch has begun.
        table, positions = inputs.page_table.copy(), inputs.positions.tolist()
        seeds, heats = inputs.seeds.tolist(), inputs.temperatures.tolist()
        stopped: set[int] = set()
        for step in range(self.n_steps):
            machine.steps += 1
            if machine.steps == machine.fail_at:
                machine.pools = [[-1] * len(pool) for pool in machine.pools]
                raise MachineError("the fake machine fails")
            states = [
                machine.take_in(table[:, row], positions[row] + step, token)
                for row, token in enumerate(self._tokens)
            ]
            out = [
                self._token(row, state, positions[row] + step, heats[row], seeds[row])
                for row, state in enumerate(states)
            ]
            numbers = np.arange(VOCAB, dtype=np.float32)
            machine.last_logits = (np.array(states)[:, None] + numbers).astype(np.float32)
            self._tokens = out
            yield np.array(out, np.int32), self._told(out, states)
            stopped |= {row for row, t in enumerate(out) if self._stops and t in self._stops[row]}
            if self._stop_after and len(stopped) >= self._stop_after:
                self._left = 0
                return

    def _token(self, row: int, state: int, position: int, heat: float, seed: int) -> int:
        draw, counts = self.draw, self.machine.counts
        noise = (int(heat * 1000), seed if heat else 0, position if heat else 0)
        if draw is None:
            return mix(state, *noise) % VOCAB
        settings = [
            int(1000 * float(getattr(draw, name)[row]))
            for name in ("top_k", "top_p", "min_p", "presence", "frequency", "repetition")
        ]
        if not heat:  # the largest is the largest, whatever is left out
            settings[:3] = [0, 1000, 0]
        n_bias = int(draw.n_bias[row])
        settings += draw.bias_ids[row, :n_bias].tolist()
        neutral = [0, 1000, 0, 0, 0, 1000]
        penalizes = bool(draw.penalizes[row])
        if penalizes:
            assert counts[row] >= 0, "nobody told the machine the counts"
            settings.append(counts[row])
        token = mix(state, *noise, *([] if settings == neutral else settings)) % VOCAB
        for _ in range(VOCAB):
            banned = self._stops is not None and position < int(draw.ban_until[row])
            allowed = draw.mask is None or draw.mask[row, token // 32] >> (token % 32) & 1
            if allowed and not (banned and self._stops and token in self._stops[row]):
                break
            token = (token + 1) % VOCAB
        if penalizes:
            counts[row] += mix(token) % 1009
        return token

    def _told(self, out: list[int], states: list[int]) -> LogProbs | None:
        if self.draw is None or (self.draw.logprobs < 0).all():
            return None
        n = len(out)
        told = LogProbs(
            np.full(n, np.nan, np.float32),
            np.full((n, TOP_LOGPROBS), -1, np.int32),
            np.full((n, TOP_LOGPROBS), np.nan, np.float32),
        )
        for row, most in enumerate(self.draw.logprobs.tolist()):
            if most >= 0:
                told.token[row] = -(states[row] % 1000) / 100
                told.top_ids[row, :most] = [(states[row] + i) % VOCAB for i in range(most)]
                told.top[row, :most] = [-float(i) for i in range(most)]
        return told


class FakePrefill:
    """A fast way into the fake machine's cache.

    Attributes:
        runs: position and number of tokens of every chunk.
    """

    def __init__(self, machine: FakeMachine, chunk: int = 256) -> None:
        self.machine, self.chunk = machine, chunk
        self.runs: list[tuple[int, int]] = []
        self.fail = False

    def run(self, tokens: Sequence[int], position: int, table: np.ndarray) -> None:
        """As `mkref.engine.scheduler.Prefills.run`."""
        assert self.machine.under_way is None
        assert 1 <= len(tokens) <= self.chunk
        if self.fail:
            raise MachineError("no memory for a chunk")
        self.runs.append((position, len(tokens)))
        for i, token in enumerate(tokens):
            self.machine.take_in(table, position + i, token)


def fake_engine(
    *, reuse: bool = True, tokenizer: Any = None, debug: bool = True, **sizes: Any
) -> tuple[Engine, FakeMachine]:
    """An engine on a fake machine; the accounting of pages is proved after every operation."""
    machine = FakeMachine(**sizes)
    engine = Engine(machine.plan, cast(Any, machine), machine.max_context, tokenizer, reuse=reuse)
    engine.kv._debug = debug
    return engine, machine
