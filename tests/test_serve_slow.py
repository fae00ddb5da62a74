"""Clients that are slow on purpose, leave half-way, or speak no HTTP, against a real server.

Each connection ends within a set time, nothing of it goes on, and others are served meanwhile.
"""

from __future__ import annotations

import json
import signal
import socket
import struct
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import pytest

from tests.serve_process import Server, serving

TEXT = "/v1/completions"
LIMIT_S = 0.7
RESET = struct.pack("ii", 1, 0)
"""Of SO_LINGER: closing sends RST."""
LONG = {"prompt": "a", "max_tokens": 30, "ignore_eos": True, "logprobs": 20, "n": 4}
"""An answer of some 300 kB: far more than what the system keeps for a client."""


@pytest.fixture(name="one", scope="module")
def one_fixture(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Server, Any]]:
    """The server, and what it answered first."""
    limits: dict[str, Any] = dict.fromkeys(
        ("head_timeout_s", "body_timeout_s", "write_timeout_s"), LIMIT_S
    )
    with serving(tmp_path_factory.mktemp("slow") / "log", **limits) as server:
        yield server, server.tokens()


@pytest.fixture(name="server")
def server_fixture(one: tuple[Server, Any]) -> Iterator[Server]:
    """The server; after the test it is looked at."""
    yield one[0]
    one[0].check_unharmed(one[1])


def request(body: Any, *headers: str, path: str = TEXT, method: str = "POST") -> bytes:
    """A whole request."""
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    lines = [
        f"{method} {path} HTTP/1.1", "Host: x", "Content-Type: application/json",
        f"Content-Length: {len(content)}", *headers,
    ]  # fmt: skip
    return "\r\n".join([*lines, "", ""]).encode() + content


def rest(connection: socket.socket) -> bytes:
    """Everything until the server closes."""
    parts = []
    try:
        while part := connection.recv(1 << 16):
            parts.append(part)
    except ConnectionError:  # it closed while we were sending
        pass
    return b"".join(parts)


def drip(connection: socket.socket, data: bytes) -> bytes:
    """Send byte by byte until the server has had enough; what it said."""
    for byte in data:
        try:
            connection.sendall(bytes([byte]))
        except ConnectionError:
            break
        time.sleep(0.02)
    return rest(connection)


def error_of(answer: bytes) -> tuple[int, str]:
    """Status and code of the last answer."""
    head, _, body = answer.rpartition(b"HTTP/1.1 ")[2].partition(b"\r\n\r\n")
    error = json.loads(body)["error"]
    assert {"message", "type", "param", "code"} == error.keys()
    assert ": " in error["message"]
    return int(head.split()[0]), error["code"]


GOOD = request({"prompt": "a", "max_tokens": 1})
CHUNKED = request(b"", "Transfer-Encoding: chunked").replace(b"Content-Length: 0\r\n", b"")
HEAD = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nX-Long: " + b"a" * 500
SLOW: dict[str, tuple[bytes, bytes, int, str]] = {
    # What comes at once, what comes drop by drop, and the end.
    "head": (b"", HEAD, 408, "head_timeout"),
    "head, then nothing": (HEAD, b"", 408, "head_timeout"),
    "second head": (GOOD, HEAD, 408, "head_timeout"),
    "body": (request(b"")[:-5] + b"900\r\n\r\n", b"{" + b" " * 500, 408, "body_timeout"),
    "body that never comes": (request(b"").replace(b": 0", b": 10"), b"", 408, "body_timeout"),
    "chunks": (
        CHUNKED,
        b"1\r\n{\r\n" + b"1\r\n \r\n" * 100, 408, "body_timeout",
    ),
    "body that nobody reads": (
        request(b"", path="/x").replace(b": 0", b": 999"), b"a" * 500, 404, "not_found",
    ),
}  # fmt: skip


def test_slow_requests(server: Server) -> None:
    """However slowly they come, side by side: the connections end soon, and each is told why."""

    def attack(name: str) -> tuple[int, str]:
        at_once, drops, _, _ = SLOW[name]
        with closing(server.connect()) as connection:
            connection.sendall(at_once)
            return error_of(drip(connection, drops))

    begin = time.monotonic()
    with ThreadPoolExecutor(len(SLOW)) as pool:
        told = dict(zip(SLOW, pool.map(attack, SLOW), strict=True))
    assert {name: (status, code) for name, (_, _, status, code) in SLOW.items()} == told
    assert time.monotonic() - begin < 15


def test_silent_connections(server: Server) -> None:
    """A hundred clients that connect and say nothing are no hindrance, and are closed."""
    silent = [server.connect() for _ in range(100)]
    assert 200 == server.post(TEXT, {"prompt": "a", "max_tokens": 1}).status_code
    for connection in silent:
        with closing(connection):
            assert b"" == rest(connection)


