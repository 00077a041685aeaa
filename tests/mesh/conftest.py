"""Tests on eight simulated CPU devices, in a run of their own: the number of devices is that of the process."""

import os

import pytest

from detspec.checkpoint.digest import digest_model
from detspec.checkpoint.load import Model
from detspec.config import ModelConfig
from detspec.mesh import make_mesh, param_specs, put
from tests.fakes import random_model

NUM_DEVICES = 8
HAS_DEVICES = os.environ.get("JAX_NUM_CPU_DEVICES") == str(NUM_DEVICES)
collect_ignore_glob = [] if HAS_DEVICES else ["*.py"]


def model_on(cfg: ModelConfig, num_chips: int) -> Model:
    """A random model over `num_chips` devices, the same weights for any number."""
    params = random_model(cfg)
    if num_chips > 1:
        params = put(params, make_mesh(cfg, num_chips), param_specs(cfg))
    return Model(cfg, params, None, (), digest_model(cfg, random_model(cfg)))


@pytest.fixture(scope="session", autouse=True)
def devices() -> None:
    import jax

    assert jax.device_count() == NUM_DEVICES
