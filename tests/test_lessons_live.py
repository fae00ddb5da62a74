"""Lessons measure again where there is a GPU: what is shown, and what happens if it goes wrong.

The programs that measure are replaced by ones that write a record, fail, hang or write nonsense;
only the last test measures, in `make test-gpu`.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from mkref.cli.main import build_parser
from mkref.lessons import live, live_measure, live_run
from mkref.lessons.live_figure import Pair, pairs_figure
from mkref.lessons.recorded import bench_record, recorded_trace
from mkref.machine.gpu import find_gpus
from mkref.trace.summary import by_op
from tests.tree import ROOT, files

if TYPE_CHECKING:
    from mkref.widgets.figure import Figure

GPU = "NVIDIA RTX Test"
PROVENANCE = {"gpu": GPU, "date": "2026-12-24T00:00:00+00:00"}
LESSONS = ("02", "05", "06", "07", "08", "09", "10", "11", "14", "15")
PLENTY, LITTLE = 140_000_000_000, 24_000_000_000
CALLS: dict[str, Callable[[], Figure | None]] = {
    "ladder": live.rungs,
    "decode": live.batches,
    "draw": live.draws,
    "trace": lambda: live.tasks("ATTENTION", "MERGE"),
    "read": live.bandwidth,
}
HERE = {"ladder": "3.85 ms", "decode": "5555 tokens/s", "draw": "7.77 ms", "trace": "456 us a step"}
HERE["read"] = "1.50 TB/s"
"""A value that the records below have."""


def recorded(what: str) -> str:
    """A value that the records of the repository have."""
    decode = bench_record("h200/decode.json")
    if what == "ladder":
        ladder = bench_record("h200/ladder.json")["rows"]
        found = next(row for row in ladder if row["rung"] == "f" and row["batch"] == 1)
        return f"{found['ms_per_step']:.2f} ms"
    if what == "decode":
        found = next(row for row in decode["rows"] if row["batch"] == 1)
        return f"{found['tokens_per_s']:.0f} tokens/s"
    if what == "draw":
        return "1.77 ms"
    if what == "read":
        return f"{decode['provenance']['measured_bytes_per_s'] / 1e12:.2f} TB/s"
    trace = recorded_trace("trace_north_h200.json.gz")
    work = next(one.work_ns for one in by_op(trace) if one.op == "ATTENTION")
    return f"{work / 1e3 / trace.n_sm:.0f} us a step"


def rows(what: str) -> list[dict[str, Any]]:
    """A record of a GPU that there is not."""
    if what == "ladder":
        copied = [dict(row) for row in bench_record("h200/ladder.json")["rows"]]
        for row in copied:
            row["ms_per_step"] = 3.85 if row["rung"] == "f" else 1.7 * row["ms_per_step"]
        return [row for row in copied if row["batch"] == 1]
    if what == "decode":
        one = {"kind": "even", "plan_rows": 8}
        return [{**one, "batch": n, "tokens_per_s": 5555.0 * n} for n in (1, 2, 4, 8)]
    if what == "draw":
        ways = ("kernel", "sampler", "sampler, top_p 0.95")
        return [{"name": way, "ms_per_step": 7.77} for way in ways]
    if what == "read":
        return [{"measured_bytes_per_s": 1.5e12, "datasheet_bytes_per_s": 1.6e12}]
    ops = ("EMBED", "ATTENTION", "MERGE", "HEAD")
    return [{"span_us": 1000.0, "ops": {op: {"work_us": 456.0, "wait_us": 0.0} for op in ops}}]


class Programs:
    """What stands for the programs that measure."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.calls = folder, 0
        self.text = ""

    def command(self, what: str, geometry: str) -> list[str]:
        """A process that runs `text`, or copies the record of `what`."""
        self.calls += 1
        record = {"provenance": PROVENANCE, "rows": self.rows(what)}
        source = self.folder / f"{what}.json"
        source.write_text(json.dumps(record))
        copy = f"import shutil, sys; shutil.copy({str(source)!r}, sys.argv[-1])"
        return [sys.executable, "-c", self.text or copy]

    def rows(self, what: str) -> list[dict[str, Any]]:
        """The rows of a record; tests replace it."""
        return rows(what)


