#!/usr/bin/env python
"""Speed of an evaluation over that of the harness's own model for transformers, on tasks of four choices.

Questions are beginnings of functions of the standard library; one choice is what follows, three are from elsewhere. Both sides
evaluate the shipped model through `lm_eval.evaluate`, contexts and metrics included, loading not. All
settings of transformers (dtypes and batch sizes) and detspec take turns, every other round in reverse order, after one round of
warming up. A ratio is that of one round, its median is reported. transformers is compared at the setting whose median is best.

`--few-shot` puts solved questions in front of each, as many evaluations do.

    pip install ".[eval,parity]"
    python scripts/bench_eval.py --json out/eval.json

Seconds are those of the clock and, next to them, of processors, which other work on the machine disturbs less.
"""

import argparse
import inspect
import json
import os
import platform
import sys
import tempfile
import textwrap
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

os.environ["HF_DATASETS_OFFLINE"] = os.environ["HF_HUB_OFFLINE"] = "1"  # before the harness is imported
os.environ["LMEVAL_LOG_LEVEL"] = os.environ.get("LMEVAL_LOG_LEVEL", "ERROR")

from lm_eval import evaluate
from lm_eval.api.model import LM
from lm_eval.tasks import TaskManager

import detspec as ds
from detspec.adapters.lm_eval import DetspecLM
from detspec.checkpoint.folder import find_folder

OURS = "detspec"
MAX_LEN = 1024
MODULES = (argparse, inspect, textwrap)


