"""Generation arguments of the harness: mapped, or refused by name."""

import pytest

from detspec.adapters.gen_kwargs import sampling_of
from detspec.errors import InputError
from detspec.sampling_params import SamplingParams
from detspec.seeds import seed_of

GREEDY = {"do_sample": False, "temperature": 0.0, "max_gen_toks": 9, "until": ["\n\n"]}


def mapped(given: dict, occurrence: int = 0) -> SamplingParams:
    return sampling_of(given, "prompt", occurrence, seed=3, deterministic=True)


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
