"""Which arithmetic does `mma.sync.m16n8k16` (bf16 -> float32) really do? Compare a GPU with
candidate models.

Prints, for every candidate (fraction bits, fused block, rounding), the share of outputs with equal
bits.
The winner is the model of docs/numerics.md, "One mma". Runs on a GPU only: `python
bench/probe_mma.py`.
"""

from __future__ import annotations

import json
import os
import sys

import cupy as cp
import numpy as np

SOURCE = r"""
extern "C" __global__ void probe(const unsigned short* A, const unsigned short* B, const float* C,
float* D) {
  int n = blockIdx.x, lane = threadIdx.x, g = lane >> 2, t = lane & 3;
  const unsigned* a = (const unsigned*)(A + n * 256);
  const unsigned* b = (const unsigned*)(B + n * 128);   // B[n][k]
  const float* c = C + n * 128;
  float c0 = c[g * 8 + 2 * t], c1 = c[g * 8 + 2 * t + 1], c2 = c[(g + 8) * 8 + 2 * t], c3 = c[(g +
  8) * 8 + 2 * t + 1];
  asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32
  {%0,%1,%2,%3},{%4,%5,%6,%7},{%8,%9},{%0,%1,%2,%3};"
    : "+f"(c0), "+f"(c1), "+f"(c2), "+f"(c3)
    : "r"(a[g * 8 + t]), "r"(a[(g + 8) * 8 + t]), "r"(a[g * 8 + t + 4]), "r"(a[(g + 8) * 8 + t +
    4]), "r"(b[g * 8 + t]), "r"(b[g * 8 + t + 4]));
  float* d = D + n * 128;
  d[g * 8 + 2 * t] = c0; d[g * 8 + 2 * t + 1] = c1; d[(g + 8) * 8 + 2 * t] = c2; d[(g + 8) * 8 + 2 *
  t + 1] = c3;
}
"""


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
    return np.ldexp(v, e - F).astype(np.float32)


def fused(am, ae, bm, be, c, F, floor, mode, normal):
    pm, pe = am * bm, ae + be  # value pm * 2^(pe-14)
    cm, ce = split32(c.view(np.uint32))
    eff = pe + ((np.abs(pm) >= (1 << 15)) if normal else 0)
    eff = np.where(pm == 0, -10000, eff)
    e = np.maximum(eff.max(-1), np.where(cm == 0, -10000, ce))
    e = np.where(e == -10000, 0, e)
    terms = cut(np.ldexp(pm.astype(np.float64), pe - 14 - e[..., None] + F), floor).sum(-1)
    total = terms + cut(np.ldexp(cm.astype(np.float64), ce - 23 - e + F), floor)
    return round24(total, e, F, mode)


def model(A, B, C, F, block, floor, mode, normal):
    am, ae = split(A)
    bm, be = split(B)  # [n,16,16], [n,8(col),16]
    c = C.copy()
    for k in range(0, 16, block):
        s = slice(k, k + block)
        c = fused(
            am[:, :, None, s],
            ae[:, :, None, s],
            bm[:, None, :, s],
            be[:, None, :, s],
            c,
            F,
            floor,
            mode,
            normal,
        )
    return c


def main() -> int:
    rng = np.random.default_rng(5)
    n = 512
    sets = {}
    for name, spread in {"gauss": 0, "wide": 6, "wider": 14}.items():

        def draw(shape, s=spread):
            v = (
                rng.standard_normal(shape) * np.exp2(rng.integers(-s, s + 1, shape))
                if s
                else rng.standard_normal(shape)
            )
            return (np.asarray(v, np.float32).view(np.uint32) >> 16).astype(np.uint16)

        A, B = draw((n, 16, 16)), draw((n, 8, 16))
        C = (
            rng.standard_normal((n, 16, 8))
            * np.exp2(rng.integers(-spread - 4, spread + 5, (n, 16, 8)))
        ).astype(np.float32)
        if name == "wide":
            A[rng.random(A.shape) < 0.3] = 0
            C[::2] = 0
        sets[name] = (A, B, C)
    mod = cp.RawModule(code=SOURCE, backend="nvrtc", options=("--std=c++17",))
    kern = mod.get_function("probe")
    out, best = {}, {}
    for name, (A, B, C) in sets.items():
        D = cp.full((n, 16, 8), cp.nan, cp.float32)
        kern((n,), (32,), (cp.asarray(A), cp.asarray(B), cp.asarray(C), D))
        out[name] = D.get()
        for F in range(22, 29):
            for block in (16, 8, 4):
                for floor in (False, True):
                    for mode in ("rz", "rne"):
                        for normal in (False, True):
                            d = model(A, B, C, F, block, floor, mode, normal)
                            key = f"F={F} block={block} floor={int(floor)} {mode} normalised={int(normal)}"
                            best.setdefault(key, {})[name] = float(
                                (d.view(np.uint32) == out[name].view(np.uint32)).mean()
                            )
    rows = sorted(best.items(), key=lambda kv: -min(kv[1].values()))[:12]
    for key, shares in rows:
        print(key, {k: round(v, 5) for k, v in shares.items()})
    folder = os.environ.get("OUT", "")
    if folder:
        np.savez_compressed(
            os.path.join(folder, "mma.npz"),
            **{f"{k}_{i}": v for k, s in sets.items() for i, v in zip("ABC", s, strict=False)},
            **{f"{k}_D": v for k, v in out.items()},
        )
        with open(os.path.join(folder, "mma.json"), "w") as f:
            json.dump(
                {"gpu": cp.cuda.runtime.getDeviceProperties(0)["name"].decode(), "ranking": rows},
                f,
                indent=1,
            )
    return 0


if __name__ == "__main__":
    sys.exit(main())
