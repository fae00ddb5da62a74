"""What protects the server: key, limits, time-outs, clients that leave, errors, going down."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from typing import TYPE_CHECKING, Any

import pytest

from mkref.errors import MachineError, QueueFullError, RequestError, UnavailableError
from mkref.serve import Settings, create_app
from mkref.serve.service import Event, Usage
from tests.serve_fakes import FakeService, call, client, ids

if TYPE_CHECKING:
    import httpx

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
HI = {"messages": [{"role": "user", "content": "hi"}]}


def get(path: str, headers: dict[str, str] | None = None, **settings: Any) -> httpx.Response:
    """One GET."""

    async def run() -> httpx.Response:
        async with client(**settings) as made:
            return await made.get(path, headers=headers)

    return asyncio.run(run())


@pytest.mark.parametrize(
    ("sent", "status"),
    [(None, 401), ("Bearer wrong", 401), ("secret", 401), ("Bearer secret ", 401),
     ("Basic secret", 401), ("bearer secret", 200), ("Bearer secret", 200)],
)  # fmt: skip
def test_key(sent: str | None, status: int) -> None:
    """Below /v1 the key must be right; nothing of it is in the answer."""
    headers = {} if sent is None else {"authorization": sent}
    response = get("/v1/models", headers, api_key="secret")
    assert status == response.status_code
    if status == 401:
        assert "invalid_api_key" == response.json()["error"]["code"]
        assert "secret" not in response.text
        assert "Bearer" == response.headers["www-authenticate"]


def test_open_paths() -> None:
    """Whoever watches the server needs no key."""
    for path in ("/health", "/metrics"):
        assert 200 == get(path, api_key="secret").status_code


def test_models() -> None:
    """One model, under its name, with its context."""
    listed = get("/v1/models", model="a/b", max_context=100).json()
    (model,) = listed["data"]
    assert ("list", "a/b", "model", 100) == (
        listed["object"], model["id"], model["object"], model["max_model_len"]
    )  # fmt: skip
    assert model["created"] > 1.7e9
    created = {"created": model["created"]}
    assert model == get("/v1/models/a/b", model="a/b", max_context=100).json() | created


@pytest.mark.parametrize(("sent", "kept"), [("my-id.7", True), ("a b", False), ("x" * 129, False)])
def test_request_id(sent: str, kept: bool) -> None:
    """A client's id comes back if a log can hold it; every response has one."""
    got = get("/health", {"x-request-id": sent}).headers["x-request-id"]
    assert kept == (sent == got)
    assert got.startswith("req_") != kept
    assert call(CHAT, b"{").headers["x-request-id"].startswith("req_")


def test_context_limit() -> None:
    """The operator's limit holds where the engine's is larger."""
    body = {"prompt": [1] * 90, "max_tokens": 20}
    error = call(TEXT, body, max_context=100).json()["error"]
    assert ("max_tokens", "context_length_exceeded") == (error["param"], error["code"])
    assert "at most 10" in error["message"]
    assert 200 == call(TEXT, {**body, "max_tokens": 10}, max_context=100).status_code


def test_too_many_answers_at_a_time() -> None:
    """Beyond the limit there is a 429, and the place is free again when an answer ends."""

    async def run() -> list[int]:
        service = FakeService(lambda _: [*ids("start_text", "a"), 0.2, *ids("b", "end_turn")])
        async with client(service, max_concurrency=2) as made:
            tasks = [made.post(CHAT, json=HI) for _ in range(3)]
            first = [response.status_code for response in await asyncio.gather(*tasks)]
            again = await made.post(CHAT, json={**HI, "n": 2})
            never = await made.post(CHAT, json={**HI, "n": 3})
            assert "n" == never.json()["error"]["param"]
            return [*sorted(first), again.status_code, never.status_code]

    assert [200, 200, 429, 200, 400] == asyncio.run(run())


@pytest.mark.parametrize(
    ("error", "status", "kind", "words"),
    [
        (QueueFullError("service: 9 requests wait"), 429, "rate_limit_error", "9 requests wait"),
        (UnavailableError("service: down"), 503, "service_unavailable_error", "down"),
        (RequestError("prompt: too long for the cache"), 400, "invalid_request_error", "too long"),
        (MachineError("hang: SM 3"), 500, "server_error", "hang: SM 3"),
        (ZeroDivisionError("private"), 500, "server_error", "an error of the server"),
    ],
)
def test_errors_at_submission(error: Exception, status: int, kind: str, words: str) -> None:
    """Each has its status, streamed or not; a bug tells nothing of itself."""
    for stream in (False, True):
        service = FakeService()
        service.error = error
        response = call(CHAT, {**HI, "stream": stream}, service)
        told = response.json()["error"]
        assert (status, kind) == (response.status_code, told["type"])
        assert words in told["message"]
        assert "private" not in response.text
        assert (status in (429, 503)) == ("retry-after" in response.headers)


