"""How large the kernel is, in lines and in machine code, and what parts of it cost.

    python bench/code_size.py

Compiles the geometry of North Mini Code for a Hopper GPU, in each build, and the build for one row
with parts taken out (`PARTS`). Those do less than a kernel must, and only their size means
anything. Needs NVRTC and no GPU. Writes bench/results/code_size.json, with lines by section.
"""

from __future__ import annotations

import json
import re
import struct
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from bench.provenance import kernel_hash, provenance
from mkref.config import NORTH_MINI_CODE
from mkref.machine.nvrtc import compile_cubin, resources
from mkref.machine.source import kernel_source, ring_for
from mkref.plan.build import ROWS

BUILDS = (1, 2, 4, 8, 16, 32)
HOPPER_SHARED = 232448
"""Most dynamic shared memory of one block in bytes."""
PARTS: dict[str, tuple[tuple[str, str], ...]] = {
    "tokens drawn with a temperature": (
        ("      if (c.s.temperatures[row] > 0.0f)\n", "      if (false)\n"),
    ),
    "several rows of one sequence": (
        ("range.last - c.s.earlier[now.row], range.last - now.row}", "range.last, 0}"),
        ("  if (fresh.first < range.last) {\n", "  if (false) {\n"),
        ("if (has_fresh && fresh.first < range.last) {", "if (false) {"),
    ),
    "x before its counter": (
        ("EARLY_ROWS = 2;", "EARLY_ROWS = 0;"),
        ("          missing |= any_absent(quad);\n", ""),
        ("      make_absent(x_old + at);\n", ""),
        ("    make_absent(x_of(c, 1) + row * HIDDEN + k);\n", ""),
        ("if (task.signal >= 0 && block + 1 == task.count &&", "if (false &&"),
    ),
    "chains of any depth": (
        ("chain_anywhere(c, reader.held, first, k_tiles, b, tile_rows, wanted);", "{};"),
    ),
    "dense layers": (("dense = task.flags & FLAG_DENSE;", "dense = false;"),),
    "bounds of all waits": (
        (
            "if (c.stopped || reached(ptx::ld_acquire(at), want)) return;",
            "while (!reached(ptx::ld_acquire(at), want)) {}\n  if (true) return;",
        ),
        (
            "if (!ptx::mbar_try_wait(bar, parity) && poll_barrier(",
            "while (!ptx::mbar_try_wait(bar, parity)) {}\n  if (false && poll_barrier(",
        ),
        (
            "return ptx::mbar_try_wait(bar, parity) ||",
            "while (!ptx::mbar_try_wait(bar, parity)) {}\n  return true ||",
        ),
        ("return (++looks & 63) == 0 && too_long(since, place);", "return false;"),
    ),
}
"""What is taken out, as texts of the kernel and what stands there instead."""


def north_source(most_rows: int, capacity: int = HOPPER_SHARED) -> str:
    """The build for so many rows, with the ring of a GPU that gives a block `capacity` bytes."""
    ring = ring_for(NORTH_MINI_CODE, capacity, most_rows)
    return kernel_source(NORTH_MINI_CODE, ring, max(most_rows, ROWS), most_rows)


def machine_code_bytes(image: bytes) -> int:
    """Size of the kernel's section in a cubin, which is a 64-bit ELF file."""
    (table,) = struct.unpack_from("<Q", image, 0x28)
    size, count, names_at = struct.unpack_from("<HHH", image, 0x3A)
    heads = [struct.unpack_from("<IIQQQQIIQQ", image, table + i * size) for i in range(count)]
    names = heads[names_at][4]
    sizes = {image[names + h[0] :].split(b"\0", 1)[0]: h[5] for h in heads}
    return int(sizes[b".text.megakernel"])


def without(source: str, *parts: str) -> str:
    """The source with parts taken out.

    Raises:
        ValueError: a text of theirs is not there, or more than once.
    """
    for part in parts:
        for old, new in PARTS[part]:
            if (n := source.count(old)) != 1:
                raise ValueError(f"{part}: {n} times in the kernel, not once: {old}")
            source = source.replace(old, new)
    return source


def lines_by_section(text: str) -> dict[str, dict[str, int]]:
    """Lines of each section of the file, and how many of them are comments or empty."""
    sections: dict[str, dict[str, int]] = {}
    name = "head"
    for line in text.splitlines():
        if heading := re.match(r"// ---- \d+ (.*?) -+$", line):
            name = heading[1]
        counts = sections.setdefault(name, {"lines": 0, "comments": 0, "empty": 0})
        counts["lines"] += 1
        counts["comments"] += line.lstrip().startswith("//")
        counts["empty"] += not line.strip()
    return sections


def size(source: str) -> dict[str, int]:
    """Bytes of machine code and registers per thread."""
    image, report = compile_cubin(source, "sm_90a")
    return {"bytes": machine_code_bytes(image), "registers": resources(report).registers}


def main() -> int:
    """Entry point."""
    from cupy.cuda import nvrtc

    rows = []
    for most_rows in BUILDS:
        rows.append({"rows": most_rows, "without": [], **size(north_source(most_rows))})
        print(rows[-1], flush=True)
    for parts in (*((part,) for part in PARTS), tuple(PARTS)):
        rows.append({"rows": 1, "without": [*parts], **size(without(north_source(1), *parts))})
        print(rows[-1], flush=True)
    record = {
        "provenance": {
            **provenance(),
            "kernel": kernel_hash(),
            "nvrtc": ".".join(map(str, nvrtc.getVersion())),
        },
        "rows": rows,
        "lines": lines_by_section((ROOT / "cuda" / "megakernel.cu").read_text()),
    }
    out = ROOT / "bench" / "results" / "code_size.json"
    out.write_text(json.dumps(record, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
