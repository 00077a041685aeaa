"""All that tests of trainers need: their packages imported before warnings are errors, dtypes promoted as they expect."""

import warnings

import jax
import pytest

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    import tunix.rl.grpo.grpo_learner

from detspec.checkpoint.load import Model
from tests.engine.byte_model import load_folder

assert tunix
jax.config.update("jax_numpy_dtype_promotion", "standard")
jax.config.update("jax_numpy_rank_promotion", "allow")


@pytest.fixture(scope="session")
def trained_model(tmp_path_factory: pytest.TempPathFactory) -> Model:
    """A small model of bytes."""
    return load_folder(tmp_path_factory.mktemp("models") / "bytes")
