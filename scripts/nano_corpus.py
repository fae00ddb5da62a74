"""The training text of `nano`: Python's own standard library, chosen and split by written rules.

What it does: reads `Lib/**/*.py` from a folder or a tar file, keeps the files that the rules below
keep, splits them by file into training and held-out modules, writes the manifest and the tar file.
The result depends on the bytes of the files alone, not on the Python that runs this module.

What it does not do: tokenise, fetch anything, or look inside Python syntax.

Rules. Left out: machine-made files (`_sysconfigdata*`, charmap tables, `pydoc_data/topics.py`),
files that are wrong on purpose (`bad*.py`, `lib2to3/tests/data`), and anything that is not UTF-8
with plain newlines. Held out: a file whose path hashes below `HELD_OUT_SHARE`, of middling size,
that shares less than a tenth of its four-line runs with any other file.

Source: CPython 3.11.7, `Lib/` (PSF licence version 2).
"""

from __future__ import annotations

import hashlib
import io
import lzma
import sys
import sysconfig
import tarfile
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

__all__ = ["Corpus", "SourceFile", "load_corpus", "write_tar"]

HELD_OUT_SHARE = 0.05  # of the paths; about 4 % of the bytes are left after the size and twin rules
HELD_OUT_BYTES = (2_000, 120_000)
SHINGLE_LINES = 4
TWIN_SHARE = 0.10  # a file that shares this much of its shingles with one other file is a twin
LEFT_OUT_PARTS = ("site-packages", "__pycache__", "_bundled", "encoded_modules", "tokenizedata")
LEFT_OUT_FOLDERS = ("lib2to3/tests/data/", "lib-dynload/", "config-")
LEFT_OUT_FILES = ("pydoc_data/topics.py",)


@dataclass(frozen=True)
class SourceFile:
    """One module: its path inside `Lib` and its text."""

    path: str
    text: str

    @property
    def data(self) -> bytes:
        """The bytes of the file."""
        return self.text.encode("utf-8")

    @property
    def sha256(self) -> str:
        """The hash of the bytes, in hexadecimal."""
        return hashlib.sha256(self.data).hexdigest()


@dataclass(frozen=True)
class Corpus:
    """The files that are trained on and the files that are held out, each sorted by path."""

    train: tuple[SourceFile, ...]
    held_out: tuple[SourceFile, ...]

    def manifest(self) -> str:
        """One line a file: split, first 16 digits of its sha256, bytes, path."""
        rows = [(f.path, "train", f) for f in self.train]
        rows += [(f.path, "held", f) for f in self.held_out]
        return "".join(
            f"{split}\t{f.sha256[:16]}\t{len(f.data)}\t{path}\n" for path, split, f in sorted(rows)
        )

    def manifest_sha256(self) -> str:
        """The hash that names this corpus."""
        return hashlib.sha256(self.manifest().encode("utf-8")).hexdigest()


def load_corpus(source: Path | None = None, held_out_share: float = HELD_OUT_SHARE) -> Corpus:
    """Reads, filters and splits.

    Args:
      source: a `Lib` folder, a tar file of one, or None for the running interpreter's library.
      held_out_share: share of the paths that may be held out.

    Raises:
      SystemExit: with one line, if there is no Python source there.
    """
    where = Path(sysconfig.get_paths()["stdlib"]) if source is None else source
    if not where.exists():
        sys.exit(f"--stdlib {where}: no such folder or tar file")
    raw = _read_folder(where) if where.is_dir() else _read_tar(where)
    files = [f for path, data in sorted(raw.items()) if (f := _keep(path, data)) is not None]
    if len(files) < 4:
        sys.exit(f"--stdlib {where}: {len(files)} usable .py files, at least 4 are needed")
    held = _held_out(files, held_out_share)
    return Corpus(
        train=tuple(f for f in files if f.path not in held),
        held_out=tuple(f for f in files if f.path in held),
    )


def write_tar(corpus: Corpus, target: Path, licence: Path | None = None) -> None:
    """Writes the corpus as a `.tar.xz` whose bytes depend on the corpus alone."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=tarfile.USTAR_FORMAT) as tar:
        entries = [(f"Lib/{f.path}", f.data) for f in corpus.train + corpus.held_out]
        if licence is not None:
            entries.append(("LICENSE.txt", licence.read_bytes()))
        for name, data in sorted(entries):
            info = tarfile.TarInfo(name)  # owner, time and mode are the fixed defaults
            info.size = len(data)
            tar.addfile(info, io.BytesIO(data))
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_bytes(lzma.compress(buffer.getvalue(), preset=9 | lzma.PRESET_EXTREME))


def _read_folder(folder: Path) -> dict[str, bytes]:
    return {
        p.relative_to(folder).as_posix(): p.read_bytes()
        for p in folder.rglob("*.py")
        if "site-packages" not in p.parts
    }


def _read_tar(path: Path) -> dict[str, bytes]:
    found: dict[str, bytes] = {}
    with tarfile.open(path) as tar:
        for member in tar:
            if not member.isfile() or not member.name.endswith(".py"):
                continue
            handle = tar.extractfile(member)
            assert handle is not None  # a regular file always has contents
            # "Python-3.11.7/Lib/os.py", "Lib/os.py" and "os.py" all name os.py
            found[member.name.rpartition("Lib/")[2]] = handle.read()
    return found


def _keep(path: str, data: bytes) -> SourceFile | None:
    """The file, or None if a rule leaves it out."""
    parts = path.split("/")
    name = parts[-1]
    if any(part in LEFT_OUT_PARTS for part in parts) or path in LEFT_OUT_FILES:
        return None
    if path.startswith(LEFT_OUT_FOLDERS) or name.startswith(("_sysconfigdata", "bad")):
        return None
    if not data or b"\r" in data or b"\0" in data or b"charmap_build" in data:
        return None
    try:
        return SourceFile(path, data.decode("utf-8"))
    except UnicodeDecodeError:
        return None


def _held_out(files: list[SourceFile], share: float) -> set[str]:
    """Paths that hash into the share, have a middling size and no twin in the whole corpus."""
    low, high = HELD_OUT_BYTES
    candidates = [
        f
        for f in files
        if _unit_hash(f.path) < share
        and low <= len(f.data) <= high
        and not f.path.endswith("__init__.py")
    ]
    owners: dict[tuple[str, ...], list[str]] = {}
    sizes: dict[str, int] = {}
    for f in candidates:
        shingles = _shingles(f.text)
        sizes[f.path] = len(shingles)
        for shingle in shingles:
            owners.setdefault(shingle, []).append(f.path)
    twins: set[str] = set()
    for f in files:
        shared = Counter(
            owner
            for shingle in _shingles(f.text)
            for owner in owners.get(shingle, ())
            if owner != f.path
        )
        twins.update(path for path, n in shared.items() if n >= TWIN_SHARE * sizes[path])
    return {f.path for f in candidates} - twins


def _unit_hash(path: str) -> float:
    """A number in [0, 1) that depends on the path alone."""
    return int.from_bytes(hashlib.sha256(f"nano:{path}".encode()).digest()[:6], "big") / 2**48


def _shingles(text: str) -> set[tuple[str, ...]]:
    """Every run of four consecutive non-blank lines, without indentation."""
    lines = [line.strip() for line in text.split("\n")]
    lines = [line for line in lines if line]
    return {tuple(lines[i : i + SHINGLE_LINES]) for i in range(len(lines) - SHINGLE_LINES + 1)}
