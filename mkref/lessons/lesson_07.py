"""Lesson 07: its exercises, the winner among the SMs' candidates, noise, and what top_p keeps.

Also what the lesson computes: how many sums eight numbers have, whom a maximum without a tie rule
takes, and the next token of the small trained model.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from itertools import permutations
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from mkref.config import NORTH_MINI_CODE, NorthConfig
from mkref.lessons.cuda_exercise import Blank, CudaExercise, Patch
from mkref.lessons.exercise import (
    EMPTY,
    Answer,
    Mistake,
    Property,
    PythonExercise,
    WrongAnswerError,
    expect,
)
from mkref.lessons.lesson_07_trials import Candidates, run_sample
from mkref.lessons.recorded import recorded_trace
from mkref.plan.share import share
from mkref.reference.drawing import Rules, kept, masses
from mkref.reference.sampling import philox, sample
from mkref.reference.scalars import F32

if TYPE_CHECKING:
    from mkref.engine.tokenizer import Tokenizer
    from mkref.lessons.program import Program

__all__ = ["EXERCISES", "PROMPT", "RECORD", "draws", "first_taken", "head_rate", "head_share"]
__all__ += ["kept_by_top_p", "next_logits", "next_token", "nucleus", "probabilities", "sums"]
__all__ += ["tokenizer", "uniforms", "x_owners"]

RECORD = "trace_north_h200.json.gz"
PROMPT = "    for i in range("
Numbers = npt.NDArray[Any]


def next_token(logits: Numbers, temperature: float, u: Numbers) -> int:
    """The next token of a row: the id of the winner.

    `logits` and `u` are arrays with a number for each token of the vocabulary. The numbers `u` are
    random, evenly spread between 0 and 1, neither of which occurs. Temperature 0 is greedy: the
    largest logit, the lowest id on a tie. Otherwise token i must win with probability
    softmax(logits / temperature)[i], by Gumbel noise and one argmax.
    """
    import numpy as np

    # BEGIN SOLUTION
    if temperature == 0:
        return int(np.argmax(logits))
    noise = -np.log(-np.log(u))
    return int(np.argmax(logits / temperature + noise))
    # END SOLUTION


def nucleus(mass: Sequence[int], target: int) -> list[bool]:
    """Which tokens top_p keeps: a list with True or False for each token.

    `mass` has the probability of each token as a whole number. The most likely tokens are kept, as
    few as can be, whose masses add up to `target` or more. Tokens of equal mass are kept together
    or left out together.
    """
    # BEGIN SOLUTION
    total, least = 0, 0
    for one in sorted(mass, reverse=True):
        if total >= target and one != least:
            break
        total += one
        least = one
    return [one >= least for one in mass]
    # END SOLUTION


# ---- 07.1


def _sample(where: str, case: Candidates, **how: int) -> Callable[[Program], None]:
    return lambda program: run_sample(program, case, where, **how)


def _stopping(at: int | None) -> Candidates:
    """Row 1 draws its own stop id number `at`; None: a stop id of rows 0 and 2."""
    case = Candidates.drawn(2, 3, seed=11)
    token = int(case.winners[1])
    ids = [one for one in range(100, 106) if one not in case.tokens]
    if at is None:
        return Candidates(case.values, case.tokens, ((token,), tuple(ids), (token,)))
    ids.insert(at, token)
    return Candidates(case.values, case.tokens, ((), tuple(ids), ()))


_SAMPLE_MISTAKES = (
    Patch(
        "    best = best_of_lanes(best, 1);\n",
        "",
        "each lane has the best of its own candidates only, every 32nd. Somebody must compare the "
        "lanes: which function does that?",
    ),
    Patch(
        "ROLL for (int i = c.lane; i < task.index; i += 32)",
        "if (const int i = c.lane; i < task.index)",
        "there are more candidates than lanes: a lane takes every 32nd of them.",
    ),
    Patch(
        "{negative_infinity(), 0x7fffffff}",
        "{0.0f, 0x7fffffff}",
        "a logit may be negative, and so may all of them. What is smaller than every logit?",
    ),
    Patch(
        "best.offer(c.p.best_values[i * ROWS + row], c.p.best_tokens[i * ROWS + row]);",
        "best.offer(c.p.best_values[i * ROWS + row], i);",
        "that is the number of the SM which has the best token, and not the token.",
    ),
    Patch(
        "c.p.best_values[i * ROWS + row]",
        "c.p.best_values[row * task.index + i]",
        "the candidates lie SM by SM: those of all rows of an SM are neighbours, so a step from SM "
        "to SM is ROWS words.",
        (("c.p.best_tokens[i * ROWS + row]", "c.p.best_tokens[row * task.index + i]"),),
    ),
    Patch(
        "best.offer(c.p.best_values[i * ROWS + row], c.p.best_tokens[i * ROWS + row]);",
        "if (c.p.best_values[i * ROWS + row] > best.value)\n"
        "          best = Best{c.p.best_values[i * ROWS + row], c.p.best_tokens[i * ROWS + row]};",
        "of two equal values this keeps the one that was seen first. The lower token must win, "
        "whoever has it: `offer` knows that rule.",
    ),
    Patch(
        "const bool any = __ballot_sync(ALL, stops) != 0;",
        "const bool any = stops;",
        "each lane looks at one stop id, and lane 0 tells. Lane 0 must learn what the others have "
        "found.",
    ),
    Patch(
        "c.lane < STOP_IDS && ",
        "",
        "a row has STOP_IDS stop ids. The lanes behind that look at those of the next rows.",
    ),
    Patch(
        "      c.s.tokens[row] = best.token;\n",
        "",
        "the host is told, and the SM itself is not: EMBED of the next step takes its tokens from "
        "`c.s.tokens`.",
    ),
    Patch(
        "      if (any) c.s.row_stopped[row] = 1;\n",
        "",
        "nothing is done with the stop ids. What do the lines behind yours count?",
    ),
)

_SAMPLE = CudaExercise(
    id="07.1",
    answer="sample_task",
    file="megakernel.cu",
    function="sample",
    blanks=(Blank("Best best = ", "    }"),),
    properties=(
        Property("two candidates, three rows", _sample("2 SMs, 3 rows", Candidates.drawn(2, 3))),
        Property("candidates of 132 SMs", _sample("132 SMs, 2 rows", Candidates.drawn(132, 2, seed=22))),
        Property(
            "all values are negative",
            _sample("negative values", Candidates.drawn(40, 2, mean=-90.0)),
        ),
        Property(
            "equal values: the lowest token",
            _sample("many equal values", Candidates.drawn(100, 6, levels=2)),
        ),
        Property(
            "the first stop id of a row ends the launch",
            _sample("row 1 draws a stop id", _stopping(0), n_steps=3, ends_after=1),
        ),
        Property(
            "so does the fifth",
            _sample("row 1 draws its fifth stop id", _stopping(4), n_steps=3, ends_after=1),
        ),
        Property(
            "stop ids of other rows do not",
            _sample("stop ids of other rows", _stopping(None), n_steps=3),
        ),
    ),
    mistakes=_SAMPLE_MISTAKES,
    then="Now: which of these lines would be wrong if SMs read the candidates at different times?",
)

# ---- 07.2


def uniforms(seed: int, position: int, n: int) -> Numbers:
    """The random numbers of tokens 0 to n - 1 in the kernel's noise, float64 [n]."""
    counter = np.zeros((-(-n // 4), 4), np.int64)
    counter[:, 0], counter[:, 1] = np.arange(len(counter)), position
    words = philox(counter, (seed, 0)).reshape(-1)[:n]
    return np.minimum(((words >> np.uint32(8)) + 0.5) * 2.0**-24, 1 - 2.0**-24)


Case = tuple[Numbers, float, Numbers]


def _cases(temperature: float, *, shift: float = 0.0) -> list[Case]:
    logits = np.random.default_rng(3).normal(shift, 1, 50).astype(F32).astype(np.float64)
    return [(logits, temperature, uniforms(9, position, 50)) for position in range(24)]


def _drawn(answer: Answer, case: Case) -> Any:
    logits, temperature, u = case
    with np.errstate(all="ignore"):
        given = answer(logits.copy(), temperature, u.copy())
    if given is None:
        raise WrongAnswerError(f"it returns None, {EMPTY}")
    return given


def _equals(given: Any, right: int) -> bool:
    return np.ndim(given) == 0 and bool(given == right)


def _same_tokens(temperature: float, *, shift: float = 0.0) -> Callable[[Answer], None]:
    def trial(answer: Answer) -> None:
        cases = _cases(temperature, shift=shift)
        right = [sample(v.astype(F32), t, 9, position) for position, (v, t, _) in enumerate(cases)]
        given = [_drawn(answer, case) for case in cases]
        wrong = [k for k, one in enumerate(right) if not _equals(given[k], one)]
        if wrong:
            many = f"{len(wrong)} of {len(cases)} draws at temperature {temperature:g} are wrong"
            expect(right[wrong[0]], given[wrong[0]], f"{many}, the first at position {wrong[0]}")

    return trial


def _greedy(answer: Answer) -> None:
    u = uniforms(1, 1, 4)
    for logits in ([1.0, 3.0, 2.0, -1.0], [-3.0, -2.0, -9.0, -2.0], [0.0, 5.0, 5.0, 5.0]):
        right = int(np.argmax(logits))
        where = f"temperature 0, logits {logits}"
        expect(right, _drawn(answer, (np.array(logits), 0.0, u)), where)


def _frequencies(answer: Answer, n: int = 3000) -> None:
    logits, temperature = np.array([1.0, 0.0, 2.0, -1.0, -np.inf]), 0.7
    right = np.exp(logits / temperature)
    right /= right.sum()
    drawn = [_drawn(answer, (logits, temperature, uniforms(4, k, 5))) for k in range(n)]
    for token, p in enumerate(right):
        got = drawn.count(token) / n
        if abs(got - p) > 4.5 * np.sqrt(p * (1 - p) / n):  # standard deviations
            raise WrongAnswerError(
                f"token {token} has probability {p:.1%} at temperature {temperature}, and is drawn "
                f"{got:.1%} of {n:,} times"
            )


def _softmax(v: Numbers) -> Numbers:
    p = np.exp(v - v.max())
    return np.asarray(p / p.sum())


def _wrong(value: Callable[[Numbers, float, Numbers], Numbers], *, greedy: bool = True) -> Answer:
    """The argmax of some other value than the right one."""

    def answer(logits: Numbers, temperature: float, u: Numbers) -> int:
        with np.errstate(all="ignore"):
            if temperature == 0 and greedy:
                return int(np.argmax(logits))
            return int(np.argmax(value(logits, temperature, u)))

    return answer


def _gumbel(u: Numbers) -> Numbers:
    return np.asarray(-np.log(-np.log(u)))


def _by_running_sum(logits: Numbers, temperature: float, u: Numbers) -> int:
    if temperature == 0:
        return int(np.argmax(logits))
    return int(np.searchsorted(np.cumsum(_softmax(logits / temperature)), u[0]))


_DRAW = PythonExercise(
    id="07.2",
    solution=next_token,
    properties=(
        Property("temperature 0 is the largest logit", _greedy),
        Property("temperature 1 draws what the kernel draws", _same_tokens(1.0)),
        Property("so does temperature 0.5", _same_tokens(0.5)),
        Property("and temperature 3", _same_tokens(3.0)),
        Property("large logits", _same_tokens(1.5, shift=900.0)),
        Property("3,000 draws follow the softmax", _frequencies),
    ),
    mistakes=(
        Mistake(
            _wrong(lambda v, t, u: v),
            "this is greedy at every temperature. Where does u come in?",
        ),
        Mistake(
            _wrong(lambda v, t, u: v / t - _gumbel(u)),
            "the noise has the wrong sign. log(u) is negative, so -log(u) is positive, and its "
            "logarithm needs another minus: -log(-log(u)).",
        ),
        Mistake(
            _wrong(lambda v, t, u: (v + _gumbel(u)) / t),
            "logits and noise divided together: that changes no order, so the temperature has no "
            "effect. Only the logits are divided.",
        ),
        Mistake(
            _wrong(lambda v, t, u: v * t + _gumbel(u)),
            "a high temperature must make the logits more alike. Divide by it.",
        ),
        Mistake(
            _wrong(lambda v, t, u: v / t - np.log(u)),
            "-log(u) is exponential noise. The rule needs one logarithm more.",
        ),
        Mistake(
            _wrong(lambda v, t, u: v / t + u),
            "u itself is noise of a wrong shape: the winner follows the softmax for Gumbel noise "
            "only.",
        ),
        Mistake(
            _wrong(lambda v, t, u: v / t + _gumbel(u), greedy=False),
            "temperature 0 divides by 0. It means greedy, and has no noise.",
        ),
        Mistake(
            _by_running_sum,
            "the right distribution with one random number, and a running sum over the whole "
            "vocabulary. The kernel draws other tokens: with noise for each token, and one argmax.",
        ),
        Mistake(
            _wrong(lambda v, t, u: _softmax(v / t) + _gumbel(u)),
            "the noise belongs to the logits, not to probabilities; no softmax is needed at all.",
        ),
    ),
    samples=(
        (np.array([-2.0, -1.0, 4.0, 4.5, 4.0]), 0.0, uniforms(2, 0, 5)),
        *_cases(1.0)[:6],
        *_cases(0.5)[:6],
        *_cases(3.0)[:6],
    ),
    then="Now: the kernel adds the noise in HEAD, on 132 SMs. What do they have to agree upon?",
)

# ---- 07.3


def _keeps(where: str, mass: Sequence[int], target: int) -> Callable[[Answer], None]:
    return lambda answer: _compare(answer, where, mass, target, nucleus(mass, target))


def _compare(
    answer: Answer, where: str, mass: Sequence[int], target: int, right: Sequence[bool]
) -> None:
    given = answer(list(mass), target)
    if given is None:
        raise WrongAnswerError(f"it returns None, {EMPTY}")
    if not isinstance(given, list | tuple | np.ndarray) or len(given) != len(mass):
        raise WrongAnswerError(f"{where}: it returns {given!r:.40}, and not {len(mass)} booleans")
    got = list(given)
    if not all(isinstance(one, bool | np.bool_) for one in got):
        raise WrongAnswerError(f"{where}: it returns {got[0]!r:.20}, give True or False per token")
    for i, (keep, said) in enumerate(zip(right, got, strict=True)):
        if keep != said:
            raise WrongAnswerError(
                f"{where}: token {i} of mass {mass[i]:,} must be {'kept' if keep else 'left out'} "
                f"(you keep {sum(map(int, got))} tokens, right are {sum(right)})"
            )


def _order(answer: Answer) -> None:
    rng = np.random.default_rng(5)
    mass = [int(one) for one in rng.integers(1, 40, 60)]
    for _ in range(4):
        mass = [mass[i] for i in rng.permutation(60)]
        _compare(answer, "60 tokens, shuffled", mass, 700, nucleus(mass, 700))


def _small(answer: Answer) -> None:
    """Masses that a float32 sum does not see beside the largest."""
    mass = [2**40, *(2**14 - i for i in range(400))]
    target = sum(mass[:200])
    _compare(answer, "one large and 400 small masses", mass, target, nucleus(mass, target))


def _trained(answer: Answer) -> None:
    for temperature, top_p in ((0.5, 0.9), (1.0, 0.5), (1.0, 0.9), (2.0, 0.95)):
        z = (next_logits() / F32(temperature)).astype(F32)
        mass = [int(one) for one in masses(z)[1]]
        target = max(1, sum(mass) * int(F32(top_p) * F32(2.0**32)) >> 32)
        right = [bool(one) for one in kept(z, Rules(temperature=temperature, top_p=top_p))]
        where = f"the small model, temperature {temperature:g}, top_p {top_p:g}"
        _compare(answer, where, mass, target, right)


def _sorted_until(mass: Sequence[int], done: Callable[[int, int], bool]) -> int:
    """The mass of the last token kept, if `done(total before, next)` says where it ends."""
    total, least = 0, 0
    for one in sorted(mass, reverse=True):
        if done(total, one) and one != least:
            break
        total, least = total + one, one
    return least


def _cut_by_number(mass: Sequence[int], target: int) -> list[bool]:
    ids, total, keep = sorted(range(len(mass)), key=lambda i: -mass[i]), 0, [False] * len(mass)
    for i in ids:
        if total >= target:
            break
        total, keep[i] = total + mass[i], True
    return keep


def _in_float32(mass: Sequence[int], target: int) -> list[bool]:
    total, least = F32(0), 0
    for one in sorted(mass, reverse=True):
        if total >= F32(target) and one != least:
            break
        total, least = F32(total + F32(one)), one
    return [one >= least for one in mass]


def _by_id(mass: Sequence[int], target: int) -> list[bool]:
    total, keep = 0, []
    for one in mass:
        keep.append(total < target)
        total += one
    return keep


def _from_below(mass: Sequence[int], target: int) -> list[bool]:
    total, most = 0, 0
    for one in sorted(mass):
        if total >= target and one != most:
            break
        total, most = total + one, one
    return [one <= most for one in mass]


def _until(done: Callable[[int, int, int], bool]) -> Answer:
    def answer(mass: Sequence[int], target: int) -> list[bool]:
        least = _sorted_until(mass, lambda total, one: done(total, one, target))
        return [one >= least for one in mass]

    return answer


_NUCLEUS = PythonExercise(
    id="07.3",
    solution=nucleus,
    properties=(
        Property("in the middle of a token", _keeps("target 60", [50, 10, 25, 15], 60)),
        Property("reached exactly", _keeps("target 75", [10, 50, 25, 15], 75)),
        Property("one token is enough", _keeps("target 1", [3, 90, 7], 1)),
        Property("equal masses together", _keeps("target 55", [20, 40, 20, 20], 55)),
        Property("the order of the vocabulary does not matter", _order),
        Property("small masses count", _small),
        Property("what the sampler keeps of a trained model's next token", _trained),
    ),
    mistakes=(
        Mistake(
            _until(lambda total, one, target: total + one > target and total > 0),
            "the token that crosses the target is left out, so the kept ones add up to less. Keep "
            "it, and stop after it.",
        ),
        Mistake(
            _until(lambda total, one, target: total > target),
            "one token too many when the target is reached exactly: `target` or more is enough.",
        ),
        Mistake(
            _cut_by_number,
            "of equal masses some are kept and some are not, by their place in the vocabulary. "
            "Which token would be banned by accident of its number?",
        ),
        Mistake(
            _in_float32,
            "float32 has 24 bits: beside a large sum, small masses vanish and are never counted. "
            "Add whole numbers.",
        ),
        Mistake(
            lambda mass, target: [one >= target for one in mass],
            "that asks of each token to reach the target alone. It is their sum that must.",
        ),
        Mistake(
            _by_id,
            "tokens are taken in the order of the vocabulary. The most likely come first.",
        ),
        Mistake(
            _from_below,
            "this begins with the least likely token. Sort the other way round.",
        ),
    ),
    then="Now: `draw_weigh` adds masses with atomics, in any order. Why is that allowed here?",
)

EXERCISES = (_SAMPLE, _DRAW, _NUCLEUS)

# ---- what the lesson computes


def sums(n_outputs: int = 64, n_parts: int = 8) -> list[int]:
    """For each of some outputs: how many different float32 sums its eight partial sums have, one
    per order in which they might arrive."""
    parts = np.random.default_rng(7).normal(0, 1, (n_outputs, n_parts)).astype(F32)
    orders = np.array(list(permutations(range(n_parts))))
    found = []
    for values in parts:
        total = values[orders[:, 0]]
        for k in range(1, n_parts):
            total = total + values[orders[:, k]]
        found.append(len(np.unique(total)))
    return sorted(found)


def x_owners(n_sm: int = 132) -> list[int]:
    """Elements of x that each SM owns in every layer of the real model's plan: the outputs of its
    O_PROJ, which are those of its DOWN.

    Raises:
        ValueError: they are not the same.
    """
    from mkref.plan import Op, build_plan

    plan = build_plan(NORTH_MINI_CODE, n_sm, full_pages=129, sliding_pages=70)
    owned = []
    for tasks in plan.tasks:
        shares = {(t.first, t.count) for t in tasks if t.op in (Op.O_PROJ, Op.DOWN)}
        if len(shares) != 1:
            raise ValueError(f"an SM owns {shares}")
        owned.append(16 * shares.pop()[1])
    return owned


def head_share(context: int = 8192) -> float:
    """Percent of a step's bytes, at batch 1, that are the LM head's."""
    from mkref.widgets.light.model import speed_of_light

    step = speed_of_light(NORTH_MINI_CODE, context=context)
    return 100 * next(part.n_bytes for part in step.parts if part.name == "LM head") / step.n_bytes


def head_rate() -> tuple[float, float]:
    """Microseconds of a HEAD task in the recorded step, mean of all SMs, and the bytes per second
    of all of them in that time."""
    us = np.mean([e.work_ns for e in recorded_trace(RECORD) if e.op == "HEAD"]) / 1e3
    n_bytes = 2 * NORTH_MINI_CODE.vocab_size * NORTH_MINI_CODE.hidden_size
    return float(us), float(n_bytes / us * 1e6)


def first_taken(equal: Sequence[int], n_sm: int, vocab_size: int = 517) -> int:
    """The token that wins among equal logits if the first one compared stays: what the order of
    comparisons in HEAD and SAMPLE would make of a maximum without a tie rule.

    Args:
        equal: token ids with the same, largest logit; one row.
        n_sm: SMs among which blocks of 16 tokens are divided.
        vocab_size: of the model.
    """
    blocks = -(-vocab_size // 16)

    def turn(token: int) -> tuple[int, ...]:
        """When it is compared: lane and turn in SAMPLE; half, thread and turn in HEAD."""
        block = token // 16
        sm = next(s for s in range(n_sm) if share(blocks, n_sm, s)[1] > block)
        local = block - share(blocks, n_sm, sm)[0]
        return sm % 32, sm, local % 2, token % 16, local

    return min(equal, key=turn)


@cache
def _model() -> tuple[NorthConfig, Tokenizer]:
    from mkref.engine.tokenizer import TOKENIZER_FILE, Tokenizer
    from mkref.paths import models_root

    folder = models_root() / "nano"
    config = NorthConfig.load(folder / "config.json")
    return config, Tokenizer(folder / TOKENIZER_FILE)


def tokenizer() -> Tokenizer:
    """Of the small trained model that comes with mkref."""
    return _model()[1]


@cache
def next_logits(prompt: str = PROMPT) -> Numbers:
    """The small trained model's logits of the token after a prompt, float32 [2048]."""
    import torch
    from safetensors.torch import load_file

    from mkref.paths import models_root
    from mkref.reference.model import Reference

    config, text = _model()
    weights = load_file(models_root() / "nano" / "model.safetensors")
    model = Reference(config, weights, numerics="contract")
    tokens = torch.tensor([config.bos_token_id, *text.encode(prompt)])
    return np.asarray(model(tokens, last_only=True)[-1].numpy())


def probabilities(temperature: float) -> Numbers:
    """Of the token after `PROMPT`, float64 [2048]."""
    return _softmax(next_logits().astype(np.float64) / temperature)


def kept_by_top_p(temperature: float, top_p: float = 0.9) -> int:
    """How many tokens the sampler would choose among, after `PROMPT`."""
    z = (next_logits() / F32(temperature)).astype(F32)
    return int(kept(z, Rules(temperature=temperature, top_p=top_p)).sum())


def draws(temperature: float, n: int = 1000, seed: int = 1) -> list[tuple[str, float, float]]:
    """The likeliest tokens after `PROMPT`: text, probability, and their share in n draws with the
    kernel's noise, at n positions."""
    logits, p = next_logits(), probabilities(temperature)
    drawn = np.bincount([sample(logits, temperature, seed, k) for k in range(n)], minlength=len(p))
    best = np.argsort(-p)[:6]
    return [(tokenizer().decode([int(i)]), float(p[i]), float(drawn[i] / n)) for i in best]
