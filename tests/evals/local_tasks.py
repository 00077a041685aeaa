"""Tasks of the harness over small files of JSON lines, made of the standard library's source code; nothing is fetched."""

import argparse
import ast
import inspect
import json
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

SOURCES = (argparse, ast, inspect, textwrap)
TASKS: dict[str, dict[str, Any]] = {
    "local_choice": {
        "output_type": "multiple_choice",
        "doc_to_text": "{{context}}",
        "doc_to_choice": "{{choices}}",
        "doc_to_target": "{{answer}}",
        "target_delimiter": "",
        "metric_list": [{"metric": "acc"}, {"metric": "acc_norm"}],
    },
    "local_rolling": {
        "output_type": "loglikelihood_rolling",
        "doc_to_text": "",
        "doc_to_target": "{{text}}",
        "metric_list": [{"metric": "word_perplexity"}, {"metric": "bits_per_byte"}],
    },
    "local_write": {
        "output_type": "generate_until",
        "doc_to_text": "{{context}}",
        "doc_to_target": "{{choices[answer]}}",
        "generation_kwargs": {"until": ["\n"], "max_gen_toks": 16, "do_sample": False},
        "metric_list": [{"metric": "exact_match"}],
    },
    "local_sampled": {
        "output_type": "generate_until",
        "doc_to_text": "{{context}}",
        "doc_to_target": "{{choices[answer]}}",
        "generation_kwargs": {"until": ["\n\n"], "max_gen_toks": 12, "do_sample": True, "temperature": 0.8},
        "repeats": 3,
        "metric_list": [{"metric": "exact_match"}],
    },
}


class Size(NamedTuple):
    """How large the documents are, in characters."""

    num_docs: int
    context: int
    answer: int
    text: int


SMALL = Size(num_docs=10, context=48, answer=12, text=150)  # for models of bytes with 128 positions


def write_tasks(folder: Path, size: Size = SMALL) -> Path:
    """Writes each task's YAML and documents to `folder`, for `--include_path`; returns it."""
    folder.mkdir(parents=True, exist_ok=True)
    documents = list(some_documents(size))
    data = folder / "documents.jsonl"
    data.write_text("".join(json.dumps(document) + "\n" for document in documents))
    for name, task in TASKS.items():
        files = {"dataset_path": "json", "dataset_kwargs": {"data_files": {"test": str(data)}}, "test_split": "test"}
        (folder / f"{name}.yaml").write_text(json.dumps({"task": name, **files, **task}))  # JSON is YAML
    return folder


def some_documents(size: Size) -> Iterator[dict[str, Any]]:
    """Documents of `size`: after `context`, a source goes on with the choice number `answer`; `text` is a piece of it."""
    sources = [inspect.getsource(module) for module in SOURCES]
    for number in range(size.num_docs):
        source = sources[number % len(sources)]
        stride = (len(source) - size.context - size.text) // (size.num_docs + 4)
        places = [size.context + (number + ahead) * stride for ahead in range(4)]
        choices = [source[place : place + size.answer] for place in places]
        answer = number % 4
        context = source[places[0] - size.context : places[0]]
        choices[0], choices[answer] = choices[answer], choices[0]
        text = source[places[0] : places[0] + size.text]
        yield {"context": context.rstrip(" "), "choices": choices, "answer": answer, "text": text}
