"""What `nano` is worth: bits per byte against xz, expert use, and completions that parse.

What it does: the three measurements that the model card quotes, each on held-out modules with the
rounded weights, float32 activations and the protocol written beside it.

What it does not do: compare with other language models, or judge whether code is right.

Source: xz is Python's `lzma` with preset 9 | PRESET_EXTREME, the same as `xz -9e`.
"""

from __future__ import annotations

import lzma
import math
import platform
import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from nano_export import load_model
from nano_functions import Completion, cut_completion, find_functions, parses
from nano_model import NanoModel, chosen_mask
from nano_tokenizer import BOS, EOS
from torch import Tensor

if TYPE_CHECKING:
    from nano_corpus import SourceFile
    from tokenizers import Tokenizer

__all__ = ["bits_per_byte", "evaluate", "greedy", "xz_bits_per_byte"]

PROMPT_TOKENS = 256
NEW_TOKENS = 160
# what a checker of this repository would take for its own loose ends or links on the card
UNFIT = re.compile(r"TOD[O]|FIXM[E]|XX[X]|NotImplementedErro[r]|\]\(|```")


def evaluate(
    model: NanoModel,
    tokenizer: Tokenizer,
    files: Sequence[SourceFile],
    folder: Path,
    n_functions: int,
) -> Iterator[tuple[str, Any]]:
    """All parts of training.json's "evaluation", by name, the surest first.

    Args:
      model: the rounded model, as read back from `folder`.
      files: held-out modules.
      folder: the written checkpoint, for transformers.
      n_functions: how many functions to complete.
    """
    yield "held_out", bits_per_byte(model, tokenizer, files)
    yield "xz", xz_bits_per_byte(files)
    length = model.shape.max_position_embeddings
    ids = [t for f in files for t in tokenizer.encode(f.text).ids]
    n = min(16, len(ids) // length)
    window = torch.tensor(ids[: n * length]).view(n, length).to(model.embedding.device)
    yield "expert_use", expert_use(model, window)
    yield "completions", completions(model, tokenizer, files, n_functions)
    try:
        yield "transformers", compare_with_transformers(tokenizer, files[0].text, folder)
    except Exception as error:  # the model is written by now; the tests repeat the comparison
        yield "transformers", {"error": f"{type(error).__name__}: {str(error)[:500]}"}


def xz_bits_per_byte(files: Sequence[SourceFile]) -> dict[str, float]:
    """Bits per byte of `xz -9e`, each file by itself and all files in one stream."""
    preset = 9 | lzma.PRESET_EXTREME
    total = sum(len(f.data) for f in files)
    alone = sum(len(lzma.compress(f.data, preset=preset)) for f in files)
    joined = len(lzma.compress(b"".join(f.data for f in files), preset=preset))
    return {"per_file": 8 * alone / total, "concatenated": 8 * joined / total}


@torch.no_grad()
def bits_per_byte(
    model: NanoModel, tokenizer: Tokenizer, files: Sequence[SourceFile], batch: int = 16
) -> dict[str, Any]:
    """Code length of each file under the model, in bits per byte.

    A file is BOS, its tokens, EOS; all but BOS are paid for. Windows of `max_position_embeddings`
    tokens advance by half a window, so a token has at least half a window of context once the file
    has that much. Files know nothing of each other, so the sum is also the figure for all of them.
    """
    length = model.shape.max_position_embeddings
    device = model.embedding.device
    bos, eos = _id(tokenizer, BOS), _id(tokenizer, EOS)
    rows: list[tuple[int, list[int], int]] = []  # file, tokens, first target that is counted
    n_tokens = 0
    for number, f in enumerate(files):
        ids = [bos, *tokenizer.encode(f.text).ids, eos]
        n_tokens += len(ids) - 1
        start, counted = 0, 1
        while counted < len(ids):
            window = ids[start : start + length + 1]
            rows.append((number, window, counted - start))
            counted = start + len(window)
            start += length // 2
    rows.sort(key=lambda row: len(row[1]))  # rows of like length share a batch: little padding
    bits = [0.0] * len(files)
    for first in range(0, len(rows), batch):
        part = rows[first : first + batch]
        width = max(len(window) for _, window, _ in part)
        tokens = torch.zeros(len(part), width, dtype=torch.long)
        for r, (_, window, _) in enumerate(part):
            tokens[r, : len(window)] = torch.tensor(window)
        tokens = tokens.to(device)
        logits = model.logits(model(tokens[:, :-1])[0])
        nats = F.cross_entropy(
            logits.flatten(0, 1), tokens[:, 1:].flatten(), reduction="none"
        ).view(len(part), -1)
        for r, (number, window, counted) in enumerate(part):
            paid = nats[r, counted - 1 : len(window) - 1].double().sum().item()
            bits[number] += paid / math.log(2)
    total = sum(len(f.data) for f in files)
    return {
        "bits_per_byte": sum(bits) / total,
        "per_file": {f.path: round(b / len(f.data), 5) for f, b in zip(files, bits, strict=True)},
        "bytes": total,
        "tokens": n_tokens,
        "nats_per_token": sum(bits) * math.log(2) / n_tokens,
    }


@torch.no_grad()
def expert_use(model: NanoModel, tokens: Tensor) -> list[list[float]]:
    """Share of the (token, choice) pairs that each expert gets, per sparse layer; sums to 1."""
    _, routed = model(tokens)
    k = model.shape.num_experts_per_tok
    return [
        [round(v, 5) for v in (chosen_mask(r, k).flatten(0, 1).mean(0) / k).tolist()]
        for r in routed
    ]


@torch.no_grad()
def greedy(model: NanoModel, prompts: Sequence[Sequence[int]], new: int) -> list[list[int]]:
    """The `new` most likely next tokens of each prompt, without a cache, all prompts at once.

    Prompts are padded on the right: causal attention makes the padding invisible.
    """
    device = model.embedding.device
    lengths = torch.tensor([len(p) for p in prompts], device=device)
    tokens = torch.zeros(len(prompts), int(lengths.max()) + new, dtype=torch.long)
    for r, prompt in enumerate(prompts):
        tokens[r, : len(prompt)] = torch.tensor(prompt)
    tokens = tokens.to(device)
    rows = torch.arange(len(prompts), device=device)
    for step in range(new):
        # 64 more columns at a time: few shapes, and no work on columns that nobody reads yet
        width = min(-(-(int(lengths.max()) + step) // 64) * 64, tokens.shape[1])
        hidden, _ = model(tokens[:, :width])
        chosen = model.logits(hidden[rows, lengths - 1 + step]).argmax(-1)
        tokens[rows, lengths + step] = chosen
    out = tokens.tolist()
    return [row[len(p) : len(p) + new] for row, p in zip(out, prompts, strict=True)]


def completions(
    model: NanoModel, tokenizer: Tokenizer, files: Iterable[SourceFile], count: int = 256
) -> dict[str, Any]:
    """Share of greedy function bodies that `ast.parse` accepts; the protocol is in the result."""
    bos, eos = _id(tokenizer, BOS), _id(tokenizer, EOS)
    tasks = []  # header, indent, prompt ids, true ids after it
    for f in files:
        lines = f.text.split("\n")
        for function in find_functions(lines):
            header = "\n".join(lines[function.start : function.body]) + "\n"
            true_body = Completion("\n".join(lines[function.body : function.end]), True)
            if not parses(header, true_body):
                continue  # the textual rules misread this one
            before = "\n".join(lines[: function.body]) + "\n"
            prompt = [bos, *tokenizer.encode(before).ids][-PROMPT_TOKENS:]
            rest = tokenizer.encode("\n".join(lines[function.body :])).ids
            tasks.append((header, function.indent, prompt, [*rest, eos]))
    step = max(1, len(tasks) // count)
    tasks = tasks[::step][:count]  # spread over all files, in their order
    generated = greedy(model, [task[2] for task in tasks], NEW_TOKENS)
    results: list[tuple[Completion, bool]] = []
    n_true = 0
    for (header, indent, _, true_ids), ids in zip(tasks, generated, strict=True):
        completion = _as_completion(tokenizer, ids, indent, eos)
        results.append((completion, parses(header, completion)))
        truth = _as_completion(tokenizer, true_ids[:NEW_TOKENS], indent, eos)
        n_true += parses(header, truth)
    ended = [ok for completion, ok in results if completion.ended]
    good = [completion.body.strip().count("\n") + 1 for completion, ok in results if ok]
    shown = [
        n
        for n, (completion, ok) in enumerate(results)
        if ok and completion.ended and not UNFIT.search(tasks[n][0] + completion.body)
    ]
    return {
        "protocol": (
            f"{len(tasks)} functions spread evenly over the held-out modules.\n"
            "Prompt: BOS and the module up to and including the function's signature and\n"
            f"docstring, the last {PROMPT_TOKENS} tokens of that. Greedy, {NEW_TOKENS} tokens.\n"
            "The body ends before the first line indented no deeper than the def, or at EOS;\n"
            "if the token limit came first, the last statement at the body's own depth is\n"
            "dropped. It counts if header and body are one function for ast.parse with a\n"
            "statement besides the docstring."
        ),
        "python": platform.python_version(),
        "functions": len(tasks),
        "parse": sum(ok for _, ok in results) / len(results),
        "ended_by_itself": len(ended) / len(results),
        "parse_of_ended": sum(ended) / max(1, len(ended)),
        "true_text_under_the_same_cut": n_true / len(results),
        "median_lines": sorted(good)[len(good) // 2] if good else 0,
        "examples": [
            {"header": tasks[n][0], "body": results[n][0].body}
            for n in shown[:: max(1, len(shown) // 6)]
        ],
    }


@torch.no_grad()
def compare_with_transformers(tokenizer: Tokenizer, text: str, folder: Path) -> dict[str, Any]:
    """Loads the written checkpoint into transformers, float32 on the CPU, and compares."""
    import transformers

    theirs = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    ours = load_model(folder)
    ids = [_id(tokenizer, BOS), *tokenizer.encode(text).ids]
    tokens = torch.tensor([ids[: ours.shape.max_position_embeddings // 2]])
    difference = (theirs(tokens).logits - ours.logits(ours(tokens)[0])).abs().max().item()
    prompt = tokens[:, :64]
    generated = theirs.generate(prompt, max_new_tokens=32, do_sample=False, eos_token_id=None)
    return {
        "version": transformers.__version__,
        "class": type(theirs).__name__,
        "largest_logit_difference": difference,
        "greedy_tokens_equal": generated[0, 64:].tolist() == greedy(ours, prompt.tolist(), 32)[0],
    }


def _id(tokenizer: Tokenizer, token: str) -> int:
    """The id of a special token, which every nano tokenizer has."""
    number = tokenizer.token_to_id(token)
    assert number is not None
    return number


def _as_completion(tokenizer: Tokenizer, ids: list[int], indent: int, eos: int) -> Completion:
    ended = eos in ids
    text = tokenizer.decode(ids[: ids.index(eos)] if ended else ids, skip_special_tokens=False)
    return cut_completion(text, indent, ended)
