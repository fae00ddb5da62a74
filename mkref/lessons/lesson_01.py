"""Lesson 01: its exercise, bytes of keys and values, and the picture of what engines reach.

The answer gets the bare fields of config.json and not a `NorthConfig`, which could be asked for the
result.
"""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

from mkref.config import NORTH_MINI_CODE, NorthConfig
from mkref.errors import RequestError
from mkref.lessons.exercise import (
    Answer,
    Mistake,
    Property,
    PythonExercise,
    WrongAnswerError,
    expect,
)
from mkref.lessons.recorded import bench_record, evidence
from mkref.widgets.bars import Bar, bar_chart
from mkref.widgets.figure import Figure, Table
from mkref.widgets.hardware import bandwidth
from mkref.widgets.light.model import speed_of_light

__all__ = ["EXERCISES", "engines", "fields_of", "kv_bytes"]


def fields_of(config: NorthConfig) -> SimpleNamespace:
    """The fields of config.json as attributes, and nothing that computes."""
    return SimpleNamespace(**config.to_dict())


def kv_bytes(config: Any, context: int) -> int:
    """Bytes of keys and values that a decode step reads with `context` tokens.

    `config` has the fields of config.json; `config.layer_types` says for each layer
    "full_attention" or "sliding_attention". A number has 2 bytes (bfloat16).
    """
    # BEGIN SOLUTION
    tokens = 0
    for kind in config.layer_types:
        if kind == "sliding_attention":
            tokens += min(context, config.sliding_window)
        else:
            tokens += context
    # A key and a value per KV head, 2 bytes a number.
    per_token = 2 * config.num_key_value_heads * config.head_dim * 2
    return tokens * per_token
    # END SOLUTION


def _per_token(config: Any, heads: int | None = None) -> int:
    heads = config.num_key_value_heads if heads is None else heads
    return int(2 * heads * config.head_dim * 2)


def _tokens(config: Any, context: int) -> int:
    return sum(
        min(context, config.sliding_window) if kind == "sliding_attention" else context
        for kind in config.layer_types
    )


