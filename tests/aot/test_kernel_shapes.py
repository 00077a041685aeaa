"""The named shapes: which there are, and how much work they are."""

import dataclasses

import pytest
from kernel_shapes import LinearShape, attention_shapes, linear_shapes

from detspec.targets import canonical_schedule, target

V5E = target("v5e:2x2")
SHAPES = {shape.name: shape for shape in attention_shapes()}


def test_named_shapes_are_those_of_real_models_with_windows_caps_and_odd_lengths():
    assert SHAPES["llama3_1_8b/full/16x16"].num_heads == 32
    assert SHAPES["gemma3_1b/sliding/16x16"].scores.sliding_window == 512
    assert SHAPES["gemma2_2b/full/decode8"].scores.cap == 50.0
    assert SHAPES["qwen3_8b/full/5x8 odd"].max_len == 999
    assert {shape.rows for shape in linear_shapes()} == {1, 8, 32, 256}


def test_work_of_attention_counts_what_queries_see_and_pages_their_tiles_read():
    """2 windows of 20 queries at positions 236 .. 255, pages of 128 slots: tiles of 16 and 4, both read both pages.

    They see 237 + ... + 256 = 4930 positions. A page of keys and values has 2 x 128 slots x 8 heads x 128 numbers x 2 bytes.
    """
    schedule = canonical_schedule(V5E)
    shape = dataclasses.replace(SHAPES["llama3_1_8b/full/16x16"], groups=2, window=20, max_len=256)
    work = shape.work(schedule)
    assert work.flop == 4 * 2 * 4930 * 32 * 128
    assert work.bytes == 2 * (2 + 2) * 2 * 128 * 8 * 128 * 2 + 2 * 20 * 32 * 128 * (2 + 4)


def test_work_of_a_sliding_window_leaves_out_pages_before_it():
    """A query at position 299 sees 100 positions, 200 .. 299: pages 1 and 2 of three."""
    shape = SHAPES["llama3_1_8b/full/16x16"]
    scores = dataclasses.replace(shape.scores, sliding_window=100)
    shape = dataclasses.replace(shape, groups=1, window=1, max_len=300, scores=scores)
    work = shape.work(canonical_schedule(V5E))
    assert work.flop == 4 * 100 * 32 * 128
    assert work.bytes == 2 * 2 * 128 * 8 * 128 * 2 + 32 * 128 * 6


@pytest.mark.parametrize(("rows", "num_bytes"), [(1, 2 * (12 + 3) + 4 * 4), (5, 2 * (12 + 15) + 4 * 20)])
def test_work_of_a_product_reads_weights_once(rows, num_bytes):
    work = LinearShape("x", rows, num_in=3, num_out=4).work(canonical_schedule(V5E))
    assert (work.bytes, work.flop) == (num_bytes, 2 * rows * 12)
