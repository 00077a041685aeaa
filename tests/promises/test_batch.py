"""Bits of a request do not depend on the batch: its size, the neighbours, the place in it, pages, the order of arrival.

The controls leave out verification. Ordinary generation then gives one request other bits in batches of other sizes. Which
sizes and dtypes differ depends on the device and on jax's version, so several are tried.
"""

import dataclasses
import itertools

import pytest

from tests.engine.byte_model import facts, ordinary, some_prompts, some_sampling
from tests.fakes import Request
from tests.generation.one_at_a_time import FIXED, generate_all, one_at_a_time, results
from tests.shelf import CROWD, Shape

pytestmark = pytest.mark.optimised

PROMPTS, SAMPLING = some_prompts(), some_sampling()
ORDER = [4, 0, 2, 6, 1, 7, 3, 5]

# Without logits processing, half of a program, which changes nothing here.
CROWDED = [Request(r.prompt, dataclasses.replace(r.sampling, max_tokens=8, top_k=0, top_p=1.0, min_p=0.0)) for r in FIXED]


def crowd(shape: Shape, *, deterministic: bool) -> list[tuple]:
    """The results of a batch of `CROWDED`, again and again."""
    asked = [Request(r.prompt, dataclasses.replace(r.sampling, deterministic=deterministic)) for r in CROWDED]
    asked = list(itertools.islice(itertools.cycle(asked), shape.batch))
    return results(generate_all(shape, asked, source="self", spoil=lambda state: state.with_processing(False)))


def test_references_hold_varied_texts(each_alone):
    """A model that repeats itself would agree with everything."""
    assert [len(tokens) for tokens, _, _ in each_alone] == [sampling.max_tokens for sampling in SAMPLING]
    assert len({token for tokens, _, _ in each_alone for token in tokens}) >= 50


@pytest.mark.parametrize("engine_name", ["three_rows", "eight_rows"])
@pytest.mark.parametrize("order", [range(8), ORDER], ids=["in order", "shuffled"])
def test_rows_order_and_method_change_nothing_of_any_request(engine_name, order, each_alone, request):
    """Eight requests of unlike lengths; three rows are refilled."""
    engine = request.getfixturevalue(engine_name)
    found = engine.generate([PROMPTS[i] for i in order], [SAMPLING[i] for i in order])
    assert [facts(c) for c in found] == [each_alone[i] for i in order]


@pytest.mark.parametrize("engine_name", ["three_rows", "eight_rows"])
def test_deterministic_requests_beside_ordinary_ones_keep_their_bits(engine_name, each_alone, request):
    mixed = [ordinary(sampling) if i % 2 else sampling for i, sampling in enumerate(SAMPLING)]
    found = request.getfixturevalue(engine_name).generate(PROMPTS, mixed)
    assert [facts(c) for c in found[::2]] == each_alone[::2]
    assert [len(c.token_ids) for c in found] == [sampling.max_tokens for sampling in SAMPLING]


def test_control_ordinary_requests_in_other_batches_get_other_bits(one_row, three_rows, eight_rows):
    unverified = [ordinary(sampling) for sampling in SAMPLING]
    alone = [facts(c) for c in one_row.generate(PROMPTS, unverified)]
    assert any([facts(c) for c in engine.generate(PROMPTS, unverified)] != alone for engine in (three_rows, eight_rows))


def test_deterministic_requests_in_a_crowd_keep_their_bits():
    alone = [one_at_a_time(request, CROWD) for request in CROWDED]
    assert crowd(CROWD, deterministic=True) == list(itertools.islice(itertools.cycle(alone), CROWD.batch))


def test_control_ordinary_request_in_crowds_of_other_sizes_gets_other_bits():
    for shape in (CROWD, CROWD.with_dtype("bfloat16")):
        (alone,) = crowd(shape._replace(batch=1), deterministic=False)
        for batch in (64, 16, 2):
            if crowd(shape._replace(batch=batch), deterministic=False)[0][1] != alone[1]:
                return
    pytest.fail("the ordinary path gave equal bits in every batch: the comparisons of this file show nothing here")
