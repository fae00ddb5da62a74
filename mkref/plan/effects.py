"""What each operation reads and writes: the model of the kernel that the verifier works with.

A value is the content that a buffer has during one layer. Buffers whose members are written and
read together count as one here. Of "x" there are two copies, used in turn; of everything else one.
Weights, tables and the step's inputs do not change during a step, and the KV cache of a layer is
touched by one ATTENTION task per page and head only, so none of them appears.

What it does not do: know a plan.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from mkref.plan.task import Op
from mkref.weights.layout import TILE

if TYPE_CHECKING:
    from mkref.config import NorthConfig

__all__ = ["COPIES", "READS", "ROUTED", "ROW_OPS", "SLOT_OPS", "WRITES", "Touch", "layers_of"]
__all__ += ["row_blocks"]

ROW_OPS = (Op.EMBED, Op.ROUTER, Op.QKV, Op.O_PROJ, Op.DOWN, Op.HEAD)
"""`first, count` is a range of row blocks."""
SLOT_OPS = (Op.ATTENTION, Op.MERGE, Op.GATE_UP)
"""`first, count` is a slot and the number of slots; the work is divided at run time."""
ROUTED = (Op.GATE_UP, Op.DOWN)
"""Needs the layer's experts, which the loader finds from the router logits."""


@dataclass(frozen=True)
class Touch:
    """One value that an operation reads or writes.

    Attributes:
        buffer: its name, or names that go together.
        part: "all" of it; the "rows" of the task's row blocks; the part of a "slot", known at run
            time only; or the entry "index" (a reader: all entries below it).
        of_next: the value belongs to the next layer.
        by_loader: it is read by the loader, which does not wait for `wait` but for `route_wait`.
    """

    buffer: str
    part: Literal["all", "rows", "slot", "index"] = "all"
    of_next: bool = False
    by_loader: bool = False


COPIES = {"x": 2}
"""Values of a buffer that exist at the same time; 1 if not listed."""

_ROUTE = Touch("router_logits", by_loader=True)

READS: dict[Op, tuple[Touch, ...]] = {
    Op.EMBED: (),
    Op.ROUTER: (Touch("x"),),
    Op.QKV: (Touch("x"),),
    Op.ATTENTION: (Touch("q, k_new, v_new"),),
    Op.MERGE: (Touch("part_o, part_ml"),),
    Op.GATE_UP: (Touch("x"), _ROUTE),
    Op.O_PROJ: (Touch("attn"), Touch("x", "rows")),
    Op.DOWN: (Touch("h"), Touch("x_mid", "rows"), _ROUTE),
    Op.HEAD: (Touch("x"),),
    Op.SAMPLE: (Touch("best_values, best_tokens", "index"),),
}

WRITES: dict[Op, tuple[Touch, ...]] = {
    Op.EMBED: (Touch("x", "rows"),),
    Op.ROUTER: (Touch("router_logits", "rows"),),
    Op.QKV: (Touch("q, k_new, v_new", "rows"),),
    Op.ATTENTION: (Touch("part_o, part_ml", "slot"),),
    Op.MERGE: (Touch("attn", "slot"),),
    Op.GATE_UP: (Touch("h", "slot"),),
    Op.O_PROJ: (Touch("x_mid", "rows"),),
    Op.DOWN: (Touch("x", "rows", of_next=True),),
    Op.HEAD: (Touch("logits", "rows"), Touch("best_values, best_tokens", "index")),
    Op.SAMPLE: (Touch("next_tokens"),),
}


def row_blocks(config: NorthConfig, op: int) -> int:
    """Row blocks of 16 outputs that an operation has in one layer."""
    hidden = config.hidden_size // TILE
    return {
        Op.EMBED: hidden,
        Op.ROUTER: -(-config.num_experts // TILE),
        Op.QKV: (config.q_width + 2 * config.kv_width) // TILE,
        Op.O_PROJ: hidden,
        Op.DOWN: hidden,
        Op.HEAD: -(-config.vocab_size // TILE),
    }[Op(op)]


def layers_of(config: NorthConfig, op: int) -> range | tuple[int, ...]:
    """Layers in which an operation occurs; HEAD and SAMPLE come after the last, as layer L."""
    layers = config.num_hidden_layers
    if op == Op.EMBED:
        return (0,)
    if op in (Op.HEAD, Op.SAMPLE):
        return (layers,)
    if op == Op.ROUTER:
        return tuple(layer for layer in range(layers) if not config.is_dense(layer))
    return range(layers)
