"""The tokenizer of `nano`: byte-level BPE with 2048 ids, trained on the training modules alone.

Ids 0..15 are the special tokens below (the turn markers are there so that a chat template can use
them), then all 256 bytes, then merges. Training is deterministic: same files, same json.

What it does not do: define a chat template, or look at the held-out modules.

Source: the `tokenizers` library; the splitting pattern follows the one that GPT-4's tokenizer made
usual (a word keeps one leading sign or space, digits go in threes, signs keep their newlines).
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

__all__ = ["BOS", "CHAT_TOKENS", "EOS", "PAD", "VOCAB_SIZE", "load_tokenizer", "train_tokenizer"]

VOCAB_SIZE = 2048
PAD, BOS, EOS = "<PAD>", "<BOS_TOKEN>", "<EOS_TOKEN>"
CHAT_TOKENS = (
    "<|START_OF_TURN_TOKEN|>",
    "<|END_OF_TURN_TOKEN|>",
    "<|SYSTEM_TOKEN|>",
    "<|USER_TOKEN|>",
    "<|CHATBOT_TOKEN|>",
    "<|START_THINKING|>",
    "<|END_THINKING|>",
    "<|START_TEXT|>",
    "<|END_TEXT|>",
    "<|START_ACTION|>",
    "<|END_ACTION|>",
    "<|START_TOOL_RESULT|>",
    "<|END_TOOL_RESULT|>",
)
SPECIAL_TOKENS = (PAD, BOS, EOS, *CHAT_TOKENS)
# The last space of an indentation goes with the word after it, so "        return" is two tokens.
PATTERN = (
    r"[^\r\n\p{L}\p{N}]?\p{L}+"
    r"|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+"
    r"|\s+(?!\S)"
    r"|\s+"
)


def train_tokenizer(texts: Iterable[str], vocab_size: int = VOCAB_SIZE) -> Tokenizer:
    """Trains on `texts` and returns a tokenizer with `vocab_size` ids at most."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(PATTERN), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
        max_token_length=16,  # longer ones are rulers such as "# ------", not language
    )
    tokenizer.train_from_iterator(texts, trainer=trainer)
    return tokenizer


def load_tokenizer(path: Path) -> Tokenizer:
    """Loads `tokenizer.json`."""
    return Tokenizer.from_file(str(path))
