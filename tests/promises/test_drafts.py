"""Bits of a request do not depend on the draft: its source, how good it is, how the row budget is cut into windows.

Everything about a batch is drawn, the drafts among it, and compared with one token at a time. The controls leave out
verification, so that wrong drafts become the text, and the rows that fill up a window of one row.
"""

import dataclasses
from collections import Counter
from functools import partial

import hypothesis
import hypothesis.strategies as st
import jax
import numpy as np
import pytest

from detspec import score
from detspec.checkpoint.load import Model
from detspec.draft.draft_model import draft_model
from detspec.draft.source import Drafter
from detspec.engine.engine import Engine
from detspec.engine.engine_config import EngineConfig
from detspec.model.dense import with_fields
from detspec.model.params import init_params
from detspec.native.processor import cpu_facts
from detspec.ops.attention import reference
from detspec.sampling_params import SamplingParams
from tests.engine.byte_model import BYTE_CFG, SCHEDULE, byte_params, facts, some_prompts, some_sampling
from tests.fakes import ALIBI_CFG, FAMILY_CFGS, LAYER_CFGS, Request, bits, random_model, recorded
from tests.generation.one_at_a_time import (
    FIXED,
    MAX_NEW,
    PROCESSING,
    V,
    believed,
    generate_all,
    one_at_a_time,
    partly_right,
    results,
    scatter_and_poison,
)
from tests.shelf import FEW, MANY, PAGE_WIDE, Shape

MAX_PROMPT = 20

# (shape, draft source): windows of some rows and of a page, more and fewer requests than windows in a pass. The list is fixed,
# and all have the same number of rows, so that few programs are compiled. Fewer rows are in test_score.py.
CASES = {"page-recorded": (PAGE_WIDE, "recorded"), "many-float32-both": (MANY.with_dtype("float32"), "both")}
ALIGNED_CASES = {
    "few-recorded": (FEW.with_numerics(alignment="window"), "recorded"),
    "many-float32-both": (MANY.with_dtype("float32").with_numerics(alignment="window"), "both"),
}
# All but `explain`: it runs a failing example some hundred times more.
PHASES = [phase for phase in hypothesis.Phase if phase is not hypothesis.Phase.explain]
DRAFTS = ("perfect", "wrong", "random", "partly right", "empty")


def asking(processing: dict, *, max_tokens: int, **others) -> SamplingParams:
    """Sampling parameters with `processing`, its minimum length cut to `max_tokens`."""
    processing = {**processing, "min_tokens": min(processing.get("min_tokens", 0), max_tokens)}
    return SamplingParams(max_tokens=max_tokens, **processing, **others)


samplings = st.builds(
    asking,
    st.sampled_from(PROCESSING),
    max_tokens=st.integers(1, MAX_NEW),
    temperature=st.sampled_from([0.0, 0.0, 0.7, 1.3]),
    top_k=st.sampled_from([0, 0, 1, 5, 40]),
    top_p=st.sampled_from([1.0, 1.0, 0.9, 0.5]),
    min_p=st.sampled_from([0.0, 0.0, 0.05]),
    seed=st.integers(0, 2**32 - 1),
    stop_token_ids=st.sampled_from([(), tuple(range(0, V, 9))]),  # 24 of 211 tokens stop, or none
    logprobs_mode=st.sampled_from(["raw", "raw", "processed"]),
    deterministic=st.sampled_from([True, True, True, False]),
)
prompts = st.lists(st.integers(0, V - 1), min_size=1, max_size=MAX_PROMPT).map(tuple)
all_requests = st.builds(Request, prompt=prompts, sampling=samplings)


long_requests = all_requests.map(
    lambda r: Request(r.prompt, dataclasses.replace(r.sampling, max_tokens=max(8, r.sampling.max_tokens), deterministic=True))
)


def check_theorem(data: st.DataObject, shape: Shape, source: str, seen: Counter) -> None:
    """Checks a batch of `shape`, all else drawn: every deterministic request equals its reference."""
    others = shape.batch - 1
    # The first request is long, deterministic and badly drafted, so that every example shows something.
    requests = [data.draw(long_requests), *data.draw(st.lists(all_requests, min_size=others, max_size=others))]
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32 - 1)))
    poison = data.draw(st.booleans())
    kinds = data.draw(st.lists(st.sampled_from(DRAFTS), min_size=others, max_size=others))
    kinds = [data.draw(st.sampled_from(("partly right", "partly right", "wrong"))), *kinds]
    told = recorded(shape, [believed(kind, shape, r, rng) for kind, r in zip(kinds, requests, strict=True)])
    wide_cost = data.draw(st.sampled_from([0.0, 0.0, 1.5, 3.0, np.inf]))  # of passes that read drafts
    scatter = partial(scatter_and_poison, rng=rng, poison=poison)
    state = generate_all(shape, requests, source=source, told=told, spoil=scatter, wide_cost=wide_cost)
    assert not state.live.any()
    assert (state.cache.length == state.committed - 1).all()
    for b, (request, got) in enumerate(zip(requests, results(state), strict=True)):
        if request.sampling.deterministic:
            assert got == one_at_a_time(request, shape), f"sequence {b}, draft {kinds[b]}, {request}"
            seen["rollbacks"] += int(state.counters.num_rollbacks[b])
            seen["accepted"] += int(state.counters.num_accepted_draft_tokens[b])


