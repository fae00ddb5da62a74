"""The service: one engine, many clients, whatever they or the machine do."""

from __future__ import annotations

import asyncio
import gc
import threading
import time
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import pytest

from mkref.engine.sampling import Sampling
from mkref.errors import MachineError, QueueFullError, RequestError, UnavailableError
from mkref.serve.service import Event, Service, Stream
from tests.engines import write_tokenizer
from tests.fakes import FakeMachine, fake_engine

if TYPE_CHECKING:
    from mkref.engine import Engine
    from mkref.machine.launch import Launch

T = TypeVar("T")


def run(work: Coroutine[Any, Any, T]) -> T:
    """Run a test's coroutine; none takes a minute."""
    return asyncio.run(asyncio.wait_for(work, 60))


@asynccontextmanager
async def serving(
    engine: Engine | None = None, **settings: Any
) -> AsyncIterator[tuple[Service, FakeMachine]]:
    """A service, and all pages back at its end."""
    engine = engine or fake_engine()[0]
    machine: Any = engine.machine
    service = Service(engine, **settings)
    try:
        yield service, machine
    finally:
        service.close()
        engine.kv.check()
        assert engine.kv.budget == (engine.kv.available(0), engine.kv.available(1))
        assert not engine.scheduler.busy


async def read(stream: Stream) -> tuple[list[int], Event]:
    """All tokens and the last event."""
    tokens: list[int] = []
    last = None
    async for last in stream:
        tokens += last.token_ids
    assert last is not None
    return tokens, last


async def ask(service: Service, prompt: Any, max_tokens: int = 20, **settings: Any) -> list[int]:
    """The tokens of one request, which nothing but its length ends."""
    request = service.request(prompt, max_tokens=max_tokens, ignore_eos=True, **settings)
    async with service.submit(request) as stream:
        tokens, last = await read(stream)
    assert "length" == last.finish_reason
    return tokens


def alone(prompt: Any, max_tokens: int = 20, **settings: Any) -> list[int]:
    """The same of an engine that has nothing else to do."""
    engine, _ = fake_engine(reuse=False)
    return list(engine.generate(prompt, max_tokens, ignore_eos=True, **settings).token_ids)


def slow(machine: FakeMachine, seconds: float) -> threading.Event:
    """Make every launch wait; the event is set when one has begun."""
    start, begun = machine.start, threading.Event()

    def slowly(*args: Any, **settings: Any) -> Launch:
        begun.set()
        time.sleep(seconds)
        return start(*args, **settings)

    machine.start = slowly  # type: ignore[method-assign]
    return begun


async def until(condition: Any) -> None:
    """Wait for something to become true."""
    while not condition():
        await asyncio.sleep(0.001)


