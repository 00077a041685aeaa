"""Arguments of the harness, of its model and of generations: mapped, or refused by name."""

import numpy as np
import pytest

from detspec.adapters.eval_options import MAPPED, SAME, WITHOUT_EFFECT, EvalOptions, load_engine, options_of, sampling_of
from detspec.errors import InputError
from detspec.sampling_params import SamplingParams
from detspec.seeds import seed_of
from tests.engine.byte_model import byte_params, without_tokenizer

GREEDY = {"do_sample": False, "temperature": 0.0, "max_gen_toks": 9, "until": ["\n\n"]}


@pytest.mark.parametrize(
    ("batch_size", "max_batch_size", "arguments", "expected"),
    [("auto", None, {}, 32), ("auto:4", 16, {}, 16), (None, None, {"max_requests": 5}, 5), ("8", 16, {}, 8), (1, None, {}, 1)],
)
def test_batch_size_is_the_number_of_requests(batch_size, max_batch_size, arguments, expected):
    assert options_of(arguments, batch_size=batch_size, max_batch_size=max_batch_size) == EvalOptions(max_requests=expected)


@pytest.mark.parametrize(
    ("arguments", "batch_size", "message"),
    [
        ({"tensor_parallel_size": 2}, "auto", "no argument 'tensor_parallel_size'; accepted are pretrained, path, max_len"),
        ({"max_requests": 8}, 4, r"batch_size \(4\) and max_requests \(8\) are the same"),
        ({}, "many", "batch_size must be \"auto\" or a number of requests, got 'many'"),
        ({"deterministic": 1}, "auto", "deterministic must be of type bool, got 1"),
        ({"seed": "a"}, "auto", "seed must be of type int, got 'a'"),
        ({"max_gen_toks": 0.5}, "auto", "max_gen_toks must be of type int, got 0.5"),
    ],
)
def test_what_cannot_be_is_refused_by_name(arguments, batch_size, message):
    with pytest.raises(InputError, match=message):
        options_of(arguments, batch_size=batch_size, max_batch_size=None)


def test_engine_has_the_model_and_the_lengths_that_were_asked_for():
    model = without_tokenizer(byte_params())
    engine = load_engine(model, EvalOptions(max_requests=3, dtype="float32", cache_dtype="bfloat16"))
    assert (engine.config.max_requests, engine.config.max_len) == (3, model.cfg.max_position)
    assert (engine.model.cfg.dtype, engine.schedule.numerics.cache_dtype) == ("float32", "bfloat16")
    assert engine.model.digest != model.digest


def test_unknown_dtype_is_refused():
    with pytest.raises(InputError, match="dtype"):
        load_engine(without_tokenizer(byte_params()), EvalOptions(dtype="float8"))


def mapped(given: dict, occurrence: int = 0) -> SamplingParams:
    return sampling_of(given, "prompt", occurrence, seed=3, max_gen_toks=256, deterministic=True)


def test_greedy_arguments_are_mapped():
    assert mapped(GREEDY) == SamplingParams(max_tokens=9, seed=seed_of(3, "prompt", 0), stop=("\n\n",))


def test_arguments_of_our_names_are_taken_as_they_are():
    given = {**GREEDY, "do_sample": True, "temperature": 0.7, "top_p": 0.9, "top_k": 5, "min_p": 0.1, "num_beams": 1, "seed": 8}
    expected = SamplingParams(
        max_tokens=9, temperature=0.7, top_p=0.9, top_k=5, min_p=0.1, seed=seed_of(8, "prompt", 2), stop=("\n\n",)
    )
    assert mapped(given, 2) == expected


def test_sampling_without_a_temperature_is_at_one_and_greedy_stays_greedy():
    assert mapped({"do_sample": True, "max_gen_toks": 1}).temperature == 1.0
    assert mapped({"do_sample": False, "max_gen_toks": 1, "temperature": 0.7}).temperature == 0.0
    assert mapped({"do_sample": True, "max_gen_toks": 1, "temperature": 0.0}).temperature == 0.0


def test_stop_strings_come_from_both_names_without_empty_ones():
    assert mapped({**GREEDY, "until": ["a", "", "b"], "stop": "a"}).stop == ("a", "b")


def test_arguments_that_are_none_are_not_given():
    assert mapped({**GREEDY, "beam_width": None, "top_p": None, "until": None}).stop == ()
    nothing = dict.fromkeys((*MAPPED, *SAME, *WITHOUT_EFFECT))
    assert mapped(nothing) == mapped({}) == SamplingParams(max_tokens=256, seed=seed_of(3, "prompt", 0))


def test_temperature_alone_samples():
    assert mapped({"temperature": 0.7}).temperature == 0.7
    assert mapped({"temperature": 0.7, "do_sample": None}).temperature == 0.7


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"beam_width": 3}, "does not take the generation argument 'beam_width'; accepted are do_sample, temperature"),
        ({"num_beams": 10}, "generation argument num_beams must be 1, got 10"),
        ({"until": 5}, "generation argument until must be a text or a list of texts, got 5"),
        ({"stop": ["a", 1]}, r"generation argument stop must be a text or a list of texts, got \['a', 1\]"),
        ({"min_p": 2}, "sampling parameter min_p must be"),
    ],
)
def test_other_arguments_are_refused_by_name(change, message):
    with pytest.raises(InputError, match=message):
        mapped({**GREEDY, **change})


LISTS = ("until", "stop", "stop_token_ids", "logit_bias")
BOOLS = ("do_sample", "ignore_eos", "thinking")
WRONG = {
    **{name: ("x", [1], {}, True) for name in (*MAPPED, *SAME, *WITHOUT_EFFECT)},
    **dict.fromkeys(LISTS, (1, True, [{}], 1.5)),
    **dict.fromkeys(BOOLS, ("x", [1], 1, 0.0)),
    **dict.fromkeys(("seed", "max_gen_toks", "num_beams", "top_k", "min_tokens"), ("x", [1], {}, True, 1.5)),
}


@pytest.mark.parametrize("name", WRONG)
def test_values_of_another_kind_are_refused_by_name_whether_texts_are_sampled_or_not(name):
    for value in WRONG[name]:
        for do_sample in (True, False):
            with pytest.raises(InputError, match=f"(argument|parameter) {name} must"):
                mapped({**GREEDY, "do_sample": do_sample, name: value})


def test_numbers_that_are_none_of_tokens_are_refused_and_those_of_numpy_taken():
    with pytest.raises(InputError, match="max_gen_toks must be an integer of at least 1, got 0"):
        mapped({**GREEDY, "max_gen_toks": 0})
    assert mapped({**GREEDY, "max_gen_toks": np.int64(9), "seed": np.int32(5)}) == mapped({**GREEDY, "seed": 5})
