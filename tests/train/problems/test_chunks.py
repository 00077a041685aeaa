"""Alignment to chunks and batches, on rows worked out by hand."""

import time

import numpy as np
import pytest
import tokenizers
from tokenizers import models, pre_tokenizers, processors

from detspec.config import ThinkingConfig
from detspec.errors import InputError
from detspec.state import NO_TOKEN
from detspec.train.problems.chunks import Encoded, align, encode, make_batch, token_marks
from detspec.train.problems.problem import ARMS, Problem
from detspec.train.problems.tasks import Parity
from detspec.train.problems.words import END_ID, FILLER_ID, word_tokenizer, words_in

# Tokens of the prompt:  0 Ann  1 has  2 1  3 .  4 Bob  5 has  6 2  7 .  8 All  9 ?  10 A  11 :     "one" after 2, "two" after 6
COUNTING = Problem("Ann has 1. Bob has 2. All?", ("one", "two"), (9, 20), "3")
TOKENIZER = word_tokenizer(words_in(COUNTING.question, "A: one two 3"))
ONE, TWO = TOKENIZER.token_to_id("one"), TOKENIZER.token_to_id("two")
E = END_ID


def thinking(chunk: int, max_thought: int = 3) -> ThinkingConfig:
    return ThinkingConfig(chunk, in_layer=1, out_layer=2, max_thought=max_thought, end_id=END_ID)


def counting(arm: str = "thinking") -> Encoded:
    return encode([COUNTING], TOKENIZER, arm)[0]


def ids(text: str) -> list[int]:
    return TOKENIZER.encode(text).ids


def test_encode_thinking_marks_the_tokens_that_complete_what_steps_follow_from():
    assert counting() == Encoded(
        COUNTING.question, ids("Ann has 1. Bob has 2. All? A:"), [2, 6], [[ONE], [TWO]], [*ids("3"), E]
    )


def test_encode_other_arms_have_their_texts_and_no_thoughts():
    assert counting("no_cot") == counting()._replace(marks=[], steps=[])
    assert counting("cot") == Encoded(COUNTING.question, ids("Ann has 1. Bob has 2. All?"), [], [], [*ids("one two A: 3"), E])


# P = 12: 12 to 15 tokens with the fillers, so 2 or 3 chunks end before the last prompt token.
@pytest.mark.parametrize(
    ("phase", "expected"),
    [
        (0, [[ONE, E], [TWO, E]]),  # Ann has 1 . | Bob has 2 . | All ? A :
        (1, [[ONE, E], [TWO, E], [E]]),  # # Ann has 1 | . Bob has 2 | . All ? A | :
        (2, [[E], [ONE, E], [TWO, E]]),  # # # Ann has | 1 . Bob has | 2 . All ? | A :
        (3, [[E], [ONE, E], [TWO, E]]),  # # # # Ann | has 1 . Bob | has 2 . All | ? A :
    ],
)
def test_align_chunks_of_four_in_every_phase(phase: int, expected: list[list[int]]):
    assert align(counting(), thinking(4), phase) == expected


@pytest.mark.parametrize(
    ("phase", "expected"),
    [
        (0, [[ONE, TWO, E]]),  # both marks in one chunk; the last chunk has none
        (1, [[ONE, TWO, E]]),
        (2, [[ONE, E]]),  # # # Ann has 1 . Bob has | 2 . All ? A :        "two" falls into the last chunk
        (3, [[ONE, E]]),
        (4, [[ONE, E]]),  # 16 tokens: the second chunk ends with the last prompt token
        (5, [[ONE, E], [TWO, E]]),  # ##### Ann has 1 | . Bob has 2 . All ? A | :
        (6, [[E], [ONE, TWO, E]]),  # ###### Ann has | 1 . Bob has 2 . All ? | A :
        (7, [[E], [ONE, TWO, E]]),
    ],
)
def test_align_chunks_of_eight_in_every_phase(phase: int, expected: list[list[int]]):
    assert align(counting(), thinking(8), phase) == expected


def test_align_chunks_of_one_and_of_more_than_the_prompt():
    assert align(counting(), thinking(1)) == [[E], [E], [ONE, E], [E], [E], [E], [TWO, E], [E], [E], [E], [E]]
    assert align(counting(), thinking(16)) == []


def test_align_thought_of_too_many_tokens_is_refused():
    assert align(counting(), thinking(8, max_thought=3)) == [[ONE, TWO, E]]
    with pytest.raises(InputError, match=r"'Ann has 1.*after chunk 0 .phase 1, .* has 3 tokens.* max_thought is 2; raise"):
        align(counting(), thinking(8, max_thought=2), 1)


def test_align_step_that_holds_the_end_of_thoughts_is_refused():
    thinking_of_two = ThinkingConfig(8, in_layer=1, out_layer=2, max_thought=3, end_id=TWO)
    with pytest.raises(InputError, match=rf"'Ann has 1.*a step holds token {TWO}, which ends thoughts; choose another end_id"):
        align(counting(), thinking_of_two)


