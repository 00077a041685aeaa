"""The engine gives every deterministic request the bits of the functional core, whatever else is in the batch."""

import dataclasses
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from detspec.checkpoint.digest import digest_model
from detspec.checkpoint.load import Model
from detspec.checkpoint.tokenizer import Tokenizer
from detspec.draft.given import NONE
from detspec.draft.source import Drafter
from detspec.engine.engine import Engine
from detspec.engine.engine_config import EngineConfig
from detspec.errors import InputError
from detspec.generation.loop import generate
from detspec.sampling_params import SamplingParams
from detspec.state import STOP
from tests.engine.byte_model import (
    BYTE_CFG,
    SCHEDULE,
    byte_params,
    byte_tokenizer,
    counting_params,
    facts,
    make_engine,
    some_prompts,
    some_sampling,
    without_tokenizer,
)

pytestmark = pytest.mark.optimised

PROMPTS, SAMPLING = some_prompts(), some_sampling()


def test_generate_equals_the_functional_core_bitwise(each_alone):
    arrays = [np.asarray(prompt) for prompt in PROMPTS]
    state = generate(byte_params(), BYTE_CFG, arrays, SAMPLING, schedule=SCHEDULE, drafter=Drafter(NONE))
    for b, prompt in enumerate(PROMPTS):
        new = slice(len(prompt), int(state.committed[b]))
        reason = "stop" if int(state.finish[b]) == STOP else "length"
        logprobs = np.asarray(state.logprobs[b, new])
        assert (tuple(state.tokens[b, new].tolist()), logprobs.tobytes(), reason) == each_alone[b]


@pytest.mark.parametrize("given", ["tiny_python", {"embed": 0}, None])
def test_engine_of_what_is_no_model_is_refused(given):
    with pytest.raises(InputError, match=r"takes a model, as detspec\.load gives it, got .*: load it first"):
        Engine(given)


def test_digest_in_another_batch_is_the_same_and_names_the_sampling(one_row, three_rows):
    a, b = (engine.generate(PROMPTS[:2], SAMPLING[:2]) for engine in (one_row, three_rows))
    assert [c.digest for c in a] == [c.digest for c in b]
    other = three_rows.generate(PROMPTS[:1], dataclasses.replace(SAMPLING[0], seed=99))[0]
    assert facts(other) == facts(a[0])  # greedy
    assert other.digest != a[0].digest


def test_self_draft_counts_what_it_did(three_rows):
    stats = three_rows.generate(PROMPTS[:1], SamplingParams(max_tokens=12))[0].stats
    assert stats.num_verify_passes >= 3  # four tokens a window at best
    assert 0 < stats.num_accepted_draft_tokens <= stats.num_draft_tokens
    assert stats.num_accepted_draft_tokens + stats.num_verify_passes >= 12
    assert 0 < stats.draft_acceptance_rate <= 1
    assert 1 < stats.mean_acceptance_length <= 4


def test_stop_token_ends_the_text_and_is_kept(one_row, three_rows, each_alone):
    tokens = each_alone[0][0]
    stop = tokens[4]
    sampling = dataclasses.replace(SAMPLING[0], stop_token_ids=(stop,))
    expected = tokens[: tokens.index(stop) + 1]
    for engine in (one_row, three_rows):
        completion = engine.generate(PROMPTS[:1], sampling)[0]
        assert (completion.token_ids, completion.finish_reason) == (expected, "stop")


# Streams --------------------------------------------------------------------------------------------------------------------


CHARACTERS = "é€😀abcdefg"  # 2 + 3 + 4 + 7 bytes, all of them different


@pytest.fixture(scope="module")
def counting(tmp_path_factory) -> Engine:
    """Token `t + 1` follows token `t`, and the tokens are the bytes of CHARACTERS, so the text goes round in it."""
    letters = [
        byte_tokenizer().id_to_token(byte_tokenizer().encode(c).ids[i]) for c in CHARACTERS for i in range(len(c.encode()))
    ]
    path = tmp_path_factory.mktemp("counting") / "tokenizer.json"
    byte_tokenizer(letters).save(str(path))
    model = Model(BYTE_CFG, counting_params(), Tokenizer(path), (), digest_model(BYTE_CFG, counting_params()))
    return make_engine(model, 1, "none", segment_steps=1)  # by the programs of `one_row`


def test_stream_never_cuts_a_character(counting):
    pieces = list(counting.stream("g", SamplingParams(max_tokens=32)))
    assert "".join(piece.text for piece in pieces) == CHARACTERS * 2
    assert all("\ufffd" not in piece.text for piece in pieces)
    assert any(not piece.text for piece in pieces)  # some windows end inside a character


def test_stream_that_ends_inside_a_character_says_so(counting):
    pieces = list(counting.stream("g", SamplingParams(max_tokens=4)))  # é and two of the three bytes of €
    assert "".join(piece.text for piece in pieces) == "é\ufffd"
    assert counting.generate(["g"], SamplingParams(max_tokens=4))[0].text == "é\ufffd"


def test_stream_abandoned_half_way_leaves_the_engine_usable(one_row, each_alone):
    stream = one_row.stream("def ", SamplingParams(max_tokens=20))
    next(stream)
    assert facts(one_row.generate(PROMPTS[:1], SAMPLING[0])[0]) == each_alone[0]
    stream.close()
    assert facts(one_row.generate(PROMPTS[:1], SAMPLING[0])[0]) == each_alone[0]


