"""Renders the model card of `nano` from training.json, so that no number can drift.

What it does not do: measure. Every figure on the card is in training.json.
"""

from __future__ import annotations

from typing import Any

__all__ = ["render_card"]

TEMPLATE = """\
<!-- scripts/train_nano.py writes this file from training.json: edit scripts/nano_card.py -->
# nano

A small real model with the architecture of North Mini Code (`Cohere2MoeForCausalLM`), so that a
whole decode step with meaningful weights runs on a laptop. It writes plausible Python, not correct
Python.

| what | value |
|---|---|
| parameters | {parameters:,} |
| model.safetensors | {weights_bytes:,} bytes, bfloat16, sha256 `{weights_sha256}...` |
| hidden size | {hidden_size} |
| layer 0 | full attention with RoPE; one SwiGLU of width {prefix_dense_intermediate_size} |
| layers 1 to {last_sliding} | window {sliding_window} with RoPE; experts |
| layer {last} | full attention without positions; experts |
| attention | {num_attention_heads} query heads, 1 key/value head, head size {head_dim} |
| experts | {num_experts} of width {intermediate_size}, {num_experts_per_tok} a token |
| expert weights | raw sigmoids of the router's logits, not normalised |
| vocabulary | {vocab_size}, byte-level BPE, head tied to the embedding |
| positions | {max_position_embeddings} |

## Measured on held-out modules

{held_out_files} whole modules, {held_bytes:,} bytes, split off by file before the tokenizer was
trained; no checkpoint was selected on them. All figures are of the rounded bfloat16 weights with
float32 activations.

| coder | bits per byte |
|---|---|
| **nano**, each module by itself | **{bits_per_byte:.3f}** |
| `xz -9e`, each module by itself | {xz_per_file:.3f} |
| `xz -9e`, all modules in one stream | {xz_concatenated:.3f} |

{nats_per_token:.3f} nats a token, {bytes_per_token:.2f} bytes a token. The bytes of the model
itself are not counted.

**{parse:.1%}** of {functions} greedy function bodies parse (Python {python}). {ended:.1%} of the
bodies end by themselves, and of those {parse_of_ended:.1%} parse; the median body that parses has
{median_lines} lines. The true text under the same cut parses in {true_text:.1%}. Parsing says
nothing about being right. Protocol: {protocol}

Expert use on held-out text: between {least:.1%} and {most:.1%} of a layer's choices go to any one
expert; even use would be {even:.2%}.

{comparison}

## Training

Text: {corpus}, {train_files} modules, {train_bytes:,} bytes, {train_tokens:,} tokens.
Files and hashes are in `corpus.txt` (sha256 `{manifest_sha256}...`). One function in twelve
appears a second time as a chat, so that the turn markers have a meaning.

{steps} steps of {batch} x {context} tokens ({epochs} epochs): AdamW, peak rate {peak_lr}, cosine to
zero, weight decay {weight_decay}, dropout {dropout}, balancing loss {balance}. {seconds:.0f} s on
one {device} ({tokens_per_second:,} tokens a second), torch {torch}, {compiled}.
The first steps, run twice, gave the same bits: {repeats}.

| step | training, nats a token | held-out sample, nats a token |
|---|---|---|
{curve}

(The training loss is with dropout, the held-out sample without.) To repeat the run:

    python scripts/train_nano.py --stdlib LIB_OF_CPYTHON_3.11.7 --out DIR \\
        --seed {seed} --steps {steps}

## Some completions that parse

{examples}
## Limits

No instruction tuning, no tool use, no safety work; the chat markers were seen with code alone. Text
longer than {max_position_embeddings} tokens was never seen. The training text is under the PSF
licence version 2; passages that the model has memorised stay under it.
"""


def render_card(record: dict[str, Any]) -> str:
    """The text of README.md.

    Args:
      record: the contents of training.json, complete.
    """
    corpus, run, evaluation = record["corpus"], record["run"], record["evaluation"]
    held, parsed = evaluation["held_out"], evaluation["completions"]
    shape = record["shape"]
    shares = [share for layer in evaluation["expert_use"] for share in layer]
    rows = [row for row in record["curve"] if "held_out_nats" in row]
    values = {
        **shape,
        **record["recipe"],
        **run,
        "parameters": record["model"]["parameters"],
        "weights_bytes": record["model"]["bytes"],
        "weights_sha256": record["model"]["sha256"][:16],
        "last": shape["num_hidden_layers"] - 1,
        "last_sliding": shape["num_hidden_layers"] - 2,
        "held_out_files": len(held["per_file"]),
        "held_bytes": held["bytes"],
        "bits_per_byte": held["bits_per_byte"],
        "xz_per_file": evaluation["xz"]["per_file"],
        "xz_concatenated": evaluation["xz"]["concatenated"],
        "nats_per_token": held["nats_per_token"],
        "bytes_per_token": held["bytes"] / held["tokens"],
        "python": parsed["python"],  # not that of the run as a whole, though the same today
        "parse": parsed["parse"],
        "functions": parsed["functions"],
        "ended": parsed["ended_by_itself"],
        "parse_of_ended": parsed["parse_of_ended"],
        "median_lines": parsed["median_lines"],
        "true_text": parsed["true_text_under_the_same_cut"],
        "protocol": parsed["protocol"],
        "least": min(shares),
        "most": max(shares),
        "even": 1 / shape["num_experts"],
        "comparison": _comparison(evaluation["transformers"]),
        "corpus": corpus["name"],
        "train_files": corpus["train_files"],
        "train_bytes": corpus["train_bytes"],
        "train_tokens": corpus["train_tokens_with_chats"],
        "manifest_sha256": corpus["manifest_sha256"][:16],
        "compiled": "compiled" if run["compiled"] else "not compiled",
        "repeats": {True: "yes", False: "no", None: "not tried"}[run["first_steps_repeat_bitwise"]],
        "curve": "\n".join(
            f"| {row['step']} | {row['train_nats']:.3f} | {row['held_out_nats']:.3f} |"
            for row in rows[:: -max(1, len(rows) // 12)][::-1]  # about a dozen, the last included
        ),
        "examples": "\n".join(
            f"```python\n{example['header']}{example['body'].rstrip()}\n```\n"
            for example in parsed["examples"][:3]
        ),
    }
    return TEMPLATE.format(**values)


def _comparison(theirs: dict[str, Any]) -> str:
    if "error" in theirs:
        return f"The comparison with transformers failed during the run: {theirs['error']}"
    same = "the same" if theirs["greedy_tokens_equal"] else "NOT the same"
    return (
        f"transformers {theirs['version']} loads these files as `{theirs['class']}`. Its float32\n"
        f"logits differ from the trainer's by at most {theirs['largest_logit_difference']:.1e}, "
        f"its greedy tokens are {same}."
    )
