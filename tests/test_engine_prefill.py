"""`Prefill` against the kernel: the same keys and values in the pool, the same logits after them.

Tolerances. Both sides multiply the same bfloat16 words and add in float32, in different orders. So
a value that is rounded to bfloat16 (norms, q, k, v, attention, experts) may land on the other of
two neighbours, 2^-8 of its size away or less in the mean. A key is a sum of many products with such
values: even if all of them landed on the other side, its error has a root mean square of 2^-8 =
0.0039 of the keys' own; measured is 0.0024. Its own rounding adds up to an ulp, 2^-7 of itself, and
a sum over several rounded values is within five standard deviations for the few ten thousand
elements of a test: `close` asks for 2^-7 of the element + 5 * 2^-8 of the tensor's scale.

A near-tie of a router's logits is another matter: the token goes to another expert. Those tests
compare models in which every expert is chosen; with a choice, few elements may be far off.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from mkref.config import NorthConfig
from mkref.engine.prefill import Prefill
from mkref.errors import MachineError
from mkref.machine.base import StepInputs
from mkref.machine.torch_machine import TorchMachine
from mkref.paths import models_root
from mkref.weights.checkpoint import load_checkpoint
from tests.decode import small_model
from tests.engines import refused, tiny_model
from tests.prefills import Lab, far_apart, prompt

Floats = npt.NDArray[np.float32]
ALL = {"num_experts": 4, "num_experts_per_tok": 4}
"""Every token goes to every expert."""
KINDS: dict[str, dict[str, Any]] = {
    "all kinds of layers": ALL,
    "dense": {"first_k_dense_replace": 5},
    "scores that add up to 1": {**ALL, "norm_topk_prob": True},
    "larger heads": {**ALL, "head_dim": 64, "num_attention_heads": 4, "num_key_value_heads": 1},
    "full": {**ALL, "layer_types": ["full_attention"] * 5},
    "sliding": {**ALL, "layer_types": ["sliding_attention"] * 5},
    "one expert": {"num_experts": 1, "num_experts_per_tok": 1, "num_hidden_layers": 2},
    "dense layers without rotation": {**ALL, "prefix_dense_sliding_window_pattern": 4},
}
N = 150
ULP, NOISE = 2.0**-7, 2.0**-8


def close(ours: Floats, theirs: Floats) -> bool:
    """Within the tolerances above; NaN is not."""
    scale = float(np.sqrt(np.square(theirs).mean()))
    gap = np.abs(ours - theirs)
    rms = float(np.sqrt(np.square(gap).mean()))
    return bool((gap <= ULP * np.abs(theirs) + 5 * NOISE * scale).all()) and rms <= NOISE * scale


def assert_same_cache(ours: Lab, theirs: Lab, n: int) -> None:
    """All keys and values that a later token sees are close, in every layer."""
    config = theirs.machine.plan.config
    for layer in range(config.num_hidden_layers):
        sliding = config.is_sliding(layer)
        first = max(0, n + 1 - config.sliding_window) if sliding else 0
        if first < n:
            a, b = (lab.cache(n, layer, first) for lab in (ours, theirs))
            assert close(a, b), (layer, far_apart(a, b))


@pytest.mark.parametrize("kind", KINDS)
def test_keys_and_values_are_the_kernels(kind: str) -> None:
    """Every kind of layer; the logits of the next token agree, too."""
    config, weights = small_model(4, **KINDS[kind])
    tokens = prompt(config.vocab_size, N)
    kernel, torch = Lab.of(weights, seed=1), Lab.of(weights, seed=2)
    kernel.kernel(tokens)
    torch.torch(tokens)
    assert_same_cache(torch, kernel, N)
    assert close(torch.logits(7, N), kernel.logits(7, N))


def test_few_tokens_go_to_another_expert() -> None:
    """With 3 of 12 experts: all but a few elements as close, and the next token's logits."""
    config, weights = small_model(4)
    tokens = prompt(config.vocab_size, N)
    kernel, torch = Lab.of(weights, seed=1), Lab.of(weights, seed=2)
    kernel.kernel(tokens)
    torch.torch(tokens)
    for layer in range(config.num_hidden_layers):
        _, rms, far = far_apart(torch.cache(N, layer), kernel.cache(N, layer))
        assert rms < 0.02
        assert far < 0.03
    assert close(torch.logits(7, N), kernel.logits(7, N))


