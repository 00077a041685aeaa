"""Garbage is not collected where much is made that stays, and is afterwards."""

import gc

import pytest

from detspec.garbage import kept_garbage


def collections(number: int) -> int:
    """How often the collector runs while `number` lists are made that stay."""
    ran = []
    gc.callbacks.append(lambda phase, _: ran.append(phase))
    try:
        kept = [[i] for i in range(number)]
    finally:
        gc.callbacks.pop()
    return len(ran) if kept else 0


def test_nothing_is_collected_inside_and_something_after():
    with kept_garbage():
        assert collections(100_000) == 0
        with kept_garbage():
            pass
        assert collections(100_000) == 0
    assert collections(100_000) > 0


def test_collector_comes_back_after_an_error_and_stays_off_where_it_was_off():
    with pytest.raises(ZeroDivisionError), kept_garbage():
        assert 1 / 0
    assert gc.isenabled()
    gc.disable()
    try:
        with kept_garbage():
            pass
        assert not gc.isenabled()
    finally:
        gc.enable()
