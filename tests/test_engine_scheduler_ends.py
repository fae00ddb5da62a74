"""The scheduler: deadlines, failures, draws and chunks of prompts."""

from __future__ import annotations

import time

import numpy as np
import pytest

from mkref.engine.kv import AHEAD
from mkref.engine.request import LogProb
from mkref.engine.sampling import Sampling
from mkref.errors import MachineError, RequestError
from tests.fakes import VOCAB, FakePrefill, fake_engine
from tests.scheduling import all_back, alone, ids, line_up, run


class TestDeadline:
    """An end in time."""

    def test_waiting_and_running(self) -> None:
        """Both end with "deadline" and what they have; who has none goes on."""
        engine, _ = fake_engine(rows=1)
        soon = time.monotonic() + 0.05
        running = line_up(engine, [1], 1000, deadline=soon)
        waiting = line_up(engine, [2], 5, deadline=soon)
        free = line_up(engine, [3], 5)
        while time.monotonic() < soon - 0.02:
            engine.scheduler.step()
            time.sleep(0.001)
        time.sleep(0.05)
        run(engine)
        assert ["deadline", "deadline", "length"] == [
            s.finish_reason for s in (running, waiting, free)
        ]
        assert 0 < running.n_generated < 1000
        assert alone([1], 1000)[: running.n_generated] == running.generated.tolist()
        all_back(engine)


class TestFailure:
    """The machine fails."""

    def test_who_runs_hears_of_it_who_waits_goes_on(self) -> None:
        """All that ran end with the error; pages are free; the next answers are right."""
        engine, machine = fake_engine(rows=2)
        kept = line_up(engine, ids(200), 1)
        run(engine)
        running = [line_up(engine, [i], 50) for i in range(2)]
        waiting = line_up(engine, ids(200), 5)
        machine.fail_at = machine.steps + 10
        with pytest.raises(MachineError, match="the fake machine fails"):
            run(engine)
        assert all(isinstance(s.error, MachineError) for s in running)
        assert waiting.error is None
        run(engine)
        assert (0, alone(ids(200), 5)) == (waiting.n_cached, waiting.generated.tolist())
        assert kept.generated.tolist() == waiting.generated.tolist()[:1]
        assert {"length": 2, "error": 2} == engine.scheduler.counters.finished
        all_back(engine)

    def test_a_chunk_that_fails_is_the_fault_of_one(self) -> None:
        """The prompt ends with an error, the others generate on."""
        engine, machine = fake_engine()
        prefill = engine.scheduler.prefill = FakePrefill(machine)
        other = line_up(engine, [1], 60)
        engine.scheduler.step()
        prefill.fail = True
        bad = line_up(engine, ids(700), 5)
        run(engine)
        assert isinstance(bad.error, MachineError)
        assert alone([1], 60) == other.generated.tolist()
        all_back(engine)


