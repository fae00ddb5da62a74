"""environment.yml says the same as pyproject.toml.

Every string is a strict match spec of conda's grammar and the file solves against a channel made up
here. That the names exist on conda-forge is not checked: no channel can be assumed where tests run.
"""

from __future__ import annotations

import asyncio
import json
import re
from pathlib import Path
from typing import Any

import pytest
import rattler
import yaml
from packaging.specifiers import SpecifierSet
from rattler.exceptions import InvalidMatchSpecError

from tests.tree import ROOT, pyproject

# Made-up versions for the made-up channel.
CHANNEL = {"python": "3.11.9", "pip": "25.0", "make": "4.4.1", "cxx-compiler": "1.9.0"}


def environment() -> dict[str, Any]:
    """environment.yml, parsed."""
    return dict(yaml.safe_load((ROOT / "environment.yml").read_text(encoding="utf-8")))


def conda_specs() -> list[str]:
    """The dependencies that conda itself installs."""
    return [line for line in environment()["dependencies"] if isinstance(line, str)]


def pip_lines() -> list[str]:
    """The lines of the pip section."""
    (section,) = [line for line in environment()["dependencies"] if isinstance(line, dict)]
    assert ["pip"] == list(section)
    return list(section["pip"])


def test_shape() -> None:
    """A name, conda-forge alone, the pip section last, nothing that binds it to one machine."""
    assert {"name", "channels", "dependencies"} == environment().keys()
    assert pyproject()["project"]["name"] == environment()["name"]
    assert ["conda-forge"] == environment()["channels"]
    assert isinstance(environment()["dependencies"][-1], dict)
    assert all(isinstance(line, str) for line in environment()["dependencies"][:-1])


@pytest.mark.parametrize("spec", conda_specs())
def test_strict_match_spec(spec: str) -> None:
    """conda's strict grammar accepts each dependency, and none pins a build."""
    parsed = rattler.MatchSpec(spec, strict=True)
    assert parsed.name is not None
    assert parsed.build is None


def test_a_wrong_spec_is_refused() -> None:
    """The check above can fail: a misspelt operator is not a match spec."""
    with pytest.raises(InvalidMatchSpecError):
        rattler.MatchSpec("numpy=>2", strict=True)


def test_python_agrees_with_pyproject() -> None:
    """The Python of conda users is the one of the lock, and pyproject.toml admits it."""
    (spec,) = [spec for spec in conda_specs() if re.match(r"python\b", spec)]
    version = spec.removeprefix("python=")
    lock = (ROOT / "requirements.lock").read_text(encoding="utf-8")
    assert f"python={version}" == spec
    assert SpecifierSet(pyproject()["project"]["requires-python"]).contains(version)
    assert f"# Resolved for Python {version}.\n" in lock


def test_pip_section_is_what_make_installs() -> None:
    """mkref with the extras of `make test`, at the versions of the lock, and nothing of its own."""
    constraint, project = pip_lines()
    extras = re.fullmatch(r"-e \.\[([a-z,]+)\]", project)
    assert "-c requirements.lock" == constraint
    assert extras
    chosen = extras[1].split(",")
    assert {*chosen} <= pyproject()["project"]["optional-dependencies"].keys()
    assert f"setup.sh $(VENV) {','.join(chosen)}$(GPU_EXTRA)" in (ROOT / "Makefile").read_text()


def test_conda_does_not_repeat_pip() -> None:
    """No Python package comes from both: the lock alone says which version is installed."""
    lock = (ROOT / "requirements.lock").read_text(encoding="utf-8")
    locked = {line.split("==")[0] for line in lock.splitlines() if "==" in line}
    names = {re.split(r"[ =<>!]", spec)[0] for spec in conda_specs()}
    assert set() == names & locked


def test_solves_against_a_made_up_channel(tmp_path: Path) -> None:
    """conda's solver finds all dependencies in a channel that has exactly these packages."""
    records = {
        f"{name}-{version}-0.tar.bz2": {
            "name": name,
            "version": version,
            "build": "0",
            "build_number": 0,
            "depends": [],
            "subdir": "linux-64",
            "md5": "0" * 32,
            "sha256": "0" * 64,
            "size": 1,
        }
        for name, version in CHANNEL.items()
    }
    for subdir, packages in (("linux-64", records), ("noarch", {})):
        folder = tmp_path / subdir
        folder.mkdir()
        content = {"info": {"subdir": subdir}, "packages": packages, "packages.conda": {}}
        (folder / "repodata.json").write_text(json.dumps(content))

    async def solve() -> list[Any]:
        return await rattler.solve(
            sources=[rattler.Channel(tmp_path.as_uri())],
            specs=[rattler.MatchSpec(spec, strict=True) for spec in conda_specs()],
            platforms=["linux-64", "noarch"],
            gateway=rattler.Gateway(),
            virtual_packages=[],
        )

    solved = {record.name.normalized: str(record.version) for record in asyncio.run(solve())}
    assert CHANNEL == solved
