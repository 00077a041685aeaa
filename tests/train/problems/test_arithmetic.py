"""Word problems: texts and answers worked out by adding up, and lengths that do not give the answer away."""

import re

import numpy as np
import pytest

from detspec.errors import InputError
from detspec.train.problems.problem import ARMS, texts
from detspec.train.problems.tasks import GAINS, Arithmetic
from detspec.train.problems.words import split
from tests.train.problems.leaks import best_guess_accuracy


def test_draw_writes_a_sentence_for_each_operation_whose_steps_add_up():
    rng = np.random.default_rng(0)
    for n in (1, 2, 5, 12):
        problem = Arithmetic().draw(rng, n)
        who, held = re.match(r"(\w+) has (\d) apples\. ", problem.question).groups()
        operations = list(re.finditer(rf"{who} (buys|finds|eats|loses) (\d)\.", problem.question))
        assert problem.question.endswith(f". How many has {who}?")
        assert len(operations) == len(problem.steps) == n
        total = int(held)
        for operation, step, mark in zip(operations, problem.steps, problem.marks, strict=True):
            sign = "+" if operation[1] in GAINS else "-"
            total += int(sign + operation[2])
            assert 0 <= total <= 9
            assert step == f"{sign} {operation[2]} = {total}"
            assert mark == operation.end() - 1
        assert problem.answer == f"{total}"


def test_draw_depends_on_the_generator_alone():
    drawn = [[Arithmetic().draw(np.random.default_rng(seed), n) for n in range(1, 9)] for seed in (7, 7, 8)]
    assert drawn[0] == drawn[1] != drawn[2]


def test_words_are_those_of_all_texts():
    rng = np.random.default_rng(2)
    problems = [Arithmetic().draw(rng, 8) for _ in range(200)]
    assert {word for one in problems for arm in ARMS for text in texts(one, arm) for word in split(text)} == set(
        Arithmetic().words()
    )


def test_operations_are_equally_long_and_only_the_last_one_bounds_the_answer():
    rng = np.random.default_rng(3)
    problems = [Arithmetic().draw(rng, int(rng.integers(1, 9))) for _ in range(4000)]
    assert all(len(split(one.question)) == 10 + 4 * len(one.steps) for one in problems)
    # Chance is 0.1, and the best of ten in groups of 500 some 0.025 over it.
    assert best_guess_accuracy(problems, [len(one.steps) for one in problems]) < 0.14
    assert all(len(split(step)) == 4 for one in problems for step in one.steps)  # as long as an operation
    last = [re.search(r"(\w+) (\d)\. How", one.question).groups() for one in problems]
    assert 0.2 < best_guess_accuracy(problems, last) < 0.35


def test_draw_of_no_operation_is_refused():
    with pytest.raises(InputError, match="a positive number of operations, got 0"):
        Arithmetic().draw(np.random.default_rng(0), 0)
