"""Bytes and operations of a pass, against numbers worked out by hand."""

import dataclasses

import pytest

from detspec.model.dense import dense_config, with_fields
from detspec.model.params import pass_work
from detspec.roofline import Work
from detspec.schedule import Budget, Numerics, Schedule
from detspec.targets import target

# Per layer: q 8x8, k and v 4x8 each, o 8x8, three of 16x8, two norms of 8: 64 + 64 + 64 + 384 + 16 = 592 weights.
# Two layers, the final norm of 8 and the head of 32 x 8: 1448 multiplied (or added); the embedding is looked up.
CFG = dense_config(vocab_size=32, d_model=8, num_layers=2, num_heads=2, num_kv_heads=1, head_dim=4, d_ff=16, dtype="bfloat16")
SCHEDULE = Schedule(Numerics(page=4, query_tile=2, cache_dtype="bfloat16"), Budget(12, 4))
WEIGHTS, LOGITS, SLOT = 1448 * 2, 2 * 4 * 32, 2 * 4 * 2  # bytes: of all, of one row, of one slot in one layer


def test_pass_reads_weights_once_and_pages_once_a_tile():
    """3 windows of 4 in tiles of 2: 6 tiles. 9 positions lie on 3 pages of 4 slots, in each of 2 layers."""
    work = pass_work(CFG, SCHEDULE, windows=3, context=9)
    assert work.bytes == WEIGHTS + 12 * LOGITS + 6 * 3 * 4 * SLOT * 2
    # Scores and values: 2 x 2 operations for each of 9 positions, 2 heads, 4 dimensions, 2 layers, 12 rows.
    assert work.flop == 2 * 12 * 1448 + 12 * 2 * 2 * 9 * 2 * 4 * 2


def test_pass_with_padding_multiplies_all_rows_and_attends_with_few():
    full, one = (pass_work(CFG, SCHEDULE, windows=windows, context=9) for windows in (3, 1))
    assert full.bytes - one.bytes == 4 * 3 * 4 * SLOT * 2
    assert full.flop - one.flop == 8 * 2 * 2 * 9 * 2 * 4 * 2


def test_decode_step_reads_each_rows_pages_once():
    work = pass_work(CFG, SCHEDULE.fast(5), windows=5, context=9)
    assert work.bytes == WEIGHTS + 5 * LOGITS + 5 * 3 * 4 * SLOT * 2


def test_sliding_layer_reads_its_window_only():
    sliding = with_fields(CFG, sliding_window=4, sliding_layers=(True, False))
    full, less = (pass_work(cfg, SCHEDULE, windows=3, context=9) for cfg in (CFG, sliding))
    assert full.bytes - less.bytes == 6 * 2 * 4 * SLOT  # one page of three, in one layer
    assert full.flop - less.flop == 12 * 2 * 2 * 5 * 2 * 4


def test_tied_head_is_multiplied_without_being_stored_twice():
    """The head's 256 weights are the embedding's; what is multiplied stays."""
    tied = dataclasses.replace(CFG, tie_embeddings=True)
    assert pass_work(tied, SCHEDULE, windows=3, context=9) == pass_work(CFG, SCHEDULE, windows=3, context=9)


@pytest.mark.parametrize(
    ("num_bytes", "flop", "seconds", "bound"), [(8.19e11, 1e12, 1.0, "memory"), (1e9, 3.94e14, 2.0, "arithmetic")]
)
def test_work_takes_as_long_as_what_bounds_it(num_bytes: float, flop: float, seconds: float, bound: str):
    """v5e: 819 GB/s and 197 TFLOP/s."""
    work = Work(bytes=num_bytes, flop=flop)
    assert work.seconds(target("v5e:2x2")) == seconds
    assert work.bound(target("v5e:2x2")) == bound
