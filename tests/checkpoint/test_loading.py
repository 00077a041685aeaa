"""How a model was loaded goes with it: into manifests, and to the next folder of weights."""

from pathlib import Path

import jax
import pytest

from detspec.checkpoint.hf import save_hf
from detspec.checkpoint.load import load
from detspec.config import RopeScaling
from detspec.errors import InputError
from detspec.jobs.manifest import model_facts
from detspec.model.dense import with_fields
from detspec.model.loading import AS_IT_IS, Loading
from detspec.model.params import init_params
from tests.fakes import RANDOM_CFG


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with factors of their own for long texts."""
    scaling = RopeScaling("longrope", 4.0, 16, short_factors=(1.0, 1.5, 2.0, 2.5), long_factors=(2.0, 3.0, 5.0, 9.0))
    cfg = with_fields(RANDOM_CFG, rope_scaling=scaling, max_position=16, head_dim=8)
    path = tmp_path_factory.mktemp("loading") / "phi3"
    save_hf(path, cfg, init_params(cfg, jax.random.key(0)), eos_ids=())
    return path


@pytest.mark.parametrize("weights", [None, "int8", "integer"])
def test_manifest_says_how_a_model_was_loaded_and_it_is_loaded_so_again(folder: Path, weights: str | None):
    model = load(folder, weights=weights, long_texts=True)
    facts = model_facts(model)
    assert (facts["weights"], facts["long_texts"]) == (weights, True)
    assert load(folder, **model.loading.keywords).digest == model.digest
    other = load(folder, weights=weights)
    assert "long_texts" not in model_facts(other), "the control"
    assert other.digest != model.digest


def test_config_of_a_loading_is_that_of_the_loaded_model(folder: Path):
    cfg = load(folder).cfg
    for loading in (AS_IT_IS, Loading("int8"), Loading("integer8", long_texts=True)):
        assert loading.config(cfg) == load(folder, **loading.keywords).cfg


@pytest.mark.parametrize("given", [{"weights": "int4"}, {"long_texts": "yes"}])
def test_unknown_way_to_load_is_refused(given: dict, folder: Path):
    with pytest.raises(InputError, match=next(iter(given))):
        load(folder, **given)
