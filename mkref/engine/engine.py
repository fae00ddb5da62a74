"""A model that is loaded on a machine and answers requests.

    engine = Engine.load("nano")
    print(engine.generate("def add(a, b):", max_tokens=32).text)

The prompt goes through the same kernel as the answer, several tokens a step where rows are free.
Requests that overlap in time share the steps: several streams may be read in turns, and each gets
the tokens that it would get alone. A stream gives a token as soon as its step is done; the kernel
is at the next one meanwhile.

Between requests the engine keeps the keys and values that they left, as long as there is room: who
begins with the same tokens does not compute them again.

What it does not do: run in several threads at a time (`mkref.serve.service` has one for it).
"""

from __future__ import annotations

from collections.abc import Iterator
from collections.abc import Sequence as SequenceOf
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mkref.config import NorthConfig, check_kernel_limits
from mkref.engine import run
from mkref.engine.kv import AHEAD, KvCache
from mkref.engine.load import (
    find_tokenizer,
    load_weights,
    make_machine,
    make_scheduler,
    model_folder,
    sizes_for,
)
from mkref.engine.request import (
    Completion,
    Constraint,
    Prompt,
    Request,
    Stop,
    Token,
    drawn,
    make_request,
)
from mkref.engine.values import each, listed, show
from mkref.errors import RequestError
from mkref.machine import default_n_sm
from mkref.plan.build import ROWS, Plan, build_plan
from mkref.plan.verify import verify
from mkref.weights.checkpoint import Checkpoint

if TYPE_CHECKING:
    from mkref.engine.sampling import Sampling
    from mkref.engine.tokenizer import Tokenizer
    from mkref.machine.base import Machine
    from mkref.weights.packed import PackedWeights

__all__ = ["Engine"]


