"""A service on the fake machine, and what clients do with it."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any, TypeVar

from mkref.serve.service import Event, Service, Stream
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