@pytest.mark.parametrize("sizes", [(1, 1, 62), (63, 2, 70), (64, 64), (65, 1, 1, 80), (7,) * 20])
def test_chunks_may_end_anywhere(sizes: tuple[int, ...]) -> None:
    """Any cut of a prompt leaves the same keys and values as none."""
    config, weights = small_model(3, **ALL)
    tokens = prompt(config.vocab_size, N)
    whole, cut = Lab.of(weights, seed=1), Lab.of(weights, seed=2)
    whole.torch(tokens)
    cut.torch(tokens, sizes=sizes)
    assert_same_cache(cut, whole, N)


@pytest.mark.parametrize("before", [1, 63, 64, 65, 100])
def test_a_prefix_that_is_in_the_cache(before: int) -> None:
    """Kernel, then torch, then kernel: as the kernel alone; the prefix stays as it is."""
    config, weights = small_model(3, **ALL)
    tokens = prompt(config.vocab_size, N)
    kernel, mixed = Lab.of(weights, seed=1), Lab.of(weights, seed=2)
    kernel.kernel(tokens)
    mixed.kernel(tokens[:before])
    prefix = [mixed.cache(before, layer).tobytes() for layer in range(5)]
    mixed.torch(tokens[before : N - 9], before)
    assert prefix == [mixed.cache(before, layer).tobytes() for layer in range(5)]
    mixed.kernel(tokens[N - 9 :], N - 9)
    assert_same_cache(mixed, kernel, N)
    assert close(mixed.logits(7, N), kernel.logits(7, N))


@pytest.mark.parametrize("window", [1, 2, 63, 64, 65, 128, 149, 150, 151])
def test_windows(window: int) -> None:
    """Windows of a token, around pages, and around the whole prompt, in two chunks."""
    config, weights = small_model(3, **ALL, sliding_window=window, num_hidden_layers=3)
    tokens = prompt(config.vocab_size, N)
    kernel, torch = Lab.of(weights, seed=1), Lab.of(weights, seed=2)
    kernel.kernel(tokens)
    torch.torch(tokens, sizes=(67,))
    assert_same_cache(torch, kernel, N)
    assert close(torch.logits(7, N), kernel.logits(7, N))


