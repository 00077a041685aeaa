"""A job of JSON lines: prompts in, completions out, and no file under its final name unless it is whole.

1. `read_requests` checks every line; nothing is generated if one is bad.
2. `run_job` generates, and writes completions in input order into a temporary file beside the output.
3. Statistics and manifest, then the output itself, take their final names in one `os.replace` each.

The output holds deterministic facts only, so it is byte-identical across batch sizes and orders of arrival; timings and
counters go to `*.stats.json`, what the bits depend on to `*.manifest.json`.
"""

import contextlib
import dataclasses
import hashlib
import json
import os
import secrets
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, BinaryIO

from detspec.checkpoint.load import Model
from detspec.engine.engine import Engine
from detspec.engine.progress import Progress
from detspec.engine.request import Completion, Request, Stats
from detspec.errors import InputError
from detspec.sampling import SamplingParams

PROMPT_KEYS = ("prompt", "prompt_token_ids", "messages")
LINE_KEYS = ("id", *PROMPT_KEYS, "chat_template_kwargs", "sampling")
SAMPLING_KEYS = tuple(field.name for field in dataclasses.fields(SamplingParams))
STDIO = "-"


@dataclasses.dataclass(frozen=True)
class JobResult:
    """What a finished job did.

    Attributes:
        stats: what `*.stats.json` holds.
        failed: ids of requests that ended with finish reason "error", in input order.
    """

    stats: dict[str, Any]
    failed: tuple[str, ...]


def read_requests(lines: Sequence[bytes], engine: Engine, defaults: SamplingParams, *, source: str) -> list[Request]:
    """The requests of a job, all of them checked; blank lines are skipped.

    Raises:
        InputError: names `source`, the line, what is wrong with it and what is accepted.
    """
    requests: list[Request] = []
    line_of: dict[str, int] = {}
    for number, raw in enumerate(lines, start=1):
        if not raw.strip():
            continue
        try:
            request = parse_request(raw, engine, defaults)
        except InputError as error:
            raise InputError(f"{source} line {number}: {error}") from error
        if request.id in line_of:
            raise InputError(f"{source} line {number}: id {request.id!r} was already used on line {line_of[request.id]}")
        line_of[request.id] = number
        requests.append(request)
    if not requests:
        raise InputError(f'{source} holds no requests: give one JSON object a line, such as {{"id": "a", "prompt": "def "}}')
    return requests


def parse_request(raw: bytes, engine: Engine, defaults: SamplingParams) -> Request:
    """One line as a checked request; `InputError` says what is wrong with it."""
    try:
        line = json.loads(raw.decode("utf-8-sig"))
    except UnicodeDecodeError as error:
        raise InputError(f"is not UTF-8 (byte {error.start + 1})") from error
    except json.JSONDecodeError as error:
        raise InputError(f"is not JSON: {error.msg} (column {error.colno})") from error
    if not isinstance(line, dict):
        raise InputError(f"must be a JSON object, got {type(line).__name__}")
    refuse_unknown(line, LINE_KEYS, "key")
    id = line.get("id")
    if not isinstance(id, str) or not id:
        raise InputError(f'needs an "id", a string that is not empty, got {id!r}')
    if sum(key in line for key in PROMPT_KEYS) != 1:
        raise InputError(f'needs one of "prompt", "prompt_token_ids" and "messages" (id {id!r})')
    if "prompt" in line and not isinstance(line["prompt"], str):
        raise InputError(f'"prompt" must be a string, got {line["prompt"]!r}; token ids go into "prompt_token_ids"')
    if "prompt_token_ids" in line and not isinstance(line["prompt_token_ids"], list):
        raise InputError(f'"prompt_token_ids" must be a list of token ids, got {line["prompt_token_ids"]!r}')
    try:
        if "messages" in line:
            prompt = read_chat(line, engine.model)
        else:
            prompt = line["prompt"] if "prompt" in line else line["prompt_token_ids"]
        return engine.request(prompt, merge_sampling(line.get("sampling", {}), defaults), id=id)
    except InputError as error:
        raise InputError(f"{error} (id {id!r})") from error


def read_chat(line: dict[str, Any], model: Model) -> list[int]:
    """Token ids of a line's conversation."""
    variables = line.get("chat_template_kwargs", {})
    if not isinstance(line["messages"], list) or not isinstance(variables, dict):
        raise InputError('"messages" must be a list of messages, and "chat_template_kwargs" a JSON object')
    refused = sorted({"messages", "now"} & variables.keys())
    if refused:
        raise InputError(f'"chat_template_kwargs" must not hold {", ".join(refused)}: messages stand beside it, now is no JSON')
    return model.chat_prompt(line["messages"], **variables)


def merge_sampling(given: object, defaults: SamplingParams) -> SamplingParams:
    """`defaults` with what a line gives put over them."""
    if not isinstance(given, dict):
        raise InputError(f'"sampling" must be a JSON object, got {given!r}')
    refuse_unknown(given, SAMPLING_KEYS, "sampling parameter")
    if not isinstance(given.get("stop_token_ids", []), list):
        raise InputError(f"sampling parameter stop_token_ids must be a list of token ids, got {given['stop_token_ids']!r}")
    return dataclasses.replace(defaults, **given)


def refuse_unknown(given: dict[str, object], accepted: Sequence[str], what: str) -> None:
    """Raises `InputError` naming the keys of `given` that are not `accepted`."""
    unknown = sorted(set(given) - set(accepted))
    if unknown:
        raise InputError(f"unknown {what} {', '.join(map(repr, unknown))}; accepted: {', '.join(accepted)}")


