"""The engine: what a request gives does not depend on what else runs, where, or how it is read."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch

import mkref
from mkref.engine import Completion, Engine, Token
from mkref.errors import HangError, MachineError, RequestError
from mkref.machine.base import Launch, StepInputs
from mkref.machine.interpreter import InterpreterMachine
from mkref.reference.model import KVCache, Reference
from tests.engines import EOS, PROMPTS, bits, save_tiny, tiny_engine, tiny_model, write_tokenizer


@pytest.fixture(name="engine", scope="module")
def engine_fixture() -> Engine:
    """The tiny model on the interpreter."""
    return tiny_engine()


def same(a: Completion, b: Completion) -> bool:
    """Equal token for token, reason for reason."""
    return (a.token_ids, a.finish_reason, a.text) == (b.token_ids, b.finish_reason, b.text)


def test_front_door() -> None:
    """`mkref.Engine` is the engine, loaded when it is first used."""
    assert Engine is mkref.Engine
    assert Completion is mkref.Completion


def test_completion_has_everything(engine: Engine) -> None:
    """Token ids, prompt, reason, machine, time, logits that explain the tokens."""
    done = engine.generate(PROMPTS[0], max_tokens=6, ignore_eos=True, return_logits=True)
    assert 6 == len(done.token_ids)
    assert tuple(PROMPTS[0]) == done.prompt_token_ids
    assert ("length", "interpreter", "") == (done.finish_reason, done.machine, done.text)
    assert 0 < done.ms_per_token < 10_000
    assert done.logits is not None
    assert (6, 97) == done.logits.shape
    assert done.logits.argmax(axis=1).tolist() == list(done.token_ids)
    engine.kv.check()
    assert engine.kv.available(0) == engine.kv.budget[0]


def test_tokens_are_those_of_the_reference(engine: Engine) -> None:
    """Logits of every generated token against the torch reference, across pages and the window."""
    config, weights = tiny_model()
    reference = Reference(config, weights, numerics="contract")
    done = engine.generate(PROMPTS[1], max_tokens=150, ignore_eos=True, return_logits=True)
    cache = KVCache()
    expected = []
    fed = torch.tensor(PROMPTS[1])
    for token in done.token_ids:
        expected.append(reference(fed, cache, last_only=True)[-1].numpy())
        fed = torch.tensor([token])
    assert done.logits is not None
    worst = float(np.abs(np.stack(expected) - done.logits).max())
    assert worst < 0.02 * float(np.std(expected)) + 1e-4


def test_batch_equals_alone(engine: Engine) -> None:
    """Ragged prompts together, in another order, and each alone: the same bits."""
    settings: dict[str, Any] = {"max_tokens": 20, "ignore_eos": True, "return_logits": True}
    alone = [engine.generate(prompt, **settings) for prompt in PROMPTS]
    together = engine.generate_batch(PROMPTS, **settings)
    backwards = engine.generate_batch(PROMPTS[::-1], **settings)[::-1]
    for one, two, three in zip(alone, together, backwards, strict=True):
        assert bits(one.logits) == bits(two.logits) == bits(three.logits)
        assert one.token_ids == two.token_ids == three.token_ids


def test_more_prompts_than_rows(engine: Engine) -> None:
    """Twenty prompts of different lengths pass through eight rows; each gets its own answer."""
    prompts = [[1 + i % 90] * (1 + i % 7) for i in range(20)]
    lengths = [1 + (5 * i) % 11 for i in range(20)]
    done = engine.generate_batch(prompts, max_tokens=lengths, ignore_eos=True)
    assert lengths == [len(completion.token_ids) for completion in done]
    for i in (0, 7, 8, 19):
        assert same(engine.generate(prompts[i], lengths[i], ignore_eos=True), done[i])
    engine.kv.check()


def test_few_pages_make_requests_wait() -> None:
    """With pages for two sequences, six requests still all get their answers, two at a time."""
    with tiny_engine(kv_pages=4) as scarce, tiny_engine() as ample:
        prompts = [[10 + i, 20, 30] for i in range(6)]
        settings: dict[str, Any] = {"max_tokens": 70, "ignore_eos": True}
        few = scarce.generate_batch(prompts, **settings)
        assert all(map(same, few, ample.generate_batch(prompts, **settings)))
        scarce.kv.check()
        assert 4 == scarce.kv.available(0)
        assert 256 == len(scarce.generate([1] * 6, 250, ignore_eos=True).token_ids) + 6


def test_long_sequences_reuse_evicted_pages() -> None:
    """Sequences beyond the window run on pages that others gave up, and equal a fresh engine."""
    with tiny_engine() as used, tiny_engine() as fresh:
        settings: dict[str, Any] = {"max_tokens": 150, "ignore_eos": True, "return_logits": True}
        used.generate_batch([[7, 8], [9]], max_tokens=100, ignore_eos=True)
        after = used.generate_batch([[3, 4, 5], [11]], **settings)
        alone = fresh.generate([3, 4, 5], **settings)
        assert bits(alone.logits) == bits(after[0].logits)
        used.kv.check()


def test_temperature_depends_on_seed_and_position_only(engine: Engine) -> None:
    """Drawn tokens: equal alone, in any row and next to anybody; another seed draws others."""
    settings: dict[str, Any] = {"max_tokens": 24, "temperature": 1.5, "ignore_eos": True}
    alone = engine.generate(PROMPTS[0], seed=11, **settings)
    batch = engine.generate_batch(
        [PROMPTS[1], PROMPTS[2], PROMPTS[0], PROMPTS[0]],
        max_tokens=24,
        temperature=[0.0, 0.7, 1.5, 1.5],
        seed=[1, 2, 11, 12],
        ignore_eos=True,
    )
    assert same(alone, batch[2])
    assert alone.token_ids != batch[3].token_ids
    assert same(engine.generate(PROMPTS[1], 24, ignore_eos=True), batch[0])
    largest = engine.generate(PROMPTS[0], seed=2**64 - 1, **settings)
    assert largest.token_ids != alone.token_ids


def test_stop_ids_and_eos(engine: Engine) -> None:
    """A token of `stop` ends with "stop", a token that ends a text with "eos"; both are kept."""
    free = engine.generate(PROMPTS[0], max_tokens=30, temperature=2.0, seed=4, ignore_eos=True)
    target = next(t for i, t in enumerate(free.token_ids) if i > 3 and t != EOS)
    at = free.token_ids.index(target)
    done = engine.generate(
        PROMPTS[0], max_tokens=30, temperature=2.0, seed=4, ignore_eos=True, stop=[96, target]
    )
    assert ("stop", free.token_ids[: at + 1]) == (done.finish_reason, done.token_ids)
    seed = next(
        seed
        for seed in range(50)
        if EOS in engine.generate([5], 40, 3.0, seed, ignore_eos=True).token_ids
    )
    done = engine.generate([5], 40, 3.0, seed)
    assert ("eos", EOS) == (done.finish_reason, done.token_ids[-1])


def test_stream_is_the_completion(tmp_path: Path) -> None:
    """Tokens one by one are those of `generate`, their pieces its text, the reason on the last."""
    with tiny_engine(tokenizer=write_tokenizer(tmp_path)) as engine:
        settings: dict[str, Any] = {
            "max_tokens": 40,
            "temperature": 1.0,
            "seed": 3,
            "ignore_eos": True,
        }
        whole = engine.generate("def f(x):", **settings)
        tokens = list(engine.stream("def f(x):", **settings))
        assert list(whole.token_ids) == [token.id for token in tokens]
        assert whole.text == "".join(token.text for token in tokens)
        assert [None] * 39 + ["length"] == [token.finish_reason for token in tokens]
        assert whole.text
        assert isinstance(tokens[0], Token)


def test_stop_string_cuts_the_text(tmp_path: Path) -> None:
    """The text ends before the stop string, and nothing of it is ever streamed."""
    with tiny_engine(tokenizer=write_tokenizer(tmp_path)) as engine:
        settings: dict[str, Any] = {
            "max_tokens": 60,
            "temperature": 1.0,
            "seed": 3,
            "ignore_eos": True,
        }
        whole = engine.generate("def f(x):", **settings)
        stop = whole.text[10:13]
        cut = whole.text[: whole.text.index(stop)]
        done = engine.generate("def f(x):", **settings, stop=stop)
        assert (cut, "stop") == (done.text, done.finish_reason)
        assert whole.token_ids[: len(done.token_ids)] == done.token_ids
        pieces = [token.text for token in engine.stream("def f(x):", **settings, stop=[stop, "~~"])]
        assert cut == "".join(pieces)
        engine.kv.check()


def test_streams_in_turns(engine: Engine) -> None:
    """Two streams that are read in turns, and a whole request between: each as if alone."""
    settings: dict[str, Any] = {"max_tokens": 12, "ignore_eos": True}
    one, two = engine.stream(PROMPTS[0], **settings), engine.stream(PROMPTS[1], **settings)
    got: tuple[list[int], list[int]] = ([], [])
    for i in range(12):
        got[0].append(next(one).id)
        if i == 5:
            assert same(
                engine.generate(PROMPTS[2], **settings), engine.generate(PROMPTS[2], **settings)
            )
        got[1].append(next(two).id)
    assert [] == [*one, *two]
    for prompt, ids in zip(PROMPTS, got, strict=False):
        assert list(engine.generate(prompt, **settings).token_ids) == ids


def test_leaving_a_stream_frees_its_row(engine: Engine) -> None:
    """A loop that is left early gives row and pages back; so does a stream never read."""
    for _ in range(20):
        for i, _token in enumerate(engine.stream(PROMPTS[1], max_tokens=100, ignore_eos=True)):
            if i == 2:
                break
    engine.stream(PROMPTS[1], max_tokens=100)
    engine.kv.check()
    assert engine.kv.budget == (engine.kv.available(0), engine.kv.available(1))


def test_failed_step_frees_everything() -> None:
    """NaN in a step ends the requests that shared it with an error; the engine goes on."""
    with tiny_engine() as engine:
        good = engine.generate(PROMPTS[0], max_tokens=5, ignore_eos=True)
        gammas = engine.machine.read("gammas")
        waiting = engine.stream(PROMPTS[2], max_tokens=5, ignore_eos=True)
        first = next(waiting)
        engine.machine.write("gammas", np.full_like(gammas, 0x7FC0))
        with pytest.raises(MachineError, match="not finite"):
            engine.generate(PROMPTS[0], max_tokens=5)
        with pytest.raises(MachineError, match="this request shared with others failed"):
            list(waiting)
        engine.machine.write("gammas", gammas)
        engine.kv.check()
        assert engine.kv.budget == (engine.kv.available(0), engine.kv.available(1))
        assert same(good, engine.generate(PROMPTS[0], max_tokens=5, ignore_eos=True))
        assert first.id == next(engine.stream(PROMPTS[2], max_tokens=5, ignore_eos=True)).id


def test_interrupted_step_does_no_harm(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C inside a step: counters and pages are put right, the next answer is right."""
    with tiny_engine() as engine:
        good = engine.generate(PROMPTS[0], max_tokens=8, ignore_eos=True)
        interpreter = cast(InterpreterMachine, engine.machine).interpreter
        assert interpreter is not None
        run = interpreter._run_task
        n_tasks = 0

        def interrupted(*args: Any) -> None:
            nonlocal n_tasks
            n_tasks += 1
            if n_tasks == 70:
                raise KeyboardInterrupt
            run(*args)

        with monkeypatch.context() as patch:
            patch.setattr(interpreter, "_run_task", interrupted)
            with pytest.raises(KeyboardInterrupt):
                engine.generate(PROMPTS[1], max_tokens=8)
        assert same(good, engine.generate(PROMPTS[0], max_tokens=8, ignore_eos=True))
        engine.kv.check()
        assert engine.kv.budget == (engine.kv.available(0), engine.kv.available(1))