def test_batch_rows_are_the_prompt_behind_its_fillers_then_the_continuation():
    batch = make_batch([counting(), counting()], 16, thinking(4), [0, 2])
    prompt, answer = ids("Ann has 1. Bob has 2. All? A:"), ids("3")
    assert batch.tokens.tolist() == [[*prompt, *answer, E, 0, 0, 0], [FILLER_ID] * 2 + [*prompt, *answer, E, 0]]
    # targets: tokens[1:]; the answer is target 11 (13 with two fillers), the end the one behind it
    assert np.flatnonzero(batch.weights[0]).tolist() == [11, 12]
    assert np.flatnonzero(batch.weights[1]).tolist() == [13, 14]
    n = NO_TOKEN
    assert batch.thoughts.tolist() == [
        [[ONE, E, n], [TWO, E, n], [n, n, n], [n, n, n]],
        [[E, n, n], [ONE, E, n], [TWO, E, n], [n, n, n]],
    ]
    assert (batch.tokens.dtype, batch.weights.dtype, batch.thoughts.dtype) == (np.int32, np.float32, np.int32)


@pytest.mark.parametrize("arm", ["cot", "no_cot"])
def test_batch_of_the_other_arms_has_no_thoughts_and_learns_the_whole_continuation(arm: str):
    batch = make_batch([counting(arm)], 17, None, [1])
    assert batch.thoughts.shape == (1, 0, 0)
    learnt = batch.tokens[0, 1:][batch.weights[0] == 1].tolist()
    assert learnt == [*ids("one two A: 3" if arm == "cot" else "3"), E]
    assert set(batch.weights.ravel().tolist()) == {0.0, 1.0}


def test_batch_takes_a_problem_as_long_as_its_rows_and_none_longer():
    assert make_batch([counting()], 13, thinking(4)).tokens[0, -1] == E  # 12 + 2 tokens
    with pytest.raises(InputError, match=r"'Ann has 1.*has 14 tokens .* rows have 12 \+ 1; raise seq_len"):
        make_batch([counting()], 12, thinking(4))
    with pytest.raises(InputError, match="has 15 tokens with its continuation and a phase of 1"):
        make_batch([counting()], 13, thinking(4), [1])


@pytest.mark.parametrize(
    ("phases", "message"), [([4], "from 0 to 3, got 4"), ([-1], "from 0 to 3, got -1"), ([0, 0], "got 2 phases for 1 problems")]
)
def test_batch_with_bad_phases_is_refused(phases: list[int], message: str):
    with pytest.raises(InputError, match=message):
        make_batch([counting()], 20, thinking(4), phases)


def test_batch_without_thoughts_takes_any_phase_but_a_negative_one():
    assert make_batch([counting("no_cot")], 40, None, [9]).tokens[0, :10].tolist() == [FILLER_ID] * 9 + ids("Ann")
    with pytest.raises(InputError, match="a phase must be a number of fillers at least 0, got -1"):
        make_batch([counting("no_cot")], 40, None, [-1])


def test_token_marks_within_a_token_and_behind_a_blank_mean_the_token_read_last():
    offsets = [(0, 3), (4, 8), (8, 9)]  # Ann sits.
    assert [token_marks(offsets, [mark])[0] for mark in range(1, 10)] == [0, 0, 0, 0, 1, 1, 1, 1, 2]


def test_encode_with_a_token_in_front_of_every_text_puts_it_before_prompts_alone():
    tokenizer = tokenizers.Tokenizer(models.WordLevel({"<s>": 5, "Ann": 6, "sits": 7, ".": 8, "A": 9, ":": 10}, ""))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.add_special_tokens(["<s>"])
    tokenizer.post_processor = processors.TemplateProcessing("<s> $A", special_tokens=[("<s>", 5)])
    encoded = encode([Problem("Ann sits.", ("sits", "Ann"), (3, 8), "Ann")], tokenizer, "thinking", end_id=4)[0]
    assert encoded[1:] == ([5, 6, 7, 8, 9, 10], [1, 2], [[7], [6]], [6, 4])


def test_encode_unknown_word_is_refused_by_name():
    with pytest.raises(InputError, match=r"does not know 'Zed', 'sits' in 'Zed sits\. A:'"):
        encode([COUNTING, Problem("Zed sits.", (), (), "3")], TOKENIZER, "thinking")
    with pytest.raises(InputError, match="does not know 'three' in ' three'"):
        encode([Problem("Ann?", ("three",), (3,), "3")], TOKENIZER, "thinking")


@pytest.mark.parametrize("arm", ARMS)
def test_batch_of_64_is_made_fast(arm: str):
    rng, task = np.random.default_rng(0), Parity()
    tokenizer = word_tokenizer(task.words())
    problems = [task.draw(rng, 12) for _ in range(64)]  # 63 tokens
    best = np.inf
    for _ in range(5):
        began = time.process_time()
        make_batch(
            encode(problems, tokenizer, arm), 88, thinking(8, 4) if arm == "thinking" else None, rng.integers(8, size=64)
        )
        best = min(best, time.process_time() - began)
    assert best < 0.05  # about 0.004 alone on one core; the bound leaves room for busy machines
