"""Where PyTorch chooses another token than the kernel, in lesson 13: how close it was, and why."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from mkref.lessons.lesson_13_runs import MAX_CONTEXT, Logits, agreement, nano_weights, sequence

__all__ = ["NearTie", "all_gaps", "near_ties", "rules"]


ORACLES = ("torch", "transformers")


@dataclass(frozen=True)
class NearTie:
    """A token that the kernel and PyTorch in float32 choose differently.

    Attributes:
        prompt, token: where, as the record counts.
        ours, theirs: the two tokens as text.
        gap: how far theirs is below ours, in the kernel's logits.
        recorded: the same, in the record.
        rms: root mean square of the differences of all logits of that token.
        layers: in which PyTorch's router took other experts for this token than it does with the
            kernel's roundings.
        margin: how far the last expert taken was ahead of the next, in the first of these layers;
            None if there is none.
        rows: the logits, of the kernel and of PyTorch.
    """

    prompt: int
    token: int
    ours: str
    theirs: str
    gap: float
    recorded: float
    rms: float
    layers: tuple[int, ...]
    margin: float | None
    rows: tuple[Logits, Logits] = field(repr=False)

    def __str__(self) -> str:
        where = f"prompt {self.prompt}, token {self.token}"
        routed = "same experts"
        if self.margin is not None:
            layers = ", ".join(map(str, self.layers))
            routed = f"other experts in layer {layers}; margin {self.margin:.4f}"
        return (
            f"{where:20} {self.ours!r:9} {self.theirs!r:10} gap {self.gap:.3f}, rms {self.rms:.2f}"
            f"\n    {routed}"
        )


def near_ties() -> list[NearTie]:
    """The recorded places, computed again: by the kernel on this CPU, and by PyTorch."""
    from mkref.engine import Engine
    from mkref.reference.routing import other_experts

    places = agreement()["machines"]["torch"]["differ"]
    weights, reference = nano_weights()
    fed = [sequence(p["prompt"], p["token"]) for p in places]
    with Engine.load("nano", "host", 1, max_context=MAX_CONTEXT) as engine:
        done = engine.generate_batch(fed, max_tokens=1, ignore_eos=True, return_logits=True)
        assert engine.tokenizer is not None
        text = engine.tokenizer.decode
    found = []
    for place, tokens, one in zip(places, fed, done, strict=True):
        ours = np.asarray(one.logits)[0]
        theirs = reference.next_logits([tokens])[0]
        a, b = int(ours.argmax()), int(theirs.argmax())
        rms = float(np.sqrt(np.mean((ours - theirs) ** 2)))
        layers, margin = other_experts(weights.config, weights, tokens)
        found.append(
            NearTie(
                place["prompt"], place["token"], text([a]), text([b]),
                float(ours[a] - ours[b]), place["gap"], rms, layers, margin, (ours, theirs),
            )
        )  # fmt: skip
    return found


def rules() -> list[str]:
    """What the record accepts as a near-tie, and how many places it does not."""
    record = agreement()
    left = [f"{record['machines'][name]['beyond_tolerance']} of {name}" for name in ORACLES]
    return [
        f"their token below ours, in our logits: at most {record['near_tie']}",
        f"else other experts, and a margin of at most {record['router_tie']}",
        f"    roundings alone move a router logit by {record['router_noise']:.4f} rms [measured]",
        f"neither: {', '.join(left)} [measured]",
    ]


def all_gaps() -> npt.NDArray[np.float64]:
    """Of all recorded tokens: how far the second best was below the best."""
    return np.concatenate([np.asarray(row) for row in agreement()["kernel"]["gaps"]])
