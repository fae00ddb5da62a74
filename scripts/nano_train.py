"""The training loop of `nano`: AdamW on float32 master weights under bfloat16 autocast.

What it does: steps that depend on (seed, step) alone, checkpoints from which a run goes on with the
same bits, a timing trial that also tests that the machine repeats itself, rounding to bfloat16.

What it does not do: read files other than its checkpoint, choose the number of steps from a clock
while it runs (the count is fixed before the first step), or select among checkpoints.

Randomness: initial weights from `seed`; data order from (seed, epoch); dropout from (seed, step),
because the generators are seeded again before every step. So a checkpoint holds no generator state.
"""

from __future__ import annotations

import math
import os
import signal
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from nano_export import weights_sha256
from nano_model import NanoModel, Shape
from torch import Tensor
from torch._inductor import config as inductor_config

if TYPE_CHECKING:
    from nano_data import Batches

__all__ = ["Recipe", "Trainer", "make_deterministic"]

COMPILE_LIMIT_S = 150
TRIAL_STEPS = 6


@dataclass(frozen=True)
class Recipe:
    """Everything that the result depends on, besides the corpus, the shape and the machine."""

    seed: int = 1
    steps: int = 10000
    batch: int = 32
    context: int = 2048
    peak_lr: float = 3e-3
    warmup: int = 300
    weight_decay: float = 0.1
    dropout: float = 0.1
    clip: float = 1.0
    balance: float = 0.02  # weight of the loss that keeps the experts evenly used
    router_square: float = 1e-4  # weight of the mean square router logit: no dead sigmoids

    def lr(self, step: int) -> float:
        """Linear warm-up, then a cosine to zero at the last step."""
        if step < self.warmup:
            return self.peak_lr * (step + 1) / self.warmup
        done = (step - self.warmup) / max(1, self.steps - self.warmup)
        return self.peak_lr * 0.5 * (1 + math.cos(math.pi * done))


def make_deterministic() -> None:
    """Asks torch for the same bits every time; call before the first CUDA work."""
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)
    # a debugging aid that costs time
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    if hasattr(inductor_config, "deterministic"):
        inductor_config.deterministic = True  # no choice of kernels by their timing
    # of the fused attentions, flash has a deterministic backward pass; math is the fallback
    torch.backends.cuda.enable_mem_efficient_sdp(False)
    torch.backends.cuda.enable_cudnn_sdp(False)
    torch.backends.cudnn.benchmark = False


