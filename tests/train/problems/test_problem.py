"""Problems: what is refused, and the texts of the arms."""

from typing import Any

import pytest

from detspec.errors import InputError
from detspec.train.problems.problem import ARMS, Problem, read_answer, texts

GIVEN: dict[str, Any] = {"question": "Ann has 2. Bob has 3. How many?", "steps": ("2", "5"), "marks": (9, 20), "answer": "5"}


def test_texts_of_the_arms():
    problem = Problem(**GIVEN)
    assert texts(problem, "thinking") == texts(problem, "no_cot") == ("Ann has 2. Bob has 3. How many? A:", " 5")
    assert texts(problem, "cot") == ("Ann has 2. Bob has 3. How many?", " 2 5 A: 5")


@pytest.mark.parametrize("arm", ARMS)
def test_answer_is_read_out_of_the_text_that_is_learnt(arm: str):
    assert read_answer(texts(Problem(**GIVEN), arm)[1], arm) == "5"


def test_answer_of_cot_stands_behind_the_last_sign_and_there_may_be_none():
    assert read_answer(" 2 A: 4 A: 5 ", "cot") == "5"
    assert read_answer(" 2 5", "cot") is None
    assert read_answer(" 2 5", "no_cot") == "2 5"  # a text that does not stop at the answer is another answer


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"question": ""}, "the question of a problem must be text without blanks around it, got ''"),
        ({"question": " Ann"}, "the question of a problem must be"),
        ({"answer": 5}, "the answer of a problem must be text without blanks around it, got 5"),
        ({"steps": ("2", "5 ")}, "the step of a problem must be text without blanks around it, got '5 '"),
        ({"answer": "A: 5"}, "must not hold 'A:'"),
        ({"marks": (9,)}, "one mark for each step, got 2 steps, 1 marks"),
        ({"marks": (0, 9)}, "from 1 to the question's 31 characters, got 0"),
        ({"marks": (9, 32)}, "from 1 to the question's 31 characters, got 32"),
        ({"marks": (9, 20.0)}, "a mark must be an integer .* got 20.0"),
        ({"marks": (True, 20)}, "a mark must be an integer .* got True"),
        ({"marks": (20, 9)}, r"marks must not descend, got \[20, 9\]"),
    ],
)
def test_bad_problem_is_refused(change: dict[str, Any], message: str):
    with pytest.raises(InputError, match=message):
        Problem(**(GIVEN | change))


def test_marks_may_be_equal_and_as_far_as_the_end():
    Problem(**(GIVEN | {"marks": (31, 31)}))


def test_unknown_arm_is_refused():
    for call in (lambda: texts(Problem(**GIVEN), "none"), lambda: read_answer("", "none")):
        with pytest.raises(InputError, match="no arm 'none'; there are 'thinking', 'cot', 'no_cot'"):
            call()
