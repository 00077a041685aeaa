"""The harness asks `detspec serve` over HTTP, and gets the values of the adapter in one process, to the last digit."""

import json

import pytest
from lm_eval import simple_evaluate
from lm_eval.tasks import TaskManager

import detspec.adapters.lm_eval  # noqa: F401  # registers the model
from detspec.checkpoint.load import load
from tests.engine.byte_model import write_folder
from tests.serve.running import make_engine, serving

TASKS = ("local_choice", "local_rolling", "local_write")
SHAPE = {"max_len": 128, "schedule": None}  # the adapter has the schedule of the device, too


def samples(tasks, model: str, args: dict, names=TASKS) -> dict[str, list[str]]:
    """Answers of each document of each task, in order."""
    manager = TaskManager(include_path=str(tasks), include_defaults=False)
    found = simple_evaluate(model=model, model_args=args, tasks=list(names), task_manager=manager, bootstrap_iters=0)
    return {name: [json.dumps(sample["filtered_resps"]) for sample in found["samples"][name]] for name in names}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Texts begin with token 1: the harness's client takes token 0 for none."""
    path = write_folder(tmp_path_factory.mktemp("models") / "bytes")
    (path / "tokenizer_config.json").write_text(json.dumps({"bos_token": '"'}))
    return path


@pytest.mark.parametrize("num_concurrent", [1, 8])
def test_answers_over_http_are_those_in_one_process(folder, tasks, num_concurrent):
    """In rolling windows the client keeps two positions of its `max_length` free, the adapter one of its `max_len`."""
    here = samples(tasks, "detspec", {"pretrained": str(folder), "max_len": 120, "max_requests": 8})
    with serving(make_engine(load(folder), **SHAPE)) as server:
        client = {"base_url": f"{server.url}/v1/completions", "model": "bytes", "tokenizer_backend": "auto"}
        there = samples(tasks, "local-completions", {**client, "num_concurrent": num_concurrent, "max_length": 121})
    assert there == here
