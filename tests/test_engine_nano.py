"""The shipped model through the engine: it writes the same text on every machine."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from mkref.cli import main
from mkref.engine import Engine
from mkref.engine.load import model_folder, models
from tests.engines import bits

if TYPE_CHECKING:
    from mkref.engine import Completion

PROMPTS = (
    "import os\n\n\ndef join(base, *parts):\n",
    "class Queue:\n    def __init__(self, maxsize=0):\n",
)
SETTINGS: dict[str, Any] = {"max_tokens": 24, "return_logits": True}
NEAR_TIE = 0.05
"""Two best logits closer than this may change places between torch's sums and the kernel's."""


@pytest.fixture(name="expected", scope="module")
def expected_fixture() -> list[Completion]:
    """Greedy completions by the kernel on the CPU, on two SMs."""
    with Engine.load("nano", "host", 2) as engine:
        return engine.generate_batch(PROMPTS, **SETTINGS)


def test_it_comes_with_mkref() -> None:
    """By name, with config, weights and tokenizer."""
    assert ["nano"] == models()
    names = {file.name for file in model_folder("nano").iterdir()}
    assert {"config.json", "model.safetensors", "tokenizer.json"} <= names


def test_it_writes_python(expected: list[Completion]) -> None:
    """Indented code that goes on from the prompt; prompts begin with the model's first token."""
    for done in expected:
        assert 1 == done.prompt_token_ids[0]
        assert done.text.startswith(("    ", "\n    ", " "))
        assert "\ufffd" not in done.text
        assert np.isfinite(done.logits).all()  # type: ignore[arg-type]


def test_interpreter_agrees_bit_for_bit(expected: list[Completion]) -> None:
    """The same bits of all logits from NumPy."""
    with Engine.load("nano", "interpreter") as engine:
        got = engine.generate_batch(PROMPTS, **SETTINGS)
    assert [c.token_ids for c in expected] == [c.token_ids for c in got]
    assert [bits(c.logits) for c in expected] == [bits(c.logits) for c in got]


def test_torch_agrees_but_for_near_ties(expected: list[Completion]) -> None:
    """The reference takes the same tokens, up to the first step whose two best are a near-tie."""
    with Engine.load("nano", "torch") as engine:
        for ours, theirs in zip(expected, engine.generate_batch(PROMPTS, **SETTINGS), strict=True):
            assert ours.logits is not None
            gaps = np.diff(np.sort(ours.logits, axis=1)[:, -2:], axis=1)[:, 0]
            ties = np.flatnonzero(gaps < NEAR_TIE)
            sure = int(ties[0]) if len(ties) else len(ours.token_ids)
            assert ours.token_ids[:sure] == theirs.token_ids[:sure]
            assert sure > 0


def test_command_line_takes_it_by_default(
    expected: list[Completion], capsys: pytest.CaptureFixture[str]
) -> None:
    """`mkref generate --prompt` needs nothing else."""
    arguments = ["generate", "--prompt", PROMPTS[0], "--max-tokens", "24", "--machine", "host"]
    assert 0 == main([*arguments, "--sms", "2", "--json"])
    report = json.loads(capsys.readouterr().out)
    assert list(expected[0].token_ids) == report["token_ids"]
    assert expected[0].text == report["text"]
