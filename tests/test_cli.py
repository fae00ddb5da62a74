"""The command `mkref`: output for people and programs, exit statuses, one line per mistake."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import mkref
from mkref.cli import main
from mkref.cli.doctor import _short
from mkref.engine import Engine
from tests.engines import save_tiny

Run = Callable[..., tuple[int, str, str]]


@pytest.fixture(name="folder", scope="module")
def folder_fixture(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny model with a tokenizer."""
    return save_tiny(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(name="run")
def run_fixture(capsys: pytest.CaptureFixture[str]) -> Run:
    """Run a command in this process: status, standard output, standard error."""

    def run(*arguments: object) -> tuple[int, str, str]:
        status = main([str(argument) for argument in arguments])
        captured = capsys.readouterr()
        return status, captured.out, captured.err

    return run


def spawn(*arguments: object, **settings: Any) -> subprocess.Popen[str]:
    """`python -m mkref` as a process of its own."""
    command = [sys.executable, "-m", "mkref", *map(str, arguments)]
    return subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, **settings
    )


GENERATE = ("--machine", "interpreter", "--max-tokens", 6, "--ignore-eos")


def test_generate_streams_text(run: Run, folder: Path) -> None:
    """Text and nothing else on standard output; the speed on standard error."""
    status, out, err = run("generate", "--model", folder, "--prompt", "def f", *GENERATE)
    with Engine.load(folder, "interpreter") as engine:
        done = engine.generate("def f", max_tokens=6, ignore_eos=True)
    assert (0, f"{done.text}\n") == (status, out)
    assert 1 == err.count("\n")
    assert err.startswith("6 tokens, ")
    assert "ms/token" in err
    assert "on interpreter (n_sm = 1)" in err


def test_generate_json(run: Run, folder: Path) -> None:
    """One object with everything that a program needs, the same tokens as the text."""
    arguments = ("--model", folder, "--prompt-ids", "5,6,7", *GENERATE, "--temperature", "0.9")
    status, out, err = run("generate", *arguments, "--seed", 2**63, "--json")
    report = json.loads(out)
    assert (0, "") == (status, err)
    assert 1 == out.count("\n")
    assert [5, 6, 7] == report["prompt_token_ids"]
    assert 6 == len(report["token_ids"])
    assert ("length", "interpreter", 1) == (
        report["finish_reason"], report["machine"], report["n_sm"],
    )  # fmt: skip
    assert report["ms_per_token"] > 0
    _, text, _ = run("generate", *arguments, "--seed", 2**63)
    assert f"{report['text']}\n" == text


def test_generate_without_a_tokenizer(run: Run, tmp_path: Path) -> None:
    """Token ids in, token ids out."""
    folder = save_tiny(tmp_path, tokenizer=False)
    status, out, _ = run("generate", "--model", folder, "--prompt-ids", "5", *GENERATE)
    assert 0 == status
    assert 6 == len([int(word) for word in out.split()])


def test_generate_stops(run: Run, folder: Path) -> None:
    """--stop may be given several times."""
    arguments = ("generate", "--model", folder, "--prompt", "a", *GENERATE)
    _, whole, _ = run(*arguments, "--temperature", 1)
    letter = whole[2]
    status, out, _ = run(*arguments, "--temperature", 1, "--stop", "~~~", "--stop", letter)
    assert (0, whole[: whole.index(letter)] + "\n") == (status, out)


def test_default_length_fits_a_small_context(run: Run, folder: Path, tmp_path: Path) -> None:
    """Who gave no --max-tokens hears nothing of it: the answer is as long as there is room."""
    arguments = ("--model", folder, "--machine", "interpreter", "--context")
    settings = ("--prompt-ids", "5,6,7", "--ignore-eos", "--json")
    status, out, err = run("generate", *arguments, 10, *settings)
    assert (0, "", 7) == (status, err, len(json.loads(out)["token_ids"]))
    status, out, err = run("generate", *arguments, 10, "--prompt", "def f", "--ignore-eos")
    assert 0 == status
    status, _, err = run(
        "trace", *arguments, 5, "--prompt-ids", "5,6,7", "--out", tmp_path / "trace.json"
    )
    assert (0, "") == (status, err)


@pytest.mark.parametrize("command", ["plan", "verify"])
def test_machine_without_a_plan(run: Run, folder: Path, command: str) -> None:
    """`torch` runs no plan, so there is none to show."""
    status, out, err = run(command, "--model", folder, "--machine", "torch")
    assert (2, "") == (status, out)
    assert "mkref: plan: machine 'torch' runs no plan; give cuda, host or interpreter\n" == err


