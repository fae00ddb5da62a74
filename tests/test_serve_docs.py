"""docs/serving.md: its tables of fields are the schema's, and its examples run."""

from __future__ import annotations

import asyncio
import json
import os
import re
import subprocess
import sys
from argparse import _SubParsersAction
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from mkref.cli.main import build_parser
from mkref.serve.schema import REFUSED, CompletionRequest
from mkref.serve.schema_chat import ChatRequest
from mkref.serve.settings import Settings
from tests.serve_fakes import call, client
from tests.serve_live import Live, live
from tests.tree import ROOT

if TYPE_CHECKING:
    from mkref.serve.schema import Generation

PAGE = ROOT / "docs" / "serving.md"
FORMS: dict[str, type[Generation]] = {"chat": ChatRequest, "completions": CompletionRequest}


def page() -> str:
    """The page."""
    return PAGE.read_text(encoding="utf-8")


def table(kind: str) -> str:
    """The table of an endpoint's fields as it must stand in the page."""
    lines = ["| field | support | what it does |", "|---|---|---|"]
    for name, field in FORMS[kind].model_fields.items():
        extra = field.json_schema_extra
        assert isinstance(extra, dict)
        lines.append(f"| `{name}` | {extra['x-support']} | {field.description} |")
    lines += [f"| `{name}` | refused | {reason} |" for name, reason in REFUSED[kind].items()]
    return "\n".join(lines)


@pytest.mark.parametrize("kind", FORMS)
def test_field_tables(kind: str) -> None:
    """Every field, how it is supported, and what it does, in the order of the schema."""
    begin, end = f"<!-- fields: {kind} -->\n", "\n<!-- end -->"
    written = page().partition(begin)[2].partition(end)[0]
    assert table(kind) == written


@pytest.mark.parametrize("kind", FORMS)
def test_every_field_says_something(kind: str) -> None:
    """No field is without a kind of support and a word about what it does."""
    for name, field in FORMS[kind].model_fields.items():
        extra = field.json_schema_extra
        assert isinstance(extra, dict)
        assert extra["x-support"] in ("yes", "mkref", "ignored"), name
        assert field.description, name
    assert set() == REFUSED[kind].keys() & FORMS[kind].model_fields.keys()


def test_settings_are_listed() -> None:
    """Every setting of the endpoint has a row."""
    listed = re.findall(
        r"^\| `(\w+)` \| [^|]+ \| [^|]+ \|$", page().partition("## Limits")[2], re.M
    )
    own = set(Settings.__dataclass_fields__) - {"created"}
    assert own <= {*listed}


@pytest.fixture(name="server", scope="module")
def server_fixture() -> Iterator[Live]:
    """A server for the examples."""
    with live() as server:
        yield server


def blocks(language: str) -> list[str]:
    """Code blocks of the page."""
    return re.findall(rf"```{language}\n(.*?)```", page(), re.DOTALL)


@pytest.mark.parametrize("example", blocks("bash"))
def test_curl_examples(example: str, server: Live) -> None:
    """Each command of the page is answered with what is no error."""
    script = example.replace("http://localhost:8000/v1", server.url)
    script = script.replace("http://localhost:8000", server.url.removesuffix("/v1"))
    done = subprocess.run(
        ["bash", "-ec", script.replace("curl ", "curl -sS --fail-with-body --max-time 60 ")],
        capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert 0 == done.returncode, done.stdout + done.stderr
    assert done.stdout
    assert '"error"' not in done.stdout


@pytest.mark.parametrize("example", blocks("python"))
def test_python_examples(example: str, server: Live, tmp_path: Path) -> None:
    """Each program of the page runs and prints something."""
    program = tmp_path / "example.py"
    program.write_text(example.replace("http://localhost:8000/v1", server.url))
    done = subprocess.run(
        [sys.executable, str(program)], cwd=ROOT, capture_output=True, text=True, timeout=120,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    assert 0 == done.returncode, done.stderr
    assert done.stdout.strip()


def test_error_example_is_real() -> None:
    """The error that the page shows is the one that the server gives."""
    (shown,) = [json.loads(block) for block in blocks("json") if '"error"' in block]
    body = {"messages": [{"role": "user", "content": "hi"}], "top_p": 2}
    assert shown == call("/v1/chat/completions", body).json()


def test_options_are_listed() -> None:
    """Every option of `mkref serve` has its place in the table, and no other."""
    commands = next(a for a in build_parser()._actions if isinstance(a, _SubParsersAction))
    options = {o for a in commands.choices["serve"]._actions for o in a.option_strings}
    rows = page().partition("## Options")[2].partition("\n\n`--exact`")[0]
    listed = re.findall(r"`(--[a-z-]+)", rows.replace("option of `mkref serve`", ""))
    assert options - {"-h", "--help"} == {*listed}


def test_metrics_are_listed() -> None:
    """Every metric is named."""

    async def run() -> str:
        async with client() as made:
            await made.get("/health")
            return (await made.get("/metrics")).text

    names = set(re.findall(r"^# TYPE mkref_(\w+) ", asyncio.run(run()), re.M))
    assert names == {
        *re.findall(
            r"`(\w+)`", page().partition("beginning with `mkref_`:")[2].partition("\n\n")[0]
        )
    }


def test_error_codes_are_listed() -> None:
    """Every code that the sources have is in the table of errors."""
    sources = (ROOT / "mkref" / "serve").glob("*.py")
    found = {
        c for s in sources for c in re.findall(r'\bcode = "(\w+)"|\bcode="(\w+)"', s.read_text())
    }
    codes = {a or b for a, b in found} - {"client_gone"}
    table_of_errors = page().partition("## Errors")[2].partition("## Limits")[0]
    assert set() == codes - {*re.findall(r"`(\w+)`", table_of_errors)}
