"""The decoder: windows over pages and whole sequences are one model; parameters have the shapes a config asks for."""

import dataclasses
import re
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from detspec.cache import KVCache, init_cache
from detspec.config import ModelConfig, RopeScaling
from detspec.model.dense import with_fields
from detspec.model.params import init_params, param_shapes
from detspec.model.transformer import forward, forward_sequences, place
from detspec.ops.attention.api import NO_POSITION
from detspec.schedule import Schedule
from detspec.state import NO_SEQUENCE, Windows
from tests.fakes import ALIBI_CFG, LAYER_CFGS, RANDOM_CFG, bits, random_model
from tests.shelf import MANY

pytestmark = pytest.mark.optimised

F32 = dataclasses.replace(RANDOM_CFG, dtype="float32", tie_embeddings=True)
# With six query heads per KV head, jax 0.12 multiplies windows of 8 positions in another way than those of 1.
F32_ALIBI = with_fields(ALIBI_CFG, dtype="float32", num_kv_heads=4)
F32_LAYERS = {name: with_fields(cfg, dtype="float32") for name, cfg in LAYER_CFGS.items()}
ONE_LAYER = with_fields(ALIBI_CFG, num_layers=1)
LENGTH, ROWS = 24, 64
TOKENS = np.random.default_rng(0).integers(0, RANDOM_CFG.vocab_size, LENGTH, dtype=np.int32)


@partial(jax.jit, static_argnames=("cfg", "schedule"))
def one_pass(params, cfg, windows, cache, *, schedule):
    return forward(params, cfg, windows, cache, numerics=schedule.numerics)


sequences_of = jax.jit(forward_sequences, static_argnames="cfg")


def whole_of(cfg: ModelConfig, tokens: np.ndarray = TOKENS) -> np.ndarray:
    """Logits of `tokens` as a whole sequence."""
    return np.asarray(sequences_of(random_model(cfg), cfg, tokens[None])[0])[0]


def windows_of(window: int, rows: int = ROWS, sequence: int = 0) -> Windows:
    """TOKENS of sequence `sequence` in one pass of `rows` token rows, the unused windows padding."""
    groups, used = rows // window, LENGTH // window
    tokens = np.zeros((groups, window), np.int32)
    tokens[:used] = TOKENS.reshape(used, window)
    index = np.arange(groups, dtype=np.int32)
    return Windows(
        tokens=tokens,
        sequence=np.where(index < used, sequence, NO_SEQUENCE).astype(np.int32),
        start=np.where(index < used, index * window, 0).astype(np.int32),
        count=np.where(index < used, window, 0).astype(np.int32),
    )


def empty_cache(cfg: ModelConfig, schedule: Schedule) -> KVCache:
    return init_cache(cfg, max_requests=MANY.batch, max_len=MANY.length, numerics=schedule.numerics)


def logits_of(cfg: ModelConfig, window: int, rows: int = ROWS, sequence: int = 0, **changes) -> np.ndarray:
    schedule = MANY.schedule.with_budget(rows, window).with_numerics(**changes)
    windows = windows_of(window, rows, sequence)
    logits, *_ = one_pass(random_model(cfg), cfg, windows, empty_cache(cfg, schedule), schedule=schedule)
    return np.asarray(logits).reshape(rows, -1)[:LENGTH]


@pytest.mark.slow
@pytest.mark.parametrize("cfg", [F32, F32_ALIBI, *F32_LAYERS.values()], ids=["rope", "alibi", *F32_LAYERS])
def test_forward_over_pages_equals_forward_over_sequences(cfg):
    """Several windows of one pass hold consecutive spans of one sequence: a layer writes before it attends."""
    # Two orders of the same float32 sums, of some 64 terms, through 2 layers; logits of size 1.
    np.testing.assert_allclose(logits_of(cfg, 8), whole_of(cfg), rtol=0, atol=2e-5)


@pytest.mark.parametrize("implementation", ["cpu", "reference"])
def test_rows_that_are_not_wanted_move_no_bit_of_the_others_and_leave_their_keys(implementation):
    """None of the first window, the end of the second, all of the third."""
    schedule = MANY.schedule.with_budget(ROWS, 8).with_numerics(implementation=implementation, linear="pinned")
    windows = windows_of(8)
    wanted = np.zeros(windows.tokens.shape, bool)
    wanted[1, 5:] = wanted[2] = True
    results = [
        one_pass(random_model(F32), F32, each, empty_cache(F32, schedule), schedule=schedule)
        for each in (windows, windows.replace(wanted=wanted))
    ]
    (whole, whole_cache, _), (some, some_cache, _) = jax.device_get(results)
    rows = wanted.reshape(-1)
    assert (bits(some)[rows] == bits(whole)[rows]).all()
    for ours, theirs in zip(jax.tree.leaves(some_cache.pools), jax.tree.leaves(whole_cache.pools), strict=True):
        assert (bits(ours)[1:] == bits(theirs)[1:]).all()  # all but the scratch page
    assert np.isfinite(some).all()
    left_out = ~rows & np.asarray(windows.used).reshape(-1)
    assert whole[left_out].any()
    if implementation == "cpu":
        assert not some[left_out].any()


