"""What holds for every test: one thread, no GPU tests where there is no GPU, the GPU record shown.

GPU tests are left out rather than run and passed over; the terminal summary says how many, and
whether the recorded GPU run in bench/results/ belongs to the sources as they stand.
"""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parent.parent

# Before anything imports torch: tiny models run faster on one thread, and steadily. Kernels of
# notebooks inherit it.
for _variable in ("OMP_NUM_THREADS", "MKL_NUM_THREADS"):
    os.environ[_variable] = "1"
os.environ["MKREF_PROGRESS"] = "off"  # tests solve exercises; the file of who runs them stays
os.environ["MKREF_MEASURE"] = "off"  # lessons do not measure again on a GPU: nbval compares
if "torch" in sys.modules:
    sys.modules["torch"].set_num_threads(1)

if find_spec("nbformat") is not None:  # a GPU machine need not have Jupyter
    from tests.widgets_lab import lab, lab_server, widgets  # noqa: F401  (one for all tests)


def have_gpu() -> bool:
    """Whether CuPy is installed and sees a device."""
    try:
        import cupy
    except ImportError:
        return False
    return bool(cupy.cuda.is_available())


LEFT_OUT = pytest.StashKey[int]()
"""How many GPU tests were left out."""


def pytest_deselected(items: list[pytest.Item]) -> None:
    """Count the GPU tests among them."""
    if items:
        stash = items[0].config.stash
        n = sum(item.get_closest_marker("gpu") is not None for item in items)
        stash[LEFT_OUT] = stash.get(LEFT_OUT, 0) + n


def pytest_sessionfinish(session: pytest.Session) -> None:
    """A worker tells who writes the summary."""
    output = getattr(session.config, "workeroutput", None)
    if output is not None:
        output["gpu_left_out"] = session.config.stash.get(LEFT_OUT, 0)


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    """Every worker has collected the same tests."""
    if n := getattr(node, "workeroutput", {}).get("gpu_left_out"):
        node.config.stash[LEFT_OUT] = n


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out the GPU tests that `-m` did not leave out already, where no GPU answers."""
    gpu_items = [item for item in items if item.get_closest_marker("gpu")]
    if gpu_items and not have_gpu():
        config.hook.pytest_deselected(items=gpu_items)
        items[:] = [item for item in items if not item.get_closest_marker("gpu")]


def gpu_record() -> str:
    """One line of scripts/gpu_record.py: does the recorded GPU run belong to these sources?"""
    script = ROOT / "scripts" / "gpu_record.py"
    if not script.is_file():
        return "no GPU record"
    done = subprocess.run(
        [sys.executable, str(script), "--check"], capture_output=True, text=True, timeout=120
    )
    lines = (done.stdout + done.stderr).strip().splitlines()
    return lines[-1] if lines else f"gpu_record.py said nothing (status {done.returncode})"


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Say which GPU tests were left out and what their record is worth."""
    if n_gpu := terminalreporter.config.stash.get(LEFT_OUT, 0):
        terminalreporter.section("GPU tests")
        terminalreporter.write_line(f"{n_gpu} left out here; `make test-gpu` runs them on a GPU")
        terminalreporter.write_line(gpu_record())
