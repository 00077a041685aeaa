"""Windows of stretches on small arrays, and prompts that ride along with the verification of other requests."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

from detspec.draft.source import Drafter, draft_fn
from detspec.generation.loop import dvr_step
from detspec.generation.passes import Stretches, cut, limited, missing, reached, stretches, those_first
from detspec.generation.prefill import prefill
from detspec.generation.score import Asked, read
from detspec.sampling_params import SamplingParams
from detspec.state import NO_SEQUENCE
from tests.fakes import SOURCES, Request, bits, random_model, recorded, state_of
from tests.shelf import FEW, Shape

FLOAT32 = FEW.with_dtype("float32")  # rounding to bfloat16 hides most differences
prefilled = jax.jit(partial(prefill, cfg=FEW.cfg, schedule=FEW.schedule))


def test_cut_of_two_rows_packs_their_windows_side_by_side():
    """Rows of 5 and 9 positions, W = 4: windows [0 4) [4 5) of row 0, [2 6) [6 10) [10 11) of row 1, then padding."""
    tokens = jnp.arange(24, dtype=jnp.int32).reshape(2, 12)
    lacking = Stretches(start=jnp.int32([0, 2]), end=jnp.int32([5, 11]))
    windows = cut(lacking, jnp.arange(-1, 6, dtype=jnp.int32), tokens, 4)
    assert windows.sequence.tolist() == [NO_SEQUENCE, 0, 0, 1, 1, 1, NO_SEQUENCE]
    assert windows.start.tolist() == [0, 0, 4, 2, 6, 10, 0]
    assert windows.count.tolist() == [0, 4, 1, 4, 4, 1, 0]
    assert windows.tokens[1].tolist() == [0, 1, 2, 3]
    assert windows.tokens[3].tolist() == [14, 15, 16, 17]


def test_reached_after_each_window_of_two_rows():
    lacking = Stretches(start=jnp.int32([0, 2]), end=jnp.int32([5, 11]))
    found = [reached(lacking, jnp.int32(done), 4).tolist() for done in range(7)]
    assert found == [[0, 0], [4, 0], [5, 0], [5, 6], [5, 10], [5, 11], [5, 11]]


def test_aligned_stretches_begin_with_the_window_of_their_first_position():
    aligned = FEW.schedule.with_numerics(alignment="window")
    found = stretches(jnp.int32([6, 6]), jnp.int32([9, 6]), aligned)
    assert found.start.tolist() == [4, 6]  # a row that lacks nothing begins nowhere


@jax.jit
def one_pass(params, state):
    """One more pass over what sequences lack."""
    lacking = limited(missing(state, FEW.schedule), jnp.int32(1), FEW.schedule)
    asked = Asked(processing=False, choose=False, top_k=0)
    _, cache = read(params, FEW.cfg, state, lacking, schedule=FEW.schedule, asked=asked, wanted=jnp.bool_(False))
    return state.replace(cache=cache.replace(length=jnp.maximum(cache.length, lacking.end)))


def test_prefill_of_some_passes_goes_on_where_it_stopped_to_the_same_bits():
    """40 tokens in windows of 4, 4 to a pass: 39 positions are 10 windows, three passes."""
    params, request = random_model(FEW.cfg), Request(tuple(range(40)), SamplingParams(max_tokens=4))
    whole = prefilled(params, state=state_of(FEW, [request]))
    state, lengths = state_of(FEW, [request]), []
    for _ in range(3):
        state = one_pass(params, state=state)
        lengths.append(int(state.cache.length[0]))
    assert lengths == [16, 32, 39]
    for ours, theirs in zip(state.cache.k + state.cache.v, whole.cache.k + whole.cache.v, strict=True):
        np.testing.assert_array_equal(bits(ours[1:]), bits(theirs[1:]))  # all but the scratch page


def stayed(shape: Shape) -> dict[str, bool]:
    """Whose bits stay when one request verifies in one of four windows, and 12 of another's 20 tokens take the other three."""
    cfg, schedule = shape.cfg, shape.schedule
    params = random_model(cfg)
    requests = [Request((5, 7, 11), SamplingParams(max_tokens=9)), Request(tuple(range(60, 80)), SamplingParams(max_tokens=9))]
    catch_up = jax.jit(partial(prefill, cfg=cfg, schedule=schedule))

    @jax.jit
    def step(params, state):
        told = Drafter(SOURCES["recorded"], recorded(shape, [[0] * shape.length] * 2))
        return dvr_step(params, cfg, state, draft_fn=draft_fn(told, schedule), schedule=schedule)[0]

    def started(live):
        state = state_of(shape, requests)
        return catch_up(params, state=state.replace(live=jnp.array([*live, False])))

    alone = step(params, started([True, False]))
    both = step(params, started([True, False]).replace(live=jnp.array([True, True, False])))
    assert both.cache.length.tolist()[1] == 12
    assert both.committed.tolist()[1] == 20  # a request that catches up commits nothing
    caught_up, whole = catch_up(params, state=both), started([False, True])

    def values(state, row):  # of its first 16 positions
        pages = state.cache.page_table[row, : 16 // schedule.numerics.page]
        return [bits(pool[pages]).tolist() for pool in state.cache.v]

    assert np.all(values(whole, 1))  # something was written everywhere
    verified = [(s.committed[0].tolist(), bits(s.logprobs[0]).tolist(), values(s, 0)) for s in (alone, both)]
    return {"verified": verified[0] == verified[1], "rode": values(caught_up, 1) == values(whole, 1)}


def test_prompt_rides_along_with_verification_and_disturbs_no_other():
    assert stayed(FLOAT32) == {"verified": True, "rode": True}


def test_prompt_that_rides_along_in_passes_that_split_the_sequence_disturbs_and_is_disturbed():
    """The inverse control: where the sequence is cut then follows the longest text of the pass."""
    assert stayed(FLOAT32.with_numerics(page=4, num_splits=2)) == {"verified": False, "rode": False}


def test_those_first_is_a_stable_sort():
    """All sets of up to six sequences; worked out: of 0 1 0 1 it is 1 3 0 2."""
    assert those_first(jnp.array([False, True, False, True])).tolist() == [1, 3, 0, 2]
    for size in range(1, 7):
        sets = (np.arange(2**size)[:, None] >> np.arange(size)) % 2 == 1
        assert (jax.vmap(those_first)(sets) == np.argsort(~sets, axis=1, kind="stable")).all()
