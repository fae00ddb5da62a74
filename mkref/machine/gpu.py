"""What the NVIDIA driver says about the GPU, without CuPy: `libcuda` through ctypes.

So `mkref doctor` can tell "no driver" from "a driver, but CuPy is missing". It runs nothing.

Source: CUDA driver API, `cuDeviceGetAttribute`.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass

__all__ = ["Gpu", "driver_version", "find_gpus"]

_LIBRARIES = ("libcuda.so.1", "nvcuda.dll")
_N_SM, _MAJOR, _MINOR, _SHARED_OPTIN = 16, 75, 76, 97


@dataclass(frozen=True)
class Gpu:
    """One GPU: name, SMs, compute capability, shared memory per block in bytes."""

    name: str
    n_sm: int
    capability: tuple[int, int]
    shared_bytes: int


def _driver() -> ctypes.CDLL | None:
    for name in _LIBRARIES:
        try:
            return ctypes.CDLL(name)
        except OSError:
            continue
    return None


def driver_version() -> str | None:
    """The newest CUDA that the driver can run, such as "13.0"; None without a driver."""
    driver, number = _driver(), ctypes.c_int()
    if driver is None or driver.cuDriverGetVersion(ctypes.byref(number)):
        return None
    return f"{number.value // 1000}.{number.value % 1000 // 10}"


def find_gpus() -> list[Gpu]:
    """All GPUs that the driver shows to this process."""
    driver, count = _driver(), ctypes.c_int()
    if driver is None or driver.cuInit(0) or driver.cuDeviceGetCount(ctypes.byref(count)):
        return []
    return [_gpu(driver, index) for index in range(count.value)]


def _gpu(driver: ctypes.CDLL, index: int) -> Gpu:
    device, value = ctypes.c_int(), ctypes.c_int()
    name = ctypes.create_string_buffer(128)
    driver.cuDeviceGet(ctypes.byref(device), index)
    driver.cuDeviceGetName(name, len(name), device)

    def attribute(number: int) -> int:
        driver.cuDeviceGetAttribute(ctypes.byref(value), number, device)
        return value.value

    capability = (attribute(_MAJOR), attribute(_MINOR))
    return Gpu(name.value.decode(), attribute(_N_SM), capability, attribute(_SHARED_OPTIN))
