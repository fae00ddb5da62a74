"""The service: one engine, many clients, whatever they or the machine do."""

from __future__ import annotations

import asyncio
import gc
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import pytest

from mkref.engine.sampling import Sampling
from tests.engines import write_tokenizer
from tests.fakes import fake_engine
from tests.services import alone, ask, read, run, serving, slow, until

if TYPE_CHECKING:
    from mkref.serve.service import Stream

T = TypeVar("T")


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
                    del stream
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