class TestStreams:
    """What a client reads."""

    def test_many_at_once(self) -> None:
        """Fifty clients with all kinds of settings, each with the tokens that it gets alone."""

        async def work() -> None:
            async with serving() as (service, _):
                kinds = [
                    ([i % 11, 5, i % 7], 5 + i, Sampling(temperature=i % 2, seed=i, top_k=i % 3))
                    for i in range(50)
                ]
                got = await asyncio.gather(
                    *(ask(service, prompt, n, sampling=draw) for prompt, n, draw in kinds)
                )
                for (prompt, n, draw), tokens in zip(kinds, got, strict=True):
                    assert alone(prompt, n, sampling=draw) == tokens
                stats = service.stats()
                assert (0, 0) == (stats.running, stats.waiting)
                assert {"length": 50} == stats.finished
                assert sum(n for _, n, _ in kinds) == stats.completion_tokens
                assert 50 == stats.ttft_s.n == stats.e2e_s.n == sum(stats.ttft_s.counts)

        run(work())

    def test_events_tell_everything(self, tmp_path: Path) -> None:
        """Text, usage, probabilities and the reason, piece by piece."""

        async def work(tokenizer: Any) -> None:
            async with serving(fake_engine(tokenizer=tokenizer)[0]) as (service, _):
                sampling = Sampling(logprobs=2)
                prompt = list(range(100))
                for cached in (0, 64):
                    request = service.request(prompt, max_tokens=30, sampling=sampling)
                    events = [event async for event in service.submit(request)]
                    tokens = [token for event in events for token in event.token_ids]
                    done = fake_engine(tokenizer=tokenizer, reuse=False)[0].generate(
                        prompt, 30, sampling=sampling
                    )
                    assert list(done.token_ids) == tokens
                    assert done.text == "".join(event.text for event in events)
                    told = [t for event in events for t in event.logprobs or ()]
                    assert list(done.logprobs or ()) == told
                    assert [None] * (len(events) - 1) == [e.finish_reason for e in events[:-1]]
                    assert done.finish_reason == events[-1].finish_reason
                    usage = events[-1].usage
                    assert (100, cached, len(tokens)) == (
                        usage.prompt,
                        usage.cached,
                        usage.completion,
                    )

        run(work(write_tokenizer(tmp_path)))

    def test_a_slow_reader_holds_nobody_up(self) -> None:
        """It reads nothing while others are served; then it gets everything in one event."""

        async def work() -> None:
            async with serving() as (service, _):
                request = service.request([1], max_tokens=500, ignore_eos=True)
                async with service.submit(request) as lazy:
                    first = await anext(lazy)
                    for i in range(20):
                        await ask(service, [i], 30)
                    await until(lambda: service.stats().finished.get("length") == 21)
                    rest = await anext(lazy)
                    assert "length" == rest.finish_reason
                    assert alone([1], 500) == [*first.token_ids, *rest.token_ids]
                    assert [] == [event async for event in lazy]

        run(work())

    def test_several_loops(self) -> None:
        """Each thread with a loop of its own reads its own streams."""

        async def work() -> None:
            async with serving() as (service, _):
                got: dict[int, list[int]] = {}

                def other(i: int) -> None:
                    got[i] = asyncio.run(ask(service, [i], 50))

                threads = [threading.Thread(target=other, args=(i,)) for i in range(4)]
                for thread in threads:
                    thread.start()
                mine = await ask(service, [9], 50)
                for thread in threads:
                    await asyncio.to_thread(thread.join)
                assert {i: alone([i], 50) for i in range(4)} == got
                assert alone([9], 50) == mine

        run(work())


class TestLeaving:
    """Clients that go."""

    @pytest.mark.parametrize("how", ["block", "close", "cancel", "drop", "task"])
    def test_while_it_generates(self, how: str) -> None:
        """However a client leaves, the request ends within a step or two, and others go on."""

        async def work() -> None:
            async with serving(fake_engine(max_context=100_000, full_pages=2000)[0]) as (
                service,
                machine,
            ):
                slow(machine, 0.001)
                request = service.request([1], max_tokens=90_000, ignore_eos=True)
                stream = service.submit(request)
                other = asyncio.create_task(ask(service, [2], 40))
                await anext(stream)
                if how == "block":
                    async with stream:
                        pass
                elif how == "close":
                    await stream.aclose()
                    assert [] == [event async for event in stream]
                elif how == "cancel":
                    stream.cancel()
                    assert "cancelled" == (await read(stream))[1].finish_reason
                elif how == "drop":
                    del stream
                    gc.collect()
                else:
                    await _cancelled_task(stream)
                    stream = None
                    gc.collect()
                assert alone([2], 40) == await other
                await until(lambda: service.stats().running == 0)
                assert {"cancelled": 1, "length": 1} == service.stats().finished

        async def _cancelled_task(stream: Stream) -> None:
            async def reader() -> None:
                async with stream:
                    await read(stream)

            task = asyncio.create_task(reader())
            await asyncio.sleep(0.01)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task

        run(work())

    def test_while_it_waits_or_reads_its_prompt(self) -> None:
        """Before any token came; it never keeps a row or a page."""

        async def work() -> None:
            async with serving(fake_engine(rows=1)[0]) as (service, machine):
                slow(machine, 0.001)
                request = service.request([7] * 900, max_tokens=50, ignore_eos=True)
                async with service.submit(request):
                    async with service.submit(request):
                        await until(lambda: service.stats().waiting == 1)
                    await until(lambda: service.stats().waiting == 0)
                    assert 1 == service.stats().running
                await until(lambda: service.stats().running == 0)
                assert {"cancelled": 2} == service.stats().finished
                assert 0 == service.stats().completion_tokens

        run(work())

    def test_a_loop_that_is_gone(self) -> None:
        """Its requests run to their end, nobody fails."""

        async def work() -> None:
            async with serving() as (service, machine):
                begun = slow(machine, 0.002)
                kept: list[Stream] = []

                async def submit_only() -> None:
                    request = service.request([1], max_tokens=60, ignore_eos=True)
                    kept.append(service.submit(request))
                    await until(begun.is_set)

                await asyncio.to_thread(asyncio.run, submit_only())
                assert alone([2], 30) == await ask(service, [2], 30)
                await until(lambda: service.stats().running == 0)
                assert service.healthy

        run(work())


