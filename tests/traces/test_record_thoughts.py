"""Traces of thoughts: what is recorded is what reading and generating commit, whichever source drafts."""

import dataclasses

import numpy as np
import pytest

from detspec.bench.bench import random_model
from detspec.checkpoint.load import Model
from detspec.config import ThinkingConfig
from detspec.errors import InputError
from detspec.generation.loop import generate
from detspec.sampling_params import SamplingParams
from detspec.state import GenState
from detspec.thinking.reading import reading_of
from detspec.traces.draw_thoughts import thought_figure
from detspec.traces.record_thoughts import run_thought_trace
from detspec.traces.thoughts import ThoughtText, ThoughtTrace
from tests.fakes import RANDOM_CFG

pytestmark = pytest.mark.slow

C, MAX_TOKENS = 8, 6
# 11 chunks are thought about, more than a pass of 64 rows holds; 3 tokens are left to the last chunk.
PROMPT = tuple(int(token) for token in np.random.default_rng(3).integers(0, RANDOM_CFG.vocab_size, 11 * C + 3))
END_ID = 166  # what random weights say first after the first chunk, so that its thought is trivial
SAMPLING = SamplingParams(temperature=0.8, seed=7, max_tokens=MAX_TOKENS)


@pytest.fixture(scope="module")
def model() -> Model:
    thinking = ThinkingConfig(chunk=C, in_layer=1, out_layer=2, max_thought=3, end_id=END_ID)
    return random_model(dataclasses.replace(RANDOM_CFG, thinking=thinking))


@pytest.fixture(scope="module")
def trivial(model: Model) -> ThoughtTrace:
    return run_thought_trace(model, PROMPT, SAMPLING)


@pytest.fixture(scope="module")
def sequential(model: Model) -> ThoughtTrace:
    return run_thought_trace(model, PROMPT, SAMPLING, think="self")


@pytest.fixture(scope="module")
def final(model: Model) -> GenState:
    """The request, read and answered in one program."""
    return generate(model.params, model.cfg, [PROMPT], SAMPLING)


def token_id(text: str) -> int:
    """Without a tokenizer token 12 reads <12>."""
    return int(text.strip("<>"))


def test_trace_agrees_with_the_state_of_the_reading(trivial: ThoughtTrace, final: GenState):
    reading = reading_of(final)
    counters = final.counters
    assert trivial.passes[-1].read == int(reading.read[0]) == 11
    assert trivial.passes[-1].length == 11 * C
    assert len(trivial.passes) == int(counters.num_read_passes[0])
    assert sum(one.accepted for one in trivial.passes) == int(counters.num_accepted_thoughts[0])
    assert sum(one.rejected for one in trivial.passes) == int(counters.num_rejected_thoughts[0])
    for thought, expected in zip(trivial.thoughts, reading.thoughts[0].tolist(), strict=False):
        ids = [token_id(token) for token in thought.tokens] + [END_ID] * thought.ended
        assert ids == [token for token in expected if token >= 0]


def test_trace_of_trivial_drafts_takes_a_round_for_every_thought(trivial: ThoughtTrace):
    assert trivial.thoughts[0] == ThoughtText()
    assert 5 < sum(not thought.trivial for thought in trivial.thoughts) < 11
    assert all(draft.trivial for one in trivial.passes for draft in one.drafts)
    assert sum(one.rejected for one in trivial.passes) == sum(not thought.trivial for thought in trivial.thoughts)
    assert trivial.passes[0].accepted == 1


def test_trace_of_good_drafts_commits_the_same_in_fewer_passes(trivial: ThoughtTrace, sequential: ThoughtTrace):
    assert sequential.thoughts == trivial.thoughts
    assert sequential.answer == trivial.answer
    assert len(sequential.passes) < len(trivial.passes)
    assert not all(draft.trivial for draft in sequential.passes[0].drafts)


@pytest.mark.parametrize("name", ["trivial", "sequential"])
def test_trace_passes_hold_what_fits_and_commit_by_index(name: str, request: pytest.FixtureRequest):
    trace: ThoughtTrace = request.getfixturevalue(name)
    for one in trace.passes:
        assert len(one.drafts) == min(64 // C, 11 - one.first)
        assert one.drafts[: one.accepted] == one.thoughts[: one.accepted]
        assert one.length == one.read * C
        if one.rejected:
            assert one.drafts[one.accepted] != one.thoughts[one.accepted]
    assert [token_id(token) for chunk in trace.chunks for token in chunk] == list(PROMPT)
    assert [len(chunk) for chunk in trace.chunks] == [C] * 11 + [3]


def test_trace_answer_is_what_generate_commits(trivial: ThoughtTrace, final: GenState):
    assert [token_id(token) for token in trivial.answer] == final.tokens[0, len(PROMPT) : int(final.committed[0])].tolist()


def test_trace_answer_without_thoughts_is_another(trivial: ThoughtTrace, model: Model):
    plain = generate(model.params, model.cfg, [PROMPT], dataclasses.replace(SAMPLING, thinking=False))
    assert [token_id(token) for token in trivial.answer] != plain.tokens[0, len(PROMPT) : int(plain.committed[0])].tolist()


def test_trace_is_drawn(trivial: ThoughtTrace):
    assert "✗" in [text.get_text() for text in thought_figure(trivial).axes[0].texts]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"prompt": PROMPT[:C]}, "has 8 tokens, .* at least 9 tokens"),
        ({"prompt": ()}, "the prompt is empty"),
        ({"prompt": "text"}, "no tokenizer"),
        ({"prompt": (*PROMPT, 999)}, "token id 999"),
        ({"think": "perfect"}, "called 'perfect'"),
        ({"sampling": SamplingParams(max_tokens=5000)}, "the model was made for 2048"),
    ],
)
def test_unsound_request_is_refused(model: Model, changes: dict, message: str):
    arguments = {"prompt": PROMPT, "sampling": SAMPLING, **changes}
    with pytest.raises(InputError, match=message):
        run_thought_trace(model, arguments.pop("prompt"), arguments.pop("sampling"), **arguments)


def test_model_that_does_not_think_is_refused():
    with pytest.raises(InputError, match="no thinker and no compressor"):
        run_thought_trace(random_model(RANDOM_CFG), PROMPT, SAMPLING)
