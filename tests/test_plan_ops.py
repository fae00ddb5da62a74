"""Each operation of the interpreter alone, against float64 on matrices in natural order.

Every test gives the operation its inputs for five rows and checks that exactly the outputs of these
rows changed. What may differ from float64 is stated in `tests.desk`.
"""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest

from mkref.errors import PlanError
from mkref.plan import Flag, Op, Task
from mkref.plan import interpret_ops as ops
from mkref.plan.memory import UnpackedWeights
from mkref.plan.runtime import Route, find_experts
from mkref.reference.sampling import sample as draw
from mkref.reference.scalars import from_bf16, to_bf16
from mkref.weights.layout import (
    from_b_order,
    to_b_order,
)
from mkref.weights.synthetic import synthetic_weights
from tests.decode import small_config
from tests.desk import BF16, POSITIONS, Desk, close, every, outputs, product, silu, untouched


def test_embed_copies_the_rows_of_the_tokens() -> None:
    """Exact; only this SM's columns, only active rows, only the first copy of x."""
    desk = Desk()
    tokens = [0, 516, 17, 15, 255]
    desk.buffers["tokens"][:5] = tokens
    task = desk.task(Op.EMBED, 0)
    desk.run("x", do=lambda: ops.embed(desk.step, task, desk.sampled))
    x, out = desk.buffers["x"], outputs(task)
    assert np.array_equal(desk.weight("model.embed_tokens.weight")[tokens, out], x[0, :5, out])
    assert untouched(x[0, 5:])
    assert untouched(x[1])
    assert untouched(np.delete(x[0], np.r_[out], axis=1))


def test_embed_goes_on_with_the_tokens_that_its_sm_sampled() -> None:
    """From the second step of a launch on; those of the host are poison here."""
    desk = Desk()
    desk.step.launch_step = 1
    desk.sampled[:5] = tokens = [3, 500, 16, 31, 8]
    task = desk.task(Op.EMBED, 0)
    desk.run("x", do=lambda: ops.embed(desk.step, task, desk.sampled))
    out = outputs(task)
    expected = desk.weight("model.embed_tokens.weight")[tokens, out]
    assert np.array_equal(expected, desk.buffers["x"][0, :5, out])


@pytest.mark.parametrize("token", [-1, 517, ops.NO_TOKEN])
def test_embed_refuses_what_is_no_token(token: int) -> None:
    """A SAMPLE that found nothing, or did not run, is an error that names the row."""
    desk = Desk()
    desk.step.launch_step = 1
    desk.sampled[:5] = [3, 500, token, 31, 8]
    with pytest.raises(PlanError, match=rf"row 2 finds {token} for a token; 0\.\.516 exist"):
        ops.embed(desk.step, desk.task(Op.EMBED, 0), desk.sampled)


def test_normalised_x_is_rmsnorm() -> None:
    """Against float64, within one rounding to bfloat16."""
    desk = Desk()
    x = desk.set_x(2).astype(np.float64)
    gamma = from_bf16(desk.buffers["gammas"][2]).astype(np.float64)
    expected = x / np.sqrt((x * x).mean(1, keepdims=True) + desk.config.rms_norm_eps) * gamma
    assert close(expected, desk.normed(2), 1.01 * BF16 * np.abs(expected))


def test_router() -> None:
    """Logits of the experts that exist, with the version of layer and step; idle rows have one that
    nobody wants.
    """
    desk = Desk()
    desk.set_x(2)
    expected, tolerance = product(desk.normed(2), desk.weight("model.layers.2.mlp.gate.weight"))
    tasks = [t for _, _, t in desk.plan if (t.op, t.layer) == (Op.ROUTER, 2)]
    desk.run("router_logits", do=lambda: every(ops.router, desk, tasks))
    assert close(expected, desk.step.router_logits(2), tolerance)
    words = desk.buffers["router_logits"]
    version = desk.step.index * desk.config.num_hidden_layers + 3
    assert (words[:5] >> np.uint64(32) == version).all()
    assert (words[5:] == 2**64 - 1).all()
    desk.step.forget_router_logits()
    assert (words[5:] >> np.uint64(32) == version - 3).all()
    with pytest.raises(PlanError, match="of another layer where layer 3 needs"):
        desk.step.router_logits(3)


