"""Where a measurement comes from: GPU, driver, versions, commit, hash of the sources, date,
command.
"""

from __future__ import annotations

import datetime
import hashlib
import os
import platform
import re
import subprocess
import sys
from pathlib import Path

__all__ = ["kernel_hash", "provenance", "source_files", "source_hash"]

ROOT = Path(__file__).resolve().parent.parent
HASHED = (
    "cuda/megakernel.cu",
    "cuda/sampler/*.cu",
    "mkref/config*.py",
    "mkref/geometry.py",
    "mkref/engine/*.py",
    "mkref/machine/base.py",
    "mkref/machine/cuda.py",
    "mkref/machine/draw*.py",
    "mkref/machine/interface.py",
    "mkref/machine/launch.py",
    "mkref/machine/nvrtc.py",
    "mkref/machine/sampler.py",
    "mkref/machine/source.py",
    "mkref/plan/buffers.py",
    "mkref/plan/build.py",
    "mkref/plan/share.py",
    "mkref/plan/task.py",
    "mkref/reference/drawing.py",
    "mkref/reference/sampling.py",
    "mkref/reference/scalars.py",
    "mkref/weights/*.py",
    "tests/decode.py",
    "tests/draw*.py",
    "tests/test_*gpu*.py",
)
"""The sources that decide what a GPU run computes and checks."""


def source_files() -> dict[str, str]:
    """SHA-256 of each of those files, by path."""
    paths = sorted({p for pattern in HASHED for p in ROOT.glob(pattern) if p.is_file()})
    return {
        path.relative_to(ROOT).as_posix(): hashlib.sha256(path.read_bytes()).hexdigest()[:16]
        for path in paths
    }


def source_hash() -> str:
    """One hash over all of them."""
    return hashlib.sha256(repr(source_files()).encode()).hexdigest()[:16]


def kernel_hash() -> str:
    """Hash of the generated CUDA source for North and for nano: equal hash, equal machine code.

    Without comments and blanks: words may become better without another run.
    """
    from mkref.config import NORTH_MINI_CODE, NorthConfig
    from mkref.machine.source import Ring, kernel_source
    from mkref.paths import models_root

    configs = (NORTH_MINI_CODE, NorthConfig.load(models_root() / "nano"))
    text = "".join(kernel_source(config, Ring(5, 64)) for config in configs)
    bare = " ".join(re.sub(r"//[^\n]*", "", text).split())
    return hashlib.sha256(bare.encode()).hexdigest()[:16]


def _run(*command: str) -> str:
    try:
        return subprocess.run(
            command, capture_output=True, text=True, check=True, cwd=ROOT
        ).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def provenance() -> dict[str, str]:
    """A record of this machine, these sources and this command; of the GPU if there is one."""
    import numpy
    import torch

    from mkref.measure.record import command_line

    return {
        **_gpu(),
        "python": platform.python_version(),
        "processor": platform.machine(),
        "torch": torch.__version__,
        "numpy": numpy.__version__,
        "commit": os.environ.get("MKREF_COMMIT") or _run("git", "rev-parse", "HEAD"),
        "sources": source_hash(),
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "command": command_line("python", [Path(sys.argv[0]).name, *sys.argv[1:]]),
    }


def _gpu() -> dict[str, str]:
    try:
        import cupy

        gpu = cupy.cuda.runtime.getDeviceProperties(0)
    except Exception:  # no CuPy, no driver, no GPU: CuPy has its own error for each
        return {"gpu": "none"}
    driver = _run("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader")
    return {
        "gpu": gpu["name"].decode(),
        "sms": str(gpu["multiProcessorCount"]),
        "memory_gb": f"{gpu['totalGlobalMem'] / 1e9:.1f}",
        "driver": driver.splitlines()[0],
        "cuda_runtime": str(cupy.cuda.runtime.runtimeGetVersion()),
        "nvrtc": ".".join(map(str, cupy.cuda.nvrtc.getVersion())),
        "cupy": cupy.__version__,
    }
