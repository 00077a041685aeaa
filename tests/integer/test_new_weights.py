"""Weights in floats that an engine with an integer model is given are turned into integers, as loading does it."""

from pathlib import Path

import jax
import numpy as np
import pytest

import detspec as ds
from detspec.checkpoint.hf import save_hf
from detspec.engine.engine import Engine
from detspec.errors import InputError
from tests.fakes import FAMILY_CFGS, random_model
from tests.integer.models import SCHEDULE, bits, small

CFG = FAMILY_CFGS["gemma3"]  # whose scales go into weights
CONFIG = ds.EngineConfig(max_requests=2, max_len=32, method="none", schedule=SCHEDULE, compile_cache=False)
WEIGHTS = ("integer", "integer8")


def folder(path: Path, factor: float) -> Path:
    """A folder of weights `factor` times as large."""
    save_hf(path, CFG, jax.tree.map(lambda leaf: (leaf * factor).astype(leaf.dtype), random_model(CFG)))
    return path


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    root = tmp_path_factory.mktemp("weights")
    return folder(root / "before", 1.0), folder(root / "after", 1.25)


@pytest.mark.parametrize("weights", WEIGHTS)
def test_weights_in_floats_become_those_of_a_fresh_load(weights: str, folders: tuple[Path, Path]):
    before, after = folders
    engine = Engine(ds.load(before, weights=weights), CONFIG)
    loaded = ds.load(after, weights=weights)
    assert engine.model.digest != loaded.digest, "the control: other weights"
    in_floats = ds.load(after)
    assert loaded.float_cfg == in_floats.cfg
    engine.update_params(in_floats.params)
    assert engine.model.digest == loaded.digest
    pairs = zip(jax.tree.leaves(engine.model.params), jax.tree.leaves(loaded.params), strict=True)
    assert all(a.dtype == b.dtype and np.array_equal(a, b) for a, b in pairs)
    engine.update_params(ds.load(before, weights=weights).params)
    assert engine.model.digest == ds.load(before, weights=weights).digest


@pytest.mark.slow
def test_texts_after_new_weights_in_floats_are_those_of_a_fresh_load(folders: tuple[Path, Path]):
    sampling = ds.SamplingParams(max_tokens=8, temperature=0.8, seed=3)
    engine = Engine(ds.load(folders[0], weights="integer"), CONFIG)
    before = bits(engine.generate([[5, 6, 7]], sampling))
    engine.update_params(ds.load(folders[1]).params)
    found = bits(engine.generate([[5, 6, 7]], sampling))
    assert found != before
    assert found == bits(Engine(ds.load(folders[1], weights="integer"), CONFIG).generate([[5, 6, 7]], sampling))


def test_weights_that_do_not_fit_are_refused(folders: tuple[Path, Path]):
    engine = Engine(ds.load(folders[0], weights="integer"), CONFIG)
    params = random_model(CFG)
    with pytest.raises(InputError, match=r"'final_norm'\] has shape"):
        engine.update_params({**params, "final_norm": params["final_norm"][1:]})
    with pytest.raises(InputError, match="do not fit the model"):
        engine.update_params({**engine.model.params, "other": params["final_norm"]})


def test_integer_model_made_in_memory_says_what_it_takes():
    engine = Engine(small("plain, tied").model, CONFIG)
    with pytest.raises(InputError, match=r"made in memory.*to_integer\.integer_params makes them"):
        engine.update_params(random_model(CFG))