@pytest.mark.parametrize("command", ["plan", "verify"])
def test_numbers_are_written_alike(run: Run, folder: Path, command: str) -> None:
    """One SM is no plural, and thousands have their comma in every command."""
    _, out, _ = run(command, "--model", folder, "--sms", 1)
    assert " tasks on 1 SM, " in out
    _, out, _ = run(command, "--model", "north-mini-code", "--sms", 132)
    assert re.match(r"\d\d,\d{3} tasks on 132 SMs, [\d,]+ counters", out)
    assert not re.search(r"(?<![\d.,])\d{4,}(?![\d.,])", "\n".join(out.splitlines()[:2]))


def test_doctor_lines_are_short() -> None:
    """The driver's own words are cut off a machine's reason."""
    reason = (
        "no usable NVIDIA driver on this machine (cudaErrorInsufficientDriver: CUDA driver ...)"
    )
    assert "no usable NVIDIA driver on this machine" == _short(reason)
    assert "g++ (Debian 12.2) 12.2.0" == _short("g++ (Debian 12.2) 12.2.0")


def test_doctor(run: Run) -> None:
    """A line for everything that matters, and always status 0."""
    status, out, err = run("doctor")
    assert (0, "") == (status, err)
    for name in (
        "python", "numpy", "torch", "safetensors", "tokenizers", "jupyterlab", "C++ compiler",
        "CuPy", "NVIDIA driver", "GPU", "machine cuda", "machine host", "machine interpreter",
        "machine torch", "machine auto",
    ):  # fmt: skip
        assert 1 <= sum(line[4:].startswith(f"{name} ") for line in out.splitlines()), name
    assert {"ok", "--"} >= {line[:2] for line in out.splitlines()}


def test_doctor_json(run: Run) -> None:
    """The same for programs."""
    status, out, _ = run("doctor", "--json")
    report = json.loads(out)
    assert 0 == status
    assert ["cuda", "host", "interpreter", "torch"] == list(report["machines"])
    assert report["machines"]["interpreter"]["ok"] is True
    assert report["machines"][report["auto"]]["ok"] is True
    assert {"name", "ok", "detail"} == report["checks"][0].keys()


def test_doctor_on_a_bare_machine(tmp_path: Path) -> None:
    """Without compiler, GPU and extras it still explains, with status 0 and no traceback."""
    (tmp_path / "tokenizers.py").write_text("raise ImportError('blocked')\n")
    (tmp_path / "cupy.py").write_text("raise ImportError('blocked')\n")
    environment = {**os.environ, "PATH": "", "PYTHONPATH": f"{tmp_path}{os.pathsep}{os.getcwd()}"}
    environment.pop("CXX", None)
    process = spawn("doctor", env=environment)
    out, err = process.communicate(timeout=120)
    assert (0, "") == (process.returncode, err)
    lines = {line[4:].split("  ")[0].strip(): line for line in out.splitlines()}
    assert lines["tokenizers"].startswith("--")
    assert "pip install tokenizers" in lines["tokenizers"]
    assert "no C++ compiler found" in lines["C++ compiler"]
    assert lines["machine cuda"].startswith("--")
    assert lines["machine host"].startswith("--")
    assert lines["machine auto"].endswith("means interpreter")


def test_plan_table(run: Run, folder: Path, tmp_path: Path) -> None:
    """A row per operation; bytes add up to what the config says; the file is the plan."""
    file = tmp_path / "plan.json"
    arguments = ("plan", "--model", folder, "--sms", 3, "--tokens", 100)
    status, out, err = run(*arguments, "--out", file)
    assert (0, f"written to {file}\n") == (status, err)
    names = [line.split()[0] for line in out.splitlines()[2:]]
    assert [
        "EMBED", "ROUTER", "QKV", "ATTENTION", "MERGE", "GATE_UP", "O_PROJ", "DOWN", "HEAD",
        "SAMPLE", "all",
    ] == names  # fmt: skip
    status, out, _ = run(*arguments, "--json")
    report = json.loads(out)
    assert (3, 100) == (report["n_sm"], report["context"])
    assert report["tasks"] == sum(op["tasks"] for op in report["ops"])
    assert names[:-1] == [op["op"] for op in report["ops"]]
    assert all(op["min_bytes"] <= op["max_bytes"] <= op["total_bytes"] for op in report["ops"])

    status, out, err = run("verify", file, "--json")
    checked = json.loads(out)
    assert (0, "", True, 3) == (status, err, checked["ok"], checked["n_sm"])
    assert report["tasks"] == checked["tasks"]
    assert "order" in checked["checked"]