@pytest.mark.parametrize("cfg", [F32, F32_ALIBI], ids=["rope", "alibi"])
def test_forward_in_any_split_and_sequence_gives_the_same_bits(cfg):
    """In float32, because rounding to bfloat16 hides most differences; by kernels, as XLA chooses products by rows."""
    own = {"implementation": "cpu", "linear": "pinned"}
    expected = bits(logits_of(cfg, 1, **own))
    for sequence in (0, 1):
        assert (bits(logits_of(cfg, 8, sequence=sequence, **own)) == expected).all()
    assert (bits(whole_of(cfg)) != expected).any()  # other sums, other bits


@pytest.mark.parametrize("rotary", [{"rope_theta": 100.0}, {"rope_scaling": RopeScaling("linear", factor=8.0)}], ids=str)
def test_position_encoding_obeys_the_config(rotary):
    """A rotary model turns queries and keys, one of linear biases does not, and both tell positions apart."""
    rope = with_fields(ONE_LAYER, position_encoding="rope")
    expected = {cfg: bits(logits_of(cfg, 8)) for cfg in (ONE_LAYER, rope)}
    assert (expected[ONE_LAYER] != expected[rope]).any()
    for cfg, differs in ((ONE_LAYER, False), (rope, True)):
        assert (bits(logits_of(with_fields(cfg, **rotary), 8)) != expected[cfg]).any() == differs


def test_forward_with_pinned_products_gives_the_same_bits_for_any_number_of_rows():
    cfg = with_fields(RANDOM_CFG, num_layers=1)
    expected = bits(logits_of(cfg, 1, 24, linear="pinned"))
    for window, rows in ((1, 33), (8, 104)):
        assert (bits(logits_of(cfg, window, rows, linear="pinned")) == expected).all()


@pytest.mark.parametrize(("linear", "rows_of_products"), [("pinned", {24: {32}, 104: {32}}), ("xla", {24: {24}, 104: {104}})])
def test_forward_multiplies_all_weights_as_its_schedule_says(linear, rows_of_products):
    """The bits of a pass rest on it: on some machines XLA's products give the same ones by luck.

    Products with weights are those of two matrices; attention's have more axes.
    """
    for rows, expected in rows_of_products.items():
        schedule = MANY.schedule.with_budget(rows, 1).with_numerics(linear=linear)
        cache = empty_cache(RANDOM_CFG, schedule)
        program = one_pass.lower(random_model(RANDOM_CFG), RANDOM_CFG, windows_of(1, rows), cache, schedule=schedule).as_text()
        products = re.findall(r"dot_general.*: \(tensor<(\d+)x\d+xbf16>, tensor<\d+x\d+xbf16>\)", program)
        assert len(products) == 7 * RANDOM_CFG.num_layers + 1
        assert {int(found) for found in products} == expected


def test_forward_writes_the_pages_of_its_sequence_and_the_scratch_page_only():
    cache = empty_cache(F32, MANY.schedule)
    _, after, _ = one_pass(random_model(F32), F32, windows_of(8), cache, schedule=MANY.schedule)
    written = [(np.asarray(pool) != 0).any((1, 2)) for pool, _ in after.pools]  # [num_pages, page]
    written += [(np.asarray(pool) != 0).any((1, 3)) for _, pool in after.pools]
    for slots in written:
        assert slots[1].all()  # positions 0 .. 15 of sequence 0
        assert slots[2].tolist() == [True] * 8 + [False] * 8  # 16 .. 23
        assert not slots[3:].any()  # the others
    assert after.length.tolist() == cache.length.tolist()


def test_logits_do_not_depend_on_later_tokens():
    other = TOKENS.copy()
    other[-1] += 1
    first, second = (whole_of(F32, tokens) for tokens in (TOKENS, other))
    assert (bits(first[:-1]) == bits(second[:-1])).all()
    assert (bits(first[-1]) != bits(second[-1])).any()


@pytest.mark.parametrize("tied", [True, False])
def test_init_params_has_the_shapes_and_dtype_of_its_config(tied):
    cfg = dataclasses.replace(RANDOM_CFG, tie_embeddings=tied)
    params = init_params(cfg, jax.random.key(1))
    shapes = jax.tree.map(lambda leaf: (leaf.shape, leaf.dtype), params)
    assert shapes == jax.tree.map(lambda leaf: (leaf.shape, leaf.dtype), param_shapes(cfg))
    assert ("head" in params) is not tied


def test_init_params_is_a_function_of_its_key():
    first, again, other = (init_params(RANDOM_CFG, jax.random.key(seed))["embed"].astype(jnp.float32) for seed in (1, 1, 2))
    assert (bits(first) == bits(again)).all()
    assert (bits(first) != bits(other)).any()


def test_windows_without_tokens_need_no_attention_whether_a_sequence_has_them_or_not():
    """Sequence 0 has two tokens from position 7, sequence 1 none: it stopped drafting. The last window is padding."""
    windows = Windows(
        tokens=np.zeros((3, 2), np.int32),
        sequence=np.array([0, 1, NO_SEQUENCE], np.int32),
        start=np.array([7, 9, 0], np.int32),
        count=np.array([2, 0, 0], np.int32),
    )
    places = place(windows, empty_cache(F32, MANY.schedule), MANY.schedule.numerics.page)
    assert np.asarray(places.looking_from).tolist() == [[7, 8], [NO_POSITION] * 2, [NO_POSITION] * 2]
