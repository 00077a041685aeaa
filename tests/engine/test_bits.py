"""Bits held against bits."""

import numpy as np

from detspec.engine.bits import first_difference, same_bits


def test_first_difference_is_the_first_index_of_any_pair_that_counts():
    tokens = np.asarray([[5, 6, 7], [5, 6, 8]], np.int32)
    logprobs = np.asarray([[0, -1, -2], [0, -1, -2]], np.float32)
    other = logprobs.copy()
    assert first_difference([(tokens, tokens), (logprobs, other)]) is None
    other[1, 2] = np.nextafter(np.float32(-2), np.float32(0))
    assert first_difference([(tokens, tokens), (logprobs, other)]) == (1, 2)
    other[0, 1] = 9
    assert first_difference([(tokens, tokens), (logprobs, other)], np.asarray([[True, False, True]] * 2)) == (1, 2)


def test_bits_of_zeros_differ_by_sign_and_those_of_equal_nans_do_not():
    a, b = np.asarray([0.0, np.nan, 1.0], np.float32), np.asarray([-0.0, np.nan, 1.0], np.float32)
    assert same_bits(a, b).tolist() == [False, True, True]
