"""Generation arguments of the harness: mapped, or refused by name."""

import numpy as np
import pytest

from detspec.adapters.gen_kwargs import MAPPED, SAME, WITHOUT_EFFECT, sampling_of
from detspec.errors import InputError
from detspec.sampling_params import SamplingParams
from detspec.seeds import seed_of

GREEDY = {"do_sample": False, "temperature": 0.0, "max_gen_toks": 9, "until": ["\n\n"]}


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