def ended(reason: str, error: Any = None) -> FakeService:
    """A service whose answers end badly after a word."""
    last = Event((), "", None, reason, Usage(3, 0, 1), error)
    return FakeService(lambda _: [*ids("start_text", "a"), last])


@pytest.mark.parametrize(
    ("service", "status", "code"),
    [
        (ended("error", MachineError("hang: SM 3")), 500, "machine_error"),
        (ended("error", UnavailableError("service: closed")), 503, "unavailable"),
        (ended("deadline"), 408, "deadline_exceeded"),
        (ended("cancelled"), 503, "unavailable"),
        (FakeService(lambda _: [*ids("start_text", "a"), ZeroDivisionError()]), 500, "internal"),
    ],
)
def test_errors_half_way(service: FakeService, status: int, code: str) -> None:
    """A whole response has the status; a stream ends with the error instead of the end mark."""
    for n in (1, 2):
        response = call(CHAT, {**HI, "n": n}, service)
        assert (status, code) == (response.status_code, response.json()["error"]["code"])
        streamed = call(CHAT, {**HI, "n": n, "stream": True}, service)
        assert 200 == streamed.status_code
        events = streamed.text.strip().split("\n\n")
        assert code == json.loads(events[-1].removeprefix("data: "))["error"]["code"]
        assert "[DONE]" not in streamed.text
    assert len(service.streams) == service.closed


def test_deadline_is_set() -> None:
    """The operator's time limit goes with every request."""
    service = FakeService()
    call(CHAT, HI, service, request_timeout_s=5.0)
    deadline = service.requests[0].deadline
    assert deadline is not None
    assert 0 < deadline


class Client:
    """An ASGI client by hand: it sends what it wants and leaves when it wants.

    Attributes:
        messages: what the app sent.
        left: set when the client leaves.
        blocked: while set, the client takes nothing.
    """

    def __init__(self, body: Any) -> None:
        self.body = json.dumps(body).encode()
        self.messages: list[Any] = []
        self.left = asyncio.Event()
        self.blocked = False
        self._sent = False

    async def receive(self) -> Any:
        """The body, then nothing until the client leaves."""
        if not self._sent:
            self._sent = True
            return {"type": "http.request", "body": self.body, "more_body": False}
        await self.left.wait()
        return {"type": "http.disconnect"}

    async def send(self, message: Any) -> None:
        """Take a message, or do not."""
        while self.blocked:
            await asyncio.sleep(0.01)
        self.messages.append(message)

    async def post(self, service: FakeService, **settings: Any) -> None:
        """One request to an app of its own."""
        app = create_app(service, Settings(**settings))  # type: ignore[arg-type]
        scope = {
            "type": "http", "method": "POST", "path": CHAT, "raw_path": CHAT.encode(),
            "query_string": b"", "headers": [(b"content-type", b"application/json")],
            "http_version": "1.1", "scheme": "http", "client": ("127.0.0.1", 1),
            "server": ("127.0.0.1", 2), "asgi": {"version": "3.0"},
        }  # fmt: skip
        await app(scope, self.receive, self.send)


def slow() -> FakeService:
    """A service that says a word and then thinks for a minute."""
    return FakeService(lambda _: [*ids("start_text", "a"), 60.0, *ids("b", "end_turn")])


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("n", [1, 3])
def test_client_that_leaves(stream: bool, n: int) -> None:
    """Every answer of a client that has left is ended, streamed or not, and its place is free."""

    async def run() -> None:
        service, leaver = slow(), Client({**HI, "stream": stream, "n": n})
        task = asyncio.create_task(leaver.post(service))
        while len(service.streams) < n or (stream and len(leaver.messages) < 2):
            await asyncio.sleep(0.01)
        leaver.left.set()
        await asyncio.wait_for(task, 5)
        assert [True] * n == [made.cancelled for made in service.streams]
        assert n == service.closed
        # 499 is for the log: nobody reads it.
        assert (200 if stream else 499) == leaver.messages[0]["status"]

    asyncio.run(run())


