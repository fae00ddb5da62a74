"""Launches that draw, on every machine: what single steps give, and what NumPy gives."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from mkref.errors import HangError, MachineError
from mkref.machine.base import KernelMachine
from mkref.machine.draw import Draw
from mkref.machine.inputs import StepInputs
from tests.draw_machines import (
    VOCAB,
    full_settings,
    inputs,
    loaded,
    one_by_one,
    ready,
    stop_ids,
    table,
    taken,
)
from tests.draws import same_told

N = 24


def kernel_machine(name: str, ahead: int = 1) -> KernelMachine:
    """The tiny model on a machine with buffers; so many steps are queued ahead."""
    machine = loaded(name)
    assert isinstance(machine, KernelMachine)
    machine.steps_ahead = ahead
    return machine


@pytest.mark.parametrize("name", ["interpreter", "host", "torch"])
class TestDraw:
    """What every machine does."""

    def test_neutral_settings_change_nothing(self, name: str) -> None:
        """Greedy and temperature: the tokens that the kernel draws by itself."""
        machine = loaded(name)
        alone = machine.decode(inputs(), N)
        assert alone.tolist() == machine.decode(inputs(), N, draw=Draw.neutral(3)).tolist()
        assert alone.tolist() == machine.decode(inputs(), N).tolist()

    def test_equals_single_steps(self, name: str) -> None:
        """Tokens, log probabilities and penalties that the launch itself counts."""
        single, several = ready(loaded(name)), ready(loaded(name))
        expected, expected_told = one_by_one(single, N, full_settings())
        tokens, told = taken(several.start(inputs(), N, draw=full_settings()))
        assert expected == tokens
        assert all(same_told(one, other) for one, other in zip(expected_told, told, strict=True))
        assert single.logits(3).tobytes() == several.logits(3).tobytes()
        plain = loaded(name).decode(inputs(), N).tolist()
        assert all(
            [tokens[i][row] for i in range(N)] != [plain[i][row] for i in range(N)]
            for row in range(3)
        )

    def test_counts_can_be_told_again(self, name: str) -> None:
        """A row that goes on elsewhere, with its tokens told to the machine, draws the same."""
        expected, _ = taken(ready(loaded(name)).start(inputs(), N, draw=full_settings()))
        machine, half = loaded(name), N // 2
        drawn = [[expected[i][row] for i in range(half)] for row in range(3)]
        ready(machine)
        machine.decode(inputs(), half, draw=full_settings())
        ready(machine, drawn)
        rest = inputs(expected[half - 1], [half] * 3)
        assert expected[half:] == machine.decode(rest, N - half, draw=full_settings()).tolist()

    def test_stop_ids(self, name: str) -> None:
        """The launch ends with the step that makes enough rows stop; the next one is right."""
        machine = loaded(name)
        draw = Draw.neutral(3)
        draw.top_p[1:] = 0.9
        expected = machine.decode(inputs(), N, draw=draw).tolist()
        column = [tokens[1] for tokens in expected]
        at = next(i for i in range(4, N) if column[i] not in column[:i])
        stops = stop_ids(-1, column[at], -1)
        for _ in range(2):
            done = machine.decode(inputs(), N, stop_ids=stops, stop_after=1, draw=draw)
            assert expected[: at + 1] == done.tolist()
        assert expected == machine.decode(inputs(), N, stop_ids=stops, draw=draw).tolist()

    def test_min_tokens(self, name: str) -> None:
        """Below a position no stop id comes; from it on it may."""
        machine = loaded(name)
        draw = Draw.neutral(3)
        greedy = inputs(temperatures=np.zeros(3, np.float32))
        first = machine.decode(greedy, 6)
        stops = stop_ids(*first[0].tolist())
        draw.ban_until[:] = [0, 3, 100]
        drawn = machine.decode(greedy, 6, stop_ids=stops, draw=draw)
        assert drawn[0, 0] == first[0, 0]
        assert first[0, 1] not in drawn[:3, 1].tolist()
        assert first[0, 2] not in drawn[:, 2].tolist()

    def test_mask(self, name: str) -> None:
        """One token is allowed, or a few; the rest of the rows is free."""
        machine = loaded(name)
        mask = np.full((3, -(-VOCAB // 32)), 0xFFFFFFFF, np.uint32)
        mask[0], mask[1] = 0, 0
        mask[0, 3], mask[1, 1] = 1, 0b1010
        drawn = machine.decode(inputs(), draw=Draw.neutral(3).masked(mask))[0].tolist()
        assert 96 == drawn[0]
        assert drawn[1] in (33, 35)
        assert drawn[2] == machine.decode(inputs())[0, 2]

    def test_rows_of_a_prompt(self, name: str) -> None:
        """Several rows of a sequence in a step that draws: the last one draws as if alone."""
        prompt, draw = [5, 9, 61, 7], Draw.neutral(4)
        draw.top_k[3], draw.logprobs[3] = 3, 2
        given = StepInputs(
            np.asarray(prompt, np.int32),
            np.arange(4, dtype=np.int32),
            table(1, 1, 1, 1),
            np.asarray([0, 0, 0, 1.5], np.float32),
            np.asarray([0, 0, 0, 8], np.uint64),
            np.arange(4, dtype=np.int32),
        )
        tokens, told = taken(loaded(name).start(given, draw=draw))
        machine, one = loaded(name), Draw.neutral(1)
        one.top_k[0], one.logprobs[0] = 3, 2
        seeds, warm = np.asarray([8], np.uint64), np.asarray([1.5], np.float32)
        for position, token in enumerate(prompt):
            alone = inputs([token], [position], page_table=table(1), temperatures=warm, seeds=seeds)
            last, its = taken(machine.start(alone, draw=one))
        assert last[0][0] == tokens[0][3]
        assert told[0] is not None
        assert its[0] is not None
        assert its[0].top[0].tobytes() == told[0].top[3].tobytes()

    def test_wrong_counts(self, name: str) -> None:
        """Rows and tokens that there are not."""
        machine = loaded(name)
        with pytest.raises(MachineError, match=r"set_counts: row 8; must be in 0\.\.7"):
            machine.set_counts(8, [], [])
        with pytest.raises(MachineError, match=r"prompt_ids has 97; must be in 0\.\.96"):
            machine.set_counts(0, [3, 97], [])
        with pytest.raises(MachineError, match="output_ids has -1"):
            machine.set_counts(0, np.asarray([3]), [-1])
        draw = Draw.neutral(3)
        draw.top_p[2] = 0
        with pytest.raises(MachineError, match=r"draw.top_p: row 2 has 0.0; must be"):
            machine.start(inputs(), draw=draw)


def test_machines_agree() -> None:
    """Kernel on the CPU, interpreter and reference: tokens, log probabilities, counts."""
    host, interpreter, reference = (
        ready(loaded(name)) for name in ("host", "interpreter", "torch")
    )
    tokens, told = taken(host.start(inputs(), N, draw=full_settings()))
    expected, expected_told = taken(interpreter.start(inputs(), N, draw=full_settings()))
    assert expected == tokens
    assert expected == taken(reference.start(inputs(), N, draw=full_settings()))[0]
    assert all(same_told(one, other) for one, other in zip(expected_told, told, strict=True))
    assert interpreter.read("counts").tobytes() == host.read("counts").tobytes()


@pytest.mark.parametrize("name", ["interpreter", "host"])
@pytest.mark.parametrize("ahead", [1, 3])
class TestQueue:
    """Steps that are queued before their predecessors' tokens are known."""

    def test_steps_ahead(self, name: str, ahead: int) -> None:
        """The same tokens, whether or not the host reads in between; the next launch is right."""
        expected, told = one_by_one(ready(loaded(name)), N, full_settings())
        machine = ready(kernel_machine(name, ahead))
        tokens, its = taken(machine.start(inputs(), N, draw=full_settings()))
        assert expected == tokens
        assert all(same_told(one, other) for one, other in zip(told, its, strict=True))
        plain = loaded(name).decode(inputs(), 5).tolist()
        assert plain == machine.decode(inputs(), 5).tolist()

    def test_what_is_queued_behind_the_end(self, name: str, ahead: int) -> None:
        """Stop ids end a launch while steps are queued: no trace of those but in the counters."""
        machine = kernel_machine(name, ahead)
        expected = loaded(name).decode(inputs(), N).tolist()
        column = [tokens[2] for tokens in expected]
        at = next(i for i in range(2, N) if column[i] not in column[:i])
        draw = Draw.neutral(3)
        stops = stop_ids(-1, -1, column[at])
        done = machine.decode(inputs(), N, stop_ids=stops, stop_after=1, draw=draw)
        assert expected[: at + 1] == done.tolist()
        assert expected[at] == machine.read("tokens_out")[at, :3].tolist()
        assert machine.steps in range(at + 1, at + 1 + ahead)
        rest = machine.decode(inputs(expected[at], [at + 1] * 3), N - at - 1, draw=draw)
        assert expected[at + 1 :] == rest.tolist()

    def test_cancel(self, name: str, ahead: int) -> None:
        """What was queued still comes, and is right; counts have seen it all."""
        expected, _ = one_by_one(ready(loaded(name)), N, full_settings())
        machine = ready(kernel_machine(name, ahead))
        draw = full_settings()
        first = machine.decode(inputs(), N, draw=draw, on_tokens=lambda step, _: step == 2)
        n = len(first)
        assert 3 <= n <= 3 + ahead
        rest = machine.decode(inputs(first[-1].tolist(), [n] * 3), N - n, draw=draw)
        assert expected == [*first.tolist(), *rest.tolist()]

    def test_reading_ends_a_launch(self, name: str, ahead: int) -> None:
        """Tokens and log probabilities of finished steps can still be taken."""
        expected, told = one_by_one(ready(loaded(name)), N, full_settings())
        machine = ready(kernel_machine(name, ahead))
        launch = machine.start(inputs(), N, draw=full_settings())
        first = next(launch).tolist()
        n = int(machine.read("progress")[0])
        assert 1 <= n <= 1 + ahead
        machine.decode(inputs(), 4, draw=Draw.neutral(3))
        tokens, its = taken(launch)
        assert expected[:n] == [first, *tokens]
        assert all(same_told(one, other) for one, other in zip(told[1:n], its, strict=True))

    def test_an_abandoned_launch(self, name: str, ahead: int) -> None:
        """Nobody takes the tokens: the next launch is as if it had never been."""
        machine, draw = kernel_machine(name, ahead), Draw.neutral(3)
        expected = machine.decode(inputs(), 6).tolist()
        for n in (0, 1, 3):
            launch = machine.start(inputs(), 40, draw=draw)
            assert expected[:n] == [next(launch).tolist() for _ in range(n)]
        assert expected == machine.decode(inputs(), 6).tolist()
        launch = machine.start(inputs(), 40, draw=draw)
        launch.close()
        assert [] == [*launch]
        machine.close()

    def test_logits_that_are_not_finite(self, name: str, ahead: int) -> None:
        """NaN in a page that a row reads: an error that names the row, no token of that step."""
        machine, draw = kernel_machine(name, ahead), Draw.neutral(3)
        draw.top_p[:] = 0.9
        good = machine.decode(inputs(), 8, draw=draw).tolist()
        machine.write("kv", np.full_like(machine.read("kv"), 0x7FC0))
        heard: list[int] = []
        astray = inputs(positions=(0, 62, 0), page_table=table(0, 11, 2))
        launch = machine.start(astray, 8, draw=draw)
        with pytest.raises(MachineError, match="row 1 is not finite"):
            heard.extend(int(tokens[0]) for tokens in launch)
        assert [] == heard
        assert good == machine.decode(inputs(), 8, draw=draw).tolist()

    def test_failure_after_good_steps(
        self, name: str, ahead: int, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """A hang in the third step: two steps come, then the report; the next launch is right."""
        machine, draw = kernel_machine(name, ahead), Draw.neutral(3)
        expected = machine.decode(inputs(), 5).tolist()
        queue_step = machine.queue_step

        def queue_late(step: int) -> None:
            if step == 2:
                counters = machine.get(machine.buffers["counters"], machine.table["counters"])
                counters[3] -= 1000
                machine.put(machine.buffers["counters"], counters)
            queue_step(step)

        monkeypatch.setattr(machine, "queue_step", queue_late)
        monkeypatch.setattr(machine, "timeout_s", 2.0)
        heard: list[list[int]] = []
        launch = machine.start(inputs(), 5, draw=draw)
        with pytest.raises(HangError, match="waits for (counter|free ring stage)"):
            heard.extend(tokens.tolist() for tokens in launch)
        monkeypatch.undo()
        assert expected[:2] == heard
        assert expected == machine.decode(inputs(), 5, draw=draw).tolist()

    @pytest.mark.parametrize("where", ["wait", "queue_step"])
    def test_interrupted(
        self, name: str, ahead: int, where: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Ctrl-C while the host waits or queues: the launch is ended, the next one is right."""
        machine, draw = kernel_machine(name, ahead), Draw.neutral(3)
        expected = machine.decode(inputs(), 8).tolist()
        original, calls = getattr(machine, where), 0

        def interrupted(argument: int) -> Any:
            nonlocal calls
            calls += 1
            if calls == (1 if where == "wait" else 3):
                original(argument)
                raise KeyboardInterrupt
            return original(argument)

        monkeypatch.setattr(machine, where, interrupted)
        with pytest.raises(KeyboardInterrupt):
            machine.decode(inputs(), 60, draw=draw)
        monkeypatch.undo()
        assert expected == machine.decode(inputs(), 8, draw=draw).tolist()
