"""The Makefile, the scripts behind it and the lock: their promises, without installing anything."""

from __future__ import annotations

import os
import re
import subprocess
from importlib.metadata import PackageNotFoundError, metadata, requires
from pathlib import Path

import pytest
from lock import LINUX_ONLY, canonical, lock_text
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.version import Version

from tests.tree import ROOT, pyproject

TARGETS = ("lab", "test", "check", "bench", "test-gpu", "lock", "notebooks", "slides", "clean")
# What a CUDA build of torch pins by itself; the lock leaves it to torch.
TORCH_BRINGS = re.compile(r"nvidia-|cuda-toolkit$|triton$")


def pins() -> dict[str, Requirement]:
    """The lines of requirements.lock by canonical name."""
    lines = (ROOT / "requirements.lock").read_text(encoding="utf-8").splitlines()
    wanted = [Requirement(line) for line in lines if line and not line.startswith("#")]
    return {canonical(pin.name): pin for pin in wanted}


def requirements() -> list[Requirement]:
    """Everything that pyproject.toml asks for, base and extras."""
    project = pyproject()["project"]
    extras = project["optional-dependencies"].values()
    return [Requirement(line) for extra in [project["dependencies"], *extras] for line in extra]


def pinned_version(pin: Requirement) -> str:
    """The version of a `name==version` line."""
    (specifier,) = pin.specifier
    assert "==" == specifier.operator
    return specifier.version


def make(
    *arguments: str, gpu: bool | None = None, tmp_path: Path | None = None
) -> subprocess.CompletedProcess[str]:
    """Run make in the repository; `gpu` puts an `nvidia-smi` that finds one or none on the path."""
    environment = dict(os.environ)
    for variable in ("MAKEFLAGS", "MAKELEVEL", "MFLAGS"):
        environment.pop(variable, None)
    if gpu is not None:
        assert tmp_path is not None
        stub = tmp_path / "nvidia-smi"
        stub.write_text(f"#!/bin/sh\n{'echo GPU 0: a GPU' if gpu else 'exit 9'}\n")
        stub.chmod(0o755)
        environment["PATH"] = f"{tmp_path}{os.pathsep}{environment['PATH']}"
    return subprocess.run(
        ["make", "--no-print-directory", *arguments],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=60,
        stdin=subprocess.DEVNULL,
    )


def test_make_alone_lists_the_targets() -> None:
    """`make` prints every target with a line about it, and does nothing."""
    done = make()
    listed = re.findall(r"^  ([a-z-]+) +\S", done.stdout, flags=re.M)
    assert (0, "") == (done.returncode, done.stderr)
    assert {"help", *TARGETS} == {*listed}


@pytest.mark.parametrize("gpu", [False, True], ids=["no-gpu", "gpu"])
@pytest.mark.parametrize("target", TARGETS)
def test_target_can_be_planned(target: str, gpu: bool, tmp_path: Path) -> None:
    """Every target exists and its commands are well formed, on a machine with a GPU and without."""
    done = make("-n", target, gpu=gpu, tmp_path=tmp_path)
    assert 0 == done.returncode, done.stderr


@pytest.mark.parametrize("target", ["bench", "test-gpu"])
def test_gpu_target_says_so_without_a_gpu(target: str, tmp_path: Path) -> None:
    """Without a GPU one line says that nothing was run; it is not a failure."""
    done = make(target, gpu=False, tmp_path=tmp_path)
    assert (0, "") == (done.returncode, done.stderr)
    assert f"{target}: needs an NVIDIA GPU" in done.stdout
    assert 1 == len(done.stdout.splitlines())


def test_gpu_extra_is_installed_where_a_gpu_answers(tmp_path: Path) -> None:
    """`make lab` adds CuPy on a machine with a GPU and leaves it out elsewhere."""
    venv = f"VENV={tmp_path / 'venv'}"
    with_gpu = make("-n", "lab", venv, gpu=True, tmp_path=tmp_path).stdout
    without = make("-n", "lab", venv, gpu=False, tmp_path=tmp_path).stdout
    assert re.search(r"setup\.sh \S+ lab,serve,gpu$", with_gpu, flags=re.M)
    assert re.search(r"setup\.sh \S+ lab,serve$", without, flags=re.M)


