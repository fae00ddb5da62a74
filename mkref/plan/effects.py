"""What each operation reads and writes: the model of the kernel that the verifier works with.

A value is the content that a buffer has during one layer of one step. Buffers whose members are
written and read together count as one here. Every layer has KV pages of its own; of everything else
there is one. (Of "x" there are two, used in turn. But who writes the next x makes the last one
ABSENT, so it must come after all who read that: as if both lay in the same place.) Most values are
read in the step that writes them. Two are read in the next one: the tokens, which every SM finds
and keeps for itself, and the KV pages, to which MERGE appends and which the loaders of the next
step copy.

Not here: weights, tables and the launch's inputs, which do not change during a launch; "tokens_out"
and "progress", which the SAMPLE of slot 0 alone writes, for the host.

What it does not do: know a plan.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from mkref.plan.task import Op
from mkref.weights.layout import TILE

if TYPE_CHECKING:
    from mkref.config import NorthConfig

__all__ = ["EARLY", "HELPED", "KINDS", "PER_LAYER", "READS", "ROUTED", "ROW_OPS"]
__all__ += ["SAME_THREADS", "SLOT_OPS", "WRITES", "Touch", "layers_of", "row_blocks"]

ROW_OPS = (Op.EMBED, Op.ROUTER, Op.QKV, Op.O_PROJ, Op.DOWN, Op.HEAD)
"""`first, count` is a range of row blocks."""
SLOT_OPS = (Op.ATTENTION, Op.MERGE, Op.GATE_UP, Op.SAMPLE)
"""`first, count` is a slot and the number of slots; the work is divided at run time (of SAMPLE,
each slot does all).
"""
ROUTED = (Op.GATE_UP, Op.DOWN)
"""Needs the layer's experts, which the loader finds from the router logits."""
HELPED = (Op.MERGE,)
"""Done by the helper warp when a launch has more than MERGE_ROWS rows (a constant of the kernel):
beside the consumers, they do not wait for each other. With fewer rows the consumers do it.
"""
EARLY = (Op.ROUTER, Op.QKV, Op.HEAD)
"""May have Flag.EARLY, after layer 0: in a launch of at most EARLY_ROWS rows (a constant of the
kernel) they read x as soon as its words are there. The counter that they wait for, signalled by
DOWN, then announces x and orders nothing.
"""
KINDS: tuple[tuple[tuple[Op, ...], bool], ...] = ((HELPED, False), (HELPED, True), ((), True))
"""What the helper does in a launch, and whether x is read early: the number of rows chooses.
MERGE_ROWS is at most EARLY_ROWS. A plan must be right for each.
"""


@dataclass(frozen=True)
class Touch:
    """One value that an operation reads or writes.

    Attributes:
        buffer: its name, or names that go together.
        part: "all" of it; the "rows" of the task's row blocks; the part of a "slot", known at run
            time only; the entry "index" (a reader: all entries below it); or what the "sm" keeps
            for itself.
        layer: the value belongs to the task's "own" layer; to the "next"; or to the "last", that of
            HEAD and SAMPLE.
        of_step_before: what is read was written in the step before.
        by_loader: it is read by the loader, which does not wait for `wait` but for `route_wait`.
        announced: the words tell by themselves that they are there, so their readers need not know
            that the writers have finished.
    """

    buffer: str
    part: Literal["all", "rows", "slot", "index", "sm"] = "all"
    layer: Literal["own", "next", "last"] = "own"
    of_step_before: bool = False
    by_loader: bool = False
    announced: bool = False


PER_LAYER = ("kv",)
"""Buffers in which every layer has its own part."""
SAME_THREADS = ("x", "x_mid")
"""Rows that the same threads of an SM write and read, if both tasks have the same `first`."""

_ROUTE = Touch("router_logits", by_loader=True, announced=True)

READS: dict[Op, tuple[Touch, ...]] = {
    Op.EMBED: (Touch("tokens", "sm", layer="last", of_step_before=True),),
    Op.ROUTER: (Touch("x"),),
    Op.QKV: (Touch("x"),),
    Op.ATTENTION: (Touch("q, k_new, v_new"), Touch("kv", of_step_before=True, by_loader=True)),
    Op.MERGE: (Touch("part_o, part_ml"), Touch("q, k_new, v_new")),
    Op.GATE_UP: (Touch("x"), _ROUTE),
    Op.O_PROJ: (Touch("attn"), Touch("x", "rows")),
    Op.DOWN: (Touch("h"), Touch("x_mid", "rows"), _ROUTE),
    Op.HEAD: (Touch("x"),),
    Op.SAMPLE: (Touch("best_values, best_tokens", "index"), Touch("control")),
}

WRITES: dict[Op, tuple[Touch, ...]] = {
    Op.EMBED: (Touch("x", "rows"),),
    Op.ROUTER: (Touch("router_logits", "rows"),),
    Op.QKV: (Touch("q, k_new, v_new", "rows"),),
    Op.ATTENTION: (Touch("part_o, part_ml", "slot"),),
    Op.MERGE: (Touch("attn", "slot"), Touch("kv", "slot")),
    Op.GATE_UP: (Touch("h", "slot"),),
    Op.O_PROJ: (Touch("x_mid", "rows"),),
    Op.DOWN: (Touch("x", "rows", layer="next"),),
    # One HEAD task writes "control"; here all do, which asks for no more than the bests do.
    Op.HEAD: (
        Touch("logits", "rows"),
        Touch("best_values, best_tokens", "index"),
        Touch("control"),
    ),
    Op.SAMPLE: (Touch("tokens", "sm"),),
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