def check_out(out: str, prompts: str) -> None:
    """Raises `InputError` if files cannot be put beside `out`, or if `out` is a folder or the input itself."""
    if out == STDIO:
        return
    folder = Path(out).parent
    if Path(out).is_dir():
        raise InputError(f"--out {out} is a folder: name a file in it")
    if not folder.is_dir():
        raise InputError(f"--out {out}: there is no folder {folder}; make it first")
    if not os.access(folder, os.W_OK | os.X_OK):
        raise InputError(f"--out {out}: the folder {folder} is not writable")
    if prompts != STDIO and Path(out).exists() and Path(prompts).exists() and os.path.samefile(out, prompts):
        raise InputError(f"--out {out} is the file that the prompts are read from")


def run_job(
    engine: Engine, requests: Sequence[Request], out: str, *, defaults: SamplingParams, load_s: float = 0.0
) -> JobResult:
    """Generates `requests` and writes `out`, its statistics and its manifest; `out` of "-" is the standard output alone."""
    if out == STDIO:
        return generate_lines(engine, requests, sys.stdout.buffer, load_s)
    out_path = Path(out)
    with new_files(out_path, beside(out_path, "stats"), beside(out_path, "manifest")) as (out_file, stats_file, manifest_file):
        result = generate_lines(engine, requests, out_file, load_s)
        stats_file.write(pretty_json(result.stats))
        manifest_file.write(pretty_json(manifest(engine, defaults)))
    return result


def generate_lines(engine: Engine, requests: Sequence[Request], file: BinaryIO, load_s: float) -> JobResult:
    """Writes one line per request into `file`, in the order of `requests`, each as soon as those before it are done."""
    began = time.perf_counter()
    with Progress(len(requests), "requests") as progress:
        progress.stage("compiling and certifying")
        engine.prepare(len(requests))
        prepared = time.perf_counter()
        progress.stage("generating")
        waiting: dict[str, Completion] = {}
        order = iter(requests)
        following = next(order, None)
        failed: set[str] = set()
        num_tokens = 0
        counters = Stats()
        for completion in engine.run(requests, on_segment=progress.segment):
            waiting[completion.id] = completion
            num_tokens += len(completion.token_ids)
            counters += completion.stats
            progress.finished()
            if completion.finish_reason == "error":
                failed.add(completion.id)
            while following is not None and following.id in waiting:
                file.write(completion_line(waiting.pop(following.id)))
                following = next(order, None)
            file.flush()
    ended = time.perf_counter()
    generate_s = ended - prepared
    stats = {
        "num_requests": len(requests),
        "num_prompt_tokens": sum(len(request.prompt_token_ids) for request in requests),
        "num_tokens": num_tokens,
        "num_failed": len(failed),
        "load_s": round(load_s, 3),
        "compile_s": round(prepared - began, 3),
        "generate_s": round(generate_s, 3),
        "tok_per_s": round(num_tokens / generate_s, 1),
        "mean_acceptance_length": counters.mean_acceptance_length,
        "draft_acceptance_rate": counters.draft_acceptance_rate,
        **dataclasses.asdict(counters),
        "plans": {
            plan.label: {"certified": certificate.equal, "differs": certificate.differs, "step_ms": certificate.step_s * 1e3}
            for plan, certificate in engine.certificates.items()
            if certificate.step_s < float("inf")
        },
    }
    return JobResult(stats, tuple(request.id for request in requests if request.id in failed))


def completion_line(completion: Completion) -> bytes:
    """One line of output: deterministic facts alone.

    A log-probability is written as the shortest decimal that reads back as the same float64, of which float32 values are a
    part, so its bits survive.
    """
    line = {
        "id": completion.id,
        "token_ids": completion.token_ids,
        "text": completion.text,
        "logprobs": completion.logprobs,
        "finish_reason": completion.finish_reason,
        "prompt_len": len(completion.prompt_token_ids),
        "digest": completion.digest,
    }
    return json.dumps(line, allow_nan=False).encode() + b"\n"


def manifest(engine: Engine, defaults: SamplingParams) -> dict[str, Any]:
    """What the bits depend on besides the requests, and the settings that the job ran with."""
    fingerprint = engine.fingerprint()
    return {
        "digest": hashlib.sha256(json.dumps(fingerprint, sort_keys=True).encode()).hexdigest(),
        "fingerprint": fingerprint,
        "sampling": dataclasses.asdict(defaults),
        "engine": {**dataclasses.asdict(engine.config), "schedule": dataclasses.asdict(engine.schedule)},
    }


def beside(out: Path, what: str) -> Path:
    """`out.jsonl` -> `out.stats.json`."""
    stem = out.name.removesuffix(".jsonl").removesuffix(".json")
    return out.with_name(f"{stem}.{what}.json")


def pretty_json(value: object) -> bytes:
    """`value` for people, with a newline at its end."""
    return json.dumps(value, indent=2).encode() + b"\n"


@contextlib.contextmanager
def new_files(*paths: Path) -> Iterator[Sequence[BinaryIO]]:
    """Files that get the names `paths` only once all are whole and on disk, the first path last; removed on any exception."""
    temporary = [path.with_name(f".{path.name}.{secrets.token_hex(4)}.tmp") for path in paths]
    try:
        with contextlib.ExitStack() as stack:
            files = [stack.enter_context(path.open("xb")) for path in temporary]
            yield files
            for file in files:
                file.flush()
                os.fsync(file.fileno())
        for old, new in reversed(list(zip(temporary, paths, strict=True))):
            os.replace(old, new)
        sync_folder(paths[0].parent)
    finally:
        for path in temporary:
            path.unlink(missing_ok=True)


def sync_folder(folder: Path) -> None:
    """Puts new names in `folder` on disk."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
