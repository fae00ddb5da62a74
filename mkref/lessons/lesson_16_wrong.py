"""Lesson 16: typical wrong answers of exercise 16.3, and what to say to somebody who gave one.

All of them are the solution with other counters, places or shares.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from mkref.lessons.exercise import Answer, Mistake
from mkref.plan.share import share
from mkref.plan.task import NO_COUNTER, Op

if TYPE_CHECKING:
    from mkref.plan.task import Task

__all__ = ["MISTAKES", "changed"]

Share = Callable[[int, int, int], tuple[int, int]]


def _turned(total: int, n_sm: int, sm: int) -> tuple[int, int]:
    return share(total, n_sm, n_sm - 1 - sm)


def _ceil(total: int, n_sm: int, sm: int) -> tuple[int, int]:
    each = -(-total // n_sm)
    return min(total, sm * each), min(total, (sm + 1) * each)


def changed(
    *, up: Mapping[str, str] | None = None, down: Mapping[str, str] | None = None,
    up_before: Op = Op.ATTENTION, down_before: Op | None = Op.DOWN, share_: Share = share,
    all_up: bool = False, idle: tuple[str, ...] = (), busy: bool = False, names: bool = False,
    ends: tuple[str, ...] = (),
) -> Answer:  # fmt: skip
    """The solution with other counters, places or shares.

    Args:
        up, down: names of other counters to wait for and to signal.
        up_before, down_before: places.
        share_: of SHARED_DOWN.
        all_up: every SM has all of SHARED_UP.
        idle: new tasks that are there with a count of 0, too.
        busy: old tasks without a share are left out.
        names: counters by name.
        ends: new tasks with the end of the range as count.
    """
    waits_up = {"wait": "x", "signal": "h_shared", **(up or {})}
    waits_down = {"wait": "h_shared", **(down or {})}

    def answer(
        tasks: Sequence[Task], sm: int, n_sm: int, up: Task, down: Task, n_up: int, n_down: int,
        counters: Mapping[str, int],
    ) -> list[Task]:  # fmt: skip
        begin, end = (0, n_up) if all_up else share(n_up, n_sm, sm)
        first, last = share_(n_down, n_sm, sm)
        known: dict[str, Any] = {**counters, "": NO_COUNTER}
        if names:
            known = {name: name for name in counters}
        words = ({k: known[v] for k, v in one.items()} for one in (waits_up, waits_down))
        one = replace(up, first=begin, count=end - begin * ("up" not in ends), **next(words))
        two = replace(down, first=first, count=last - first * ("down" not in ends), **next(words))
        new: list[tuple[Op | None, Task]] = []
        new += [(up_before, one)] * (one.count > 0 or "up" in idle)
        new += [(down_before, two)] * (two.count > 0 or "down" in idle)
        out: list[Task] = []
        for task in tasks:
            out += [t for op, t in new if op == task.op and t not in out]
            out += [task] * (task.count > 0 or not busy)
        return [*out, *(t for op, t in new if op is None)]

    return answer


MISTAKES = (
    Mistake(
        lambda tasks, *_: tasks,
        "the list comes back as it was. Two tasks must be put into it.",
    ),
    Mistake(
        changed(down={"wait": ""}, up_before=Op.O_PROJ),
        "SHARED_UP stands late, and SHARED_DOWN waits for nothing: it reads h_shared of "
        "*all* SMs. Which counter says that all of it is there?",
    ),
    Mistake(
        changed(up={"wait": ""}),
        "SHARED_UP reads x, which the DOWN of other SMs has written. For which counter do "
        "QKV and GATE_UP wait?",
    ),
    Mistake(
        changed(down={"wait": ""}),
        "SHARED_DOWN does not wait for what it reads. That other waits order it behind "
        "SHARED_UP is luck of the place: move that task, and they do not. Which counter "
        "says that all of h_shared is there, wherever it is made?",
    ),
    Mistake(
        changed(down={"signal": "h"}),
        "DOWN waits for `h`, and so for SHARED_DOWN of *all* SMs. It reads only its own "
        "rows of x_mid, and who wrote those stands in front of it in its own list.",
    ),
    Mistake(
        changed(up_before=Op.QKV),
        "before QKV, this SM's q comes later, and all others wait for it. What nobody "
        "waits for yet can come after it.",
    ),
    Mistake(
        changed(up_before=Op.ROUTER),
        "not every SM has a part of the router, so some granules belong to nobody. Which "
        "task does every SM have that can be looked for?",
    ),
    Mistake(
        changed(up={"signal": ""}),
        "nobody is told that h_shared is there. Who writes it must signal it.",
    ),
    Mistake(
        changed(up={"wait": "merge"}),
        "it waits for tasks that stand behind it in the same list, and so for ever. What "
        "does SHARED_UP read, and since when is that there?",
    ),
    Mistake(
        changed(down={"wait": "h"}),
        "that works, but `h` is of the routed experts, and comes last of all. What does "
        "SHARED_DOWN read?",
    ),
    Mistake(
        changed(down_before=Op.O_PROJ),
        "SHARED_DOWN adds to x_mid. Which task makes x_mid in the first place?",
    ),
    Mistake(
        changed(down_before=None),
        "DOWN has read x_mid by then, and the next x lacks the shared expert. SHARED_DOWN "
        "must come before it.",
    ),
    Mistake(
        changed(share_=_turned),
        "these rows of x_mid are another SM's: its O_PROJ writes them, its DOWN reads "
        "them, and no counter orders them and this task. Which rows does this SM have in "
        "O_PROJ?",
    ),
    Mistake(
        changed(share_=_ceil),  # `divmod`, one more for the first SMs, gives the same here
        "an even share by another rule than that of O_PROJ and DOWN (rounded up, or one "
        "more for the first SMs) moves rows of x_mid to another SM. Take `first` and "
        "`count` from this SM's DOWN, or from `mkref.plan.share.share`.",
    ),
    Mistake(
        changed(all_up=True),
        "every SM computes all granules. Divide them, with share.",
    ),
    Mistake(
        changed(idle=("up", "down")),
        "with seven SMs, some have no share of six. Leave their task out: it would read "
        "nothing and tell nothing that others do not.",
    ),
    Mistake(
        changed(idle=("down",)),
        "with seven SMs, DOWN of SM 0 has a count of 0, since there are six row blocks. It "
        "stays for the sake of its waits; a SHARED_DOWN without rows is left out.",
    ),
    Mistake(
        changed(busy=True),
        "leave out only *new* tasks with a count of 0. O_PROJ and DOWN without rows stay: "
        "their waits tell this SM that the layer is over.",
    ),
    Mistake(
        changed(names=True),
        'a task has the *numbers* of counters: `counters["x"]`, not `"x"`.',
    ),
    Mistake(
        changed(ends=("up", "down")),
        "`share` gives the begin and the end of a range; a task has its first and its "
        "*count*, which is end - begin.",
    ),
    Mistake(
        changed(ends=("up",)),
        "the count of SHARED_UP is end - begin, as that of SHARED_DOWN is.",
    ),
    Mistake(
        changed(down={"signal": "h_shared"}),
        "SHARED_DOWN waits for `h_shared` and signals it: it would wait for itself. Who "
        "makes h_shared, and who is told by SHARED_DOWN?",
    ),
    Mistake(
        changed(down={"signal": "x"}),
        "x is there when DOWN has added the routed experts. SHARED_DOWN comes before that, "
        "and changes x_mid only. Who has to wait for that, and on which SM is it?",
    ),
    Mistake(
        changed(down_before=Op.MERGE),
        "before MERGE there is no x_mid yet to add to: O_PROJ makes it, after MERGE. Where "
        "between O_PROJ and DOWN is that?",
    ),
    Mistake(
        changed(up_before=Op.MERGE),
        "it is right there, and of little use. Where in the list does every SM wait for "
        "something that all others still compute?",
    ),
)
