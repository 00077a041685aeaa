"""An engine with an integer model compares the device's operations with the hashes of the package before it commits anything.

On CPUs it does not, so these tests say of a CPU that it is yet to be checked. The controls falsify one operation.
"""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import pytest

from detspec.compile_cache import CompileCache
from detspec.engine.conformance import check_conformance, device_functions, expected_of
from detspec.engine.device import Device
from detspec.engine.engine import Engine
from detspec.engine.engine_config import EngineConfig
from detspec.errors import InputError
from detspec.integer import conformance
from detspec.model.to_integer import integer_config
from detspec.ops import integer_choices
from detspec.sampling_params import SamplingParams
from tests.integer.falsified import falsified
from tests.integer.models import CFGS, FAMILIES, SCHEDULE, small

NAME = "plain, tied"
CONFIG = EngineConfig(max_requests=2, max_len=32, method="none", schedule=SCHEDULE, compile_cache=False)
BITS = (15, 8)


def unchecked(bits: int = 15) -> Device:
    """A device that is not trusted."""
    device = Device(small(NAME, bits).model, CONFIG)
    assert device.conforms, "a CPU is trusted"
    device.conforms = False
    return device


@pytest.fixture(scope="module", params=BITS)
def functions(request: pytest.FixtureRequest) -> tuple[int, SimpleNamespace]:
    return request.param, device_functions(SCHEDULE.numerics, request.param)


def test_device_with_the_hashes_of_the_package_is_checked_once(functions: tuple[int, SimpleNamespace], tmp_path: Path):
    bits, right = functions
    device = unchecked(bits)
    device.cache = CompileCache(tmp_path)
    check_conformance(device, right)
    assert device.conforms
    assert len(list(tmp_path.iterdir())) == 1
    again = unchecked(bits)
    again.cache = CompileCache(tmp_path)
    check_conformance(again, functions=SimpleNamespace())  # which has no operation that could run
    assert again.conforms
    other = unchecked(23 - bits)
    other.cache = CompileCache(tmp_path)
    with pytest.raises(AttributeError):
        check_conformance(other, functions=SimpleNamespace())


@pytest.mark.parametrize("name", ["added", "product", "gated", "penalised"])
def test_control_first_operation_that_differs_is_named_and_nothing_is_kept(
    functions: tuple[int, SimpleNamespace], name: str, tmp_path: Path
):
    bits, right = functions
    device = unchecked(bits)
    device.cache = CompileCache(tmp_path)
    wrong = SimpleNamespace(**{**vars(right), name: lambda *given: jax.tree.map(lambda x: x + 1, getattr(right, name)(*given))})
    said = {"added": "sum with limits", "product": "product", "gated": "gate", "penalised": "penalties"}[name]
    with pytest.raises(InputError, match=f"the operation '{said}' of integer8?/1 has other bits on this device"):
        check_conformance(device, wrong)
    assert not device.conforms
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
@pytest.mark.parametrize("way", ["generate", "score", "prepare"])
def test_engine_on_a_device_with_a_falsified_operation_commits_nothing(way: str, monkeypatch: pytest.MonkeyPatch):
    def asked(engine: Engine) -> Any:
        if way == "prepare":
            return engine.prepare(1)
        if way == "score":
            return engine.score([[1, 2, 3, 4]], 1)
        return engine.generate([[1, 2, 3]], SamplingParams(max_tokens=2))

    assert asked(Engine.over(unchecked())), "the control: the operation as it is"
    wrong = falsified(integer_choices, "logprobs", "SMALLEST_LOGPROB)", "-1)")
    monkeypatch.setattr(integer_choices, "logprobs", wrong.logprobs)
    with pytest.raises(InputError, match="the operation 'log-probabilities'"):
        asked(Engine.over(unchecked()))


@pytest.mark.parametrize("bits", BITS)
def test_operations_that_a_model_does_not_have_are_not_asked_for(bits: int):
    plain = expected_of(integer_config(CFGS[NAME], bits))
    assert list(plain) == [trial.name for trial in conformance.cases()]
    assert plain["product"] == conformance.expected(bits)["product"]
    more = expected_of(integer_config(FAMILIES["gemma3"], bits)).items() - plain.items()
    assert dict(more) == {name: digest for name, digest in conformance.family_expected().items() if f"{bits} bits" in name}
    assert expected_of(integer_config(FAMILIES["exaone4"], bits)).keys() - plain.keys() == {f"norm after, {bits} bits"}
    assert conformance.soft_cap_expected().items() <= expected_of(integer_config(FAMILIES["gemma2"], bits)).items()
