"""Building for the CPU: compilers, cache, messages, and the GIL."""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from mkref.errors import MachineError
from mkref.machine.hostcc import HostModule, build, find_compiler, kernel_names

TINY = """
extern "C" __global__ void put(int* out) { out[threadIdx.x] = VALUE + threadIdx.x; }
extern "C" __global__ void wait_for_host(int* flag) {
  while (ptx::ld_acquire(flag) == 0) ptx::pause();
}
"""


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A cache of this file's own."""
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(scope="module")
def tiny(cache: Path) -> HostModule:
    """`TINY` with VALUE = 5."""
    return build(TINY, name="tiny", defines={"VALUE": 5}, cache_dir=cache)


def test_kernel_names() -> None:
    """Found with launch bounds before or after `void`, not in comments, once each."""
    source = """
    // extern "C" __global__ void commented(int*) {}
    extern "C" __global__ void __launch_bounds__(288, 1) first(int* p) {}
    extern "C"  __global__
    __launch_bounds__(64) void second(const float* x, int n) {}
    /* extern "C" __global__ void gone() */ extern "C" __global__ void first(int* p);
    __global__ void internal() {}
    """
    assert ["first", "second"] == kernel_names(source)


def test_cache(
    tiny: HostModule, cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Same content, same file, not compiled again; another define, another file."""
    stamp = tiny.path.stat().st_mtime_ns
    again = build(TINY, name="tiny", defines={"VALUE": "5"}, cache_dir=cache)
    assert (tiny.path, stamp) == (again.path, again.path.stat().st_mtime_ns)
    assert [tiny.path] == list(cache.iterdir())
    monkeypatch.setenv("MKREF_CACHE", str(tmp_path))
    other = build(TINY, name="tiny", defines={"VALUE": 6})
    assert tmp_path in other.path.parents
    assert tiny.path.name != other.path.name
    out = np.zeros(3, np.int32)
    other.get_function("put")((1,), (3,), (out,))
    assert [6, 7, 8] == out.tolist()


def test_concurrent_builds(tmp_path: Path) -> None:
    """Two builders of one source get the same whole file."""
    with ThreadPoolExecutor(2) as pool:
        jobs = [
            pool.submit(build, TINY, name="tiny", defines={"VALUE": 1}, cache_dir=tmp_path)
            for _ in range(2)
        ]
        paths = {job.result().path for job in jobs}
    assert paths == set(tmp_path.iterdir())
    assert 1 == len(paths)


def test_compile_error(tmp_path: Path) -> None:
    """One line that names the file, the line and what is wrong; nothing stays in the cache."""
    source = 'extern "C" __global__ void k(int* p) {\n  p[0] = no_such_thing;\n}'
    with pytest.raises(MachineError) as caught:
        build(source, name="broken", cache_dir=tmp_path)
    assert "compiling broken" in str(caught.value)
    assert "broken.cu:2:" in str(caught.value)
    assert "no_such_thing" in str(caught.value)
    assert "\n" not in str(caught.value)
    assert [] == list(tmp_path.iterdir())


def test_static_shared_memory_is_refused(tmp_path: Path) -> None:
    """Blocks share OS threads, so `__shared__` cannot work; the message says what does."""
    source = 'extern "C" __global__ void k(int* p) { __shared__ int s[4]; p[0] = s[0]; }'
    with pytest.raises(MachineError, match=r"use ptx::shared_memory\(\), not __shared__"):
        build(source, name="static", cache_dir=tmp_path)


def test_compiler_choice(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """`CXX` decides; a CXX that does not run is an error, and so is having no compiler at all."""
    usual = find_compiler()
    monkeypatch.setenv("CXX", usual.command[0])
    assert usual == find_compiler()
    monkeypatch.setenv("CXX", str(tmp_path / "no-such-compiler"))
    with pytest.raises(MachineError, match=r"CXX=.*no-such-compiler.* is not a C\+\+ compiler"):
        find_compiler()
    monkeypatch.setenv("CXX", "g++ '")
    with pytest.raises(MachineError, match=r"CXX=.* is not a C\+\+ compiler"):
        find_compiler()
    monkeypatch.delenv("CXX")
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(MachineError, match=r"no C\+\+ compiler found.*g\+\+ 12"):
        find_compiler()


def test_unwritable_cache(tmp_path: Path) -> None:
    """A cache that cannot be a folder is named."""
    (tmp_path / "file").write_text("")
    with pytest.raises(MachineError, match="cannot write the build cache"):
        build(TINY, name="tiny", defines={"VALUE": 0}, cache_dir=tmp_path / "file" / "x")


def test_other_python_threads_run_during_a_launch(tiny: HostModule) -> None:
    """The launch releases the GIL: a Python thread sets the word that the kernel polls."""
    flag = np.zeros(1, np.int32)
    kernel = tiny.get_function("wait_for_host")

    def set_flag() -> None:
        time.sleep(0.1)
        flag[0] = 1

    helper = threading.Thread(target=set_flag)
    helper.start()
    kernel((1,), (1,), (flag,), timeout_s=20)
    helper.join()
    assert 1 == flag[0]


def test_launches_from_several_python_threads(tiny: HostModule) -> None:
    """Launches of one module may overlap."""
    kernel = tiny.get_function("put")
    outs = [np.zeros(64, np.int32) for _ in range(8)]
    with ThreadPoolExecutor(4) as pool:
        for job in [pool.submit(kernel, (2,), (64,), (out,)) for out in outs]:
            job.result()
    assert all(np.array_equal(np.arange(64) + 5, out) for out in outs)