class Engine:
    """A loaded model; made by `Engine.load` or `Engine.from_weights`.

    Attributes:
        config: its geometry.
        plan: what the machine runs.
        machine: loaded; `machine.name` says which one it is.
        tokenizer: None if the model has none; then `why_no_text` says why.
        max_context: longest prompt and answer together, in tokens.
        kv: the pages of the KV cache.
        scheduler: who runs on the machine, and who waits.
    """

    def __init__(
        self,
        plan: Plan,
        machine: Machine,
        max_context: int,
        tokenizer: Tokenizer | None,
        *,
        exact: bool = True,
        reuse: bool = True,
    ) -> None:
        self.config: NorthConfig = plan.config
        self.plan = plan
        self.machine = machine
        self.tokenizer = tokenizer
        self.max_context = max_context
        pool = plan.pool
        self.kv = KvCache(
            plan.config, pool.full_pages, pool.sliding_pages, max_context, AHEAD, reuse=reuse
        )
        self.scheduler = make_scheduler(machine, self.kv, exact)
        self._closed = False
        self._user = ""
        self.why_no_text = "" if tokenizer else "the engine was made without a tokenizer"

    @classmethod
    def load(
        cls,
        model: str | Path = "nano",
        machine: str = "auto",
        n_sm: int | None = None,
        max_context: int | None = None,
        trace: bool = False,
        *,
        kv_pages: int | None = None,
        rows: int = ROWS,
        exact: bool = True,
        reuse: bool = True,
        **options: Any,
    ) -> Engine:
        """Load a model folder: config.json, safetensors, tokenizer.json if there is one.

        Args:
            model: the name of a model that comes with mkref, or the path of a folder.
            machine: "cuda", "host", "interpreter", "torch", or "auto" for the best that runs here.
            n_sm: SMs to plan for; None: all of the GPU, up to four cores of the CPU.
            max_context: longest prompt and answer together, in tokens; None: 4096, or what the
                model allows if that is less.
            trace: build the kernel with time stamps (`engine.machine.stamps()`).
            kv_pages: pages of 64 tokens in each full layer; None: enough for `rows` full contexts.
            rows: 8, 16 or 32 tokens that one step can take: more serve more requests at a time and
                take in prompts faster, fewer leave more shared memory to the weights' ring.
            exact: everything goes through the kernel, so an answer is the same in every bit
                whatever else runs or ran. False: long prompts go through PyTorch, much faster;
                then an answer may differ where two tokens are almost equally likely.
            reuse: keep the keys and values of requests that are over, for those that begin alike.
            options: of the machine, see `mkref.machine.create`.

        Raises:
            MkrefError: one line that names what is wrong: the folder, a tensor, a field of the
                config, the machine.
        """
        folder = model_folder(model)
        checkpoint = Checkpoint(folder)
        config = checkpoint.config
        tokenizer, why_no_text = find_tokenizer(folder, config)
        sizes_for(config, max_context, kv_pages, rows)  # complain before gigabytes are read
        chosen = make_machine(machine, n_sm, trace, options)
        # Each tensor is packed where the machine will read it: there is no second copy.
        weights = load_weights(checkpoint, chosen)
        engine = cls.from_weights(
            config,
            weights,
            chosen,
            n_sm,
            max_context,
            kv_pages=kv_pages,
            rows=rows,
            exact=exact,
            reuse=reuse,
            tokenizer=tokenizer,
        )
        engine.why_no_text = why_no_text
        return engine

    @classmethod
    def from_weights(
        cls,
        config: NorthConfig,
        weights: PackedWeights,
        machine: str | Machine = "auto",
        n_sm: int | None = None,
        max_context: int | None = None,
        trace: bool = False,
        *,
        kv_pages: int | None = None,
        rows: int = ROWS,
        exact: bool = True,
        reuse: bool = True,
        tokenizer: Tokenizer | None = None,
        **options: Any,
    ) -> Engine:
        """An engine for weights that are in memory already, for instance synthetic ones.

        Args:
            config: geometry.
            weights: packed; on a GPU they are used in place if they lie there.
            machine: a name, or a machine that is not loaded yet.
            tokenizer: None: prompts are token ids, and completions have no text.
            n_sm, max_context, trace, kv_pages, rows, exact, reuse, options: as in `load`.

        Raises:
            MkrefError: a value is out of range, or the machine cannot run.
        """
        sizes = sizes_for(config, max_context, kv_pages, rows)
        check_kernel_limits(config)
        if isinstance(machine, str):
            machine = make_machine(machine, n_sm, trace, options)
        n_sm = default_n_sm(machine.name) if n_sm is None else n_sm
        plan = build_plan(
            config,
            n_sm,
            full_pages=sizes.full_pages,
            sliding_pages=sizes.sliding_pages,
            rows=rows,
        )
        verify(plan, sizes.max_context)
        machine.load(plan, weights, sizes.max_context)
        return cls(plan, machine, sizes.max_context, tokenizer, exact=exact, reuse=reuse)

    def request(
        self,
        prompt: Prompt,
        max_tokens: int | None = 64,
        sampling: Sampling | None = None,
        stop: Stop = None,
        *,
        ignore_eos: bool = False,
        return_logits: bool = False,
        constraint: Constraint | None = None,
        priority: int = 0,
        deadline: float | None = None,
    ) -> Request:
        """A checked request, for a `mkref.serve.service.Service`; any thread may call this.

        Args:
            prompt, stop, ignore_eos, return_logits, constraint: as in `generate`.
            max_tokens: the answer has at most so many; None for what the context has room for.
            sampling: how tokens are drawn; None is greedy.
            priority: -8 to 8; a lower one comes first.
            deadline: when it ends at the latest, on the clock of `time.monotonic`.

        Raises:
            RequestError: names the argument.
        """
        return self._request(
            prompt,
            max_tokens,
            sampling,
            stop,
            fill=True,
            ignore_eos=ignore_eos,
            return_logits=return_logits,
            constraint=constraint,
            priority=priority,
            deadline=deadline,
        )

    def _request(
        self,
        prompt: Prompt,
        max_tokens: int | None,
        sampling: Sampling | None,
        stop: Stop,
        **settings: Any,
    ) -> Request:
        return make_request(
            prompt,
            max_tokens=max_tokens,
            sampling=sampling,
            stop=stop,
            **settings,
            tokenizer=self.tokenizer,
            why_no_text=self.why_no_text,
            vocab_size=self.config.vocab_size,
            eos_token_ids=self.config.eos_token_ids,
            max_context=self.max_context,
        )

    def generate(
        self,
        prompt: Prompt,
        max_tokens: int = 64,
        temperature: float = 0.0,
        seed: int = 0,
        stop: Stop = None,
        *,
        sampling: Sampling | None = None,
        constraint: Constraint | None = None,
        ignore_eos: bool = False,
        return_logits: bool = False,
    ) -> Completion:
        """Answer one prompt.

        Args:
            prompt: text, or token ids.
            max_tokens: the answer has at most so many; prompt and answer must fit the context.
            temperature: 0 takes the most likely token; above, tokens are drawn.
            seed: of the draw, 0 .. 2^64 - 1. The draw depends on seed and position, nothing else.
            stop: strings that end the text (and are cut off), or token ids that end the answer.
            sampling: everything about the draw, instead of `temperature` and `seed`.
            constraint: what the answer may be, for instance by a grammar.
            ignore_eos: go on after a token that ends a text.
            return_logits: keep the logits of every generated token.

        Raises:
            RequestError: an argument is wrong; nothing ran.
            MachineError: it failed.
        """
        self.check_open()
        request = self._request(
            prompt,
            max_tokens,
            drawn(temperature, seed, sampling),
            stop,
            constraint=constraint,
            ignore_eos=ignore_eos,
            return_logits=return_logits,
        )
        return run.complete(self, [request])[0]

    def generate_batch(
        self,
        prompts: SequenceOf[Prompt],
        max_tokens: int | SequenceOf[int] = 64,
        temperature: float | SequenceOf[float] = 0.0,
        seed: int | SequenceOf[int] = 0,
        stop: Stop = None,
        *,
        sampling: Sampling | SequenceOf[Sampling] | None = None,
        ignore_eos: bool = False,
        return_logits: bool = False,
    ) -> list[Completion]:
        """Answer several prompts of any lengths, a row for each; the rest waits for free rows.

        Args:
            prompts: any number of prompts, at least one.
            max_tokens, temperature, seed, sampling: one value for all, or one per prompt.
            stop, ignore_eos, return_logits: for all; see `generate`.

        Returns:
            Completions in the order of the prompts, each the one that its prompt gets alone.

        Raises:
            RequestError: an argument is wrong; nothing ran.
            MachineError: it failed.
        """
        self.check_open()
        several = listed(prompts)
        if not several:
            given = show(prompts) if several is None else "no prompts"
            raise RequestError(f"prompts: {given}; must be a list of at least one prompt")
        per_prompt = zip(
            several,
            each("max_tokens", max_tokens, len(several)),
            each("temperature", temperature, len(several)),
            each("seed", seed, len(several)),
            each("sampling", sampling, len(several)),
            strict=True,
        )
        settings: dict[str, Any] = {"ignore_eos": ignore_eos, "return_logits": return_logits}
        return run.complete(
            self,
            [
                self._request(prompt, most, drawn(heat, noise, whole), stop, **settings)
                for prompt, most, heat, noise, whole in per_prompt
            ],
        )

    def stream(
        self,
        prompt: Prompt,
        max_tokens: int = 64,
        temperature: float = 0.0,
        seed: int = 0,
        stop: Stop = None,
        *,
        sampling: Sampling | None = None,
        constraint: Constraint | None = None,
        ignore_eos: bool = False,
    ) -> Iterator[Token]:
        """Answer one prompt token by token; arguments as in `generate`, checked at once.

        Yields:
            Every generated token; the last has a `finish_reason`. Leaving the loop early ends the
            request.
        """
        self.check_open()
        settings: dict[str, Any] = {"constraint": constraint, "ignore_eos": ignore_eos}
        draw = drawn(temperature, seed, sampling)
        return run.events(self, self._request(prompt, max_tokens, draw, stop, **settings))

    def claim(self, user: str) -> None:
        """Give the scheduler to `user` alone, for instance to a thread; "" gives it back.

        Raises RequestError if the engine is closed or somebody else has it.
        """
        if user:
            self.check_open()
        self._user = user

    def check_open(self) -> None:
        """Refuse work: RequestError if it is closed, or somebody else has it."""
        if self._closed:
            raise RequestError("engine: it is closed; load the model again")
        if self._user:
            raise RequestError(f"engine: {self._user} uses it; give your request to that")

    def close(self) -> None:
        """Give the machine's memory back; no request is answered any more."""
        self._closed = True
        self.machine.close()

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
