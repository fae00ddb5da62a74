"""The service: its limits, a machine that fails, and its end."""

from __future__ import annotations

import asyncio
import threading
import time
from typing import TYPE_CHECKING, Any, TypeVar

import pytest

from mkref.errors import MachineError, QueueFullError, RequestError, UnavailableError
from mkref.serve.service import Service
from tests.fakes import fake_engine
from tests.services import alone, ask, read, run, serving, slow, until

if TYPE_CHECKING:
    from mkref.machine.launch import Launch

T = TypeVar("T")


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

                machine.start = broken  # type: ignore[method-assign]
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