def test_plan_of_the_large_model_streams_its_bytes(run: Run) -> None:
    """The known geometry needs no weights; its bytes are those of the config, give or take pads."""
    status, out, _ = run(
        "plan", "--model", "north-mini-code", "--sms", 16, "--tokens", 4096, "--json"
    )
    report = json.loads(out)
    config = mkref.NORTH_MINI_CODE
    expected = config.weight_bytes_per_token() + config.kv_bytes(4096)
    assert 0 == status
    assert abs(sum(op["total_bytes"] for op in report["ops"]) / expected - 1) < 0.01


def test_verify_prints_what_it_checked(run: Run, folder: Path) -> None:
    """Every check by name, with a sentence."""
    status, out, err = run("verify", "--model", folder, "--sms", 2, "--context", 200)
    assert (0, "") == (status, err)
    assert "no violation" in out
    for name in ("words", "counters", "coverage", "release", "progress", "order", "buffers"):
        assert f"\n  {name} " in out


def test_verify_refuses_a_plan_that_races(run: Run, folder: Path, tmp_path: Path) -> None:
    """A wait that was taken out of a plan file is found, in one line, with status 2."""
    file = tmp_path / "plan.json"
    run("plan", "--model", folder, "--sms", 2, "--out", file)
    plan = json.loads(file.read_text())
    wait = plan["fields"].index("wait")
    victim = next(task for task in plan["tasks"][1] if task[wait] >= 0)
    victim[wait] = -1
    victim[plan["fields"].index("wait_count")] = 0
    file.write_text(json.dumps(plan))
    status, out, err = run("verify", file)
    assert (2, "") == (status, out)
    assert err.startswith("mkref: plan: ")
    assert 1 == err.count("\n")


@pytest.mark.parametrize("machine", ["interpreter", "host"])
def test_trace_writes_perfetto(run: Run, folder: Path, tmp_path: Path, machine: str) -> None:
    """Every task of the step is in the file, with a duration."""
    file = tmp_path / "trace.json"
    arguments = ("--model", folder, "--machine", machine, "--sms", 2, "--max-tokens", 2)
    status, out, err = run("trace", *arguments, "--out", file)
    assert (0, "") == (status, err)
    assert str(file) in out
    assert re.search(r"^Critical path: .* work, \d+% hand-overs\.$", out, re.M)
    events = json.loads(file.read_text())["traceEvents"]
    tasks = [event for event in events if event.get("cat") == "task"]
    assert all(event["dur"] >= 0 for event in tasks)
    status, out, _ = run("trace", *arguments, "--out", file, "--json")
    report = json.loads(out)
    assert (0, machine, 2) == (status, report["machine"], report["n_sm"])
    assert len(tasks) == report["tasks"]
    assert report["span_ns"] > 0
    assert report["span_ns"] == sum(report["critical_path"][k] for k in ("work_ns", "wait_ns"))


MISTAKES = {
    "no command": ((), "COMMAND"),
    "unknown command": (("fly",), "'fly'"),
    "unknown option": (("doctor", "--fast"), "--fast"),
    "no prompt": (("generate",), "--prompt --prompt-ids"),
    "two prompts": (("generate", "--prompt", "a", "--prompt-ids", "1"), "--prompt"),
    "no tokens": (("generate", "--prompt", "a", "--max-tokens", "0"), "--max-tokens: '0'"),
    "half a token": (("generate", "--prompt", "a", "--max-tokens", "1.5"), "--max-tokens: '1.5'"),
    "temperature nan": (("generate", "--prompt", "a", "--temperature", "nan"), "'nan'"),
    "temperature inf": (("generate", "--prompt", "a", "--temperature", "inf"), "'inf'"),
    "temperature -1": (("generate", "--prompt", "a", "--temperature=-1"), "'-1'"),
    "ids are words": (("generate", "--prompt-ids", "a,b"), "--prompt-ids: 'a,b'"),
    "ids are empty": (("generate", "--prompt-ids", ""), "such as 1,2,3"),
    "seed -1": (("generate", "--prompt", "a", "--seed=-1"), "--seed: '-1'"),
    "no SM": (("generate", "--prompt", "a", "--sms", "0"), "--sms: '0'"),
    "unknown model": (("generate", "--model", "nanoo", "--prompt", "a"), "'nanoo'"),
    "missing folder": (("generate", "--model", "/no/such", "--prompt", "a"), "'/no/such'"),
    "geometry only": (("generate", "--model", "north-mini-code", "--prompt", "a"), "checkpoint"),
    "plan of no model": (("plan", "--model", "nanoo"), "'nanoo'"),
    "missing plan": (("verify", "no-such-plan.json"), "no-such-plan.json"),
    "plan without a name": (("verify", ""), "cannot read ''"),
    "model without a name": (("plan", "--model", ""), "model: ''"),
    "no rows": (("plan", "--model", "north-mini-code", "--rows", "33"), "--rows: '33'"),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_mistake_is_one_line_and_status_2(run: Run, name: str) -> None:
    """Whatever is wrong with the arguments."""
    arguments, names = MISTAKES[name]
    status, out, err = run(*arguments)
    assert (2, "") == (status, out)
    assert err.startswith("mkref")
    assert 1 == err.count("\n")
    assert names in err


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("--context", "10", "--max-tokens", "64"), "max_tokens: 64"),
        (("--machine", "tpu"), "machine: 'tpu' is unknown"),
        (("--prompt-ids", "5,97"), "prompt[1]: 97"),
        (("--max-tokens", "600"), "max_tokens: 600"),
        (("--context", "2"), "prompt: 3 tokens; the context is 2"),
        (("--context", "99999"), "max_context: 99999"),
        (("--temperature", "1e-9"), "temperature: 1e-09"),
        (("--stop", ""), "stop: an empty string"),
    ],
)
def test_mistake_that_the_engine_finds(
    run: Run, folder: Path, arguments: tuple[str, ...], says: str
) -> None:
    """Values that only the model can judge."""
    base = ["generate", "--model", folder, "--machine", "interpreter"]
    prompt = [] if "--prompt-ids" in arguments else ["--prompt-ids", "5,6,7"]
    status, out, err = run(*base, *prompt, *arguments)
    assert (2, "", 1) == (status, out.strip(), err.count("\n"))
    assert f"mkref: {says}" in err


