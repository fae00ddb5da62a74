"""How the engine groups steps into launches, and that nobody can tell from the answers."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from mkref.engine.kv import AHEAD
from mkref.errors import MachineError
from mkref.machine.base import Launch, StepInputs
from tests.engines import PROMPTS, bits, tiny_engine, write_tokenizer

if TYPE_CHECKING:
    from mkref.engine import Completion, Engine

FREE: dict[str, Any] = {"ignore_eos": True}


class Spy:
    """Writes down what the engine starts: rows of every sequence, steps asked for and taken."""

    def __init__(self, engine: Engine) -> None:
        self.earlier: list[list[int]] = []
        self.asked: list[int] = []
        self.taken: list[int] = []
        self._start = engine.machine.start
        engine.machine.start = self.start  # type: ignore[method-assign]

    def start(self, inputs: StepInputs, n_steps: int = 1, **settings: Any) -> Launch:
        """Start the launch and count what is taken from it."""
        self.earlier.append(inputs.earlier.tolist())
        self.asked.append(n_steps)
        self.taken.append(0)
        return Counted(self._start(inputs, n_steps, **settings), self, len(self.taken) - 1)


class Counted(Launch):
    """A launch that tells a spy of every step."""

    def __init__(self, launch: Launch, spy: Spy, number: int) -> None:
        self.launch, self.spy, self.number, self.n_steps = launch, spy, number, launch.n_steps

    def __next__(self) -> np.ndarray:
        tokens = next(self.launch)
        self.spy.taken[self.number] += 1
        return tokens

    def cancel(self) -> None:
        """As the launch."""
        self.launch.cancel()

    def close(self) -> None:
        """As the launch."""
        self.launch.close()


@pytest.fixture(name="engine")
def engine_fixture() -> Iterator[Engine]:
    """The tiny model on the interpreter, all pages back at the end."""
    with tiny_engine() as engine:
        yield engine
        engine.kv.check()
        assert engine.kv.budget == (engine.kv.available(0), engine.kv.available(1))


def same(a: Completion, b: Completion) -> bool:
    """Equal token for token, reason for reason."""
    return (a.token_ids, a.finish_reason, a.text) == (b.token_ids, b.finish_reason, b.text)


def test_prompt_in_blocks_answer_in_long_launches(engine: Engine) -> None:
    """21 prompt tokens take three steps of at most eight rows; 100 tokens come in four launches."""
    spy = Spy(engine)
    engine.generate([*range(3, 24)], 100, **FREE)
    assert [[*range(8)], [*range(8)], [*range(5)], [0], [0], [0], [0]] == spy.earlier
    assert [1, 1, 1, AHEAD, AHEAD, AHEAD, 3] == spy.asked
    assert spy.asked == spy.taken


def test_logits_need_single_steps(engine: Engine) -> None:
    """Logits of every token: the same tokens as without, one launch each."""
    plain = engine.generate(PROMPTS[0], 20, temperature=1.0, seed=5, **FREE)
    spy = Spy(engine)
    done = engine.generate(PROMPTS[0], 20, temperature=1.0, seed=5, return_logits=True, **FREE)
    assert plain.token_ids == done.token_ids
    assert [1] * 20 == spy.asked
    assert done.logits is not None
    assert (20, 97) == done.logits.shape


def test_rows_are_shared_in_turns(engine: Engine) -> None:
    """Prompts of 20, 3 and 12 tokens and one that generates: free rows go round."""
    stream = engine.stream([7], 60, **FREE)
    next(stream)
    spy = Spy(engine)
    prompts = [[*range(20)], [*range(3)], [*range(12)]]
    together = engine.generate_batch(prompts, 4, **FREE)
    assert [[0, 0, 1, 2, 0, 1, 0, 1], [0, 0, 1, 2, 0, 0, 1, 2]] == spy.earlier[:2]
    for prompt, done in zip(prompts, together, strict=True):
        assert same(engine.generate(prompt, 4, **FREE), done)
    rest = [token.id for token in stream]
    assert [*engine.generate([7], 60, **FREE).token_ids][1:] == rest


def test_an_end_on_the_device_ends_the_launch(engine: Engine) -> None:
    """A stop id is found by the kernel: no step is run beyond it, the neighbours go on."""
    settings: dict[str, Any] = {"temperature": [0.0, 2.0], "seed": [0, 4], **FREE}
    free = engine.generate_batch(PROMPTS[:2], 40, **settings)
    ids = free[1].token_ids
    at = next(i for i in range(5, 30) if ids[i] not in ids[:i] and ids[i] not in free[0].token_ids)
    spy = Spy(engine)
    done = engine.generate_batch(PROMPTS[:2], 40, stop=ids[at], **settings)
    assert ("stop", ids[: at + 1]) == (done[1].finish_reason, done[1].token_ids)
    assert same(free[0], done[0])
    # After the step that completed the last prompt, until the stop, and on to the end.
    first = spy.asked.index(max(spy.asked))
    assert spy.taken[first] < spy.asked[first]
    assert sum(spy.taken[first:]) == 40 - (first + 1 - len(PROMPTS[0]) // 8 - 1)


def test_more_stop_ids_than_the_kernel_knows(engine: Engine) -> None:
    """The kernel looks for eight of thirty ids; the host finds the others, drops what follows."""
    free = engine.generate(PROMPTS[1], 40, temperature=2.0, seed=4, **FREE).token_ids
    at = next(i for i in range(5, 30) if free[i] > 60 and free[i] not in free[:i])
    ids = [i for i in range(3, 97) if i not in free[: at + 1]][:29]
    assert sorted([*ids, free[at]]).index(free[at]) >= 8
    done = engine.generate(PROMPTS[1], 40, temperature=2.0, seed=4, stop=[*ids, free[at]], **FREE)
    assert ("stop", free[: at + 1]) == (done.finish_reason, done.token_ids)


def test_a_stop_text_cancels(tmp_path: Path) -> None:
    """The host sees the text and ends the launch; the neighbour's answer is whole."""
    with tiny_engine(tokenizer=write_tokenizer(tmp_path)) as engine:
        settings: dict[str, Any] = {"temperature": 1.0, "seed": [3, 8], **FREE}
        prompts = ["def f(x):", "import"]
        whole = engine.generate_batch(prompts, 60, **settings)
        stop = whole[0].text[10:13]
        spy = Spy(engine)
        done = engine.generate_batch(prompts, 60, stop=stop, **settings)
        cut = whole[0].text.index(stop)
        assert (whole[0].text[:cut], "stop") == (done[0].text, done[0].finish_reason)
        assert stop not in done[1].text
        assert whole[1].text.startswith(done[1].text)
        assert any(taken < asked for taken, asked in zip(spy.taken, spy.asked, strict=True))
        engine.kv.check()
        assert engine.kv.budget == (engine.kv.available(0), engine.kv.available(1))


