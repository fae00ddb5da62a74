"""Mistakes of a user: each is one clear error that names the thing, its value and what is right."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import pytest

from mkref.engine import Engine
from mkref.engine.tokenizer import Tokenizer
from mkref.errors import (
    CheckpointError,
    ConfigError,
    MachineError,
    RequestError,
)
from mkref.machine import create
from mkref.machine.base import KernelMachine
from tests.conftest import have_gpu
from tests.engines import refused, save_tiny, tiny_engine, tiny_model, write_tokenizer


@pytest.fixture(name="folder", scope="module")
def folder_fixture(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A good checkpoint; tests that damage one copy it."""
    return save_tiny(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(name="engine", scope="module")
def engine_fixture(tmp_path_factory: pytest.TempPathFactory) -> Engine:
    """A good engine, with a tokenizer and a context of 256."""
    return tiny_engine(tokenizer=write_tokenizer(tmp_path_factory.mktemp("tokenizer")))


def load(folder: Path | str, machine: str = "interpreter", **settings: Any) -> Callable[[], Engine]:
    """A call that loads."""
    return lambda: Engine.load(folder, machine, **settings)


class TestModel:
    """What is loaded."""

    def test_unknown_name(self) -> None:
        """Neither a model that comes with mkref nor a folder."""
        refused(CheckpointError, load("nanoo"), "model: 'nanoo'", "neither a folder nor a model")

    def test_no_name(self) -> None:
        """An empty name is not the current folder."""
        refused(CheckpointError, load(""), "model: '' is neither a folder nor a model")

    def test_geometry_without_weights(self) -> None:
        """The large model is known by its geometry only; the error says what to give."""
        refused(
            CheckpointError,
            load("north-mini-code"),
            "'north-mini-code'",
            "give the folder with its checkpoint",
        )

    def test_missing_checkpoint(self, folder: Path, tmp_path: Path) -> None:
        """A folder with a config.json and no weights."""
        (tmp_path / "config.json").write_bytes((folder / "config.json").read_bytes())
        refused(CheckpointError, load(tmp_path), "model.safetensors", tmp_path)

    def test_empty_folder(self, tmp_path: Path) -> None:
        """A folder without a config.json."""
        refused(ConfigError, load(tmp_path), "cannot read", tmp_path / "config.json")

    @pytest.mark.parametrize("kept", [0, 7, 200, 20_000])
    def test_truncated_safetensors(self, folder: Path, tmp_path: Path, kept: int) -> None:
        """A download that stopped: in the first bytes, in the header, in the data."""
        for name in ("config.json", "model.safetensors"):
            data = (folder / name).read_bytes()
            (tmp_path / name).write_bytes(data if name == "config.json" else data[:kept])
        assert kept < len(data)
        refused(CheckpointError, load(tmp_path), "cannot read", tmp_path / "model.safetensors")

    def test_config_of_another_model(self, folder: Path, tmp_path: Path) -> None:
        """A Llama: the field that says so, its value, and what would be right."""
        llama = {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "hidden_size": 2048,
            "num_hidden_layers": 16,
            "num_attention_heads": 32,
            "rms_norm_eps": 1e-5,
        }
        (tmp_path / "config.json").write_text(json.dumps(llama))
        (tmp_path / "model.safetensors").write_bytes((folder / "model.safetensors").read_bytes())
        refused(ConfigError, load(tmp_path), "model_type", "llama", "cohere2_moe", tmp_path)

    def test_tokenizer_of_another_model(self, folder: Path, tmp_path: Path) -> None:
        """More ids than the model's vocabulary."""
        for file in folder.iterdir():
            (tmp_path / file.name).write_bytes(file.read_bytes())
        write_tokenizer(tmp_path, vocab_size=200)
        refused(RequestError, load(tmp_path), "tokenizer: 200 tokens", "vocab_size is 97")

    @pytest.mark.parametrize("value", [0, 1, 513, 2.5, "long"])
    def test_context(self, folder: Path, value: Any) -> None:
        """Longer than the model allows, or no length at all."""
        refused(
            RequestError,
            load(folder, max_context=value),
            f"max_context: {value!r}",
            "a whole number from 2 to 512 (max_position_embeddings)",
        )

    def test_pages(self, folder: Path) -> None:
        """Fewer pages than one sequence needs."""
        refused(
            RequestError, load(folder, kv_pages=3, max_context=256), "kv_pages: 3", "from 4 to 32"
        )

    def test_pages_of_more_rows(self, folder: Path) -> None:
        """The upper limit follows the rows."""
        refused(
            RequestError,
            load(folder, kv_pages=65, max_context=256, rows=16),
            "kv_pages: 65",
            "from 4 to 64 (one to 16 sequences of max_context)",
        )

    @pytest.mark.parametrize("value", [0, 7, 12, 64, 8.0, "8", None, True])
    def test_number_of_rows(self, folder: Path, value: Any) -> None:
        """Rows come in eights, up to 32."""
        refused(RequestError, load(folder, rows=value), f"rows: {value!r}", "one of (8, 16, 32)")

    @pytest.mark.parametrize("value", [0, -1, 1025, 1.5, True])
    def test_number_of_sms(self, folder: Path, value: Any) -> None:
        """No SM, half an SM, more than any plan has."""
        refused(RequestError, load(folder, n_sm=value), f"n_sm: {value!r}", "from 1 to 1024")

    def test_geometry_that_the_kernel_refuses(self) -> None:
        """A head size without a kernel is refused by name before anything is built."""
        from dataclasses import replace

        config, weights = tiny_model()
        refused(
            ConfigError,
            lambda: Engine.from_weights(replace(config, head_dim=48), weights, "interpreter"),
            "head_dim is 48",
            "32, 64 or 128",
        )


class TestMachine:
    """What it is to run on."""

    def test_unknown(self, folder: Path) -> None:
        """A name that is no machine: the error lists those that are."""
        refused(
            MachineError,
            load(folder, "tpu"),
            "machine: 'tpu' is unknown",
            "auto, cuda, host, interpreter, torch",
        )

    def test_no_gpu(self, folder: Path) -> None:
        """machine="cuda" without a GPU says what is missing and what to give instead."""
        if have_gpu():
            refused(MachineError, load(folder, "cuda", n_sm=1000), "n_sm: 1000 SMs", "this GPU has")
            return
        refused(MachineError, load(folder, "cuda"), "machine: 'cuda' cannot run here", "'auto'")

    def test_no_compiler(self, folder: Path) -> None:
        """machine="host" with an empty PATH; "auto" takes the interpreter then."""
        script = (
            "import sys; from mkref import Engine, MkrefError\n"
            "try: Engine.load(sys.argv[1], 'host')\n"
            "except MkrefError as e: print(type(e).__name__, e)\n"
            "from mkref.machine import resolve; print(resolve('auto'))"
        )
        environment = {**os.environ, "PATH": "", "CUDA_VISIBLE_DEVICES": ""}
        environment.pop("CXX", None)
        done = subprocess.run(
            [sys.executable, "-c", script, str(folder)],
            env=environment,
            capture_output=True,
            text=True,
            timeout=120,
        )
        assert (0, "") == (done.returncode, done.stderr)
        error, auto = done.stdout.splitlines()
        assert error.startswith("MachineError machine: 'host' cannot run here: no C++ compiler")
        assert "apt-get install g++" in error
        assert "interpreter" == auto

    def test_compiler_that_is_none(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """CXX names something that does not run."""
        monkeypatch.setenv("CXX", "no-such-compiler")
        refused(MachineError, load(folder, "host"), "CXX='no-such-compiler'", "unset it or fix it")

    def test_trace_without_stamps(self, folder: Path) -> None:
        """A machine that runs no tasks cannot stamp them."""
        refused(
            MachineError,
            load(folder, "torch", trace=True),
            "trace: machine 'torch'",
            "cuda, host, interpreter",
        )

    def test_torch_settings(self) -> None:
        """A device or type that torch does not have."""
        refused(MachineError, lambda: create("torch", device="cuda:99"), "device", "'cuda:99'")
        refused(MachineError, lambda: create("torch", device="abacus"), "device", "'abacus'")
        refused(MachineError, lambda: create("torch", dtype="int8"), "dtype: 'int8'", "float64")
        refused(MachineError, lambda: create("torch", numerics="x"), "numerics: 'x'", "contract")


class TestRequest:
    """What is asked."""

    @pytest.mark.parametrize("n", [256, 257, 1000])
    def test_prompt_longer_than_the_context(self, engine: Engine, n: int) -> None:
        """No room for an answer; nothing runs."""
        before = cast(KernelMachine, engine.machine).steps
        refused(
            RequestError,
            lambda: engine.generate([5] * n),
            f"prompt: {n} tokens",
            "the context is 256",
            "max_context",
        )
        assert before == cast(KernelMachine, engine.machine).steps

    @pytest.mark.parametrize("value", [0, -1, 2.0, None, "ten", 157])
    def test_max_tokens(self, engine: Engine, value: Any) -> None:
        """No token, no number, or more than the context has left."""
        refused(
            RequestError,
            lambda: engine.generate([5] * 100, max_tokens=value),
            f"max_tokens: {value!r}",
            "a whole number from 1 to 156 (a context of 256 less a prompt of 100)",
        )

    @pytest.mark.parametrize(
        "value", [float("nan"), float("inf"), -1, 1e-9, 1e9, "warm", None, [1.0], 10**50]
    )
    def test_temperature(self, engine: Engine, value: Any) -> None:
        """Not a number, negative, or outside of what float32 can divide by."""
        refused(
            RequestError,
            lambda: engine.generate([5], temperature=value),
            f"temperature: {value!r}",
            "must be 0 (greedy) or 0.001 to 1000",
        )

    @pytest.mark.parametrize("name", ["temperature", "seed", "max_tokens", "stop"])
    @pytest.mark.parametrize("digits", [400, 5000])
    def test_numbers_without_end(self, engine: Engine, name: str, digits: int) -> None:
        """Too large for a float, too long to be shown."""
        settings: dict[str, Any] = {name: 10**digits}
        refused(RequestError, lambda: engine.generate([5], **settings), f"{name}: ")

    @pytest.mark.parametrize("value", [-1, 2**64, 0.5, "x"])
    def test_seed(self, engine: Engine, value: Any) -> None:
        """Not 64 bits."""
        refused(
            RequestError,
            lambda: engine.generate([5], seed=value),
            f"seed: {value!r}",
            "from 0 to 18446744073709551615",
        )

    @pytest.mark.parametrize(
        ("prompt", "says"),
        [
            ([], "prompt: no tokens"),
            ([5, 97], "prompt[1]: 97; must be a whole number from 0 to 96 (vocabulary)"),
            ([5, -1], "prompt[1]: -1"),
            ([5, 1.5], "prompt[1]: 1.5"),
            ([5, None], "prompt[1]: None"),
            (["a"], "prompt[0]: 'a'"),
            (7, "prompt: 7; must be text or a sequence of token ids"),
            (b"text", "prompt: b'text'; must be text"),
            ("a\udc80", "prompt: character 1 is '\\udc80'"),
        ],
    )
    def test_prompt(self, engine: Engine, prompt: Any, says: str) -> None:
        """Nothing, no token of this model, no text."""
        refused(RequestError, lambda: engine.generate(prompt), says)

    def test_text_without_a_tokenizer(self, tmp_path: Path) -> None:
        """A model without tokenizer.json takes token ids."""
        folder = save_tiny(tmp_path, tokenizer=False)
        with Engine.load(folder, "interpreter") as engine:
            refused(
                RequestError,
                lambda: engine.generate("def f():"),
                "prompt: 'def f():' is text",
                "no tokenizer.json; give token ids",
            )
            refused(
                RequestError,
                lambda: engine.generate([1], stop="x"),
                "stop: 'x' is text",
                "give token ids",
            )

    def test_text_without_the_package(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """Where tokenizers is not installed, ids still work, and text says what to install."""
        monkeypatch.setitem(sys.modules, "tokenizers", None)
        monkeypatch.setattr("mkref.engine.load.find_spec", lambda name: None)
        refused(RequestError, lambda: Tokenizer(folder), "tokenizers is not installed", "pip")
        with Engine.load(folder, "interpreter") as engine:
            assert 3 == len(engine.generate([5], max_tokens=3, ignore_eos=True).token_ids)
            refused(
                RequestError,
                lambda: engine.generate("def f():"),
                "prompt: 'def f():' is text",
                "pip install tokenizers",
                "give token ids",
            )

    @pytest.mark.parametrize(
        ("stop", "says"),
        [("", "an empty string"), (97, "stop: 97"), (5.5, "stop: 5.5"), (["a", 1.5], "stop: 1.5")],
    )
    def test_stop(self, engine: Engine, stop: Any, says: str) -> None:
        """A stop that can never come, or always does."""
        refused(RequestError, lambda: engine.generate([5], stop=stop), says)

    def test_batches(self, engine: Engine) -> None:
        """No prompts, one text for a list of texts, settings that do not fit the prompts."""
        refused(
            RequestError, lambda: engine.generate_batch([]), "prompts: no prompts", "at least one"
        )
        refused(
            RequestError,
            lambda: engine.generate_batch([[1], [2]], seed=[1, 2, 3]),
            "seed: 3 values for 2 prompts",
        )
        refused(RequestError, lambda: engine.generate_batch([[1], []]), "prompt: no tokens")

    @pytest.mark.parametrize("prompts", ["abc", None, 5])
    def test_prompts_that_are_no_list(self, engine: Engine, prompts: Any) -> None:
        """One text, nothing, a number."""
        refused(
            RequestError,
            lambda: engine.generate_batch(prompts),
            f"prompts: {prompts!r}; must be a list",
        )

    def test_stream_complains_at_once(self, engine: Engine) -> None:
        """Before the first token is asked for."""
        refused(RequestError, lambda: engine.stream([]), "prompt: no tokens")