@pytest.fixture
def programs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Programs:
    """A GPU with plenty of memory, nothing measured yet."""
    made = Programs(tmp_path)
    monkeypatch.delenv(live.SWITCH, raising=False)
    monkeypatch.setattr(live, "usable_gpu", lambda: True)
    monkeypatch.setattr(live, "free_bytes", lambda: PLENTY)
    monkeypatch.setattr(live_measure, "command_of", made.command)
    monkeypatch.setattr(live_measure, "_made", {})
    return made


def refusal(capsys: pytest.CaptureFixture[str], call: Callable[[], Figure | None]) -> str:
    """The reason in the one line that stands for a figure."""
    assert call() is None
    out = capsys.readouterr().out
    found = re.fullmatch(r"Not measured here: (.*)\. The recorded numbers above stand\.\n", out)
    assert found is not None, out
    return found[1]


every = pytest.mark.parametrize("what", CALLS)


@every
def test_without_a_gpu_one_sentence(
    what: str, programs: Programs, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    """The same for all, and nothing is run; the switch does as if there were none."""
    monkeypatch.setenv(live.SWITCH, "off")
    assert CALLS[what]() is None
    monkeypatch.delenv(live.SWITCH)
    monkeypatch.setattr(live, "usable_gpu", lambda: False)
    assert CALLS[what]() is None
    sentence = "No GPU to measure on here: the recorded numbers above stand.\n"
    assert 2 * sentence == capsys.readouterr().out
    assert 0 == programs.calls


@every
def test_both_values_with_their_labels(what: str, programs: Programs) -> None:
    """In the picture, in its text and in the table; measured once in a session."""
    figure = CALLS[what]()
    assert figure is not None
    for text in (figure.svg, figure.summary, figure.table.text()):
        assert HERE[what] in text
        assert recorded(what) in text
        assert "[measured, H200 record, 2026-11-30]" in text
        assert f"[measured here, {GPU}]" in text
    CALLS[what]()
    assert 1 == programs.calls


@pytest.mark.parametrize(
    ("free", "geometry"),
    [(0, "nano"), (79_999_999_999, "nano"), (80_000_000_000, "north"), (PLENTY, "north")],
)
def test_geometry_by_free_memory(free: int, geometry: str) -> None:
    """Only the small model needs a word about it."""
    chosen, note = live_measure.geometry_for(free)
    assert geometry == chosen
    assert (geometry == "nano") == ("ratios can be compared, times cannot" in note)


@pytest.mark.parametrize("what", [what for what in CALLS if what != "read"])
def test_the_small_model_is_compared_by_ratios(
    what: str, programs: Programs, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No time or speed in the picture; the text says why, and the table has all."""
    monkeypatch.setattr(live, "free_bytes", lambda: LITTLE)
    figure = CALLS[what]()
    assert figure is not None
    body = figure.svg.partition("</title>")[2]
    assert not re.search(r"\d (ms|us a step|tokens/s)<", body)
    assert re.search(r"\d% of (h|1 row|kernel|the step)<", body)
    assert "the small model nano was measured" in figure.summary
    assert "80 GB of free memory and 24 are there" in figure.summary
    assert HERE[what] in figure.table.text()


def test_ratios_are_right() -> None:
    """Each to the base of its own side."""
    pair, base = Pair("x", 6.0, 50.0), Pair("y", 4.0, 100.0)
    figure = pairs_figure([pair], head="time", unit="ms", labels=("A", "B"), base=base)
    assert ("x", "6.00 ms", "50.0 ms", "150.0% of y", "50.0% of y") == figure.table.rows[0]


def test_rungs_are_those_asked_for(programs: Programs) -> None:
    """The best grouping of the record, or every one with one block per SM."""

    def names(figure: Figure | None) -> list[str]:
        assert figure is not None
        return [row[0] for row in figure.table.rows]

    assert ["d  one launch, grid barriers", "e  counters"] == names(live.rungs("de"))
    assert list("abcdefgh") == [name[0] for name in names(live.rungs())]
    every_c = names(live.rungs("c", every=True))
    assert 3 == len(every_c)
    assert not any("2 per SM" in name for name in every_c)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (
            "import sys; sys.exit('one line\\nmemory: the weights take 61 GB')",
            "memory: the weights",
        ),
        ("raise RuntimeError('no NVRTC')", "RuntimeError: no NVRTC"),
        ("raise SystemExit(3)", "exit status 3, and no word"),
        ("import os; os.abort()", "exit status -6, and no word"),
        ("import time; time.sleep(60)", "no result after 1 seconds"),
        ("import sys; open(sys.argv[-1], 'w').write('{')", "a record that cannot be read"),
        ("import sys; open(sys.argv[-1], 'w').write('[]')", "a record without rows"),
        ("import sys; open(sys.argv[-1], 'w').write('{\"rows\": []}')", "a record without rows"),
        (
            "import sys; open(sys.argv[-1], 'w').write('{\"rows\": [{}]}')",
            "the record has not the form",
        ),
    ],
)
def test_a_program_that_fails_is_one_line(
    text: str, reason: str, programs: Programs, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    """And the next try runs it again."""
    if "sleep" in text:
        monkeypatch.setattr(live_measure, "LIMIT_S", 1.0)
    programs.text = text
    assert reason in refusal(capsys, live.rungs)
    programs.text = ""
    assert live.rungs() is not None


def test_a_gpu_that_does_not_answer(
    programs: Programs, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    """As CuPy says it, in the same line."""

    class Silent:
        @property
        def cuda(self) -> Any:
            raise RuntimeError("all CUDA-capable devices are busy")

    monkeypatch.setattr("mkref.machine.cuda.import_cupy", Silent)
    monkeypatch.setattr(live, "free_bytes", live_measure.free_bytes)
    assert "does not answer (all CUDA-capable devices are busy)" in refusal(capsys, live.rungs)


@every
@pytest.mark.parametrize("value", [float("nan"), float("inf"), -1.0, None])
def test_what_is_no_number_is_refused(
    what: str, value: float | None, programs: Programs, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    """Whichever value it is in: one line that names it."""

    def damaged(_: str) -> list[dict[str, Any]]:
        made = rows(what)
        if what == "trace":
            made[0]["ops"]["MERGE"]["wait_us"] = value
        else:
            key = {"decode": "tokens_per_s", "read": "measured_bytes_per_s"}.get(
                what, "ms_per_step"
            )
            for row in made:  # of the ladder one rung may be missing, but not all
                row[key] = value
        return made

    monkeypatch.setattr(programs, "rows", damaged)
    said = refusal(capsys, CALLS[what])
    assert "no measurement" in said
    assert re.search(r"MERGE waits|1 row|kernel|plain read|launch per operation", said)


def test_a_missing_rung_is_named(
    programs: Programs, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    """One that failed, was left out or computed something else; without its base, no ratios."""

    def damaged(what: str) -> list[dict[str, Any]]:
        made = [row for row in rows(what) if row["rung"] not in "eh"]
        for row in made:
            if row["rung"] == "c":
                del row["ms_per_step"]
                row["error"] = "MachineError: no dependent launches\nhere"
            if row["rung"] == "d":
                row["same_tokens"] = False
        return made

    monkeypatch.setattr(programs, "rows", damaged)
    figure = live.rungs("bcdef")
    assert figure is not None
    assert ["b", "f"] == [row[0][0] for row in figure.table.rows]
    for said in (
        "no dependent launches here)",
        "it computed other tokens)",
        "counters (no number)",
    ):
        assert said in figure.summary
    assert "no measurement of e counters" in refusal(capsys, lambda: live.rungs("e"))
    monkeypatch.setattr(live, "free_bytes", lambda: LITTLE)
    assert "no measurement of h next token" in refusal(capsys, lambda: live.rungs("bf"))


def test_a_base_of_zero_is_refused(
    programs: Programs, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    """Instead of a division by it."""
    monkeypatch.setattr(live, "free_bytes", lambda: LITTLE)
    monkeypatch.setattr(programs, "rows", lambda what: [{**rows(what)[0], "span_us": 0.0}])
    assert "0 came out for the step" in refusal(capsys, CALLS["trace"])


@every
@pytest.mark.parametrize("geometry", ["north", "nano"])
def test_commands_are_understood(what: str, geometry: str) -> None:
    """By the programs as they are now; the contexts fit the models."""
    head, module, *rest = live_measure.command_of(what, geometry)[1:]
    assert "-m" == head
    if module == "mkref":
        given = build_parser().parse_args([*rest, "--json", "x.json"])
        assert geometry == given.geometry
        assert (8192 if geometry == "north" else 2048,) == tuple(given.context)
    else:
        assert live_run.__name__ == module
        assert rest[0] in live_run.MEASUREMENTS


def test_imports_without_jupyter_and_without_cupy() -> None:
    """A GPU machine need not have widgets; one without a GPU need not have CuPy."""
    script = """
import sys
class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in BANNED:
            raise ImportError(f"{name} was asked for")
sys.meta_path.insert(0, Refuse())
from mkref.lessons import live
from mkref.lessons.live_figure import Pair, pairs_figure
live.usable_gpu = lambda: False
live.rungs()
print(pairs_figure([Pair("x", 1, 2)], head="h", unit="s", labels=("a", "b")).summary)
"""
    banned = {"cupy", "ipywidgets", "anywidget", "IPython", "matplotlib", "nbformat", "torch"}
    done = subprocess.run(
        [sys.executable, "-c", f"BANNED = {banned!r}\n{script}"],
        capture_output=True, text=True, cwd=ROOT, timeout=60,
    )  # fmt: skip
    assert "" == done.stderr
    assert [live.NO_GPU, "H, a and b. x: 1.00 s recorded, 2.00 s here."] == done.stdout.splitlines()


def cells() -> list[tuple[str, str, dict[str, Any]]]:
    """Lesson, call and cell of every cell that measures."""
    found = []
    for path in files("notebooks", suffixes={".ipynb"}):
        for cell in json.loads(path.read_text(encoding="utf-8"))["cells"]:
            source = "".join(cell["source"])
            for call in re.findall(r"^live\.\w+\(.*\)$", source, re.M):
                if cell["cell_type"] == "code":
                    found.append((path.stem[:2], call, cell))
    return found


def test_lessons_with_recorded_times_measure() -> None:
    """The stored output is the sentence, and it is compared."""
    found = cells()
    assert set(LESSONS) <= {lesson for lesson, _, _ in found}
    for lesson, call, cell in found:
        text = "".join("".join(output.get("text", "")) for output in cell["outputs"])
        assert f"{live.NO_GPU}\n" == text, (lesson, call)
        assert "nbval-ignore-output" not in cell["metadata"].get("tags", [])


@pytest.mark.gpu
def test_every_lesson_draws_what_it_measures(monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    """On this GPU, with the small model, as if it had little memory; then a plain read."""
    monkeypatch.delenv(live.SWITCH, raising=False)
    monkeypatch.setattr(live, "free_bytes", lambda: LITTLE)
    name = find_gpus()[0].name
    calls = [(lesson, call) for lesson, call, _ in cells()]
    for lesson, call in (*calls, ("", "live.bandwidth()")):
        figure = eval(call, {"live": live})
        assert figure is not None, (lesson, call, capsys.readouterr().out)
        assert f"[measured here, {name}]" in figure.svg
        assert len(figure.table.rows) >= 2
        with capsys.disabled():
            print(f"\n{lesson} {call}\n{figure.text()}")
