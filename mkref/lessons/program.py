"""What a trial of a CUDA exercise gets: the learner's code, compiled, with arrays that are watched.

    def trial(program: Program) -> None:
        x, y = program.array(values), program.poisoned((3, 96), np.uint16)
        program.launch("rmsnorm", (3,), (256,), (y, x, gamma, 96, 1e-5), shared=32)
        same(right, y, "three rows of 96", "y")

Arrays lie between guards of 0xFF bytes, which are looked at after every launch; outputs begin as
0xFF too, so that what nobody wrote is NaN or -1. A hang, a divergence, a write beside an array
becomes a `WrongAnswerError` in words, with lines of the learner's cell. It knows no exercise.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from mkref.errors import MachineError
from mkref.lessons.exercise import WrongAnswerError
from mkref.machine.kernels import Kernels, scalars
from mkref.machine.sanitize import run_sanitized
from mkref.reference.scalars import from_bf16

__all__ = ["HANGS", "LAUNCH_S", "YOURS", "Program", "close", "readable", "same"]

YOURS = "your code"
"""Name of the learner's text in the compiler's messages; its line 1 is the cell's."""
LAUNCH_S = 10.0
"""Time limit of one launch on the CPU; right answers take milliseconds."""
HANGS = "it hangs:"
"""How the message of a launch begins that had to be stopped."""
GUARD = 1 << 16
"""Bytes before and after each array: wider than an index is likely to be wrong in an exercise, so
that such a write is seen and reaches nobody else's memory."""
Array = npt.NDArray[Any]


class Program:
    """A compiled answer.

    Args:
        source: the whole translation unit.
        name: of the exercise, for the cache.
        machine: "host" or "cuda".
        kernels: if they are compiled already, and what they are called there.
        sanitize: run every launch under AddressSanitizer on the CPU instead, to find a line.

    Raises:
        MachineError: it does not compile.
    """

    def __init__(
        self,
        source: str,
        *,
        name: str,
        machine: str = "host",
        sanitize: bool = False,
        kernels: tuple[Kernels, Callable[[str], str]] | None = None,
    ) -> None:
        self.source, self.name = source, name
        self.kernels: Kernels | None = None
        self.called: Callable[[str], str] = str
        if kernels is not None:
            self.kernels, self.called = kernels
        elif not sanitize:
            self.kernels = Kernels(source, name=name, machine=machine)
        self._guarded: dict[int, Array] = {}

    def array(self, values: npt.ArrayLike) -> Array:
        """A copy of the values between guards; kernels may read and write it."""
        values = np.ascontiguousarray(values)
        array = self.poisoned(values.shape, values.dtype)
        array[...] = values
        return array

    def poisoned(self, shape: Sequence[int], dtype: npt.DTypeLike = np.uint16) -> Array:
        """An array of 0xFF bytes between guards, for a kernel to write."""
        size = int(np.prod(shape)) * np.dtype(dtype).itemsize
        root = np.full(GUARD + size + GUARD + 64, 0xFF, np.uint8)
        begin = GUARD + -(root.ctypes.data + GUARD) % 64  # as bulk copies and wide loads want it
        self._guarded[id(root)] = root
        return root[begin : begin + size].view(dtype).reshape(shape)

    def launch(
        self,
        kernel: str,
        grid: tuple[int, ...],
        block: tuple[int, ...],
        args: Sequence[Any],
        *,
        shared: int = 0,
        seed: int = 0,
        workers: int = 1,
        timeout_s: float = LAUNCH_S,
    ) -> None:
        """Run one kernel and look at the guards.

        Args:
            kernel, grid, block, args, shared: as for `Kernels.launch`.
            seed: order in which the CPU runs lanes and warps; 0 is plain order. Try several where
                a missing barrier must show.
            workers: OS threads; with one, a run is a function of the seed.
            timeout_s: time limit on the CPU.

        Raises:
            WrongAnswerError: what went wrong, in one line.
        """
        if self.kernels is None:
            self._look_closer(kernel, grid, block, args, shared, seed, timeout_s)
            return
        try:
            self.kernels.launch(
                self.called(kernel), grid, block, args,
                shared=shared, seed=seed, workers=workers, timeout_s=timeout_s,
            )  # fmt: skip
        except MachineError as error:
            if "accessed memory that is not there" in str(error):
                self._look_closer(kernel, grid, block, args, shared, seed, timeout_s)
            raise WrongAnswerError(readable(str(error), self.called(kernel))) from error
        names = _parameters(self.source, kernel)
        arrays = [(i, arg) for i, arg in enumerate(args) if isinstance(arg, np.ndarray)]
        named = {names[i] if i < len(names) else f"argument {i}": arg for i, arg in arrays}
        self.look_at_guards(named)

    def look_at_guards(self, arrays: Mapping[str, Array]) -> None:
        """Has anybody written beside one of these arrays?

        Raises:
            WrongAnswerError: somebody has; the message names the array.
        """
        for name, array in arrays.items():
            self._look_at(array, name)

    def _look_at(self, array: Array, name: str) -> None:
        root = array
        while isinstance(root.base, np.ndarray):
            root = root.base
        if id(root) not in self._guarded:
            return
        begin = array.ctypes.data - root.ctypes.data
        for part, side in ((root[:begin], "before"), (root[begin + array.nbytes :], "after")):
            if n := int(np.count_nonzero(part != 0xFF)):
                part[...] = 0xFF  # for the next launch
                end = "the first" if side == "before" else "the last"
                raise WrongAnswerError(
                    f"it writes outside of its arrays: {n} bytes {side} {end} element of {name}"
                )

    def _look_closer(
        self, kernel: str, grid: tuple[int, ...], block: tuple[int, ...], args: Sequence[Any],
        shared: int, seed: int, timeout_s: float,
    ) -> None:  # fmt: skip
        code, text = run_sanitized(
            self.source, kernel, grid, block, scalars(args), shared,
            sanitize="address", seed=seed, workers=1, timeout_s=10 * timeout_s,
        )  # fmt: skip
        if code == 0:
            return
        at = re.search(rf"{YOURS}:(\d+)", text)
        line = f"line {at[1]}" if at else "it"
        found = re.search(r"(READ|WRITE)(?: of size (\d+)| memory access)", text)
        if found:
            verb = "reads" if found[1] == "READ" else "writes"
            size = f"{found[2]} bytes " if found[2] else ""
            raise WrongAnswerError(f"{line} {verb} {size}outside of every array")
        if undefined := re.search(r"runtime error: ([^\n]*)", text):
            raise WrongAnswerError(f"{line}: {undefined[1]}")
        raise WrongAnswerError(readable(text.splitlines()[0], kernel))


