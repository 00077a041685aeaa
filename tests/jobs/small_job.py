"""A job of eight requests for the small model over bytes, with and without lines that are wrong; and what ends it early."""

import json
from pathlib import Path

from detspec.engine.engine import Engine
from detspec.jobs.job import JobResult, run_job
from detspec.jobs.prompts import UNSHARDED, JobSpec, Prompts
from detspec.progress import Progress
from detspec.sampling_params import SamplingParams
from tests.engine.byte_model import some_prompts, some_sampling

DEFAULTS = SamplingParams(max_tokens=8)


def line(**keys: object) -> bytes:
    return json.dumps(keys).encode()


def some_lines(*, deterministic: bool = True) -> list[bytes]:
    """Eight requests, a text among them, with sampling parameters of their own."""
    lines = [line(id="text", prompt="def f(x):\n    return 'é'"), line(id="default", prompt_token_ids=[1, 2, 3])]
    for i, (prompt, sampling) in enumerate(zip(some_prompts(6), some_sampling(6), strict=True)):
        chosen = {"max_tokens": sampling.max_tokens, "temperature": sampling.temperature, "seed": i}
        lines.append(line(id=f"r{i}", prompt_token_ids=prompt, sampling={**chosen, "deterministic": deterministic}))
    return lines


def some_lines_and_bad_ones() -> list[bytes]:
    lines = some_lines()
    return [lines[0], b"{", *lines[1:6], line(id="long", prompt_token_ids=[1] * 60), b"", lines[2], *lines[6:]]


def start(
    engine: Engine,
    lines: list[bytes],
    out: Path,
    *,
    defaults=DEFAULTS,
    shard=UNSHARDED,
    on_error="stop",
    created=None,
    **keywords,
) -> JobResult:
    """Starts a job, which may end early."""
    source = out.parent / "in.jsonl"
    if not source.exists() or source.read_bytes() != b"\n".join(lines):
        source.write_bytes(b"\n".join(lines))
    with Prompts(str(source)) as prompts:
        return run_job(engine, JobSpec(prompts, defaults, shard, on_error, created=created), out, **keywords)


def job(engine: Engine, lines: list[bytes], out: Path, **keywords) -> list[bytes]:
    """The output of a job, done anew."""
    start(engine, lines, out, fresh=True, **keywords)
    return out.read_bytes().splitlines()


def by_id(lines: list[bytes]) -> dict[str, bytes]:
    return {json.loads(text)["id"]: text for text in lines}


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


WHOLE = ["in.jsonl", "out.jsonl", "out.manifest.json", "out.stats.json"]


class Crash(Exception):
    """Stands for whatever ends a process."""


def crash_after(monkeypatch, number: int) -> None:
    """Every start of a job crashes at the end of a segment once `number` completions are out, before those of that segment.

    How many segments there are depends on measured times; of eight requests on three rows the last one brings three at most.
    """
    count = {"out": 0}
    stage, finished, shown = Progress.stage, Progress.finished, Progress.segment

    def restart(self, *args, **keywords):
        count["out"] = 0
        stage(self, *args, **keywords)

    def counted(self, *args):
        count["out"] += 1
        finished(self, *args)

    def crash(self, *args, **keywords):
        if count["out"] >= number:
            raise Crash
        shown(self, *args, **keywords)

    monkeypatch.setattr(Progress, "stage", restart)
    monkeypatch.setattr(Progress, "finished", counted)
    monkeypatch.setattr(Progress, "segment", crash)
