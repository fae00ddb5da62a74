"""Lesson 16: the port is right, and leaves the product alone."""

from __future__ import annotations

import ast
from typing import Any

import numpy as np
import pytest
import torch
from transformers import Cohere2MoeConfig, Cohere2MoeForCausalLM

from mkref.errors import RequestError
from mkref.lessons import lesson_16_figures as figures
from mkref.lessons.lesson_16 import NEW, TOLERANCE, refused, run_step, shared_port, violation
from mkref.lessons.lesson_16_oracle import model_logits
from mkref.lessons.lesson_16_plan import _entered, verdict, with_shared
from mkref.lessons.port import Port
from mkref.lessons.whole import LESSON_CONFIG
from mkref.machine.nvrtc import compile_cubin
from mkref.plan import Op
from tests.test_reference_model import per_expert
from tests.tree import ROOT

SIZES = pytest.mark.parametrize("n_sm", [1, 2, 4, 7])
DIFF = """\
diff --git a/mkref/plan/share.py b/mkref/plan/share.py
--- a/mkref/plan/share.py
+++ b/mkref/plan/share.py
@@ -1 +1 @@
-    return total * slot // n_slots, total * (slot + 1) // n_slots
+    return 0, {what}
"""


def test_oracle_is_the_model_of_transformers() -> None:
    """With a shared expert that is added, in float32, to four digits; and it can fail."""
    torch.manual_seed(5)
    settings = {"num_shared_experts": 1, "shared_expert_combination_strategy": "sum"}
    config = Cohere2MoeConfig(**{**LESSON_CONFIG.to_dict(), **settings, "dtype": "float32"})
    model = Cohere2MoeForCausalLM._from_config(
        config, attn_implementation="eager", dtype=torch.float32
    ).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter.uniform_(0.7, 1.3)
            else:
                parameter.normal_(0.0, parameter.shape[-1] ** -0.5)
        tokens = list(range(3, 93))  # longer than the window
        right = model(torch.tensor([tokens])).logits[0].numpy()
    weights = per_expert(model.state_dict())
    np.testing.assert_allclose(model_logits(weights, LESSON_CONFIG, tokens), right, atol=1e-4)
    without = model_logits(weights, LESSON_CONFIG, tokens, shared=False)
    assert np.abs(without - right).max() > 0.1


def test_every_hunk_fits_the_tree() -> None:
    """All changes apply to the files as they are now, and what comes out is Python."""
    port = shared_port()
    assert "cuda/megakernel.cu" in {change.file for change in port.changes}
    for change in port.changes:
        text = port.text(change.file, (ROOT / change.file).read_text(encoding="utf-8"))
        assert change.added > 0
        if change.file.endswith(".py"):
            ast.parse(text)


def test_product_does_not_know_the_port() -> None:
    """Private copies have the new operations, the modules of the product have not."""
    own: Any = shared_port().module("plan").Op
    assert {*NEW} == {op.name for op in own} - {op.name for op in Op}
    assert list(Op) == list(own)[: len(Op)]
    assert "shared_down" not in (ROOT / "cuda" / "megakernel.cu").read_text(encoding="utf-8")


@SIZES
def test_entry_of_the_exercise_is_that_of_the_port(n_sm: int) -> None:
    """The solution puts the same tasks into the same places as the diff's builder."""
    plan = shared_port().module("lessons.steps").lesson_plan(n_sm)
    assert plan == _entered(with_shared, n_sm)
    assert "" == violation(plan)


def test_plan_of_the_real_geometry_is_proved() -> None:
    """On 132 SMs as the port has it; in the other places of SHARED_UP on seven."""
    assert "" == violation(figures._plan())
    assert {"no violation"} == {
        verdict(up_before=Op[name], n_sm=7) for name in figures.PLACES.values()
    }


@pytest.mark.parametrize(("n_sm", "rows"), [(1, 1), (2, 3), (4, 6), (7, 2)])
def test_run_has_the_bits_of_the_twin(n_sm: int, rows: int) -> None:
    """And is near the oracle, which without the shared expert it is not."""
    run = run_step(n_sm, rows)
    assert run.same_bits
    assert run.off < TOLERANCE < run.off_without / 10


def test_verifier_says_what_the_lesson_tells() -> None:
    """A wait that is implied, one that is not, and a model without tasks that add in place."""
    assert "no violation" == verdict(down_waits=False)
    assert "reads h_shared of layer 1" in verdict(up_before=Op.GATE_UP, down_waits=False)
    assert refused().count("task 15 (SHARED_DOWN of layer 1)") == 2


@pytest.mark.parametrize("arch", ["sm_80", "sm_90a"])
def test_ported_kernel_compiles_for_a_gpu(arch: str) -> None:
    """For the small model, as the exercise compiles it."""
    port = shared_port()
    source = port.module("machine.source").kernel_source
    compile_cubin(source(LESSON_CONFIG, port.module("machine.host").HOST_RING), arch)


def test_ports_do_not_meet() -> None:
    """Two ports have copies of their own."""
    ports = [Port(DIFF.format(what=n), f"port_test_{n}") for n in (1, 2)]
    assert [(0, 1), (0, 2)] == [port.module("plan.share").share(9, 3, 1) for port in ports]
    from mkref.plan.share import share

    assert (3, 6) == share(9, 3, 1)
    assert ports[0].module("plan.build").share is ports[0].module("plan.share").share
    assert ["+    return 0, 1"] == [
        line for line in ports[0]["mkref/plan/share.py"].hunks[0].lines if line[0] == "+"
    ]


def test_diff_that_does_not_fit_is_refused() -> None:
    """The message says which file and which lines, or what is missing."""
    port = Port(DIFF.format(what=1).replace("total *", "totals *"), "port_test_gone")
    with pytest.raises(RequestError, match=r"share.py has these lines 0 times, not once"):
        port.module("plan.share")
    with pytest.raises(RequestError, match="changes no file"):
        Port("nothing", "port_test_nothing")
    with pytest.raises(RequestError, match="there is no gone.diff"):
        Port.read("gone.diff")
    with pytest.raises(RequestError, match="'README.md' is not changed; mkref/plan/share.py are"):
        port["README.md"]
