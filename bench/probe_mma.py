"""Which arithmetic does `mma.sync.m16n8k16` (bf16 -> float32) really do? Compare a GPU with
candidate models.

Prints, for the best candidates (fraction bits, fused block, rounding), the share of outputs with
equal bits, and writes them to $OUT, if that is set, with the GPU that they are of.
The winner is the model of docs/numerics.md, "One mma". Runs on a GPU only: `python
bench/probe_mma.py`.
"""

from __future__ import annotations

import json
import os
import sys
from dataclasses import dataclass
from pathlib import Path

import numpy as np

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from bench.provenance import provenance

SOURCE = r"""
extern "C" __global__ void probe(const unsigned short* A, const unsigned short* B, const float* C,
                                 float* D) {
  int n = blockIdx.x, lane = threadIdx.x, g = lane >> 2, t = lane & 3;
  const unsigned* a = (const unsigned*)(A + n * 256);  // [row][k]
  const unsigned* b = (const unsigned*)(B + n * 128);  // [column][k]
  const float* c = C + n * 128 + g * 8 + 2 * t;        // [row][column]
  float c0 = c[0], c1 = c[1], c2 = c[64], c3 = c[65];
  asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "
               "{%0,%1,%2,%3},{%4,%5,%6,%7},{%8,%9},{%0,%1,%2,%3};"
               : "+f"(c0), "+f"(c1), "+f"(c2), "+f"(c3)
               : "r"(a[g * 8 + t]), "r"(a[(g + 8) * 8 + t]), "r"(a[g * 8 + t + 4]),
                 "r"(a[(g + 8) * 8 + t + 4]), "r"(b[g * 8 + t]), "r"(b[g * 8 + t + 4]));
  float* d = D + n * 128 + g * 8 + 2 * t;
  d[0] = c0;
  d[1] = c1;
  d[64] = c2;
  d[65] = c3;
}
"""


Pair = tuple[np.ndarray, np.ndarray]
NOTHING = -10000
"""Exponent of a zero: it takes no part in the maximum."""


