"""Who may import whom: one direction through the package, and few things from outside."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

from tests.tree import ROOT, files, imports_of, module_of, name

# Lowest first. A module imports from its own row and from the rows above it in this table; within a
# row no two parts import each other (test_no_cycles).
FLOORS = (
    ("errors",),
    ("paths", "jsonfile", "config_json", "geometry", "config"),
    ("reference", "weights"),
    ("plan",),
    ("machine",),
    ("measure",),
    ("engine",),
    ("serve",),
    ("trace",),
    ("simulate",),
    ("widgets",),
    ("lessons", "cli", "__main__"),
)
FLOOR = {part: number for number, row in enumerate(FLOORS) for part in row}
# What only reads others; nothing imports it but the parts named here.
READERS = {
    "trace": {"trace", "simulate", "widgets", "lessons", "cli"},
    "simulate": {"simulate", "widgets", "lessons", "cli"},
    "widgets": {"widgets", "lessons", "cli"},
}

# Outside packages, and the only places of mkref that may name them.
ONLY_IN = {
    "cupy": ("mkref/machine/",),
    "cupy_backends": ("mkref/machine/",),
    "ipywidgets": ("mkref/widgets/",),
    "anywidget": ("mkref/widgets/",),
    # Weights, the model that is the oracle, sampling. Plans and the CPU machine are NumPy.
    "torch": (
        "mkref/reference/", "mkref/weights/", "mkref/engine/",
        "mkref/machine/torch_machine.py", "mkref/machine/cuda.py",
    ),
    "cohere_melody": ("mkref/serve/",),
    "fastapi": ("mkref/serve/",),
    "llguidance": ("mkref/serve/",),
    "pydantic": ("mkref/serve/",),
    "starlette": ("mkref/serve/",),
    "uvicorn": ("mkref/serve/",),
    "transformers": (),
    "yaml": (),
    "pytest": (),
}  # fmt: skip
NETWORK = (
    "aiohttp", "ftplib", "http", "httpx", "huggingface_hub", "requests", "smtplib", "socket",
    "socketserver", "ssl", "urllib", "urllib3", "xmlrpc",
)  # fmt: skip

# Parts of the endpoint that import without its packages: whoever starts it gets one clear line.
SERVE_BARE = {
    f"mkref.serve.{part}" for part in ("app", "errors", "logs", "run", "service", "settings")
}

PACKAGE = files("mkref", suffixes={".py"})


def part_of(module: str) -> str:
    """The part of the package that a module belongs to: `mkref.plan.task` is in `plan`."""
    return module.split(".")[1]


def inner_imports(path: Path) -> list[tuple[int, str]]:
    """Imports of other modules of mkref, by line; the bare package is not one."""
    return [(line, module) for line, module in imports_of(path) if module.startswith("mkref.")]


def test_every_part_has_a_floor() -> None:
    """A new part of the package is added to the table on purpose."""
    parts = {part_of(module_of(path)) for path in PACKAGE if module_of(path) != "mkref"}
    assert set() == parts - FLOOR.keys()


def test_imports_go_one_way() -> None:
    """No arrow points back up, and nothing but what reads them imports trace and widgets."""
    wrong = []
    for path in PACKAGE:
        if module_of(path) == "mkref":  # the front door opens onto everything, lazily
            continue
        own = part_of(module_of(path))
        for line, module in inner_imports(path):
            other = part_of(module)
            if FLOOR[other] > FLOOR[own] or own not in READERS.get(other, {own}):
                wrong.append(f"{name(path)}:{line} imports {module}")
    assert [] == wrong


def test_no_cycles() -> None:
    """Neither the parts nor the modules import one another in a circle (CycleError names it)."""
    modules: dict[str, set[str]] = {}
    parts: dict[str, set[str]] = {}
    for path in PACKAGE:
        own = module_of(path)
        if own == "mkref":
            continue
        modules[own] = {module for _, module in inner_imports(path)} - {own}
        # A package's own modules do not depend on its __init__, which re-exports them.
        modules[own] -= {own.rpartition(".")[0]}
        others = {part_of(module) for _, module in inner_imports(path)}
        parts.setdefault(part_of(own), set()).update(others - {part_of(own)})
    TopologicalSorter(modules).prepare()
    TopologicalSorter(parts).prepare()


@pytest.mark.parametrize("package", ONLY_IN)
def test_outside_package_stays_in_its_place(package: str) -> None:
    """Only `machine` knows CuPy, only `widgets` knows ipywidgets, and so on."""
    wrong = [
        f"{name(path)}:{line}"
        for path in PACKAGE
        for line, module in imports_of(path)
        if module.split(".")[0] == package
        and not any(name(path).startswith(place) for place in ONLY_IN[package])
    ]
    assert [] == wrong


def test_no_network() -> None:
    """Nothing below the server opens a connection."""
    wrong = [
        f"{name(path)}:{line} imports {module}"
        for path in PACKAGE
        for line, module in imports_of(path)
        if module.split(".")[0] in NETWORK and not name(path).startswith("mkref/serve/")
    ]
    assert [] == wrong


def test_imports_with_three_packages() -> None:
    """Every module imports where only numpy, torch, safetensors are installed.

    But the widgets, and of the endpoint what is loaded only once its packages were asked for.
    """
    modules = [module_of(path) for path in PACKAGE if not name(path).endswith("__main__.py")]
    modules = [module for module in modules if not module.startswith("mkref.widgets")]
    modules = [m for m in modules if not m.startswith("mkref.serve.") or m in SERVE_BARE]
    script = textwrap.dedent(
        """
        import importlib, sys
        from importlib.metadata import requires
        import re

        # numpy, torch, safetensors, and what torch itself requires.
        allowed = {"mkref", "numpy", "torch", "torchgen", "functorch", "safetensors"}
        allowed |= {"mpmath", "markupsafe", "cuda", "triton", "nvidia", "_distutils_hack"}
        for line in requires("torch") or []:
            allowed.add(re.match(r"[\\w.-]+", line)[0].lower().replace("-", "_"))

        class Blocker:
            def find_spec(self, module, path=None, target=None):
                top = module.split(".")[0]
                if top not in sys.stdlib_module_names and top.lower() not in allowed:
                    raise ModuleNotFoundError(f"No module named {module!r} (blocked)", name=module)
                return None

        sys.meta_path.insert(0, Blocker())
        for module in sys.argv[1:]:
            importlib.import_module(module)
        print("imported", len(sys.argv) - 1)
        """
    )
    done = subprocess.run(
        [sys.executable, "-c", script, *modules], cwd=ROOT, capture_output=True, text=True
    )
    assert (f"imported {len(modules)}\n", 0) == (done.stdout, done.returncode), done.stderr