def test_stream_gives_tokens_while_the_launch_runs(engine: Engine) -> None:
    """One launch, of which each token is taken when the reader wants it; leaving ends it."""
    spy = Spy(engine)
    stream = engine.stream([5], 30, **FREE)
    for n in range(1, 11):
        next(stream)
        assert ([30], [n]) == (spy.asked, spy.taken)
    stream.close()  # type: ignore[attr-defined]
    assert 10 <= spy.taken[0] < 30
    assert same(engine.generate([5], 30, **FREE), engine.generate([5], 30, **FREE))


def test_a_newcomer_ends_a_launch(engine: Engine) -> None:
    """Two streams and a request between: the launch of the first makes room at once."""
    alone = [engine.generate(prompt, 40, **FREE).token_ids for prompt in PROMPTS[:3]]
    spy = Spy(engine)
    one = engine.stream(PROMPTS[0], 40, **FREE)
    got = [next(one).id for _ in range(5)]
    two = engine.stream(PROMPTS[1], 40, **FREE)
    other = [next(two).id for _ in range(3)]
    assert sum(spy.taken) < 20
    assert alone[2] == engine.generate(PROMPTS[2], 40, **FREE).token_ids
    for _ in range(8):
        got.append(next(one).id)
        other.append(next(two).id)
    assert [*alone[0]] == got + [token.id for token in one]
    assert [*alone[1]] == other + [token.id for token in two]


def test_who_cannot_begin_does_not_disturb() -> None:
    """Somebody waits for pages: launches stay long, and end with the answer that frees them."""
    with tiny_engine(kv_pages=4) as engine:
        spy = Spy(engine)
        done = engine.generate_batch([[5], [6]], [190, 70], **FREE)
        assert [190, 70] == [len(completion.token_ids) for completion in done]
        assert len(spy.asked) < 12
        engine.kv.check()