def split(word: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """bf16 words -> (signed 8-bit significand, exponent of its unit bit 2^-7)."""
    e = ((word >> 7) & 0xFF).astype(np.int64)
    m = (word & 0x7F).astype(np.int64) | np.where(e > 0, 128, 0)
    return np.where(word >> 15, -m, m), np.maximum(e, 1) - 127


def split32(word: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """float32 words -> (signed 24-bit significand, exponent of its unit bit 2^-23)."""
    e = ((word >> 23) & 0xFF).astype(np.int64)
    m = (word & 0x7FFFFF).astype(np.int64) | np.where(e > 0, 1 << 23, 0)
    return np.where(word >> 31, -m, m), np.maximum(e, 1) - 127


def cut(v: np.ndarray, floor: bool) -> np.ndarray:
    """Drop the fraction: downwards or towards zero."""
    return np.floor(v) if floor else np.trunc(v)


def round24(total: np.ndarray, e: np.ndarray, F: int, mode: str) -> np.ndarray:
    """integer `total` times 2^(e-F) -> float32, by truncation or to nearest."""
    v = total.astype(np.float64)
    if mode == "rne":
        return np.ldexp(v, e - F).astype(np.float32)
    _, ex = np.frexp(v)
    drop = np.maximum(np.maximum(ex - 24, 0), (-149 - (e - F)))
    v = np.ldexp(np.trunc(np.ldexp(v, -drop)), drop)
    with np.errstate(over="ignore"):  # beyond float32 it is infinite, as on the GPU
        return np.ldexp(v, e - F).astype(np.float32)


@dataclass(frozen=True)
class Model:
    """One way in which an mma might add: kept fraction bits, products per fused sum, roundings."""

    F: int
    block: int
    floor: bool
    mode: str
    normalised: bool

    def __str__(self) -> str:
        """As the record has it: "F=25 block=16 floor=0 rz normalised=0"."""
        flags = f"floor={self.floor:d} {self.mode} normalised={self.normalised:d}"
        return f"F={self.F} block={self.block} {flags}"

    def fused(self, a: Pair, b: Pair, c: np.ndarray) -> np.ndarray:
        """c plus the products of significand and exponent pairs along the last axis."""
        pm, pe = a[0] * b[0], a[1] + b[1]  # value pm * 2^(pe - 14)
        cm, ce = split32(c.view(np.uint32))
        own = pe + ((np.abs(pm) >= (1 << 15)) if self.normalised else 0)
        own = np.where(pm == 0, NOTHING, own)
        e = np.maximum(own.max(-1), np.where(cm == 0, NOTHING, ce))
        e = np.where(e == NOTHING, 0, e)
        terms = cut(np.ldexp(pm.astype(np.float64), pe - 14 - e[..., None] + self.F), self.floor)
        last = cut(np.ldexp(cm.astype(np.float64), ce - 23 - e + self.F), self.floor)
        return round24(terms.sum(-1) + last, e, self.F, self.mode)

    def mma(self, A: np.ndarray, B: np.ndarray, C: np.ndarray) -> np.ndarray:
        """bf16 words A [n, 16, 16], B [n, 8, 16 (k)] and float32 C [n, 16, 8]: C + A B."""
        am, ae = split(A[:, :, None])
        bm, be = split(B[:, None])
        c = C.copy()
        for k in range(0, 16, self.block):
            part = np.s_[..., k : k + self.block]
            c = self.fused((am[part], ae[part]), (bm[part], be[part]), c)
        return c


CANDIDATES = [
    Model(F, block, floor, mode, normalised)
    for F in range(22, 29)
    for block in (16, 8, 4)
    for floor in (False, True)
    for mode in ("rz", "rne")
    for normalised in (False, True)
]
KINDS = {"gauss": 0, "wide": 6, "wider": 14, "edge": 70}
"""Of operands, by the `spread` of their exponents."""


def inputs(spread: int, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Random operands of 192 mmas whose exponents spread over 2 * `spread` powers of two."""
    n = 192

    def scaled(shape: tuple[int, ...], more: int) -> np.ndarray:
        powers = rng.integers(-spread - more, spread + more + 1, shape)
        return (rng.standard_normal(shape) * np.exp2(powers)).astype(np.float32)

    words = [
        (scaled(s, 0).view(np.uint32) >> 16).astype(np.uint16) for s in ((n, 16, 16), (n, 8, 16))
    ]
    C = scaled((n, 16, 8), 4)
    if spread:  # some zeros too
        words[0][rng.random(words[0].shape) < 0.3] = 0
        C[::2] = 0
    if spread > 60:  # and subnormal operands
        words[0][rng.random(words[0].shape) < 0.1] &= 0x807F
    return words[0], words[1], C


def on_gpu(A: np.ndarray, B: np.ndarray, C: np.ndarray) -> np.ndarray:
    """What the GPU makes of C + A B, float32 as `inputs` has C."""
    import cupy as cp

    module = cp.RawModule(code=SOURCE, backend="nvrtc", options=("--std=c++17",))
    D = cp.full(C.shape, cp.nan, cp.float32)
    arrays = (cp.asarray(A), cp.asarray(B), cp.asarray(C), D)
    module.get_function("probe")((len(C),), (32,), arrays)
    return np.asarray(D.get())


def main() -> int:
    """Run the GPU, compare with every candidate, print the best and write them to $OUT."""
    rng = np.random.default_rng(5)
    shares: dict[str, dict[str, float]] = {}
    outputs = {}
    for name, spread in KINDS.items():
        A, B, C = inputs(spread, rng)
        bits = on_gpu(A, B, C).view(np.uint32)
        outputs[name] = bits.size
        for model in CANDIDATES:
            equal = model.mma(A, B, C).view(np.uint32) == bits
            shares.setdefault(str(model), {})[name] = float(equal.mean())
    ranking = sorted(shares.items(), key=lambda item: -min(item[1].values()))[:12]
    for key, value in ranking:
        print(key, {k: round(v, 5) for k, v in value.items()})
    if folder := os.environ.get("OUT"):
        record = {"provenance": provenance(), "outputs": outputs, "ranking": ranking}
        (Path(folder) / "mma_probe.json").write_text(json.dumps(record, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