def test_hang_is_reported_and_the_engine_goes_on() -> None:
    """A counter that was tampered with hangs one step; the next request runs as before."""
    with tiny_engine() as engine:
        good = engine.generate(PROMPTS[0], max_tokens=5, ignore_eos=True)
        counters = engine.machine.read("counters")
        engine.machine.write("counters", counters - 1000)
        with pytest.raises(HangError):
            engine.generate(PROMPTS[0], max_tokens=5)
        assert same(good, engine.generate(PROMPTS[0], max_tokens=5, ignore_eos=True))
        engine.kv.check()


def test_load_reads_a_folder(tmp_path: Path) -> None:
    """A checkpoint folder with a tokenizer: text in, text out; without one: token ids."""
    with Engine.load(save_tiny(tmp_path / "a"), "interpreter", max_context=128) as engine:
        assert engine.tokenizer is not None
        assert 128 == engine.max_context
        assert 1 == engine.plan.n_sm
        done = engine.generate("ab", max_tokens=4, ignore_eos=True)
        assert 2 == done.prompt_token_ids[0]
        assert 3 == len(done.prompt_token_ids)
    folder = save_tiny(tmp_path / "b", tokenizer=False)
    with Engine.load(str(folder), "interpreter") as engine:
        assert 512 == engine.max_context
        assert (
            done.token_ids == engine.generate(done.prompt_token_ids, 4, ignore_eos=True).token_ids
        )


