"""The engine on a GPU, against the interpreter: bit for bit. Run by `make test-gpu`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from mkref.cli import main
from mkref.engine import Engine
from mkref.machine import default_n_sm, resolve
from tests.engines import PROMPTS, bits, save_tiny, tiny_engine

pytestmark = pytest.mark.gpu

SETTINGS: dict[str, Any] = {
    "max_tokens": 100,
    "temperature": [0.0, 0.0, 1.2, 0.8],
    "seed": [0, 1, 2, 3],
    "ignore_eos": True,
    "return_logits": True,
}


def test_auto_is_cuda() -> None:
    """Where a GPU answers, it is what runs, with all of its SMs."""
    assert "cuda" == resolve("auto")
    with tiny_engine("auto", n_sm=default_n_sm("cuda")) as engine:
        assert "cuda" == engine.machine.name
        assert engine.plan.n_sm == default_n_sm("cuda") > 8


def test_gpu_equals_interpreter() -> None:
    """Ragged prompts, greedy and drawn, across pages and the window, on few SMs and on all."""
    with tiny_engine() as engine:
        expected = engine.generate_batch(PROMPTS, **SETTINGS)
    for n_sm in (1, 7, default_n_sm("cuda")):
        with tiny_engine("cuda", n_sm) as engine:
            got = engine.generate_batch(PROMPTS, **SETTINGS)
            assert [c.token_ids for c in expected] == [c.token_ids for c in got]
            assert [bits(c.logits) for c in expected] == [bits(c.logits) for c in got]
            engine.kv.check()


def test_checkpoint_goes_to_the_gpu(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """`Engine.load` and the command line load a folder and generate."""
    folder = save_tiny(tmp_path)
    with Engine.load(folder, "cuda") as engine, Engine.load(folder, "interpreter") as exact:
        settings: dict[str, Any] = {"max_tokens": 20, "ignore_eos": True}
        expected = exact.generate("def f(x):", **settings)
        got = engine.generate("def f(x):", **settings)
        assert (expected.token_ids, expected.text) == (got.token_ids, got.text)
    arguments = ["generate", "--model", str(folder), "--prompt", "def f(x):", "--json"]
    assert 0 == main([*arguments, "--max-tokens", "20", "--ignore-eos"])
    report = json.loads(capsys.readouterr().out)
    assert ("cuda", list(expected.token_ids)) == (report["machine"], report["token_ids"])


def test_trace_has_every_task(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """`mkref trace` on the GPU stamps every task of every SM."""
    folder, file = save_tiny(tmp_path / "model"), tmp_path / "trace.json"
    assert 0 == main(["trace", "--model", str(folder), "--out", str(file), "--json"])
    report = json.loads(capsys.readouterr().out)
    tasks = [e for e in json.loads(file.read_text())["traceEvents"] if e.get("cat") == "task"]
    assert report["tasks"] == len(tasks)
