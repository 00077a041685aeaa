"""Export of a trained model: decided before the first step, and read back with the bits of the last one."""

import dataclasses
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

import detspec as ds
from detspec.checkpoint.load import cast_params
from detspec.checkpoint.store import Store
from detspec.errors import InputError
from detspec.model.attention import Attention
from detspec.model.params import init_params
from detspec.model.weights import weight
from detspec.train.batches import Phase
from detspec.train.export import describe_export, describe_own
from detspec.train.language import LanguageConfig
from detspec.train.optimizer import OptimizerConfig, make_optimizer
from detspec.train.run import run_experiment
from detspec.train.step import init_state
from tests.examples import example
from tests.train.test_run import write_corpus

FITTING = ds.dense_config(300, 32, 1, 2, 1, 16, 48, tie_embeddings=True, max_position=64, dtype="float32")


def with_mixer(mixer: Any) -> ds.ModelConfig:
    return dataclasses.replace(FITTING, kinds=(dataclasses.replace(FITTING.layer(0), mixer=mixer),))


def flat_bytes(params) -> list[bytes]:
    return [np.asarray(leaf).tobytes() for leaf in jax.tree.leaves(params)]


def test_model_of_a_published_family_becomes_a_hugging_face_folder():
    assert describe_export(Path("run"), FITTING).endswith("run/export: a Hugging Face folder (llama), in bfloat16")


def test_positions_that_no_family_has_make_a_folder_of_our_own():
    cfg = with_mixer(dataclasses.replace(FITTING.layer(0).mixer, positions="alibi"))
    line = "run/export: a folder of detspec's own, for detspec.load('run/export'), because no family of Hugging Face has such a"
    assert line in describe_export(Path("run"), cfg)
    assert describe_own(Path("run"), FITTING).endswith("for detspec.load('run/export')")


def test_weight_that_no_family_has_a_name_for_makes_a_folder_of_our_own(monkeypatch: pytest.MonkeyPatch):
    declared = Attention.weights
    monkeypatch.setattr(
        Attention, "weights", lambda self, cfg: {**declared(self, cfg), "value_mix": weight("H H", {"H": self.head_dim})}
    )
    assert "a folder of detspec's own" in describe_export(Path("run"), FITTING)


@dataclasses.dataclass(frozen=True)
class Dilated(Attention):
    steps: Any = 1


def test_layers_that_no_folder_can_hold_are_refused_before_the_first_step(tmp_path: Path):
    config = LanguageConfig(
        model=with_mixer(Dilated(2, 1, 16, steps=2)),
        corpus="missing",
        phases=(Phase(1, 1, 16),),
        optimizer=OptimizerConfig(1e-3, 1e-4, 0),
    )
    assert ", kinds=(Dilated,))" in describe_export(Path("run"), config.model)
    for steps, why in ((len, "not JSON serializable"), ((1, 2), "would not come back as they are")):
        model = with_mixer(Dilated(2, 1, 16, steps=steps))
        with pytest.raises(InputError, match=f"no folder can hold layers of kind Dilated: .*{why}"):
            dataclasses.replace(config, model=model).experiment(tmp_path)
    namesake = type("Attention", (Dilated,), {})
    with pytest.raises(InputError, match=r"no folder can hold layers of kind Attention: .* a name other than Attention and"):
        describe_own(tmp_path, with_mixer(namesake(2, 1, 16)))


@pytest.mark.slow
def test_attention_of_the_page_is_trained_exported_loaded_and_generates(tmp_path: Path, tmp_path_factory):
    page = example("An attention of your own", tmp_path_factory)
    cfg = with_mixer(page.GatedAttention(**vars(FITTING.layer(0).mixer)))
    config = LanguageConfig(
        model=cfg,
        corpus=str(write_corpus(tmp_path / "corpus")),
        phases=(Phase(num_steps=3, batch_size=4, seq_len=16),),
        optimizer=OptimizerConfig(peak_lr=3e-3, final_lr=1e-4, warmup_steps=1),
        holdout_one_in=3,
    )
    experiment = config.experiment(tmp_path)
    assert f"detspec.load('{tmp_path}/export', kinds=(GatedAttention,))" in experiment.exports
    result = run_experiment(experiment, workdir=tmp_path, progress=False)
    first = init_state(experiment.init_params(), make_optimizer(config.optimizer, config.num_steps))
    with Store(tmp_path / "checkpoints") as store:
        last = store.restore(3, first)
    model = ds.load(result.export, kinds=(page.GatedAttention,))
    expected_cfg, expected = cast_params(cfg, last.params, "bfloat16")
    assert model.cfg == expected_cfg
    assert flat_bytes(model.params) == flat_bytes(expected)
    assert flat_bytes(model.params) != flat_bytes(init_params(expected_cfg, jax.random.key(0)))
    assert model.eos_ids == (0,)
    assert model.tokenizer is not None
    prompt = model.tokenizer.encode("def f")
    state = ds.generate(model.params, model.cfg, [prompt], ds.SamplingParams(max_tokens=4, ignore_eos=True))
    assert int(state.committed[0]) == len(prompt) + 4
