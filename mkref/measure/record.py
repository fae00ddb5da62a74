"""Records of measurements: where they come from, what is kept of the samples, JSON.

What it does not do: know what was measured.
"""

from __future__ import annotations

import datetime
import hashlib
import json
import os
import platform
import subprocess
import sys
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import numpy as np

import mkref
from mkref.errors import RequestError
from mkref.machine.gpu import driver_version, find_gpus
from mkref.paths import cuda_root

__all__ = ["check_target", "command_line", "process_age_s", "provenance", "spread", "write_record"]


def command_line(program: str, arguments: Sequence[str]) -> str:
    """The command for a record; of a file's path only the name, since folders are one computer's.

    >>> command_line("mkref", ["bench", "decode", "--json", "/tmp/run/decode.json"])
    'mkref bench decode --json decode.json'
    """
    return " ".join([program, *(Path(a).name if os.path.isabs(a) else a for a in arguments)])


def provenance(machine: str, **more: Any) -> dict[str, Any]:
    """Of this computer, these sources and this command.

    Args:
        machine: its name.
        more: what else belongs to all rows of the record.
    """
    gpus = find_gpus() if machine == "cuda" else []
    made: dict[str, Any] = {
        "machine": machine,
        "gpu": gpus[0].name if gpus else "none",
        "mkref": mkref.__version__,
        "kernel": hashlib.sha256((cuda_root() / "megakernel.cu").read_bytes()).hexdigest()[:16],
        "commit": os.environ.get("MKREF_COMMIT") or _line("git", "rev-parse", "HEAD"),
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "command": command_line("mkref", sys.argv[1:]),
        "python": platform.python_version(),
        "torch": _version("torch"),
        "numpy": np.__version__,
        "platform": platform.platform(),
    }
    if gpus:
        made["sms"] = gpus[0].n_sm
        made["cuda_driver"] = driver_version() or "unknown"
        made["driver"] = _line("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader")
        made["cupy"] = _version("cupy-cuda13x")
    else:
        made["cores"] = os.cpu_count() or 1
    return {**made, **more}


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "unknown"


def _line(*command: str) -> str:
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, check=True, cwd=cuda_root(), timeout=30
        )
    except (OSError, subprocess.SubprocessError):
        return "unknown"
    return done.stdout.strip().partition("\n")[0] or "unknown"


def spread(samples: Sequence[float]) -> dict[str, Any]:
    """Median of samples in ms, how far the middle 80 % of them lie apart, and the samples.

    >>> spread([1.0, 2.0, 3.0])
    {'ms_per_step': 2.0, 'spread_ms': 1.6, 'samples_ms': [1.0, 2.0, 3.0]}
    """
    low, median, high = np.percentile(samples, [10, 50, 90])
    return {
        "ms_per_step": round(float(median), 5),
        "spread_ms": round(float(high - low), 5),
        "samples_ms": [round(float(sample), 5) for sample in samples],
    }


def process_age_s() -> float | None:
    """Seconds since this process was started, imports included; None where nobody tells."""
    try:
        fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
        uptime = float(Path("/proc/uptime").read_text().split()[0])
        return uptime - int(fields[19]) / os.sysconf("SC_CLK_TCK")
    except (OSError, ValueError, IndexError):
        return None


def check_target(path: str | None) -> None:
    """Refuse a file that cannot be written, before anything is measured.

    Raises:
        RequestError: its folder does not exist, or it is a folder.
    """
    if path is not None and (
        not path or os.path.isdir(path) or not os.path.isdir(os.path.dirname(path) or ".")
    ):
        raise RequestError(f"--json: {path!r}; must be a file in a folder that exists")


def write_record(path: str | None, made: dict[str, Any], rows: Sequence[dict[str, Any]]) -> None:
    """Write `{"provenance": ..., "rows": [...]}`, if there is a path; after every row, so that
    nothing is lost.
    """
    if path is not None:
        text = json.dumps({"provenance": made, "rows": list(rows)}, indent=1)
        Path(path).write_text(text + "\n", encoding="utf-8")
