"""Wrong arguments of `serve`, `chat`, `bench serve`, plans and traces: one line that names the
option, the value and what would be right, and status 2; and the options that were missing once.
"""

from __future__ import annotations

import io
import json
import sys
from pathlib import Path

import pytest

from mkref.cli import main
from mkref.cli.main import build_parser

PORT = "a whole number from 0 to 65535"
LEAST = "a whole number of at least 1"
URL = "must be like http://127.0.0.1:8000/v1"
TWO = "must be a number from 0 to 2"
TIME = "must be a number from 0.001 to 1e+09"
ASCII = "must be printable ASCII"
WRONG: tuple[tuple[str, str, str, str], ...] = (
    # The command, the option, the value, and what would be right.
    ("serve", "--port", "-1", PORT),
    ("serve", "--port", "65536", PORT),
    ("serve", "--port", "http", PORT),
    ("serve", "--host", "", "must be a name"),
    ("serve", "--host", "no.such.host.invalid", "no address of this computer"),
    ("serve", "--model", "nanoo", "neither a folder nor a model"),
    ("serve", "--model", "", "model: ''"),
    ("serve", "--model-id", " ", "must be a name"),
    ("serve", "--geometry", "south", "choose from"),
    ("serve", "--rows", "9", "choose from"),
    ("serve", "--max-queue", "0", LEAST),
    ("serve", "--max-queue", "many", LEAST),
    ("serve", "--request-timeout", "0", TIME),
    ("serve", "--request-timeout", "nan", TIME),
    ("serve", "--request-timeout", "soon", TIME),
    ("serve", "--log-level", "loud", "choose from"),
    ("serve", "--machine", "tpu", "cuda"),
    ("serve", "--sms", "0", "from 1 to 1024"),
    ("serve", "--context", "1", "at least 2"),
    ("serve", "--context", "99999", "2048"),
    ("serve", "--max-context", "99999", "2048"),
    ("chat", "--url", "", URL),
    ("chat", "--url", "file:///etc/passwd", URL),
    ("chat", "--url", "http://x:99999/v1", URL),
    ("chat", "--model", "", "must be a name"),
    ("chat", "--model", "nanoo", "neither a folder nor a model"),
    ("chat", "--max-tokens", "0", LEAST),
    ("chat", "--temperature", "2.5", TWO),
    ("chat", "--temperature", "warm", TWO),
    ("chat", "--machine", "tpu", "cuda"),
    ("chat", "--context", "99999", "2048"),
    ("bench serve", "--url", "localhost:8000", URL),
    ("bench serve", "--url", "http://", URL),
    ("bench serve", "--model", "", "must be a name"),
    ("bench serve", "--concurrency", "0", LEAST),
    ("bench serve", "--concurrency", "x", LEAST),
    ("bench serve", "--rate", "0", "from 0.001 to 10000"),
    ("bench serve", "--rate", "fast", "must be 0 or a positive number"),
    ("bench serve", "--requests", "0", "from 1 to 1000000"),
    ("bench serve", "--warm-up", "-1", "from 0 to 1000"),
    ("bench serve", "--prompt-tokens", "9-2", "a range of them such as 16-200"),
    ("bench serve", "--max-tokens", "0", "a range of them such as 16-200"),
    ("bench serve", "--token-ids", "4", "at least 5"),
    ("bench serve", "--temperature", "-1", TWO),
    ("bench serve", "--seed", "x", "from 0 to"),
    ("bench serve", "--json", "/no/such/folder/x.json", "must be a file in a folder that exists"),
    ("plan", "--rows", "0", "from 1 to 32"),
    ("trace", "--out", "", "must be a file in a folder that exists"),
    ("verify", "--rows", "9", "choose from"),
    ("verify", "--context", "99999", "2048"),
)  # fmt: skip


