"""kill -9 of a server under load: clients get a clean error, and nothing is left behind."""

from __future__ import annotations

import io
import os
import signal
import socket
import subprocess
import sys
import time
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest

from mkref.cli import main
from tests.tree import ROOT

LONG = {"prompt": "def add(a, b):", "max_tokens": 1500, "ignore_eos": True, "seed": 3}
N = 6


def start(port: int, folder: Path) -> subprocess.Popen[str]:
    """`mkref serve`, in a process group and with a folder for temporary files of its own."""
    command = [sys.executable, "-m", "mkref", "serve", "--port", str(port), "--sms", "1"]
    process = subprocess.Popen(
        command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True,
        start_new_session=True,
        env={**os.environ, "PYTHONPATH": str(ROOT), "TMPDIR": str(folder)},
    )  # fmt: skip
    assert process.stdout is not None
    assert process.stdout.readline()
    return process


def end(process: subprocess.Popen[str]) -> None:
    """kill -9, of this process and no other."""
    process.kill()
    process.wait(30)
    assert process.stdout is not None
    process.stdout.close()


def ask(url: str, stream: bool) -> str:
    """The name of the error that a client gets."""
    body = {**LONG, "stream": stream}
    try:
        with httpx.stream("POST", f"{url}/completions", json=body, timeout=60) as answer:
            for _ in answer.iter_bytes():
                pass
    except httpx.TransportError as error:
        return type(error).__name__
    return "none"


def chat(url: str) -> tuple[int, str, str]:
    """`mkref chat` as a process: status, what it said, what it complained about."""
    command = [sys.executable, "-m", "mkref", "chat", "--url", url, "--max-tokens", "1500"]
    done = subprocess.run(
        command, cwd=ROOT, input="hello\n", capture_output=True, text=True, timeout=120,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    return done.returncode, done.stdout, done.stderr


def test_killed_under_load(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """No client hangs, the port is free, no process and no file stays, and a new one serves."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = int(free.getsockname()[1])
    url = f"http://127.0.0.1:{port}/v1"
    process = start(port, tmp_path)
    try:
        with ThreadPoolExecutor(N + 1) as pool:
            talk: Future[tuple[int, str, str]] = pool.submit(chat, url)
            asked = [pool.submit(ask, url, number % 2 == 0) for number in range(N)]
            metrics = f"http://127.0.0.1:{port}/metrics"
            limit = time.monotonic() + 60
            while f"mkref_running {N + 1}\n" not in httpx.get(metrics, timeout=60).text:
                assert time.monotonic() < limit
                time.sleep(0.1)
            os.kill(process.pid, signal.SIGKILL)
            killed = time.monotonic()
            errors = {done.result(60) for done in asked}
            status, _, complaint = talk.result(60)
            assert time.monotonic() - killed < 15
    finally:
        end(process)
    assert {"RemoteProtocolError", "ReadError"} >= errors
    assert (2, 1) == (status, complaint.count("\n"))
    assert complaint.startswith("mkref: chat: ")
    with pytest.raises(ProcessLookupError):
        os.killpg(process.pid, 0)
    assert [] == [*tmp_path.iterdir()]
    process = start(port, tmp_path)
    try:
        monkeypatch.setattr(sys, "stdin", io.StringIO("hello\n"))
        assert 0 == main(["chat", "--url", url, "--max-tokens", "3"])
        assert capsys.readouterr().out.startswith("> ")
    finally:
        end(process)
