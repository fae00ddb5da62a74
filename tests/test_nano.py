"""The shipped model `nano`: its files, what training.json says, three forward passes."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from nano_card import render_card
from nano_corpus import SourceFile
from nano_eval import bits_per_byte, greedy, xz_bits_per_byte
from nano_export import load_model
from nano_tokenizer import BOS, EOS, SPECIAL_TOKENS, load_tokenizer
from safetensors.torch import load_file

from mkref.config import NorthConfig, check_kernel_limits
from mkref.paths import models_root
from mkref.reference.model import Reference

if TYPE_CHECKING:
    from nano_model import NanoModel
    from tokenizers import Tokenizer

NANO = models_root() / "nano"
EXCERPT = Path(__file__).resolve().parent / "data" / "nano" / "Lib"
PROMPTS = (
    "import os\n\n\ndef join(base, *parts):\n",
    "class Queue:\n    def __init__(self, maxsize=0):\n        self.maxsize = maxsize\n",
    'def main():\n    """Parse the command line and run."""\n',
)


@pytest.fixture(scope="module", name="record")
def record_fixture() -> dict[str, Any]:
    """The contents of training.json."""
    content: dict[str, Any] = json.loads((NANO / "training.json").read_text(encoding="utf-8"))
    return content


@pytest.fixture(scope="module", name="model")
def model_fixture() -> NanoModel:
    """The shipped weights in the trainer's form."""
    return load_model(NANO)


@pytest.fixture(scope="module", name="reference")
def reference_fixture() -> Reference:
    """The shipped weights in mkref's own forward pass, float32."""
    return Reference(NorthConfig.load(NANO), load_file(str(NANO / "model.safetensors")))


@pytest.fixture(scope="module", name="theirs")
def theirs_fixture() -> Any:
    """The shipped folder as transformers loads it, float32."""
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(NANO, dtype=torch.float32).eval()


@pytest.fixture(scope="module", name="tokenizer")
def tokenizer_fixture() -> Tokenizer:
    """The shipped tokenizer."""
    return load_tokenizer(NANO / "tokenizer.json")


@pytest.fixture(scope="module", name="excerpt")
def excerpt_fixture() -> list[SourceFile]:
    """Five whole held-out modules."""
    return [
        SourceFile(
            path.relative_to(EXCERPT).with_suffix("").as_posix(),
            path.read_text(encoding="utf-8"),
        )
        for path in sorted(EXCERPT.rglob("*.py.txt"))
    ]


def test_sizes(record: dict[str, Any]) -> None:
    """Small enough to live in a repository, and the file that training.json describes."""
    data = (NANO / "model.safetensors").read_bytes()
    assert len(data) <= 9_600_000
    assert sum(path.stat().st_size for path in NANO.iterdir()) <= 12_000_000
    assert record["model"]["bytes"] == len(data)
    assert record["model"]["sha256"] == hashlib.sha256(data).hexdigest()


def test_geometry_is_one_that_the_kernel_takes(record: dict[str, Any]) -> None:
    """Every kind of layer that North has, and no limit of the kernel exceeded."""
    config = NorthConfig.load(NANO)
    check_kernel_limits(config)
    layers = range(config.num_hidden_layers)
    assert (True, False, False, False, False) == tuple(config.is_dense(n) for n in layers)
    assert (False, True, True, True, False) == tuple(config.is_sliding(n) for n in layers)
    assert (True, True, True, True, False) == tuple(config.uses_rope(n) for n in layers)
    assert 8 == config.group_size
    assert record["shape"]["vocab_size"] == config.vocab_size


def test_tokenizer_takes_every_byte(tokenizer: Tokenizer, excerpt: list[SourceFile]) -> None:
    """2048 ids, the special ones first and single, and every text comes back as it went in."""
    assert 2048 == tokenizer.get_vocab_size()
    assert list(range(len(SPECIAL_TOKENS))) == [tokenizer.token_to_id(t) for t in SPECIAL_TOKENS]
    config = NorthConfig.load(NANO)
    assert (config.bos_token_id, config.eos_token_id) == (
        tokenizer.token_to_id(BOS),
        tokenizer.token_to_id(EOS),
    )
    texts = [f.text for f in excerpt] + ["".join(map(chr, range(0x2600)))]
    for text in texts:
        assert text == tokenizer.decode(tokenizer.encode(text).ids)
    for marker in SPECIAL_TOKENS:
        assert 1 == len(tokenizer.encode(marker).ids)


def test_bits_per_byte_are_as_recorded(
    model: NanoModel, tokenizer: Tokenizer, excerpt: list[SourceFile], record: dict[str, Any]
) -> None:
    """Recomputed on held-out modules: the recorded figure of each, and well below xz."""
    measured = bits_per_byte(model, tokenizer, excerpt, batch=4)
    recorded = record["evaluation"]["held_out"]["per_file"]
    for path, actual in measured["per_file"].items():
        assert recorded[path] == pytest.approx(actual, abs=2e-3), path
    xz = xz_bits_per_byte(excerpt)
    assert measured["bits_per_byte"] < 0.8 * min(xz["per_file"], xz["concatenated"])


