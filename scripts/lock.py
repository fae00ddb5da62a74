"""Write requirements.lock: one exact version of every package that any extra of mkref can need.

    make lock

pip resolves the ranges of pyproject.toml against what it can reach, installing nothing; what it
chose is the lock. `make` installs with the lock as constraints, so one file serves every extra and
every machine: a line that a machine does not need is not installed.

The oldest Python that pyproject.toml admits decides, down to its first patch release: new packages
drop old Pythons and not the reverse (a Debian may have 3.11.2 where a package asks for 3.11.5).

It does not pin what only a CUDA build of torch brings along: torch names those versions itself. Run
it where pip takes a CPU build of torch.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
LINUX_ONLY = ("cuda-", "cupy-", "nvidia-")
HEADER = """\
# Written by `make lock` (scripts/lock.py); do not edit. Constraints for every extra of mkref:
#     pip install -c requirements.lock -e ".[lab,serve,test]"
# Resolved for Python {python}.
"""


def project() -> dict[str, Any]:
    """The project table of pyproject.toml."""
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    return dict(tomllib.loads(text)["project"])


def canonical(name: str) -> str:
    """The name as package indexes compare it: lower case, one hyphen for any run of `-_.`."""
    return re.sub(r"[-_.]+", "-", name).lower()


def wanted() -> list[str]:
    """Every requirement of pyproject.toml: the base and all extras."""
    extras = project()["optional-dependencies"].values()
    return sorted({*project()["dependencies"], *(line for extra in extras for line in extra)})


def resolve(requirements: list[str], python: str) -> dict[str, str]:
    """Ask pip which versions it would install into an empty environment.

    Args:
        requirements: what to install, as pip reads it.
        python: minor version of Python; pip takes its first patch release.

    Returns:
        Canonical name to version, without local versions (`+cpu`).
    """
    command = [sys.executable, "-m", "pip", "install", "--dry-run", "--ignore-installed", "--quiet"]
    # For a Python that is not the running one pip wants wheels only, and a target (left alone).
    command += ["--python-version", python, "--only-binary", ":all:", "--target", "not-written"]
    command += ["--report", "-", *requirements]
    report = json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE).stdout)
    return {
        canonical(item["metadata"]["name"]): item["metadata"]["version"].split("+")[0]
        for item in report["install"]
    }


def lock_text(pins: dict[str, str], python: str) -> str:
    """The file: sorted `name==version` lines; CUDA packages exist for Linux only and say so."""
    lines = []
    for name, version in sorted(pins.items()):
        marker = " ; sys_platform == 'linux'" if name.startswith(LINUX_ONLY) else ""
        lines.append(f"{name}=={version}{marker}\n")
    return HEADER.format(python=python) + "".join(lines)


def main() -> int:
    """Resolve and write, or say in one line why not."""
    oldest = project()["requires-python"].removeprefix(">=")
    running = f"{sys.version_info[0]}.{sys.version_info[1]}"
    if running != oldest:  # markers are evaluated by the running Python
        print(f"lock: needs Python {oldest}, this is {running}", file=sys.stderr)
        return 2
    pins = resolve(wanted(), oldest)
    if "triton" in pins:
        print(
            "lock: pip took a CUDA build of torch, and everybody would get its packages; "
            "run this where pip takes a CPU build",
            file=sys.stderr,
        )
        return 2
    target = ROOT / "requirements.lock"
    target.write_text(lock_text(pins, oldest), encoding="utf-8")
    print(f"lock: {len(pins)} packages in {target.name}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
