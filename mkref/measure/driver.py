"""The few calls of the CUDA driver that CuPy does not offer: `libcuda` through ctypes.

Launches with attributes (programmatic dependent launch), and recording them into a CUDA graph. The
context is the one that CuPy has made current.

Sources: CUDA driver API, "Execution Control" (`CUlaunchConfig`, `CUlaunchAttribute`), "Graph
Management", "Stream Management".
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from ctypes import byref, c_int, c_size_t, c_uint, c_ulonglong, c_void_p
from typing import Any

from mkref.errors import MachineError

__all__ = ["Driver", "Graph", "Launch"]

_PROGRAMMATIC_STREAM_SERIALIZATION = 6
_NON_BLOCKING, _RELAXED = 1, 2
_MEMORY_CLOCK_KHZ, _BUS_BITS = 36, 37
_DYNAMIC_SHARED_BYTES = 8


class _Attribute(ctypes.Structure):
    """`CUlaunchAttribute`: a number, padding to eight bytes, and a union of 64."""

    _fields_ = (("id", c_int), ("pad", c_int), ("value", c_int), ("rest", c_int * 15))


class _Config(ctypes.Structure):
    """`CUlaunchConfig`."""

    _fields_ = (
        *((f"{what}_{axis}", c_uint) for what in ("grid", "block") for axis in "xyz"),
        ("shared_bytes", c_uint),
        ("stream", c_void_p),
        ("attributes", ctypes.POINTER(_Attribute)),
        ("n_attributes", c_uint),
    )


class Launch:
    """One kernel launch, ready to be made again and again.

    Args:
        driver: of this process.
        function: `CUfunction`.
        n_blocks, n_threads, shared_bytes: of the grid.
        params: address of the kernel's only argument, which is read at each launch.
        dependent: may begin before the kernel in front of it has ended.
    """

    def __init__(
        self,
        driver: Driver,
        function: int,
        n_blocks: int,
        n_threads: int,
        shared_bytes: int,
        params: int,
        *,
        dependent: bool = False,
    ) -> None:
        self._call = driver.lib.cuLaunchKernelEx
        self._function = c_void_p(function)
        self._attribute = _Attribute(_PROGRAMMATIC_STREAM_SERIALIZATION, 0, 1)
        self._config = _Config(n_blocks, 1, 1, n_threads, 1, 1, shared_bytes)
        if dependent:
            self._config.attributes = ctypes.pointer(self._attribute)
            self._config.n_attributes = 1
        self._arguments = (c_void_p * 1)(params)
        self._pointer = byref(self._config)

    def __call__(self, stream: int) -> None:
        """Queue it."""
        self._config.stream = stream
        code = self._call(self._pointer, self._function, self._arguments, None)
        if code:
            raise MachineError(f"cuda driver: cuLaunchKernelEx failed with error {code}")


class Graph:
    """Work that was recorded once and is launched as a whole."""

    def __init__(self, driver: Driver, graph: c_void_p, executable: c_void_p) -> None:
        self._driver, self._graph, self._executable = driver, graph, executable

    def __call__(self, stream: int) -> None:
        """Queue it."""
        self._driver.call("cuGraphLaunch", self._executable, c_void_p(stream))

    def close(self) -> None:
        """Forget it."""
        self._driver.call("cuGraphExecDestroy", self._executable)
        self._driver.call("cuGraphDestroy", self._graph)


class Driver:
    """`libcuda`.

    Raises:
        MachineError: there is no driver.
    """

    def __init__(self) -> None:
        try:
            self.lib = ctypes.CDLL("libcuda.so.1")
        except OSError as error:
            raise MachineError(f"cuda driver: not found ({error})") from error

    def call(self, name: str, *arguments: Any) -> None:
        """One call.

        Raises:
            MachineError: names the function and its error code.
        """
        code = getattr(self.lib, name)(*arguments)
        if code:
            raise MachineError(f"cuda driver: {name} failed with error {code}")

    def clear(self, address: int, n_words: int, stream: int) -> None:
        """Queue setting 32-bit words to zero."""
        arguments = c_ulonglong(address), c_uint(0), c_size_t(n_words), c_void_p(stream)
        self.call("cuMemsetD32Async", *arguments)

    def record(self, work: Callable[[int], None]) -> Graph:
        """What `work` queues on the stream that it is given, as a graph."""
        stream, graph, executable = c_void_p(), c_void_p(), c_void_p()
        self.call("cuStreamCreate", byref(stream), c_uint(_NON_BLOCKING))
        try:
            self.call("cuStreamBeginCapture_v2", stream, c_int(_RELAXED))
            try:
                work(int(stream.value or 0))
            finally:
                self.call("cuStreamEndCapture", stream, byref(graph))
            self.call("cuGraphInstantiateWithFlags", byref(executable), graph, c_ulonglong(0))
        finally:
            self.call("cuStreamDestroy_v2", stream)
        return Graph(self, graph, executable)

    def load(self, image: bytes, name: str, shared_bytes: int) -> int:
        """A kernel of an ELF image, as `CUfunction`; its module stays loaded."""
        module, function = c_void_p(), c_void_p()
        self.call("cuModuleLoadData", byref(module), image)
        self.call("cuModuleGetFunction", byref(function), module, name.encode())
        self.call("cuFuncSetAttribute", function, c_int(_DYNAMIC_SHARED_BYTES), c_int(shared_bytes))
        return int(function.value or 0)

    def blocks_per_sm(self, function: int, n_threads: int, shared_bytes: int) -> int:
        """Blocks of a kernel that an SM has room for at the same time."""
        n = c_int()
        arguments = c_void_p(function), c_int(n_threads), c_size_t(shared_bytes)
        self.call("cuOccupancyMaxActiveBlocksPerMultiprocessor", byref(n), *arguments)
        return n.value

    def datasheet_bandwidth(self) -> float:
        """Bytes per second of the first GPU's memory: clock times bus width, two words a clock."""
        device, value = c_int(), c_int()
        self.call("cuInit", c_uint(0))
        self.call("cuDeviceGet", byref(device), c_int(0))

        def attribute(number: int) -> int:
            self.call("cuDeviceGetAttribute", byref(value), c_int(number), device)
            return value.value

        return 2.0 * attribute(_MEMORY_CLOCK_KHZ) * 1e3 * attribute(_BUS_BITS) / 8