NO_HTTP: dict[str, tuple[bytes, int]] = {
    "no words": (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03\r\n\r\n", 400),
    "an old version": (b"GET /health\r\n\r\n", 400),
    "no host": (b"GET /health HTTP/1.1\r\n\r\n", 400),
    "a long line": (b"GET /" + b"a" * 100_000, 431),
    "a long header": (b"GET / HTTP/1.1\r\nHost: x\r\nX: " + b"a" * 100_000, 431),
    "a length that is none": (request(b"").replace(b": 0", b": -1"), 400),
    "two lengths": (request(b"{}", "Content-Length: 1"), 400),
    "an unknown coding": (request(b"", "Transfer-Encoding: gzip"), 400),
    "chunks of what": (
        CHUNKED + b"zz\r\n",
        400,
    ),
    "a name with a space": (b"GET / HTTP/1.1\r\nHost: x\r\nA b: c\r\n\r\n", 400),
}  # fmt: skip


def test_no_http(server: Server) -> None:
    """What is no HTTP is told so in the shape of all errors, and the connection is closed."""
    for name, (sent, status) in NO_HTTP.items():
        with closing(server.connect()) as connection:
            connection.sendall(sent)
            answer = rest(connection)
        assert (status, "invalid_http") == error_of(answer), name


def log_of(server: Server, name: str) -> dict[str, Any]:
    """The line of the request with an id, once it is there."""
    end = time.monotonic() + 20
    while time.monotonic() < end:
        for line in server.events():
            if line.get("request_id") == name:
                return line
        time.sleep(0.05)
    raise AssertionError(f"no line about {name}")


def test_reader_that_reads_nothing(server: Server) -> None:
    """A stream that is not taken is given up, and its answers end."""
    with closing(server.connect(RCVBUF=4096)) as connection:
        connection.sendall(request({**LONG, "stream": True}, "X-Request-Id: asleep"))
        assert "client_gone" == log_of(server, "asleep")["error_code"]
        time.sleep(2 * LIMIT_S)  # what is left may be taken within the limit
        assert b"[DONE]" not in rest(connection)


def test_reader_that_does_not_take_the_end(server: Server) -> None:
    """A connection that is to be closed does not wait for its client for ever."""
    with closing(server.connect(RCVBUF=4096)) as connection:
        connection.sendall(request(LONG, "Connection: close", "X-Request-Id: lazy"))
        assert 200 == log_of(server, "lazy")["status"]
        time.sleep(3 * LIMIT_S)
        answer = rest(connection)
    head, _, body = answer.partition(b"\r\n\r\n")
    assert b"200 OK" in head
    length = int(head.lower().partition(b"content-length: ")[2].split()[0])
    assert len(body) < length


def test_leaving_half_way(server: Server) -> None:
    """Clients that vanish while their answers are under way: by FIN, and by RST."""
    for index in range(16):
        stream = index >= 8
        with closing(server.connect()) as connection:
            name = f"X-Request-Id: left{index}"
            connection.sendall(request({**LONG, "stream": stream}, name))
            if stream:
                assert connection.recv(100)
            if index % 2:
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)
    for index in range(16):
        assert "client_gone" == log_of(server, f"left{index}")["error_code"]


def test_leaving_in_the_body(server: Server) -> None:
    """A client that leaves before its request is complete is no error of the server."""
    with closing(server.connect()) as connection:
        sent = request(b"", "X-Request-Id: gone").replace(b": 0", b": 10")
        connection.sendall(sent + b"{")
        time.sleep(0.2)
    line = log_of(server, "gone")
    assert (499, "client_gone") == (line["status"], line["error_code"])


def test_going_down_in_the_middle(tmp_path: Path) -> None:
    """At SIGTERM an answer that takes too long ends with an error in the usual shape, streamed or
    not, and no bug is logged.
    """
    with serving(tmp_path / "log", max_context=512, drain_timeout_s=0.5) as server:
        body = {"prompt": "a", "max_tokens": 500, "ignore_eos": True}
        with closing(server.connect()) as streamed, closing(server.connect()) as whole:
            streamed.sendall(request({**body, "stream": True}))
            whole.sendall(request(body))
            assert b"200 OK" in streamed.recv(100)
            while server.metrics()["mkref_running"] < 2:
                time.sleep(0.05)
            server.process.send_signal(signal.SIGTERM)
            events = rest(streamed)
            assert (503, "unavailable") == error_of(rest(whole))
        assert server.process.wait(20) in (0, -signal.SIGTERM)
        assert b'"code": "unavailable"' in events
        assert b"[DONE]" not in events
        assert events.endswith(b"\r\n0\r\n\r\n")  # complete HTTP all the same
        assert [] == [line for line in server.events() if line["level"] == "error"]
        (closed,) = [line for line in server.events() if line["event"] == "closed"]
        assert closed["all_answers_ended"] is False


def test_going_down_with_such_clients(tmp_path: Path) -> None:
    """SIGTERM is obeyed soon, whoever still has a connection."""
    limits: dict[str, Any] = dict.fromkeys(("write_timeout_s", "drain_timeout_s"), LIMIT_S)
    with serving(tmp_path / "log", **limits) as server:
        stream = request({**LONG, "stream": True})
        with ExitStack() as open_ones:
            for sent in (b"", HEAD, GOOD, GOOD[:-5], request(LONG), stream):
                connection = open_ones.enter_context(closing(server.connect(RCVBUF=4096)))
                connection.sendall(sent)
            time.sleep(0.5)
            server.process.send_signal(signal.SIGTERM)
            assert server.process.wait(20) in (0, -signal.SIGTERM)
