"""Pictures of lesson 16: the plan before and after the port, what it costs, and the recipe."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

from mkref.config import NORTH_MINI_CODE, NorthConfig
from mkref.lessons.lanes import IDLE, Look, Span, lanes_figure
from mkref.lessons.lesson_15_record import simulated as simulator_record
from mkref.lessons.lesson_16 import NEW, shared_port
from mkref.lessons.steps import lesson_plan
from mkref.plan.task import NO_COUNTER
from mkref.simulate.costs import H200, Costs
from mkref.widgets.bars import Bar, bar_chart
from mkref.widgets.figure import Figure, Table
from mkref.widgets.hardware import BANDWIDTHS
from mkref.widgets.palette import INK, OUTLINE, style_of
from mkref.widgets.svg import Svg

__all__ = ["EXTRA_BYTES", "PLACES", "RECIPE", "best_place", "cost_figure", "extra_us"]
__all__ += [
    "apart",
    "graph_figure",
    "layer_changes",
    "layer_parts",
    "least_us",
    "recipe_figure",
    "timeline_figure",
]

N_SM, PAGES, POSITION = 132, 200, 8191
LAYERS = 5
"""Of the simulated model: one dense layer and four sparse ones, a period of its pattern."""
EXTRA_BYTES = 3 * 2 * NORTH_MINI_CODE.hidden_size * NORTH_MINI_CODE.intermediate_size
"""Of a shared expert as wide as the routed ones: gate, up and down, bfloat16."""
PLACES = {"behind QKV": "ATTENTION", "behind ATTENTION": "GATE_UP", "behind GATE_UP": "O_PROJ"}
"""Where SHARED_UP can stand, and the operation that then follows it."""
LIKE = {"SHARED_UP": "QKV", "SHARED_DOWN": "O_PROJ"}
"""Operations that take as long, in the simulator."""
LABELS = {"SHARED_UP": "SU", "SHARED_DOWN": "SD"}
PORTED = Look("SU, SD: new", "#F0E442", "cross")


def least_us() -> float:
    """us per layer that its bytes take at the bandwidth of the data sheet."""
    return EXTRA_BYTES / BANDWIDTHS["h200"].bytes_per_s * 1e6


def _config() -> NorthConfig:
    c = NORTH_MINI_CODE
    return replace(
        c, num_hidden_layers=LAYERS, layer_types=c.layer_types[:LAYERS],
        mlp_layer_types=c.mlp_layer_types[:LAYERS],
    )  # fmt: skip


def _costs(*, fast: bool) -> Costs:
    """With those of the new operations; SHARED_DOWN has six tiles of a stage per warp from L2."""
    maps: dict[str, Any] = {}
    for name in ("head", "stage", "gap", "block", "tail", "hop_load"):
        known = getattr(H200, name)
        maps[name] = {**known, **{new: known[old] for new, old in LIKE.items()}}
    if not fast:
        maps["stage"]["SHARED_DOWN"] += 6 * H200.tile_l2
    return replace(H200, **maps)


def _placed(plan: Any, before: str) -> Any:
    """The plan with SHARED_UP before the first task of an operation, or without what is new."""
    kinds = shared_port().module("plan").Op
    lists = []
    for tasks in plan.tasks:
        ups = {t.layer: t for t in tasks if t.op == kinds.SHARED_UP}
        out = []
        for task in (t for t in tasks if kinds(t.op).name not in (NEW if not before else NEW[:1])):
            if before and kinds(task.op).name == before and task.layer in ups:
                out.append(ups.pop(task.layer))
            out.append(task)
        lists.append(tuple(out))
    return replace(plan, tasks=tuple(lists))


@cache
def simulated(place: str = "", *, fast: bool = False) -> Any:
    """A simulated step of five layers, one row at 8K.

    Args:
        place: of SHARED_UP, one of `PLACES`; "" is the kernel before the port.
        fast: SHARED_DOWN has its activations in registers in time, as DOWN has.
    """
    port = shared_port()
    situation = port.module("simulate.situation").Situation.uniform(_config(), [POSITION])
    simulate = port.module("simulate.run").simulate
    return simulate(_placed(_plan(), PLACES.get(place, "")), situation, costs=_costs(fast=fast))


@cache
def _plan() -> Any:
    build_plan = shared_port().module("plan.build").build_plan
    return build_plan(_config(), N_SM, full_pages=PAGES, sliding_pages=PAGES)


def extra_us(place: str, *, fast: bool = False) -> float:
    """Simulated us that the shared expert adds to a sparse layer."""
    more = simulated(place, fast=fast).ms - simulated().ms
    return float(more * 1e3 / (LAYERS - 1))


def best_place() -> str:
    """Letter of the place of SHARED_UP that adds least: a, b or c in the order of `PLACES`."""
    return min(zip("abc", PLACES, strict=True), key=lambda pair: extra_us(pair[1]))[0]


def layer_parts(place: str = "") -> tuple[float, float, float]:
    """Simulated us of a sparse layer, as means of all SMs: old tasks, new tasks, waiting.

    Args:
        place: as in `simulated`.
    """
    trace, parts = simulated(place).trace, [0, 0, 0]
    for sm in range(N_SM):
        for event in map(trace.event, trace.tasks_of(sm)):
            if 1 <= event.layer < LAYERS:
                parts[event.op in NEW] += event.end - event.ready
                parts[2] += event.ready - event.begin
    old, new, waiting = (part / 1e3 / N_SM / (LAYERS - 1) for part in parts)
    return old, new, waiting


def layer_changes(place: str) -> dict[str, float]:
    """Simulated us by which the port changes a sparse layer; the sum is `extra_us(place)`.

    Args:
        place: of SHARED_UP, one of `PLACES`.

    Returns:
        Means of all SMs: of the new tasks, the old ones, the waits of the layers, and, divided by
        the number of layers, of the rest of the step: HEAD and SAMPLE.
    """
    (old, _, waits), (old_now, new, waits_now) = layer_parts(), layer_parts(place)
    parts = {"new tasks": new, "old tasks": old_now - old, "waits": waits_now - waits}
    return {**parts, "end of the step": extra_us(place) - sum(parts.values())}


def apart() -> tuple[float, float]:
    """How far the best place is from the next, and how wrong a simulated change can be.

    Returns:
        The first as a part of a layer; the second as the largest difference between the measured
        and the simulated ratio of a variant (lesson 15).
    """
    best, second = sorted(map(extra_us, PLACES))[:2]
    variants = simulator_record()["variants"]
    worst = max(abs(row["measured"] - row["simulated"]) for row in variants)
    return (second - best) / sum(layer_parts()), float(worst)


def cost_figure() -> Figure:
    """What the shared expert adds to a layer, by the place of SHARED_UP."""
    found = {f"{place}": extra_us(place) for place in PLACES}
    found["behind QKV, h asked for ahead"] = extra_us("behind QKV", fast=True)
    bars = [Bar("its bytes alone", least_us(), f"{least_us():.1f} us [derived]", "#C8C8C8")]
    for name, us in found.items():
        look = ("#009E73", "plain") if "QKV" in name else ("#56B4E9", "diagonal")
        bars.append(Bar(name, us, f"{us:.1f} us [simulated]", *look))
    said = ", ".join(f"{name} {us:.1f}" for name, us in found.items())
    sentence = (
        f"Microseconds that the shared expert adds to a layer of North Mini Code, one row at 8,192 "
        f"tokens: its bytes alone {least_us():.1f} [derived], {said} [simulated]."
    )
    rows = tuple((bar.name, bar.text) for bar in bars)
    chart = bar_chart(bars, title=sentence, head="the same two tasks, in three places")
    return Figure(chart, sentence, Table(("variant", "more per layer"), rows))


def _events(place: str, sm: int, layer: int) -> list[Any]:
    """What an SM does in a layer, in the order of time."""
    trace = simulated(place).trace
    events = [event for i in trace.tasks_of(sm) if (event := trace.event(i)).layer == layer]
    return sorted(events, key=lambda event: event.begin)


def _typical() -> tuple[int, int]:
    """The SM and the sparse layer in which the port adds most nearly what it adds in the mean."""
    mean = extra_us("behind QKV")

    def off(where: tuple[int, int]) -> float:
        before, after = (_events(place, *where) for place in ("", "behind QKV"))
        ops = {event.op for event in after}
        if not {*NEW} <= ops or "ROUTER" in ops:
            return float("inf")  # without a share of them, or with one that few SMs have
        longer = after[-1].end - after[0].begin - (before[-1].end - before[0].begin)
        return abs(float(longer) / 1e3 - mean)

    return min(((sm, layer) for sm in range(N_SM) for layer in range(1, LAYERS)), key=off)


def _work_us(place: str, sm: int, layer: int, op: str) -> float:
    """What an operation of a layer works on an SM, without its waits, in us."""
    return sum(e.end - e.ready for e in _events(place, sm, layer) if e.op == op) / 1e3


def timeline_figure() -> Figure:
    """One SM in one layer, before the port and after it, simulated; one that is near the mean."""
    (sm, layer), lanes, names = _typical(), [], []
    for title, place in (("before", ""), ("after", "behind QKV")):
        events = _events(place, sm, layer)
        begin, spans = events[0].begin, []
        for event in events:
            at, ready, end = ((t - begin) / 1e3 for t in (event.begin, event.ready, event.end))
            kind = "new" if event.op in NEW else event.op
            names.append(kind)
            spans += [Span(at, ready, "idle")] if ready - at > 0.2 else []
            spans.append(Span(ready, end, kind, LABELS.get(event.op, style_of(event.op).letter)))
        lanes.append((f"{title}, SM {sm}", spans))
    looks = {}
    for name in dict.fromkeys(names):
        style = style_of(name)
        looks[name] = PORTED if name == "new" else Look(name, style.fill, style.pattern, style.ink)
    lasts = [spans[-1].end for _, spans in lanes]
    took = {
        op: [_work_us(place, sm, layer, op) for place in ("", "behind QKV")]
        for op in ("SHARED_DOWN", "DOWN")
    }
    shorter = took["DOWN"][1] < 0.9 * took["DOWN"][0]
    sooner = ": more of its weights are there when it begins" if shorter else ""
    sentence = (
        f"SM {sm} in layer {layer} of North Mini Code, one row at 8,192 tokens, drawn to scale "
        f"[simulated]: {lasts[0]:.1f} us before the port, {lasts[1]:.1f} us with the shared "
        f"expert. The difference, {lasts[1] - lasts[0]:.1f} us, is near that of the whole step per "
        f"layer, {extra_us('behind QKV'):.1f} us; other SMs and layers have more or less. The "
        f"largest change is SHARED_DOWN itself, {took['SHARED_DOWN'][1]:.1f} us: it asks for its "
        f"activations when it multiplies, and each trip to L2 takes time. DOWN behind it takes "
        f"{took['DOWN'][1]:.1f} us in place of {took['DOWN'][0]:.1f}{sooner}. Hatched: the "
        "consumers wait. SHARED_UP (SU) stands between QKV and the wait of ATTENTION, SHARED_DOWN "
        "(SD) between O_PROJ and DOWN."
    )
    return lanes_figure("One SM in one layer", sentence, lanes, {**looks, "idle": IDLE})


PLACE = {
    "DOWN, layer before": (82, 75), "ROUTER": (235, 25), "QKV": (235, 75),
    "SHARED_UP": (235, 130), "ATTENTION": (345, 75), "MERGE": (440, 75), "GATE_UP": (440, 25),
    "O_PROJ": (525, 75), "SHARED_DOWN": (620, 130), "DOWN": (730, 50),
}  # fmt: skip


def graph_edges(plan: Any, layer: int) -> list[tuple[str, str]]:
    """Who waits for whom through counters in a layer: operations that signal and that wait."""
    kinds = shared_port().module("plan").Op

    def name(task: Any) -> str:
        op = kinds(task.op).name
        return op if task.layer == layer else f"{op}, layer before"

    signals = {t.signal: name(t) for _, _, t in plan if t.signal != NO_COUNTER}
    edges = set()
    for _, _, task in plan:
        if task.layer != layer:
            continue
        routed = kinds(task.op).name in ("GATE_UP", "DOWN")
        for counter in (task.wait, task.route_wait if routed else NO_COUNTER):
            if counter != NO_COUNTER:
                edges.add((signals[counter], name(task)))
    return sorted(edges)


def graph_figure(layer: int = 2) -> Figure:
    """Operations of a layer and the counters between them, before the port and after."""
    plans = (lesson_plan(3), shared_port().module("lessons.steps").lesson_plan(3))
    edges = [graph_edges(plan, layer) for plan in plans]
    new = [edge for edge in edges[1] if edge not in edges[0]]
    own = ("O_PROJ", "SHARED_DOWN"), ("SHARED_DOWN", "DOWN")
    sentence = (
        f"Operations of a layer and the counters between them, read from the plans. The port adds "
        f"SHARED_UP and SHARED_DOWN and {len(new)} edges: "
        f"{', '.join(f'{a} to {b}' for a, b in new)}. "
        "From O_PROJ over SHARED_DOWN to DOWN, x_mid stays on its SM: no counter."
    )
    svg = Svg(770, 400, sentence)
    for panel, (title, mine) in enumerate(zip(("before", "after"), edges, strict=True)):
        top = 190 * panel + 30
        svg.text(16, top, title, size=16, bold=True)
        there = {name for edge in mine for name in edge}
        lines = [(edge, "") for edge in mine] + [(edge, "4 3") for edge in own if panel]
        if not panel:
            lines.append((("O_PROJ", "DOWN"), "4 3"))
        for (a, b), dash in lines:
            added = panel and ((a, b) in new or (a, b) in own)
            (x0, y0), (x1, y1) = PLACE[a], PLACE[b]
            x0, x1 = x0 + _half(a), x1 - _half(b)
            color, width = ("#D55E00", 2.0) if added else ("#777777", 1.0)
            bend = f"C{x0 + 30} {top + y0} {x1 - 30} {top + y1} {x1} {top + y1}"
            svg.path(f"M{x0} {top + y0}{bend}", "none", stroke=color, width=width, dash=dash)
            svg.path(f"M{x1} {top + y1}l-6 -3v6z", color)
        for name, (x, y) in PLACE.items():
            if name in there:
                fill = svg.fill(PORTED.color, PORTED.pattern) if name in NEW else "#ffffff"
                half = _half(name)
                svg.rect(x - half, top + y - 12, 2 * half, 24, fill, stroke=OUTLINE)
                if name in NEW:
                    svg.rect(x - half + 8, top + y - 8, 2 * half - 16, 16, "#ffffff")
                svg.text(x, top + y + 4, name, size=11, anchor="middle", color=INK)
    svg.text(16, 392, "lines: a counter, all SMs; dashed: the same SM, the order of its list")
    rows = tuple((a, b, "new" if (a, b) in new else "") for a, b in edges[1])
    return Figure(svg.render(), sentence, Table(("signals", "waits", ""), rows))


def _half(name: str) -> int:
    """Half the width of an operation's box."""
    return (14 if name in NEW else 6) + 7 * len(name) // 2


