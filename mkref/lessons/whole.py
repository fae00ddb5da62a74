"""The translation unit of a CUDA exercise: a file that runs, with the learner's text in its place.

A lesson's own file (`mkref/lessons/cuda/NN_name.cu`) marks parts with `// BEGIN EXERCISE NN.k` and
`// END EXERCISE NN.k`, and takes what the kernel already has from there, so that it has no copies:

    // USE megakernel.cu: section 1
    // USE megakernel.cu: bf16_to_float pack_bf16 float_to_bf16

Of a file in `cuda/` a part is a function, and what the learner writes is named by texts in its
lines. `megakernel.cu` comes with the generated header of a small geometry. Nothing here compiles.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from mkref.config import NorthConfig
from mkref.errors import RequestError
from mkref.lessons.exercise import unmarked
from mkref.lessons.program import YOURS
from mkref.lessons.source import cited, code, file_text, find_block, section
from mkref.machine.hostcc import kernel_names
from mkref.paths import lessons_root

__all__ = [
    "LESSON_CONFIG",
    "Blank",
    "Part",
    "expanded",
    "find_part",
    "together",
    "variant",
    "whole",
]

LESSON_CONFIG = NorthConfig.from_dict({
    "vocab_size": 517, "hidden_size": 96, "num_hidden_layers": 5, "num_attention_heads": 8,
    "num_key_value_heads": 2, "head_dim": 32, "intermediate_size": 48,
    "prefix_dense_intermediate_size": 112, "first_k_dense_replace": 1, "num_experts": 12,
    "num_experts_per_tok": 3, "norm_topk_prob": False, "expert_selection_fn": "sigmoid",
    "sliding_window": 70, "sliding_window_pattern": 4, "rms_norm_eps": 1e-6,
    "rope_theta": 50000.0, "logit_scale": 1.0, "max_position_embeddings": 2048,
    "bos_token_id": 2, "eos_token_id": 1, "pad_token_id": 0,
})  # fmt: skip
"""A model of every kind of layer, small enough for a CPU to run a step of it in a moment."""

_USE = re.compile(r"^// USE ([\w./]+): (.+)$", re.MULTILINE)


@dataclass(frozen=True)
class Blank:
    """Lines of a function that the learner writes: from the first line that contains `first` to the
    next one that contains `last`."""

    first: str
    last: str


@dataclass(frozen=True)
class Part:
    """What an exercise is about: its lines in the file from 0, and its text with marks."""

    first: int
    last: int
    marked: str


def find_part(file: str, exercise_id: str, function: str, blanks: tuple[Blank, ...]) -> Part:
    """The part of a file as it lies on disk.

    Raises:
        RequestError: the file has no such part, or the part no such lines.
    """
    lines = file_text(file).splitlines()
    first, last = _place(lines, file, exercise_id, function)
    part = lines[first : last + 1]
    if function:
        for blank in blanks or (_body(part),):
            part = _mark(part, blank, f"{cited(file)}, {function}")
    if not any("BEGIN SOLUTION" in line for line in part):
        raise RequestError(f"exercise {exercise_id}: nothing is marked as SOLUTION")
    return Part(first, last, "\n".join(part) + "\n")


def whole(file: str, exercise_id: str, function: str, answer: str) -> str:
    """A translation unit, in which the learner's lines are those of `YOURS`."""
    text = file_text(file)
    lines = text.splitlines()
    _, ends = _place(lines, file, exercise_id, function)
    if file == "megakernel.cu":
        from mkref.machine.host import HOST_RING
        from mkref.machine.source import kernel_source

        lines = kernel_source(LESSON_CONFIG, HOST_RING).splitlines()
    first, last = _place(lines, file, exercise_id, function)
    before = "\n".join(lines[:first])
    after = "\n".join(lines[last + 1 :])
    if (lessons_root() / file).is_file():
        before, after = _expand(before, file, 1), _expand(after, file, ends + 2)
    return (
        f'{unmarked(before)}\n#line 1 "{YOURS}"\n{answer}\n'
        f'#line {ends + 2} "{file}"\n{unmarked(after)}\n'
    )


def expanded(file: str) -> str:
    """A file of `mkref/lessons/cuda` as a translation unit, with the kernel code that it uses."""
    return unmarked(_expand(file_text(file), file, 1))


def variant(kernel: str, number: int) -> str:
    """Name of a kernel of the source `number` of several."""
    return f"{kernel}__{number}"


def together(sources: Sequence[str]) -> str:
    """One unit of several, for the CPU: reading the headers takes longer than all of them."""
    parts = []
    for number, source in enumerate(sources):
        names = kernel_names(source)
        for kernel in names:
            used = rf"\b{kernel}(?=\s*\()|(?<=::){kernel}\b"
            source = re.sub(used, variant(kernel, number), source)
        space = f"variant{number}"
        found = "".join(f"using {space}::{variant(name, number)};\n" for name in names)
        parts.append(f"namespace {space} {{\n{source}\n}}\n{found}")
    return "".join(parts)


def _place(lines: list[str], file: str, exercise_id: str, function: str) -> tuple[int, int]:
    if function:
        found = find_block(lines, function)
        if found is None:
            raise RequestError(f"exercise {exercise_id}: {cited(file)} has no {function!r}")
        return found
    marks = [f"// {word} EXERCISE {exercise_id}" for word in ("BEGIN", "END")]
    at = [[i for i, line in enumerate(lines) if line.strip() == mark] for mark in marks]
    if [len(found) for found in at] != [1, 1]:
        raise RequestError(f"exercise {exercise_id}: {cited(file)} does not have {marks} once")
    return at[0][0] + 1, at[1][0] - 1


def _body(part: list[str]) -> Blank:
    opened = next(i for i, line in enumerate(part) if "{" in re.sub(r"//.*", "", line))
    return Blank(part[opened + 1], part[-2])


def _mark(part: list[str], blank: Blank, where: str) -> list[str]:
    first = next((i for i, line in enumerate(part) if blank.first in line), None)
    rest = range(first if first is not None else len(part), len(part))
    last = next((i for i in rest if blank.last in part[i]), None)
    if first is None or last is None:
        raise RequestError(f"exercise: {where} has no lines {blank.first!r} to {blank.last!r}")
    indent = re.match(" *", part[first])[0]  # type: ignore[index]  # it always matches
    return [
        *part[:first],
        f"{indent}// BEGIN SOLUTION",
        *part[first : last + 1],
        f"{indent}// END SOLUTION",
        *part[last + 1 :],
    ]


def _expand(source: str, file: str, begins: int) -> str:
    """USE lines become what they name; the compiler counts the other lines as in the file."""

    def used(match: re.Match[str]) -> str:
        line = begins + source.count("\n", 0, match.start())
        if found := re.fullmatch(r"section (\d+)", match[2].strip()):
            text = section(int(found[1]), match[1])
        else:
            text = "\n".join(code(name, match[1]).text for name in match[2].split())
        return f'#line 1 "{match[1]}"\n{text}\n#line {line + 1} "{file}"'

    return _USE.sub(used, source)