def main(argv: Sequence[str] | None = None) -> int:
    """Measures and prints the table; 1 if detspec is not `--least` times as fast."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--questions", type=int, default=100, metavar="N", help="documents of the task")
    parser.add_argument("--context", type=int, default=400, metavar="N", help="characters of a question")
    parser.add_argument("--answer", type=int, default=40, metavar="N", help="characters of a choice")
    parser.add_argument("--few-shot", type=int, default=0, metavar="N", help="solved questions in front of each")
    parser.add_argument("--batch-sizes", type=int, nargs="+", default=[1, 8, 32], metavar="B", help="of transformers")
    parser.add_argument("--dtypes", nargs="+", default=["float32", "bfloat16"], metavar="DTYPE", help="of transformers")
    parser.add_argument("--repeats", type=int, default=5, metavar="N", help="rounds; the median counts")
    parser.add_argument("--least", type=float, default=1.5, metavar="X", help="ratio below which the exit code is 1")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all figures to this file")
    args = parser.parse_args(argv)
    with tempfile.TemporaryDirectory() as folder:
        task = write_task(Path(folder), args.questions, args.context, args.answer)
        models: dict[str, Any] = {OURS: DetspecLM("tiny_python", max_len=MAX_LEN), **transformers_models(Path(folder), args)}
        rounds = measure(models, {**task, "num_fewshot": args.few_shot}, args.repeats)
    print(table(rounds))
    if args.json:
        args.json.parent.mkdir(parents=True, exist_ok=True)
        facts = {"fingerprint": ds.fingerprint(), "python": platform.python_version(), "asked": vars(args), "rounds": rounds}
        args.json.write_text(json.dumps(facts, indent=1, default=str) + "\n")
    return 0 if min(ratios(rounds)[best(rounds)]) >= args.least else 1


def transformers_models(folder: Path, args: argparse.Namespace) -> dict[str, LM]:
    """The harness's model for transformers in each dtype and batch size, with the shipped model's weights."""
    from lm_eval.models.huggingface import HFLM

    shipped = find_folder("tiny_python")
    copied = folder / "model"
    copied.mkdir()
    for name in ("config.json", "generation_config.json", "model.safetensors", "tokenizer.json"):
        (copied / name).symlink_to(shipped / name)
    end = {"eos_token": "<|endoftext|>", "bos_token": "<|endoftext|>"}
    (copied / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "PreTrainedTokenizerFast", **end}))
    models: dict[str, LM] = {}
    for dtype in args.dtypes:
        for size in args.batch_sizes:
            name = f"transformers, {dtype}, batch {size}"
            models[name] = HFLM(str(copied), dtype=dtype, batch_size=size, device="cpu", max_length=MAX_LEN - 1)
    return models


def write_task(folder: Path, number: int, context: int, answer: int) -> dict[str, Any]:
    """The config of a task of `number` questions; its documents are written to `folder`."""
    sources = [inspect.getsource(module) for module in MODULES]
    lines = []
    for place in range(number):
        source = sources[place % len(sources)]
        stride = (len(source) - context - answer) // (number + 4)
        places = [context + (place + ahead) * stride for ahead in range(4)]
        choices = [source[start : start + answer] for start in places]
        right = place % 4
        choices[0], choices[right] = choices[right], choices[0]
        lines.append(json.dumps({"context": source[places[0] - context : places[0]], "choices": choices, "answer": right}))
    data = folder / "questions.jsonl"
    data.write_text("\n".join(lines) + "\n")
    return {
        "task": "four_choices",
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": str(data)}},
        "test_split": "test",
        "fewshot_split": "test",
        "output_type": "multiple_choice",
        "doc_to_text": "{{context}}",
        "doc_to_choice": "{{choices}}",
        "doc_to_target": "{{answer}}",
        "target_delimiter": "",
        "metric_list": [{"metric": "acc"}],
    }


def measure(models: dict[str, Any], task: dict[str, Any], repeats: int) -> list[dict[str, dict[str, float]]]:
    """For each round and model: seconds of the clock and of processors, and the accuracy."""
    rounds = []
    for number in range(repeats + 1):
        found = {}
        for name in models if number % 2 == 0 else reversed(models):
            loaded = TaskManager(include_defaults=False).load([dict(task)])
            loaded["tasks"][task["task"]].set_fewshot_seed(seed=1)
            if name == OURS:  # else its pages would still hold the texts of the round before
                engine = models[name].engine
                engine.update_params(engine.model.params, f"round {number}")
            clock_s = time.perf_counter()
            processor_s = time.process_time()
            results: Any = evaluate(models[name], loaded, bootstrap_iters=0, log_samples=False)
            found[name] = {
                "clock_s": time.perf_counter() - clock_s,
                "processor_s": time.process_time() - processor_s,
                "accuracy": results["results"][task["task"]]["acc,none"],
            }
            print(f"round {number}, {name}: {found[name]['clock_s']:.2f} s", file=sys.stderr)
        rounds.append(found)
    return rounds[1:]


def ratios(rounds: Sequence[dict[str, dict[str, float]]]) -> dict[str, tuple[float, float]]:
    """For each model its seconds over ours, medians of the rounds: by the clock and by processors."""
    return {
        name: tuple(median(found[name][kind] / found[OURS][kind] for found in rounds) for kind in ("clock_s", "processor_s"))
        for name in rounds[0]
    }


def best(rounds: Sequence[dict[str, dict[str, float]]]) -> str:
    """The setting of transformers that is the fastest by the clock."""
    return min((name for name in rounds[0] if name != OURS), key=lambda name: ratios(rounds)[name][0])


def table(rounds: Sequence[dict[str, dict[str, float]]]) -> str:
    """Medians in Markdown, a line for each model."""
    lines = [
        "| model | s by the clock | s of processors | speed of detspec over it, by either | accuracy |",
        "|---|---|---|---|---|",
    ]
    for name, (clock, processors) in ratios(rounds).items():
        seconds = [median(found[name][kind] for found in rounds) for kind in ("clock_s", "processor_s")]
        accuracy = rounds[0][name]["accuracy"]
        lines.append(f"| {name} | {seconds[0]:.2f} | {seconds[1]:.2f} | {clock:.2f}, {processors:.2f} | {accuracy:.3f} |")
    return "\n".join([*lines, "", f"the best of transformers: {best(rounds)}"])


if __name__ == "__main__":
    sys.exit(main())
