"""A real server as a process of its own: nano and its engine behind uvicorn. No tests here.

    with serving(tmp_path / "log", body_timeout_s=1.0) as server:
        server.post("/v1/completions", {"prompt": "hi"})

Run as a program it is that server; its port goes to standard output, log lines to standard error.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from tests.tree import ROOT

__all__ = ["Server", "serving"]

IDLE = (
    "mkref_answers_in_flight",
    "mkref_running",
    "mkref_waiting",
    'mkref_kv_pages{kind="full",state="used"}',
    'mkref_kv_pages{kind="sliding",state="used"}',
)
"""What must be 0 when nobody asks for anything."""


@dataclass
class Server:
    """A server that runs.

    Attributes:
        port: on 127.0.0.1.
        process: of the server.
        log: where its lines go.
    """

    port: int
    process: subprocess.Popen[str]
    log: Path

    @property
    def url(self) -> str:
        """Without /v1."""
        return f"http://127.0.0.1:{self.port}"

    def post(self, path: str, body: Any) -> httpx.Response:
        """One POST; `body` is JSON, or bytes as they are."""
        content = body if isinstance(body, bytes) else json.dumps(body).encode()
        headers = {"content-type": "application/json"}
        return httpx.post(self.url + path, content=content, headers=headers, timeout=30)

    def metrics(self) -> dict[str, float]:
        """What /metrics says, by name with labels."""
        lines = httpx.get(f"{self.url}/metrics", timeout=30).text.splitlines()
        pairs = (line.rpartition(" ") for line in lines if not line.startswith("#"))
        return {name: float(value) for name, _, value in pairs}

    def tokens(self) -> list[list[int]]:
        """What it answers to a greedy request and to one with a seed."""
        body = {"prompt": "def add(a, b):", "max_tokens": 6, "return_token_ids": True, "seed": 5}
        answers = [self.post("/v1/completions", {**body, "temperature": t}) for t in (0, 1)]
        return [list(answer.json()["choices"][0]["token_ids"]) for answer in answers]

    def check_unharmed(self, tokens: list[list[int]]) -> None:
        """Nothing is under way or kept, no bug was met, and it answers as it did before."""
        end = time.monotonic() + 20
        while True:
            now = self.metrics()
            busy = {name: now[name] for name in IDLE if now[name]}
            if not busy and now["mkref_http_in_flight"] == 1:  # the one that asks
                break
            assert time.monotonic() < end, busy
            time.sleep(0.05)
        assert 1 == now["mkref_healthy"] == now["mkref_accepting"]
        assert 0 == now["mkref_failures_total"]
        assert [] == [name for name in now if 'status="5' in name]
        assert [] == [line for line in self.events() if "traceback" in line]
        assert tokens == self.tokens()

    def connect(self, **options: int) -> socket.socket:
        """A connection by hand; options of the socket by their names without `SO_`."""
        made = socket.socket()
        made.settimeout(20)
        for name, value in options.items():
            made.setsockopt(socket.SOL_SOCKET, getattr(socket, f"SO_{name}"), value)
        made.connect(("127.0.0.1", self.port))
        return made

    def events(self) -> list[dict[str, Any]]:
        """Its log so far."""
        return [json.loads(line) for line in self.log.read_text(encoding="utf-8").splitlines()]


@contextmanager
def serving(
    log: Path, machine: str = "torch", max_context: int = 96, **settings: Any
) -> Iterator[Server]:
    """Start, and kill if it still runs at the end."""
    how = json.dumps({"machine": machine, "max_context": max_context, "settings": settings})
    command = [sys.executable, "-m", "tests.serve_process", how]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    with open(log, "w", encoding="utf-8") as lines:
        process = subprocess.Popen(
            command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=lines, text=True
        )
    assert process.stdout is not None
    try:
        said = process.stdout.readline()
        assert said, log.read_text(encoding="utf-8")
        yield Server(int(said), process, log)
    finally:
        process.kill()
        process.wait()
        process.stdout.close()


def main() -> None:
    """Serve until a signal comes."""
    from mkref.engine import Engine
    from mkref.serve import Service, Settings, create_app
    from mkref.serve.logs import configure_logs
    from mkref.serve.run import open_socket, serve

    how = json.loads(sys.argv[1])
    settings = Settings(**how["settings"])
    configure_logs(level="info")
    listening = open_socket("127.0.0.1", 0)
    # Connections inherit it: who reads nothing is noticed before megabytes are on their way.
    listening.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
    with Engine.load("nano", how["machine"], max_context=how["max_context"]) as engine:
        app = create_app(Service(engine), settings)
        print(listening.getsockname()[1], flush=True)
        serve(app, settings, listening)


if __name__ == "__main__":
    main()
