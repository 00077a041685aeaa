"""Texts of integer models are those of the definition, token by token and bit by bit, however an engine comes to them.

The oracle reads a text at once, alone. Engines write it alone, in a crowd, in reverse, in drafts, preempted and with shared
pages. There is no certificate: nothing of all that can matter, and programs need no optimisation to show it. Compiling makes
these tests slow.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from detspec.engine.engine import Engine
from detspec.errors import InputError
from detspec.integer.spec import LIMIT, Text
from detspec.model.dense import with_fields
from detspec.sampling_params import SamplingParams
from tests.fakes import random_model
from tests.integer.models import (
    CFGS,
    FAMILIES,
    MODES,
    PROMPTS,
    SAMPLING,
    SCHEDULE,
    bits,
    both,
    defined,
    make_engine,
    of_integers,
    small,
)

pytestmark = pytest.mark.slow
MAIN = "qk_norm, slides, linear"
BROKEN = 95  # a token whose embedding has left its range


@pytest.fixture(scope="module")
def few_pages() -> Engine:
    """Four pages for three places, so that texts are preempted."""
    return make_engine(small(MAIN).model, num_pages=4)


@pytest.fixture(scope="module")
def written(few_pages: Engine) -> list:
    return bits(few_pages.generate(PROMPTS, SAMPLING))


@pytest.mark.parametrize("name", [name for name in (*CFGS, *FAMILIES) if name != MAIN])
def test_texts_of_model_are_those_of_the_definition(name: str):
    found = bits(make_engine(small(name).model).generate(PROMPTS, SAMPLING))
    for prompt, sampling, (tokens, logprobs) in zip(PROMPTS, SAMPLING, found, strict=True):
        assert (tokens, logprobs) == defined(small(name), prompt, tokens, sampling), sampling


@pytest.mark.parametrize(
    ("name", "changes"), [*((name, {"schedule": None}) for name in (*CFGS, *FAMILIES)), (MAIN, {}), ("gemma3", {})]
)
def test_texts_with_activations_of_8_bits_are_those_of_the_definition(name: str, changes: dict, cpu_kernels):
    """By kernels in C and by XLA's operations; alone they have the bits that they have together."""
    of = small(name, 8)
    engine = make_engine(of.model, **changes)
    found = bits(engine.generate(PROMPTS, SAMPLING))
    for prompt, sampling, (tokens, logprobs) in zip(PROMPTS, SAMPLING, found, strict=True):
        assert (tokens, logprobs) == defined(of, prompt, tokens, sampling), sampling
    assert [bits(engine.generate([p], [s]))[0] for p, s in list(zip(PROMPTS, SAMPLING, strict=True))[:3]] == found[:3]
    assert found[0] != defined(small(name), PROMPTS[0], found[0][0], SAMPLING[0]), "the control: activations of 15 bits"


def test_texts_of_model_with_few_pages_are_those_of_the_definition(written, few_pages):
    assert few_pages.num_preemptions > 0
    for prompt, sampling, (tokens, logprobs) in zip(PROMPTS, SAMPLING, written, strict=True):
        assert (tokens, logprobs) == defined(small(MAIN), prompt, tokens, sampling), sampling
    assert len(set(written)) == len(written)


def test_texts_alone_in_reverse_and_again_have_the_same_bits(written, few_pages):
    assert [bits(few_pages.generate([p], [s]))[0] for p, s in zip(PROMPTS, SAMPLING, strict=True)] == written
    assert bits(few_pages.generate(PROMPTS[::-1], SAMPLING[::-1]))[::-1] == written


def test_texts_alone_among_seven_and_among_32_have_the_same_bits():
    """Seven fill no program: those of 8 places run, with one place empty."""
    prompts = [PROMPTS[i % len(PROMPTS)] for i in range(32)]
    sampling = [dataclasses.replace(SAMPLING[i % len(SAMPLING)], seed=i) for i in range(32)]
    engine = make_engine(small(MAIN).model, max_requests=32)
    of_32 = bits(engine.generate(prompts, sampling))
    of_seven = bits(engine.generate(prompts[:7], sampling[:7]))
    alone = [bits(engine.generate([p], [s]))[0] for p, s in zip(prompts[:7], sampling[:7], strict=True)]
    assert alone == of_seven == of_32[:7]
    assert alone[6] == defined(small(MAIN), prompts[6], alone[6][0], sampling[6])
    assert of_32[9] != of_32[1], "the control: another seed"