def test_closed_engine_says_so() -> None:
    """A request after `close` is refused in words."""
    engine = tiny_engine()
    engine.close()
    with pytest.raises(RequestError, match="engine: it is closed; load the model again"):
        engine.generate([1])


def test_stream_of_a_closed_engine_says_so() -> None:
    """Also a stream that had begun, and one that had not."""
    engine = tiny_engine()
    begun, waiting = (engine.stream([1], max_tokens=9, ignore_eos=True) for _ in range(2))
    next(begun)
    engine.close()
    for stream in (begun, waiting):
        with pytest.raises(RequestError, match="engine: it is closed"):
            next(stream)


def test_batch_from_generators_and_arrays(engine: Engine) -> None:
    """Prompts and settings may come from anything that can be iterated."""
    settings: dict[str, Any] = {"max_tokens": 6, "temperature": 1.0, "ignore_eos": True}
    expected = engine.generate_batch([[1], [2]], seed=[3, 4], **settings)
    prompts: Any = (np.array([i]) for i in (1, 2))
    seeds: Any = np.array([3, 4])
    actual = engine.generate_batch(prompts, seed=seeds, **settings)
    assert all(map(same, expected, actual))


def test_stream_closed_inside_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """The garbage collector may close a forgotten stream in the middle of a step."""
    with tiny_engine() as engine:
        alone = engine.generate(PROMPTS[0], max_tokens=6, ignore_eos=True)
        forgotten = engine.stream(PROMPTS[1], max_tokens=50, ignore_eos=True)
        next(forgotten)
        start = engine.machine.start

        def collecting(*args: Any, **settings: Any) -> Launch:
            forgotten.close()  # type: ignore[attr-defined]
            return start(*args, **settings)

        monkeypatch.setattr(engine.machine, "start", collecting)
        assert same(alone, engine.generate(PROMPTS[0], max_tokens=6, ignore_eos=True))
        engine.kv.check()
        assert engine.kv.budget == (engine.kv.available(0), engine.kv.available(1))


