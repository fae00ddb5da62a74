"""The kernel's memory: every buffer in global memory, its element type, shape and who writes it.

One table for all machines. The C struct `Params` is generated from it, the interpreter uses the
same names, and the verifier checks that the tasks of a plan stay inside. It allocates nothing.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from mkref.plan.build import CHUNK_PAGES, GROUP_COLUMNS, MOST_SPLITS, PAGE, Plan
from mkref.plan.task import WORDS
from mkref.weights.layout import PackedLayout

if TYPE_CHECKING:
    from mkref.config import NorthConfig

__all__ = [
    "BUFFERS",
    "COUNTER_STRIDE",
    "MAX_LAUNCH_STEPS",
    "SCALARS",
    "STAGE_TRACE",
    "STATUS_WORDS",
    "STOP_IDS",
    "Buffer",
    "buffer_table",
    "max_active",
]

COUNTER_STRIDE = 32
"""int32 words between counters: each has a 128-byte line for itself, so polls do not collide."""
STATUS_WORDS = 8
MAX_LAUNCH_STEPS = 256
"""Most decode steps of one launch."""
STAGE_TRACE = 4096
"""Ring stages per SM whose times a traced kernel keeps, the latest ones."""
STOP_IDS = 8
"""Most token ids per row that end its answer on the device."""

BUFFERS: dict[str, str] = {
    # read only during a step
    "weights": "const uint4*",
    "gammas": "const uint16_t*",
    "rope": "const float*",
    "tasks": "const Task*",
    "task_offsets": "const int*",
    "tokens": "const int*",
    "positions": "const int*",
    "earlier": "const int*",
    "stop_ids": "const int*",
    "page_table": "const int*",
    "temperatures": "const float*",
    "seeds": "const uint32_t*",
    # read and written
    "kv": "uint4*",
    "x": "float*",
    "x_mid": "float*",
    "router_logits": "uint64_t*",
    "q": "uint16_t*",
    "k_new": "uint16_t*",
    "v_new": "uint16_t*",
    "part_o": "float*",
    "part_ml": "float*",
    "attn": "uint16_t*",
    "h": "uint16_t*",
    "logits": "float*",
    "best_values": "float*",
    "best_tokens": "int*",
    "control": "int*",
    "active_experts": "int*",
    "tokens_out": "int*",
    "progress": "int*",
    "counters": "int*",
    "status": "int*",
    "trace": "uint64_t*",
    "stage_trace": "uint64_t*",
}
"""Pointer members of `Params` in order: name to C type."""

SCALARS: tuple[str, ...] = (
    "rows",
    "step",
    "n_steps",
    "stop_after",
    "max_pages",
    "max_splits",
    "timeout_ns",
)
"""`long long` members of `Params`, after the pointers."""


@dataclass(frozen=True)
class Buffer:
    """Element type (a NumPy name) and shape of one buffer."""

    dtype: str
    shape: tuple[int, ...]

    @property
    def n_bytes(self) -> int:
        """Size in bytes."""
        size = {"uint16": 2, "int32": 4, "uint32": 4, "float32": 4, "uint64": 8}[self.dtype]
        for n in self.shape:
            size *= n
        return size


def max_active(config: NorthConfig, rows: int) -> int:
    """Most experts that one layer can need for a batch of `rows`."""
    return min(config.num_experts, rows * config.num_experts_per_tok)


def buffer_table(plan: Plan, max_context: int) -> dict[str, Buffer]:
    """Shapes of all buffers for sequences of at most `max_context` tokens."""
    c, rows = plan.config, plan.rows
    pages = -(-max_context // PAGE)
    splits = min(-(-pages // CHUNK_PAGES), MOST_SPLITS)
    head, group, kv_heads = c.head_dim, GROUP_COLUMNS, c.num_key_value_heads
    h_values = rows * max(
        c.mlp_width(layer) * (1 if c.is_dense(layer) else max_active(c, rows))
        for layer in range(c.num_hidden_layers)
    )
    return {
        "weights": Buffer("uint16", (PackedLayout(c).total_tiles, 256)),
        "gammas": Buffer("uint16", (c.num_hidden_layers + 1, c.hidden_size)),
        "rope": Buffer("float32", (max_context, head // 2, 2)),
        "tasks": Buffer("int32", (plan.n_tasks, WORDS)),
        "task_offsets": Buffer("int32", (plan.n_sm + 1,)),
        "tokens": Buffer("int32", (rows,)),
        "positions": Buffer("int32", (rows,)),
        "earlier": Buffer("int32", (rows,)),
        "stop_ids": Buffer("int32", (rows, STOP_IDS)),
        "page_table": Buffer("int32", (2, rows, pages)),
        "temperatures": Buffer("float32", (rows,)),
        "seeds": Buffer("uint32", (rows, 2)),
        "kv": Buffer("uint16", (plan.pool.total_tiles(c), 256)),
        "x": Buffer("float32", (2, rows, c.hidden_size)),
        "x_mid": Buffer("float32", (rows, c.hidden_size)),
        "router_logits": Buffer("uint64", (rows, c.num_experts)),
        "q": Buffer("uint16", (rows, kv_heads, head // 16, group, 16)),
        "k_new": Buffer("uint16", (rows, kv_heads, head)),
        "v_new": Buffer("uint16", (rows, kv_heads, head)),
        "part_o": Buffer("float32", (rows, kv_heads, splits, group, head)),
        "part_ml": Buffer("float32", (rows, kv_heads, splits, group, 2)),
        "attn": Buffer("uint16", (c.q_width // 16, rows, 16)),
        "h": Buffer("uint16", (h_values,)),
        "logits": Buffer("float32", (rows, c.vocab_size)),
        "best_values": Buffer("float32", (plan.n_sm, rows)),
        "best_tokens": Buffer("int32", (plan.n_sm, rows)),
        "control": Buffer("int32", (4,)),
        "active_experts": Buffer("int32", (c.num_hidden_layers,)),
        "tokens_out": Buffer("int32", (MAX_LAUNCH_STEPS, rows)),
        "progress": Buffer("int32", (2,)),
        "counters": Buffer("int32", (len(plan.counters), COUNTER_STRIDE)),
        "status": Buffer("int32", (STATUS_WORDS,)),
        "trace": Buffer("uint64", (plan.n_tasks, 4)),
        "stage_trace": Buffer("uint64", (plan.n_sm, STAGE_TRACE, 4)),
    }
