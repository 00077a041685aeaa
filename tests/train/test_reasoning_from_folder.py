"""A run that starts from a model folder and learns from worked examples in a file."""

import dataclasses
import json
from pathlib import Path

import jax
import numpy as np
import pytest

import detspec as ds
from detspec.checkpoint.hf import save_hf
from detspec.checkpoint.orbax_folder import save_orbax
from detspec.config import ThinkingConfig
from detspec.errors import InputError
from detspec.model.dense import dense_config
from detspec.model.params import Params, param_shapes
from detspec.read_json import differing_entries
from detspec.train import reasoning
from detspec.train.experiment import Experiment, Result
from detspec.train.optimizer import OptimizerConfig
from detspec.train.problems.chunks import Batch
from detspec.train.problems.tasks import tokenizer_of
from detspec.train.problems.traces import Traces
from detspec.train.problems.words import word_tokenizer, words_in
from detspec.train.reasoning import ReasoningConfig
from detspec.train.run import run_experiment

QUESTION = "Ann has 2. Bob has 3. How many?"
CFG = dense_config(
    vocab_size=32, d_model=16, num_layers=2, num_heads=2, num_kv_heads=1, head_dim=8, d_ff=24, max_position=64, dtype="bfloat16"
)


@pytest.fixture
def folder(tmp_path: Path) -> str:
    """A Hugging Face folder of a backbone in bfloat16, with its tokenizer."""
    tokenizer, rng = word_tokenizer(words_in(QUESTION, "5 A:")), np.random.default_rng(3)
    params = jax.tree.map(lambda leaf: rng.normal(0, 0.1, leaf.shape).astype(leaf.dtype), param_shapes(CFG))
    save_hf(tmp_path / "hf", CFG, params, tokenizer_json=tokenizer.to_str(), eos_ids=(0,))
    return str(tmp_path / "hf")


def config_of(folder: str, path: Path, **changes) -> ReasoningConfig:
    line = {"question": QUESTION, "steps": [{"text": "2", "mark": 9}, {"text": "5", "mark": 20}], "answer": "5"}
    path.write_text(json.dumps(line) + "\n")
    config = ReasoningConfig(
        backbone=folder,
        thinking=ThinkingConfig(chunk=4, in_layer=0, out_layer=1, max_thought=4, end_id=0),
        task=Traces(path=str(path), tokenizer_from=folder),
        arm="thinking",
        max_ops=1,
        seq_len=24,
        num_steps=2,
        batch_size=2,
        optimizer=OptimizerConfig(peak_lr=1e-3, final_lr=1e-4, warmup_steps=1),
        eval_ops=(1,),
        eval_problems=2,
    )
    return dataclasses.replace(config, **changes)


@pytest.mark.slow
def test_run_starts_from_the_weights_of_the_folder_and_ends_as_a_model_that_thinks(folder: str, tmp_path: Path):
    config = config_of(folder, tmp_path / "traces.jsonl")
    loaded, experiment = ds.load(folder), config.experiment(tmp_path)
    start = experiment.init_params()
    f32 = jax.tree.map(lambda leaf: np.asarray(leaf, np.float32), loaded.params)
    thinking = start.pop("thinking")
    jax.tree.map(np.testing.assert_array_equal, start, f32)
    jax.tree.map(np.testing.assert_array_equal, thinking["thinker"]["layer"], f32["layers"][-1])
    jax.tree.map(np.testing.assert_array_equal, thinking["compressor"]["layer"], f32["layers"][0])
    thoughts = experiment.batch_at(0).thoughts
    assert {tuple(thought) for thought in thoughts.reshape(-1, 4)} >= {(0, -1, -1, -1)}
    result = run_experiment(experiment, workdir=tmp_path, progress=False)
    trained = ds.load(result.export)
    assert (trained.cfg.thinking, trained.eos_ids, trained.cfg.dtype) == (config.thinking, (0,), "float32")
    assert trained.tokenizer is not None


def test_chain_of_thought_from_a_folder_has_its_very_shape(folder: str, tmp_path: Path):
    config = config_of(folder, tmp_path / "traces.jsonl", arm="cot")
    experiment = config.experiment(tmp_path)
    assert jax.tree.structure(experiment.init_params()) == jax.tree.structure(ds.load(folder).params)


def test_model_that_thinks_goes_on_with_its_own_thinker_and_is_refused_by_what_would_drop_it(folder: str, tmp_path: Path):
    config = config_of(folder, tmp_path / "traces.jsonl")
    experiment = config.experiment(tmp_path)
    trained = jax.tree.map(lambda leaf: jax.device_put(np.asarray(leaf) + 1), experiment.init_params())
    save_orbax(tmp_path / "thinks", config.model(tokenizer_of(config.task)), trained, side_files_from=folder).result()
    further = dataclasses.replace(config, backbone=str(tmp_path / "thinks"))
    jax.tree.map(np.testing.assert_array_equal, further.experiment(tmp_path / "further").init_params(), trained)
    with pytest.raises(InputError, match=r"thinks: it goes on only with arm='thinking' and thinking=.*, got arm='cot'"):
        dataclasses.replace(further, arm="cot")
    with pytest.raises(InputError, match=r"got arm='thinking' and ThinkingConfig\(chunk=8"):
        dataclasses.replace(further, thinking=dataclasses.replace(config.thinking, chunk=8))


