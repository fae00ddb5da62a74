"""An exercise whose answer is CUDA source text: a function of a kernel, or a whole ordinary kernel.

The text around it is a file that runs: `cuda/ops/*.cu`, `cuda/megakernel.cu`, or a lesson's own
file in `mkref/lessons/cuda/`. The learner's text takes the place of the part that the exercise is
about, is compiled with the rest, and tried by the exercise's properties in a process of its own
(`mkref.lessons.worker`), so that neither a crash nor a hang reaches the notebook.

What typical mistakes lead to is known beforehand: `scripts/try_lesson.py` tries them and keeps a
fingerprint of each one's results in `mkref/lessons/cuda/mistakes_NN.json`.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from mkref.errors import MachineError, RequestError
from mkref.lessons.exercise import BLANK, LATER, Exercise, Property, Results, blanked, unmarked
from mkref.lessons.program import HANGS, Program
from mkref.lessons.trials import ask, compile_error, machines
from mkref.lessons.whole import Blank, Part, find_part, together, variant, whole
from mkref.machine.kernels import Kernels
from mkref.paths import lessons_root

__all__ = ["Blank", "CudaExercise", "Patch", "fingerprint"]


@dataclass(frozen=True)
class Patch:
    """A typical mistake: a change of the solution, and what to say to somebody who made it.

    Attributes:
        old, new: text of the solution, which occurs once, and what stands in its place.
        says: the hint.
        more: further changes, each old and new.
    """

    old: str
    new: str
    says: str
    more: tuple[tuple[str, str], ...] = ()

    def apply(self, solution: str) -> str:
        """The wrong answer.

        Raises:
            RequestError: the solution does not have the old text once.
        """
        for old, new in ((self.old, self.new), *self.more):
            if solution.count(old) != 1:
                raise RequestError(f"mistake: {old!r} occurs {solution.count(old)} times, not once")
            solution = solution.replace(old, new)
        return solution


@dataclass(frozen=True)
class CudaExercise(Exercise):
    """A part of a CUDA file to be written.

    Attributes:
        id, properties, then: as of every exercise; a trial gets a `Program`.
        answer: name of the text in the learner's cell.
        file: path below `cuda/`, or name of a file in `mkref/lessons/cuda/`.
        function: the part is this function or struct; "" for what stands between the marks BEGIN
            EXERCISE and END EXERCISE with this id.
        blanks: with `function`, what the learner writes; default: its whole body.
        mistakes: changes of the solution that are recognised.
    """

    id: str
    answer: str
    file: str
    properties: tuple[Property, ...]
    function: str = ""
    blanks: tuple[Blank, ...] = ()
    mistakes: tuple[Patch, ...] = ()
    then: str = ""

    @property
    def name(self) -> str:
        """Name of the text in the learner's cell."""
        return self.answer

    @property
    def language(self) -> str:
        """C++, which is what CUDA is highlighted as."""
        return "cpp"

    @property
    def part(self) -> Part:
        """The part of the file, with marks around what the learner writes."""
        return find_part(self.file, self.id, self.function, self.blanks)

    @property
    def starter(self) -> str:
        """A cell with the part, without what the learner writes."""
        return self.cell(blanked(self.part.marked))

    @property
    def solution_text(self) -> str:
        """The part without the marks."""
        return unmarked(self.part.marked).rstrip()

    @property
    def solution_cell(self) -> str:
        """A cell with that."""
        return self.cell(self.solution_text)

    @property
    def n_mistakes(self) -> int:
        """Number of known mistakes."""
        return len(self.mistakes)

    def mistake(self, number: int) -> tuple[str, str]:
        """Text and hint."""
        chosen = self.mistakes[number]
        return self.as_answer(chosen.apply(self.solution_text)), chosen.says

    def cell(self, text: str) -> str:
        """Source of a cell that names a text."""
        return f'{self.answer} = r"""{self.as_answer(text)}"""'

    def as_answer(self, text: str) -> str:
        """A text as it stands in a cell: its first line is the second of the cell."""
        return f"\n{text.rstrip()}\n"

    def program(
        self,
        answer: str,
        machine: str = "host",
        *,
        sanitize: bool = False,
        among: Sequence[str] = (),
    ) -> Program:
        """The answer, compiled in its place.

        Args:
            answer: the learner's text.
            machine: "host" or "cuda".
            sanitize: to find the line of a crash.
            among: several answers, one of which it is: then all are compiled together.

        Raises:
            MachineError: it does not compile.
        """
        name = "exercise_" + self.id.replace(".", "_")
        source = self.whole(answer)
        if len(among) < 2 or sanitize:
            return Program(source, name=name, machine=machine, sanitize=sanitize)
        units = together([self.whole(one) for one in among])
        kernels, number = Kernels(units, name=name, machine="host"), among.index(answer)
        return Program(source, name=name, kernels=(kernels, lambda one: variant(one, number)))

    def whole(self, answer: str) -> str:
        """The translation unit with an answer in it."""
        return whole(self.file, self.id, self.function, answer)

    def judge(self, answer: str) -> tuple[Results, str]:
        """Compile and try it in a process of its own."""
        if not isinstance(answer, str):
            raise RequestError(f"check: give the text {self.answer}, not {type(answer).__name__}")
        if _bare(answer) in ("", _bare(blanked(self.part.marked))):
            return self._all(f"nothing has been written where `// {BLANK}` stands"), ""
        results: Results = ()
        for machine in self._machines():
            results = self.try_on(machine, answer)
            if any(wrong for _, wrong in results):
                return results, self._recognise(results)
        return results, ""

    def _machines(self) -> list[str]:
        # A step's parameters are addresses in a record, which stay on the host.
        return ["host"] if self.file == "megakernel.cu" else machines()

    def judge_mistakes(self, numbers: Sequence[int] | None = None) -> list[tuple[Results, str]]:
        """What `judge` gives for known mistakes on the CPU, all compiled together if all compile.

        Args:
            numbers: of the mistakes, at least one; None: all.
        """
        wanted = range(self.n_mistakes) if numbers is None else numbers
        answers = [self.mistake(number)[0] for number in wanted]

        def tried(answer: str) -> tuple[Results, str]:
            results = self.try_on("host", answer, answers)
            if any("does not compile" in wrong for _, wrong in results):
                results = self.try_on("host", answer)
            return results, self._recognise(results)

        first = [tried(answer) for answer in answers[:1]]  # compiles them all
        with ThreadPoolExecutor(max_workers=2) as pool:  # each is tried in a process of its own
            return first + list(pool.map(tried, answers[1:]))

    def _all(self, wrong: str) -> Results:
        return tuple((one.name, wrong) for one in self.properties)

    def try_on(self, machine: str, answer: str, among: Sequence[str] = ()) -> Results:
        """All properties on one machine.

        Args:
            machine: "host" or "cuda".
            answer: the learner's text.
            among: answers that are compiled together, this one among them.
        """
        events, died = ask(self.id, answer, machine, among=among)
        if error := next((e["error"] for e in events if "error" in e), ""):
            return self._all(compile_error(error, answer))
        found = [event["wrong"] for event in events if "wrong" in event]
        if len(found) < len(self.properties):
            if not any("begin" in event for event in events):
                raise MachineError(f"check: the process of the trials ended: {died}")
            if died:
                found.append(self._crash(answer, len(found), died))
        if machine == "cuda":
            found = [wrong and f"on the GPU: {wrong}" for wrong in found]
        found += [LATER] * (len(self.properties) - len(found))
        return tuple((p.name, wrong) for p, wrong in zip(self.properties, found, strict=True))

    def _crash(self, answer: str, number: int, died: str) -> str:
        """What to say of a trial that took its process with it; AddressSanitizer knows the line."""
        if "signal" in died:
            events, _ = ask(self.id, answer, "host", first=number, sanitize=True)
            if wrong := next((e["wrong"] for e in events if "wrong" in e), ""):
                return str(wrong)
            return f"it uses memory far outside of every array ({died})"
        return died

    def _recognise(self, results: Results) -> str:
        known: list[str] = known_mistakes(self.id[:2]).get(self.id, [])
        print_ = fingerprint(results)
        return self.mistakes[known.index(print_)].says if print_ in known else ""


def fingerprint(results: Results) -> str:
    """A short text that is equal for results that differ in nothing but layout or luck.

    Lines of the learner's text do not count, and of a hang only which property met it and whether
    it was in a barrier: who polls where at the end is a matter of time.
    """
    marks = []
    for name, wrong in results:
        wrong = re.sub(r"\bline \d+", "line", wrong)
        if found := re.match(rf"{HANGS}|deadlock|divergence", wrong):
            wrong = f"{found[0]} {'__syncthreads' if '__syncthreads' in wrong else ''}"
        marks.append((name, wrong))
    return hashlib.sha256(repr(marks).encode()).hexdigest()[:12]


def known_mistakes(lesson: str) -> dict[str, list[str]]:
    """Fingerprints of the mistakes of a lesson's exercises, in the order of `mistakes`."""
    path = lessons_root() / f"mistakes_{lesson}.json"
    found: dict[str, list[str]] = json.loads(path.read_text()) if path.is_file() else {}
    return found


def _bare(text: str) -> str:
    """Code without comments and layout."""
    return re.sub(r"//[^\n]*|\s+", "", text)