def _parameters(source: str, kernel: str) -> list[str]:
    """Names of a kernel's parameters."""
    found = re.search(rf"\b{kernel}\(([^)]*)\)\s*{{", re.sub(r"//.*", "", source))
    return re.findall(r"(\w+)\s*(?:,|$)", found[1].strip()) if found else []


def readable(report: str, kernel: str) -> str:
    """One line of what a launch reported: what happened, and who waits in the learner's lines.

    >>> readable("k: divergence: at your code:7, from 0x7f00", "k")
    'divergence: at line 7, from memory'
    >>> readable("k: deadlock: all wait\\nblock (0,0,0):\\n  threads 0-31 wait at your code:9", "k")
    'deadlock: all wait; threads 0-31 wait at line 9'
    """
    report = re.sub(rf"{YOURS}:(\d+)", r"line \1", report.removeprefix(f"{kernel}: ")).strip()
    report = re.sub(r" \(last loaded (\S+) from [^)]*\)", r" (it loaded \1)", report)
    report = re.sub(r": (0x[0-9a-f]+|\(nil\))|the mbarrier at shared memory offset \d+", "", report)
    report = re.sub(r"0x[0-9a-f]+", "memory", report)
    head, *blocks = re.split(r"\nblock \(\d+,\d+,\d+\):\n", report)
    head = re.sub(r"^timeout: the kernel still ran after", f"{HANGS} it was stopped after", head)
    if not head.startswith((HANGS, "deadlock")):
        return head.replace("\n", "; ")
    groups = [line.strip() for line in blocks[0].splitlines()] if blocks else []
    mine = [g for g in groups if re.search(r"line \d|in a loop", g) and "poll at" not in g]
    polls = dict.fromkeys(re.findall(r"(?:poll|wait for.*?) at ([\w. :]+\d)", "; ".join(groups)))
    others = [f"threads wait at {' and at '.join(polls)}"] if polls else []
    return "; ".join([head.replace("\n", "; "), *(mine or others)[:3]])


def same(right: Array, got: Array, where: str, name: str, *, bf16: bool | None = None) -> None:
    """Every element has the very same bits.

    Args:
        right: what must be there.
        got: what the kernel left; the same shape and type.
        where: the case, in words.
        name: of the array.
        bf16: are the words bfloat16? Default: if they are uint16.

    Raises:
        WrongAnswerError: the first element that differs, and how many do.
    """
    assert (right.shape, right.dtype) == (got.shape, got.dtype), "the trial is wrong"
    if not right.size:
        return
    bits = [np.ascontiguousarray(a).view(np.uint8).reshape(*a.shape, -1) for a in (right, got)]
    wrong: Array = np.asarray((bits[0] != bits[1]).any(axis=-1))
    _report(wrong, right, got, where, name, right.dtype == np.uint16 if bf16 is None else bf16)


def close(right: Array, got: Array, allowed: Array | float, where: str, name: str) -> None:
    """Every element is within its own bound; NaN never is.

    Args:
        right: float64, what must be there.
        got: what the kernel left; uint16 words are bfloat16.
        allowed: absolute difference, for all or for each.
        where, name: as for `same`.

    Raises:
        WrongAnswerError: the first element that is outside, and how many are.
    """
    bf16 = got.dtype == np.uint16
    values = (from_bf16(got) if bf16 else got).astype(np.float64)
    with np.errstate(invalid="ignore"):
        wrong: Array = np.asarray(~(np.abs(values - right) <= allowed))
    _report(wrong, right, got, where, name, bf16)


def _report(wrong: Array, right: Array, got: Array, where: str, name: str, bf16: bool) -> None:
    if not wrong.any():
        return
    at = tuple(int(i) for i in np.argwhere(wrong)[0])
    many = f"{int(wrong.sum())} of {wrong.size} are wrong"
    place = f"{name}[{', '.join(map(str, at))}]"
    if set(np.ascontiguousarray(got[at]).tobytes()) == {0xFF}:
        raise WrongAnswerError(f"{where}: {place} is never written ({many})")
    raise WrongAnswerError(
        f"{where}: {place} must be {_text(right[at], bf16)}, it is {_text(got[at], bf16)} ({many})"
    )


def _text(value: Any, bf16: bool) -> str:
    if bf16 and value.dtype == np.uint16:
        value = from_bf16(np.asarray([value]))[0]
    return f"{float(value):.6g}" if value.dtype.kind == "f" else str(int(value))
