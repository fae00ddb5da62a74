"""Batches of `nano`'s training text as a pure function of (seed, step).

What it does: tokenises the training modules (and a few functions of theirs in the shape of a chat),
and gives the batch of any step, so that a resumed run needs no record of where it was.

What it does not do: touch held-out modules, or keep state.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch
from nano_functions import find_functions
from nano_tokenizer import BOS, EOS
from torch import Tensor

if TYPE_CHECKING:
    from nano_corpus import SourceFile
    from numpy.typing import NDArray
    from tokenizers import Tokenizer

__all__ = ["Batches", "chat_documents", "encode_documents"]

CHAT_EVERY = 12  # every twelfth function appears a second time, as a question and its answer
CHAT = (
    "<|START_OF_TURN_TOKEN|><|USER_TOKEN|>{question}<|END_OF_TURN_TOKEN|>"
    "<|START_OF_TURN_TOKEN|><|CHATBOT_TOKEN|><|START_TEXT|>{answer}<|END_TEXT|>"
    "<|END_OF_TURN_TOKEN|>"
)


def chat_documents(files: Sequence[SourceFile]) -> list[str]:
    """Functions of the training text as chats: signature and docstring asked, body answered.

    They give the turn markers a meaning, so that the model ends its turn when served as a chat.
    """
    found = []
    number = 0
    for f in files:
        lines = f.text.split("\n")
        for function in find_functions(lines):
            number += 1
            if number % CHAT_EVERY:
                continue
            question = "\n".join(lines[function.start : function.body]) + "\n"
            answer = "\n".join(lines[function.body : function.end]) + "\n"
            if "<|" not in question + answer:  # no text may forge a marker
                found.append(CHAT.format(question=question, answer=answer))
    return found


def encode_documents(tokenizer: Tokenizer, texts: Sequence[str]) -> list[NDArray[np.uint16]]:
    """BOS + tokens + EOS of each text."""
    bos, eos = tokenizer.token_to_id(BOS), tokenizer.token_to_id(EOS)
    return [
        np.array([bos, *e.ids, eos], dtype=np.uint16) for e in tokenizer.encode_batch(list(texts))
    ]


class Batches:
    """Epochs of whole documents in a new order, cut into windows that start at a new offset."""

    def __init__(
        self, documents: Sequence[NDArray[np.uint16]], batch: int, context: int, seed: int
    ) -> None:
        self.documents, self.batch, self.context, self.seed = documents, batch, context, seed
        self.n_tokens = sum(len(d) for d in documents)
        self.n_windows = (self.n_tokens - 1) // context - 1  # one is given up for the offset
        self.steps_per_epoch = self.n_windows // batch
        if self.steps_per_epoch < 1:
            raise ValueError(
                f"{self.n_tokens} training tokens are fewer than a batch of {batch} x {context}"
            )
        self._epoch = -1
        self._windows = torch.empty(0)

    def step(self, step: int, device: torch.device) -> tuple[Tensor, Tensor]:
        """Inputs and targets [batch, context] int64 of one step."""
        epoch, place = divmod(step, self.steps_per_epoch)
        if epoch != self._epoch or self._windows.device != device:
            self._windows = self._shuffled(epoch).to(device)
            self._epoch = epoch
        rows = self._windows[place * self.batch : (place + 1) * self.batch].long()
        return rows[:, :-1].contiguous(), rows[:, 1:].contiguous()

    def _shuffled(self, epoch: int) -> Tensor:
        """All windows of an epoch, int16 [n_windows, context + 1], in training order."""
        rng = np.random.default_rng([self.seed, epoch])
        order = rng.permutation(len(self.documents))
        stream = np.concatenate([self.documents[d] for d in order])
        offset = int(rng.integers(self.context))
        starts = offset + self.context * rng.permutation(self.n_windows)
        windows = np.stack([stream[s : s + self.context + 1] for s in starts])
        return torch.from_numpy(windows.astype(np.int16))
