"""The scheduler, property by property, on a machine that notices every wrong page or token."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from mkref.engine.kv import AHEAD
from mkref.engine.queue import OVERTAKERS, PLACES
from mkref.engine.sampling import Sampling
from mkref.errors import RequestError
from mkref.plan.build import PAGE
from tests.fakes import fake_engine
from tests.scheduling import all_back, alone, ids, line_up, run

if TYPE_CHECKING:
    from mkref.engine.sequence import Sequence


class TestBatching:
    """Sequences come and go at any step."""

    def test_a_newcomer_joins_at_the_next_step(self) -> None:
        """Whoever comes while others run has its first token a step or two later."""
        engine, machine = fake_engine(lag=0)
        old = [line_up(engine, ids(5, i), 400) for i in range(4)]
        for _ in range(50):
            engine.scheduler.step()
        new, begun = line_up(engine, [3], 5), machine.steps
        run(engine, new)
        assert begun + 1 + 5 >= machine.steps
        assert alone([3], 5) == new.generated.tolist()
        run(engine)
        for i, sequence in enumerate(old):
            assert alone(ids(5, i), 400) == sequence.generated.tolist()
        all_back(engine)

    def test_a_row_passes_on_at_once(self) -> None:
        """Twenty answers of one length through four rows: no step is run that gives nothing."""
        engine, machine = fake_engine(rows=4)
        sequences = [line_up(engine, [i], 10) for i in range(20)]
        run(engine)
        assert 20 * 10 // 4 == machine.steps
        assert all(alone([i], 10) == s.generated.tolist() for i, s in enumerate(sequences))

    def test_a_full_house_is_not_disturbed(self) -> None:
        """All rows run and somebody waits: launches stay as long as they were."""
        engine, machine = fake_engine(rows=2)
        for i in range(3):
            line_up(engine, [i], 320)
        run(engine)
        assert 640 // AHEAD + 1 >= machine.launches

    def test_counters_add_up(self) -> None:
        """What went in and came out, and the time of every token."""
        engine, _ = fake_engine()
        for i in range(3):
            line_up(engine, ids(70, i), 10)
        run(engine)
        counters = engine.scheduler.counters
        assert (210, 0, 30) == (
            counters.prompt_tokens,
            counters.cached_tokens,
            counters.completion_tokens,
        )
        assert 3 * (70 + 9) == counters.fed_tokens
        assert (3, 3, 27) == (counters.queue_s.n, counters.ttft_s.n, counters.itl_s.n)
        assert {"length": 3} == counters.finished


class TestOrder:
    """Who begins when."""

    def test_first_come_first_served(self) -> None:
        """One row: they end in the order in which they came."""
        engine, _ = fake_engine(rows=1)
        sequences = [line_up(engine, [i], 1 + i % 5) for i in range(12)]
        for sequence in sequences:
            run(engine, sequence)
            done = [s.finish_reason is not None for s in sequences]
            assert sorted(done, reverse=True) == done

    def test_urgent_ones_overtake_but_not_for_ever(self) -> None:
        """A level of priority is worth so many places, and no more."""
        engine, _ = fake_engine(rows=1)
        run_first = line_up(engine, [1], 3)
        engine.scheduler.step()
        patient = line_up(engine, [2], 3)
        urgent = [line_up(engine, [3], 1, priority=-1) for _ in range(PLACES + 20)]
        run(engine, run_first, patient)
        n_before = sum(s.finish_reason is not None for s in urgent)
        assert PLACES == n_before + 1  # who came right after it was one place behind already
        run(engine)

    def test_small_ones_pass_one_that_waits_for_pages_but_not_for_ever(self) -> None:
        """While a large request waits for pages, a few small ones begin; then it has its turn."""
        engine, _ = fake_engine(full_pages=16, reuse=False)
        first = line_up(engine, ids(600), 300)
        engine.scheduler.step()
        large = line_up(engine, ids(500, 1), 10)
        small: list[Sequence] = []
        n_before = 0
        while large.kv is None:
            n_before = sum(s.began for s in small)
            small.append(line_up(engine, [7], 2))
            engine.scheduler.step()
        assert OVERTAKERS == n_before == large.overtaken
        assert first.finish_reason is not None
        run(engine)
        assert alone(ids(500, 1), 10) == large.generated.tolist()

    def test_a_stream_of_small_ones_starves_nobody(self) -> None:
        """New small requests at every step for ever: a large one gets done nevertheless."""
        engine, _ = fake_engine(full_pages=16, rows=4)
        large = line_up(engine, ids(700), 40)
        for i in range(4000):
            if len(engine.scheduler.roster.waiting) < 8:
                line_up(engine, ids(100, i), 30)
            engine.scheduler.step()
            if large.finish_reason:
                break
        assert alone(ids(700), 40) == large.generated.tolist()

    def test_prompts_share_free_rows_in_turns(self) -> None:
        """A long prompt does not keep a short one from its first token."""
        engine, machine = fake_engine()
        line_up(engine, ids(900), 5)
        engine.scheduler.step()
        begun, short = machine.steps, line_up(engine, ids(12, 1), 1)
        run(engine, short)
        assert machine.steps - begun <= 4


class TestPreemption:
    """The pool is short."""

    def test_answers_do_not_change(self) -> None:
        """Eight growing answers in pages for three: some are computed twice, none is different."""
        engine, machine = fake_engine(full_pages=12, max_context=768)
        wishes: list[dict[str, Any]] = [
            {"prompt": ids(30 + i, i), "max_tokens": 250, "sampling": Sampling(**draw)}
            for i, draw in enumerate[dict[str, Any]](
                [
                    {},
                    {"temperature": 1.0, "seed": 5},
                    {"temperature": 1.0, "seed": 5, "top_p": 0.9},
                    {"repetition_penalty": 1.2},
                    {"temperature": 0.7, "seed": 1, "presence_penalty": 1.0},
                    {"min_tokens": 10},
                    {"logit_bias": ((4, 5.0),)},
                    {"logprobs": 2},
                ]
            )
        ]
        sequences = [line_up(engine, **wish) for wish in wishes]
        run(engine)
        assert engine.scheduler.counters.preemptions > 3
        for wish, sequence in zip(wishes, sequences, strict=True):
            assert alone(**wish) == sequence.generated.tolist()
        all_back(engine)
        assert machine.steps > 8 * 250 / 8

    def test_the_eldest_never_gives_way(self) -> None:
        """It feeds every token once, whatever the others lose."""
        engine, _ = fake_engine(full_pages=8, max_context=512, reuse=False)
        eldest = line_up(engine, [1], 400)
        others = [line_up(engine, [2 + i], 200) for i in range(5)]
        kv = None
        while eldest.finish_reason is None:
            engine.scheduler.step()
            kv = kv or eldest.kv
            assert eldest.kv in (kv, None)
        assert engine.scheduler.counters.preemptions > 0
        run(engine)
        for i, sequence in enumerate(others):
            assert alone([2 + i], 200) == sequence.generated.tolist()

    def test_pages_that_survive_are_used_again(self) -> None:
        """Who comes back finds what nobody needed meanwhile."""
        engine, _ = fake_engine(full_pages=12, max_context=768)
        sequences = [line_up(engine, ids(200, i), 200) for i in range(3)]
        run(engine)
        counters = engine.scheduler.counters
        assert counters.preemptions > 0
        once = sum(len(s.tokens) - 1 for s in sequences)
        assert once < counters.fed_tokens < once + 400 * counters.preemptions

    def test_what_never_fits_is_refused(self) -> None:
        """At once, in words."""
        engine, _ = fake_engine(full_pages=4, max_context=512)
        with pytest.raises(RequestError, match="max_tokens: 300 .* takes 5 full pages.* has 4"):
            line_up(engine, [1], 300)
        with pytest.raises(RequestError, match="more kv_pages"):
            engine.generate_batch([[1], [2]], [5, 300])
        assert not engine.scheduler.busy
        assert 256 == len(engine.generate([1], 255, ignore_eos=True).token_ids) + 1


class TestReuse:
    """What one request leaves, another finds."""

    def test_prompt_and_answer_are_found_again(self) -> None:
        """The next turn of a talk feeds only what is new, and gets what it would get alone."""
        engine, _ = fake_engine()
        first = line_up(engine, ids(150), 120)
        run(engine)
        talk = [*first.tokens, 5, 6, 7]
        fed = engine.scheduler.counters.fed_tokens
        second = line_up(engine, talk, 20)
        run(engine)
        assert (270 - 1) // PAGE * PAGE == second.n_cached
        assert len(talk) + 19 - second.n_cached == engine.scheduler.counters.fed_tokens - fed
        assert alone(talk) == second.generated.tolist()

    def test_equal_prompts_at_the_same_time_are_computed_once(self) -> None:
        """Whoever comes while its prompt is just going in waits for the pages."""
        engine, machine = fake_engine()
        prompt = ids(640)
        sequences = [
            line_up(engine, prompt, 10, sampling=Sampling(temperature=1.0, seed=i))
            for i in range(4)
        ]
        run(engine)
        assert 640 + 3 * PAGE + 4 * 10 > engine.scheduler.counters.fed_tokens
        assert 640 / 8 + 3 * 10 + 4 * PAGE / 8 > machine.steps
        for i, sequence in enumerate(sequences):
            settings = {"sampling": Sampling(temperature=1.0, seed=i)}
            assert alone(prompt, 10, **settings) == sequence.generated.tolist()

    def test_nothing_is_kept_on_request(self) -> None:
        """`reuse=False` computes everything."""
        engine, _ = fake_engine(reuse=False)
        for _ in range(2):
            line_up(engine, ids(200), 5)
        run(engine)
        assert 2 * 204 == engine.scheduler.counters.fed_tokens


class TestCancel:
    """An end at the next step, wherever a sequence is."""

    def test_waiting(self) -> None:
        """It never begins, the others do not notice."""
        engine, machine = fake_engine(rows=1)
        first, second, third = (line_up(engine, [i], 5) for i in range(3))
        engine.scheduler.cancel(second)
        run(engine)
        assert ("cancelled", False, []) == (
            second.finish_reason,
            second.began,
            second.generated.tolist(),
        )
        assert [alone([0], 5), alone([2], 5)] == [s.generated.tolist() for s in (first, third)]
        assert 10 == machine.steps

    def test_prompt_going_in(self) -> None:
        """Its pages are free at once."""
        engine, machine = fake_engine()
        sequence = line_up(engine, ids(900), 5)
        for _ in range(10):
            engine.scheduler.step()
        engine.scheduler.cancel(sequence)
        assert not engine.scheduler.busy
        assert 10 == machine.steps
        all_back(engine)

    def test_generating(self) -> None:
        """The launch ends; what it has done by then still counts, for the others, too."""
        engine, machine = fake_engine()
        one, two = line_up(engine, [1], 300), line_up(engine, [2], 60)
        for _ in range(7):
            engine.scheduler.step()
        engine.scheduler.cancel(one)
        assert "cancelled" == one.finish_reason
        assert alone([1], 300)[: one.n_generated] == one.generated.tolist()
        assert machine.steps <= 7 + machine.lag
        run(engine)
        assert alone([2], 60) == two.generated.tolist()

    def test_preempted(self) -> None:
        """It waits for pages, and leaves the line."""
        engine, _ = fake_engine(full_pages=8, max_context=512)
        one, two = line_up(engine, ids(100), 300), line_up(engine, ids(100, 1), 300)
        while not (two.began and two.kv is None):
            engine.scheduler.step()
        engine.scheduler.cancel(two)
        run(engine)
        assert "cancelled" == two.finish_reason
        assert alone(ids(100, 1), 300)[: two.n_generated] == two.generated.tolist()
        assert alone(ids(100), 300) == one.generated.tolist()
        all_back(engine)

    def test_twice_and_after_the_end(self) -> None:
        """Nothing happens."""
        engine, _ = fake_engine()
        sequence = line_up(engine, [1], 3)
        run(engine)
        engine.scheduler.cancel(sequence)
        engine.scheduler.cancel(sequence)
        assert ("length", {"length": 1}) == (
            sequence.finish_reason,
            engine.scheduler.counters.finished,
        )
