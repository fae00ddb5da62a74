"""Several steps in a launch, and several rows of one sequence in a step: what single steps give."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from mkref.errors import HangError, MachineError
from mkref.machine import create
from mkref.machine.base import KernelMachine, Machine, StepInputs
from mkref.plan.build import PAGE, build_plan
from tests.draw_machines import MAX_CONTEXT, PAGES, POSITIONS, TOKENS, inputs, stop_ids, table
from tests.engines import tiny_model


def loaded(name: str, rows: int = 8, **options: Any) -> Machine:
    """The tiny model on a machine, on as many SMs as the machine likes."""
    config, weights = tiny_model()
    machine = create(name, **options)
    n = 12 * PAGES
    plan = build_plan(config, 2, full_pages=n, sliding_pages=n, rows=rows)
    machine.load(plan, weights, MAX_CONTEXT)
    return machine


def one_by_one(machine: Machine, n_steps: int) -> np.ndarray:
    """The same steps, each a launch of its own."""
    fed, done = np.asarray(TOKENS, np.int32), []
    for step in range(n_steps):
        fed = machine.step(inputs(fed.tolist(), [p + step for p in POSITIONS]))
        done.append(fed)
    return np.stack(done)


def test_a_compiler_that_fails_leaves_nothing_under_way(monkeypatch: pytest.MonkeyPatch) -> None:
    """The build for so many rows is made before the launch begins: one error, then as before."""
    machine = loaded("host")
    expected = loaded("host").step(inputs())

    def fails(*args: Any, **words: Any) -> None:
        raise MachineError("host: no room left for a library")

    with monkeypatch.context() as patched:
        patched.setattr("mkref.machine.host.build", fails)
        with pytest.raises(MachineError, match="no room left"):
            machine.step(inputs())
        assert isinstance(machine, KernelMachine)
        assert (machine.under_way, machine.unfinished) == (None, False)
        machine.close()
    again = loaded("host")
    assert expected.tolist() == again.step(inputs()).tolist()


@pytest.mark.parametrize("name", ["interpreter", "host", "torch"])
class TestLaunch:
    """What every machine does."""

    def test_equals_single_steps(self, name: str) -> None:
        """Tokens, the last logits and every key and value, across a page."""
        single, several = loaded(name), loaded(name)
        expected = one_by_one(single, 70)
        parts = [several.decode(inputs(), 30)]
        parts.append(several.decode(inputs(parts[0][-1].tolist(), [30] * 3), 1))
        parts.append(several.decode(inputs(parts[1][-1].tolist(), [31] * 3), 39))
        assert expected.tolist() == np.concatenate(parts).tolist()
        assert single.logits(3).tobytes() == several.logits(3).tobytes()
        if name != "torch":
            assert single.read("kv").tobytes() == several.read("kv").tobytes()
            assert single.read("counters").tobytes() == several.read("counters").tobytes()

    def test_tokens_come_step_by_step(self, name: str) -> None:
        """`on_tokens` hears of every step in order; what it gets is what `decode` returns."""
        machine = loaded(name)
        heard: list[tuple[int, list[int]]] = []

        def hear(step: int, tokens: np.ndarray) -> bool:
            heard.append((step, tokens.tolist()))
            return False

        done = machine.decode(inputs(), 9, on_tokens=hear)
        assert [*enumerate(done.tolist())] == heard
        assert (9, 3) == done.shape
        assert np.int32 == done.dtype

    def test_cancel(self, name: str) -> None:
        """The launch ends soon; its steps are right, and the next launch goes on from them."""
        machine = loaded(name)
        expected = one_by_one(loaded(name), 60).tolist()
        first = machine.decode(inputs(), 50, on_tokens=lambda step, _: step == 2).tolist()
        assert 3 <= len(first) < 50
        assert expected[: len(first)] == first
        rest = machine.decode(inputs(first[-1], [len(first)] * 3), 5).tolist()
        assert expected[len(first) : len(first) + 5] == rest

    def test_stop_ids(self, name: str) -> None:
        """The launch ends with the step that makes enough rows stop; ids of other rows do not."""
        machine = loaded(name)
        expected = one_by_one(machine, 20).tolist()

        def first(row: int, least: int) -> int:
            """The first step from `least` on whose token is new in the row."""
            column = [tokens[row] for tokens in expected]
            return next(i for i in range(least, 20) if column[i] not in column[:i])

        one, two = sorted((first(1, 3), first(2, 6)))
        rows = (1, 2) if one == first(1, 3) else (2, 1)
        ids = [-1, -1, -1]
        ids[rows[0]], ids[rows[1]] = expected[one][rows[0]], expected[two][rows[1]]

        def length(stops: list[int], stop_after: int) -> int:
            done = machine.decode(inputs(), 20, stop_ids=stop_ids(*stops), stop_after=stop_after)
            assert expected[: len(done)] == done.tolist()
            return len(done)

        assert one < two
        assert one + 1 == length(ids, 1)
        assert two + 1 == length(ids, 2)
        assert 20 == length(ids, 3)
        assert 20 == length(ids, 0)
        assert 20 == length([-1, -1, -1], 1)

    def test_tokens_of_one_sequence_side_by_side(self, name: str) -> None:
        """A prompt fed in blocks of rows, between neighbours: bit for bit what single rows give."""
        rng = np.random.default_rng(1)
        prompt = rng.integers(3, 97, 150).tolist()
        single, packed = loaded(name), loaded(name)
        expected = []
        for position, token in enumerate(prompt):
            single.step(inputs([token], [position], page_table=table(1)))
            expected.append(single.logits(1)[0].tobytes())
        fed, n_launches = 0, 0
        while fed < len(prompt):
            count = min(int(rng.integers(1, 7)), len(prompt) - fed)
            # A neighbour behind, and every other time one before: the block's place changes.
            rows = [0] * (n_launches % 2) + [1] * count + [2]
            at = rows.index(1)
            tokens, earlier = [9] * len(rows), [0] * len(rows)
            positions = [n_launches // 2, *[n_launches] * count, n_launches][-len(rows) :]
            tokens[at : at + count] = prompt[fed : fed + count]
            positions[at : at + count] = range(fed, fed + count)
            earlier[at : at + count] = range(count)
            packed.step(
                StepInputs(
                    np.asarray(tokens, np.int32),
                    np.asarray(positions, np.int32),
                    table(*rows),
                    earlier=np.asarray(earlier, np.int32),
                )
            )
            logits = packed.logits(len(rows))[at : at + count]
            assert np.isfinite(logits).all()
            assert expected[fed : fed + count] == [row.tobytes() for row in logits]
            fed, n_launches = fed + count, n_launches + 1

    def test_an_abandoned_launch_does_no_harm(self, name: str) -> None:
        """Nobody takes the tokens of a launch: the next one is as if it had never been."""
        machine = loaded(name)
        expected = one_by_one(loaded(name), 6).tolist()
        for taken in (0, 1, 3):
            launch = machine.start(inputs(), 40)
            assert expected[:taken] == [next(launch).tolist() for _ in range(taken)]
        assert expected == machine.decode(inputs(), 6).tolist()
        launch = machine.start(inputs(), 40)
        launch.close()
        assert [] == [*launch]
        machine.close()


@pytest.mark.parametrize("name", ["interpreter", "host"])
class TestKernelLaunch:
    """What has buffers that the host can look into."""

    def test_reading_ends_a_launch(self, name: str) -> None:
        """A buffer holds one step's values; the tokens of finished steps can still be taken."""
        machine = loaded(name)
        assert isinstance(machine, KernelMachine)
        expected = one_by_one(loaded(name), 40).tolist()
        launch = machine.start(inputs(), 40)
        first = next(launch).tolist()
        n_done = int(machine.read("progress")[0])
        assert expected[:n_done] == [first, *(tokens.tolist() for tokens in launch)]
        assert 1 <= n_done < 40
        assert n_done == machine.steps
        assert not machine.unfinished

    def test_interrupted_launch(self, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
        """Ctrl-C while the host waits: the kernel is ended, the next launch is right."""
        machine = loaded(name)
        assert isinstance(machine, KernelMachine)
        expected = one_by_one(loaded(name), 8).tolist()
        wait, calls = machine.wait, 0

        def interrupted(seen: int) -> bool:
            nonlocal calls
            calls += 1
            if calls == 3:
                raise KeyboardInterrupt
            return wait(seen)

        monkeypatch.setattr(machine, "wait", interrupted)
        with pytest.raises(KeyboardInterrupt):
            machine.decode(inputs(), 60)
        assert expected == machine.decode(inputs(), 8).tolist()

    def test_hang_after_good_steps(self, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
        """A launch that hangs is an error with a report; counters are put right afterwards."""
        machine = loaded(name)
        assert isinstance(machine, KernelMachine)
        expected = machine.decode(inputs(), 5).tolist()
        counters = machine.read("counters")
        machine.write("counters", counters - 1000 * (np.arange(len(counters))[:, None] == 3))
        monkeypatch.setattr(machine, "timeout_s", 0.5)
        with pytest.raises(HangError, match="waits for counter"):
            machine.decode(inputs(), 5)
        monkeypatch.undo()
        assert expected == machine.decode(inputs(), 5).tolist()

    def test_logits_that_are_not_finite(self, name: str) -> None:
        """NaN in a page that a row reads: an error that names the row, and no token of that step.

        What lies in pages behind a row's own keys is nobody's, NaN or not.
        """
        machine = loaded(name)
        good = machine.decode(inputs(), 8).tolist()
        machine.write("kv", np.full_like(machine.read("kv"), 0x7FC0))
        assert good == machine.decode(inputs(), 8).tolist()
        heard: list[np.ndarray] = []

        def hear(_: int, tokens: np.ndarray) -> bool:
            heard.append(tokens)
            return False

        astray = inputs(positions=(3, 0, 0), page_table=table(11, 1, 2))
        with pytest.raises(MachineError, match="row 0 is not finite"):
            machine.decode(astray, 8, on_tokens=hear)
        assert [] == heard
        assert good == machine.decode(inputs(), 8).tolist()

    @pytest.mark.parametrize("rows", [16, 32])
    def test_more_rows(self, name: str, rows: int) -> None:
        """Plans with more rows: rows far apart, and the same bits as with eight."""
        few, many = loaded(name), loaded(name, rows)
        tokens = few.decode(inputs(), 6)
        sequences = [3 + i % 9 for i in range(rows - 9)]
        prompt = [*range(3, 12)]
        given = StepInputs(
            np.asarray([5, *prompt[:8], *sequences[1:], 40], np.int32)[: rows - 1],
            np.asarray([0, *range(8), *[0] * rows], np.int32)[: rows - 1],
            np.concatenate([table(0), *[table(1)] * 8, *[table(2)] * (rows - 10)], axis=1),
            earlier=np.asarray([0, *range(8), *[0] * rows], np.int32)[: rows - 1],
        )
        first = many.step(given)
        assert tokens[0][0] == first[0]
        for position, token in enumerate(prompt[:8]):
            few.step(inputs([token], [position], page_table=table(1)))
            logits = many.logits(rows - 1)[1 + position]
            assert few.logits(1)[0].tobytes() == logits.tobytes()


@pytest.mark.parametrize("name", ["interpreter", "torch"])
class TestRefused:
    """Launches that cannot be."""

    def refuse(self, machine: Machine, text: str, given: StepInputs, *args: Any, **kw: Any) -> None:
        """One line, before anything runs."""
        with pytest.raises(MachineError, match=text):
            machine.start(given, *args, **kw)

    def test_steps(self, name: str) -> None:
        """None, too many, more than the context or the pages have."""
        machine = loaded(name)
        self.refuse(machine, "n_steps: 0 steps; a launch takes 1 to 256", inputs(), 0)
        self.refuse(machine, "n_steps: 257 steps", inputs(), 257)
        late = inputs([5], [250])
        self.refuse(machine, r"positions: row 0 has 250; must be in 0..249 for 7 steps", late, 7)
        assert (6, 1) == machine.decode(inputs([5], [0]), 6).shape
        short = inputs([5], [60], page_table=table(0)[:, :, :1])
        self.refuse(machine, "row 0 at position 60 and 5 steps needs 2 full pages", short, 5)
        machine.start(short, 4).close()

    def test_stops(self, name: str) -> None:
        """Another shape, more rows than there are."""
        machine = loaded(name)
        self.refuse(
            machine, r"stop_ids: shape \(2, 8\); must be \(3, 8\)", inputs(), 2,
            stop_ids=stop_ids(1, 2),
        )  # fmt: skip
        self.refuse(machine, r"stop_after: 4 rows; must be 0 .* to 3", inputs(), 2, stop_after=4)

    @pytest.mark.parametrize(
        ("earlier", "positions", "rows", "text"),
        [
            ([1, 0, 0], [1, 0, 0], [0, 1, 2], "earlier: row 0 has 1; must be 0$"),
            ([0, 2, 0], [0, 1, 0], [0, 0, 2], "earlier: row 1 has 2; must be 0 or 1"),
            ([0, 0, 2], [0, 1, 2], [0, 0, 0], "earlier: row 2 has 2; must be 0 or 1"),
            ([0, 1, 1], [0, 1, 2], [0, 0, 0], "earlier: row 2 has 1; must be 0 or 2"),
            ([0, -1, 0], [0, 1, 2], [0, 1, 2], "earlier: row 1 has -1"),
            ([0, 1, 0], [0, 2, 0], [0, 0, 2], "earlier: row 1 is at position 2; must be at 1"),
            ([0, 1, 0], [0, 1, 0], [0, 1, 2], "page_table: rows 0 and 1 have different pages"),
            ([0, 1], [0, 1, 0], [0, 0, 2], "earlier: 2 values for 3 tokens"),
        ],
    )
    def test_earlier(
        self, name: str, earlier: list[int], positions: list[int], rows: list[int], text: str
    ) -> None:
        """Rows that say they are of one sequence, and cannot be."""
        given = inputs(
            positions=positions, page_table=table(*rows), earlier=np.asarray(earlier, np.int32)
        )
        self.refuse(loaded(name), text, given)

    def test_earlier_in_several_steps(self, name: str) -> None:
        """After one step, rows of a sequence would overlap."""
        earlier = np.asarray([0, 1, 0], np.int32)
        given = inputs(positions=[0, 1, 0], page_table=table(0, 0, 2), earlier=earlier)
        self.refuse(
            loaded(name), "earlier: several rows of one sequence in a launch of 2", given, 2
        )


def test_pages_of_the_window_only() -> None:
    """A sliding layer needs the pages that the window reaches in the first step, and the last."""
    machine = loaded("interpreter")
    window = machine.plan.config.sliding_window
    assert 70 == window
    position = 2 * PAGE + window - 1  # the window begins with page 2
    pages = table(1)
    pages[1, 0, :2] = -1
    with pytest.raises(MachineError, match="needs 3 sliding pages"):
        machine.start(inputs([5], [position - 1], page_table=pages))
    kv = machine.read("kv")
    machine.write("kv", np.zeros_like(kv))
    assert (5, 1) == machine.decode(inputs([5], [position], page_table=pages), 5).shape


@pytest.mark.parametrize("name", ["interpreter", "host"])
def test_closed_machine_says_so(name: str) -> None:
    """A launch after `close` is a mistake that has a name."""
    machine = loaded(name)
    machine.close()
    with pytest.raises(MachineError, match=f"machine '{name}': it is closed; load the model again"):
        machine.decode(inputs(), 2)
