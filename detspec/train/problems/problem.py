"""A problem with its steps, and its texts in each of the three arms."""

import dataclasses
import itertools
from collections.abc import Sequence

from detspec.config import is_count
from detspec.errors import InputError

# "thinking": the steps are thoughts, made during prefill.   "cot": the model writes the steps before the answer.
# "no_cot": the same texts as "thinking", without thoughts.
ARMS = ("thinking", "cot", "no_cot")
ANSWER_SIGN = "A:"

Clause = tuple[str, str | None]  # a piece of a question, and the step that can be inferred at its end, if there is one


@dataclasses.dataclass(frozen=True)
class Problem:
    """A question, the steps that lead to its answer, and the answer.

    "Ann has 2. Bob has 3. How many?"   steps ("2", "5")   marks (9, 20): "2" follows from "Ann has 2.", "5" from "... has 3"
    """

    question: str  # text of the question
    steps: tuple[str, ...]  # texts of the steps, in order
    # for each step a character offset into `question`: the step can be inferred from `question[:mark]`. They never descend.
    marks: tuple[int, ...]
    answer: str  # text of the answer

    def __post_init__(self) -> None:
        for name, text in (("question", self.question), ("answer", self.answer), *(("step", step) for step in self.steps)):
            if not isinstance(text, str) or not text or text != text.strip():
                raise InputError(f"the {name} of a problem must be text without blanks around it, got {text!r}")
        if ANSWER_SIGN in self.answer:
            raise InputError(f"an answer must not hold {ANSWER_SIGN!r}, which precedes answers, got {self.answer!r}")
        if len(self.marks) != len(self.steps):
            raise InputError(f"a problem needs one mark for each step, got {len(self.steps)} steps, {len(self.marks)} marks")
        length = len(self.question)
        for mark in self.marks:
            if not is_count(mark) or mark > length:
                raise InputError(f"a mark must be an integer from 1 to the question's {length} characters, got {mark!r}")
        if any(earlier > later for earlier, later in itertools.pairwise(self.marks)):
            raise InputError(f"marks must not descend, got {list(self.marks)}; give the steps in the order of their marks")


def problem_of(clauses: Sequence[Clause], closing: str, answer: str) -> Problem:
    """The problem whose question is all `clauses` and then `closing`; each step's mark is the end of its clause."""
    ends = itertools.accumulate(len(text) for text, _ in clauses)
    marked = [(step, end) for (_, step), end in zip(clauses, ends, strict=True) if step is not None]
    question = "".join([*(text for text, _ in clauses), closing])
    return Problem(question, tuple(step for step, _ in marked), tuple(end for _, end in marked), answer)


def texts(problem: Problem, arm: str) -> tuple[str, str]:
    """The prompt of `problem` in `arm`, one of `ARMS`, and the continuation to learn, without its end token."""
    require_arm(arm)
    if arm == "cot":
        return problem.question, " " + " ".join((*problem.steps, ANSWER_SIGN, problem.answer))
    return f"{problem.question} {ANSWER_SIGN}", f" {problem.answer}"


def read_answer(text: str, arm: str) -> str | None:
    """The answer in `text`, which a model of `arm` generated after its prompt; None if a "cot" model gave none."""
    require_arm(arm)
    if arm == "cot":
        _, sign, text = text.rpartition(ANSWER_SIGN)
        if not sign:
            return None
    return text.strip()


def require_arm(arm: str) -> None:
    """Raises `InputError` unless `arm` is one of `ARMS`."""
    if arm not in ARMS:
        raise InputError(f"no arm {arm!r}; there are {', '.join(map(repr, ARMS))}")
