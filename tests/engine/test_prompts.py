"""Prompts as people have them: texts, lists, ranges and arrays; anything else is one error, and the engine goes on."""

import json
from collections import deque
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from detspec.engine.request import Request
from detspec.errors import InputError
from detspec.generation.loop import generate
from detspec.generation.score import score
from detspec.sampling_params import SamplingParams
from tests.engine.byte_model import BYTE_CFG, SCHEDULE, byte_params
from tests.engine.test_step import finish, make

IDS = [5, 6, 7]
SAMPLING = SamplingParams(max_tokens=3)
KINDS: list[Callable[[list[int]], Any]] = [
    list,
    tuple,
    deque,
    np.asarray,
    jnp.asarray,
    lambda ids: range(ids[0], ids[-1] + 1),
    lambda ids: np.asarray(ids, np.uint8),
    lambda ids: [np.int64(token) for token in ids],
    lambda ids: tuple(jnp.asarray(ids, jnp.int32)),
    lambda ids: np.asarray(ids, object),
]
NO_PROMPTS = [
    None,
    5,
    0.5,
    b"abc",
    {5: 1},
    {5, 6},
    object(),
    np.array(5),
    [],
    [[]],
    [[[5, 6]]],
    [[5.0]],
    [[True]],
    [["a"]],
    [None],
]
NO_PROMPTS += [
    np.zeros((1, 2)),
    np.zeros((1, 2, 2), int),
    [np.array([True])],
    [b"abc"],
    [{5: 1}],
    [97],
    [[97]],
    [[-1]],
    [[10**400]],
]


@pytest.mark.parametrize("kind", KINDS)
def test_prompt_of_any_kind_is_the_list_of_its_ids(kind):
    engine = make()
    expected = engine.generate([IDS], SAMPLING)
    found = engine.generate([kind(IDS)], SAMPLING)
    assert found == expected
    json.dumps(found[0].prompt_token_ids)
    updates = list(engine.stream(kind(IDS), SAMPLING))
    assert updates[-1].completion == expected[0]
    request = Request("0", kind(IDS), SAMPLING)
    assert request == engine.request(kind(IDS), SAMPLING) == engine.request(IDS, SAMPLING)
    assert {type(token) for token in request.prompt_token_ids} == {int}
    engine.add(request)
    assert finish(engine)["0"][-1].completion == expected[0]


@pytest.mark.parametrize("kind", [np.asarray, jnp.asarray, list, tuple])
def test_rows_of_an_array_are_prompts(kind):
    rows = [[5, 6], [7, 8], [9, 10]]
    assert make().generate(kind(rows), SAMPLING) == make().generate(rows, SAMPLING)


@pytest.mark.parametrize(
    "prompts", [5, None, [5, 6, 7], np.arange(3), jnp.arange(3), range(3), [5, [6]], [np.int64(5)]], ids=str
)
def test_ids_of_one_prompt_in_place_of_prompts_are_refused(prompts):
    with pytest.raises(InputError, match="prompts must be a text, or a list of texts and of lists of token ids, got"):
        make().generate(prompts, SAMPLING)


@pytest.mark.parametrize("prompts", NO_PROMPTS, ids=lambda value: str(value).partition(" at 0x")[0][:30])
def test_other_prompts_are_one_error_and_the_engine_goes_on(prompts):
    engine = make()
    if not isinstance(prompts, list) or prompts:  # no prompts have no completions
        with pytest.raises(InputError, match="prompt"):
            engine.generate(prompts, SAMPLING)
    with pytest.raises(InputError, match="prompt"):
        engine.request(prompts if not isinstance(prompts, list) or not prompts else prompts[0], SAMPLING)
    assert not engine.has_work
    assert len(engine.generate([IDS], SAMPLING)) == 1


def test_request_of_unsound_ids_is_refused_when_it_is_added():
    engine = make()
    for ids in ([True], [1.5], ["5"], [97], [-1], [2**63], []):
        with pytest.raises(InputError, match="the prompt"):
            engine.add(Request("a", ids, SAMPLING))
    with pytest.raises(InputError, match="must be a text, got 5"):
        engine.add(Request(5, IDS, SAMPLING))
    assert not engine.has_work


@pytest.mark.parametrize("sampling", [None, {}, 5, "a", [SAMPLING], [SAMPLING, None], [SAMPLING] * 3, SamplingParams], ids=str)
def test_sampling_that_is_none_is_refused(sampling):
    with pytest.raises(InputError, match="sampling"):
        make().generate([IDS, IDS], sampling)


def test_request_and_stream_without_sampling_parameters_are_refused():
    for ask in (make().request, lambda prompt, sampling: list(make().stream(prompt, sampling)), make().score):
        with pytest.raises(InputError, match="sampling must be SamplingParams, got"):
            ask(*([IDS], 1, {}) if ask.__name__ == "score" else (IDS, None))


def test_text_alone_is_one_prompt(one_row):
    assert one_row.generate("ab", SAMPLING) == one_row.generate(["ab"], SAMPLING)
    assert one_row.score("abc") == one_row.score(["abc"])


def test_texts_and_starts_of_any_kind_are_scored(one_row):
    expected = one_row.score([[5, 6, 7], [8, 9, 10]], [1, 2])
    for texts, starts in (
        (np.asarray([[5, 6, 7], [8, 9, 10]]), np.asarray([1, 2])),
        ([jnp.arange(5, 8), range(8, 11)], (np.int64(1), 2)),
    ):
        assert one_row.score(texts, starts) == expected
    assert one_row.score([IDS], np.int32(2)) == one_row.score([IDS], 2)
    for starts in (None, 0, 3, True, 1.0, "1", [None], [[1]], 10**5000):
        with pytest.raises(InputError, match="start"):
            one_row.score([IDS], starts)


@pytest.mark.parametrize("name", ["stop_token_ids", "logit_bias"])
def test_tokens_outside_the_vocabulary_are_refused_by_the_parameters_name(name):
    """The fake model has 97."""
    for token in (97, 2**31 - 1):
        value = {token: 1.0} if name == "logit_bias" else [5, token]
        with pytest.raises(InputError, match=f"parameter {name} names token id {token}; accepted are integers in 0 .. 96"):
            make().generate([IDS], SamplingParams(max_tokens=3, **{name: value}))
    assert make().request(IDS, SamplingParams(max_tokens=3, **{name: {96: 1.0} if name == "logit_bias" else [96]}))


def test_functional_core_refuses_what_is_no_prompt():
    for given in (None, IDS, np.arange(3), [None], ["a"]):
        with pytest.raises(InputError, match="prompt"):
            generate(byte_params(), BYTE_CFG, given, SAMPLING, schedule=SCHEDULE)
        with pytest.raises(InputError, match="text"):
            score(byte_params(), BYTE_CFG, given, schedule=SCHEDULE)
    with pytest.raises(InputError, match="there are no prompts"):
        generate(byte_params(), BYTE_CFG, [], SAMPLING, schedule=SCHEDULE)