class Trainer:
    """Model, optimiser and position of one run."""

    def __init__(
        self, recipe: Recipe, shape: Shape, batches: Batches, device: torch.device, compiled: bool
    ) -> None:
        self.recipe, self.batches, self.device = recipe, batches, device
        self.compiled = compiled
        self.model = NanoModel(shape, recipe.dropout).to(device).train()
        self.curve: list[dict[str, float]] = []
        self._losses: Callable[[Tensor, Tensor], tuple[Tensor, ...]]
        self._losses = self.model.losses
        if compiled:
            self._losses = torch.compile(self.model.losses, dynamic=False)
        self.reset()

    def reset(self) -> None:
        """Back to step 0 with the initial weights."""
        self.step = 0
        self.model.initialise(self.recipe.seed)
        with torch.no_grad():
            for p in self.model.parameters():
                if p.dim() == 1:
                    p.fill_(1.0)
        matrices = [p for p in self.model.parameters() if p.dim() > 1]
        gammas = [p for p in self.model.parameters() if p.dim() == 1]
        self.optimizer = torch.optim.AdamW(
            [
                {"params": matrices, "weight_decay": self.recipe.weight_decay},
                {"params": gammas, "weight_decay": 0.0},
            ],
            lr=self.recipe.peak_lr,
            betas=(0.9, 0.95),
            fused=self.device.type == "cuda",
        )

    def one_step(self) -> Tensor:
        """One update; returns (cross entropy, busiest expert, mean square logit, gradient norm)."""
        recipe = self.recipe
        torch.manual_seed(recipe.seed * 1_000_003 + self.step)
        inputs, targets = self.batches.step(self.step, self.device)
        for group in self.optimizer.param_groups:
            group["lr"] = recipe.lr(self.step)
        with torch.autocast(self.device.type, torch.bfloat16):
            entropy, balance, square, busiest = self._losses(inputs, targets)
        (entropy + recipe.balance * balance + recipe.router_square * square).backward()
        norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), recipe.clip)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self.step += 1
        return torch.stack([t.detach() for t in (entropy, busiest, square, norm)])

    def trial(self, say: Callable[[str], None]) -> tuple[float, bool]:
        """Compiles, runs the first steps twice; returns seconds a step and whether bits agree.

        A compiler that fails or takes more than `COMPILE_LIMIT_S` is replaced by plain torch.
        """
        if self.compiled:
            start = time.monotonic()
            try:
                with _Alarm(COMPILE_LIMIT_S):
                    self.one_step()
                    self._wait()
                say(f"compiled in {time.monotonic() - start:.1f} s")
            except Exception as error:  # whatever failed, the remedy is the same
                reason = f"{type(error).__name__}: {str(error)[:800]}"
                say(f"no compiler, plain torch instead: {reason}")
                self.compiled = False
                self._losses = self.model.losses
                self.optimizer.zero_grad(set_to_none=True)
        hashes = []
        for _ in range(2):
            self.reset()
            for _ in range(TRIAL_STEPS):
                self.one_step()
            hashes.append(weights_sha256(self.model))
        start = time.monotonic()
        for _ in range(4 * TRIAL_STEPS):
            self.one_step()
        self._wait()
        seconds = (time.monotonic() - start) / (4 * TRIAL_STEPS)
        self.reset()
        return seconds, hashes[0] == hashes[1]

    def run(self, stop: int, log_every: int, on_log: Callable[[dict[str, float]], None]) -> None:
        """Steps up to `stop`; every `log_every` steps a row joins the curve and goes to `on_log`.

        `on_log` may add fields to the row, and is the place to save: the averages start afresh
        after it, so a run that is resumed there has the same curve as one that was not stopped.

        Raises:
          FloatingPointError: if the loss is no longer a number.
        """
        total = torch.zeros(4, device=self.device)
        count = 0
        while self.step < stop:
            total += self.one_step()
            count += 1
            if self.step % log_every and self.step != stop:
                continue
            entropy, busiest, square, norm = (total / count).tolist()
            if not math.isfinite(entropy):
                raise FloatingPointError(f"step {self.step}: the loss is {entropy}")
            row = {
                "step": self.step,
                "train_nats": round(entropy, 5),
                "busiest_expert": round(busiest, 3),
                "router_square": round(square, 3),
                "gradient_norm": round(norm, 3),
                "lr": round(self.recipe.lr(self.step - 1), 7),
            }
            self.curve.append(row)
            on_log(row)
            total.zero_()
            count = 0

    def save(self, path: Path) -> None:
        """Writes a checkpoint; a crash while writing leaves the previous one whole."""
        state = {
            "recipe": asdict(self.recipe),
            "shape": asdict(self.model.shape),
            "step": self.step,
            "curve": self.curve,
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
        }
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = path.with_suffix(".partial")
        torch.save(state, partial)
        partial.replace(path)

    def load(self, path: Path) -> Recipe:
        """Goes on from a checkpoint of the same shape and recipe, whose step count it takes over.

        Raises:
          ValueError: naming the first field that differs.
        """
        state: dict[str, Any] = torch.load(path, map_location=self.device, weights_only=True)
        mine = asdict(self.recipe) | asdict(self.model.shape)
        for name, value in (state["recipe"] | state["shape"]).items():
            if name != "steps" and mine.get(name) != value:
                raise ValueError(f"{path}: {name} is {value}, this run has {mine.get(name)}")
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.step, self.curve = state["step"], state["curve"]
        # the schedule depends on the count, which a trial (`--minutes`) may have fixed
        self.recipe = replace(self.recipe, steps=state["recipe"]["steps"])
        return self.recipe

    def round_weights(self) -> NanoModel:
        """Rounds the master weights to bfloat16 in place; the model is then in evaluation mode."""
        with torch.no_grad():
            for p in self.model.parameters():
                p.copy_(p.bfloat16().float())
        return self.model.eval()

    def _wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize()


class _Alarm:
    """Raises TimeoutError in the main thread after some seconds."""

    def __init__(self, seconds: int) -> None:
        self.seconds = seconds

    def __enter__(self) -> None:
        def ring(signum: int, frame: object) -> None:
            raise TimeoutError(f"{self.seconds} s are over")

        self.before = signal.signal(signal.SIGALRM, ring)
        signal.alarm(self.seconds)

    def __exit__(self, *exc: object) -> None:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, self.before)
