"""Conformance with "integer/1": this device gives the hashes of the package, and each falsified operation is named."""

from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from detspec.checkpoint.load import load
from detspec.doctor.conformance import SHIPPED, ConformanceReport
from detspec.engine.conformance import device_functions
from detspec.environment import chosen_schedule
from detspec.integer import conformance, spec
from detspec.schedule import Numerics
from tests.integer.models import SCHEDULE

NUMERICS = chosen_schedule(None, load(SHIPPED, weights="integer").cfg).numerics
KNOWN = {name: digest for name, digest in conformance.expected().items() if name != conformance.TEXTS}

KNOWN_OF_8_BITS = {name: digest for name, digest in conformance.expected(8).items() if name != conformance.TEXTS}


@pytest.fixture(scope="module")
def functions() -> SimpleNamespace:
    return device_functions(NUMERICS)


@pytest.fixture(scope="module")
def found(functions) -> dict[str, str]:
    return conformance.digests(functions)


def test_operations_of_this_device_have_the_hashes_of_the_package(found):
    assert found == KNOWN


def test_definition_has_them_too():
    assert conformance.digests() == KNOWN
    assert conformance.digests(bits=8) == KNOWN_OF_8_BITS


def test_operations_with_activations_of_8_bits_have_hashes_of_their_own():
    assert list(KNOWN_OF_8_BITS) == list(conformance.OF_BITS)
    assert conformance.digests(device_functions(NUMERICS, 8), 8) == KNOWN_OF_8_BITS
    for name, digest in KNOWN_OF_8_BITS.items():
        assert digest != KNOWN[name]


def test_operations_of_further_families_have_hashes_of_their_own():
    expected = conformance.family_expected()
    assert conformance.family_digests() == expected
    assert conformance.family_digests(partial(device_functions, NUMERICS)) == expected
    assert len({*expected.values(), *KNOWN.values()}) == len(expected) + len(KNOWN)


def test_operations_of_soft_caps_have_hashes_of_their_own(functions):
    expected = conformance.soft_cap_expected()
    assert conformance.soft_cap_digests() == conformance.soft_cap_digests(functions) == expected
    assert not {*expected.values()} & {*KNOWN.values()}
    changed = SimpleNamespace(**{**vars(functions), "soft_capped": with_another_bit(functions.soft_capped)})
    report = ConformanceReport("a device", conformance.soft_cap_digests(changed), expected)
    assert report.differing == ["soft cap"], "the control: another bit"


@pytest.mark.parametrize("name", ["gelu_gated", "normed_after"])
def test_control_operation_of_further_families_with_one_other_bit_is_named(name):
    def changed(bits: int) -> SimpleNamespace:
        functions = conformance.definition(bits)
        return SimpleNamespace(**{**vars(functions), name: with_another_bit(getattr(functions, name))})

    expected = conformance.family_expected()
    report = ConformanceReport("a device", conformance.family_digests(changed), expected)
    assert len(report.differing) == 2


HOPPER = Numerics(page=16, implementation="pallas_gpu", linear="pinned", cache_dtype="int8", interpret=True)


@pytest.mark.parametrize("numerics", [SCHEDULE.numerics, pytest.param(HOPPER, marks=pytest.mark.kernels)], ids=["xla", "gpu"])
def test_operations_for_other_devices_have_them(numerics: Numerics):
    assert conformance.digests(device_functions(numerics)) == KNOWN
    assert conformance.digests(device_functions(numerics, 8), 8) == KNOWN_OF_8_BITS


def with_another_bit(right: Callable[..., Any]) -> Callable[..., Any]:
    """An operation one bit of whose result is another one."""

    def wrong(*given: Any) -> Any:
        found = right(*given)
        first, *others = found if isinstance(found, tuple) else (found,)
        first = np.array(first)
        first.reshape(-1)[5] ^= 1
        return type(found)(first, *others) if hasattr(found, "_fields") else (first, *others) if others else first

    return wrong


CASES = {
    "rounded_shift": "rounded shift",
    "scaled": "scaled",
    "added": "sum with limits",
    "normed": "norm",
    "product": "product",
    "turned_by": "turns",
    "sine": "sine",
    "cached": "keys and values",
    "attended": "attention",
    "power": "power of two",
    "gated": "gate",
    "logprobs": "log-probabilities",
    "gumbel": "noise",
    "tempered": "temperature",
    "kept": "filters",
    "penalised": "penalties",
}


def test_each_operation_has_a_case():
    assert list(CASES.values()) == list(KNOWN)


@pytest.mark.parametrize("name", list(CASES))
def test_control_operation_with_one_other_bit_is_named(name, functions):
    changed = SimpleNamespace(**{**vars(functions), name: with_another_bit(getattr(functions, name))})
    expected = conformance.expected()
    report = ConformanceReport("a device", {**expected, **conformance.digests(changed)}, expected)
    assert report.differing[0] == CASES[name]
    assert f"the operation '{CASES[name]}' has other bits here" in report.table()


def test_wrong_constant_is_found():
    """A real falsification, in the arithmetic itself: a rounding down instead of half up."""
    down = device_functions(NUMERICS, rounded_shift=lambda x, r: x >> jnp.minimum(r, 31))
    assert conformance.digests(down)["rounded shift"] != KNOWN["rounded shift"]


def test_report_of_equal_hashes_has_one_for_all():
    report = ConformanceReport("a device", conformance.expected(), conformance.expected())
    assert f"OK {conformance.of_all(conformance.expected())}" in report.table()
    assert spec.VERSION in report.table()
