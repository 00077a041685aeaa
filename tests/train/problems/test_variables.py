"""Sums of variables: texts and answers worked out by running them, and nothing but the operations gives the answer away."""

import re

import numpy as np
import pytest

from detspec.errors import InputError
from detspec.train.problems.problem import ARMS, Problem, texts
from detspec.train.problems.tasks import CLOSING, Variables
from detspec.train.problems.words import split
from tests.train.problems.leaks import best_guess_accuracy


def run(program: str) -> dict[str, int]:
    """The values of all variables after `program`, which Python runs."""
    values: dict[str, int] = {}
    exec(program, {}, values)
    return {name: value % 10 for name, value in values.items()}


def test_draw_writes_three_assignments_then_operations_then_the_question():
    problem = Variables().draw(np.random.default_rng(0), 2)
    form = r"a = \d; b = \d; c = \d; ([abc]) = \1 \+ (?!\1)[abc]; ([abc]) = \2 \+ (?!\2)[abc]; What's [abc]\?"
    assert re.fullmatch(form, problem.question)


@pytest.mark.parametrize("filler", [0.0, 0.5, 0.9])
def test_draw_steps_are_the_whole_state_at_the_end_of_each_assignment_that_matters(filler: float):
    rng = np.random.default_rng(1)
    for n in (1, 2, 3, 10, 25):
        problem = Variables(filler).draw(rng, n)
        parts = list(re.finditer(r"[^;]+(?=;)", problem.question))
        ends = [part.end() for part in parts[2:] if not part.group().startswith(" d")]
        assert list(problem.marks) == ends
        assert len(ends) == 1 + n - min(round(filler * n), n - 1)
        for step, mark in zip(problem.steps, problem.marks, strict=True):
            values = run(problem.question[:mark])
            assert step == f"{values['a']} {values['b']} {values['c']}"
        program, asked = re.fullmatch(r"(.*); What's ([abc])\?", problem.question).groups()
        assert problem.answer == str(run(program)[asked])


def test_draw_depends_on_the_generator_alone():
    drawn = [[Variables(0.3).draw(np.random.default_rng(seed), n) for n in range(1, 9)] for seed in (7, 7, 8)]
    assert drawn[0] == drawn[1]
    assert drawn[0] != drawn[2]


def test_words_are_those_of_all_texts():
    rng, words = np.random.default_rng(2), set()
    for _ in range(200):
        problem = Variables(0.5).draw(rng, 8)
        words |= {word for arm in ARMS for text in texts(problem, arm) for word in split(text)}
    assert words == set(Variables().words())


def test_operations_are_equally_long():
    rng = np.random.default_rng(3)
    for n in (1, 2, 7, 40):
        assert {len(split(Variables(0.4).draw(rng, n).question)) for _ in range(50)} == {12 + 6 * n + 5}


def leaks(problems: list[Problem], chunk: int = 8) -> dict[str, float]:
    """Accuracy of the best guess from each thing that must not give the answer away."""
    features: dict[str, list[object]] = {"length": [], "marks": [], "steps": [], "asked": []}
    for problem in problems:
        tokens = split(problem.question)
        stops = [i for i, token in enumerate(tokens) if token == ";"]
        features["length"].append(len(tokens))
        features["marks"].append((stops[-1] % chunk, stops[len(stops) // 2] % chunk))
        features["steps"].append(len(problem.steps))
        features["asked"].append(tokens[-2])
    return {name: best_guess_accuracy(problems, feature) for name, feature in features.items()}


@pytest.mark.parametrize("filler", [0.0, 0.5, 0.8])
def test_length_positions_and_number_of_operations_do_not_tell_the_answer(filler: float):
    rng = np.random.default_rng(4)
    problems = [Variables(filler).draw(rng, int(rng.integers(1, 11))) for _ in range(4000)]
    assert max(leaks(problems).values()) < 0.14  # chance is 0.1, and the best of ten in groups of 400 some 0.025 over it


def test_operations_of_unequal_length_are_caught():
    rng, problems = np.random.default_rng(4), []
    for _ in range(4000):  # from 0, "b = b + 1 + 1 + 1;" adds three: the longer the text, the more has been added
        added = rng.integers(1, 6, size=int(rng.integers(1, 11))).tolist()
        question = "b = 0; " + "".join(f"b = b{' + 1' * count}; " for count in added) + "What's b?"
        problems.append(Problem(question, (), (), str(sum(added) % 10)))
    assert leaks(problems)["length"] > 0.2
    assert leaks(problems)["marks"] > 0.2


def test_doubling_is_caught():
    rng, problems = np.random.default_rng(4), []
    for _ in range(4000):
        drawn = Variables().draw(rng, int(rng.integers(1, 11)))
        program = re.sub(r"([abc]) = \1 \+ [abc]; What", r"\1 = \1 + \1; What", drawn.question)  # the last operation
        asked = re.search(r"([abc]) = \S \+ \S; What", program).group(1)
        program = re.sub(r"'s [abc]", f"'s {asked}", program)
        problems.append(Problem(program, (), (), str(run(program.split("; What")[0])[asked])))
    assert leaks(problems)["length"] > 0.18  # five of ten digits are left


def test_question_first_has_the_same_steps_and_words_and_as_many_tokens():
    for seed in range(20):
        last, first = (Variables(question=place).draw(np.random.default_rng(seed), 6) for place in ("last", "first"))
        assert (first.steps, first.answer) == (last.steps, last.answer)
        ask = re.search(r"What's [abc]\?", last.question).group()
        assert first.question == f"{ask} {last.question.replace(ask, CLOSING)}"
        assert [first.question[len(ask) + 1 : mark] for mark in first.marks] == [last.question[:mark] for mark in last.marks]
        assert len(split(CLOSING)) == len(split(ask)) == 5
        assert set(split(first.question)) <= set(Variables(question="first").words())
    assert Variables(question="first").words()[: len(Variables().words())] == Variables().words()


def test_named_steps_say_what_was_assigned_and_are_as_long_as_an_operation():
    rng = np.random.default_rng(4)
    for seed in range(20):
        plain, named = (Variables(steps=steps).draw(np.random.default_rng(seed), 6) for steps in ("values", "named"))
        assert (plain.question, plain.marks, plain.answer) == (named.question, named.marks, named.answer)
        targets = re.findall(r"; ([abc]) = \S \+", named.question)
        first, *others = plain.steps
        assert named.steps == (f"{first};", *(f"{name} = {step};" for name, step in zip(targets, others, strict=True)))
        assert {len(split(step)) for step in named.steps[1:]} == {6}
    assert Variables(0.5, steps="named").draw(rng, 4).steps[0].endswith(";")


def test_bad_parameters_are_refused():
    with pytest.raises(InputError, match=r"Variables\.steps must be one of \('values', 'named'\), got 'long'"):
        Variables(steps="long")
    with pytest.raises(InputError, match=r"Variables\.question must be one of \('last', 'first'\), got 'middle'"):
        Variables(question="middle")
    with pytest.raises(InputError, match=r"Variables\.filler must be a number in \[0, 1\), got 1"):
        Variables(1)
    with pytest.raises(InputError, match="a positive number of operations, got 0"):
        Variables().draw(np.random.default_rng(0), 0)
