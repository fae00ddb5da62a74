"""The KV cache under thousands of random operations, against a model that is slow and obvious.

The model knows pages as objects without numbers, prefixes as byte strings, and searches where the
cache counts. Both must agree on every answer and every number. A memory shows besides that each
sequence reads what was written for it: the value of a token is the whole text up to it.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import pytest

from mkref.engine.kv import FULL, KINDS, SLIDING, KvCache, KvSequence
from mkref.plan.build import PAGE
from tests.test_engine_kv import make

LENGTH = 640
Page = object


@dataclass(eq=False)
class Place:
    """A prefix of complete pages that the model knows, and the last page's two halves."""

    pages: list[Page | None] = field(default_factory=lambda: [None, None])


@dataclass(eq=False)
class Twin:
    """What the model knows of a sequence."""

    held: tuple[dict[int, Page], dict[int, Page]] = field(default_factory=lambda: ({}, {}))
    found: int = 0
    end: int = 0
    published: int = 0
    place: Place | None = None


class Model:
    """The rules of the cache, written down with nothing but lists and searches."""

    def __init__(self, kv: KvCache) -> None:
        self.kinds, self.budget, self.window = kv.kinds, kv.budget, kv.window
        self.places: dict[bytes, Place] = {}
        self.cached: tuple[list[Page], list[Page]] = ([], [])
        self.passed: list[Page] = []  # those of the cached ones that a window has left
        self.evictions = [0, 0]
        self.live: list[Twin] = []

    def used(self, kind: int) -> set[Page]:
        """Pages in any table."""
        return {page for twin in self.live for page in twin.held[kind].values()}

    def first(self, position: int) -> int:
        """The first page in sight of a sliding layer."""
        return max(0, position + 1 - self.window) // PAGE

    def match(self, tokens: list[int]) -> int:
        """Pages of the longest prefix that can be used."""
        found = 0
        for n in range((len(tokens) - 1) // PAGE + 1):
            chain = [self.places.get(bytes(tokens[: PAGE * (i + 1)])) for i in range(n)]
            seen = chain[self.first(PAGE * n) :] if SLIDING in self.kinds else []
            if None not in chain and all(p and p.pages[SLIDING] for p in seen):
                found = n
        return found

    def open(self, tokens: list[int]) -> Twin:
        """Share what can be used."""
        twin, n = Twin(), self.match(tokens)
        for kind in self.kinds:
            for i in range(self.first(PAGE * n) if kind == SLIDING else 0, n):
                page = self.places[bytes(tokens[: PAGE * (i + 1)])].pages[kind]
                assert page
                twin.held[kind][i] = page
                if page in self.cached[kind]:
                    self.cached[kind].remove(page)
        twin.found = twin.end = twin.published = n
        twin.place = self.places.get(bytes(tokens[: PAGE * n]))
        self.live.append(twin)
        return twin

    def let_go(self, twin: Twin, kind: int, entry: int, passed: bool = False) -> None:
        """Out of a table; cached if it is in the index and nobody else has it."""
        self.passed = [page for page in self.passed if page in self.cached[SLIDING]]
        page = twin.held[kind].pop(entry)
        known = any(place.pages[kind] is page for place in self.places.values())
        if known and page not in self.used(kind):
            self.cached[kind].append(page)
            self.passed += [page] * passed

    def advance(self, twin: Twin, position: int, count: int) -> bool:
        """Try it; too few pages are found out by counting what would be used."""
        end = max(twin.end, (position + count - 1) // PAGE + 1)
        for kind in self.kinds:
            begin = self.first(position) if kind == SLIDING else 0
            others = {p for t in self.live if t is not twin for p in t.held[kind].values()}
            kept = {page for i, page in twin.held[kind].items() if i >= begin}
            new = end - max(twin.end, begin)
            if len(others | kept) + new > self.budget[kind]:
                return False
        for kind in self.kinds:
            begin = self.first(position) if kind == SLIDING else 0
            for entry in [i for i in twin.held[kind] if i < begin]:
                self.let_go(twin, kind, entry, passed=entry >= twin.found)
            for entry in range(max(twin.end, begin), end):
                if len(self.used(kind)) + len(self.cached[kind]) == self.budget[kind]:
                    self.evict(kind)
                twin.held[kind][entry] = Page()
        twin.end = end
        return True

    def evict(self, kind: int) -> None:
        """The page that was let go first; a full one takes all behind it out of the index.

        If a quarter of the sliding ones or more are in the middle of sequences, it is one of them.
        """
        self.evictions[kind] += 1
        passed = [page for page in self.passed if page in self.cached[kind]]
        others = [page for page in self.cached[kind] if page not in passed]
        victim = passed[0] if passed and len(passed) >= len(others) / 3 else others[0]
        [prefix] = [key for key, place in self.places.items() if place.pages[kind] is victim]
        if kind == SLIDING:
            self.cached[kind].remove(victim)
            self.places[prefix].pages[kind] = None
        else:
            for key in [key for key in self.places if key.startswith(prefix)]:
                for each, page in enumerate(self.places.pop(key).pages):
                    if page in self.cached[each]:
                        self.cached[each].remove(page)
        if FULL not in self.kinds:  # places that lead to nothing
            leads = [key for key, place in self.places.items() if place.pages[SLIDING]]
            for key in [k for k in self.places if not any(p.startswith(k) for p in leads)]:
                del self.places[key]

    def publish(self, twin: Twin, tokens: list[int]) -> None:
        """Give each prefix the own page, if it has none or one that nobody uses."""
        n = len(tokens) // PAGE
        gone = twin.place is not None and twin.place not in self.places.values()
        if n < twin.published or (n == twin.published and not gone):
            return
        if FULL not in self.kinds and n - 1 not in twin.held[SLIDING]:
            return
        for i in range(0 if gone else twin.published, n):
            twin.place = self.places.setdefault(bytes(tokens[: PAGE * (i + 1)]), Place())
            for kind in self.kinds:
                page, old = twin.held[kind].get(i), twin.place.pages[kind]
                if page and (old is None or old in self.cached[kind]):
                    twin.place.pages[kind] = page
                    if old in self.cached[kind]:
                        self.cached[kind].remove(old)
        twin.published = n

    def close(self, twin: Twin, tokens: list[int]) -> None:
        """The end first; what leads to it must not be evicted before it."""
        for kind in self.kinds:
            for entry in sorted(twin.held[kind], reverse=True):
                self.let_go(twin, kind, entry)
        self.live.remove(twin)
        for n in range(twin.published, 0, -1):
            place = self.places.get(bytes(tokens[: PAGE * n]))
            if place and place.pages[FULL] in self.cached[FULL]:
                self.cached[FULL].remove(place.pages[FULL])
                self.cached[FULL].append(place.pages[FULL])


@dataclass(eq=False)
class Running:
    """A sequence in the test: all its tokens, how many are fed, and its two sides."""

    tokens: list[int]
    values: np.ndarray
    sequence: KvSequence
    twin: Twin
    fed: int


class World:
    """Cache, model and memory side by side."""

    def __init__(self, kv: KvCache, seed: int) -> None:
        self.kv, self.model, self.rng = kv, Model(kv), np.random.default_rng(seed)
        self.memory = [np.full(n * PAGE, -1) for n in kv.budget]
        self.names: dict[tuple[int, int], int] = {}
        self.texts = [self.rng.integers(0, 256, LENGTH).tolist()]
        self.live: list[Running] = []
        self.short = self.hits = 0

    def text(self) -> list[int]:
        """A new text, often one that begins like an earlier one, and mostly to a page's end."""
        earlier = self.texts[self.rng.integers(len(self.texts))]
        cut = int(self.rng.integers(0, LENGTH // PAGE)) * PAGE + int(self.rng.choice([0, 0, 0, 30]))
        new = earlier[:cut] + self.rng.integers(0, 256, LENGTH - cut).tolist()
        self.texts = [*self.texts[-5:], new]
        return new

    def values(self, tokens: list[int]) -> np.ndarray:
        """A name for each beginning of a text, equal only for equal beginnings."""
        name, values = 0, []
        for token in tokens:
            name = self.names.setdefault((name, token), len(self.names) + 1)
            values.append(name)
        return np.array(values)

    def open(self) -> None:
        """With the prompt of a new text, or of one that is there already."""
        tokens = self.text() if self.rng.random() < 0.7 else self.texts[-1]
        prompt = tokens[: int(self.rng.integers(0, LENGTH + 1))]
        wanted = self.model.match(prompt) * PAGE
        assert wanted == self.kv.match(prompt)
        sequence, twin = self.kv.open(prompt), self.model.open(prompt)
        assert wanted == sequence.n_cached
        assert 0 == sequence.n_moves
        self.hits += wanted > 0
        self.live.append(Running(tokens, self.values(tokens), sequence, twin, wanted))

    def advance(self, each: Running) -> None:
        """Pages for some tokens, of which only a part comes: the rest of the space is garbage."""
        count = min(int(self.rng.choice([1, 7, 32, 130])), LENGTH - each.fed)
        if not count:
            return
        table, moves, before = each.sequence.table.copy(), each.sequence.n_moves, self.kv.stats()
        answer = self.kv.advance(each.sequence, each.fed, count)
        assert self.model.advance(each.twin, each.fed, count) == answer
        assert (table != each.sequence.table).any() == each.sequence.n_moves - moves
        if not answer:
            assert before == self.kv.stats()
            assert moves == each.sequence.n_moves
            self.short += 1
            return
        self.write(each, np.arange(each.fed, each.fed + count), -2)
        taken = int(self.rng.integers(1, count + 1))
        at = np.arange(each.fed, each.fed + taken)
        self.write(each, at, each.values[at])
        each.fed += taken
        if self.rng.random() < 0.8:
            self.publish(each)

    def write(self, each: Running, at: np.ndarray, values: np.ndarray | int) -> None:
        """Into the pages of both kinds, as the kernel does."""
        for kind in self.kv.kinds:
            pages = each.sequence.table[kind, at // PAGE]
            assert (pages >= 0).all()
            self.memory[kind][pages * PAGE + at % PAGE] = values

    def publish(self, each: Running) -> None:
        """What is fed."""
        self.kv.publish(each.sequence, each.tokens[: each.fed])
        self.model.publish(each.twin, each.tokens[: each.fed])

    def close(self, each: Running) -> None:
        """Finished or preempted."""
        self.live.remove(each)
        self.kv.close(each.sequence)
        self.model.close(each.twin, each.tokens)

    def step(self) -> None:
        """One random operation, and then everything must agree."""
        action = self.rng.random()
        each = self.live[self.rng.integers(len(self.live))] if self.live else None
        if each is None or (action < 0.15 and len(self.live) < 6):
            self.open()
        elif action < 0.22:
            self.close(each)
        elif action < 0.3:
            self.publish(each)
        else:
            self.advance(each)
        self.agree()

    def agree(self) -> None:
        """Numbers and tables of both, and what every sequence would read next."""
        self.kv.check()
        stats = self.kv.stats()
        for kind, count in enumerate((stats.full, stats.sliding)):
            used, cached = len(self.model.used(kind)), len(self.model.cached[kind])
            free = self.kv.budget[kind] - used - cached
            evictions = self.model.evictions[kind]
            assert (count.used, count.cached, count.free) == (used, cached, free), KINDS[kind]
            assert evictions == count.evictions
        for each in self.live:
            assert each.twin.published * PAGE == each.sequence.n_published
            for kind in self.kv.kinds:
                held = np.flatnonzero(each.sequence.table[kind] >= 0).tolist()
                assert sorted(each.twin.held[kind]) == held
                first = max(0, each.fed - self.kv.window + 1) if kind == SLIDING else 0
                seen = np.arange(first, each.fed)
                pages = each.sequence.table[kind, seen // PAGE]
                read = self.memory[kind][pages * PAGE + seen % PAGE]
                assert (each.values[seen] == read).all()


@pytest.mark.parametrize(
    ("window", "full", "sliding", "layers"),
    [
        (70, 30, 14, "both"),
        (300, 24, 24, "both"),
        (64, 16, 40, "both"),
        (1, 40, 5, "both"),
        (200, 22, 0, "full"),
        (70, 0, 16, "sliding"),
        (300, 0, 24, "sliding"),
    ],
)
def test_random_operations(window: int, full: int, sliding: int, layers: str) -> None:
    """Open, advance, publish, close with shared prefixes and too few pages: the model agrees.

    In the end nobody uses anything, and no page is missing.
    """
    kv = make(window, full, sliding, layers, debug=False, max_context=LENGTH)
    world = World(kv, seed=window + full + sliding)
    for _ in range(2000):
        world.step()
    assert world.short > 20
    assert world.hits > 20
    assert sum(world.model.evictions) > 20
    for each in [*world.live]:
        world.close(each)
        world.agree()
    assert kv.budget == (kv.available(FULL), kv.available(SLIDING))
