"""A service without an engine, which answers what a script says, and an app around it. No tests.

The model is nano's vocabulary with its chat markers; nothing is computed, and no network is used.
"""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from functools import cache
from typing import TYPE_CHECKING, Any

import httpx

from mkref.config import NorthConfig
from mkref.engine.counters import STEP_S, WAIT_S, Histogram
from mkref.engine.kv import KindStats, KvStats
from mkref.engine.request import LogProb, make_request
from mkref.engine.text import Detokenizer
from mkref.engine.tokenizer import Tokenizer
from mkref.paths import models_root
from mkref.serve import Settings, create_app
from mkref.serve.service import Event, Stats, Usage
from mkref.serve.template import SPELLED

if TYPE_CHECKING:
    from mkref.engine.request import Request

__all__ = [
    "FakeService", "call", "client", "deltas", "frames", "ids", "nano", "say", "tokens_of",
]  # fmt: skip

Step = int | float | Event | BaseException
Script = Callable[["Request"], Iterable[Step]]
CONTEXT = 512


@cache
def nano() -> tuple[NorthConfig, Tokenizer]:
    """Geometry and tokenizer of nano."""
    folder = models_root() / "nano"
    config = NorthConfig.load(folder)
    return config, Tokenizer(folder, config.bos_token_id)


def ids(*pieces: str) -> list[int]:
    """Token ids: names of markers such as `start_text`, and texts between them."""
    tokenizer = nano()[1]
    found: list[int] = []
    for piece in pieces:
        marker = tokenizer.id_of(SPELLED[piece]) if piece in SPELLED else None
        found += tokenizer.encode_plain(piece) if marker is None else [marker]
    return found


def say(*pieces: str) -> Script:
    """An answer: these tokens, then the end of the turn unless they are cut off."""
    return lambda _: [*ids(*pieces), *ids("end_turn")]


def tokens_of(text: str) -> list[int]:
    """Token ids of a text."""
    return nano()[1].encode_plain(text)


class _Engine:
    """What the endpoint asks of an engine."""

    def __init__(self, config: NorthConfig, max_context: int) -> None:
        self.config = config
        self.tokenizer: Tokenizer | None = nano()[1]
        self.max_context = max_context
        self.why_no_text = ""


class FakeStream:
    """One scripted answer.

    A number is a token, a float a pause in seconds; an event and an error are what they are.
    """

    def __init__(self, service: FakeService, request: Request) -> None:
        self.request = request
        self.cancelled = False
        self._service = service
        self._woken = asyncio.Event()
        self._events = self._make()
        self._over = False

    def __aiter__(self) -> FakeStream:
        return self

    async def __anext__(self) -> Event:
        if self._over:
            raise StopAsyncIteration
        return await anext(self._events)

    async def _make(self) -> AsyncIterator[Event]:
        request, service = self.request, self._service
        tokenizer = service.engine.tokenizer
        detokenizer = None if tokenizer is None else Detokenizer(tokenizer)
        count, reason = 0, None
        for step in service.script(request):
            if isinstance(step, BaseException):
                raise step
            if isinstance(step, Event):
                yield step
                continue
            if isinstance(step, float):
                with_end = asyncio.wait_for(self._woken.wait(), step)
                try:
                    await with_end
                except TimeoutError:
                    continue
            if self.cancelled:
                yield Event((), "", None, "cancelled", self._usage(count))
                return
            assert isinstance(step, int)
            count += 1
            if step in request.eos_ids:
                reason = "eos"
            elif step in request.stop_ids:
                reason = "stop"
            elif count == request.max_tokens:
                reason = "length"
            text = "" if detokenizer is None else detokenizer.push(step)
            if reason and detokenizer is not None:
                text += detokenizer.finish()
            logprobs = None
            if request.sampling.logprobs is not None:
                top = tuple((step + i, -1.0 - i) for i in range(request.sampling.logprobs))
                logprobs = (LogProb(step, -1.0, top),)
            if request.constraint is not None and reason is None:
                request.constraint.accept(step)
            yield Event((step,), text, logprobs, reason, self._usage(count))
            if reason:
                return
        yield Event((), "", None, "length", self._usage(count))

    def _usage(self, count: int) -> Usage:
        return Usage(len(self.request.prompt), self._service.n_cached, count)

    def cancel(self) -> None:
        """End it."""
        self.cancelled = True
        self._woken.set()

    async def aclose(self) -> None:
        """End it, and give nothing more."""
        self.cancel()
        self._over = True
        self._service.closed += 1


