"""The speed-of-light calculator: its numbers, its static picture, its controls."""

from __future__ import annotations

from itertools import pairwise

import pytest

from mkref.config import NORTH_MINI_CODE
from mkref.errors import RequestError
from mkref.widgets import speed_of_light
from mkref.widgets.hardware import BANDWIDTHS, LABELS, TENSOR_CORES, Bandwidth, bandwidth
from mkref.widgets.light.model import speed_of_light as model
from mkref.widgets.light.render import batches, figure

# Context, batch, bound in tokens per second: an independent count from the geometry of the model.
H100 = [(1024, 1, 499.0), (8192, 1, 469.8), (32768, 1, 430.3), (262144, 1, 241.2)]
H100 += [(8192, 2, 606.4), (8192, 4, 733.9), (8192, 8, 877.8)]
H200 = [(1024, 1, 717), (8192, 1, 675), (8192, 2, 872), (8192, 8, 1262), (65536, 8, 901)]


@pytest.mark.parametrize(("context", "batch", "expected"), H100)
def test_bound_of_the_h100(context: int, batch: int, expected: float) -> None:
    """At 3.35 TB/s: 469.8 tokens per second for one row at 8K, and the rest of the table."""
    step = model(NORTH_MINI_CODE, context=context, batch=batch)
    assert expected == round(step.tokens_per_s(bandwidth("h100").bytes_per_s), 1)


@pytest.mark.parametrize(("context", "batch", "expected"), H200)
def test_bound_of_the_h200(context: int, batch: int, expected: float) -> None:
    """At 4.814 TB/s: 675 tokens per second for one row at 8K, and the rest of the table."""
    step = model(NORTH_MINI_CODE, context=context, batch=batch)
    assert expected == pytest.approx(step.tokens_per_s(bandwidth("h200").bytes_per_s), abs=1.0)


@pytest.mark.parametrize("batch", [1, 2, 8])
def test_parts_are_what_the_geometry_counts(batch: int) -> None:
    """The sum over parts equals the geometry's own count, for any batch and context."""
    step = model(NORTH_MINI_CODE, context=5000, batch=batch)
    distinct = NORTH_MINI_CODE.expected_distinct_experts(batch)
    weights = NORTH_MINI_CODE.weight_bytes_per_token(distinct)
    assert step.n_bytes == pytest.approx(weights + batch * NORTH_MINI_CODE.kv_bytes(5000))


def test_bytes_of_one_token() -> None:
    """The seven parts at 8K, to the byte."""
    step = model(NORTH_MINI_CODE)
    expected = {
        "attention projections": 1_849_688_064, "keys and values": 520_093_696,
        "dense MLP": 37_748_736, "routers": 25_165_824, "experts": 3_623_878_656,
        "norms": 204_800, "LM head": 1_073_741_824,
    }  # fmt: skip
    assert expected == {part.name: part.n_bytes for part in step.parts}


def test_more_context_is_never_faster() -> None:
    """The bound falls with the context and rises with the batch."""
    by_context = [
        model(NORTH_MINI_CODE, context=n).tokens_per_s(1e12) for n in range(0, 20000, 999)
    ]
    by_batch = [model(NORTH_MINI_CODE, batch=n).tokens_per_s(1e12) for n in range(1, 9)]
    assert all(a >= b for a, b in pairwise(by_context))
    assert all(a < b for a, b in pairwise(by_batch))


@pytest.mark.parametrize(
    ("wrong", "says"),
    [({"context": -1}, "context: -1"), ({"batch": 0}, "batch: 0"), ({"distinct": 129}, "0 to 128")],
)
def test_refuses_impossible_steps(wrong: dict[str, int], says: str) -> None:
    """One line names the value and what would be right."""
    with pytest.raises(RequestError, match=says):
        model(NORTH_MINI_CODE, **wrong)


def test_hardware_has_labels_and_sources() -> None:
    """Every number of hardware says how we know it."""
    said = [(entry.label, entry.source) for entry in BANDWIDTHS.values()]
    said += [(entry.label, entry.source) for entry in TENSOR_CORES.values()]
    for label, source in said:
        assert label in LABELS
        assert len(source) > 15
    assert (3.35, 4.814) == (BANDWIDTHS["h100"].tb_per_s, BANDWIDTHS["h200"].tb_per_s)
    with pytest.raises(RequestError, match="no entry 'h300'; there are"):
        bandwidth("h300")
    with pytest.raises(RequestError, match="more than 0"):
        Bandwidth("x", "x", float("nan"), "quoted", "x")


def test_figure_says_the_same_three_times() -> None:
    """Picture, sentence and table carry the result; two figures are equal."""
    step = model(NORTH_MINI_CODE)
    one, two = (figure(step, bandwidth("h100"), "North Mini Code") for _ in range(2))
    assert one == two
    assert "469.8 tokens per second" in one.svg
    assert "469.8 tokens per second [derived]" in one.summary
    assert "7,130,521,600" in one.table.text()


def test_batches_compares_steps() -> None:
    """One bar and one row per step."""
    steps = [model(NORTH_MINI_CODE, batch=n) for n in (1, 8)]
    made = batches(steps, bandwidth("h100"), "North Mini Code")
    assert ["469.8", "877.8"] == [row[-1] for row in made.table.rows]


def test_widget_follows_its_controls() -> None:
    """Memory, context, batch and a bandwidth of one's own change the figure."""
    widget = speed_of_light()
    assert "469.8 tokens per second" in repr(widget)
    widget.memory.value = "h200"
    assert "675.1 tokens per second" in widget.figure.summary
    widget.context.value = 1024
    assert "717." in widget.figure.summary
    widget.batch.value = 8
    assert "8 rows" in widget.figure.summary
    widget.memory.value = "own"
    assert not widget.own.disabled
    widget.own.value = 1.0
    assert "at 1 TB/s (typed in)" in widget.figure.summary
    assert widget.figure.html() == widget.view.value


def test_widget_output_carries_the_static_form() -> None:
    """Live view, HTML and text stand in one output, and the text is that of the figure."""
    widget = speed_of_light(context=1000, batch=2, gpu="h200")
    bundle = widget._repr_mimebundle_()
    assert {"application/vnd.jupyter.widget-view+json", "text/html", "text/plain"} == bundle.keys()
    assert widget.figure.text() == bundle["text/plain"] == repr(widget)
