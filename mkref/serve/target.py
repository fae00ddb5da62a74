"""Any OpenAI-compatible endpoint as the target of a load, over plain sockets.

Completions, streamed. Prompts are random token ids if the size of the vocabulary is given, which
makes their lengths exact and no two of them alike; else real text: pieces of mkref's own sources,
about as long as was asked for, and the endpoint's usage says how long they were.

What it does not do: more of HTTP than a streamed answer needs; each request has a connection of its
own, and a proxy is not asked.
"""

from __future__ import annotations

import asyncio
import json
import random
import ssl
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import mkref
from mkref.errors import MkrefError, RequestError
from mkref.serve.client import is_url

if TYPE_CHECKING:
    from mkref.measure.load import Job, Sample

__all__ = ["HttpTarget"]

CHARACTERS = 3.5
"""Of source code in a token, about."""
LINE_BYTES = 1 << 24


@dataclass(frozen=True)
class HttpTarget:
    """An endpoint.

    Attributes:
        base: address, up to and with /v1.
        model: its name there.
        api_key: bearer token, if any.
        vocabulary: prompts are token ids below it; None: text.
        fields: further fields of every request.
        timeout: seconds that an endpoint may be silent.
    """

    base: str
    model: str | None = None
    api_key: str | None = None
    vocabulary: int | None = None
    fields: dict[str, Any] = field(default_factory=dict)
    timeout: float = 600.0

    def __post_init__(self) -> None:
        if not is_url(self.base):
            raise RequestError(
                f"--url: {self.base!r}; must be like http://127.0.0.1:8000/v1, up to and with /v1"
            )

    async def __call__(self, job: Job, sample: Sample) -> AsyncIterator[int]:
        """One request; a token is what an event brings, until the usage at the end says better.

        Raises:
            MkrefError: it is refused, or ends with an error or too early.
        """
        body = {
            "model": self.model,
            "prompt": self._prompt(job),
            "max_tokens": job.max_tokens,
            "seed": job.number,
            "stream": True,
            "stream_options": {"include_usage": True},
            **self.fields,
        }
        told = json.dumps({name: value for name, value in body.items() if value is not None})
        done = False
        async for data in self._events(told.encode()):
            if data == "[DONE]":
                done = True
                continue
            event = json.loads(data)
            if "error" in event:
                raise MkrefError(f"the stream ended: {event['error']}")
            for choice in event.get("choices") or ():
                n_new = len(choice.get("token_ids") or ()) or int(bool(choice.get("text")))
                sample.n_tokens += n_new
                yield n_new
            if usage := event.get("usage"):
                sample.n_prompt = int(usage["prompt_tokens"])
                sample.n_tokens = int(usage["completion_tokens"])
        if not done:
            raise MkrefError("the stream ended without [DONE]")

    def _prompt(self, job: Job) -> str | list[int]:
        rng = random.Random(job.number)
        if self.vocabulary is not None:
            return [rng.randrange(3, self.vocabulary) for _ in range(job.prompt_tokens)]
        text = _text()
        size = max(1, min(round(job.prompt_tokens * CHARACTERS), len(text)))
        begin = rng.randrange(len(text) - size + 1)
        return text[begin : begin + size]

    async def _events(self, body: bytes) -> AsyncIterator[str]:
        """Data of the server-sent events of an answer."""
        parts = urlsplit(self.base)
        secure = ssl.create_default_context() if parts.scheme == "https" else None
        port = parts.port or (443 if secure else 80)
        async with asyncio.timeout(self.timeout) as clock:
            reader, writer = await asyncio.open_connection(
                parts.hostname, port, ssl=secure, limit=LINE_BYTES
            )
            try:
                writer.write(self._head(parts.netloc.rpartition("@")[2], parts.path, len(body)))
                writer.write(body)
                await writer.drain()
                status, chunked = await _read_head(reader)
                if status != 200:
                    text = (await _rest(reader, chunked))[:300].decode("utf-8", "replace")
                    raise MkrefError(f"status {status}: {' '.join(text.split())}")
                async for line in _lines(reader, chunked):
                    clock.reschedule(asyncio.get_running_loop().time() + self.timeout)
                    if line.startswith(b"data:"):
                        yield line[5:].decode().strip()
            finally:
                writer.close()

    def _head(self, host: str, path: str, length: int) -> bytes:
        lines = [
            f"POST {path.rstrip('/')}/completions HTTP/1.1",
            f"Host: {host}",
            "Content-Type: application/json",
            "Accept: text/event-stream",
            "Connection: close",
            f"Content-Length: {length}",
        ]
        if self.api_key:
            lines.append(f"Authorization: Bearer {self.api_key}")
        return "\r\n".join([*lines, "", ""]).encode()


async def _read_head(reader: asyncio.StreamReader) -> tuple[int, bool]:
    """Status, and whether the body comes in chunks."""
    first = (await reader.readline()).split()
    if len(first) < 2 or not first[1].isdigit():
        raise MkrefError("no answer in HTTP")
    chunked = False
    while (line := await reader.readline()).strip():
        name, _, value = line.decode("latin-1").partition(":")
        if name.strip().lower() == "transfer-encoding":
            chunked = "chunked" in value.lower()
    return int(first[1]), chunked


async def _blocks(reader: asyncio.StreamReader, chunked: bool) -> AsyncIterator[bytes]:
    """The body, as it comes."""
    if not chunked:
        while block := await reader.read(1 << 16):
            yield block
        return
    while size := int((await reader.readline()).partition(b";")[0] or b"0", 16):
        yield await reader.readexactly(size)
        await reader.readline()


async def _rest(reader: asyncio.StreamReader, chunked: bool) -> bytes:
    return b"".join([block async for block in _blocks(reader, chunked)])


async def _lines(reader: asyncio.StreamReader, chunked: bool) -> AsyncIterator[bytes]:
    held = b""
    async for block in _blocks(reader, chunked):
        *whole, held = (held + block).split(b"\n")
        for line in whole:
            yield line.rstrip(b"\r")


@cache
def _text() -> str:
    """All of mkref's own Python."""
    files = sorted(Path(mkref.__file__).parent.rglob("*.py"))
    return "\n".join(file.read_text(encoding="utf-8") for file in files)