@pytest.mark.parametrize("n", [127, 128, 129, 150])
def test_pages_that_the_window_left_behind_are_not_needed(n: int) -> None:
    """Sliding layers without pages for what no later token sees, before and within a chunk."""
    config, weights = small_model(3, **ALL, sliding_window=5)
    tokens = prompt(config.vocab_size, n)
    full, few = Lab.of(weights, seed=1), Lab.of(weights, seed=2)
    full.torch(tokens)
    few.table[1, : (n - 4) // 64] = -1  # the next token sees n - 4 .. n
    few.torch(tokens)
    assert_same_cache(few, full, n)
    few.torch(tokens, n)  # begins where the pages before it are gone
    full.torch(tokens, n)
    assert_same_cache(few, full, 2 * n)


def test_nothing_else_in_the_pool_changes() -> None:
    """Bytes outside of the chunk's own tokens are those that were there: here the poison."""
    config, weights = small_model(3, **ALL)
    lab = Lab.of(weights)
    lab.torch(prompt(config.vocab_size, 100))
    lab.table[:, :2] = -1
    before = lab.machine.read("kv")
    assert 0 < np.count_nonzero(before == 0xFFFF) < before.size
    lab.table = Lab.of(weights).table
    lab.torch(prompt(config.vocab_size, 27), 100)
    after = lab.machine.read("kv")
    changed = np.flatnonzero((before != after).reshape(-1))
    assert (before.reshape(-1)[changed] == 0xFFFF).all()
    words = 27 * 5 * 2 * config.kv_width
    assert words == len(changed)


def test_it_is_deterministic() -> None:
    """Twice the same bits in the whole pool, with experts chosen."""
    config, weights = small_model(3)
    tokens, bits = prompt(config.vocab_size, 130), []
    for _ in range(2):
        lab = Lab.of(weights, seed=1)
        lab.torch(tokens, sizes=(50,))
        bits.append(lab.machine.read("kv").tobytes())
    assert bits[0] == bits[1]


def test_nano_on_the_cpu() -> None:
    """The trained model, against the compiled kernel: 400 tokens, a window of 256, one more."""
    folder = models_root() / "nano"
    config, weights = NorthConfig.load(folder), load_checkpoint(folder)
    tokens = prompt(config.vocab_size, 400)
    kernel = Lab.of(weights, seed=1, context=1024, host=True)
    torch = Lab.of(weights, seed=2, context=1024, host=True)
    kernel.kernel(tokens)
    torch.torch(tokens, sizes=(233,))
    for layer in range(config.num_hidden_layers):
        first = 145 if config.is_sliding(layer) else 0
        a, b = (lab.cache(400, layer, first) for lab in (torch, kernel))
        assert far_apart(a, b)[1] < 0.03
    ours, theirs = torch.logits(7, 400), kernel.logits(7, 400)
    assert far_apart(ours, theirs)[1] < 0.03
    for lab in (kernel, torch):
        lab.close()


def test_a_launch_under_way_ends_first() -> None:
    """A launch keeps the tokens of its finished steps, and the machine goes on as ever."""
    config, weights = tiny_model()
    lab, alone = Lab.of(weights, seed=1, host=True), Lab.of(weights, seed=1, host=True)
    for each in (lab, alone):
        each.torch(prompt(config.vocab_size, 20))
    one = np.array([5], np.int32)
    launch = lab.machine.start(StepInputs(one, np.array([20], np.int32), lab.table[:, None]), 200)
    first = next(launch)
    lab.torch(prompt(config.vocab_size, 10, seed=2), 300)
    assert len(list(launch)) < 199
    assert first.tolist() == [int(alone.logits(5, 20).argmax())]
    for each in (lab, alone):
        each.close()


def test_supports() -> None:
    """Machines that run the kernel and have a model loaded; no others."""
    _, weights = tiny_model()
    lab = Lab.of(weights)
    assert Prefill.supports(lab.machine)
    assert not Prefill.supports(TorchMachine(device="cpu"))
    prefill = Prefill(lab.machine)
    assert 512 == prefill.chunk  # a context has no more
    lab.close()
    assert not Prefill.supports(lab.machine)
    refused(MachineError, lambda: Prefill(lab.machine), "prefill: machine 'interpreter'", "loaded")
    refused(MachineError, lambda: prefill.run([1], 0, lab.table), "machine was closed")


@pytest.mark.parametrize("chunk", [0, -3, True, 2.0, "64"])
def test_a_wrong_chunk(chunk: object) -> None:
    """Is named."""
    lab = Lab.of(tiny_model()[1])
    given: Any = chunk
    refused(MachineError, lambda: Prefill(lab.machine, given), f"chunk: {chunk!r}; must be")


WRONG: dict[str, tuple[Any, ...]] = {
    "no tokens": ({"tokens": []}, "tokens: float64 of shape (0,); must be 1 to 100 token ids"),
    "too many": ({"tokens": [1] * 101}, "shape (101,); must be 1 to 100"),
    "fractions": ({"tokens": [1.5]}, "tokens: float64 of shape (1,)"),
    "beyond the vocabulary": ({"tokens": [1, 97]}, "tokens: 97 at 1; must be in 0..96"),
    "below it": ({"tokens": [-1]}, "tokens: -1 at 0; must be in 0..96"),
    "before 0": ({"position": -1}, "position: -1 of 3 tokens; must be in 0..253"),
    "behind the context": ({"position": 254}, "position: 254 of 3 tokens; must be in 0..253"),
    "a list": ({"table": [[0], [0]]}, "page_table: list; must be a NumPy array"),
    "floats": ({"table": np.zeros((2, 4))}, "page_table: float64; must be a NumPy array"),
    "rows": ({"table": np.zeros((2, 3, 4), int)}, "page_table: shape (2, 3, 4); must be (2,"),
    "too short": ({"table": np.zeros((2, 0), int)}, "tokens 0..63", "entry 0 is -1"),
    "a hole": ({"at": (0, 0, -1)}, "full layers need a page for tokens 0..63", "entry 0 is -1"),
    "no such page": ({"at": (1, 0, 9)}, "sliding layers need", "numbered 0..8; entry 0 is 9"),
    "twice": ({"position": 64, "at": (0, 1, 0)}, "page_table: full page", "is there twice"),
    "behind a window": ({"position": 133, "at": (1, 0, -1)}, ""),
    "in a window": ({"position": 133, "at": (1, 1, -1)}, "tokens 64..127", "entry 1 is -1"),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_wrong_arguments(name: str) -> None:
    """One line that names the argument, its value and what would be right; nothing is written."""
    change, *message = WRONG[name]
    lab = Lab.of(tiny_model()[1], context=256, chunk=100)
    table = lab.table.copy()
    if "at" in change:
        kind, entry, value = change["at"]
        table[kind, entry] = value if name != "twice" else table[kind, value]
    call = {"tokens": [1, 2, 3], "position": 0, "table": table, **change}
    arguments = (call["tokens"], call["position"], call["table"])
    prefill = Prefill(lab.machine, 100)
    if message == [""]:  # this one is right
        prefill.run(*arguments)
        return
    before = lab.machine.read("kv").tobytes()
    refused(MachineError, lambda: prefill.run(*arguments), *message)
    assert before == lab.machine.read("kv").tobytes()
