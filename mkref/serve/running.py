"""The answers of one HTTP request while they are under way.

A request may ask for several answers; each is a stream of its own. Here they become one stream of
numbered events, are ended together when the client goes away, and count against the limit.

What it does not do: look into an event beyond its end.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from typing import TYPE_CHECKING

from mkref.serve.errors import ApiError, as_api_error

if TYPE_CHECKING:
    from mkref.engine.request import Request
    from mkref.serve.service import Event, Service, Stream

__all__ = ["Running", "Slots"]


class Slots:
    """How many answers may be under way at a time.

    Attributes:
        most: the limit.
        taken: answers under way.
    """

    def __init__(self, most: int) -> None:
        self.most = most
        self.taken = 0

    def take(self, count: int) -> None:
        """Take some.

        Raises:
            ApiError: 429; or 400 if there can never be so many.
        """
        if count > self.most:
            raise ApiError(
                f"n: {count} answers; this server works on at most {self.most} at a time",
                param="n",
                code="invalid_value",
            )
        if self.taken + count > self.most:
            raise ApiError(
                f"busy: {self.taken} of {self.most} answers are under way; try again later",
                code="rate_limit_exceeded",
                status=429,
                headers={"Retry-After": "1"},
            )
        self.taken += count

    def give_back(self, count: int) -> None:
        """Give them back."""
        self.taken -= count


class Running:
    """Submits requests and merges their events.

    Args:
        service: that runs them.
        slots: the limit.
        requests: one per answer.

    Raises:
        ApiError, QueueFullError, UnavailableError, RequestError: nothing was submitted.
    """

    def __init__(self, service: Service, slots: Slots, requests: Sequence[Request]) -> None:
        self._slots = slots
        self._streams: list[Stream] = []
        self._stopped: set[int] = set()
        self._tasks: list[asyncio.Task[None]] = []
        slots.take(len(requests))
        self._n_slots = len(requests)
        try:
            for request in requests:
                self._streams.append(service.submit(request))
        except BaseException:
            for stream in self._streams:
                stream.cancel()
            self._release()
            raise

    def _release(self) -> None:
        self._slots.give_back(self._n_slots)
        self._n_slots = 0

    def stop(self, index: int) -> None:
        """End one answer: its reader has seen enough."""
        self._stopped.add(index)
        self._streams[index].cancel()

    async def aclose(self) -> None:
        """End whatever is under way. Can be called again."""
        for task in self._tasks:
            task.cancel()
        if self._tasks:
            await asyncio.gather(*self._tasks, return_exceptions=True)
            self._tasks.clear()
        for stream in self._streams:
            await stream.aclose()
        self._release()

    async def events(self) -> AsyncIterator[tuple[int, Event]]:
        """All events with the numbers of their answers, until every answer has ended.

        Raises:
            ApiError: an answer ended with an error; the others are of no use to the client then.
        """
        if len(self._streams) == 1:
            async for event in self._one(0):
                yield 0, event
            return
        queue: asyncio.Queue[tuple[int, Event] | BaseException | None] = asyncio.Queue()
        self._tasks = [
            asyncio.create_task(self._pump(index, queue)) for index in range(len(self._streams))
        ]
        n_left = len(self._tasks)
        while n_left:
            item = await queue.get()
            if isinstance(item, BaseException):
                raise item
            if item is None:
                n_left -= 1
            elif item[0] not in self._stopped:
                yield item

    async def _pump(
        self, index: int, queue: asyncio.Queue[tuple[int, Event] | BaseException | None]
    ) -> None:
        try:
            async for event in self._one(index):
                queue.put_nowait((index, event))
            queue.put_nowait(None)
        except Exception as error:
            queue.put_nowait(error)

    async def _one(self, index: int) -> AsyncIterator[Event]:
        async for event in self._streams[index]:
            if index in self._stopped:
                return
            if event.finish_reason in ("cancelled", "deadline", "error"):
                raise _ended_badly(event)
            yield event
            if event.finish_reason is not None or index in self._stopped:
                return


def _ended_badly(event: Event) -> ApiError:
    if event.finish_reason == "deadline":
        return ApiError(
            f"timeout: the request was not done in time; it has {event.usage.completion} tokens",
            code="deadline_exceeded",
            status=408,
            headers={"x-should-retry": "false"},
        )
    if event.finish_reason == "cancelled":
        return ApiError(
            "server: it is going down; try again",
            code="unavailable",
            status=503,
            headers={"Retry-After": "5"},
        )
    return as_api_error(event.error or RuntimeError())
