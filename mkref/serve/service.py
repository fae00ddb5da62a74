"""One engine, many clients: a thread that runs the scheduler, and streams to read from asyncio.

    service = Service(engine)
    request = service.request("def add(a, b):", max_tokens=32)
    async with service.submit(request) as stream:
        async for event in stream:
            print(event.text, end="")
    await service.drain(10.0)
    service.close()

The thread alone touches the engine. Clients put requests and cancellations into its mailbox, which
it empties between two steps. If the machine fails, everybody who ran gets the error, and those who
wait go on; if it fails again and again, the service says that it is not healthy, and takes nothing.

What it does not do: speak HTTP (`mkref.serve.app`), or have more than one engine.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections import Counter
from dataclasses import dataclass
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING, Any

from mkref.engine.sequence import Sequence
from mkref.errors import MachineError, MkrefError, QueueFullError, RequestError, UnavailableError
from mkref.serve.stream import Event, Feed, Stream, Usage, wake

if TYPE_CHECKING:
    from mkref.engine.counters import Histogram
    from mkref.engine.engine import Engine
    from mkref.engine.kv import KvStats
    from mkref.engine.request import Request

__all__ = ["Event", "Service", "Stats", "Stream", "Usage"]

POLL_S = 0.005
"""How often `drain` looks whether all have ended."""


@dataclass(frozen=True)
class Stats:
    """What a service does now and what it did so far; counters as in `mkref.engine.counters`.

    Attributes:
        running, waiting: requests now.
        healthy, accepting: see `Service`.
        rejected: requests that were refused because too many waited.
        kv: pages and what the prefix cache found.
    """

    running: int
    waiting: int
    healthy: bool
    accepting: bool
    rejected: int
    steps: int
    launches: int
    chunks: int
    prompt_tokens: int
    cached_tokens: int
    fed_tokens: int
    completion_tokens: int
    preemptions: int
    failures: int
    finished: dict[str, int]
    queue_s: Histogram
    ttft_s: Histogram
    itl_s: Histogram
    e2e_s: Histogram
    kv: KvStats


class Service:
    """Runs an engine for many clients.

    Args:
        engine: for this service alone, from now on.
        max_queue: requests that may be there beyond those that the rows of a step can take.
        max_failures: so many failed steps one after another, and the service gives up.

    Attributes:
        healthy: False if it gave up.
        accepting: False from `drain` or `close` on.

    Raises:
        RequestError: the engine is closed, or somebody else has it.
    """

    def __init__(self, engine: Engine, *, max_queue: int = 256, max_failures: int = 3) -> None:
        engine.claim("a service")
        self.engine = engine
        self.max_queue, self.max_failures = max_queue, max_failures
        self.healthy = True
        self.accepting = True
        self._scheduler = engine.scheduler
        # Other than a lock, it may be put into from a finalizer that runs inside of itself.
        self._mail: SimpleQueue[tuple[str, Feed | None]] = SimpleQueue()
        self._feeds: dict[Sequence, Feed] = {}  # the thread's own
        self._lock = threading.Lock()
        self._n_open = 0  # submitted and not ended
        self._rejected = 0
        self._failed = 0  # steps one after another
        self._why = ""
        self._thread = threading.Thread(target=self._run, name="mkref-engine", daemon=True)
        self._thread.start()

    def request(self, prompt: Any, **settings: Any) -> Request:
        """A checked request; arguments and errors of `Engine.request`."""
        return self.engine.request(prompt, **settings)

    def submit(self, request: Request) -> Stream:
        """Line up; to be called in the event loop that will read.

        Raises:
            RequestError: it could not run even alone.
            QueueFullError: too many are there.
            UnavailableError: the service is going down, or its machine is broken.
        """
        self._scheduler.roster.check(request)
        feed = Feed(Sequence(request, self.engine.tokenizer), asyncio.get_running_loop())
        with self._lock:
            if not self.healthy:
                raise UnavailableError(f"service: it gave up: {self._why}")
            if not self.accepting:
                raise UnavailableError("service: it is going down and takes no requests")
            most = self.max_queue + self._scheduler.roster.rows
            if self._n_open >= most:
                self._rejected += 1
                raise QueueFullError(
                    f"service: {self._n_open} requests run or wait, no more than {most} may; "
                    "try again later"
                )
            self._n_open += 1
            self._mail.put(("submit", feed))  # before the lock is free: `_end_all` looks afterwards
        return Stream(feed, self._leave)

    def _leave(self, feed: Feed) -> None:
        """A reader goes; from any thread, also from a finalizer."""
        self._mail.put(("cancel", feed))

    async def drain(self, timeout: float | None = None) -> bool:
        """Take nothing new and wait for those who are there.

        Args:
            timeout: seconds after which the rest is cancelled; None for never.

        Returns:
            Whether all ended by themselves.
        """
        self.accepting = False
        end = None if timeout is None else time.monotonic() + timeout
        while self._n_open and self._thread.is_alive():
            if end is not None and time.monotonic() >= end:
                self._mail.put(("cancel all", None))
                while self._n_open and self._thread.is_alive():
                    await asyncio.sleep(POLL_S)
                return False
            await asyncio.sleep(POLL_S)
        return True

    def close(self) -> None:
        """End everybody with an error and stop the thread; the engine is free again, and loaded."""
        with self._lock:
            self.accepting = False
        self._mail.put(("stop", None))
        self._thread.join()
        self.engine.claim("")

    def stats(self) -> Stats:
        """A copy; from any thread."""
        scheduler, counters = self._scheduler, self._scheduler.counters
        running = len(scheduler.roster.running)
        return Stats(
            running=running,
            waiting=max(0, self._n_open - running),
            healthy=self.healthy,
            accepting=self.accepting,
            rejected=self._rejected,
            steps=counters.steps,
            launches=counters.launches,
            chunks=counters.chunks,
            prompt_tokens=counters.prompt_tokens,
            cached_tokens=counters.cached_tokens,
            fed_tokens=counters.fed_tokens,
            completion_tokens=counters.completion_tokens,
            preemptions=counters.preemptions,
            failures=counters.failures,
            finished=dict(Counter(counters.finished)),
            queue_s=counters.queue_s.copy(),
            ttft_s=counters.ttft_s.copy(),
            itl_s=counters.itl_s.copy(),
            e2e_s=counters.e2e_s.copy(),
            kv=self.engine.kv.stats(),
        )

    def _run(self) -> None:
        """The thread."""
        stop: MkrefError = UnavailableError("service: it was closed before the answer was complete")
        try:
            while self.healthy and self._read_mail():
                if self._scheduler.busy:
                    self._step()
                self._deliver()
        except BaseException as error:  # a mistake in this program; nobody shall wait for ever
            stop = self._give_up(error)
            raise
        finally:
            self._end_all(stop if self.healthy else UnavailableError(f"service: {self._why}"))

    def _read_mail(self) -> bool:
        """Take what came; wait for it if there is nothing to do. False if the end came."""
        block = not self._scheduler.busy
        while True:
            try:
                what, feed = self._mail.get(block)
            except Empty:
                return True
            block = False
            if what == "stop":
                return False
            if what == "cancel all":
                for sequence in [*self._feeds]:
                    self._scheduler.cancel(sequence)
            elif feed is not None and what == "submit":
                self._feeds[feed.sequence] = feed
                self._scheduler.submit(feed.sequence)
            elif feed is not None and feed.reason is None:
                self._scheduler.cancel(feed.sequence)

    def _step(self) -> None:
        done = self._scheduler.counters.steps
        try:
            self._scheduler.step()
        except Exception as error:
            self._failed += 1
            if self._failed >= self.max_failures or self._scheduler.roster.running:
                self._give_up(error)
        else:
            if self._scheduler.counters.steps > done:
                self._failed = 0

    def _give_up(self, error: BaseException) -> MkrefError:
        with self._lock:
            self.healthy = False
            self._why = f"the machine failed {max(1, self._failed)} times in a row: {error}"
        return UnavailableError(f"service: {self._why}")

    def _deliver(self) -> None:
        """Hand out what the last step brought."""
        news = []
        for sequence, feed in self._feeds.items():
            if sequence.events or sequence.finish_reason or sequence.error:
                feed.pending.extend(sequence.events)
                sequence.events.clear()
                if sequence.error is not None:
                    feed.end("error", _told(sequence.error))
                elif sequence.finish_reason:
                    feed.end(sequence.finish_reason)
                news.append(feed)
        if not news:
            return
        ended = [feed for feed in news if feed.reason is not None]
        for feed in ended:
            del self._feeds[feed.sequence]
        if ended:
            with self._lock:
                self._n_open -= len(ended)
        wake(news)

    def _end_all(self, error: MkrefError) -> None:
        """Nobody waits for a thread that is no more."""
        with self._lock:
            self.accepting = False
        left = [*self._feeds.values()]
        while True:
            try:
                what, feed = self._mail.get_nowait()
            except Empty:
                break
            if feed is not None and what == "submit":
                left.append(feed)
        for feed in left:
            feed.end("error", error)
        with self._lock:
            self._n_open = 0
        wake(left)
        for sequence in self._feeds:  # the engine may go on without this service
            self._scheduler.cancel(sequence)
        self._feeds.clear()


def _told(error: BaseException) -> MkrefError:
    """What the client hears."""
    if isinstance(error, RequestError):  # its own fault, of its constraint for instance
        return error
    return MachineError(
        f"a step that this request shared with others failed: {error or type(error).__name__}"
    )
