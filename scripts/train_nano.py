"""Trains `nano`, the small real model that ships with mkref, on Python's standard library.

    python scripts/train_nano.py --stdlib LIB_FOLDER_OR_TAR --out DIR    train and evaluate
    python scripts/train_nano.py --resume ...                            go on after an interruption
    python scripts/train_nano.py --tokenizer-only --stdlib ...           tokenizer.json, corpus.txt
    python scripts/train_nano.py --finish DIR                            install DIR, write the card

What it does: corpus -> tokens -> training -> rounding to bfloat16 -> evaluation of the rounded
model -> model.safetensors, config.json, tokenizer.json, training.json, corpus.txt, README.md.
With `--minutes` the number of steps is fixed once, from a trial, before the first step; the count
is in training.json, and `--steps` with that count repeats the run.

What it does not do: download anything. One H200 needs about six minutes; a CPU is only good for
`--tiny`, which runs every code path in a minute.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import platform
import shutil
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from nano_card import render_card
from nano_corpus import Corpus, load_corpus, write_tar
from nano_data import Batches, chat_documents, encode_documents
from nano_eval import evaluate
from nano_export import load_model, save_model
from nano_model import Shape
from nano_tokenizer import load_tokenizer, train_tokenizer
from nano_train import Recipe, Trainer, make_deterministic

if TYPE_CHECKING:
    from tokenizers import Tokenizer

ROOT = Path(__file__).resolve().parent.parent
HOME = ROOT / "mkref" / "models" / "nano"
EVALUATION_S = 60  # kept free of `--minutes` for rounding, evaluation and writing
SHIPPED = ("model.safetensors", "config.json", "tokenizer.json", "training.json", "corpus.txt")
TINY_SHAPE = Shape(
    hidden_size=64,
    num_attention_heads=2,
    intermediate_size=16,
    prefix_dense_intermediate_size=64,
    num_experts=4,
    num_experts_per_tok=2,
    sliding_window=32,
    max_position_embeddings=512,
)
TINY_RECIPE = Recipe(steps=30, batch=4, context=128, warmup=5)


def main(arguments: list[str] | None = None) -> None:
    """Command line; see the module docstring."""
    args = _parser().parse_args(arguments)
    if args.finish is not None:
        finish(args.finish, args.home)
        return
    began = time.monotonic()

    def say(text: str) -> None:
        print(f"[{time.monotonic() - began:6.1f} s] {text}", flush=True)

    corpus = load_corpus(args.stdlib)
    if args.tokenizer_only:
        _write_tokenizer(corpus, args, say)
        return
    _check_manifest(corpus, args)
    tokenizer = load_tokenizer(args.home / "tokenizer.json")
    say(f"{len(corpus.train)} training and {len(corpus.held_out)} held-out modules")
    shape, recipe = (TINY_SHAPE, TINY_RECIPE) if args.tiny else (Shape(), Recipe())
    recipe = dataclasses.replace(recipe, seed=args.seed, steps=args.steps or recipe.steps)
    train_files = corpus.train[:40] if args.tiny else corpus.train
    texts = [f.text for f in train_files] + chat_documents(train_files)
    documents = encode_documents(tokenizer, texts)
    batches = Batches(documents, recipe.batch, recipe.context, recipe.seed)
    say(f"{batches.n_tokens} training tokens, {batches.steps_per_epoch} steps an epoch")

    make_deterministic()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    trainer = Trainer(recipe, shape, batches, device, compiled=not args.no_compile)
    checkpoint = args.work / "checkpoint.pt"
    repeats: bool | None = None
    if args.resume:
        recipe = trainer.load(checkpoint)
        say(f"goes on at step {trainer.step}")
    elif args.minutes is not None:
        step_s, repeats = trainer.trial(say)
        left = args.minutes * 60 - EVALUATION_S - (time.monotonic() - began)
        steps = min(recipe.steps, int(0.95 * left / step_s))
        if steps < 2 * recipe.warmup:
            sys.exit(f"--minutes {args.minutes}: only {steps} steps of {step_s:.3f} s fit")
        say(f"{1e3 * step_s:.2f} ms a step, bits repeat: {repeats}, {steps} steps")
        recipe = trainer.recipe = dataclasses.replace(recipe, steps=steps)

    first_step, start = trainer.step, time.monotonic()
    _run(trainer, tokenizer, corpus, args, say)
    if trainer.step < recipe.steps:
        say(f"stopped at step {trainer.step}; --resume goes on")
        return
    seconds = time.monotonic() - start
    torch.use_deterministic_algorithms(False)  # evaluation may use any kernel
    trainer.round_weights()
    sha256 = save_model(trainer.model, args.out)
    model = load_model(args.out).to(device)  # what is evaluated is what was written
    say(f"trained; model.safetensors sha256 {sha256}")
    n_tokens = (recipe.steps - first_step) * recipe.batch * recipe.context
    record: dict[str, Any] = {
        "model": {
            "parameters": sum(p.numel() for p in model.parameters()),
            "bytes": (args.out / "model.safetensors").stat().st_size,
            "sha256": sha256,
        },
        "recipe": dataclasses.asdict(recipe),
        "shape": dataclasses.asdict(shape),
        "corpus": _corpus_record(corpus, batches),
        "run": {
            "device": torch.cuda.get_device_name() if device.type == "cuda" else "cpu",
            "torch": torch.__version__,
            "python": platform.python_version(),
            "compiled": trainer.compiled,
            "resumed_at_step": first_step,
            "seconds": round(seconds, 1),
            "tokens_per_second": round(n_tokens / seconds),
            "epochs": round(recipe.steps / batches.steps_per_epoch, 2),
            "first_steps_repeat_bitwise": repeats,
        },
        "curve": trainer.curve,
        "evaluation": {},
    }
    shutil.copyfile(args.home / "tokenizer.json", args.out / "tokenizer.json")
    (args.out / "corpus.txt").write_text(corpus.manifest(), encoding="utf-8")
    files = corpus.held_out[:4] if args.tiny else corpus.held_out
    for name, value in evaluate(model, tokenizer, files, args.out, 8 if args.tiny else 512):
        record["evaluation"][name] = value
        text = json.dumps(record, indent=1) + "\n"  # written after each part, the surest first
        (args.out / "training.json").write_text(text, encoding="utf-8")
        say(f"{name}: {json.dumps(value)[:300]}")
    (args.out / "README.md").write_text(render_card(record), encoding="utf-8")
    say("done")


def finish(source: Path, home: Path) -> None:
    """Installs the files of a finished run and renders the model card from training.json."""
    missing = [name for name in SHIPPED if not (source / name).is_file()]
    if missing:
        sys.exit(f"--finish {source}: {', '.join(missing)} missing")
    record = json.loads((source / "training.json").read_text(encoding="utf-8"))
    home.mkdir(parents=True, exist_ok=True)
    for name in SHIPPED:
        if source.resolve() != home.resolve():
            shutil.copyfile(source / name, home / name)
    (home / "README.md").write_text(render_card(record), encoding="utf-8")
    size = sum(p.stat().st_size for p in home.iterdir() if p.is_file())
    print(f"{home}: {size} bytes in all")


def _run(
    trainer: Trainer,
    tokenizer: Tokenizer,
    corpus: Corpus,
    args: argparse.Namespace,
    say: Callable[[str], None],
) -> None:
    """The training proper, with its log, held-out points, checkpoints and early exports."""
    recipe = trainer.recipe
    stream = torch.cat([torch.tensor(tokenizer.encode(f.text).ids) for f in corpus.held_out])
    # a sample for the curve, not for any choice: the last step is what ships
    n = min(16, len(stream) // (recipe.context + 1))
    held = stream[: n * (recipe.context + 1)].view(n, -1).to(trainer.device)
    log_every = max(1, recipe.steps // 100)

    def on_log(row: dict[str, float]) -> None:
        number = row["step"] // log_every
        last = row["step"] == recipe.steps
        if number % 2 == 0 or last:
            trainer.model.eval()
            with torch.no_grad(), torch.autocast(trainer.device.type, torch.bfloat16):
                nats = trainer.model.losses(held[:, :-1], held[:, 1:])[0]
            trainer.model.train()
            row["held_out_nats"] = round(nats.item(), 5)
        if number % 10 == 0 or last:
            trainer.save(args.work / "checkpoint.pt")
        if number % 20 == 0:
            save_model(trainer.model, args.out)  # something to show if the machine goes away
        say("  ".join(f"{name} {value:.5g}" for name, value in row.items()))

    trainer.run(args.stop_at or recipe.steps, log_every, on_log)


def _corpus_record(corpus: Corpus, batches: Batches) -> dict[str, Any]:
    return {
        "name": "CPython 3.11.7 Lib/, PSF licence version 2",
        "manifest_sha256": corpus.manifest_sha256(),
        "train_files": len(corpus.train),
        "train_bytes": sum(len(f.data) for f in corpus.train),
        "train_tokens_with_chats": batches.n_tokens,
        "held_out_files": len(corpus.held_out),
        "held_out_bytes": sum(len(f.data) for f in corpus.held_out),
        "held_out": {f.path: f.sha256 for f in corpus.held_out},
    }


def _check_manifest(corpus: Corpus, args: argparse.Namespace) -> None:
    """Refuses text that is not the text of corpus.txt, unless told otherwise."""
    manifest = args.home / "corpus.txt"
    if args.any_corpus or not manifest.is_file():
        return
    want, have = (
        set(text.splitlines()) for text in (manifest.read_text("utf-8"), corpus.manifest())
    )
    if want != have:
        example = min(want ^ have, key=lambda row: row.split("\t")[-1]).split("\t")[-1]
        sys.exit(
            f"--stdlib: {len(want ^ have)} lines differ from {manifest.name} (first {example}); "
            "use the library of CPython 3.11.7, or --any-corpus to train on this text"
        )


def _write_tokenizer(corpus: Corpus, args: argparse.Namespace, say: Callable[[str], None]) -> None:
    args.home.mkdir(parents=True, exist_ok=True)
    tokenizer = train_tokenizer(f.text for f in corpus.train)
    tokenizer.save(str(args.home / "tokenizer.json"), pretty=False)
    (args.home / "corpus.txt").write_text(corpus.manifest(), encoding="utf-8")
    say(f"{tokenizer.get_vocab_size()} ids; corpus {corpus.manifest_sha256()}")
    if args.pack is not None:
        write_tar(corpus, args.pack)
        say(f"{args.pack}: {args.pack.stat().st_size} bytes")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--stdlib", type=Path, help="Lib folder or tar (default: this Python's)")
    parser.add_argument("--home", type=Path, default=HOME, help="where the shipped files live")
    parser.add_argument("--out", type=Path, default=ROOT / ".data" / "nano", help="results")
    parser.add_argument("--work", type=Path, default=ROOT / ".data" / "work", help="checkpoints")
    parser.add_argument("--minutes", type=float, help="fix the steps so that all of it fits")
    parser.add_argument("--steps", type=int, help="the number of steps (with --minutes: at most)")
    parser.add_argument("--seed", type=int, default=Recipe.seed)
    parser.add_argument("--resume", action="store_true", help="go on from the checkpoint in --work")
    parser.add_argument("--stop-at", type=int, help="interrupt at this step (to test --resume)")
    parser.add_argument("--no-compile", action="store_true", help="plain torch, no torch.compile")
    parser.add_argument("--tiny", action="store_true", help="a toy run through every code path")
    parser.add_argument("--any-corpus", action="store_true", help="ignore corpus.txt")
    parser.add_argument("--tokenizer-only", action="store_true", help="write tokenizer, corpus.txt")
    parser.add_argument("--pack", type=Path, help="with --tokenizer-only: write this tar")
    parser.add_argument("--finish", type=Path, help="install a finished run into --home")
    return parser


if __name__ == "__main__":
    main()
