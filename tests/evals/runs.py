"""Runs of the harness that write files, as its command line does, without reading thousands of built-in tasks first."""

import json
from pathlib import Path
from typing import Any

from lm_eval import simple_evaluate
from lm_eval.loggers import EvaluationTracker
from lm_eval.tasks import TaskManager

import detspec.adapters.lm_eval  # noqa: F401  # registers the model

OF_THE_HOST = ("date", "git_hash", "pretty_env_info", "upper_git_hash", "transformers_version", "lm_eval_version")
OF_THE_HOST += ("start_time", "end_time", "total_evaluation_time_seconds")
OF_THE_CUT = ("batch_size", "batch_sizes", "limit", "device", "bootstrap_iters", "use_cache", "gen_kwargs")


def evaluate(tasks: Path, out: Path, names: tuple[str, ...], *, model: str = "detspec", **told: Any) -> Path:
    """Runs the tasks called `names` of the folder `tasks`; returns the file of results in `out`, with samples next to it."""
    tracker = EvaluationTracker(output_path=str(out))
    manager = TaskManager(include_path=str(tasks), include_defaults=False)
    results: Any = simple_evaluate(
        model=model, tasks=list(names), task_manager=manager, evaluation_tracker=tracker, fewshot_as_multiturn=None, **told
    )
    samples = results.pop("samples")
    tracker.save_results_aggregated(results=results, samples=samples)
    for name in results["configs"]:
        tracker.save_results_samples(task_name=name, samples=samples[name])
    (path,) = out.rglob("results_*.json")
    return path


def results_of(path: Path) -> str:
    """The results as text with sorted names, without what is about the clock, the host and the cut of the run."""
    found = json.loads(path.read_text())
    found["config"] = {name: value for name, value in found["config"].items() if name not in OF_THE_CUT}
    for described in found["configs"].values():
        del described["metadata"]  # the model's arguments once more, and the path of the task
    return json.dumps({name: value for name, value in found.items() if name not in OF_THE_HOST}, sort_keys=True)


def samples_of(path: Path) -> dict[str, bytes]:
    """The bytes of each task's file of samples."""
    date = path.stem.removeprefix("results_")
    files = {file.name.removeprefix("samples_").removesuffix(f"_{date}.jsonl"): file for file in path.parent.glob("samples_*")}
    return {task: file.read_bytes() for task, file in files.items()}
