"""What all cases of a measurement share: weights, the memory's ceiling, memory in use, first token.

What it does not do: measure steps (`mkref.measure.decode`, `mkref.measure.ladder`).
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from mkref.errors import MachineError, MkrefError, RequestError
from mkref.machine import create, default_n_sm, resolve
from mkref.machine.base import KernelMachine
from mkref.machine.cache import cache_dir
from mkref.machine.inputs import StepInputs
from mkref.measure.bandwidth import datasheet_bandwidth, measured_bandwidth
from mkref.measure.decode import Case, Ceiling, load, measure
from mkref.measure.record import process_age_s
from mkref.weights.checkpoint import load_checkpoint
from mkref.weights.layout import PackedLayout
from mkref.weights.synthetic import synthetic_weights

if TYPE_CHECKING:
    from mkref.config import NorthConfig
    from mkref.weights.packed import PackedWeights

__all__ = ["Session", "make_weights"]

READ_BYTES = 8 << 30
"""Of the bandwidth test: much more than any L2."""


@dataclass
class Session:
    """One model on one machine.

    Attributes:
        config: geometry.
        machine: "cuda", "host" or "interpreter".
        n_sm: of all plans.
        weights: where the machine wants them.
        ceiling: of the memory; empty off a GPU.
        seconds: of what a cold start consists of.
    """

    config: NorthConfig
    machine: str
    n_sm: int
    weights: PackedWeights
    ceiling: Ceiling = field(default_factory=Ceiling)
    seconds: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def begin(
        cls, config: NorthConfig, folder: Path | None, machine: str, n_sm: int | None
    ) -> Session:
        """Make or read the weights.

        Args:
            config: geometry.
            folder: of a checkpoint; None makes synthetic weights.
            machine: a name, or "auto".
            n_sm: default: all of the machine.

        Raises:
            RequestError: a machine that runs no plan.
            MkrefError: the machine cannot run here; the checkpoint cannot be read.
        """
        name = resolve(machine)
        if name == "torch":
            raise RequestError("--machine: 'torch' runs no plan; give cuda, host or interpreter")
        create(name, n_sm=n_sm).close()  # what is wrong with it shows before the weights are made
        begin = time.perf_counter()
        device = "cuda" if name == "cuda" else "cpu"
        if folder is None:
            weights = make_weights(config, device)
        else:
            weights = load_checkpoint(folder, device)
        weights.gammas[0, 0].item()  # a GPU is done now
        seconds = {"weights": round(time.perf_counter() - begin, 3)}
        return cls(config, name, n_sm or default_n_sm(name), weights, seconds=seconds)

    def machine_for(self, **options: Any) -> KernelMachine:
        """A machine of this session, nothing loaded."""
        return cast(KernelMachine, create(self.machine, n_sm=self.n_sm, **options))

    def first_token(self, machine: KernelMachine, table: np.ndarray, lengths: list[int]) -> None:
        """Time the first step of the process, and its start as a whole."""
        if "first_token" in self.seconds:
            return
        begin = time.perf_counter()
        at = np.array([length - 1 for length in lengths], np.int32)
        machine.step(StepInputs(np.ones(len(lengths), np.int32), at, table))
        self.seconds["first_token"] = round(time.perf_counter() - begin, 3)
        age = process_age_s()
        self.seconds["since_process_start"] = None if age is None else round(age, 3)

    def measure_ceiling(self, machine: KernelMachine) -> None:
        """Bandwidths, once; without a GPU that can be asked there are none."""
        if self.machine != "cuda" or self.ceiling.datasheet is not None:
            return
        n_bytes = min(READ_BYTES, machine.table["weights"].n_bytes)
        measured = None
        try:
            measured = measured_bandwidth(cast(Any, machine), n_bytes)
        except MkrefError as error:
            self.seconds["bandwidth_test"] = str(error)
        self.ceiling = Ceiling(datasheet_bandwidth(), measured)

    def run(self, case: Case, steps: int) -> dict[str, Any]:
        """One case; its row, with the memory that it took."""
        machine = self.machine_for()
        try:
            begin, kernels = time.perf_counter(), _n_kernels()
            table = load(machine, self.weights, case, self.n_sm)
            if "first_token" not in self.seconds:
                self.seconds["build_and_load"] = round(time.perf_counter() - begin, 3)
                self.seconds["kernel_from_cache"] = _n_kernels() == kernels
            if case.kind != "prompt":
                self.first_token(machine, table, case.lengths())
            self.measure_ceiling(machine)
            row = measure(machine, case, table, steps, self.ceiling)
            return {**row, **memory_of(machine)}
        finally:
            machine.close()

    def to_dict(self) -> dict[str, Any]:
        """For the record's provenance."""
        return {
            "n_sm": self.n_sm,
            "datasheet_bytes_per_s": self.ceiling.datasheet,
            "measured_bytes_per_s": self.ceiling.measured,
            "cold_start_s": self.seconds,
        }


def make_weights(config: NorthConfig, device: str) -> PackedWeights:
    """Synthetic weights.

    Raises:
        MachineError: the memory is not there.
    """
    try:
        return synthetic_weights(config, seed=0, device=device)
    except RuntimeError as error:  # torch's allocators, of the CPU and of a GPU
        raise MachineError(
            f"memory: the weights take {PackedLayout(config).total_tiles * 512 / 1e9:.1f} "
            "GB, which this machine does not have free; give a smaller model or a folder"
        ) from error


def memory_of(machine: KernelMachine) -> dict[str, int]:
    """Bytes of weights, KV pool and the other buffers; on a GPU also of all that is in use there.

    Buffers do not grow while steps run, so what is in use afterwards is the peak.
    """
    sizes = {name: buffer.n_bytes for name, buffer in machine.table.items()}
    out = {"weights_bytes": sizes.pop("weights"), "kv_bytes": sizes.pop("kv")}
    out["buffer_bytes"] = sum(sizes.values())
    cupy = getattr(machine, "cupy", None)
    if cupy is not None:
        free, total = cupy.cuda.runtime.memGetInfo()
        out["device_bytes"] = int(total - free)
    return out


def _n_kernels() -> int:
    return sum(1 for _ in cache_dir().glob("**/megakernel-*"))
