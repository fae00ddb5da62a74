"""The generated half of the CUDA source: geometry, opcodes and records as C++, from their Python
definitions.

`kernel_source` puts it in front of `cuda/megakernel.cu`. It compiles nothing.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from mkref.errors import MachineError
from mkref.paths import cuda_root
from mkref.plan.buffers import BUFFERS, COUNTER_STRIDE, SCALARS, STAGE_TRACE, STOP_IDS, max_active
from mkref.plan.build import CHUNK_PAGES, MOST_SPLITS, PAGE, ROWS
from mkref.plan.task import FIELDS, WORDS, Flag, Op
from mkref.reference.scalars import score_scale

if TYPE_CHECKING:
    from mkref.config import NorthConfig

__all__ = ["THREADS", "Ring", "build_rows", "kernel_source", "ring_for", "shared_bytes"]

CONSUMERS = 8
"""Consumer warps of one block."""
THREADS = (CONSUMERS + 4) * 32
"""Threads of one block: the consumers, loader, helper, waiter and signaller."""
TASK_SLOTS = 4
"""Task records that lie in shared memory."""


@dataclass(frozen=True)
class Ring:
    """Shape of the shared-memory ring: number of stages and tiles (512 bytes) per stage."""

    stages: int
    stage_tiles: int


def build_rows(rows: int) -> int:
    """Most rows of the build of the kernel that runs a step of `rows` rows: a power of two.

    A build for few rows needs less shared memory and fewer instructions. All give the same bits.
    """
    return 1 << (rows - 1).bit_length()


def shared_bytes(config: NorthConfig, ring: Ring, most_rows: int = ROWS) -> int:
    """Dynamic shared memory of one block of a build; the kernel asserts that its struct fits."""
    stages = ring.stages * (ring.stage_tiles * 512 + 16)
    activation = config.hidden_size * most_rows * 2
    partial = 2 * CONSUMERS * max(16 * most_rows, 64) * 4
    attention = CONSUMERS * (256 + 2 * 8 * 4)  # weights, maxima, sums of a chunk
    merge = -(-MOST_SPLITS // 32) * 256
    route = 4 + 4 * max_active(config, most_rows) + -(-config.num_experts // 4) * 16 * most_rows
    tasks = TASK_SLOTS * (WORDS * 4 + 4 + 3 * 8) + WORDS * 4  # and the loader's
    per_row = most_rows * (CONSUMERS * (4 + 8) + 5 * 4)  # squares, bests; tokens and the like
    rope = config.head_dim * 4 * (most_rows if most_rows <= ROWS else 1)
    params = 8 * (len(BUFFERS) + len(SCALARS))
    total = (
        rope + stages + activation + partial + attention + merge + route + tasks + per_row + params
    )
    return -(-(total + 256) // 128) * 128  # 256: alignment of members, and some words


def ring_for(
    config: NorthConfig,
    capacity: int,
    most_rows: int = ROWS,
    *,
    stages: int = 6,
    stage_tiles: int = 64,
) -> Ring:
    """The largest ring of at most `stages` stages that fits into `capacity` bytes of shared memory
    per block, beside what a build for `most_rows` needs, and holds the keys of a chunk of
    attention.

    Raises:
        MachineError: not even two stages of a quarter of the wanted size fit.
    """
    half_page = config.head_dim // 4  # tiles of the keys, or of the values
    for tiles in (stage_tiles, stage_tiles // 2, stage_tiles // 4):
        least = max(2, CHUNK_PAGES * -(-half_page // tiles))
        for n in range(max(stages * stage_tiles // tiles, least), least - 1, -1):
            if shared_bytes(config, Ring(n, tiles), most_rows) <= capacity:
                return Ring(n, tiles)
    raise MachineError(
        f"shared memory: {capacity} bytes per block cannot hold the activations of hidden size "
        f"{config.hidden_size} and a ring of two stages; a GPU with more shared memory is needed"
    )


def _float(value: float) -> str:
    """A float32 constant as an exact C++ literal."""
    return f"{float(np.float32(value)).hex()}f"


def _header(
    config: NorthConfig, ring: Ring, rows: int, most_rows: int, switches: dict[str, bool]
) -> str:
    dense = {config.mlp_width(i) for i in range(config.num_hidden_layers) if config.is_dense(i)}
    ints = {
        "N_LAYERS": config.num_hidden_layers,
        "HIDDEN": config.hidden_size,
        "HEAD_DIM": config.head_dim,
        "N_HEADS": config.num_attention_heads,
        "N_KV_HEADS": config.num_key_value_heads,
        "N_EXPERTS": config.num_experts,
        "TOP_K": config.num_experts_per_tok,
        "EXPERT_WIDTH": config.intermediate_size if config.n_sparse_layers else 0,
        "DENSE_WIDTH": max(dense, default=0),
        "VOCAB": config.vocab_size,
        "RING_STAGES": ring.stages,
        "STAGE_TILES": ring.stage_tiles,
        "SHARED_BYTES": shared_bytes(config, ring, most_rows),
        "ROWS": rows,
        "MOST_ROWS": most_rows,
        "PAGE": PAGE,
        "CHUNK_PAGES": CHUNK_PAGES,
        "MOST_SPLITS": MOST_SPLITS,
        "STOP_IDS": STOP_IDS,
        "COUNTER_STRIDE": COUNTER_STRIDE,
        "STAGE_TRACE": STAGE_TRACE,
    }
    floats = {
        "RMS_EPS": config.rms_norm_eps,
        "LOGIT_SCALE": config.logit_scale,
        "SCORE_SCALE": float(score_scale(config.head_dim)),
    }
    bools = {"NORM_TOPK": config.norm_topk_prob, **switches}
    lines = ["// Generated by mkref/machine/source.py from the model's config and the task record."]
    lines += [f"constexpr int {name} = {value};" for name, value in ints.items()]
    lines += [
        f"constexpr float {name} = {_float(value)};  // {value:.9g}"
        for name, value in floats.items()
    ]
    lines += [f"constexpr bool {name} = {str(value).lower()};" for name, value in bools.items()]
    lines += [f"constexpr int OP_{op.name} = {op.value};" for op in Op]
    lines += [f"constexpr int OP_STOP = {max(Op) + 1};"]
    lines += [f"constexpr int FLAG_{flag.name} = {flag.value};" for flag in Flag]
    lines += ["struct Task {", *(f"  int {name};" for name in FIELDS), "};"]
    return "\n".join(lines) + "\n"


def _params() -> str:
    """`struct Params`: it needs the integer types that the kernel file introduces."""
    members = [f"  {ctype} {name};" for name, ctype in BUFFERS.items()]
    members += [f"  long long {name};" for name in SCALARS]
    return "\n".join(["struct Params {", *members, "};"]) + "\n"


_TYPES = """\
#ifdef __CUDACC__  // no headers: NVRTC needs nothing on disk
typedef unsigned char uint8_t;
typedef unsigned short uint16_t;
typedef unsigned int uint32_t;
typedef unsigned long long uint64_t;
#endif
"""


def kernel_source(
    config: NorthConfig,
    ring: Ring,
    rows: int = ROWS,
    most_rows: int = 0,
    *,
    trace: bool = False,
    checked: bool = False,
    run_ahead: bool = True,
    dependent_launch: bool = False,
) -> str:
    """The whole translation unit for one geometry, ready for NVRTC or a host compiler.

    Args:
        config: geometry.
        ring: shape of the shared-memory ring.
        rows: rows that the buffers have places for, `Plan.rows`.
        most_rows: rows that this build can run, see `build_rows`; 0: all of them.
        trace: stamp every task with the time.
        checked: every thread arrives and waits for itself, so that a race checker can follow.
        run_ahead: False: the loader copies for a task only when the consumers have been given it.
        dependent_launch: wait for the kernel before this one where its results are needed, so that
            both may overlap (programmatic dependent launch).
    """
    kernel = (cuda_root() / "megakernel.cu").read_text()
    switches = {
        "TRACE": trace,
        "CHECKED": checked,
        "RUN_AHEAD": run_ahead,
        "DEPENDENT_LAUNCH": dependent_launch,
    }
    return (
        _header(config, ring, rows, most_rows or rows, switches)
        + _TYPES
        + _params()
        + '#line 1 "megakernel.cu"\n'
        + kernel
    )
