"""The trainer of `nano`: repeatable, resumable, and true to the architecture, at toy size."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch
import train_nano
from nano_corpus import load_corpus, write_tar
from nano_data import Batches, chat_documents, encode_documents
from nano_eval import bits_per_byte, greedy, xz_bits_per_byte
from nano_export import config_json, load_model, save_model, to_tensors, weights_sha256
from nano_functions import Completion, cut_completion, find_functions, parses
from nano_model import NanoModel, chosen_mask
from nano_tokenizer import SPECIAL_TOKENS, load_tokenizer, train_tokenizer
from nano_train import Trainer

from mkref.config import NorthConfig
from mkref.paths import models_root
from mkref.reference.model import Reference

EXCERPT = Path(__file__).resolve().parent / "data" / "nano" / "Lib"
SHAPE = train_nano.TINY_SHAPE
RECIPE = dataclasses.replace(train_nano.TINY_RECIPE, steps=8, warmup=3)


def excerpt(folder: Path) -> Path:
    """The excerpt as a Lib folder."""
    for path in EXCERPT.rglob("*.py.txt"):
        target = folder / path.relative_to(EXCERPT).with_suffix("")
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(path.read_bytes())
    return folder


@pytest.fixture(name="batches")
def batches_fixture() -> Batches:
    """The excerpt as training text, with the shipped tokenizer."""
    tokenizer = load_tokenizer(models_root() / "nano" / "tokenizer.json")
    texts = [path.read_text(encoding="utf-8") for path in sorted(EXCERPT.rglob("*.py.txt"))]
    return Batches(encode_documents(tokenizer, texts), RECIPE.batch, RECIPE.context, RECIPE.seed)


def trainer_of(batches: Batches) -> Trainer:
    """A toy run on the CPU, at its first step."""
    return Trainer(RECIPE, SHAPE, batches, torch.device("cpu"), compiled=False)


def random_model(seed: int) -> NanoModel:
    """A toy model with weights large enough that every path matters, rounded to bfloat16."""
    model = NanoModel(SHAPE)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for p in model.parameters():
            noise = torch.empty(p.shape).normal_(0.0, 0.1, generator=generator)
            p.copy_((noise + (p.dim() == 1)).bfloat16().float())
    return model.eval()


def test_two_runs_give_the_same_bits(batches: Batches) -> None:
    """The weights depend on the seed and the step alone."""
    hashes = []
    for _ in range(2):
        trainer = trainer_of(batches)
        trainer.run(RECIPE.steps, 4, lambda row: None)
        hashes.append(weights_sha256(trainer.model))
    other = dataclasses.replace(RECIPE, seed=2)
    third = Trainer(other, SHAPE, batches, torch.device("cpu"), compiled=False)
    third.run(RECIPE.steps, 4, lambda row: None)
    assert hashes[0] == hashes[1]
    assert hashes[0] != weights_sha256(third.model)


def test_a_resumed_run_equals_an_uninterrupted_one(batches: Batches, tmp_path: Path) -> None:
    """Run, interrupt, resume: the same bits and the same curve, dropout and moments included."""
    whole = trainer_of(batches)
    whole.run(RECIPE.steps, 2, lambda row: None)
    first = trainer_of(batches)
    first.run(4, 2, lambda row: None)
    first.save(tmp_path / "checkpoint.pt")
    second = trainer_of(batches)
    assert RECIPE == second.load(tmp_path / "checkpoint.pt")
    second.run(RECIPE.steps, 2, lambda row: None)
    assert weights_sha256(whole.model) == weights_sha256(second.model)
    assert whole.curve == second.curve


def test_a_checkpoint_of_another_recipe_is_refused(batches: Batches, tmp_path: Path) -> None:
    """The message names the field and both values."""
    trainer_of(batches).save(tmp_path / "checkpoint.pt")
    other = dataclasses.replace(RECIPE, dropout=0.3)
    trainer = Trainer(other, SHAPE, batches, torch.device("cpu"), compiled=False)
    with pytest.raises(ValueError, match="dropout is 0.1, this run has 0.3"):
        trainer.load(tmp_path / "checkpoint.pt")


def test_the_trial_leaves_the_run_at_its_beginning(batches: Batches) -> None:
    """Timing and the repeat test change nothing: afterwards the weights are the initial ones."""
    trainer = trainer_of(batches)
    before = weights_sha256(trainer.model)
    seconds, repeats = trainer.trial(lambda text: None)
    assert seconds > 0
    assert repeats
    assert (0, before) == (trainer.step, weights_sha256(trainer.model))


def test_training_learns(batches: Batches) -> None:
    """Eight steps already take the loss well below that of a uniform guess, ln 2048 = 7.62."""
    trainer = trainer_of(batches)
    trainer.run(RECIPE.steps, RECIPE.steps, lambda row: None)
    trainer.model.eval()
    loss = trainer.model.losses(*batches.step(0, torch.device("cpu")))[0].item()
    assert loss < 7.5


def test_batches_are_a_function_of_seed_and_step(batches: Batches) -> None:
    """Any order of asking gives the same batch; an epoch's windows are all different."""
    device = torch.device("cpu")
    late = batches.step(batches.steps_per_epoch + 1, device)[0]
    early = batches.step(0, device)
    assert late.equal(batches.step(batches.steps_per_epoch + 1, device)[0])
    assert early[0].equal(batches.step(0, device)[0])
    assert early[0][:, 1:].equal(early[1][:, :-1])
    epoch = torch.cat([batches.step(n, device)[0] for n in range(batches.steps_per_epoch)])
    assert len(epoch) == len(epoch.unique(dim=0))