# Only these three have the rotary scaling of Llama 3, one KV head under a sliding window, and a bias of o.
SWEPT = ("llama", "mistral", "qwen3")
# Kinds of layers whose mixer or feed-forward part is another one, and factors before sums; the others change values alone.
TRIED = ("post norms, width norms", "scales", "parallel", "learned positions", "shared experts")


def check_examples(shape: Shape, source: str, max_examples: int) -> None:
    """`check_theorem` on so many batches, which between them show accepted drafts and rollbacks."""
    seen: Counter = Counter()

    @hypothesis.settings(max_examples=max_examples, phases=PHASES)
    @hypothesis.given(data=st.data())
    def check(data: st.DataObject) -> None:
        check_theorem(data, shape, source, seen)

    check()
    assert seen["rollbacks"] >= 1  # else the comparison would have shown little
    assert seen["accepted"] >= 1


@pytest.mark.optimised
@pytest.mark.parametrize("name", CASES)
def test_committed_bits_for_any_draft_neighbours_and_places_equal_one_token_at_a_time(name):
    check_examples(*CASES[name], max_examples=10)


@pytest.mark.optimised
@pytest.mark.parametrize(
    "family",
    [pytest.param(name, marks=pytest.mark.sweep if name in SWEPT else pytest.mark.slow) for name in (*FAMILY_CFGS, "alibi")],
)
def test_committed_bits_of_every_family_equal_one_token_at_a_time(family):
    """Sliding windows, soft caps, biases, norms of heads, rotary scalings, linear biases: the texts run past all lengths."""
    cfg = {**FAMILY_CFGS, "alibi": ALIBI_CFG}[family]
    check_examples(FEW._replace(cfg=cfg), "recorded", max_examples=6)


@pytest.mark.optimised
@pytest.mark.parametrize(
    "kind", [pytest.param(name, marks=pytest.mark.slow if name in TRIED else pytest.mark.sweep) for name in LAYER_CFGS]
)
def test_committed_bits_of_every_kind_of_layer_equal_one_token_at_a_time(kind):
    check_examples(FEW._replace(cfg=LAYER_CFGS[kind]), "recorded", max_examples=6)


@pytest.mark.optimised
@pytest.mark.parametrize("name", ["few-recorded", pytest.param("many-float32-both", marks=pytest.mark.sweep)])
def test_committed_bits_with_aligned_windows_equal_one_token_at_a_time_of_the_same_window(name):
    check_examples(*ALIGNED_CASES[name], max_examples=10)


@pytest.mark.optimised
def test_control_unverified_requests_take_wrong_drafts_for_their_text():
    shape, source = CASES["page-recorded"]
    told = partly_right(shape, FIXED)
    expected = [one_at_a_time(request, shape) for request in FIXED]
    for deterministic in (True, False):
        asked = [Request(r.prompt, dataclasses.replace(r.sampling, deterministic=deterministic)) for r in FIXED]
        found = results(generate_all(shape, asked, source=source, told=told, wide_cost=0.0))
        assert [a == b for a, b in zip(found, expected, strict=True)] == [deterministic] * len(FIXED)


def scored_in_windows(window: int, max_len: int) -> list[list[int]]:
    """The bits that the canonical pass gives three texts; each query head has keys of its own."""
    cfg = with_fields(FEW.cfg, num_kv_heads=4)
    texts = [np.random.default_rng(i).integers(0, V, 46).tolist() for i in range(3)]
    schedule = FEW.schedule.with_budget(FEW.schedule.budget.rows, window)
    return [bits(x).tolist() for x in score(random_model(cfg), cfg, texts, schedule=schedule, max_len=max_len)]


@pytest.mark.optimised
def test_windows_of_one_row_and_of_four_have_the_same_bits():
    assert scored_in_windows(1, FEW.length) == scored_in_windows(4, FEW.length)


@pytest.mark.optimised
@pytest.mark.skipif(
    "avx512f" not in cpu_facts().get("flags", "").split(),
    reason="without AVX-512 (seen on a Zen 3), XLA's products of a single row have the bits of those of several",
)
def test_control_windows_of_one_row_that_are_not_filled_up_have_other_bits(monkeypatch):
    """Products of a single row have a code path of their own, on many CPUs as elsewhere."""
    monkeypatch.setattr(reference, "MIN_TILE_ROWS", 1)
    max_len = FEW.length - 1  # no program of another test has this length
    assert scored_in_windows(1, max_len) != scored_in_windows(4, max_len)


def engine_with(drafter: Drafter, model: Model) -> Engine:
    config = EngineConfig(max_requests=3, max_len=64, method="model", num_speculative_tokens=3, schedule=SCHEDULE, num_pages=6)
    return Engine(model, config, drafters={"model": drafter})


@pytest.mark.parametrize(("weights", "most", "least"), [("own", 1.0, 0.9), ("other", 0.5, 0.0)])
def test_draft_model_in_the_engine_changes_no_bit_and_its_weights_decide_what_is_accepted(weights, most, least, model, one_row):
    """Three places and pages for two of them: sequences are preempted, and others enter their places."""
    params = byte_params() if weights == "own" else init_params(BYTE_CFG, jax.random.key(5))
    engine = engine_with(draft_model(dataclasses.replace(model, params=params), target=model), model)
    sampling = [dataclasses.replace(each, max_tokens=34) for each in some_sampling()]
    found = engine.generate(some_prompts(), sampling)
    assert [facts(c) for c in found] == [facts(c) for c in one_row.generate(some_prompts(), sampling)]
    assert least <= engine.stats.draft_acceptance_rate <= most
    assert engine.num_preemptions > 0