@pytest.mark.parametrize(("layer", "launch_step"), [(0, 0), (1, 0), (1, 9), (4, 3)])
def test_qkv(layer: int, launch_step: int) -> None:
    """Dense with rotation, sliding with rotation, full without; all three SMs together."""
    desk = Desk()
    desk.step.launch_step = launch_step
    c, n = desk.config, desk.rows
    desk.set_x(layer)
    prefix = f"model.layers.{layer}.self_attn."
    expected = {}
    for name, heads in (("q", 8), ("k", 2), ("v", 2)):
        value, tolerance = product(desk.normed(layer), desk.weight(f"{prefix}{name}_proj.weight"))
        value, tolerance = (a.reshape(n, heads, -1) for a in (value, tolerance))
        if name != "v" and c.uses_rope(layer):
            frequency = c.rope_theta ** (-np.arange(0, c.head_dim, 2) / c.head_dim)
            angle = (np.array(POSITIONS)[:, None, None] + launch_step) * frequency
            a, b = value[..., 0::2], value[..., 1::2]
            turned = (a * np.cos(angle) - b * np.sin(angle), b * np.cos(angle) + a * np.sin(angle))
            value = np.stack(turned, axis=-1).reshape(value.shape)
            # float32 angles of up to 200 are off by 200 * 2^-24 and inv_freq's own rounding
            tolerance = 2 * tolerance.max() + 2e-5 * np.abs(value).max()
        expected[name] = (value, tolerance + 1.01 * BF16 * np.abs(value))
    tasks = [t for _, _, t in desk.plan if (t.op, t.layer) == (Op.QKV, layer)]
    assert len(tasks) == 3
    assert bool(tasks[0].flags & Flag.ROPE) == (layer != 4)
    desk.run("q", "k_new", "v_new", do=lambda: every(ops.qkv, desk, tasks))
    q = desk.buffers["q"]  # [row, kv head, D / 16, group, 16]
    natural = np.stack([[from_b_order(head) for head in row] for row in q[:n]])
    q_heads = natural[:, :, : c.group_size].reshape(n, c.num_attention_heads, c.head_dim)
    assert close(expected["q"][0], from_bf16(q_heads), expected["q"][1])
    for name in "kv":
        assert close(
            expected[name][0], from_bf16(desk.buffers[f"{name}_new"][:n]), expected[name][1]
        )
        assert untouched(desk.buffers[f"{name}_new"][n:])
    assert untouched(q[n:])
    assert untouched(q[:, :, :, c.group_size :])


@pytest.mark.parametrize(("layer", "batch"), [(0, 8), (2, 8), (0, 16), (2, 32)])
def test_gate_up(layer: int, batch: int) -> None:
    """silu(gate) * up of every active expert and row, dense and sparse, in B order; no more."""
    desk = Desk(batch=batch)
    c, n = desk.config, desk.rows
    desk.set_x(layer)
    dense, width = c.is_dense(layer), c.mlp_width(layer)
    route = find_experts(layer, desk.normal(n, c.num_experts), c)
    route = Route(layer, (0,), np.ones((1, n), np.float32)) if dense else route
    tasks = [t for _, _, t in desk.plan if (t.op, t.layer) == (Op.GATE_UP, layer)]
    assert len(tasks) == 2 * 3
    desk.run("h", do=lambda: every(ops.gate_up, desk, tasks, route))
    size = width * batch
    for active, expert in enumerate(route.experts):
        prefix = f"model.layers.{layer}.mlp." + ("" if dense else f"experts.{expert}.")
        gate, gate_error = product(desk.normed(layer), desk.weight(prefix + "gate_proj.weight"))
        up, up_error = product(desk.normed(layer), desk.weight(prefix + "up_proj.weight"))
        expected = silu(gate) * up
        tolerance = 1.2 * np.abs(up) * gate_error + np.abs(silu(gate)) * up_error
        h = desk.buffers["h"][active * size : (active + 1) * size].reshape(-1, batch, 16)
        got = from_bf16(from_b_order(h[:, :n]))
        assert close(expected, got, tolerance + 1.01 * BF16 * np.abs(expected))
        assert untouched(h[:, n:])
    assert untouched(desk.buffers["h"][len(route.experts) * size :])


