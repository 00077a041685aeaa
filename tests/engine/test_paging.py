"""Pages and what is done with them: prefixes that are there already, samples, stop strings, other weights."""

import contextlib
import dataclasses
from collections.abc import Iterator

import jax
import numpy as np
import pytest

from detspec.engine.engine import Engine
from detspec.engine.request import Completion
from detspec.errors import InputError
from detspec.generation.score import score
from detspec.model.params import init_params
from detspec.sampling_params import SamplingParams
from tests.engine.byte_model import BYTE_CFG, SCHEDULE, byte_params, facts, make_engine
from tests.engine.mixed_requests import PREFIX, run


@contextlib.contextmanager
def lengths_put(engine: Engine) -> Iterator[list[int]]:
    """How many positions the cache holds of each request that enters a place."""
    lengths: list[int] = []
    put = engine.device.put
    engine.device.put = lambda entries: lengths.extend(entry.length for entry in entries) or put(entries)
    yield lengths
    del engine.device.put


def test_known_prefix_is_not_computed_again(eight_rows):
    """The second time only what lies behind the last whole page is caught up with, and the same bits come out."""
    prompt, sampling = list(range(300, 345)), SamplingParams(max_tokens=4)
    first = eight_rows.generate([prompt], sampling)
    with lengths_put(eight_rows) as lengths:
        again = eight_rows.generate([prompt], sampling)
    assert [facts(c) for c in again] == [facts(c) for c in first]
    assert lengths == [44]  # all but the last token: two whole pages and the copy of a partial one


def test_samples_equal_requests_of_their_seeds(eight_rows, three_rows):
    prompt, sampling = PREFIX, SamplingParams(max_tokens=8, temperature=1.0, seed=2**32 - 2, n=4)
    samples = eight_rows.generate([prompt, [5]], sampling)
    assert [(c.id, c.index) for c in samples] == [(id, index) for id in "01" for index in range(4)]
    for sample in samples[:4]:
        seed = (2**32 - 2 + sample.index) % 2**32
        (single,) = three_rows.generate([prompt], dataclasses.replace(sampling, n=1, seed=seed))
        assert (facts(single), single.digest) == (facts(sample), sample.digest)
    assert len({sample.token_ids for sample in samples}) == 8


def test_samples_of_one_prompt_prefill_once(eight_rows):
    with lengths_put(eight_rows) as lengths:
        eight_rows.generate([list(range(400, 440))], SamplingParams(max_tokens=4, temperature=1.0, n=6))
    assert lengths == [0, 39, 39, 39, 39, 39]


def test_engine_of_ordinary_requests_alone_certifies_nothing(model):
    engine = make_engine(model, 1, "none")
    assert engine.generate([], SamplingParams()) == []
    assert not engine.certificates
    engine.generate([[3]], SamplingParams(max_tokens=4, deterministic=False))
    assert all(plan.ordinary for plan in engine.certificates)
    engine.generate([[3]], SamplingParams(max_tokens=4))
    assert not all(plan.ordinary for plan in engine.certificates)


def test_deterministic_request_among_ordinary_ones_is_certified_when_it_comes(model, one_row):
    engine = make_engine(model, 1, "none")
    made = [engine.request([3], SamplingParams(max_tokens=4, deterministic=False), id=str(i)) for i in range(3)]
    assert len(list(engine.run(iter(made)))) == 3
    assert all(plan.ordinary for plan in engine.certificates)
    made.append(engine.request([3], SamplingParams(max_tokens=4), id="strict"))
    found = {completion.id: completion for completion in engine.run(iter(made))}
    assert facts(found["strict"]) == facts(one_row.generate([[3]], SamplingParams(max_tokens=4))[0])


# Stop strings ---------------------------------------------------------------------------------------------------------------


def stop_case(engine: Engine) -> tuple[Completion, str]:
    """A completion, and a string that its text holds first somewhere in the middle."""
    (whole,) = engine.generate(["def "], SamplingParams(max_tokens=24, temperature=1.2, seed=3))
    places = [i for i in range(4, len(whole.text) - 3) if "\ufffd" not in whole.text[i : i + 2]]
    return whole, next(whole.text[i : i + 2] for i in places if whole.text.find(whole.text[i : i + 2]) == i)


@pytest.mark.parametrize("engine_name", ["one_row", "three_rows", "eight_rows"])
def test_stop_string_ends_the_text_at_the_token_that_completes_it(engine_name, one_row, request, model):
    whole, stop = stop_case(one_row)
    engine = request.getfixturevalue(engine_name)
    (ended,) = engine.generate(["def "], SamplingParams(max_tokens=24, temperature=1.2, seed=3, stop=stop))
    assert ended.finish_reason == "stop"
    assert ended.text == whole.text[: whole.text.index(stop)]
    assert ended.token_ids == whole.token_ids[: len(ended.token_ids)]
    assert stop in model.tokenizer.decode(ended.token_ids)
    assert stop not in model.tokenizer.decode(ended.token_ids[:-1])
    assert ended.logprobs == whole.logprobs[: len(ended.token_ids)]