def test_texts_in_other_pages_windows_and_crowds_with_drafts_have_the_same_bits(written):
    engine = make_engine(
        small(MAIN).model,
        method="ngram",
        max_requests=8,
        prompt_lookup_min=1,
        schedule=SCHEDULE.with_numerics(page=32).with_budget(32, 8),
        prefix_sharing=False,
    )
    twice = engine.generate(PROMPTS * 2, SAMPLING * 2)
    assert bits(twice) == written * 2
    assert max(c.stats.mean_acceptance_length for c in twice) > 1


def test_texts_in_the_pages_of_a_gpu_have_the_same_bits(written):
    """Values are turned in their pages. Products are XLA's: the simulator of the kernel is slow."""
    numerics = {"implementation": "pallas_gpu", "interpret": True, "page": 32}
    engine = make_engine(small(MAIN).model, schedule=SCHEDULE.with_numerics(**numerics))
    pools = engine.device.state.cache.pools[0]
    assert (pools.k.values.shape[2:], pools.v.values.shape[2:]) == ((32, 16), (16, 32))
    assert bits(engine.generate(PROMPTS, SAMPLING)) == written


def test_given_texts_are_scored_with_the_bits_of_generation(written, few_pages):
    for mode in MODES:
        sampling = [dataclasses.replace(s, logprobs_mode=mode, stop_token_ids=(), min_tokens=0) for s in SAMPLING]
        texts = [[*prompt, *tokens] for prompt, (tokens, _) in zip(PROMPTS, written, strict=True)]
        for text, prompt, asked in zip(texts, PROMPTS, sampling, strict=True):
            (scored,) = few_pages.score([text], len(prompt), asked)
            expected = defined(small(MAIN), prompt, text[len(prompt) :], asked)
            assert bits([scored])[0][1] == expected[1], (mode, asked)


def test_text_that_leaves_its_range_ends_with_an_error_alone(written, few_pages):
    params = small(MAIN).model.params
    broken = of_integers(small(MAIN).model.cfg, {**params, "embed": params["embed"].at[BROKEN, 3].set(LIMIT)})
    logits = Text(broken.weights, broken.shape).read([1, BROKEN, 2])
    assert (logits[1:] == LIMIT).all()
    assert (np.abs(logits[0]) < LIMIT).all()
    engine = make_engine(broken.model, num_pages=4)
    good = [(p, s) for p, s in zip(PROMPTS, SAMPLING, strict=True) if BROKEN not in p]
    alone = bits(engine.generate(*map(list, zip(*good, strict=True))))
    mixed = [([5, BROKEN, 6], SAMPLING[1]), *good[:2], ([BROKEN] * 20, SAMPLING[4]), *good[2:], ([5, 6, BROKEN], SAMPLING[0])]
    found = engine.generate(*map(list, zip(*mixed, strict=True)))
    assert [i for i, c in enumerate(found) if c.finish_reason == "error"] == [0, 3, len(mixed) - 1]
    assert [c.token_ids for c in found if c.finish_reason == "error"] == [()] * 3
    assert bits([c for c in found if c.finish_reason != "error"]) == alone


def test_control_of_another_weight_changes_bits(written, few_pages):
    """A last bit of one weight is seen, so equal bits mean equal sums."""
    params = small(MAIN).model.params
    other = params["embed"].at[PROMPTS[0][0]].add(1)
    changed = of_integers(small(MAIN).model.cfg, {**params, "embed": other})
    found = make_engine(changed.model, num_pages=4).generate(PROMPTS[:1], SAMPLING[:1])
    assert bits(found) != written[:1]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"o_bias": True}, "bias of the attention's output"),
        ({"activation": "gelu"}, "activation"),
        ({"attn_softcap": 0.01}, "soft caps of scores below 0.0625 or above 1024"),
        ({"parallel": True}, "parallel"),
        ({"logit_softcap": 2000.0}, "soft caps of logits"),
        ({"qk_norm": True, "qk_norm_of": "rotated"}, "rotated"),
        ({"vocab_size": 524_288}, "vocabularies larger than 524160"),
        ({"norm_eps": 0.5}, "epsilon of 0.5"),
    ],
)
def test_what_integer_models_do_not_have_is_refused_by_name(changes: dict, message: str):
    cfg = with_fields(CFGS["plain, tied"], **changes)
    with pytest.raises(InputError, match=message):
        both(cfg, jax.tree.map(jnp.zeros_like, random_model(CFGS["plain, tied"])))


def test_seed_and_position_alone_decide_noise(few_pages):
    sampling = SamplingParams(max_tokens=4, temperature=1.0, seed=3, n=3)
    samples = few_pages.generate([PROMPTS[0]], sampling)
    for i, sample in enumerate(samples):
        (single,) = few_pages.generate([PROMPTS[0]], dataclasses.replace(sampling, n=1, seed=3 + i))
        assert bits([sample]) == bits([single])