class Only:
    """A constraint: the same few tokens at every place, and an end after some."""

    def __init__(self, allowed: list[int], n: int = 1000, fail_at: int = 1000) -> None:
        self.allowed, self.n, self.fail_at = allowed, n, fail_at
        self.told: list[int] = []

    @property
    def ended(self) -> bool:
        """After `n` tokens."""
        return len(self.told) == self.n

    def mask(self) -> np.ndarray:
        """Those tokens."""
        if len(self.told) == self.fail_at:
            raise ValueError("no such state")
        words = np.zeros(-(-VOCAB // 32), np.uint32)
        for token in self.allowed:
            words[token // 32] |= np.uint32(1 << token % 32)
        return words

    def accept(self, token: int) -> None:
        """Keep it."""
        self.told.append(token)


class TestDraws:
    """Settings of the draw, constraints, probabilities."""

    def test_constraint(self) -> None:
        """Only what is allowed comes, beside others who are free; the end is "stop"."""
        engine, _ = fake_engine()
        only = Only([3, 200, 400], 30)
        bound, free = line_up(engine, ids(20), 99, constraint=only), line_up(engine, [1], 40)
        run(engine)
        assert ("stop", only.told) == (bound.finish_reason, bound.generated.tolist())
        assert {3, 200, 400} == {*only.told}
        assert alone([1], 40) == free.generated.tolist()

    @pytest.mark.parametrize(
        ("constraint", "says"),
        [
            (Only([]), "constraint: no token may come next"),
            (Only([1], fail_at=3), "constraint: no such state"),
            (Only([VOCAB]), "constraint: no token may come next"),
        ],
    )
    def test_a_broken_constraint_is_the_fault_of_one(self, constraint: Only, says: str) -> None:
        """It ends with an error that names it; the others do not notice."""
        engine, _ = fake_engine()
        bad, good = line_up(engine, [1], 9, constraint=constraint), line_up(engine, [2], 9)
        run(engine)
        assert isinstance(bad.error, RequestError)
        assert says in str(bad.error)
        assert alone([2], 9) == good.generated.tolist()
        constraint.told.clear()
        with pytest.raises(RequestError, match=says):
            engine.generate([1], 9, constraint=constraint, ignore_eos=True)
        all_back(engine)

    def test_logprobs_reach_the_token(self) -> None:
        """One for every token, with as many likely ones as were asked for."""
        engine, _ = fake_engine()
        done = engine.generate_batch(
            [ids(30), [5]], 12, sampling=[Sampling(logprobs=4), Sampling()], ignore_eos=True
        )
        assert done[0].logprobs is not None
        assert list(done[0].token_ids) == [told.id for told in done[0].logprobs]
        assert all(4 == len(told.top) and told.logprob <= 0 for told in done[0].logprobs)
        assert isinstance(done[0].logprobs[0], LogProb)
        assert done[1].logprobs is None

    def test_plain_rows_use_long_launches_beside_settings(self) -> None:
        """top_p needs no host between two steps."""
        engine, machine = fake_engine()
        line_up(engine, [1], 64, sampling=Sampling(temperature=1.0, top_p=0.95))
        line_up(engine, [2], 64)
        run(engine)
        assert 64 // AHEAD + 1 >= machine.launches


class TestChunks:
    """Long prompts by the fast way."""

    def test_nobody_waits_longer_than_a_chunk(self) -> None:
        """Between two chunks there is a step for those who generate."""
        engine, machine = fake_engine(full_pages=100, sliding_pages=100)
        prefill = engine.scheduler.prefill = FakePrefill(machine, chunk=100)
        old = line_up(engine, [1], 300)
        for _ in range(20):
            engine.scheduler.step()
        new = line_up(engine, ids(900), 20)
        seen = []
        while new.n_generated == 0:
            engine.scheduler.step()
            seen.append((len(prefill.runs), old.n_generated))
        for n_chunks in range(1, len(prefill.runs)):
            tokens = [n for chunks, n in seen if chunks == n_chunks]
            assert tokens[-1] > tokens[0] - 1 >= 0
        assert [(at, 100) for at in range(0, 800, 100)] == prefill.runs[:8]
        run(engine)
        assert alone([1], 300) == old.generated.tolist()
        assert alone(ids(900), 20) == new.generated.tolist()

    def test_short_prompts_go_through_the_kernel(self) -> None:
        """A chunk would cost more than it saves."""
        engine, machine = fake_engine()
        prefill = engine.scheduler.prefill = FakePrefill(machine)
        run(engine, line_up(engine, ids(100), 5))
        assert [] == prefill.runs

    def test_few_pages_make_small_chunks(self) -> None:
        """A pool with room for the window, not for a chunk besides."""
        engine, machine = fake_engine(full_pages=16, sliding_pages=4)
        prefill = engine.scheduler.prefill = FakePrefill(machine, chunk=512)
        sequence = line_up(engine, ids(900), 5)
        run(engine)
        assert max(n for _, n in prefill.runs) < 512
        assert alone(ids(900), 5) == sequence.generated.tolist()
        all_back(engine)