class TestTorch:
    """The machine without a kernel."""

    def test_same_tokens_as_the_interpreter(self, engine: Engine) -> None:
        """Logits agree closely, drawn tokens are equal: the generator is the same."""
        settings: dict[str, Any] = {
            "max_tokens": 80,
            "temperature": 0.8,
            "seed": 9,
            "ignore_eos": True,
        }
        with tiny_engine("torch") as plain:
            for prompt in PROMPTS:
                theirs = plain.generate(prompt, return_logits=True, **settings)
                ours = engine.generate(prompt, return_logits=True, **settings)
                assert ours.token_ids == theirs.token_ids
                assert ours.logits is not None
                assert theirs.logits is not None
                assert float(np.abs(ours.logits - theirs.logits).max()) < 0.02
                assert "torch" == theirs.machine

    def test_prompt_at_once_equals_token_by_token(self) -> None:
        """A prompt longer than the window: one forward pass and single steps see the same keys."""
        rng = np.random.default_rng(0)
        prompt = rng.integers(3, 97, 150).tolist()
        with tiny_engine("torch", numerics="plain", dtype="float64") as engine:
            at_once = engine.generate(prompt, max_tokens=3, return_logits=True)
            sequence = engine.kv.open([0])
            for position, token in enumerate(prompt):
                engine.kv.advance(sequence, position)
                engine.machine.step(
                    StepInputs(
                        np.array([token], np.int32),
                        np.array([position], np.int32),
                        sequence.table[:, None],
                    )
                )
            assert at_once.logits is not None
            assert np.allclose(at_once.logits[0], engine.machine.logits(1)[0], atol=1e-6, rtol=0)

    def test_batch_equals_alone(self) -> None:
        """Rows are computed one by one, so neighbours change nothing."""
        with tiny_engine("torch") as engine:
            settings: dict[str, Any] = {"max_tokens": 10, "ignore_eos": True, "return_logits": True}
            alone = engine.generate(PROMPTS[1], **settings)
            together = engine.generate_batch(PROMPTS, **settings)
            assert bits(alone.logits) == bits(together[1].logits)

    def test_has_no_other_buffers(self) -> None:
        """What it does not have is named."""
        with tiny_engine("torch") as engine:
            engine.generate([1], max_tokens=1)
            assert (1, 97) == engine.machine.read("logits").shape
            with pytest.raises(MachineError, match="'kv': machine 'torch' only has 'logits'"):
                engine.machine.read("kv")
