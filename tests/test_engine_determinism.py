"""The kernel on the CPU: bit for bit the same, whatever runs it and whatever runs beside it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from tests.engines import PROMPTS, bits, tiny_engine

if TYPE_CHECKING:
    from mkref.engine import Completion

N_TOKENS = 12
SETTINGS: dict[str, Any] = {
    "max_tokens": N_TOKENS,
    "temperature": [0.0, 0.0, 1.2, 0.8],
    "seed": [0, 1, 2, 3],
    "ignore_eos": True,
    "return_logits": True,
}


def run(machine: str, n_sm: int = 1, **options: Any) -> list[Completion]:
    """The four prompts together on a fresh engine."""
    with tiny_engine(machine, n_sm, **options) as engine:
        return engine.generate_batch(PROMPTS, **SETTINGS)


@pytest.fixture(name="expected", scope="module")
def expected_fixture() -> list[Completion]:
    """What the interpreter computes: the numeric contract, followed task by task in NumPy."""
    return run("interpreter")


def check(expected: list[Completion], got: list[Completion]) -> None:
    """Tokens and all bits of all logits."""
    assert [c.token_ids for c in expected] == [c.token_ids for c in got]
    assert [bits(c.logits) for c in expected] == [bits(c.logits) for c in got]


@pytest.mark.parametrize("n_sm", [1, 2, 4, 7])
def test_any_number_of_sms(expected: list[Completion], n_sm: int) -> None:
    """Work divided among 1, 2, 4 and 7 SMs, which divides nothing evenly."""
    check(expected, run("host", n_sm))


@pytest.mark.parametrize(("workers", "seed"), [(1, 0), (1, 1), (1, 2**40 + 7), (2, 5), (3, 6)])
def test_any_schedule(expected: list[Completion], workers: int, seed: int) -> None:
    """Order of threads, number of workers and time of copies are drawn from other seeds."""
    check(expected, run("host", 4, workers=workers, seed=seed))


def test_any_neighbours(expected: list[Completion]) -> None:
    """Each request alone, and in a full batch in reverse order behind others that end early."""
    with tiny_engine("host", 2) as engine:
        for i, prompt in enumerate(PROMPTS):
            alone = engine.generate(
                prompt,
                N_TOKENS,
                SETTINGS["temperature"][i],
                SETTINGS["seed"][i],
                ignore_eos=True,
                return_logits=True,
            )
            check([expected[i]], [alone])
        strangers = [[50 + i] * (1 + i) for i in range(6)]
        full = engine.generate_batch(
            [*strangers, *PROMPTS[::-1]],
            max_tokens=[2, 9, 4, 1, 7, 3, *[N_TOKENS] * 4],
            temperature=[1.0] * 6 + SETTINGS["temperature"][::-1],
            seed=[9] * 6 + SETTINGS["seed"][::-1],
            ignore_eos=True,
            return_logits=True,
        )
        check(expected, full[6:][::-1])
        engine.kv.check()


def test_again_on_the_same_engine(expected: list[Completion]) -> None:
    """Counters, ring and pages go on where the last request left them; the bits do not care."""
    with tiny_engine("host", 4) as engine:
        for _ in range(3):
            check(expected, engine.generate_batch(PROMPTS, **SETTINGS))


@pytest.mark.parametrize("n_sm", [2, 7])
def test_interpreter_with_more_sms(expected: list[Completion], n_sm: int) -> None:
    """Plans for several SMs, their tasks interpreted in turn."""
    check(expected, run("interpreter", n_sm))


def test_across_window_and_pages() -> None:
    """150 tokens on three pages, sliding ones given up: CPU kernel and interpreter agree."""
    settings: dict[str, Any] = {"max_tokens": 150, "ignore_eos": True, "return_logits": True}
    with tiny_engine("host", 2) as host, tiny_engine() as interpreter:
        check(
            [interpreter.generate(PROMPTS[0], **settings)], [host.generate(PROMPTS[0], **settings)]
        )


@pytest.mark.parametrize(("workers", "seed"), [(1, 0), (2, 5), (3, 6)])
def test_long_launches(expected: list[Completion], workers: int, seed: int) -> None:
    """Without logits a launch has many steps: the same tokens, also in plans with more rows."""
    settings = {**SETTINGS, "return_logits": False}
    for rows in (8, 16):
        with tiny_engine("host", 3, rows=rows, workers=workers, seed=seed) as engine:
            got = engine.generate_batch(PROMPTS, **settings)
            assert [c.token_ids for c in expected] == [c.token_ids for c in got]
            alone = engine.generate(PROMPTS[2], N_TOKENS, 1.2, 2, ignore_eos=True)
            assert expected[2].token_ids == alone.token_ids


def test_ends_of_all_kinds_on_the_kernel() -> None:
    """Stop ids, lengths, streams that are left, more requests than rows: kernel as interpreter."""
    prompts = [[3 + (i * 7 + j) % 90 for j in range(1 + i * 5 % 31)] for i in range(20)]
    settings: dict[str, Any] = {
        "max_tokens": [5 + 7 * i % 40 for i in range(20)],
        "temperature": [i % 3 * 0.9 for i in range(20)],
        "seed": [*range(20)],
        "stop": [11, 30, 64],
    }
    with tiny_engine("host", 2) as host, tiny_engine() as interpreter:
        expected = interpreter.generate_batch(prompts, **settings)
        reasons = {completion.finish_reason for completion in expected}
        assert {"stop", "length"} <= reasons
        stream = host.stream([5], 200, ignore_eos=True)
        ids = [next(stream).id for _ in range(3)]
        got = host.generate_batch(prompts, **settings)
        assert [(c.token_ids, c.finish_reason) for c in expected] == [
            (c.token_ids, c.finish_reason) for c in got
        ]
        ids += [next(stream).id for _ in range(57)]
        assert interpreter.generate([5], 60, ignore_eos=True).token_ids == (*ids,)
        stream.close()  # type: ignore[attr-defined]
        host.kv.check()
        assert host.kv.budget == (host.kv.available(0), host.kv.available(1))
