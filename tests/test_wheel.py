"""The wheel: complete, and the kernel sources are found after installing it."""

from __future__ import annotations

import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from mkref import paths
from mkref.errors import MachineError
from tests.tree import ROOT, name


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A wheel of this checkout, built offline."""
    folder = tmp_path_factory.mktemp("wheel")
    done = subprocess.run(
        [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(folder)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert 0 == done.returncode, done.stderr
    (built,) = folder.glob("mkref-*.whl")
    return built


def shipped(folder: str) -> set[str]:
    """Files of a folder of the checkout, as paths below the root; caches are not shipped."""
    found = (path for path in (ROOT / folder).rglob("*") if path.is_file())
    return {name(path) for path in found if "__pycache__" not in path.parts}


def test_wheel_has_every_file(wheel: Path) -> None:
    """All of mkref with its models, and all of cuda/ as mkref/_cuda; no tests, no notebooks."""
    names = {entry for entry in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in entry}
    sources = {f"mkref/_{path}" for path in shipped("cuda")}
    assert shipped("mkref") | sources == names


def test_installed_package_finds_the_kernel(wheel: Path, tmp_path: Path) -> None:
    """An unpacked wheel, far from the checkout, uses its own kernel sources."""
    zipfile.ZipFile(wheel).extractall(tmp_path)
    code = "import sys; sys.path.insert(0, '.'); from mkref import paths; print(paths.cuda_root())"
    done = subprocess.run(
        [sys.executable, "-I", "-c", code], cwd=tmp_path, capture_output=True, text=True
    )
    assert f"{(tmp_path / 'mkref' / '_cuda').resolve()}\n" == done.stdout, done.stderr


def test_checkout_finds_the_kernel() -> None:
    """In a checkout the sources are those that one edits."""
    assert paths.cuda_root() == ROOT / "cuda"
    assert (paths.models_root() / "nano").is_dir()


def test_missing_kernel_is_one_clear_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A package without its kernel sources says where it looked."""
    monkeypatch.setattr(paths, "_PACKAGE", tmp_path / "mkref")
    with pytest.raises(MachineError, match="looked for megakernel.cu in") as caught:
        paths.cuda_root()
    assert str(tmp_path / "cuda") in str(caught.value)
    assert "\n" not in str(caught.value)