def test_o_proj() -> None:
    """x + attention, this SM's rows only."""
    desk = Desk()
    c, n = desk.config, desk.rows
    x = desk.set_x(3).astype(np.float64)
    words = to_bf16(desk.normal(n, c.q_width))
    desk.buffers["attn"][:, :n] = to_b_order(words)
    weight = desk.weight("model.layers.3.self_attn.o_proj.weight")
    expected, tolerance = product(from_bf16(words).astype(np.float64), weight)
    task = desk.task(Op.O_PROJ, 3)
    out = outputs(task)
    desk.run("x_mid", do=lambda: ops.o_proj(desk.step, task))
    x_mid = desk.buffers["x_mid"]
    rounding = 2.0**-24 * np.abs(x + expected)
    assert close((x + expected)[:, out], x_mid[:n, out], (tolerance + rounding)[:, out])
    assert untouched(x_mid[n:])
    assert untouched(np.delete(x_mid, np.r_[out], axis=1))


@pytest.mark.parametrize(("layer", "batch"), [(0, 8), (2, 8), (0, 32), (2, 16)])
def test_down(layer: int, batch: int) -> None:
    """x_mid + the chosen experts, weighted; h of an expert that a row did not choose is NaN."""
    desk = Desk(batch=batch)
    c, n = desk.config, desk.rows
    dense, width = c.is_dense(layer), c.mlp_width(layer)
    route = find_experts(layer, desk.normal(n, c.num_experts), c)
    route = Route(layer, (0,), np.ones((1, n), np.float32)) if dense else route
    x_mid = desk.normal(n, c.hidden_size)
    desk.buffers["x_mid"][:n] = x_mid
    expected, tolerance = x_mid.astype(np.float64), np.zeros(x_mid.shape)
    size = width * batch
    for active, expert in enumerate(route.experts):
        scores = route.scores[expert, :n].astype(np.float64)[:, None]
        words = to_bf16(desk.normal(n, width))
        mine = scores[:, 0] > 0
        h = desk.buffers["h"][active * size : (active + 1) * size].reshape(-1, batch, 16)
        h[:, np.flatnonzero(mine)] = to_b_order(words[mine])
        prefix = f"model.layers.{layer}.mlp." + ("" if dense else f"experts.{expert}.")
        weight = desk.weight(prefix + "down_proj.weight")
        value, error = product(from_bf16(words).astype(np.float64), weight)
        expected = expected + scores * value
        tolerance = tolerance + scores * error
    task = desk.task(Op.DOWN, layer)
    out = outputs(task)
    desk.run("x", do=lambda: ops.down(desk.step, task, route))
    x = desk.buffers["x"]
    tolerance = tolerance + 2.0**-20 * np.abs(expected)
    x_next = x[(layer + 1) & 1]
    assert close(expected[:, out], x_next[:n, out], tolerance[:, out])
    assert untouched(x[layer & 1])
    assert untouched(x_next[n:])


@pytest.mark.parametrize(("scale", "launch_step"), [(1.0, 0), (0.25, 3)])
def test_head_and_sample(scale: float, launch_step: int) -> None:
    """Logits; the best token of each SM's rows; the best of all, with and without temperature.

    Every SM keeps the tokens; slot 0 tells the host.
    """
    desk = Desk(logit_scale=scale)
    n, b = desk.rows, desk.buffers
    desk.step.launch_step = launch_step
    desk.set_x(5)
    b["temperatures"][:n] = [0.0, 1.0, 0.7, 0.0, 30.0]
    seeds = np.array([1, 2, 3, 4, 2**63 + 5], dtype=np.uint64)
    b["seeds"][:n] = seeds.view(np.uint32).reshape(n, 2)
    expected, tolerance = product(desk.normed(5), desk.weight("model.embed_tokens.weight"))
    tasks = [t for _, _, t in desk.plan if t.op == Op.HEAD]
    desk.run("logits", "best_values", "best_tokens", do=lambda: every(ops.head, desk, tasks))
    assert close(scale * expected, b["logits"][:n], scale * tolerance)
    assert untouched(b["logits"][n:])
    assert desk.step.not_finite is None
    for sm, published in ((2, ()), (1, ()), (0, ("tokens_out", "progress"))):
        own = np.full(8, -1, dtype=np.int64)
        desk.run(*published, do=partial(ops.sample, desk.step, desk.plan.tasks[sm][-1], own))
        for row in range(n):
            settings = (float(b["temperatures"][row]), int(seeds[row]))
            token = draw(b["logits"][row], *settings, POSITIONS[row] + launch_step)
            assert token == own[row]
        assert untouched(own[n:])
    assert own[:n].tolist() == b["tokens_out"][launch_step, :n].tolist()
    assert untouched(b["tokens_out"][launch_step, n:])
    assert untouched(np.delete(b["tokens_out"], launch_step, axis=0))
    assert [launch_step + 1, 0] == b["progress"].tolist()
    for row in (0, 3):
        best = int(b["logits"][row].argmax())
        assert best == own[row]
        owner = next(t.index for t in tasks if outputs(t).start <= best < outputs(t).stop)
        assert (b["logits"][row, best], best) == (
            b["best_values"][owner, row],
            b["best_tokens"][owner, row],
        )


