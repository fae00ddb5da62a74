"""Where a measurement comes from: GPU, driver, versions, commit, hash of the sources, date,
command.
"""

from __future__ import annotations

import datetime
import hashlib
import os
import platform
import subprocess
import sys
from pathlib import Path

__all__ = ["provenance", "source_hash"]

ROOT = Path(__file__).resolve().parent.parent
HASHED = ("cuda/**/*", "mkref/**/*.py", "tests/test_gpu*.py", "tests/decode.py")


def source_hash() -> str:
    """SHA-256 over the sources that decide what a GPU run computes."""
    digest = hashlib.sha256()
    for path in sorted({p for pattern in HASHED for p in ROOT.glob(pattern) if p.is_file()}):
        if "__pycache__" not in path.parts:
            digest.update(path.relative_to(ROOT).as_posix().encode())
            digest.update(path.read_bytes())
    return digest.hexdigest()[:16]


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

    return {
        **_gpu(),
        "python": platform.python_version(),
        "processor": platform.machine(),
        "torch": torch.__version__,
        "numpy": numpy.__version__,
        "commit": os.environ.get("MKREF_COMMIT") or _run("git", "rev-parse", "HEAD"),
        "sources": source_hash(),
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "command": " ".join(["python", *(Path(sys.argv[0]).name, *sys.argv[1:])]),
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