def test_tokenizer_with_more_words_than_the_model_is_refused(folder: str, tmp_path: Path):
    word_tokenizer([f"w{i}" for i in range(64)]).save(str(tmp_path / "tokenizer.json"))
    config = config_of(folder, tmp_path / "traces.jsonl", task=Traces(str(tmp_path / "traces.jsonl"), str(tmp_path)))
    with pytest.raises(InputError, match=r"tokenizer has 66 tokens, the model in .* only 32"):
        config.experiment(tmp_path)


def test_folder_that_is_none_is_refused(folder: str, tmp_path: Path):
    with pytest.raises(InputError, match="no such folder"):
        config_of(str(tmp_path / "nowhere"), tmp_path / "traces.jsonl")


@pytest.mark.slow
def test_run_from_a_folder_that_was_stopped_goes_on_to_the_same_bits(folder: str, tmp_path: Path):
    """In the arm that compiles fastest; a run that thinks is stopped in `test_reasoning.py`."""

    def experiment_in(workdir: Path, *, stop_at: int | None = None) -> Experiment:
        workdir.mkdir(exist_ok=True)
        experiment = config_of(folder, tmp_path / "traces.jsonl", arm="cot", checkpoint_every=1).experiment(workdir)

        def batch_at(step: int) -> Batch:
            if step == stop_at:
                raise KeyboardInterrupt
            return experiment.batch_at(step)

        return dataclasses.replace(experiment, batch_at=batch_at, finish=lambda params: Result({}, save(params, workdir)))

    def save(params: Params, workdir: Path) -> Path:
        np.savez(workdir / "weights.npz", *map(np.asarray, jax.tree.leaves(params)))
        return workdir / "weights.npz"

    whole, parts = tmp_path / "whole", tmp_path / "parts"
    expected = run_experiment(experiment_in(whole), workdir=whole, progress=False).export
    with pytest.raises(KeyboardInterrupt):
        run_experiment(experiment_in(parts, stop_at=1), workdir=parts, progress=False)
    found = run_experiment(experiment_in(parts), workdir=parts, progress=False).export
    assert found.read_bytes() == expected.read_bytes()


def test_problem_of_the_file_that_does_not_fit_is_refused_by_its_line_before_the_first_step(folder: str, tmp_path: Path):
    config, path = config_of(folder, tmp_path / "traces.jsonl"), tmp_path / "traces.jsonl"
    good = path.read_text()
    late = json.loads(good) | {"steps": [{"text": "5 5 5 5", "mark": 20}]}
    for name, problem in {"learnt": path, "asked": tmp_path / "test.jsonl"}.items():
        problem.write_text(good * 2 + json.dumps(late) + "\n")
        task = Traces(str(problem), folder)
        changed = {"task": task} if name == "learnt" else {"task": Traces(config.task.path, folder), "eval_task": task}
        with pytest.raises(InputError, match=rf"{problem}, line 3: .* the thought after chunk .* has 5 tokens"):
            dataclasses.replace(config, **changed).experiment(tmp_path)
        problem.write_text(good)
        dataclasses.replace(config, **changed | {"arm": "cot"}).experiment(tmp_path)


def test_evaluations_ask_problems_of_their_own_file(folder: str, tmp_path: Path, monkeypatch):
    config, test = config_of(folder, tmp_path / "traces.jsonl"), tmp_path / "test.jsonl"
    test.write_text((tmp_path / "traces.jsonl").read_text().replace("Ann", "Bob"))
    (ann,) = word_tokenizer(words_in(QUESTION, "5 A:")).encode("Ann").ids
    asked = []
    monkeypatch.setattr(reasoning, "accuracy_by_operations", lambda *given, **settings: asked.append(given[1]) or {1: 0.5})
    checked: list[str] = []
    monkeypatch.setattr(Traces, "check", lambda task, check_fn: checked.append(task.path))
    for eval_task in (None, Traces(str(test), folder)):
        checked.clear()
        experiment = dataclasses.replace(config, eval_task=eval_task).experiment(tmp_path)
        params = experiment.init_params()
        assert checked == [config.task.path, *([] if eval_task is None else [eval_task.path])]  # each file once
        assert ann in experiment.batch_at(0).tokens
        assert (ann in drawn_by(experiment, params, monkeypatch)) == (eval_task is None)
        experiment.finish(params)
        assert asked.pop() == (eval_task or config.task)


def drawn_by(experiment: Experiment, params: Params, monkeypatch) -> np.ndarray:
    """The tokens of an evaluation in passing."""
    seen: list[np.ndarray] = []
    monkeypatch.setattr(reasoning, "taught_loss", lambda params, cfg, batch: seen.append(batch.tokens) or (0.0, {}))
    experiment.evaluate(params, 0)
    return seen[0]


def test_run_does_not_go_on_with_other_problems_in_the_file(folder: str, tmp_path: Path):
    config, path = config_of(folder, tmp_path / "traces.jsonl"), tmp_path / "traces.jsonl"
    before = config.experiment(tmp_path).record
    assert config_of(folder, path).experiment(tmp_path).record == before
    path.write_text(path.read_text().replace('"5"', '"3"'))
    after = dataclasses.replace(config, task=Traces(str(path), folder)).experiment(tmp_path).record
    assert [name for name, _, _ in differing_entries(before, after)] == ["data"]
