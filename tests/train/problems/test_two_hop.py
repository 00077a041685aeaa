"""Questions of two hops: answers looked up in the world, splits that share nothing, answers that nothing gives away."""

import collections
import re
from typing import Any

import numpy as np
import pytest

from detspec.errors import InputError
from detspec.train.problems.problem import ARMS, Problem, texts
from detspec.train.problems.two_hop import TwoHop, derangement
from detspec.train.problems.words import split
from tests.train.problems.leaks import best_guess_accuracy

TRAIN, HELDOUT = TwoHop(), TwoHop(split="heldout")


def parse(problem: Problem) -> tuple[str, str, str]:
    """Person, relation and second relation ("name" for one hop) of a question."""
    form = r"(\w+)'s (\w+) has a (\w+)\. (?:What's the name|Who's the \3)\?"
    return re.fullmatch(form, problem.question).groups()


def test_world_gives_everybody_one_of_each_and_nobody_himself():
    for facts in TRAIN.world.values():
        assert set(facts) == set(facts.values())
        assert len(facts) == 40
        assert all(person != other for person, other in facts.items())


def test_world_is_its_seeds():
    assert TwoHop(seed=1).world == TwoHop(seed=1).world != TRAIN.world
    assert HELDOUT.world == TRAIN.world


@pytest.mark.parametrize("task", [TRAIN, HELDOUT])
def test_problems_answer_as_the_world_says(task: TwoHop):
    for problem in task.one_hop + task.two_hop:
        person, first, second = parse(problem)
        bridge = task.world[first][person]
        assert problem.steps == (bridge,)
        assert problem.question[: problem.marks[0]] == f"{person}'s {first}"
        assert problem.answer == (bridge if second == "name" else task.world[second][bridge])


def test_splits_share_no_two_hops_and_leave_none_out():
    train, heldout = ({parse(problem) for problem in task.two_hop} for task in (TRAIN, HELDOUT))
    assert not train & heldout
    assert len(train | heldout) == len(train) + len(heldout) == 40 * 6 * 5
    assert 80 < len(heldout) < 160  # one in ten


def test_each_hop_of_what_is_held_out_is_trained_on():
    facts = {parse(problem)[:2] for problem in TRAIN.one_hop}
    second_hops = {(problem.steps[0], parse(problem)[2]) for problem in TRAIN.two_hop}
    for problem in HELDOUT.two_hop:
        person, first, second = parse(problem)
        assert {(person, first), (problem.steps[0], second)} <= facts
        assert (problem.steps[0], second) in second_hops


def test_held_out_people_begin_no_question_of_training_and_all_of_the_tests():
    train, heldout = (TwoHop(heldout_by="person", heldout_one_in=5, split=split) for split in ("train", "heldout"))
    known, new = ({parse(problem)[0] for problem in task.one_hop + task.two_hop} for task in (train, heldout))
    assert not known & new
    assert len(known | new) == 40
    assert 4 <= len(new) <= 12  # one in five
    for people, task in ((known, train), (new, heldout)):
        assert len(task.one_hop) == 6 * len(people)
        assert len(task.two_hop) == 30 * len(people)
    assert train.world == TRAIN.world  # the facts of those held out are those that another run may teach


def test_facts_of_people_whose_two_hops_are_held_out_stay_in_training():
    train, heldout = (TwoHop(heldout_by="start", heldout_one_in=5, split=split) for split in ("train", "heldout"))
    by_person = TwoHop(heldout_by="person", heldout_one_in=5, split="heldout")
    assert train.one_hop == heldout.one_hop == TRAIN.one_hop
    assert heldout.two_hop == by_person.two_hop
    assert len(by_person.one_hop) < len(TRAIN.one_hop)
    assert len(train.two_hop) + len(heldout.two_hop) == 40 * 6 * 5


def test_split_does_not_change_with_the_number_of_people():
    fewer = {parse(problem) for problem in TwoHop(num_people=20, split="heldout").two_hop}
    assert fewer <= {parse(problem) for problem in HELDOUT.two_hop}


def test_draw_takes_every_problem_of_its_number_of_hops_and_split():
    task = TwoHop(num_people=5, num_relations=2, heldout_one_in=2)
    rng = np.random.default_rng(0)
    for n, expected in ((1, task.one_hop), (2, task.two_hop)):
        assert {task.draw(rng, n) for _ in range(400)} == set(expected)
    assert [task.draw(np.random.default_rng(3), 2) for _ in range(2)] == [task.draw(np.random.default_rng(3), 2)] * 2


def test_words_are_those_of_all_texts():
    problems = TRAIN.one_hop + TRAIN.two_hop + HELDOUT.two_hop
    words = {word for problem in problems for arm in ARMS for text in texts(problem, arm) for word in split(text)}
    assert words == set(TRAIN.words()) == set(HELDOUT.words())


def test_questions_are_equally_long_and_answers_equally_frequent():
    problems = [*TRAIN.two_hop, *HELDOUT.two_hop]
    assert {len(split(problem.question)) for problem in problems + list(TRAIN.one_hop)} == {14}
    assert set(collections.Counter(problem.answer for problem in problems).values()) == {30}


def test_relations_alone_do_not_tell_the_answer():
    problems = [*TRAIN.two_hop, *HELDOUT.two_hop]
    assert best_guess_accuracy(problems, [parse(problem)[1:] for problem in problems]) == 1 / 40
    assert best_guess_accuracy(problems, [parse(problem) for problem in problems]) == 1.0


def test_derangements_keep_nobody_in_place():
    rng = np.random.default_rng(0)
    assert {tuple(derangement(rng, 3).tolist()) for _ in range(50)} == {(1, 2, 0), (2, 0, 1)}


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"num_people": 2}, r"TwoHop\.num_people must be an integer from 3 to 64, got 2"),
        ({"num_people": 65}, r"from 3 to 64, got 65"),
        ({"num_relations": 1}, r"TwoHop\.num_relations must be an integer from 2 to 8, got 1"),
        ({"num_relations": 2.0}, r"got 2\.0"),
        ({"heldout_one_in": 1}, r"TwoHop\.heldout_one_in must be an integer from 2 to 1000000, got 1"),
        ({"seed": -1}, r"TwoHop\.seed must be an integer of at least 0, got -1"),
        ({"heldout_by": "fact"}, r"TwoHop\.heldout_by must be one of \('question', 'start', 'person'\), got 'fact'"),
        ({"split": "test"}, r"TwoHop\.split must be one of \('train', 'heldout'\), got 'test'"),
    ],
)
def test_bad_parameters_are_refused(given: dict[str, Any], message: str):
    with pytest.raises(InputError, match=message):
        TwoHop(**given)


def test_draw_of_what_there_is_none_of_is_refused():
    rng = np.random.default_rng(0)
    for n in (0, 3):
        with pytest.raises(InputError, match=f"problems of 1 or 2 hops, got {n}"):
            TRAIN.draw(rng, n)
    with pytest.raises(InputError, match="has no two hops: take a smaller heldout_one_in"):
        TwoHop(num_people=3, num_relations=2, heldout_one_in=10**6, split="heldout").draw(rng, 2)
