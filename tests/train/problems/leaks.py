"""How well an answer can be guessed from something that must not give it away."""

from collections.abc import Hashable, Sequence

from detspec.train.problems.problem import Problem


def best_guess_accuracy(problems: Sequence[Problem], features: Sequence[Hashable]) -> float:
    """How often the answer is the one that problems of the same feature have most often; it overfits to groups of few."""
    answers: dict[Hashable, list[str]] = {}
    for problem, feature in zip(problems, features, strict=True):
        answers.setdefault(feature, []).append(problem.answer)
    return sum(max(group.count(answer) for answer in set(group)) for group in answers.values()) / len(problems)
