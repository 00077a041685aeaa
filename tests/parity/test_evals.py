"""The harness's answers compared with those of its own model for transformers, on the shipped model and local tasks."""

import json
import os
from pathlib import Path

os.environ["HF_DATASETS_OFFLINE"] = os.environ["HF_HUB_OFFLINE"] = "1"  # before the harness is imported

import numpy as np
import pytest

from detspec.checkpoint.folder import find_folder
from detspec.cli.commands import main
from tests.evals.local_tasks import Size, write_tasks
from tests.evals.runs import evaluate, samples_of

TASKS = ("local_choice", "local_rolling", "local_write")
SIZE = Size(num_docs=int(os.environ.get("DETSPEC_PARITY_DOCS", "16")), context=300, answer=40, text=300)
SHORT = Size(num_docs=16, context=40, answer=12, text=120)
TOLERANCE = 1e-4  # of sums down to -360, which transformers add in float32, whose last place is 3e-5 there
MAX_LEN = 81  # positions; transformers reads one less. Some contexts lose their beginning, and texts take two windows


@pytest.fixture(scope="module")
def tasks(tmp_path_factory) -> Path:
    return write_tasks(tmp_path_factory.mktemp("tasks"), SIZE)


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """The shipped model as a Hugging Face folder in float32 whose tokenizer knows the end of a text."""
    path = tmp_path_factory.mktemp("models") / "float32"
    told = ["convert", "--model", str(find_folder("tiny_python")), "--out", str(path), "--to", "hf", "--dtype", "float32"]
    assert main(told) == 0
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|endoftext|>", "bos_token": "<|endoftext|>"}
    (path / "tokenizer_config.json").write_text(json.dumps(config))
    return path


def theirs(folder: Path, tasks: Path, out: Path, batch_size: int) -> Path:
    arguments = {"pretrained": str(folder), "dtype": "float32", "max_length": MAX_LEN - 1}
    return evaluate(tasks, out, TASKS, model="hf", model_args=arguments, batch_size=batch_size, device="cpu")


def ours(folder: Path, tasks: Path, out: Path, batch_size: int) -> Path:
    arguments = {"pretrained": str(folder), "max_len": MAX_LEN, "method": "none"}
    return evaluate(tasks, out, TASKS, model_args=arguments, batch_size=batch_size)


def answers_of(results: Path) -> dict[str, list]:
    """For each task the answers to all its requests."""
    lines = {task: map(json.loads, raw.splitlines()) for task, raw in samples_of(results).items()}
    return {task: [answer for line in own for answers in line["resps"] for answer in answers] for task, own in lines.items()}


def metrics_of(results: Path) -> dict[str, dict[str, float]]:
    return json.loads(results.read_text())["results"]


def test_sums_texts_and_accuracies_are_those_of_transformers(folder, tasks, tmp_path):
    one, other = ours(folder, tasks, tmp_path / "ours", 8), theirs(folder, tasks, tmp_path / "theirs", 8)
    found, expected = answers_of(one), answers_of(other)
    assert [greedy for _, greedy in found["local_choice"]] == [greedy for _, greedy in expected["local_choice"]]
    found["local_choice"], expected["local_choice"] = ([total for total, _ in one["local_choice"]] for one in (found, expected))
    for task in TASKS[:2]:
        sums = np.asarray([found[task], expected[task]], np.float64)
        print(
            f"{task}: {sums.shape[1]} sums, the lowest {sums.min():.1f}, differ by {abs(sums[0] - sums[1]).max():.2e} at most"
        )
        assert 0 < abs(sums[0] - sums[1]).max() < TOLERANCE
    assert found["local_write"] == expected["local_write"]
    assert len(set(found["local_write"])) > SIZE.num_docs / 3
    for task, values in metrics_of(one).items():
        for name in ("acc,none", "acc_norm,none", "exact_match,none"):
            assert values.get(name) == metrics_of(other)[task].get(name)
    assert 0.3 < metrics_of(one)["local_choice"]["acc,none"] < 1


def test_answers_of_transformers_move_with_the_batch_and_ours_do_not(folder, tmp_path):
    """The inverse control of files of equal bytes. Texts are short, because long ones are cut to one length, which hides it."""
    tasks = write_tasks(tmp_path / "tasks", SHORT)
    found = [samples_of(theirs(folder, tasks, tmp_path / f"theirs {size}", size)) for size in (1, 8, 32)]
    assert any(found[0] != other for other in found[1:])
    alone, together = (samples_of(ours(folder, tasks, tmp_path / f"ours {size}", size)) for size in (1, 8))
    assert alone == together
