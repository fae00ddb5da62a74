"""Ordinary kernels of a source text, launched with NumPy arrays on a GPU or on this CPU.

    kernels = Kernels(source, name="rmsnorm")
    kernels.launch("rmsnorm", (rows,), (256,), (y, x, gamma, hidden, eps), shared=32)

On a GPU the arrays are copied there and back, with everything that they are views of, so that what
a kernel writes beside an array is seen on the host. Nothing stays on the device between launches.
It is slow and convenient: for tests and lessons, not for measurements.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from mkref.errors import MachineError
from mkref.machine.cache import cached
from mkref.machine.compiler import find_compiler
from mkref.machine.gpu import find_gpus
from mkref.machine.hostcc import HostModule, build
from mkref.machine.nvrtc import OPTIONS, architecture, compile_cubin

__all__ = ["Kernels", "scalars", "usable_gpu"]

_KINDS: dict[type, type] = {int: np.int32, bool: np.int32, float: np.float32}


class Kernels:
    """The `extern "C" __global__` functions of a source text.

    Args:
        source: text of a `.cu` file that needs no headers.
        name: for messages and the cached file.
        machine: "cuda", "host", or "auto" for a GPU where there is one, else the CPU.

    Raises:
        MachineError: it does not compile, or neither a GPU nor a compiler is here.
    """

    def __init__(self, source: str, *, name: str, machine: str = "auto") -> None:
        if machine == "auto":
            machine = "cuda" if usable_gpu() else "host"
        self.machine, self.source, self.name = machine, source, name
        self._host: HostModule | None = None
        self._cuda: Any = None
        if machine == "host":
            find_compiler()
            self._host = build(source, name=name)
        else:
            from mkref.machine.cuda import import_cupy

            self._cuda = import_cupy().RawModule(path=str(_cubin(source, name)))

    def launch(
        self,
        kernel: str,
        grid: tuple[int, ...],
        block: tuple[int, ...],
        args: Sequence[Any],
        *,
        shared: int = 0,
        seed: int = 0,
        workers: int = 0,
        timeout_s: float = 60.0,
    ) -> None:
        """Run one kernel to its end; arrays are written in place.

        Args:
            kernel: name of the function.
            grid, block: one to three sizes each.
            args: NumPy arrays, NumPy scalars, or numbers: int becomes int32, float float32.
            shared: dynamic shared memory of a block, bytes.
            seed, workers, timeout_s: of the CPU's scheduler, see `HostFunction`; a GPU has none.

        Raises:
            LaunchHangError: a hang on the CPU. On a GPU a hang does not end.
            MachineError: wrong arguments, or an error of the launch.
        """
        values = scalars(args)
        if self._host is not None:
            self._host.get_function(kernel)(
                grid, block, values, shared, workers=workers, seed=seed, timeout_s=timeout_s
            )
            return
        _launch_on_gpu(self._cuda.get_function(kernel), grid, block, values, shared)


def usable_gpu() -> bool:
    """Can `Kernels` run on a GPU here?"""
    if not find_gpus():  # asked first: without a GPU nobody has to import CuPy
        return False
    from mkref.machine.cuda import why_no_gpu

    return why_no_gpu() is None


def scalars(args: Sequence[Any]) -> tuple[Any, ...]:
    """Arguments with plain numbers as what a kernel takes."""
    return tuple(_KINDS[type(arg)](arg) if type(arg) in _KINDS else arg for arg in args)


def _cubin(source: str, name: str) -> Path:
    from mkref.machine.cuda import import_cupy

    cupy = import_cupy()
    text = cupy.cuda.Device().compute_capability
    arch = architecture(int(text[:-1]), int(text[-1]))
    version = cupy.cuda.nvrtc.getVersion()
    key = hashlib.sha256(f"{source}{arch}{OPTIONS}{version}".encode()).hexdigest()

    def compile_into(file: Path) -> None:
        file.write_bytes(compile_cubin(source, arch)[0])

    return cached(f"{name}-{arch}-{key[:20]}.cubin", compile_into)


def _launch_on_gpu(
    function: Any, grid: tuple[int, ...], block: tuple[int, ...], args: Sequence[Any], shared: int
) -> None:
    from mkref.machine.cuda import import_cupy

    cupy = import_cupy()
    roots: dict[int, tuple[np.ndarray, Any]] = {}
    passed = []
    for arg in args:
        if not isinstance(arg, np.ndarray):
            passed.append(arg)
            continue
        root = arg
        while isinstance(root.base, np.ndarray):
            root = root.base
        if id(root) not in roots:
            roots[id(root)] = (root, cupy.asarray(root.reshape(-1).view(np.uint8)))
        offset = arg.ctypes.data - root.ctypes.data
        passed.append(np.uint64(roots[id(root)][1].data.ptr + offset))
    if shared > 48 << 10:
        function.max_dynamic_shared_size_bytes = shared
    try:
        function(grid, block, tuple(passed), shared_mem=shared)
        cupy.cuda.get_current_stream().synchronize()
        for root, memory in roots.values():
            root.reshape(-1).view(np.uint8)[...] = memory.get()
    except cupy.cuda.driver.CUDADriverError as error:
        raise MachineError(f"cuda: the launch failed ({error})") from error
    except cupy.cuda.runtime.CUDARuntimeError as error:
        raise MachineError(f"cuda: the launch failed ({error})") from error