def test_files_that_cannot_be_written(run: Run, folder: Path, tmp_path: Path) -> None:
    """--out into a folder that is not there, or onto a folder."""
    for command in ("plan", "trace"):
        for place in (tmp_path / "no" / "file.json", tmp_path):
            status, out, err = run(command, "--model", folder, "--out", place)
            assert (2, "", 1) == (status, out, err.count("\n"))
            assert str(place) in err


@pytest.mark.parametrize(
    "content", ["", "[1]", "{}", '{"format": "mkref-plan-1"}', "\x00\xff", "[" * 200_000], ids=len
)
def test_plan_file_that_is_none(run: Run, tmp_path: Path, content: str) -> None:
    """Files that hold no plan, and a plan that lost its parts."""
    file = tmp_path / "plan.json"
    file.write_text(content, encoding="latin-1")
    status, out, err = run("verify", file)
    assert (2, "", 1) == (status, out, err.count("\n"))
    assert err.startswith("mkref: plan: ")


@pytest.mark.parametrize(("closed", "other"), [(1, 2), (2, 1)])
def test_closed_stream(folder: Path, closed: int, other: int) -> None:
    """Nothing that belongs there comes out of the other one."""
    command = [sys.executable, "-m", "mkref", "generate", "--model", str(folder), "--prompt", "a"]
    shell = ["sh", "-c", f'exec "$@" {closed}>&-', "sh", *command, *map(str, GENERATE)]
    done = subprocess.run(shell, capture_output=True, text=True, timeout=60)
    text, speed = done.stdout, done.stderr
    assert 0 == done.returncode
    assert "" == (text, speed)[closed - 1]
    assert ("ms/token" in (text, speed)[other - 1]) == (other == 2)


def test_help_and_version(run: Run) -> None:
    """Every command explains itself; the version is the package's."""
    assert (0, f"mkref {mkref.__version__}\n", "") == run("--version")
    for command in ((), ("doctor",), ("generate",), ("plan",), ("verify",), ("trace",)):
        status, out, err = run(*command, "--help")
        assert (0, "") == (status, err)
        assert out.startswith("usage: mkref")


def test_module_is_the_command() -> None:
    """`python -m mkref` does what `mkref` does."""
    process = spawn("--version")
    assert (f"mkref {mkref.__version__}\n", "") == process.communicate(timeout=60)
    assert 0 == process.returncode


def test_interrupt_is_130(folder: Path) -> None:
    """Ctrl-C while text comes: no traceback."""
    arguments = ("--model", folder, "--machine", "interpreter", "--prompt", "a", "--ignore-eos")
    for _ in range(4):  # on a busy computer the text may be over before the signal comes
        process = spawn("generate", *arguments, "--max-tokens", 500)
        assert process.stdout is not None and process.stdout.read(1)  # noqa: PT018
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=60)
        if process.returncode:
            break
    assert (130, "") == (process.returncode, err)


def test_reader_that_leaves(folder: Path) -> None:
    """`mkref generate | head -c 1`: quiet, and over at once."""
    arguments = ("--model", folder, "--machine", "interpreter", "--prompt", "a", "--ignore-eos")
    process = spawn("generate", *arguments, "--max-tokens", 500)
    assert process.stdout is not None
    assert process.stderr is not None
    process.stdout.read(1)
    process.stdout.close()
    assert "" == process.stderr.read()
    process.stderr.close()
    assert 141 == process.wait(timeout=60)