MISTAKES = (
    Mistake(
        lambda c, n: len(c.layer_types) * n * _per_token(c),
        "this lets sliding layers keep every token. What is the most that one of them can see?",
    ),
    Mistake(
        lambda c, n: len(c.layer_types) * min(n, c.sliding_window) * _per_token(c),
        "this cuts all layers at the window. Which layers have one? Look at config.layer_types.",
    ),
    Mistake(
        lambda c, n: (
            _tokens(c, n) * _per_token(c) * (c.hidden_size // c.num_attention_heads) // c.head_dim
        ),
        "the head width is its own field, config.head_dim; heads times width need not be "
        "hidden_size.",
    ),
    Mistake(
        lambda c, n: _tokens(c, n) * _per_token(c) // 2,
        "a factor of 2 is missing. A token leaves a key and a value, and a number has 2 bytes.",
    ),
    Mistake(
        lambda c, n: _tokens(c, n) * _per_token(c) * 2,
        "twice too much. A bfloat16 number has 2 bytes, and there is one key and one value.",
    ),
    Mistake(
        lambda c, n: _tokens(c, n) * _per_token(c, c.num_attention_heads),
        "this stores a key for every query head. Several query heads share one: which field counts "
        "the heads that are stored?",
    ),
    Mistake(
        lambda c, n: _tokens(c, n) * 2 * c.hidden_size * 2,
        "keys are not as wide as the hidden state. Their width is heads times config.head_dim.",
    ),
    Mistake(
        lambda c, n: min(n, c.sliding_window) * _per_token(c),
        "this counts one layer. The step reads the cache of every layer.",
    ),
    Mistake(
        lambda c, n: _tokens(c, n) * 2048,
        "2,048 bytes is a token of North Mini Code. Another model has other heads: use the fields.",
    ),
    Mistake(
        lambda c, n: (13 * n + 36 * min(n, c.sliding_window)) * _per_token(c),
        "13 and 36 layers are those of North Mini Code. Count the kinds in config.layer_types.",
    ),
    Mistake(
        lambda c, n: (13 * n + 36 * min(n, 4096)) * 2048,
        "this is right for North Mini Code only. Take every number from the fields of config.",
    ),
    Mistake(
        lambda c, n: (
            sum(n if kind == "full_attention" else c.sliding_window for kind in c.layer_types)
            * _per_token(c)
        ),
        "a sliding layer is not always full: with fewer tokens than its window it reads those.",
    ),
    Mistake(
        lambda c, n: (
            sum(
                min(n, c.sliding_window) if kind == "full_attention" else n
                for kind in c.layer_types
            )
            * _per_token(c)
        ),
        "the kinds are swapped: sliding_attention has the window, full_attention sees everything.",
    ),
)

_SMALL = replace(
    NORTH_MINI_CODE,
    num_hidden_layers=5, num_key_value_heads=2, num_attention_heads=6, head_dim=32, hidden_size=144,
    sliding_window=24, mlp_layer_types=("dense",) + ("sparse",) * 4,
    layer_types=("full_attention",) + ("sliding_attention",) * 3 + ("full_attention",),
)  # fmt: skip
_ALL_FULL = replace(_SMALL, layer_types=("full_attention",) * 5)


def _right(config: NorthConfig, context: int, where: str) -> Any:
    def trial(answer: Answer) -> None:
        expect(config.kv_bytes(context), answer(fields_of(config), context), where)

    return trial


def _grows(answer: Answer) -> None:
    """Past the window one more token costs the full layers only."""
    fields = fields_of(NORTH_MINI_CODE)
    more = [answer(fields, n) for n in (100_000, 100_001)]
    if None in more:
        raise WrongAnswerError(
            "it returns None, so nothing has been written or `return` is missing"
        )
    expect(13 * 2048, more[1] - more[0], "bytes added by token 100,001")


_PROPERTIES = (
    Property("a small model, shorter than its window", _right(_SMALL, 7, "5 layers, 7 tokens")),
    Property("a small model, past its window", _right(_SMALL, 91, "window 24, 91 tokens")),
    Property("a model without sliding layers", _right(_ALL_FULL, 91, "5 full layers, 91 tokens")),
    Property("an empty cache costs nothing", _right(_SMALL, 0, "0 tokens")),
    Property("North Mini Code at 8K", _right(NORTH_MINI_CODE, 8192, "North, 8192 tokens")),
    Property("past the window only full layers grow", _grows),
)

EXERCISES = (
    PythonExercise(
        id="01.1",
        solution=kv_bytes,
        properties=_PROPERTIES,
        mistakes=MISTAKES,
        samples=tuple(
            (fields_of(config), n)
            for config in (_SMALL, _ALL_FULL, NORTH_MINI_CODE)
            for n in (7, 91, 8192)
        ),
        then="Now: at which context do keys and values weigh as much as the experts of one token?",
    ),
)


def _own_row(context: int, batch: int) -> dict[str, Any]:
    """This repository's engine as a row like those of `decode_speed.json`.

    Raises:
        RequestError: the benchmark did not run this case.
    """
    name = "h200/decode.json"
    record = bench_record(name)
    rows = [row for row in record["rows"] if row.get("kind", "even") == "even"]
    cases = {(row["context"], row["batch"]): row for row in rows}
    if (context, batch) not in cases:
        raise RequestError(f"data: {name} has no row with context {context}, batch {batch}")
    made = record["provenance"]
    return {
        "who": "mkref, this repository",
        "gpu": "h200",
        "context": context,
        "batch": batch,
        "ms": cases[context, batch]["ms_per_step"],
        "label": "measured",
        "note": f"the whole step, synthetic weights; {made['gpu']}, {made['date'][:10]}",
    }


def engines(context: int = 8192, batch: int = 1) -> Figure:
    """What engines reach of their GPU's bound: mkref from `bench/results/h200/decode.json`,
    the others from `notebooks/data/decode_speed.json`."""
    recorded = [_own_row(context, batch), *evidence("decode_speed.json")["rows"]]
    step = speed_of_light(NORTH_MINI_CODE, context=context, batch=batch)
    bars, rows = [], []
    for row in recorded:
        if (row["context"], row["batch"]) != (context, batch):
            continue
        memory = bandwidth(row["gpu"])
        share = step.ms(memory.bytes_per_s) / row["ms"]
        who, speed = f"{row['who']} ({row['gpu'].upper()})", batch * 1e3 / row["ms"]
        text = f"{share:.0%}, {speed:.0f} a second [{row['label']}]"
        pattern = "plain" if row["label"] == "measured" else "diagonal"
        bars.append(Bar(who, share, text, "#009E73", pattern))
        rows.append((who, f"{speed:.1f}", f"{share:.1%}", row["label"], row["note"]))
    said = "; ".join(f"{row[0]} {row[2]}" for row in rows)
    sentence = f"Share of the bound of its own GPU, batch {batch}, context {context}: {said}."
    chart = bar_chart(bars, title=sentence, head="share of the speed of light", full=1.0)
    heads = ("engine", "tokens per second", "share of the bound", "label", "what it is")
    return Figure(chart, sentence, Table(heads, tuple(rows)))