def test_lab_opens_the_first_lesson() -> None:
    """`make lab` ends with JupyterLab at the first notebook, and hands LAB_ARGS on."""
    planned = make("-n", "lab", "LAB_ARGS=--port=9999").stdout
    assert "/lab/tree/notebooks/00_start_here.ipynb" in planned
    assert planned.rstrip().endswith("--port=9999")


def test_setup_names_what_is_missing(tmp_path: Path) -> None:
    """A Python that does not exist is one line on standard error, and no environment is begun."""
    done = subprocess.run(
        ["scripts/setup.sh", str(tmp_path / "venv"), "lab"],
        cwd=ROOT,
        env={**os.environ, "PYTHON": "no-such-python"},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert 1 == done.returncode
    assert 1 == len(done.stderr.splitlines())
    assert "no Python 3.11 or newer (tried: no-such-python)" in done.stderr
    assert not (tmp_path / "venv").exists()


def test_system_packages_can_be_left_alone() -> None:
    """MKREF_APT=no installs nothing, silently and with status 1."""
    done = subprocess.run(
        ["scripts/apt.sh", "hello"],
        cwd=ROOT,
        env={**os.environ, "MKREF_APT": "no"},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert (1, "", "") == (done.returncode, done.stdout, done.stderr)


def test_lock_is_exact_and_sorted() -> None:
    """One `name==version` a line, in order, with no address and no local version."""
    text = (ROOT / "requirements.lock").read_text(encoding="utf-8")
    lines = [line for line in text.splitlines() if not line.startswith("#")]
    assert "//" not in text
    assert "@" not in text
    versions = {name: pinned_version(pin) for name, pin in pins().items()}
    assert [] == [version for version in versions.values() if Version(version).local]
    python = re.search(r"Resolved for Python (\d+\.\d+)\.\n", text)
    assert python
    assert text == lock_text(versions, python[1])
    assert [line.split("==")[0] for line in lines] == sorted(versions)


def test_lock_satisfies_pyproject() -> None:
    """Every requirement of every extra is pinned to a version that it admits."""
    locked = pins()
    wrong = [
        str(wanted)
        for wanted in requirements()
        if canonical(wanted.name) not in locked
        or not wanted.specifier.contains(pinned_version(locked[canonical(wanted.name)]))
    ]
    assert [] == wrong


def test_locked_versions_run_on_the_oldest_python() -> None:
    """No locked package asks for a newer patch release than the first of the oldest Python."""
    oldest = pyproject()["project"]["requires-python"].removeprefix(">=") + ".0"
    too_new = []
    for name, pin in pins().items():
        try:
            about = metadata(name)
        except PackageNotFoundError:  # an extra that is not installed here
            continue
        asks = "".join(about.get_all("Requires-Python") or [])
        if about["Version"] == pinned_version(pin) and not SpecifierSet(asks).contains(oldest):
            too_new.append(f"{pin} asks for Python {asks}")
    assert [] == too_new


def test_cuda_packages_say_linux_everywhere() -> None:
    """Packages that exist for Linux only carry the marker in pyproject.toml too."""
    unmarked = [
        str(wanted)
        for wanted in requirements()
        if wanted.name.startswith(LINUX_ONLY) and "sys_platform" not in str(wanted.marker)
    ]
    assert [] == unmarked


def test_nothing_unpinned_comes_along() -> None:
    """What the installed packages require in turn is pinned as well."""
    locked = pins()
    seen: set[str] = set()
    queue = [(canonical(wanted.name), {"", *wanted.extras}) for wanted in requirements()]
    missing = set()
    while queue:
        name, extras = queue.pop()
        if name in seen:
            continue
        seen.add(name)
        if name not in locked:
            missing.add(name)
        try:
            lines = requires(name) or []
        except PackageNotFoundError:  # an extra that is not installed here
            continue
        for needed in map(Requirement, lines):
            marker = needed.marker
            applies = not marker or any(marker.evaluate({"extra": extra}) for extra in extras)
            own = name == "torch" and TORCH_BRINGS.match(needed.name)
            if applies and not own:
                queue.append((canonical(needed.name), {"", *needed.extras}))
    assert set() == missing


def test_extras_and_entry_point() -> None:
    """The four extras, the command, and the range of torch that was run."""
    project = pyproject()["project"]
    assert {"gpu", "lab", "serve", "test"} == project["optional-dependencies"].keys()
    assert {"mkref": "mkref.cli:main"} == project["scripts"]
    assert ">=3.11" == project["requires-python"]
    assert "torch>=2.11,<2.14" in project["dependencies"]
