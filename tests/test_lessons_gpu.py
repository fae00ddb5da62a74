"""Exercises in CUDA on a GPU: what passes on the CPU passes there. Run by `make test-gpu`."""

from __future__ import annotations

import numpy as np
import pytest

from mkref.errors import MachineError
from mkref.lessons import check
from mkref.lessons.check import exercises
from mkref.lessons.cuda_exercise import CudaExercise
from mkref.lessons.trials import machines
from mkref.machine.kernels import Kernels

pytestmark = pytest.mark.gpu

TASKS = [
    task
    for task in exercises().values()
    if isinstance(task, CudaExercise) and task.file != "megakernel.cu"
]
TWICE = """
extern "C" __global__ void twice(float* y, const float* x, int n) {
  for (int i = threadIdx.x; i < n; i += blockDim.x) y[i] = 2.0f * x[i];
}
"""


def test_arrays_go_there_and_back() -> None:
    """Views of one array, with what lies around them."""
    both = np.arange(100, dtype=np.float32)
    Kernels(TWICE, name="twice", machine="cuda").launch(
        "twice", (1,), (32,), (both[50:70], both[:20], 20)
    )
    expected = np.arange(100, dtype=np.float32)
    expected[50:70] = 2 * expected[:20]
    assert expected.tolist() == both.tolist()


def test_text_that_does_not_compile_is_one_error() -> None:
    """With the compiler's words."""
    with pytest.raises(MachineError, match="NVRTC cannot compile for sm_.*nothing"):
        Kernels(TWICE.replace("2.0f", "nothing"), name="twice", machine="cuda")


@pytest.mark.parametrize("task", TASKS, ids=lambda task: task.id)
def test_solution_passes_on_the_gpu(task: CudaExercise) -> None:
    """Every property, with the same inputs as on the CPU."""
    assert "cuda" in machines()
    results = task.try_on("cuda", task.as_answer(task.solution_text))
    assert not any(wrong for _, wrong in results), results


def test_wrong_answer_is_found_on_the_gpu_too() -> None:
    """A number, a compiler's message with the learner's line, and memory that is not there."""
    task = next(task for task in TASKS if task.id == "02.1")
    results = task.try_on("cuda", task.mistake(1)[0])
    assert all(wrong.startswith("on the GPU: ") for _, wrong in results)
    text = task.solution_text
    broken = task.as_answer(text.replace("dot(", "no_dot("))
    assert "it does not compile, line " in task.try_on("cuda", broken)[0][1]
    far = task.as_answer(text.replace("x[out] +=", "x[out + (1ll << 40)] +="))
    assert "the launch failed" in task.try_on("cuda", far)[0][1]


def test_check_says_the_same_with_a_gpu() -> None:
    """Reports stand in notebooks: with and without a GPU they are equal."""
    task = next(task for task in TASKS if task.id == "02.1")
    report = check("02.1", task.as_answer(task.solution_text))
    assert "Exercise 02.1 (o_proj): solved, 5 of 5 properties hold" == repr(report).splitlines()[0]