@pytest.mark.parametrize("rows", [8, 16, 32])
def test_any_number_of_rows(rows: int) -> None:
    """Plans for 8, 16 and 32 rows: the same bits, prompts in fewer steps, more at a time."""
    prompts = [[3 + (i * 7 + j) % 90 for j in range(1 + i * 5 % 31)] for i in range(20)]
    settings: dict[str, Any] = {
        "temperature": [i % 3 * 0.7 for i in range(20)],
        "seed": [*range(20)],
        **FREE,
    }
    with tiny_engine() as few, tiny_engine(rows=rows) as many:
        assert rows == many.plan.rows
        lengths = [4 + 3 * i % 13 for i in range(20)]
        expected = few.generate_batch(prompts, lengths, return_logits=True, **settings)
        spy = Spy(many)
        done = many.generate_batch(prompts, lengths, return_logits=True, **settings)
        assert [bits(c.logits) for c in expected] == [bits(c.logits) for c in done]
        assert max(map(len, spy.earlier)) == rows
        plain = many.generate_batch(prompts, lengths, **settings)
        assert [c.token_ids for c in expected] == [c.token_ids for c in plain]
        many.kv.check()


def test_random_mixes(engine: Engine) -> None:
    """Streams that begin, are read in turns and left at random: each is a part of its answer."""
    rng = np.random.default_rng(3)
    kinds = [
        ([3 + int(t) for t in rng.integers(0, 90, int(n))], int(rng.integers(1, 60)), float(t))
        for n, t in zip(rng.integers(1, 140, 12), rng.choice([0.0, 0.9], 12), strict=True)
    ]
    alone = [
        engine.generate(prompt, n, temperature, 7, **FREE).token_ids
        for prompt, n, temperature in kinds
    ]
    live: list[tuple[int, list[int], Any]] = []
    n_whole = 0
    for _ in range(900):
        action = rng.random()
        if action < 0.1 and len(live) < 11:
            kind = int(rng.integers(len(kinds)))
            prompt, n, temperature = kinds[kind]
            live.append((kind, [], engine.stream(prompt, n, temperature, 7, **FREE)))
        elif live and action < 0.12:
            live.pop(int(rng.integers(len(live))))[2].close()
        elif live:
            at = int(rng.integers(len(live)))
            kind, got, stream = live[at]
            token = next(stream, None)
            if token is None:
                assert [*alone[kind]] == got
                n_whole += 1
                live.pop(at)
            else:
                got.append(token.id)
                assert [*alone[kind]][: len(got)] == got
        if engine.scheduler._launch is None:
            engine.kv.check()
    for _, _, stream in live:
        stream.close()
    assert n_whole > 4


def test_failure_of_a_launch_while_leaving(engine: Engine) -> None:
    """The launch that a stream's end cancels fails: who leaves is not told, the others are."""
    one, two = (engine.stream(prompt, 60, **FREE) for prompt in PROMPTS[:2])
    for _ in range(3):
        next(one)
        next(two)

    class Failing(Launch):
        n_steps = 60

        def __next__(self) -> np.ndarray:
            raise MachineError("it broke")

        def cancel(self) -> None:
            """Nothing to end."""

        def close(self) -> None:
            """Nothing to end."""

    held = engine.scheduler._launch
    assert held is not None
    held.close()
    engine.scheduler._launch = Failing()
    one.close()  # type: ignore[attr-defined]
    with pytest.raises(MachineError, match="shared with others failed: it broke"):
        list(two)


def test_ctrl_c_while_the_kernel_runs_in_a_thread() -> None:
    """It is waited for; a second launch never meets it, and the next answer is right."""
    code = """
import os, signal, threading
import mkref
engine = mkref.Engine.load("nano", "host", 2)
want = engine.generate("x", 20).token_ids
for delay in (0.3, 0.5):
    timer = threading.Timer(delay, os.kill, (os.getpid(), signal.SIGINT))
    timer.start()
    try:
        engine.generate("class A:", 500, ignore_eos=True)
        raise SystemExit("not interrupted")
    except KeyboardInterrupt:
        pass
    assert engine.machine.under_way is None
    assert want == engine.generate("x", 20).token_ids
print("right")
"""
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=120
    )
    assert ("right\n", 0) == (done.stdout, done.returncode), done.stderr
