"""Weights, keys and values in int8 change none of this: bits depend neither on the batch, nor on drafts, nor on pages.

Each row of activations, and each key and value, has a scale of its own. In the controls all rows of a pass share one, so that
the bits of a text follow its neighbours.
"""

import dataclasses
import math

import jax
import numpy as np
import pytest

from detspec.engine.engine import Engine
from detspec.generation.score import score
from detspec.ops.attention import int8_pages
from detspec.ops.linear import int8
from detspec.ops.linear.int8 import QTensor, quantize
from detspec.sampling_params import SamplingParams
from tests.engine.int8_engine import FULL, INT8, engine_of, texts
from tests.fakes import RANDOM_CFG, bits, random_model
from tests.shelf import FEW

SHARED = np.random.default_rng(9).integers(0, RANDOM_CFG.vocab_size, 18).tolist()  # a page of 16 slots and more
SHARING = [SHARED + np.random.default_rng(i).integers(0, RANDOM_CFG.vocab_size, 1 + 5 * i).tolist() for i in range(3)]
SAMPLING = [SamplingParams(max_tokens=20, temperature=t, seed=3, ignore_eos=True) for t in (0.0, 1.0, 0.7)]
TEXT, *OTHERS = [np.random.default_rng(i).integers(0, FEW.cfg.vocab_size, 21 + i).tolist() for i in range(3)]


def facts(engine: Engine) -> list[tuple]:
    found = engine.generate(SHARING, SAMPLING)
    return [(one.token_ids, np.asarray(one.logprobs, np.float32).tobytes(), one.digest) for one in found]


def test_tokens_and_bits_do_not_depend_on_batch_draft_or_products():
    expected = texts(engine_of(INT8))
    assert texts(engine_of(INT8, method="self")) == expected
    assert texts(engine_of(INT8, max_requests=1)) == expected
    assert texts(engine_of(INT8, linear="xla")) == expected
    assert texts(engine_of(FULL)) != expected


def test_tokens_bits_and_digests_do_not_depend_on_batch_draft_or_pages():
    """With keys and values in int8."""
    alone = engine_of(RANDOM_CFG, max_requests=1, cache_dtype="int8")
    expected = facts(alone)
    crowded = engine_of(RANDOM_CFG, method="self", num_pages=5, cache_dtype="int8")
    assert facts(crowded) == expected
    assert crowded.num_preemptions > 0
    in_floats = facts(engine_of(RANDOM_CFG, max_requests=1))
    assert all(one[1:] != other[1:] for one, other in zip(expected, in_floats, strict=True))
    written = [[*prompt, *tokens] for prompt, (tokens, _, _) in zip(SHARING, expected, strict=True)]
    scored = score(alone.model.params, RANDOM_CFG, written, schedule=alone.schedule, max_len=64)
    again = [np.asarray(one[len(prompt) :], np.float32).tobytes() for one, prompt in zip(scored, SHARING, strict=True)]
    assert again == [logprobs for _, logprobs, _ in expected]


def scored_next_to(other: list[int], *, what: str, window: int = 4, max_len: int = 32) -> list[int]:
    """The bits that the canonical pass gives TEXT next to `other`, with `what` in int8: the weights or the cache."""
    cfg = dataclasses.replace(FEW.cfg, weights="int8") if what == "weights" else FEW.cfg
    schedule = FEW.schedule.with_budget(16, window).with_numerics(cache_dtype="int8" if what == "cache" else "float32")
    return bits(score(random_model(cfg), cfg, [other, TEXT], schedule=schedule, max_len=max_len)[1][1:]).tolist()


@pytest.mark.optimised
@pytest.mark.parametrize("what", ["weights", "cache"])
def test_scores_are_the_same_bits_next_to_other_texts_and_in_other_windows(what):
    expected = scored_next_to(OTHERS[0], what=what)
    assert scored_next_to(OTHERS[1], what=what) == expected
    assert scored_next_to(OTHERS[1], what=what, window=1) == expected
    assert scored_next_to(OTHERS[0], what="nothing") != expected


@pytest.mark.optimised
@pytest.mark.parametrize("what", ["weights", "cache"])
def test_control_scores_with_one_scale_for_all_rows_of_a_pass_depend_on_other_texts(what, monkeypatch):
    def by_tensor(x: jax.Array) -> QTensor:
        rounded = quantize(x.reshape(1, -1))
        num_rows = math.prod(x.shape[:-1])
        return QTensor(rounded.values.reshape(x.shape), rounded.scale.repeat(num_rows).reshape(x.shape[:-1]))

    scored_next_to(OTHERS[0], what=what)  # weights are rounded by row
    monkeypatch.setattr(int8 if what == "weights" else int8_pages, "quantize", by_tensor)
    first, second = (scored_next_to(other, what=what, max_len=33) for other in OTHERS)  # no other test has this length
    assert first != second