RECIPE = (
    ("1 oracle", "float64, NumPy"),
    ("2 ordinary kernel", "within a tolerance"),
    ("3 numeric contract", "order of every sum"),
    ("4 where bytes lie", "layout, buffers"),
    ("5 the convention", "reads, writes, share"),
    ("6 twin in NumPy", "bit by bit"),
    ("7 code in the kernel", "loader and consumers"),
    ("8 entry in the plan", "tasks, waits, place"),
    ("9 proof", "verifier, and break it"),
    ("10 run and price", "bits, bytes, time"),
)
"""Steps of a port, and what each is about."""


def recipe_figure() -> Figure:
    """The recipe as a picture: define, place, prove."""
    sentence = (
        "The recipe, ten steps in three rows: first say what the operation is ("
        + ", ".join(name for name, _ in RECIPE[:3])
        + "), then where it lives ("
        + ", ".join(name for name, _ in RECIPE[3:6])
        + "), then put it in and prove it ("
        + ", ".join(name for name, _ in RECIPE[6:])
        + ")."
    )
    svg = Svg(770, 250, sentence)
    rows = (
        ("say what it is", RECIPE[:3]),
        ("say where it lives", RECIPE[3:6]),
        ("do it, prove it", RECIPE[6:]),
    )
    colors = ("#ffffff", "#CFE8F7", "#CDEBDD")
    for row, (title, steps) in enumerate(rows):
        y = 20 + 76 * row
        svg.text(12, y + 28, title, bold=True)
        for column, (name, about) in enumerate(steps):
            x = 140 + 156 * column
            svg.rect(x, y, 146, 48, colors[row], stroke=OUTLINE)
            svg.text(x + 73, y + 20, name, anchor="middle", bold=True)
            svg.text(x + 73, y + 38, about, size=11, anchor="middle")
            if column + 1 < len(steps):
                svg.path(f"M{x + 146} {y + 24}h4", "none", stroke=OUTLINE, width=1.5)
                svg.path(f"M{x + 156} {y + 24}l-6 -4v8z", OUTLINE)
        if row < 2:  # from the end of this row to the beginning of the next
            svg.path(f"M525 {y + 48}v12H213v8", "none", stroke=OUTLINE, width=1.5)
            svg.path(f"M213 {y + 76}l-4 -8h8z", OUTLINE)
    table = Table(("step", "about"), RECIPE)
    return Figure(svg.render(), sentence, table)
