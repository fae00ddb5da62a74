"""Where the files lie that are not Python: the kernel sources and the models that mkref ships.

They are found from the place of this package, never from the working directory. In a checkout (and
in an editable install) the kernel sources are `cuda/` beside the package; a wheel carries the same
folder inside it as `mkref/_cuda`, put there by `[tool.hatch.build]` in pyproject.toml.

It does not read, compile or cache anything: `mkref.machine` does.
"""

from __future__ import annotations

from pathlib import Path

from mkref.errors import MachineError

__all__ = ["cuda_root", "lessons_root", "models_root"]

_PACKAGE = Path(__file__).resolve().parent


def cuda_root() -> Path:
    """The folder that holds `megakernel.cu`, `ops/` and `host/`.

    Returns:
        An absolute path.

    Raises:
        MachineError: neither place has a `megakernel.cu`; the message names both.

    >>> (cuda_root() / "megakernel.cu").is_file()
    True
    """
    places = (_PACKAGE / "_cuda", _PACKAGE.parent / "cuda")
    for place in places:
        if (place / "megakernel.cu").is_file():
            return place
    looked = " and ".join(str(place) for place in places)
    raise MachineError(
        f"kernel sources not found: looked for megakernel.cu in {looked}; "
        "reinstall mkref, or run it from a whole checkout"
    )


def models_root() -> Path:
    """The folder of the models that come with mkref; each is a folder with a `config.json`.

    >>> models_root().name
    'models'
    """
    return _PACKAGE / "models"


def lessons_root() -> Path:
    """The folder of the lessons' own CUDA files and of what is recorded about their exercises.

    >>> lessons_root().name
    'cuda'
    """
    return _PACKAGE / "lessons" / "cuda"