def test_the_training_form_equals_the_reference() -> None:
    """Blocked windows, wide experts, one-hot embedding: the same logits as mkref.reference."""
    model = random_model(0)
    tokens = torch.randint(0, SHAPE.vocab_size, (2, 150), generator=torch.manual_seed(5))
    config = NorthConfig.from_dict(config_json(SHAPE))
    expected = Reference(config, to_tensors(model)).forward(tokens)
    with torch.no_grad():
        actual = model.logits(model(tokens)[0])
        trained = model.train().logits(model(tokens)[0])
    torch.testing.assert_close(actual, expected, rtol=0, atol=2e-4)
    torch.testing.assert_close(trained, expected, rtol=0, atol=2e-4)


def test_transformers_loads_what_is_written(tmp_path: Path) -> None:
    """Same logits and same greedy tokens from the written files, float32."""
    from transformers import AutoModelForCausalLM

    model = random_model(1)
    save_model(model, tmp_path)
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32).eval()
    tokens = torch.randint(3, SHAPE.vocab_size, (1, 90), generator=torch.manual_seed(6))
    with torch.no_grad():
        torch.testing.assert_close(
            model.logits(model(tokens)[0]), theirs(tokens).logits, rtol=0, atol=2e-4
        )
    generated = theirs.generate(tokens, max_new_tokens=12, do_sample=False, eos_token_id=None)
    assert generated[0, 90:].tolist() == greedy(model, tokens.tolist(), 12)[0]


def test_saving_rounds_and_nothing_else(tmp_path: Path) -> None:
    """What is read back is the master weights, rounded to bfloat16."""
    model = NanoModel(SHAPE)
    model.initialise(3)
    save_model(model, tmp_path)
    read = dict(load_model(tmp_path).named_parameters())
    for name, p in model.named_parameters():
        assert p.bfloat16().float().equal(read[name]), name


def test_ties_go_to_the_lower_expert() -> None:
    """Exactly k experts are chosen, also when logits are equal."""
    logits = torch.tensor([[1.0, 3.0, 1.0, 1.0], [0.0, 0.0, 0.0, 0.0]])
    assert [[1.0, 1.0, 0.0, 0.0], [1.0, 1.0, 0.0, 0.0]] == chosen_mask(logits, 2).tolist()


def test_overlapping_windows_pay_for_each_token_once(tmp_path: Path) -> None:
    """A uniform model pays exactly 11 bits (of 2048 ids) for every token and the end token."""
    tokenizer = load_tokenizer(models_root() / "nano" / "tokenizer.json")
    files = load_corpus(excerpt(tmp_path), held_out_share=0.0).train
    uniform = NanoModel(SHAPE)
    with torch.no_grad():
        uniform.embedding.zero_()
    measured = bits_per_byte(uniform.eval(), tokenizer, files)
    n_tokens = sum(len(tokenizer.encode(f.text).ids) + 1 for f in files)
    assert n_tokens > 4 * SHAPE.max_position_embeddings
    assert n_tokens == measured["tokens"]
    assert 11 * n_tokens / measured["bytes"] == pytest.approx(measured["bits_per_byte"], abs=1e-4)
    assert 1 < xz_bits_per_byte(files)["concatenated"] < xz_bits_per_byte(files)["per_file"] < 3


def test_the_corpus_is_the_same_from_a_folder_and_from_a_tar(tmp_path: Path) -> None:
    """The tar's bytes are repeatable, and reading it gives the same manifest."""
    corpus = load_corpus(excerpt(tmp_path / "Lib"))
    for name in ("a.tar.xz", "b.tar.xz"):
        write_tar(corpus, tmp_path / name)
    assert (tmp_path / "a.tar.xz").read_bytes() == (tmp_path / "b.tar.xz").read_bytes()
    assert corpus.manifest() == load_corpus(tmp_path / "a.tar.xz").manifest()