@pytest.mark.parametrize(
    ("command", "option", "value", "right"), WRONG, ids=[f"{w[0]} {w[1]} {w[2]}" for w in WRONG]
)
def test_one_line(
    command: str, option: str, value: str, right: str,
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    """The option by its name (or that of the setting), its value, and what would be right."""
    monkeypatch.setattr(sys, "stdin", io.StringIO("hello\n"))
    port = ["--port=0"] if command == "serve" and option != "--port" else []
    assert 2 == main([*command.split(), *port, f"{option}={value}"])
    told = capsys.readouterr()
    assert 1 == told.err.count("\n")
    assert told.err.startswith("mkref")
    assert "Traceback" not in told.err
    names = (option, option.removeprefix("--"), "max_context")
    assert any(f"{name}: " in told.err or f"{name} " in told.err for name in names)
    assert value in told.err
    assert right in told.err


@pytest.mark.parametrize("command", ["serve", "chat", "bench serve"])
@pytest.mark.parametrize("key", ["", "sécret", "se cret", "secret\r\nX: y"])
def test_keys_are_not_repeated(command: str, key: str, capsys: pytest.CaptureFixture[str]) -> None:
    """A key that no header can hold is refused, without a word of it."""
    assert 2 == main([*command.split(), f"--api-key={key}"])
    error = capsys.readouterr().err
    assert "--api-key: must be printable ASCII" in error
    assert "cret" not in error


@pytest.mark.parametrize(
    "arguments",
    [
        ["serve", "--exact", "--fast"],
        ["serve", "--model", "other", "--geometry", "north"],
        ["bench", "serve", "--rate", "1", "--concurrency", "1"],
        ["chat", "--url", "http://127.0.0.1:9/v1", "--context", "64"],
        ["chat", "--url", "http://127.0.0.1:9/v1", "--machine", "torch"],
        ["chat", "--url", "http://127.0.0.1:9/v1", "--sms", "1"],
    ],
)
def test_not_together(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    """Both options are named."""
    assert 2 == main(arguments)
    error = capsys.readouterr().err
    assert 1 == error.count("\n")
    assert all(word in error for word in arguments if word.startswith("--"))


def test_spellings(monkeypatch: pytest.MonkeyPatch) -> None:
    """--fast is what --exact is not, and the default; --max-context is --context."""
    monkeypatch.setenv("MKREF_API_KEY", "")

    def parsed(*arguments: str) -> tuple[bool, int | None, str | None]:
        options = build_parser().parse_args(["serve", *arguments])
        return options.exact, options.context, options.api_key

    assert (False, None, None) == parsed() == parsed("--fast")
    assert (True, 99, None) == parsed("--exact", "--max-context", "99")
    assert parsed("--context", "99") == parsed("--max-context", "99")


def test_chat_without_a_server(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The model is loaded in this process, and a conversation goes on; mistakes are told."""
    monkeypatch.setattr(sys, "stdin", io.StringIO("hello\nand?\n/reset\nhello\n/quit\n"))
    here = ["chat", "--machine", "torch", "--temperature", "0", "--max-tokens", "5"]
    assert 0 == main([*here, "--context", "96", "--system", "be short"])
    answers = [part.strip() for part in capsys.readouterr().out.split("> ")]
    assert 6 == len(answers)
    assert answers[1]
    assert answers[1] == answers[4]  # after the reset
    monkeypatch.setattr(sys, "stdin", io.StringIO("hello\n"))
    assert 2 == main([*here, "--context", "8"])
    error = capsys.readouterr().err
    assert "mkref: max_tokens: 5; must be at most" in error or "mkref: messages: " in error
    assert 1 == error.count("\n")


def test_rows_and_context_of_plans(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A plan for more rows is made and proved; a file is not proved for what it is not."""
    file = tmp_path / "plan.json"
    assert 0 == main(["plan", "--sms", "2", "--rows", "12", "--out", str(file)])
    assert "with 12 of 16 rows" in capsys.readouterr().out
    assert 0 == main(["verify", str(file), "--rows", "16"])
    assert 0 == main(["verify", "--sms", "2", "--rows", "32", "--json"])
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["ok"]
    assert 2 == main(["verify", str(file), "--rows", "8"])
    assert "mkref: --rows: 8; the plan in the file has 16\n" == capsys.readouterr().err
    assert 2 == main(["verify", str(file), "--context", "4096"])
    assert "--context: 4096 tokens; the model has 2048 positions" in capsys.readouterr().err
