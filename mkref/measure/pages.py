"""Page tables for rows of any length, and a KV cache of random values.

Sliding pages of a row are used in turn, so that the pool of a sliding layer holds the window and a
little more, as the engine's does.

What it does not do: run a prompt. Keys and values are the same few megabytes again and again; how
long attention takes does not depend on them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from mkref.plan.build import PAGE
from mkref.reference.scalars import to_bf16

if TYPE_CHECKING:
    from mkref.config import NorthConfig
    from mkref.machine.base import KernelMachine

__all__ = ["fill_kv", "page_table", "share_kv"]

SPARE_PAGES = 6
"""Pages beyond the window: tokens of a launch, and the rest of the pages at both ends."""
BLOCK_WORDS = 1 << 22


def page_table(config: NorthConfig, lengths: Sequence[int]) -> tuple[np.ndarray, tuple[int, int]]:
    """Pages of rows of `lengths` tokens.

    Returns:
        int32 [2, rows, pages], -1 where a row has none; pages that full and sliding layers need.

    >>> from mkref.config import NORTH_MINI_CODE
    >>> page_table(NORTH_MINI_CODE, [100, 64])[0][0].tolist()
    [[0, 1], [2, -1]]
    """
    pages = [-(-length // PAGE) for length in lengths]
    table = np.full((2, len(pages), max(pages)), -1, np.int32)
    used = [0, 0]
    for row, n in enumerate(pages):
        window = min(n, config.sliding_window // PAGE + SPARE_PAGES)
        for kind, own in enumerate((n, window)):
            table[kind, row, :n] = used[kind] + np.arange(n) % own
            used[kind] += own
    return table, (used[0], used[1])


def fill_kv(machine: KernelMachine, seed: int = 0) -> None:
    """Random keys and values in the whole pool, of unit variance."""
    n_bytes = machine.table["kv"].n_bytes
    memory: Any = machine.buffers["kv"]
    rng = np.random.default_rng(seed)
    block = to_bf16(rng.standard_normal(min(BLOCK_WORDS, n_bytes // 2)).astype(np.float32))
    machine.put(memory, block)
    done = block.nbytes
    while done < n_bytes:  # what is there already, behind itself
        n = min(done, n_bytes - done)
        if isinstance(memory, np.ndarray):
            memory[done : done + n] = memory[:n]
        else:
            memory[done : done + n].data.copy_from_device(memory.data, n)
        done += n


def share_kv(machine: KernelMachine, owner: KernelMachine) -> None:
    """Let a machine use another one's pool; its own is given back. The plans need equal pools."""
    memory = owner.buffers["kv"]
    machine.buffers["kv"] = memory
    machine._params["kv"] = machine.address(memory)