def test_stop_string_within_min_tokens_is_not_looked_at(one_row):
    whole, stop = stop_case(one_row)
    sampling = SamplingParams(max_tokens=24, temperature=1.2, seed=3, stop=stop, min_tokens=24, ignore_eos=True)
    (ended,) = one_row.generate(["def "], sampling)
    assert (ended.text, ended.finish_reason) == (whole.text, "length")


def test_stream_with_a_stop_string_shows_nothing_of_it(three_rows):
    _, stop = stop_case(three_rows)
    sampling = SamplingParams(max_tokens=24, temperature=1.2, seed=3, stop=stop)
    (ended,) = three_rows.generate(["def "], sampling)
    pieces = list(three_rows.stream("def ", sampling))
    assert "".join(piece.text for piece in pieces) == ended.text
    assert sum((piece.token_ids for piece in pieces), ()) == ended.token_ids
    shown = ""
    for piece in pieces:
        shown += piece.text
        assert ended.text.startswith(shown)


# Log-probabilities ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("engine_name", ["one_row", "eight_rows"])
def test_likeliest_tokens_and_prompt_logprobs_are_those_of_score(engine_name, request):
    """Greedy: the likeliest token is the chosen one, with the bits that were reported for it."""
    engine = request.getfixturevalue(engine_name)
    prompts = [PREFIX, [5], PREFIX[:20]]
    sampling = SamplingParams(max_tokens=9, logprobs=3, prompt_logprobs=2)
    completions = engine.generate(prompts, sampling)
    scored = score(
        byte_params(), BYTE_CFG, [[*p, *c.token_ids] for p, c in zip(prompts, completions, strict=True)], schedule=SCHEDULE
    )
    for prompt, completion, logprobs in zip(prompts, completions, scored, strict=True):
        assert [top[0] for top in completion.top_logprobs] == list(zip(completion.token_ids, completion.logprobs, strict=True))
        assert all(len(top) == 3 and top == tuple(sorted(top, key=lambda pair: -pair[1])) for top in completion.top_logprobs)
        assert completion.prompt_logprobs[0] is None
        assert list(completion.prompt_logprobs[1:]) == logprobs[1 : len(prompt)].tolist()
        assert list(completion.logprobs) == logprobs[len(prompt) :].tolist()
        assert [len(top) for top in completion.prompt_top_logprobs] == [0] + [2] * (len(prompt) - 1)


def test_asking_for_logprobs_changes_nothing_else(mixed_alone, eight_rows):
    found = run(eight_rows, change=lambda sampling: dataclasses.replace(sampling, logprobs=1))
    assert [one[:-1] for one in found] == [one[:-1] for one in mixed_alone]  # the digest is of the parameters, too


# Leaving early --------------------------------------------------------------------------------------------------------------


def test_run_that_is_left_in_the_middle_frees_everything(mixed_alone, eight_rows):
    for _ in eight_rows.run(iter([eight_rows.request([3], SamplingParams(max_tokens=9))])):
        break
    assert eight_rows.num_pages_held == 0
    assert run(eight_rows) == mixed_alone


def test_request_that_can_never_fit_is_refused(model):
    engine = make_engine(model, 2, "none", num_pages=2)
    with pytest.raises(InputError, match=r"3 pages of 16, more than num_pages \(2\)"):
        engine.request([1] * 20, SamplingParams(max_tokens=20))
    with pytest.raises(InputError, match="num_pages \\(1\\) must be at least max_requests \\(2\\)"):
        make_engine(model, 2, "none", num_pages=1)


# Other weights --------------------------------------------------------------------------------------------------------------


def test_other_weights_forget_the_pages_of_the_old_ones(model):
    engine, other = make_engine(model, 1, "none"), init_params(BYTE_CFG, jax.random.key(2))
    sampling = SamplingParams(max_tokens=8)
    before = engine.generate([PREFIX], sampling)[0]
    engine.update_params(other, "step 2")
    assert engine.fingerprint()["weight_version"] == "step 2"
    after = engine.generate([PREFIX], sampling)[0]
    fresh = make_engine(dataclasses.replace(model, params=other), 1, "none").generate([PREFIX], sampling)[0]
    assert facts(after) == facts(fresh) != facts(before)
    assert after.digest != before.digest
    engine.update_params(model.params)  # named by a digest of the weights, as they were at first
    back = engine.generate([PREFIX], sampling)[0]
    assert (facts(back), back.digest) == (facts(before), before.digest)


def test_other_weights_of_another_shape_are_refused(one_row):
    params = jax.tree.map(np.asarray, one_row.model.params)
    with pytest.raises(InputError, match=r"weight \['final_norm'\] has shape \(3,\)"):
        one_row.update_params({**params, "final_norm": np.zeros(3, np.float32)})
    with pytest.raises(InputError, match=r"\['head'\] is missing"):
        one_row.update_params({key: value for key, value in params.items() if key != "head"})