# A function keeps the names of the script until modules have lost theirs.
LEFT_HALF_READ = """
import detspec as ds
def show(what): print(what)
model = ds.load()
engine = ds.Engine(model)
it = iter(engine.stream("def fib(n):", ds.SamplingParams(max_tokens=8)))
next(it)
show("read")
"""


@pytest.mark.slow
@pytest.mark.parametrize(("first", "says"), [("", False), ("import sys; sys.is_finalizing = lambda: False", True)])
def test_stream_left_half_read_says_nothing_as_the_interpreter_ends(first, says):
    """The control, which does not know that it ends, looks at modules without names."""
    ended = subprocess.run([sys.executable, "-c", first + LEFT_HALF_READ], capture_output=True, text=True, check=True)
    assert ended.stdout == "read\n"
    assert ("TypeError" in ended.stderr) == says


# What is refused ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        *(
            ({field: 0}, f"EngineConfig.{field} must be an integer of at least 1, got 0")
            for field in ("max_requests", "max_len")
        ),
        *(({field: -1}, f"{field} must be") for field in ("max_stop_ids", "max_logit_bias", "segment_steps")),
        ({"num_speculative_tokens": -1}, "num_speculative_tokens must be"),
        ({"max_requests": True}, "max_requests must be an integer of at least 1, got True"),
        ({"max_requests": 2.0}, "max_requests must be an integer of at least 1, got 2.0"),
        ({"method": None}, r'method must be "auto" or the name of a draft source, or different names of several, got None'),
        ({"thoughts": "magic"}, r"thoughts must be one of .*, got 'magic'"),
        ({"num_speculative_tokens": 4}, r"one less than a power of two .*, got 4"),
        ({"max_len": 8}, "a window of 16 tokens is larger than the cache's max_len"),
    ],
)
def test_engine_config_that_cannot_be_is_refused(changes, message):
    with pytest.raises(InputError, match=message):
        EngineConfig(**changes)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (EngineConfig(max_len=129), "max_len 129 exceeds the 128 positions"),
        (EngineConfig(max_len=128, method="magic"), "method must be one of auto, none, ngram, int8, self, got 'magic'"),
        (EngineConfig(max_len=128, method=("none", "magic")), "method must be one of auto, none, .*, got 'magic'"),
        (EngineConfig(max_len=32, schedule=SCHEDULE.with_budget(64, 64)), r"window \(64\) is more than"),
    ],
)
def test_engine_of_a_config_that_does_not_suit_the_model_is_refused(config, message):
    with pytest.raises(InputError, match=message):
        Engine(without_tokenizer(byte_params()), config)


@pytest.mark.parametrize(
    ("prompt", "sampling", "message"),
    [
        ([], {}, "the prompt is empty"),
        ("", {}, "the prompt is empty"),
        ([2048], {}, r"token id 2048; accepted are integers in 0 \.\. 2047"),
        ([-1], {}, "token id -1"),
        ([True], {}, "token id True"),
        ([1.0], {}, "token id 1.0"),
        ([1] * 60, {"max_tokens": 5}, "60 tokens and max_tokens is 5, together more than the cache's max_len of 64"),
        ([1], {"stop_token_ids": [3, 2048]}, r"stop_token_ids names token id 2048; accepted are integers in 0 \.\. 2047"),
        ([1], {"logit_bias": {2048: 1.0}}, r"logit_bias names token id 2048; accepted are integers in 0 \.\. 2047"),
    ],
)
def test_request_that_cannot_be_is_refused(prompt, sampling, message, one_row):
    with pytest.raises(InputError, match=message):
        one_row.request(prompt, SamplingParams(**{"max_tokens": 4, **sampling}))


def test_request_that_just_fits_is_taken(one_row):
    assert len(one_row.request([1] * 60, SamplingParams(max_tokens=4)).prompt_token_ids) == 60


def test_text_without_a_tokenizer_is_refused():
    engine = Engine(without_tokenizer(byte_params()), EngineConfig(max_requests=1, max_len=64, schedule=SCHEDULE))
    with pytest.raises(InputError, match=r"no tokenizer\.json, so prompts must be token ids"):
        engine.request("def ", SamplingParams())


def test_number_of_sampling_parameters_other_than_prompts_is_refused(one_row):
    with pytest.raises(InputError, match="2 prompts but 1 sampling parameters"):
        one_row.generate(PROMPTS[:2], SAMPLING[:1])


def test_no_prompts_give_no_completions(one_row):
    assert one_row.generate([], SamplingParams()) == []


def test_state_after_runs_holds_nobody(one_row):
    one_row.generate(PROMPTS[:1], SAMPLING[0])
    assert not bool(jnp.any(one_row.device.state.live))


@pytest.mark.parametrize("is_bound", [True, False])
def test_weights_and_state_are_bound_to_a_device_whatever_the_given_weights_are(is_bound):
    """Programs of bound and of free arrays differ: one that began otherwise would be compiled twice."""
    params = jax.device_put(byte_params(), jax.local_devices()[0] if is_bound else None)
    engine = Engine(Model(BYTE_CFG, params, None, (), ""), EngineConfig(max_requests=1, max_len=16, schedule=SCHEDULE))
    assert {leaf.committed for leaf in jax.tree.leaves((engine.model.params, engine.device.state))} == {True}
