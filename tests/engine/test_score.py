"""Given texts are scored with the bits of generation, whatever they share, wait for or run next to."""

import dataclasses

import numpy as np
import pytest

import detspec as ds
from detspec.engine.request import Completion, Request
from detspec.errors import InputError
from detspec.sampling_params import SamplingParams
from tests.engine.byte_model import broken_params, make_engine, without_tokenizer
from tests.engine.scored import PROMPTS, SAMPLING, SCORE, bits, texts_of


def test_stop_string_does_not_end_a_text_that_is_given(three_rows):
    texts = ["abcdefg", "xyz"]
    plain = three_rows.score(texts, 2)
    for given, expected in zip(three_rows.score(texts, 2, SamplingParams(logprobs=1, stop=["de", "z"])), plain, strict=True):
        assert (given.text, given.finish_reason, given.token_ids) == (expected.text, "given", expected.token_ids)
    assert [c.text for c in plain] == ["cdefg", "z"]


def test_whole_texts_are_scored_as_the_functional_core_does(written, model, three_rows):
    texts, _ = texts_of(written)
    texts = [text for text in texts if len(text) > 1]
    for scored, expected in zip(
        three_rows.score(texts), ds.score(model.params, model.cfg, texts, schedule=three_rows.schedule), strict=True
    ):
        assert np.asarray(scored.logprobs, np.float32).tobytes() == expected[1:].tobytes()
        assert scored.top_logprobs[0][0][1] >= scored.logprobs[0]


@pytest.mark.parametrize("number", [4, 5, 33])
def test_equal_texts_have_one_score_however_many_there_are(written, eight_rows, number):
    """A harness had -21.84375 for four equal requests and another value for a fifth."""
    texts, starts = texts_of(written[4:5])
    found = eight_rows.score(texts * number, starts * number)
    assert set(map(str, bits(found))) == {str(bits(written[4:5])[0])}


def test_choices_of_one_question_read_what_they_share_once(model, monkeypatch):
    """A context of 40 tokens and four choices of 2: two whole pages of 16, and 7 more tokens that are copied."""
    engine = make_engine(model, 4, "none")
    context = list(range(40))
    texts = [[*context, 50 + i, 60 + i] for i in range(4)]
    read: list[int] = []
    asked_about: list[int] = []
    replay = engine.device.replay

    def counted(placement, given, asked, **how):
        if not asked.choose:  # else it is a certificate
            read.extend(len(text.tokens) - 1 - text.start for text in given.values())
            asked_about.extend(len(text.tokens) - text.wanted_from for text in given.values())
        return replay(placement, given, asked, **how)

    monkeypatch.setattr(engine.device, "replay", counted)
    shared = engine.score(texts, 40)
    assert read == [41, 2, 2, 2]
    assert asked_about == [2, 2, 2, 2]
    apart = make_engine(model, 4, "none", prefix_sharing=False)
    assert bits(apart.score(texts, 40)) == bits(shared)


@pytest.mark.slow
def test_scoring_next_to_generation_preemption_and_aborts_moves_no_bit(written, model):
    """Four pages of 16 for three places, so that what decodes is preempted again and again."""
    engine = make_engine(model, 3, "self", num_pages=4)
    texts, starts = texts_of(written)
    for number, (prompt, sampling) in enumerate(zip(PROMPTS, SAMPLING, strict=True)):
        text, start = texts[number], starts[number]
        engine.add(engine.request(prompt, sampling, id=f"write {number}"), stream=number % 2 == 1)
        engine.add(Request(f"score {number}", tuple(text[:start]), SCORE, given_token_ids=tuple(text[start:])))
        engine.add(Request(f"drop {number}", tuple(text[:start]), SCORE, given_token_ids=tuple(text[start:])))
        engine.abort(f"drop {number}") if number % 2 else None
    ended: dict[str, Completion] = {}
    while engine.has_work:
        ended |= {update.request.id: update.completion for update in engine.step() if update.completion is not None}
    assert bits([ended[f"write {i}"] for i in range(8)]) == bits(written)
    assert bits([ended[f"score {i}"] for i in range(8)]) == bits(written)
    assert [ended[f"drop {i}"].finish_reason for i in range(8)] == ["given", "abort"] * 4
    assert engine.num_preemptions > 0
    assert engine.num_pages_held == 0


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["tempered", "processed"])
def test_scores_in_other_modes_have_the_bits_that_generation_reports(one_row, three_rows, mode):
    asked = [dataclasses.replace(s, logprobs_mode=mode, top_k=40, frequency_penalty=0.3) for s in SAMPLING]
    completions = one_row.generate(PROMPTS, asked)
    for completion, sampling in zip(completions, asked, strict=True):
        (scored,) = three_rows.score(*texts_of([completion]), sampling)
        assert bits([scored]) == bits([completion])
    raw = three_rows.score(*texts_of(completions))
    differs = [bits([a]) != bits([b]) for a, b in zip(raw, completions, strict=True)]
    assert differs == [s.temperature > 0 or mode == "processed" for s in SAMPLING]


def test_texts_that_overflow_end_with_an_error_and_leave_others_alone(written):
    engine = make_engine(without_tokenizer(broken_params(7)), 3, "none")
    scored = engine.score([[1, 2, 3], [1, 7, 3], [1, 2, 3]], 1)
    assert [c.finish_reason for c in scored] == ["given", "error", "given"]
    assert bits(scored[:1]) == bits(scored[2:])


@pytest.mark.parametrize(
    ("texts", "starts", "changes", "message"),
    [
        ([[1, 2]], 2, {}, r"text 0 has 2 tokens and starts at 2: accepted are starts in 1 .. 1"),
        ([[1, 2], [3]], 1, {}, r"text 1 has 1 tokens"),
        ([[1, 2]], [1, 1], {}, r"1 texts but 2 starts"),
        ([[1, 5000]], 1, {}, r"the given text holds token id 5000; accepted are integers in 0 .. 2047"),
        ([[1] * 65], 1, {}, r"together more than the cache's max_len of 64"),
        ([[1, 2]], 1, {"n": 2}, r"leave out n, prompt_logprobs and thinking"),
        ([[1, 2]], 1, {"prompt_logprobs": 0}, r"leave out n, prompt_logprobs and thinking"),
    ],
)
def test_what_cannot_be_scored_is_refused_by_name(three_rows, texts, starts, changes, message):
    with pytest.raises(InputError, match=message):
        three_rows.score(texts, starts, dataclasses.replace(SCORE, **changes))
    assert not three_rows.has_work
