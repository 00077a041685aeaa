"""`detspec eval`: files of equal bytes however the run was cut, defaults, and old results that are checked."""

import json
import shutil
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

from detspec.adapters.replay import check_results
from detspec.cli.commands import main
from tests.engine.byte_model import byte_params, write_folder
from tests.evals.runs import evaluate, results_of, samples_of

ALL = ("local_choice", "local_rolling", "local_write", "local_sampled")


@pytest.fixture(scope="module")
def arguments(folder) -> dict[str, object]:
    """Arguments of the model: no drafts, so that fewer programs are compiled."""
    return {"pretrained": str(folder), "max_len": 96, "method": "none"}


@pytest.fixture(scope="module")
def alone(arguments, tasks, tmp_path_factory) -> Path:
    """Results of one request at a time."""
    return evaluate(tasks, tmp_path_factory.mktemp("alone"), ALL, model_args=arguments, batch_size=1)


def test_files_are_equal_for_any_batch_size_and_order_of_tasks(arguments, tasks, alone, tmp_path):
    assert set(samples_of(alone)) == set(ALL)
    others = [
        evaluate(tasks, tmp_path / "8", ALL, model_args=arguments, batch_size=8),
        evaluate(tasks, tmp_path / "auto", ALL[::-1], model_args=arguments, batch_size="auto"),
    ]
    for results in others:
        assert samples_of(results) == samples_of(alone)
        assert results_of(results) == results_of(alone)


def test_documents_of_a_limited_run_are_those_of_the_whole_one(arguments, tasks, alone, tmp_path):
    results = evaluate(tasks, tmp_path, ALL, model_args=arguments, batch_size=8, limit=3)
    for task, lines in samples_of(results).items():
        assert lines.splitlines() == samples_of(alone)[task].splitlines()[:3]


def test_another_seed_moves_samples_alone(arguments, tasks, alone, tmp_path):
    results = evaluate(tasks, tmp_path, ALL[2:], model_args={**arguments, "seed": 5}, batch_size=8)
    assert samples_of(results)["local_write"] == samples_of(alone)["local_write"]
    assert samples_of(results)["local_sampled"] != samples_of(alone)["local_sampled"]


def test_command_writes_the_same_files(arguments, tasks, alone, tmp_path):
    model_args = ",".join(f"{name}={value}" for name, value in arguments.items())
    told = ["eval", "--tasks", ",".join(ALL), "--include_path", str(tasks), "--output_path", str(tmp_path), "--log_samples"]
    assert main([*told, "--model_args", model_args, "--batch_size", "8"]) == 0
    (results,) = tmp_path.rglob("results_*.json")
    assert samples_of(results) == samples_of(alone)
    assert results_of(results) == results_of(alone)


def test_old_results_are_answered_again(alone, capsys):
    assert main(["eval", "--check", str(alone), "--batch_size", "8"]) == 0
    assert capsys.readouterr().out == "40 samples, all answers reproduce\n"


def test_first_sample_that_moved_is_named(folder, alone, tmp_path, capsys):
    """The last bit of one sum, and one letter of a text behind it."""
    for path in alone.parent.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    old, moved = {}, {}
    for task, number, where in (("local_choice", 7, (2, 0)), ("local_sampled", 1, (0, 2))):
        (path,) = tmp_path.glob(f"samples_{task}_*")
        lines = [json.loads(line) for line in path.read_text().splitlines()]
        request, repeat = where
        old[task] = lines[number]["resps"][request][repeat]
        moved[task] = [str(float(old[task][0]) * (1 + 2**-52)), "True"] if task == "local_choice" else old[task] + "?"
        lines[number]["resps"][request][repeat] = moved[task]
        path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    results = tmp_path / alone.name
    assert main(["eval", "--check", str(results), "--batch_size", "8"]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines == [
        "2 of 40 samples moved; the first: task local_choice, doc_id 7, request 2, repeat 0",
        f"  old: {moved['local_choice']!r}",
        f"  new: {old['local_choice']!r}",
    ]
    report = check_results(results, batch_size="8")
    assert [(found.sample.task, found.repeat, found.old) for found in report.moved][1:] == [
        ("local_sampled", 2, moved["local_sampled"])
    ]


def test_another_model_is_told_by_its_fingerprint(alone, tmp_path, capsys):
    other = jax.tree.map(lambda leaf: leaf * jnp.asarray(1.25, leaf.dtype), byte_params())
    told = ["--model_args", f"pretrained={write_folder(tmp_path / 'other', other)}", "--batch_size", "8"]
    assert main(["eval", "--check", str(alone), *told]) == 1
    shown = capsys.readouterr().out
    assert "fingerprint: model was " in shown
    assert " of 40 samples moved; the first: task local_choice, doc_id 0, request 0, repeat 0" in shown


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda found: {**found, "config": {"model": "hf"}}, "holds results of the model 'hf'"),
        (lambda found: {"a": 1}, "holds no results of the harness"),
        (lambda found: found, "only results that were written with --log_samples can be checked"),
    ],
)
def test_what_cannot_be_checked_is_refused(alone, tmp_path, change, message, capsys):
    path = tmp_path / alone.name
    path.write_text(json.dumps(change(json.loads(alone.read_text()))))
    assert main(["eval", "--check", str(path)]) == 2
    assert message in capsys.readouterr().err


def test_chat_template_is_applied_and_named_in_the_results(arguments, folder, tasks, tmp_path):
    """A folder has the same weights and a template: prompts are its conversations, scores are those of these prompts."""
    chat = tmp_path / "chat"
    shutil.copytree(folder, chat)
    template = "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}{% if add_generation_prompt %}[me]{% endif %}"
    (chat / "chat_template.jinja").write_text(template)
    told = {"model_args": {**arguments, "pretrained": str(chat)}, "batch_size": 8, "apply_chat_template": True}
    results = evaluate(tasks, tmp_path / "out", ("local_choice",), limit=2, **told)
    assert json.loads(results.read_text())["chat_template"] == template
    for line in samples_of(results)["local_choice"].splitlines():
        sample = json.loads(line)
        prompts = {request["arg_0"] for request in sample["arguments"].values()}
        assert prompts == {f"[user]{sample['doc']['context']}[me]"}
    assert check_results(results, batch_size="8").reproduced
