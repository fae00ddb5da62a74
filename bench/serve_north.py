"""What serving adds to a step: concurrent ragged requests against the bare decode step.

    python bench/serve_north.py [--concurrency 1,2,4,8] [--tokens 256] [--prompts 64-1024]
        [--geometry FOLDER --machine host] [--direct]

Synthetic weights of North Mini Code unless a folder is given. The bare step is the machine's
own, fed with its own tokens in launches of 32, in the same engine, as many rows at such lengths.
The served one is read by clients over HTTP, or, where the packages of the endpoint are missing or
with --direct, straight from `mkref.serve.service.Service`; the record says which. `steady_ms` is
the time per step while all clients generate. It writes $OUT/serve.json after every row.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import sys
import threading
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from bench.provenance import provenance
from mkref.config import NORTH_MINI_CODE
from mkref.engine import Engine
from mkref.engine.sampling import Sampling
from mkref.errors import MkrefError
from mkref.machine.inputs import StepInputs
from mkref.measure.load import Job, Sample, jobs, run_load, summary
from mkref.measure.pages import fill_kv
from mkref.serve.app import require
from mkref.serve.run import make_server, open_socket
from mkref.serve.service import Service
from mkref.serve.settings import Settings
from mkref.serve.target import HttpTarget
from mkref.weights.checkpoint import load_checkpoint
from mkref.weights.synthetic import synthetic_weights

LAUNCH, LAUNCHES, WARM_UP = 32, 10, 2
DRAWS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "default": {"temperature": 1.0, "top_p": 0.95},
}


class Direct:
    """The service itself as the target of a load."""

    def __init__(self, service: Service, draw: dict[str, Any]) -> None:
        self.service, self.draw = service, draw

    async def __call__(self, job: Job, sample: Sample) -> AsyncIterator[int]:
        """One request."""
        vocabulary = self.service.engine.config.vocab_size
        prompt = np.random.default_rng(job.number).integers(3, vocabulary, job.prompt_tokens)
        request = self.service.request(
            prompt.tolist(),
            max_tokens=job.max_tokens,
            sampling=Sampling(**self.draw, seed=job.number),
            ignore_eos=True,
        )
        async with self.service.submit(request) as stream:
            async for event in stream:
                if event.error is not None:
                    raise event.error
                sample.n_tokens += len(event.token_ids)
                yield len(event.token_ids)


def bare_step(engine: Engine, lengths: list[int]) -> float:
    """Median milliseconds of a decode step, greedy, rows of these lengths; nothing else runs."""
    machine: Any = engine.machine
    n_total = LAUNCH * LAUNCHES
    held = [engine.kv.open([1]) for _ in lengths]
    try:
        for row, length in zip(held, lengths, strict=True):
            for position in range(0, length, LAUNCH):
                if not engine.kv.advance(row, position, min(LAUNCH, length - position)):
                    raise MkrefError(f"bare step: no pages for {lengths} tokens")
        at = np.array(lengths, np.int32)
        tokens = (np.arange(len(lengths)) * 1009 % (engine.config.vocab_size - 1) + 1).astype(
            np.int32
        )
        samples, begin = [], time.perf_counter()
        for _ in range(0, n_total, LAUNCH):
            for row, position in zip(held, at.tolist(), strict=True):
                if not engine.kv.advance(row, position, LAUNCH):
                    raise MkrefError(f"bare step: no pages at {position}")
            table = np.stack([row.table for row in held], axis=1)
            tokens = machine.decode(StepInputs(tokens, at, table), LAUNCH)[-1]
            now = time.perf_counter()
            samples.append((now - begin) * 1e3 / LAUNCH)
            at, begin = at + LAUNCH, now
    finally:
        for row in held:
            engine.kv.close(row)
    return float(np.median(samples[WARM_UP:]))


def steady_ms(samples: list[Sample]) -> float | None:
    """Milliseconds per token of one row while all rows generate; None if they never do."""
    good = [sample for sample in samples if len(sample.times) > 1]
    if not good:
        return None
    begin, end = max(s.times[0] for s in good), min(s.times[-1] for s in good)
    rates = []
    for sample in good:
        inside = [t for t in sample.times if begin <= t <= end]
        if len(inside) > 1:
            each = sample.n_tokens / len(sample.times)  # tokens of an arrival
            rates.append((inside[-1] - inside[0]) * 1e3 / ((len(inside) - 1) * each))
    return float(np.mean(rates)) if rates else None


@contextmanager
def endpoint(service: Service) -> Iterator[str]:
    """A server for the service, in a thread of this process; its address. Closes the service."""
    from mkref.serve.app import create_app

    settings = Settings(model="north")
    listening = open_socket("127.0.0.1", 0)
    server = make_server(create_app(service, settings), settings)
    thread = threading.Thread(
        target=lambda: asyncio.run(server.serve(sockets=[listening])), name="server"
    )
    thread.start()
    try:
        yield f"http://127.0.0.1:{listening.getsockname()[1]}/v1"
    finally:
        server.should_exit = True
        thread.join(60)
        listening.close()


def measure(service: Service, url: str | None, options: argparse.Namespace, record: Any) -> None:
    """All cases; each row has the bare step beside it."""
    for name, draw in DRAWS.items():
        for n in options.concurrency:
            load = jobs(n, options.prompts, (options.tokens, options.tokens), seed=n)
            target: Any = Direct(service, draw)
            if url is not None:
                more = {**draw, "ignore_eos": True, "return_token_ids": True}
                target = HttpTarget(
                    url, "north", None, service.engine.config.vocab_size, more, timeout=60
                )
            samples, seconds = asyncio.run(run_load(target, load, n))
            steady, bare = steady_ms(samples), record["bare_ms"][str(n)]
            row = {
                "draw": name,
                "concurrency": n,
                "bare_ms": round(bare, 4),
                "steady_ms": None if steady is None else round(steady, 4),
                "over_bare": None if steady is None else round(steady / bare - 1, 4),
                **summary(samples, seconds),
            }
            record["rows"].append(row)
            print({k: v for k, v in row.items() if not isinstance(v, dict)}, flush=True)
            write(record)


def write(record: Any) -> None:
    """What there is so far."""
    folder = Path(os.environ.get("OUT", Path(__file__).resolve().parent / "results" / "h200"))
    (folder / "serve.json").write_text(json.dumps(record, indent=1) + "\n")


def main(arguments: list[str] | None = None) -> int:
    """Entry point; the exit status is 1 if a request failed."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--concurrency", default="1,2,4,8")
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--prompts", default="64-1024")
    parser.add_argument("--geometry", help="folder of a checkpoint; default: North, synthetic")
    parser.add_argument("--machine", default="cuda")
    parser.add_argument("--n-sm", type=int)
    parser.add_argument("--direct", action="store_true")
    options = parser.parse_args(arguments)
    options.concurrency = [int(n) for n in options.concurrency.split(",")]
    low, _, high = options.prompts.partition("-")
    options.prompts = (int(low), int(high or low))
    record: dict[str, Any] = {"provenance": provenance(), "bare_ms": {}, "rows": []}
    try:
        require()
    except MkrefError as error:
        options.direct, record["why_direct"] = True, str(error)
    record["read_through"] = "service" if options.direct else "http"
    device = "cuda" if options.machine == "cuda" else "cpu"
    if options.geometry is None:
        config, weights = NORTH_MINI_CODE, synthetic_weights(NORTH_MINI_CODE, 0, device=device)
    else:
        weights = load_checkpoint(options.geometry, device)
        config = weights.config
    room = options.prompts[1] + max(options.tokens, LAUNCH * LAUNCHES) + 64
    with Engine.from_weights(
        config, weights, options.machine, options.n_sm, room, reuse=False
    ) as engine:
        fill_kv(engine.machine)  # type: ignore[arg-type]
        for n in options.concurrency:
            load = jobs(n, options.prompts, (options.tokens, options.tokens), seed=n)
            record["bare_ms"][str(n)] = bare_step(engine, [job.prompt_tokens for job in load])
        write(record)
        engine.machine.get_ready()  # as `mkref serve` does
        service = Service(engine)
        try:
            if options.direct:
                measure(service, None, options, record)
            else:
                with endpoint(service) as url:
                    measure(service, url, options, record)
        finally:
            service.close()
    return int(any(row["failed"] for row in record["rows"]))


if __name__ == "__main__":
    sys.exit(main())