def test_head_takes_the_lowest_of_equal_logits_and_never_a_nan() -> None:
    """Ties within one SM and between SMs; a NaN is reported and loses; no rows, no candidate."""
    desk = Desk(2)
    b = desk.buffers
    b["temperatures"][:2] = 0
    b["best_values"][:, :2] = [[1.0, np.inf], [1.0, -np.inf], [0.5, np.inf]]
    b["best_tokens"][:, :2] = [[9, 400], [3, 0x7FFFFFFF], [1, 300]]
    ops.sample(desk.step, desk.plan.tasks[0][-1], desk.sampled)
    assert [3, 300] == desk.sampled[:2].tolist()

    x = desk.set_x(5)
    b["x"][1, 1] = np.nan
    task = desk.task(Op.HEAD, 5)
    with np.errstate(all="ignore"):
        ops.head(desk.step, task)
    assert (1, outputs(task).start) == desk.step.not_finite
    assert [-np.inf, 0x7FFFFFFF] == [b["best_values"][1, 1], b["best_tokens"][1, 1]]
    assert np.isfinite(b["best_values"][1, 0])
    assert np.isfinite(x).all()

    ops.head(desk.step, Task(Op.HEAD, 5, 0, 0, index=2))
    assert [0x7FFFFFFF] * 2 == b["best_tokens"][2, :2].tolist()


@pytest.mark.parametrize("wish", [1, -1])
def test_the_first_head_looks_for_a_wish_to_end(wish: int) -> None:
    """Slot 0 alone copies it, in every step anew, as 0 or 1."""
    desk = Desk(1)
    desk.set_x(5)
    desk.buffers["temperatures"][0] = 0
    control, progress = desk.buffers["control"], desk.buffers["progress"]
    first, *others = [next(t for t in tasks if t.op == Op.HEAD) for tasks in desk.plan.tasks]
    progress[1] = wish
    every(ops.head, desk, others)
    assert [0, 0, 0, 0] == control.tolist()
    ops.head(desk.step, first)
    assert [1, 0, 0, 0] == control.tolist()
    progress[1] = 0
    ops.head(desk.step, first)
    assert [0, 0, 0, 0] == control.tolist()


def test_weights_are_kept_within_their_budget() -> None:
    """The matrix used longest ago is dropped; what is left is the same object."""
    tiles = synthetic_weights(small_config()).words()[0]
    weights = UnpackedWeights(tiles, budget=3 * 6 * 256 * 6)
    first = weights.matrix(0, 1, 6)
    second = weights.matrix(6, 1, 6)
    assert first is weights.matrix(0, 1, 6)
    weights.matrix(12, 1, 6)
    weights.matrix(18, 1, 6)
    assert first is weights.matrix(0, 1, 6)
    assert second is not weights.matrix(6, 1, 6)
    assert weights.n_bytes <= weights.budget


def test_the_small_model_is_what_the_tests_assume() -> None:
    """Layer 0 dense and full, 1 to 3 sliding, 4 full; vocabulary and router end in a part block."""
    config = small_config()
    kinds = [(config.is_dense(i), config.is_sliding(i)) for i in range(5)]
    assert [(True, False), (False, True), (False, True), (False, True), (False, False)] == kinds
    assert config.vocab_size % 16
    assert config.num_experts % 16