class FakeService:
    """Answers by a script; remembers every request.

    Attributes:
        script: from a request to the steps of its answer.
        requests: what was submitted.
        streams: what was given for them.
        closed: streams that were closed.
        error: raised by the next submit.
        n_cached: what every usage says.
    """

    def __init__(
        self,
        script: Script | None = None,
        *,
        max_context: int = CONTEXT,
        eos: int | None = None,
        tokenizer: bool = True,
    ) -> None:
        config = nano()[0]
        self.engine = _Engine(
            config if eos is None else replace(config, eos_token_id=eos), max_context
        )
        if not tokenizer:
            self.engine.tokenizer, self.engine.why_no_text = None, "this model has no tokenizer"
        self.script = script or say("start_text", "hello", "end_text")
        self.healthy = self.accepting = True
        self.requests: list[Request] = []
        self.streams: list[FakeStream] = []
        self.closed = 0
        self.error: Exception | None = None
        self.n_cached = 0
        self.drained: float | None = None

    def request(self, prompt: Any, **settings: Any) -> Request:
        """As `Service.request`."""
        engine = self.engine
        return make_request(
            prompt,
            **settings,
            tokenizer=engine.tokenizer,
            why_no_text=engine.why_no_text,
            vocab_size=engine.config.vocab_size,
            eos_token_ids=engine.config.eos_token_ids,
            max_context=engine.max_context,
        )

    def submit(self, request: Request) -> FakeStream:
        """As `Service.submit`."""
        if self.error is not None:
            raise self.error
        self.requests.append(request)
        self.streams.append(FakeStream(self, request))
        return self.streams[-1]

    async def drain(self, timeout: float | None = None) -> bool:
        """As `Service.drain`."""
        self.accepting, self.drained = False, timeout
        return True

    def close(self) -> None:
        """As `Service.close`."""

    def stats(self) -> Stats:
        """As `Service.stats`."""
        waits, steps = Histogram(WAIT_S), Histogram(STEP_S)
        waits.add(0.015)
        pages = KindStats(total=8, free=5, cached=2, used=1, evictions=3)
        return Stats(
            running=1, waiting=2, healthy=self.healthy, accepting=self.accepting, rejected=0,
            steps=7, launches=3, chunks=0, prompt_tokens=11, cached_tokens=4, fed_tokens=15,
            completion_tokens=6, preemptions=0, failures=0, finished=dict(Counter(eos=2)),
            queue_s=waits, ttft_s=waits, itl_s=steps, e2e_s=waits,
            kv=KvStats(full=pages, sliding=pages, queries=20, hits=9),
        )  # fmt: skip


@asynccontextmanager
async def client(
    service: FakeService | None = None, **settings: Any
) -> AsyncIterator[httpx.AsyncClient]:
    """A client of an app around a service; there is no network in between."""
    app = create_app(service or FakeService(), Settings(**settings))  # type: ignore[arg-type]
    transport = httpx.ASGITransport(app, raise_app_exceptions=False)
    async with httpx.AsyncClient(transport=transport, base_url="http://test", timeout=30) as made:
        yield made


def call(
    path: str, body: Any, service: FakeService | None = None, **settings: Any
) -> httpx.Response:
    """One POST; `body` is JSON, or bytes as they are."""

    async def run() -> httpx.Response:
        async with client(service, **settings) as made:
            if isinstance(body, bytes):
                headers = {"content-type": "application/json"}
                return await made.post(path, content=body, headers=headers)
            return await made.post(path, json=body)

    return asyncio.run(run())


def frames(response: httpx.Response) -> list[Any]:
    """The events of a stream; the last must be the end mark, which is left out."""
    assert response.headers["content-type"].startswith("text/event-stream")
    events = [event for event in response.text.split("\n\n") if event]
    data = [event.removeprefix("data: ") for event in events if event.startswith("data: ")]
    assert "[DONE]" == data[-1]
    return [json.loads(each) for each in data[:-1]]


def deltas(chunks: Sequence[Any], name: str, index: int = 0) -> str:
    """One member of all deltas of an answer, joined."""
    return "".join(
        choice["delta"].get(name) or ""
        for chunk in chunks
        for choice in chunk["choices"]
        if choice["index"] == index
    )