class TestLimits:
    """More than there is room or time for."""

    def test_queue(self) -> None:
        """One more than may wait is refused; after an end there is room again."""

        async def work() -> None:
            async with serving(fake_engine(rows=2)[0], max_queue=3) as (service, machine):
                slow(machine, 0.002)
                request = service.request([1], max_tokens=30, ignore_eos=True)
                streams = [service.submit(request) for _ in range(5)]
                with pytest.raises(QueueFullError, match="5 requests run or wait"):
                    service.submit(request)
                await read(streams[0])
                await read(service.submit(request))
                assert 1 == service.stats().rejected
                for stream in streams[1:]:
                    await read(stream)

        run(work())

    def test_deadline(self) -> None:
        """The last event says so, with what there is."""

        async def work() -> None:
            async with serving() as (service, machine):
                slow(machine, 0.02)
                request = service.request(
                    [1], max_tokens=1000, ignore_eos=True, deadline=time.monotonic() + 0.1
                )
                tokens, last = await read(service.submit(request))
                assert "deadline" == last.finish_reason
                assert alone([1], 1000)[: len(tokens)] == tokens

        run(work())

    def test_what_never_fits(self) -> None:
        """Refused when it is submitted."""

        async def work() -> None:
            async with serving(fake_engine(full_pages=4)[0]) as (service, _):
                with pytest.raises(RequestError, match="more kv_pages"):
                    service.submit(service.request([1], max_tokens=500))

        run(work())


