"""Settings of a draw: what is refused, with which words, and what reaches a machine."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from mkref.engine.sampling import Sampling, make_draw
from mkref.errors import MachineError, RequestError
from mkref.machine.draw import BIAS_IDS, Draw, check_draw, effective_bans

REFUSED: list[tuple[str, Any, str]] = [
    ("temperature", -1, "temperature: -1; must be 0 (greedy) or 0.001 to 1000"),
    ("temperature", float("nan"), "temperature: nan; must be 0 (greedy)"),
    ("top_p", 0, "top_p: 0; must be a number from 1e-06 to 1"),
    ("top_p", 1.5, "top_p: 1.5; must be"),
    ("top_p", "0.9", "top_p: '0.9'; must be a number"),
    ("top_p", True, "top_p: True; must be a number"),
    ("top_k", -1, "top_k: -1; must be a whole number from 0"),
    ("top_k", 1.5, "top_k: 1.5; must be a whole number"),
    ("min_p", 1.01, "min_p: 1.01; must be a number from 0 to 1"),
    ("presence_penalty", 2.5, "presence_penalty: 2.5; must be a number from -2 to 2"),
    ("frequency_penalty", None, "frequency_penalty: None; must be a number from -2 to 2"),
    ("repetition_penalty", 0, "repetition_penalty: 0; must be a number from 0.01 to 100"),
    ("logit_bias", 7, "logit_bias: 7; must be a mapping of token ids to numbers"),
    ("logit_bias", {1: 101}, "logit_bias[1]: 101; must be a number from -100 to 100"),
    ("logit_bias", {"a": 1}, "logit_bias: 'a'; must be a whole number"),
    ("logit_bias", [(1, 2), (1, 3)], "logit_bias: token 1 twice"),
    ("logit_bias", [(1, 2, 3)], "logit_bias: (1, 2, 3); must be a pair"),
    ("logit_bias", dict.fromkeys(range(301), 0), "logit_bias: 301 tokens; must be at most 300"),
    ("seed", 2**64, "seed: 18446744073709551616; must be a whole number from 0"),
    ("min_tokens", -1, "min_tokens: -1; must be a whole number from 0"),
    ("logprobs", 21, "logprobs: 21; must be a whole number from 0 to 20"),
    ("logprobs", True, "logprobs: True; must be a whole number"),
]


@pytest.mark.parametrize(("field", "value", "message"), REFUSED)
def test_wrong_setting(field: str, value: Any, message: str) -> None:
    """One line that names the field, its value and what would be right."""
    with pytest.raises(RequestError) as caught:
        Sampling(**{field: value})
    assert str(caught.value).startswith(message)
    assert "\n" not in str(caught.value)


def test_good_settings_are_normalised() -> None:
    """Numbers of NumPy and mappings are taken; biases come in ascending order of ids."""
    given: dict[str, Any] = {"temperature": np.float32(0.5), "top_k": np.int64(3)}
    sampling = Sampling(**given, logit_bias={7: 1, 2: np.float32(-3)})  # type: ignore[arg-type]
    assert ((2, -3.0), (7, 1.0)) == sampling.logit_bias
    assert (0.5, 3, int) == (sampling.temperature, sampling.top_k, type(sampling.top_k))
    assert Sampling() == Sampling(temperature=-0.0, logit_bias=())
    assert hash(sampling) == hash(Sampling(0.5, top_k=3, logit_bias=((2, -3), (7, 1))))


@pytest.mark.parametrize(
    ("changes", "needs"),
    [
        ({}, False),
        ({"temperature": 0.7, "seed": 5}, False),
        ({"top_p": 0.9}, False),  # greedy: the largest always stays
        ({"top_p": 0.9, "temperature": 1}, True),
        ({"top_k": 5, "temperature": 1}, True),
        ({"min_p": 0.1, "temperature": 1}, True),
        ({"presence_penalty": 0.1}, True),
        ({"repetition_penalty": 1.1}, True),
        ({"logit_bias": {1: 1}}, True),
        ({"min_tokens": 1}, True),
        ({"logprobs": 0}, True),
    ],
)
def test_needs_draw(changes: dict[str, Any], needs: bool) -> None:
    """Greedy and temperature are left to the kernel; everything else needs the sampler."""
    assert needs == Sampling(**changes).needs_draw


def test_make_draw() -> None:
    """Every field of a row, and neutral rows in between."""
    full = Sampling(0.5, 0.9, 4, 0.1, 1, -1, 1.2, ((5, 2), (3, -1)), 9, 6, 7)
    draw = make_draw([None, full, Sampling()], [0, 41, 17])
    neutral = Draw.neutral(3)
    for row in (0, 2):
        assert all(
            getattr(neutral, name)[row].tolist() == getattr(draw, name)[row].tolist()
            for name in ("top_k", "top_p", "bias_ids", "ban_until", "logprobs", "repetition")
        )
    assert [4, 41, 7] == [draw.top_k[1], draw.ban_until[1], draw.logprobs[1]]
    assert np.allclose([0.9, 0.1, 1, -1, 1.2], [
        draw.top_p[1], draw.min_p[1], draw.presence[1], draw.frequency[1], draw.repetition[1]
    ])  # fmt: skip
    assert [3, 5, -1] == draw.bias_ids[1, :3].tolist()
    assert [-1, 2, 0] == draw.bias_values[1, :3].tolist()
    assert [False, True, False] == draw.penalizes.tolist()
    assert [0, 2, 0] == draw.n_bias.tolist()


def changed(name: str, value: Any) -> Draw:
    """Neutral settings of three rows, one of them changed."""
    draw = Draw.neutral(3)
    if name == "mask":
        return draw.masked(value)
    if isinstance(value, np.ndarray):
        object.__setattr__(draw, name, value)
    else:
        getattr(draw, name)[1] = value
    return draw


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("top_k", -1, "draw.top_k: row 1 has -1; must be 0 (off) or more"),
        ("top_p", 0, "draw.top_p: row 1 has 0.0; must be 0.000001 to 1"),
        ("top_p", np.nan, "draw.top_p: row 1 has nan"),
        ("min_p", 2, "draw.min_p: row 1 has 2.0; must be 0 to 1"),
        ("repetition", 0, "draw.repetition: row 1 has 0.0; must be a positive number"),
        ("presence", np.inf, "draw.presence: row 1 has inf; must be a finite number"),
        ("logprobs", 21, "draw.logprobs: row 1 has 21; must be -1 (off) to 20"),
        ("top_k", np.zeros(3), "draw.top_k: float64 (3,); must be int32 (3,)"),
        ("top_k", np.zeros(2, np.int32), "draw.top_k: int32 (2,); must be int32 (3,)"),
        ("bias_ids", 4, "draw.bias_ids: row 1; must be token ids in 0..49, each once"),
        ("bias_ids", [50, *[-1] * 299], "draw.bias_ids: row 1; must be token ids in 0..49"),
        ("bias_ids", [-1, 4, *[-1] * 298], "draw.bias_ids: row 1; must be token ids"),
        ("bias_ids", [-2, *[-1] * 299], "draw.bias_ids: row 1; must be token ids"),
        ("bias_values", np.nan, "draw.bias_values: row 1 has nan; must be a finite number"),
        ("mask", np.zeros((3, 1), np.uint32), "draw.mask: uint32 (3, 1); must be uint32 (3, 2)"),
        ("mask", np.zeros((3, 2), np.int32), "draw.mask: int32 (3, 2); must be uint32 (3, 2)"),
        (
            "mask",
            np.asarray([[1, 0], [0, 1 << 18], [0, 1]], np.uint32),
            "draw.mask: row 1 allows no token; must allow at least one",
        ),
    ],
)
def test_wrong_draw(name: str, value: Any, message: str) -> None:
    """A machine refuses what its kernels would read wrongly."""
    with pytest.raises(MachineError) as caught:
        check_draw(changed(name, value), SimpleNamespace(rows=3), 1, 50)  # type: ignore[arg-type]
    assert str(caught.value).startswith(message)


def test_a_mask_is_for_one_step() -> None:
    """After a step another mask holds."""
    mask = np.full((3, 2), 1, np.uint32)
    with pytest.raises(MachineError, match="mask: with 2 steps; must be one step"):
        check_draw(changed("mask", mask), SimpleNamespace(rows=3), 2, 50)  # type: ignore[arg-type]


def test_known_settings_are_frozen() -> None:
    """Settings that a machine has taken cannot change, so they are looked at once only."""
    draw = Draw.neutral(3)
    inputs: Any = SimpleNamespace(rows=3)
    check_draw(draw, inputs, 1, 50)
    draw.freeze()
    with pytest.raises(ValueError, match="read-only"):
        draw.top_p[0] = 7
    assert draw.masked(np.full((3, 2), 1, np.uint32)).same_settings(draw)
    assert not Draw.neutral(3).same_settings(draw)
    with pytest.raises(MachineError, match=r"int32 \(3,\); must be int32 \(2,\)"):
        check_draw(draw, SimpleNamespace(rows=2), 1, 50, known=draw)  # type: ignore[arg-type]


def test_a_mask_is_stronger_than_a_ban() -> None:
    """Where a mask allows stop ids only, they may come in spite of min_tokens."""
    draw = Draw.neutral(4)
    draw.ban_until[:] = [5, 5, 5, 0]
    mask = np.zeros((4, 2), np.uint32)
    mask[0, 1] = 1 << 3 | 1 << 9 | 1 << 20  # 35, 41, and a bit beyond the vocabulary
    mask[1, 1] = 1 << 3 | 1 << 10
    mask[2:, 0] = 1
    stops = np.full((4, 8), -1, np.int32)
    stops[:, :3] = [41, 35, 35]
    inputs: Any = SimpleNamespace(positions=np.asarray([4, 4, 4, 4]))
    assert [0, 5, 5, 0] == effective_bans(draw.masked(mask), inputs, stops, 50).tolist()
    assert [5, 5, 5, 0] == effective_bans(draw, inputs, stops, 50).tolist()
    assert [0, 0, 0, 0] == effective_bans(draw, inputs, None, 50).tolist()
    assert [5, 5, 5, 0] == draw.ban_until.tolist()
    assert BIAS_IDS == draw.bias_ids.shape[1]