def test_bits_per_byte_by_way_of_transformers(
    theirs: Any, tokenizer: Tokenizer, excerpt: list[SourceFile], record: dict[str, Any]
) -> None:
    """The figure of a module that fits in one window, from another implementation."""
    shortest = min(excerpt, key=lambda f: len(f.data))
    ids = [tokenizer.token_to_id(BOS), *tokenizer.encode(shortest.text).ids]
    targets = torch.tensor([*ids[1:], tokenizer.token_to_id(EOS)])
    with torch.no_grad():
        logits = theirs(torch.tensor([ids])).logits[0]
    bits = torch.nn.functional.cross_entropy(logits, targets, reduction="sum").item() / 0.6931472
    expected = record["evaluation"]["held_out"]["per_file"][shortest.path]
    assert expected == pytest.approx(bits / len(shortest.data), abs=2e-3)


@pytest.mark.parametrize("prompt", PROMPTS)
def test_greedy_tokens_are_the_same_three_times(
    theirs: Any, reference: Reference, model: NanoModel, tokenizer: Tokenizer, prompt: str
) -> None:
    """transformers, mkref.reference and the trainer's form continue alike, 48 tokens in float32."""
    ids = tokenizer.encode(BOS + prompt).ids
    generated = theirs.generate(
        torch.tensor([ids]), max_new_tokens=48, do_sample=False, eos_token_id=None
    )
    expected = generated[0, len(ids) :].tolist()
    mine = list(ids)
    for _ in range(48):
        mine.append(int(reference(torch.tensor(mine), last_only=True)[-1].argmax()))
    assert expected == mine[len(ids) :]
    assert expected == greedy(model, [ids], 48)[0]


def test_the_three_forward_passes_agree_over_a_whole_window(
    theirs: Any, reference: Reference, model: NanoModel, tokenizer: Tokenizer,
    excerpt: list[SourceFile],
) -> None:  # fmt: skip
    """Logits of 600 tokens, more than two windows of sliding attention."""
    tokens = torch.tensor([tokenizer.encode(excerpt[-1].text).ids[:600]])
    with torch.no_grad():
        expected = theirs(tokens).logits
        trained = model.logits(model(tokens)[0])
    torch.testing.assert_close(trained, expected, rtol=0, atol=2e-3)
    torch.testing.assert_close(reference(tokens), expected, rtol=0, atol=2e-3)


def test_recorded_evaluation_is_worth_shipping(record: dict[str, Any]) -> None:
    """Better than xz both ways, most completions parse, every expert is used."""
    evaluation = record["evaluation"]
    held, xz, parsed = (evaluation[name] for name in ("held_out", "xz", "completions"))
    assert held["bytes"] == record["corpus"]["held_out_bytes"]
    assert held["bits_per_byte"] < min(xz["per_file"], xz["concatenated"])
    assert 200 <= parsed["functions"]
    assert parsed["parse"] > 0.5
    even = 1 / record["shape"]["num_experts"]
    for layer in evaluation["expert_use"]:
        assert sum(layer) == pytest.approx(1, abs=1e-3)
        assert min(layer) > even / 4
        assert max(layer) < even * 3
    assert evaluation["transformers"]["greedy_tokens_equal"]


def test_the_curve_goes_down_to_the_last_step(record: dict[str, Any]) -> None:
    """It covers the whole run and ends far below its beginning, on held-out text too."""
    curve = record["curve"]
    assert record["recipe"]["steps"] == curve[-1]["step"]
    held = [row["held_out_nats"] for row in curve if "held_out_nats" in row]
    assert held[-1] < 0.6 * held[0]
    assert curve[-1]["train_nats"] < 0.6 * curve[0]["train_nats"]


def test_the_excerpt_was_held_out(record: dict[str, Any], excerpt: list[SourceFile]) -> None:
    """corpus.txt is the manifest that was trained on, and the excerpt is in its held-out half."""
    manifest = (NANO / "corpus.txt").read_bytes()
    assert record["corpus"]["manifest_sha256"] == hashlib.sha256(manifest).hexdigest()
    rows = [line.split("\t") for line in manifest.decode("utf-8").splitlines()]
    split = {path: (part, digest, int(size)) for part, digest, size, path in rows}
    assert len(rows) == len(split)
    assert {path for path, row in split.items() if row[0] == "held"} == set(
        record["corpus"]["held_out"]
    )
    assert 5 == len(excerpt)
    for f in excerpt:
        assert ("held", f.sha256[:16], len(f.data)) == split[f.path]
        assert record["corpus"]["held_out"][f.path] == f.sha256


def test_the_model_card_is_what_the_script_writes(record: dict[str, Any]) -> None:
    """No number on the card can drift from training.json."""
    assert render_card(record) == (NANO / "README.md").read_text(encoding="utf-8")
