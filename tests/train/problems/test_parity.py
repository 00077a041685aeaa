"""Coin flips: texts and answers worked out by hand, and nothing but the operations gives the answer away."""

import re

import numpy as np
import pytest

from detspec.errors import InputError
from detspec.train.problems.problem import ARMS, Problem, texts
from detspec.train.problems.tasks import Parity
from detspec.train.problems.words import split
from tests.train.problems.leaks import best_guess_accuracy


def flips_counted(question: str) -> str:
    """The answer, from the text alone."""
    first = re.search(r"state is (\w+)\.", question).group(1)
    return first if question.count(" flips") % 2 == 0 else {"heads": "tails", "tails": "heads"}[first]


def test_draw_writes_one_sentence_of_operations():
    problem = Parity().draw(np.random.default_rng(0), 3)
    operation = r"[A-Z][a-z]+ (flips|waits)"
    form = rf"A coin's state is (heads|tails)\. {operation}, then {operation}, then {operation}\. What's the state\?"
    assert re.fullmatch(form, problem.question)


@pytest.mark.parametrize("filler", [0.0, 0.5, 0.9])
def test_draw_steps_are_the_state_at_the_verbs_of_the_coin(filler: float):
    rng = np.random.default_rng(1)
    for n in (1, 2, 3, 10, 25):
        problem = Parity(filler).draw(rng, n)
        verbs = [match.end() for match in re.finditer(r" (flips|waits)\b", problem.question)]
        assert list(problem.marks) == verbs
        assert len(verbs) == n - min(round(filler * n), n - 1)
        assert problem.steps == tuple(flips_counted(problem.question[:mark]) for mark in problem.marks)
        assert problem.answer == problem.steps[-1] == flips_counted(problem.question)


def test_draw_depends_on_the_generator_alone():
    drawn = [[Parity(0.3).draw(np.random.default_rng(seed), n) for n in range(1, 9)] for seed in (7, 7, 8)]
    assert drawn[0] == drawn[1]
    assert drawn[0] != drawn[2]


def test_words_are_those_of_all_texts():
    rng, words = np.random.default_rng(2), set()
    for _ in range(200):
        problem = Parity(0.5).draw(rng, 8)
        words |= {word for arm in ARMS for text in texts(problem, arm) for word in split(text)}
    assert words == set(Parity().words())


def test_operations_are_equally_long():
    rng = np.random.default_rng(3)
    for n in (1, 2, 7, 40):
        assert {len(split(Parity(0.4).draw(rng, n).question)) for _ in range(50)} == {8 + 4 * n - 1 + 6}


def leaks(problems: list[Problem], chunk: int = 8) -> dict[str, float]:
    """Accuracy of the best guess from each thing that must not give the answer away, together with the first state."""
    features: dict[str, list[object]] = {"length": [], "ends": [], "marks": [], "steps": []}
    for problem in problems:
        tokens = split(problem.question)
        first = tokens[6]
        stops = [i for i, token in enumerate(tokens) if token in (",", ".")]
        features["length"].append((first, len(tokens)))
        features["ends"].append((first, len(tokens) % chunk))
        features["marks"].append((first, stops[-1] % chunk, stops[len(stops) // 2] % chunk))
        features["steps"].append((first, len(problem.steps)))
    return {name: best_guess_accuracy(problems, feature) for name, feature in features.items()}


@pytest.mark.parametrize("filler", [0.0, 0.5, 0.8])
def test_length_positions_and_number_of_operations_do_not_tell_the_answer(filler: float):
    rng = np.random.default_rng(4)
    problems = [Parity(filler).draw(rng, int(rng.integers(1, 11))) for _ in range(4000)]
    assert max(leaks(problems).values()) < 0.56  # chance is 0.5, and the best of 20 groups of 200 some 0.03 over it


def test_operations_of_unequal_length_are_caught():
    rng, problems = np.random.default_rng(4), []
    for _ in range(4000):
        problem = Parity().draw(rng, int(rng.integers(1, 11)))
        problems.append(Problem(problem.question.replace("waits", "does not flip"), (), (), problem.answer))
    assert leaks(problems)["length"] > 0.6
    assert leaks(problems)["marks"] > 0.6


def test_fillers_drawn_by_chance_are_caught():
    rng, problems = np.random.default_rng(4), []
    for _ in range(4000):
        n = int(rng.integers(1, 11))
        touching = int(rng.binomial(n, 0.2))  # instead of a fixed share of n
        drawn = Parity().draw(rng, touching) if touching else None
        side = ("heads", "tails")[int(rng.integers(2))]
        problems.append(drawn or Problem(f"A coin's state is {side}. Leo sings. What's the state?", (), (), side))
    assert leaks(problems)["length"] > 0.6


@pytest.mark.parametrize("filler", [-0.1, 1.0, "0.5", True, float("nan")])
def test_share_of_fillers_outside_its_range_is_refused(filler: object):
    with pytest.raises(InputError, match=r"Parity\.filler must be a number in \[0, 1\), got"):
        Parity(filler)