def test_client_that_takes_nothing() -> None:
    """After a time it is dropped, and its answer is ended."""

    async def run() -> None:
        service, sleeper = slow(), Client({**HI, "stream": True})
        sleeper.blocked = True
        await asyncio.wait_for(sleeper.post(service, write_timeout_s=0.2), 5)
        assert [] == sleeper.messages
        assert service.streams[0].cancelled

    asyncio.run(run())


def test_silent_stream_sends_comments() -> None:
    """Between two words a comment comes now and then; it is no event for a client."""

    async def run() -> list[bytes]:
        service = FakeService(lambda _: [*ids("start_text", "a"), 0.5, *ids("b", "end_turn")])
        listener = Client({**HI, "stream": True})
        await asyncio.wait_for(listener.post(service, keep_alive_s=0.1), 5)
        return [message.get("body", b"") for message in listener.messages]

    bodies = asyncio.run(run())
    assert 2 <= sum(body.startswith(b": ") for body in bodies) <= 6
    assert bodies[-2].endswith(b"data: [DONE]\n\n")


def test_slow_body() -> None:
    """A client that does not finish its request gets a 408."""

    async def parts() -> AsyncIterator[bytes]:
        yield b'{"messages": '
        await asyncio.sleep(60)

    async def run() -> httpx.Response:
        async with client(body_timeout_s=0.2) as made:
            headers = {"content-type": "application/json"}
            return await made.post(CHAT, content=parts(), headers=headers)

    response = asyncio.run(run())
    assert (408, "body_timeout") == (response.status_code, response.json()["error"]["code"])


def test_large_body_without_length() -> None:
    """The limit holds for bodies that do not say how long they are."""

    async def parts() -> AsyncIterator[bytes]:
        for _ in range(100):
            yield b" " * 1000

    async def run() -> httpx.Response:
        async with client(max_body_bytes=50_000) as made:
            headers = {"content-type": "application/json"}
            return await made.post(CHAT, content=parts(), headers=headers)

    response = asyncio.run(run())
    assert (413, "body_too_large") == (response.status_code, response.json()["error"]["code"])


def test_going_down() -> None:
    """When the server shuts down, running answers may end, and then the service is closed."""

    async def run() -> FakeService:
        service = FakeService()
        app = create_app(service, Settings(drain_timeout_s=7))  # type: ignore[arg-type]
        async with app.router.lifespan_context(app):
            assert service.drained is None
        return service

    assert 7 == asyncio.run(run()).drained


@pytest.mark.parametrize(
    ("healthy", "accepting", "status", "word"),
    [(True, True, 200, "ok"), (True, False, 503, "going down"), (False, True, 503, "broken")],
)
def test_health(healthy: bool, accepting: bool, status: int, word: str) -> None:
    """A router in front sees whether requests would be taken."""

    async def run() -> httpx.Response:
        service = FakeService()
        service.healthy, service.accepting = healthy, accepting
        async with client(service) as made:
            return await made.get("/health")

    response = asyncio.run(run())
    assert (status, {"status": word}) == (response.status_code, response.json())


def test_cors() -> None:
    """A web page may call from the origins that the operator names, and from no others."""

    async def run(origin: str) -> str | None:
        async with client(cors_origins=("https://a.example",), api_key="k") as made:
            asked = {"origin": origin, "access-control-request-method": "POST"}
            response = await made.options(CHAT, headers=asked)
            return response.headers.get("access-control-allow-origin")

    assert "https://a.example" == asyncio.run(run("https://a.example"))
    assert asyncio.run(run("https://b.example")) is None


@pytest.mark.parametrize(
    ("name", "value"),
    [("max_body_bytes", 0), ("max_depth", -1), ("max_concurrency", 1.5), ("max_context", 1),
     ("body_timeout_s", 0), ("keep_alive_s", float("nan")), ("request_timeout_s", -1),
     ("temperature", 3), ("temperature", float("nan")), ("top_p", 0), ("chat_format", "x"),
     ("model", " "), ("api_key", ""), ("api_key", "é")],
)  # fmt: skip
def test_wrong_settings(name: str, value: Any) -> None:
    """An operator's mistake is one line that names the setting."""
    with pytest.raises(RequestError, match=f"^{name}: "):
        Settings(**{name: value})


def test_key_is_not_shown() -> None:
    """Settings that are printed do not print the key."""
    assert "secret" not in repr(Settings(api_key="secret"))
