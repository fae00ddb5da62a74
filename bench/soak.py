"""Two thousand requests of all kinds through one service, each compared with itself alone.

    python bench/soak.py [--fast] [--requests 2000] [--machine host] [--seed 0]

Clients come with prompts of random lengths, many of which begin alike, and with random settings.
Some leave in the middle, some cancel, some read slowly, some have little time. The pool of pages is
too small for all that runs, so sequences lose their pages and compute again. In exact mode nothing
of this may show: every answer that is complete equals, token for token, the one that the same
request gets on an engine that does nothing else and keeps nothing; what somebody got before leaving
is the beginning of it. At the end every page is accounted for, and memory is as it was.

With `--fast` long prompts go in by PyTorch. Then an answer may leave the one that its request has
alone in exact mode where two tokens are nearly tied: every such place is listed, with how near they
were and why, and one that nothing explains fails the run (`bench/soak_compare.py`).

Needs no GPU. Writes bench/results/soak.json, or soak_fast.json.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import sys
import time
import tracemalloc
from collections import Counter
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from bench.provenance import provenance
from bench.soak_compare import first_difference
from bench.soak_fast import Difference, FastPath, explain, noise
from mkref.engine import Completion, Engine
from mkref.engine.sampling import Sampling
from mkref.errors import QueueFullError
from mkref.serve.service import Event, Service

LEAVING = ("cancel", "leave", "task", "at once", "deadline")
MAX_CONTEXT = 512
KV_PAGES = 8
"""Enough for one sequence of the longest context, and not for eight short ones that grow."""
N_SAMPLES = 40
LONGEST_PROMPT, LONGEST_FAST = 160, 240


@dataclass(frozen=True)
class Kind:
    """One request: what it asks, which decides every token of the answer."""

    prompt: tuple[int, ...]
    max_tokens: int
    sampling: Sampling
    stop: tuple[int, ...] = ()
    ignore_eos: bool = True

    def settings(self) -> dict[str, Any]:
        """Arguments of `Engine.request`."""
        return {
            "prompt": self.prompt,
            "max_tokens": self.max_tokens,
            "sampling": self.sampling,
            "stop": list(self.stop) or None,
            "ignore_eos": self.ignore_eos,
        }


@dataclass
class Record:
    """What a soak came to.

    Attributes:
        ends: how the requests ended, by reason.
        left: how clients left, of those who did.
        compared, equal: complete answers.
        beginnings, equal_beginnings: answers that were left before their end.
        wrong: the first few that differ; there must be none.
        differ: in fast mode, answers that leave the one alone at some place.
        refused: submissions when the queue was full; they came again.
        memory: seconds, bytes that Python objects hold, resident bytes, at regular moments.
    """

    ends: Counter[str] = field(default_factory=Counter)
    left: Counter[str] = field(default_factory=Counter)
    compared: int = 0
    equal: int = 0
    beginnings: int = 0
    equal_beginnings: int = 0
    wrong: list[str] = field(default_factory=list)
    differ: list[Difference] = field(default_factory=list)
    refused: int = 0
    memory: list[tuple[float, int, int]] = field(default_factory=list)


def kinds(n: int, vocab_size: int, rng: random.Random, longest_prompt: int) -> list[Kind]:
    """Different requests; the prompts of most begin with a part of one of five texts."""
    stems = [[rng.randrange(vocab_size) for _ in range(longest_prompt)] for _ in range(5)]
    made = []
    for _ in range(n):
        length = rng.choice(
            [rng.randint(1, 20), rng.randint(1, 60), rng.randint(64, longest_prompt)]
        )
        stem = rng.choice(stems)[: length - rng.randint(0, 12)] if length > 12 else []
        prompt = [*stem, *(rng.randrange(vocab_size) for _ in range(length - len(stem)))]
        longest = rng.choices([8, 30, 140], [5, 3, 2])[0]
        made.append(
            Kind(
                tuple(prompt),
                rng.randint(1, longest),
                _sampling(rng),
                tuple(rng.sample(range(vocab_size), 20)) if rng.random() < 0.2 else (),
                rng.random() < 0.8,
            )
        )
    return made


def _sampling(rng: random.Random) -> Sampling:
    """Greedy, plain temperature, the vendor's default, or anything."""
    drawn: dict[str, Any] = {"temperature": rng.choice([0.6, 1.0]), "seed": rng.randrange(2**64)}
    which = rng.random()
    if which < 0.3:
        return Sampling()
    if which < 0.6:
        return Sampling(**drawn)
    if which < 0.8:
        return Sampling(**drawn, top_p=0.95)
    return Sampling(
        **drawn,
        top_k=rng.choice([0, 40]),
        min_p=rng.choice([0.0, 0.05]),
        presence_penalty=rng.choice([0.0, 0.5]),
        frequency_penalty=rng.choice([0.0, 0.3]),
        repetition_penalty=rng.choice([1.0, 1.1]),
        logit_bias=((rng.randrange(64), 1.5),) if rng.random() < 0.3 else (),
        logprobs=rng.choice([None, 0, 3]),
    )


