"""Keys and values in int8 by the reference attention: scales are a row's own, so neighbours in a pass change no bit."""

import numpy as np
import pytest

from detspec.generation.score import score
from detspec.ops.attention import int8_pages
from detspec.ops.linear.int8 import QTensor, quantize
from tests.fakes import bits, random_model
from tests.shelf import FEW

pytestmark = pytest.mark.optimised

CFG = FEW.cfg
TEXT, *OTHERS = [np.random.default_rng(i).integers(0, CFG.vocab_size, 21 + i).tolist() for i in range(3)]


def scored(other: list[int], cache_dtype: str, *, window: int = 4, max_len: int = 32) -> list[int]:
    """The bits that the canonical pass gives TEXT next to `other`."""
    schedule = FEW.schedule.with_budget(16, window).with_numerics(cache_dtype=cache_dtype)
    return bits(score(random_model(CFG), CFG, [other, TEXT], schedule=schedule, max_len=max_len)[1][1:]).tolist()


def test_score_in_int8_has_the_same_bits_next_to_other_texts_and_in_other_windows():
    expected = scored(OTHERS[0], "int8")
    assert scored(OTHERS[1], "int8") == expected
    assert scored(OTHERS[1], "int8", window=1) == expected
    assert scored(OTHERS[0], "float32") != expected


def test_score_with_one_scale_for_all_rows_of_a_pass_depends_on_other_texts(monkeypatch):
    def by_tensor(x):
        rounded = quantize(x.reshape(1, -1))
        return QTensor(rounded.values.reshape(x.shape), rounded.scale.repeat(x.shape[0] * x.shape[1]).reshape(x.shape[:2]))

    monkeypatch.setattr(int8_pages, "quantize", by_tensor)
    first, second = (scored(other, "int8", max_len=33) for other in OTHERS)  # no program of another test has this length
    assert first != second