class TestMachine:
    """A machine that fails."""

    def test_once(self) -> None:
        """Who ran gets the error as an event; who waited and who comes get answers."""

        async def work() -> None:
            async with serving(fake_engine(rows=2)[0]) as (service, machine):
                slow(machine, 0.001)
                request = service.request([1], max_tokens=200, ignore_eos=True)
                streams = [service.submit(request) for _ in range(3)]
                await anext(streams[0])
                machine.fail_at = machine.steps + 3
                for stream in streams[:2]:
                    _, last = await read(stream)
                    assert "error" == last.finish_reason
                    assert isinstance(last.error, MachineError)
                    assert "the fake machine fails" in str(last.error)
                assert alone([1], 200) == (await read(streams[2]))[0]
                assert alone([4]) == await ask(service, [4])
                assert service.healthy
                assert 1 == service.stats().failures

        run(work())

    def test_again_and_again(self) -> None:
        """After three failures in a row the service gives up, and says why to all."""

        async def work() -> None:
            engine, machine = fake_engine(rows=1)
            async with serving(engine) as (service, _):

                def broken(*_: Any, **__: Any) -> Launch:
                    raise MachineError("gone for good")

                machine.start = broken  # type: ignore[method-assign,assignment]
                request = service.request([1], max_tokens=20)
                ends = [await read(s) for s in [service.submit(request) for _ in range(6)]]
                assert all("gone for good" in str(end.error) for _, end in ends)
                kinds = [type(end.error) for _, end in ends]
                assert [MachineError] * 3 + [UnavailableError] * 3 == kinds
                await until(lambda: not service.healthy)
                with pytest.raises(UnavailableError, match="failed 3 times in a row: gone for"):
                    service.submit(request)

        run(work())

    def test_a_mistake_in_the_scheduler(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Even then nobody waits for ever."""

        async def work() -> None:
            engine, _ = fake_engine()
            service = Service(engine)
            monkeypatch.setattr(engine.scheduler, "submit", lambda *_: 1 / 0)
            with monkeypatch.context() as patch:
                patch.setattr(threading, "excepthook", lambda *_: None)
                _, last = await read(service.submit(service.request([1])))
                service.close()
            assert isinstance(last.error, UnavailableError)
            assert not service.healthy

        run(work())

    def test_constraint_that_fails(self) -> None:
        """The fault of one request, told as such."""

        class Broken:
            ended = False

            def mask(self) -> Any:
                raise ValueError("no grammar")

            def accept(self, token: int) -> None:
                """Never called."""

        async def work() -> None:
            async with serving() as (service, _):
                request = service.request([1], constraint=Broken())
                other = asyncio.create_task(ask(service, [2]))
                _, last = await read(service.submit(request))
                assert isinstance(last.error, RequestError)
                assert "constraint: no grammar" == str(last.error)
                assert alone([2]) == await other

        run(work())


class TestEnd:
    """Going down."""

    def test_drain_waits(self) -> None:
        """Who is there gets its answer, nobody else comes."""

        async def work() -> None:
            async with serving() as (service, machine):
                slow(machine, 0.001)
                running = [asyncio.create_task(ask(service, [i], 60)) for i in range(12)]
                await until(lambda: service.stats().running > 0)
                draining = asyncio.create_task(service.drain(30.0))
                await asyncio.sleep(0)
                with pytest.raises(UnavailableError, match="going down"):
                    service.submit(service.request([1]))
                assert await draining
                for i, task in enumerate(running):
                    assert alone([i], 60) == await task

        run(work())

    def test_drain_cancels_in_the_end(self) -> None:
        """After its time the rest is cancelled."""

        async def work() -> None:
            async with serving() as (service, machine):
                slow(machine, 0.02)
                request = service.request([1], max_tokens=1000, ignore_eos=True)
                stream = service.submit(request)
                await anext(stream)
                assert not await service.drain(0.05)
                assert "cancelled" == (await read(stream))[1].finish_reason

        run(work())

    def test_close_ends_everybody(self) -> None:
        """With an error; then the engine is free for direct use again."""

        async def work() -> None:
            engine, machine = fake_engine(rows=1)
            async with serving(engine) as (service, _):
                slow(machine, 0.001)
                with pytest.raises(RequestError, match="engine: a service uses it"):
                    engine.generate([1])
                request = service.request([1], max_tokens=1000, ignore_eos=True)
                streams = [service.submit(request) for _ in range(3)]
                await anext(streams[0])
                await asyncio.to_thread(service.close)
                for stream in streams:
                    _, last = await read(stream)
                    assert isinstance(last.error, UnavailableError)
                assert alone([3], 5) == list(engine.generate([3], 5, ignore_eos=True).token_ids)
                with pytest.raises(UnavailableError, match="going down"):
                    service.submit(request)
                engine.claim("a service")  # `serving` closes it once more

        run(work())

    def test_one_service_per_engine(self) -> None:
        """The second one is refused, as is one for a closed engine."""
        engine, _ = fake_engine()
        service = Service(engine)
        with pytest.raises(RequestError, match="a service uses it"):
            Service(engine)
        service.close()
        engine.close()
        with pytest.raises(RequestError, match="it is closed"):
            Service(engine)
