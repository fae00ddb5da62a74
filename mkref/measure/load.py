"""Load for a server, and what its clients notice: requests in a closed loop or by Poisson arrivals.

    closed loop   so many clients, each sends its next request when it has the last one's answer
    Poisson       requests come at a mean rate, whether or not the ones before are answered

Lengths of prompts and answers are ragged, and follow from the seed, so do the arrivals. A request
is measured from the moment when it was due: a program that sends late does not look fast.

What it does not do: speak to a server; a target does (`mkref.serve.target`).
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np

__all__ = ["Job", "Sample", "Target", "jobs", "percentiles", "run_load", "summary"]

SHARES = (50, 90, 99)


@dataclass(frozen=True)
class Job:
    """One request.

    Attributes:
        number: of the request, also its seed.
        prompt_tokens: length of its prompt.
        max_tokens: longest answer.
        at: seconds from the begin at which a Poisson load sends it.
    """

    number: int
    prompt_tokens: int
    max_tokens: int
    at: float = 0.0


class Target(Protocol):
    """What answers."""

    def __call__(self, job: Job, sample: Sample) -> AsyncIterator[int]:
        """Numbers of new tokens as they come; may correct `sample.n_prompt` and `n_tokens`."""


@dataclass
class Sample:
    """One request as its client saw it.

    Attributes:
        begin: when it was due.
        times: when tokens came; several tokens may come at a time.
        n_prompt, n_tokens: of prompt and answer; the target corrects what it knows better.
        end: when the answer was over.
        error: why there is no answer, or no whole one.
    """

    begin: float
    n_prompt: int = 0
    n_tokens: int = 0
    times: list[float] = field(default_factory=list)
    end: float = 0.0
    error: str | None = None


def jobs(
    n: int,
    prompt_tokens: tuple[int, int],
    max_tokens: tuple[int, int],
    rate: float | None = None,
    seed: int = 0,
) -> list[Job]:
    """Requests whose lengths are even in the logarithm, from the least to the most.

    >>> jobs(1, (8, 8), (4, 4))
    [Job(number=0, prompt_tokens=8, max_tokens=4, at=0.0)]
    """
    rng = np.random.default_rng(seed)

    def lengths(low: int, high: int) -> list[int]:
        drawn = np.exp(rng.uniform(np.log(low), np.log(high + 1), n)).astype(int)
        return np.clip(drawn, low, high).tolist()

    prompts, answers = lengths(*prompt_tokens), lengths(*max_tokens)
    at = np.zeros(n) if rate is None else np.cumsum(rng.exponential(1 / rate, n))
    return [Job(i, prompts[i], answers[i], round(float(at[i]), 6)) for i in range(n)]


async def run_load(
    target: Target, load: Sequence[Job], concurrency: int | None = None
) -> tuple[list[Sample], float]:
    """Send all requests.

    Args:
        target: that answers.
        load: the requests.
        concurrency: clients of a closed loop; None: each request at its time.

    Returns:
        What came of each, in the order of `load`, and the seconds it took altogether.
    """
    start = time.perf_counter()
    samples: list[Sample | None] = [None] * len(load)

    async def one(at: int, due: float) -> None:
        samples[at] = await _ask(target, load[at], due)

    async def client(left: Any) -> None:
        for at in left:
            await one(at, time.perf_counter())

    async def visitor(at: int) -> None:
        due = start + load[at].at
        await asyncio.sleep(max(0.0, due - time.perf_counter()))
        await one(at, due)

    if concurrency is None:
        await asyncio.gather(*(visitor(at) for at in range(len(load))))
    else:
        left = iter(range(len(load)))  # shared: whoever is free takes the next one
        await asyncio.gather(*(client(left) for _ in range(concurrency)))
    return [sample for sample in samples if sample is not None], time.perf_counter() - start


async def _ask(target: Target, job: Job, due: float) -> Sample:
    sample = Sample(due, job.prompt_tokens)
    try:
        async for n_new in target(job, sample):
            if n_new:
                sample.times.append(time.perf_counter())
    except Exception as error:  # whatever a server does, the load goes on
        sample.error = f"{type(error).__name__}: {error}"[:300]
    sample.end = time.perf_counter()
    if sample.error is None and not sample.times:
        sample.error = "no token came"
    return sample


def percentiles(seconds: Sequence[float]) -> dict[str, float] | None:
    """Milliseconds below which so many percent lie, and the mean.

    >>> percentiles([0.001, 0.003])
    {'mean': 2.0, 'p50': 2.0, 'p90': 2.8, 'p99': 2.98}
    """
    if not seconds:
        return None
    ms = np.asarray(seconds) * 1e3
    found = {f"p{share}": round(float(np.percentile(ms, share)), 3) for share in SHARES}
    return {"mean": round(float(ms.mean()), 3), **found}


def summary(samples: Sequence[Sample], seconds: float) -> dict[str, Any]:
    """What a load was like; requests that failed count as such and nowhere else.

    `ttft_ms`: until the first token; `itl_ms`: between two arrivals of tokens, of all requests;
    `tpot_ms`: of each request, from the first arrival to the last, per token after the first;
    `e2e_ms`: until the end.
    """
    good = [sample for sample in samples if sample.error is None]
    several = [sample for sample in good if sample.n_tokens > 1]
    n_prompt, n_tokens = (sum(getattr(s, name) for s in good) for name in ("n_prompt", "n_tokens"))
    errors = sorted({sample.error for sample in samples if sample.error is not None})
    return {
        "requests": len(samples),
        "failed": len(samples) - len(good),
        "errors": errors[:5],
        "seconds": round(seconds, 3),
        "requests_per_s": round(len(good) / seconds, 3),
        "prompt_tokens": n_prompt,
        "completion_tokens": n_tokens,
        "tokens_per_s": round(n_tokens / seconds, 2),
        "ttft_ms": percentiles([s.times[0] - s.begin for s in good]),
        "itl_ms": percentiles([b - a for s in good for a, b in _pairs(s.times)]),
        "tpot_ms": percentiles([(s.times[-1] - s.times[0]) / (s.n_tokens - 1) for s in several]),
        "e2e_ms": percentiles([s.end - s.begin for s in good]),
    }


def _pairs(times: Sequence[float]) -> list[tuple[float, float]]:
    return list(itertools.pairwise(times))
