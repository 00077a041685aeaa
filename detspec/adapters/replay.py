"""Old results of the harness, checked: every request of their samples is answered again, and answers are compared as texts.

Samples hold the requests word for word, so neither tasks nor their data are needed.
"""

import dataclasses
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from lm_eval.api.instance import Instance
from lm_eval.utils import sanitize_list, simple_parse_args_string

from detspec.adapters.lm_eval import DetspecLM
from detspec.errors import InputError
from detspec.read_json import differing_entries, parse_json, read_json_object

KINDS = {
    "multiple_choice": "loglikelihood",
    "loglikelihood": "loglikelihood",
    "loglikelihood_rolling": "loglikelihood_rolling",
    "generate_until": "generate_until",
}
MODEL = "detspec"
SOURCES = ("pretrained", "path")  # arguments that name the model


@dataclasses.dataclass(frozen=True)
class Sample:
    """Requests and answers about one document.

    Attributes:
        task: name of the task.
        doc_id: number of the document.
        kind: the harness's name of the request: "loglikelihood", "loglikelihood_rolling" or "generate_until".
        requests: arguments of each request.
        answers: for each request its answers, as many as the task repeats it, each as text or texts.
    """

    task: str
    doc_id: int
    kind: str
    requests: tuple[tuple[Any, ...], ...]
    answers: tuple[tuple[Any, ...], ...]


@dataclasses.dataclass(frozen=True)
class Moved:
    """An answer that is not the recorded one.

    Attributes:
        sample: the sample that it belongs to.
        request: number of the request within the sample, such as that of a choice.
        repeat: number of the answer to that request.
        old: the recorded answer.
        new: the answer now.
    """

    sample: Sample
    request: int
    repeat: int
    old: Any
    new: Any


@dataclasses.dataclass(frozen=True)
class CheckReport:
    """Results of the comparison.

    Attributes:
        num_samples: samples that were answered again.
        moved: all answers that moved, in the order of the files.
        changed: name, recorded and present value of each entry in which the fingerprints differ.
    """

    num_samples: int
    moved: tuple[Moved, ...]
    changed: tuple[tuple[str, Any, Any], ...]

    @property
    def reproduced(self) -> bool:
        """Whether every answer is the recorded one."""
        return not self.moved

    def table(self) -> str:
        """Lines for people: differences of the fingerprints, and the first sample that moved."""
        lines = [f"fingerprint: {name} was {old!r}, is {new!r}" for name, old, new in self.changed]
        if not self.moved:
            return "\n".join([*lines, f"{self.num_samples} samples, all answers reproduce"])
        first = self.moved[0]
        where = f"task {first.sample.task}, doc_id {first.sample.doc_id}, request {first.request}, repeat {first.repeat}"
        number = len({(moved.sample.task, moved.sample.doc_id) for moved in self.moved})
        found = [f"{number} of {self.num_samples} samples moved; the first: {where}", f"  old: {first.old!r}"]
        return "\n".join([*lines, *found, f"  new: {first.new!r}"])


def check_results(results: Path, *, model_args: str = "", batch_size: str = "auto") -> CheckReport:
    """Answers the requests of `results` again, with their own model arguments, over which those in `model_args` win.

    Raises `InputError` if the file holds no results of this model, or its samples are missing.
    """
    found = read_json_object(results)
    if found is None:
        raise InputError(f"{results}: no such file; give the results_*.json that --output_path wrote")
    config = found.get("config")
    if not isinstance(config, dict) or not isinstance(found.get("configs"), dict):
        raise InputError(f"{results} holds no results of the harness")
    if "fingerprint" not in config:
        raise InputError(f"{results} holds results of the model {config.get('model')!r}; only those of {MODEL} can be checked")
    samples = list(read_samples(results, found["configs"]))
    named = config.get("model_args") or {}
    named = simple_parse_args_string(named) if isinstance(named, str) else named
    given = simple_parse_args_string(model_args)
    source = {name: named[name] for name in SOURCES if name in named and not given.keys() & set(SOURCES)}
    model = DetspecLM(**{"batch_size": batch_size, **source, **config.get("model_options", {}), **given})
    changed = tuple(differing_entries(config["fingerprint"], as_json(model.engine.fingerprint())))
    return CheckReport(len(samples), tuple(moved_answers(model, samples)), changed)


def read_samples(results: Path, tasks: Mapping[str, Any]) -> Iterator[Sample]:
    """The samples of `tasks`, from the files next to `results`; of the lines of several filters the first counts.

    Raises `InputError` if a file is missing, or a line is no sample.
    """
    date = results.stem.rpartition("_")[2]
    for task, described in tasks.items():
        path = results.parent / f"samples_{task}_{date}.jsonl"
        if not path.exists():
            raise InputError(f"{path} is missing: only results that were written with --log_samples can be checked")
        kind = KINDS.get(described.get("output_type"))
        if kind is None:
            raise InputError(f"{results}: task {task} has the output type {described.get('output_type')!r}, which is unknown")
        seen = set()
        for number, line in enumerate(path.read_bytes().splitlines(), 1):
            try:
                sample = parse_json(line)
                doc_id = sample["doc_id"]
                requests = tuple(tuple(given.values()) for given in sample["arguments"].values())
                answers = tuple(map(tuple, sample["resps"]))
            except (InputError, KeyError, TypeError, AttributeError) as error:
                raise InputError(f"{path}, line {number}: no sample of the harness ({error!r})") from error
            if doc_id not in seen:
                seen.add(doc_id)
                yield Sample(task, doc_id, kind, requests, answers)


def moved_answers(model: DetspecLM, samples: Sequence[Sample]) -> Iterator[Moved]:
    """The answers of `model` that are not the recorded ones, in the order of `samples`."""
    asked: dict[str, list[Instance]] = {}
    recorded = []
    for sample in samples:
        for number, (arguments, answers) in enumerate(zip(sample.requests, sample.answers, strict=True)):
            instance = Instance(sample.kind, {}, arguments, number)
            asked.setdefault(sample.kind, []).extend([instance] * len(answers))
            recorded += [(sample, number, repeat, old, instance) for repeat, old in enumerate(answers)]
    for kind, requests in asked.items():
        for instance, answer in zip(requests, getattr(model, kind)(requests), strict=True):
            instance.resps.append(answer)
    for sample, number, repeat, old, instance in recorded:
        new = as_json(sanitize_list(instance.resps[repeat]))
        if old != new:
            yield Moved(sample, number, repeat, old, new)


def as_json(value: Any) -> Any:
    """Returns `value` as it comes back from a file of JSON."""
    return json.loads(json.dumps(value))
