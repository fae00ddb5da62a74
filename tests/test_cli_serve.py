"""`mkref serve` as a process of its own, killed and started again, and `mkref chat` against it."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from mkref.cli import main

BODY = {"model": "nano", "prompt": "def add(a, b):\n    return", "max_tokens": 4, "temperature": 0}


@contextmanager
def serving(port: int) -> Iterator[subprocess.Popen[str]]:
    """A server that listens."""
    command = [sys.executable, "-m", "mkref", "serve", "--port", str(port), "--sms", "1"]
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    )
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        assert f"nano on host: http://127.0.0.1:{port}/v1\n" == line
        yield process
    finally:
        process.kill()
        process.wait()
        assert process.stdout is not None
        process.stdout.close()


def complete(port: int) -> str:
    """The text of one answer."""
    request = urllib.request.Request(
        f"http://127.0.0.1:{port}/v1/completions",
        json.dumps(BODY).encode(),
        {"Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=60) as reply:
        return str(json.load(reply)["choices"][0]["text"])


def test_killed_and_started_again(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """kill -9 leaves nothing behind: the same port serves the same answer; Ctrl-C ends in order."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = int(free.getsockname()[1])
    with serving(port) as process:
        first = complete(port)
        os.kill(process.pid, signal.SIGKILL)
        assert -signal.SIGKILL == process.wait(30)
    with pytest.raises(urllib.error.URLError):
        complete(port)
    with serving(port) as process:
        assert first == complete(port)
        url = f"http://127.0.0.1:{port}/v1"
        with open(os.devnull) as nothing:
            monkeypatch.setattr(sys, "stdin", nothing)
            assert 0 == main(["chat", "--url", url, "--max-tokens", "3"])
        process.send_signal(signal.SIGINT)
        process.wait(60)
    assert "> " in capsys.readouterr().out


def test_nobody_waits_for_a_compiler(
    monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """All is built before the address is told, for any number of rows, and for who draws."""
    cache = tmp_path_factory.mktemp("cache")
    monkeypatch.setenv("MKREF_CACHE", str(cache))
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = int(free.getsockname()[1])
    with serving(port):
        assert list(cache.rglob("sampler*.so"))
        assert 4 == len(list(cache.rglob("megakernel*.so")))


def test_nobody_listens(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """One line that says what to do."""
    import io

    monkeypatch.setattr(sys, "stdin", io.StringIO("hello\n"))
    assert 2 == main(["chat", "--url", "http://127.0.0.1:9/v1"])
    error = capsys.readouterr().err
    assert "does not answer" in error
    assert 1 == error.count("\n")
    monkeypatch.setattr(sys, "stdin", io.StringIO("hello\n"))
    assert 2 == main(["chat", "--url", "file:///etc"])
    assert "must be like http://" in capsys.readouterr().err


def test_a_port_that_is_taken(capsys: pytest.CaptureFixture[str]) -> None:
    """Found before anything is loaded."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        assert 2 == main(["serve", "--port", str(taken.getsockname()[1])])
    assert "cannot listen at 127.0.0.1" in capsys.readouterr().err
