"""What a client of the service reads: events of one request, from the engine's thread to its loop.

The engine's thread never waits for a reader. What a slow one has not fetched is kept, at most as
many tokens as it asked for, and comes as one event when it does.

What it does not do: know what an HTTP client wants to see (`mkref.serve.app`).
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mkref.engine.request import LogProb, Request, Token
    from mkref.engine.sequence import Sequence
    from mkref.errors import MkrefError

__all__ = ["Event", "Feed", "Stream", "Usage", "wake"]


@dataclass(frozen=True)
class Usage:
    """Tokens of a request: its prompt, how many of them the cache had, and its answer so far."""

    prompt: int
    cached: int
    completion: int


@dataclass(frozen=True)
class Event:
    """What came since the event before.

    Attributes:
        token_ids: new tokens; several if the reader was slow, none if only an end came.
        text: characters that they complete.
        logprobs: one for each token if asked for, else None.
        finish_reason: None, except for the last event: "eos", "stop", "length", "cancelled",
            "deadline" or "error".
        usage: so far.
        error: with "error": what happened.
    """

    token_ids: tuple[int, ...]
    text: str
    logprobs: tuple[LogProb, ...] | None
    finish_reason: str | None
    usage: Usage
    error: MkrefError | None = None


class Feed:
    """The engine's end of a stream.

    Attributes:
        sequence: on its way.
        loop: of the reader.
        pending: tokens that the reader has not fetched.
        reason, error, tail: how it ended; `reason` is set last.
        woken: set in the reader's loop when there is something to read.
    """

    def __init__(self, sequence: Sequence, loop: asyncio.AbstractEventLoop) -> None:
        self.sequence = sequence
        self.loop = loop
        self.pending: deque[Token] = deque()
        self.reason: str | None = None
        self.error: MkrefError | None = None
        self.tail = ""
        self.woken = asyncio.Event()

    def end(self, reason: str, error: MkrefError | None = None) -> None:
        """Nothing comes any more."""
        self.error, self.tail = error, self.sequence.tail
        self.reason = reason


def wake(feeds: Iterable[Feed]) -> None:
    """Tell readers, each in its loop, that there is something to read; from any thread."""
    by_loop: dict[asyncio.AbstractEventLoop, list[Feed]] = {}
    for feed in feeds:
        by_loop.setdefault(feed.loop, []).append(feed)
    for loop, several in by_loop.items():
        try:
            loop.call_soon_threadsafe(_wake_here, several)
        except RuntimeError:  # the loop is closed, so nobody reads there any more
            for feed in several:
                feed.pending.clear()


def _wake_here(feeds: list[Feed]) -> None:
    for feed in feeds:
        feed.woken.set()


class Stream(AsyncIterator[Event]):
    """Events of one request, to be read in one task of the loop that submitted it.

        async with service.submit(request) as stream:
            async for event in stream:
                ...

    Leaving the block, closing the stream or dropping it ends the request at the next step.

    Attributes:
        request: what was asked.
    """

    def __init__(self, feed: Feed, leave: Callable[[Feed], None]) -> None:
        self.request: Request = feed.sequence.request
        self._feed = feed
        self._leave = leave
        self._n_tokens = 0
        self._over = False

    def __aiter__(self) -> Stream:
        return self

    async def __anext__(self) -> Event:
        feed = self._feed
        if self._over:
            raise StopAsyncIteration
        while not feed.pending and feed.reason is None:
            feed.woken.clear()
            await feed.woken.wait()
            if self._over:  # closed meanwhile, by another task
                raise StopAsyncIteration
        # The reason is set after the last token was put there: so no token comes after the end.
        reason = feed.reason
        tokens = [feed.pending.popleft() for _ in range(len(feed.pending))]
        self._n_tokens += len(tokens)
        self._over = reason is not None
        told = [token.logprob for token in tokens if token.logprob is not None]
        return Event(
            token_ids=tuple(token.id for token in tokens),
            text="".join(token.text for token in tokens) + (feed.tail if reason else ""),
            logprobs=None if self.request.sampling.logprobs is None else tuple(told),
            finish_reason=reason,
            usage=self.usage,
            error=feed.error if reason else None,
        )

    @property
    def usage(self) -> Usage:
        """Tokens up to the last event that was read."""
        return Usage(len(self.request.prompt), self._feed.sequence.n_cached, self._n_tokens)

    def cancel(self) -> None:
        """End the request at the next step; its last event says "cancelled". From any thread."""
        if self._feed.reason is None:
            self._leave(self._feed)

    async def aclose(self) -> None:
        """End the request at the next step and read nothing more."""
        self.cancel()
        self._over = True
        self._feed.woken.set()

    async def __aenter__(self) -> Stream:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()

    def __del__(self) -> None:
        self.cancel()