class Soak:
    """Clients of one service.

    Args:
        service: in exact mode, or in fast mode with `fast`.
        lone: the answer of every kind alone, in exact mode.
        n_requests: in total.
        seed: of everything that is random.
        fast: the service's way for long prompts.
    """

    def __init__(
        self,
        service: Service,
        lone: dict[Kind, Completion],
        n_requests: int,
        seed: int,
        fast: FastPath | None = None,
    ) -> None:
        self.service, self.lone, self.fast = service, lone, fast
        self.record = Record()
        self._rng = random.Random(seed)
        self._left = n_requests
        self._every = max(1, n_requests // N_SAMPLES)
        self._begin = time.monotonic()

    async def run(self, n_clients: int = 22) -> Record:
        """Until all requests have ended."""
        choices = list(self.lone)
        await asyncio.gather(*(self._client(choices) for _ in range(n_clients)))
        return self.record

    async def _client(self, choices: list[Kind]) -> None:
        while self._left:
            if self._left % self._every == 0:
                self._sample()
            self._left -= 1
            kind = self._rng.choice(choices)
            how = self._rng.choice(LEAVING) if self._rng.random() < 0.25 else "stay"
            try:
                tokens, text, last = await self._ask(kind, how)
            except QueueFullError:
                self.record.refused += 1
                self._left += 1
                await asyncio.sleep(0.5)
                continue
            self._compare(kind, how, tokens, text, last)

    async def _ask(self, kind: Kind, how: str) -> tuple[list[int], str, Event | None]:
        """One request; its tokens, text and last event, as far as the client waited for them."""
        tokens: list[int] = []
        text = ""
        last: Event | None = None
        deadline = time.monotonic() + self._rng.random() if how == "deadline" else None
        request = self.service.request(**kind.settings(), deadline=deadline)
        n_read, lazy = self._rng.randint(1, 8), self._rng.random() < 0.1
        async with self.service.submit(request) as stream:
            if how == "at once":
                return tokens, text, last
            try:
                async with asyncio.timeout(self._rng.random() if how == "task" else None):
                    async for event in stream:
                        last = event
                        tokens += event.token_ids
                        text += event.text
                        n_read -= 1
                        if how == "cancel" and not n_read:
                            stream.cancel()
                        if how == "leave" and not n_read:
                            break
                        if lazy:
                            await asyncio.sleep(0.05)
            except TimeoutError:
                last = None
        return tokens, text, last

    def _compare(
        self, kind: Kind, how: str, tokens: list[int], text: str, last: Event | None
    ) -> None:
        record, whole = self.record, self.lone[kind]
        reason = last.finish_reason if last is not None else None
        record.ends[reason or "left"] += 1
        if how != "stay":
            record.left[how] += 1
        complete = reason in ("eos", "stop", "length")
        if complete:
            record.compared += 1
            found = (tuple(tokens), text, reason)
            if found == (whole.token_ids, whole.text, whole.finish_reason):
                record.equal += 1
                return
        elif reason != "error":
            record.beginnings += 1
            if whole.token_ids[: len(tokens)] == tuple(tokens):
                record.equal_beginnings += 1
                return
        at = first_difference(tokens, whole.token_ids)
        if self.fast is not None and at is not None and reason != "error":
            record.differ.append(Difference(kind, how, complete, at, tokens[at]))
            return
        if len(record.wrong) < 20:
            record.wrong.append(
                f"{how}, {reason}: {len(kind.prompt)} prompt tokens, {kind.sampling}: {tokens} "
                f"instead of {list(whole.token_ids)}; {last.error if last else None}"
            )

    def _sample(self) -> None:
        pages = int(Path("/proc/self/statm").read_text().split()[1])
        seconds = round(time.monotonic() - self._begin, 1)
        traced = tracemalloc.get_traced_memory()[0]
        self.record.memory.append((seconds, traced, pages * os.sysconf("SC_PAGE_SIZE")))


def growth(record: Record) -> dict[str, float]:
    """Mean of the last quarter of the memory samples less that of the second one, in MB."""
    n = len(record.memory) // 4
    early, late = record.memory[n : 2 * n], record.memory[-n:]
    return {
        name: round((sum(s[at] for s in late) - sum(s[at] for s in early)) / n / 1e6, 3)
        for at, name in ((1, "python_mb"), (2, "resident_mb"))
    }


def compute_alone(engine: Engine, wanted: list[Kind], logits: bool) -> dict[Kind, Completion]:
    """The answer of every kind, one after another, on an engine that keeps nothing."""
    return {kind: engine.generate(**kind.settings(), return_logits=logits) for kind in wanted}


def pages_lost(engine: Engine) -> int:
    """Pages that nobody can get any more; the accounting is proved, too."""
    engine.kv.check()
    return sum(engine.kv.budget) - engine.kv.available(0) - engine.kv.available(1)


def main() -> int:
    """Run it, print the outcome, write the record."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--fast", action="store_true", help="long prompts by PyTorch")
    parser.add_argument("--requests", type=int, default=2000)
    parser.add_argument("--kinds", type=int, default=300, help="different requests")
    parser.add_argument("--machine", default="host")
    parser.add_argument("--n-sm", type=int, default=1)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    sizes: dict[str, Any] = {"max_context": MAX_CONTEXT, "n_sm": options.n_sm}
    longest = LONGEST_FAST if options.fast else LONGEST_PROMPT
    with Engine.load("nano", options.machine, reuse=False, **sizes) as engine:
        rng = random.Random(options.seed)
        wanted = kinds(options.kinds, engine.config.vocab_size, rng, longest)
        begin = time.monotonic()
        lone = compute_alone(engine, wanted, options.fast)
        alone_s = round(time.monotonic() - begin, 1)
    print(f"{len(lone)} kinds alone: {alone_s} s", flush=True)
    of_fast: dict[str, Any] = {}
    if options.fast:
        with Engine.load("nano", options.machine, reuse=False, exact=False, **sizes) as engine:
            of_fast["noise"] = noise(engine, lone)
        print(f"noise: {of_fast['noise']}", flush=True)
    tracemalloc.start()
    sizes["exact"] = not options.fast
    with Engine.load("nano", options.machine, kv_pages=KV_PAGES, **sizes) as engine:
        engine.scheduler.roster.spare = 0  # take back often
        fast = FastPath(engine) if options.fast else None
        service = Service(engine, max_queue=12)
        begin = time.monotonic()
        soak = Soak(service, lone, options.requests, options.seed, fast)
        record = asyncio.run(soak.run())
        seconds = round(time.monotonic() - begin, 1)
        stats = service.stats()
        service.close()
        lost = pages_lost(engine)
        made = {
            "provenance": provenance(),
            "settings": {**vars(options), **sizes, "kv_budget": engine.kv.budget},
            "seconds": {"alone": alone_s, "soak": seconds},
            "requests": options.requests,
            "pages_lost": lost,
            "growth": growth(record),
            "stats": {
                name: getattr(stats, name)
                for name in (
                    "steps", "launches", "prompt_tokens", "cached_tokens", "fed_tokens",
                    "completion_tokens", "preemptions", "failures", "finished",
                )
            },
            "kv": asdict(stats.kv),
            **vars(record),
        }  # fmt: skip
    tracemalloc.stop()
    good = record.compared + record.beginnings == (
        record.equal + record.equal_beginnings + len(record.differ)
    )
    del made["differ"]
    if fast is not None:
        of_fast |= fast.counts() | explain(record.differ, lone)
        good = good and fast.n_requests > 0 and not of_fast["beyond_tolerance"]
        made |= {"fast": of_fast}
    name = "soak_fast.json" if options.fast else "soak.json"
    (ROOT / "bench" / "results" / name).write_text(json.dumps(made, indent=1) + "\n")
    shown = {k: v for k, v in made.items() if k not in ("provenance", "memory", "kv")}
    print(json.dumps(shown, indent=1))
    return 0 if good and not lost and not record.wrong else 1


if __name__ == "__main__":
    sys.exit(main())
