"""Windows of spans on small arrays, and prompts that ride along with the verification of other requests."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

from detspec.draft.source import Drafter, draft_fn
from detspec.generation.loop import dvr_step
from detspec.generation.prefill import prefill
from detspec.generation.score import Asked, read
from detspec.passes import Spans, cut, limited, missing, reached, spans, those_first
from detspec.sampling_params import SamplingParams
from detspec.state import NO_SEQUENCE, GenState
from tests.fakes import SOURCES, Request, bits, random_model, recorded, state_of
from tests.shelf import FEW, Shape

FLOAT32 = FEW.with_dtype("float32")  # rounding to bfloat16 hides most differences
cut_at_once = jax.jit(cut, static_argnames="window")
reached_at_once = jax.jit(reached, static_argnames="window")


@partial(jax.jit, static_argnames="shape")
def prefilled(params, state, shape):
    return prefill(params, shape.cfg, state, schedule=shape.schedule)


@partial(jax.jit, static_argnames="shape")
def step(params, state, shape):
    """Takes a step of two requests, drafted all zeros."""
    told = Drafter(SOURCES["recorded"], recorded(shape, [[0] * shape.length] * 2))
    return dvr_step(params, shape.cfg, state, draft_fn=draft_fn(told, shape.schedule), schedule=shape.schedule)[0]


def unprocessed(shape: Shape, requests) -> GenState:
    """The state of `requests`, for programs without logits processing."""
    return state_of(shape, requests).with_processing(False)


def test_cut_of_two_rows_packs_their_windows_side_by_side():
    """Rows of 5 and 9 positions, W = 4: windows [0 4) [4 5) of row 0, [2 6) [6 10) [10 11) of row 1, then padding."""
    tokens = np.arange(24, dtype=np.int32).reshape(2, 12)
    lacking = Spans(np.int32([0, 1]), start=np.int32([0, 2]), end=np.int32([5, 11]))
    windows = jax.device_get(cut_at_once(lacking, np.arange(6, dtype=np.int32), tokens, window=4))
    assert windows.sequence.tolist() == [0, 0, 1, 1, 1, NO_SEQUENCE]
    assert windows.start.tolist() == [0, 4, 2, 6, 10, 0]
    assert windows.count.tolist() == [4, 1, 4, 4, 1, 0]
    assert windows.tokens[0].tolist() == [0, 1, 2, 3]
    assert windows.tokens[2].tolist() == [14, 15, 16, 17]


def test_reached_after_each_window_of_two_rows():
    lacking = Spans(np.int32([0, 1]), start=np.int32([0, 2]), end=np.int32([5, 11]))
    found = [reached_at_once(lacking, np.int32(done), window=4).tolist() for done in range(7)]
    assert found == [[0, 0], [4, 0], [5, 0], [5, 6], [5, 10], [5, 11], [5, 11]]


def test_aligned_spans_begin_with_the_window_of_their_first_position():
    aligned = FEW.schedule.with_numerics(alignment="window")
    found = spans(jnp.int32([6, 6]), jnp.int32([9, 6]), aligned)
    assert found.start.tolist() == [4, 6]  # a row that lacks nothing begins nowhere


@jax.jit
def one_pass(params, state):
    """Runs a pass over what sequences lack."""
    lacking = limited(missing(state, FLOAT32.schedule), jnp.int32(1), FLOAT32.schedule)
    asked = Asked(processing=False, choose=False, top_k=0)
    nothing = jnp.full_like(state.committed, state.tokens.shape[1] + 1)
    _, cache = read(params, FLOAT32.cfg, state, lacking, schedule=FLOAT32.schedule, asked=asked, wanted_from=nothing)
    return state.replace(cache=cache.replace(length=jnp.maximum(cache.length, lacking.end)))


def test_prefill_of_some_passes_goes_on_where_it_stopped_to_the_same_bits():
    """40 tokens in windows of 4, 4 to a pass: 39 positions are 10 windows, three passes."""
    params, request = random_model(FLOAT32.cfg), Request(tuple(range(40)), SamplingParams(max_tokens=4))
    whole = prefilled(params, unprocessed(FLOAT32, [request]), FLOAT32)
    state, lengths = unprocessed(FLOAT32, [request]), []
    for _ in range(3):
        state = one_pass(params, state)
        lengths.append(int(state.cache.length[0]))
    assert lengths == [16, 32, 39]
    for ours, theirs in zip(jax.tree.leaves(state.cache.pools), jax.tree.leaves(whole.cache.pools), strict=True):
        np.testing.assert_array_equal(bits(ours)[1:], bits(theirs)[1:])  # all but the scratch page


def stayed(shape: Shape) -> dict[str, bool]:
    """Whose bits stay when one request verifies in one of four windows, and 12 of another's 20 tokens take the other three."""
    params = random_model(shape.cfg)
    requests = [Request((5, 7, 11), SamplingParams(max_tokens=9)), Request(tuple(range(60, 80)), SamplingParams(max_tokens=9))]

    def started(live):
        return prefilled(params, unprocessed(shape, requests).replace(live=np.array([*live, False])), shape)

    alone = step(params, started([True, False]), shape)
    both = step(params, started([True, False]).replace(live=np.array([True, True, False])), shape)
    assert both.cache.length.tolist()[1] == 12
    assert both.committed.tolist()[1] == 20  # a request that catches up commits nothing
    caught_up, whole = prefilled(params, both, shape), started([False, True])

    def values(state, row):  # of its first 16 positions
        pages = np.asarray(state.cache.page_table)[row, : 16 // shape.schedule.numerics.page]
        return [bits(pool)[pages].tolist() for _, pool in state.cache.pools]

    assert np.all(values(whole, 1))  # something was written everywhere
    verified = [(int(s.committed[0]), bits(s.logprobs)[0].tolist(), values(s, 0)) for s in (alone, both)]
    return {"verified": verified[0] == verified[1], "rode": values(caught_up, 1) == values(whole, 1)}


def test_prompt_rides_along_with_verification_and_disturbs_no_other():
    assert stayed(FLOAT32) == {"verified": True, "rode": True}


def test_prompt_that_rides_along_in_passes_that_split_the_sequence_disturbs_and_is_disturbed():
    """The inverse control: where the sequence is cut then follows the longest text of the pass."""
    assert stayed(FLOAT32.with_numerics(page=4, num_splits=2)) == {"verified": False, "rode": False}


def test_those_first_is_a_stable_sort():
    """All sets of one, four and six sequences; worked out: of 0 1 0 1 it is 1 3 0 2."""
    for size in (1, 4, 6):
        sets = (np.arange(2**size)[:, None] >> np.arange(size)) % 2 == 1
        found = np.asarray(jax.jit(jax.vmap(those_first))(sets))
        assert (found == np.argsort(~sets, axis=1, kind="stable")).all()
        if size == 4:
            assert found[0b1010].tolist() == [1, 3, 0, 2]