def test_what_the_corpus_leaves_out_and_holds_out(tmp_path: Path) -> None:
    """Machine-made and broken files go; twins are never held out; held out is not trained on."""
    lib = excerpt(tmp_path)
    text = (lib / "tomllib" / "_parser.py").read_text(encoding="utf-8")
    (lib / "twin.py").write_text(text.replace("parse", "read"), encoding="utf-8")
    (lib / "table.py").write_text("codecs.charmap_build(decoding_table)\n", encoding="utf-8")
    (lib / "latin.py").write_bytes(b"# \xe9\n")
    (lib / "_sysconfigdata_x.py").write_text("x = 1\n", encoding="utf-8")
    (lib / "badsyntax.py").write_text("def\n", encoding="utf-8")
    corpus = load_corpus(lib, held_out_share=1.0)
    train, held = ({f.path for f in part} for part in (corpus.train, corpus.held_out))
    assert not train & held
    assert {"twin.py", "tomllib/_parser.py"} == train
    assert {
        "asyncio/subprocess.py", "importlib/resources/_common.py", "test/test_queue.py",
        "xml/sax/saxutils.py",
    } == held  # fmt: skip


def test_a_missing_library_is_one_clear_line(tmp_path: Path) -> None:
    """The message names the option and the path."""
    with pytest.raises(SystemExit, match="--stdlib .*nowhere: no such folder or tar file"):
        load_corpus(tmp_path / "nowhere")
    with pytest.raises(SystemExit, match="--finish .*: model.safetensors, .* missing"):
        train_nano.finish(tmp_path, tmp_path / "home")


def test_tokenizer_training_is_repeatable(tmp_path: Path) -> None:
    """Same text, same json; special tokens first, then every byte."""
    texts = [f.text for f in load_corpus(excerpt(tmp_path), held_out_share=0.0).train]
    first, second = (train_tokenizer(texts, vocab_size=400) for _ in range(2))
    assert first.to_str() == second.to_str()
    assert list(range(len(SPECIAL_TOKENS))) == [first.token_to_id(t) for t in SPECIAL_TOKENS]
    assert 400 == first.get_vocab_size()
    ids = first.encode("tab\t, NUL \0, \u00e9\u4e2d\U0001f600 and \x7f\n").ids
    assert "tab\t, NUL \0, \u00e9\u4e2d\U0001f600 and \x7f\n" == first.decode(ids)


SOURCE = '''\
class A:
    def one(self,
            x=(1, 2)):
        """Say one."""
        return x

    async def two(self): pass

def three():
    if x:
        return 1

    return 2
'''


def test_functions_are_found_by_indentation() -> None:
    """Signature over lines, docstring, body with a blank line; a one-liner has no body to give."""
    found = [(f.start, f.body, f.end, f.indent) for f in find_functions(SOURCE.split("\n"))]
    assert [(1, 4, 5, 4), (8, 9, 13, 0)] == found


def test_chats_hold_the_body_between_markers(tmp_path: Path) -> None:
    """Question and answer are the two halves of a function, and the markers are single ids."""
    files = load_corpus(excerpt(tmp_path), held_out_share=0.0).train
    chats = chat_documents(files)
    tokenizer = load_tokenizer(models_root() / "nano" / "tokenizer.json")
    assert len(chats) >= 4
    for chat in chats:
        question, answer = chat.split("<|START_TEXT|>")
        assert "def " in question
        tokens = tokenizer.encode(answer).tokens
        assert ["<|END_TEXT|>", "<|END_OF_TURN_TOKEN|>"] == tokens[-2:]


@pytest.mark.parametrize(
    ("generated", "ended", "body", "by_itself"),
    [
        ("        return 1\n\n    def g(self):\n", False, "        return 1\n", True),
        ("        return 1\n", True, "        return 1\n", True),
        ("        x = 1\n        if x:\n            y", False, "        x = 1", False),
        ("        x = 1\n        f(\n        )\n        y = (", False,
         "        x = 1\n        f(\n        )", False),
        ("        try:\n            x\n        except E:\n            y", False, "", False),
        ("   ", False, "", False),
    ],
)  # fmt: skip
def test_a_completion_is_cut_at_the_dedent(
    generated: str, ended: bool, body: str, by_itself: bool
) -> None:
    """At a dedent or the end token as it stands; at the token limit without the last statement."""
    assert Completion(body, by_itself) == cut_completion(generated, 4, ended)


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        ("        return 1", True),
        ("        if x:\n            return (1,\n    2)", True),
        ("        return (1", False),
        ("        # nothing", False),
        ("", False),
        ("       return 1\n        return 2", False),
        ("    return 1", False),
    ],
)
def test_what_counts_as_parsing(body: str, expected: bool) -> None:
    """A whole function with a statement of its own; an empty or broken body does not count."""
    header = '    def f(x):\n        """Say."""\n'
    assert expected == parses(header, Completion(body, True))
