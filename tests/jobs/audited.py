"""Jobs of the small model over bytes, and what an audit finds of their records, changed and as they are."""

import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from detspec.engine.engine import Engine
from detspec.jobs.audit import run_audit
from detspec.jobs.difference import AuditReport
from detspec.jobs.job import run_job
from detspec.jobs.prompts import JobSpec, Prompts
from detspec.sampling_params import SamplingParams
from tests.engine.byte_model import some_prompts, some_sampling

DEFAULTS = SamplingParams(max_tokens=9, temperature=0.5)
Lines = list[dict[str, Any]]


def read_lines(path: Path) -> Lines:
    return [json.loads(line) for line in path.read_text().splitlines()]


def write_lines(path: Path, lines: Lines) -> None:
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))


def prompt_lines(number: int = 6) -> Lines:
    lines: Lines = [{"id": "text", "prompt": "def f(x):\n    return 'é'"}]
    for i, (prompt, sampling) in enumerate(zip(some_prompts(number), some_sampling(number), strict=True)):
        chosen = {"max_tokens": sampling.max_tokens, "temperature": sampling.temperature, "top_p": sampling.top_p, "seed": i}
        lines.append({"id": f"r{i}", "prompt_token_ids": prompt, "sampling": chosen, "metadata": {"row": i}})
    return lines


def make_job(engine: Engine, folder: Path, lines: Lines, defaults: SamplingParams = DEFAULTS) -> Path:
    """Runs the job of `lines` in `folder`; returns its output."""
    write_lines(folder / "in.jsonl", lines)
    with Prompts(str(folder / "in.jsonl")) as prompts:
        run_job(engine, JobSpec(prompts, defaults), folder / "out.jsonl", fresh=True)
    return folder / "out.jsonl"


def audit(model, folder: Path, **keywords: Any) -> AuditReport:
    return run_audit(model, folder / "out.jsonl", prompts=folder / "in.jsonl", max_requests=3, **keywords)


def copy(job: Path, folder: Path, name: str, change: Callable[[Lines], Any]) -> Path:
    """The files of `job` in `folder`, with the lines of the file `name` changed."""
    for file in ("in.jsonl", "out.jsonl", "out.manifest.json"):
        (folder / file).write_bytes((job / file).read_bytes())
    lines = read_lines(folder / name)
    change(lines)
    write_lines(folder / name, lines)
    if name == "in.jsonl":
        rename_prompts(folder)
    return folder


def edit_manifest(folder: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    path = folder / "out.manifest.json"
    manifest = json.loads(path.read_text())
    change(manifest)
    path.write_text(json.dumps(manifest))


def rename_prompts(folder: Path) -> None:
    """Lets the manifest name the prompts that are in `folder` now."""
    digest = hashlib.sha256((folder / "in.jsonl").read_bytes()).hexdigest()
    edit_manifest(folder, lambda manifest: manifest["prompts"].update(sha256=digest))
