"""Parts that run the command line: outputs, manifests, journals, and what resumes and audits them."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from bits_parts import asked
from bits_parts.record import Record

OPTIONS = ("--max-tokens", "24", "--max-len", "192", "--max-requests", "4", "--method", "none")
SECONDS_BETWEEN_LOOKS = 0.005


def job(record: Record) -> None:
    """A job over a file of prompts, half of its journal resumed, and its audit."""
    folder = new_folder("job")
    write_lines(folder / "in.jsonl", _prompts())
    command = ("generate", "--prompts", "in.jsonl", "--out", "out.jsonl", "--temperature", "0.8", "--n", "2", *OPTIONS)
    journal = _run_and_keep_journal(folder, command)
    _take_files(record, folder)
    header, *entries = journal.splitlines(keepends=True)
    record.digests(header, *sorted(entries))
    output = (folder / "out.jsonl").read_bytes()
    for path in folder.glob("out.*"):
        path.unlink()
    (folder / "out.jsonl.journal").write_bytes(b"".join([header, *entries[: len(entries) // 2]]))
    run(folder, *command)
    statistics = json.loads((folder / "out.stats.json").read_text())
    assert statistics["num_resumed"] == len(entries) // 2, "the journal was not resumed"
    assert (folder / "out.jsonl").read_bytes() == output, "another output after the journal was resumed"
    run(folder, "audit", "--records", "out.jsonl", "--json", "report.json")
    report = json.loads((folder / "report.json").read_text())
    assert report["differences"] == [], report


def batch_api(record: Record) -> None:
    """OpenAI's batch lines, answered and audited."""
    folder = new_folder("batch_api")
    bodies: list[tuple[str, dict[str, Any]]] = [
        ("/v1/completions", {"prompt": [5, 17, 9], "max_tokens": 12, "temperature": 0}),
        ("/v1/completions", {"prompt": ["def f(", "class B"], "max_tokens": 9, "seed": 3, "logprobs": 2}),
        ("/v1/completions", {"prompt": [[1, 2, 3], [4, 5]], "max_tokens": 0, "echo": True, "logprobs": 1}),
    ]
    lines = [{"custom_id": f"r{i}", "method": "POST", "url": url, "body": body} for i, (url, body) in enumerate(bodies)]
    write_lines(folder / "in.jsonl", lines)
    run(folder, "generate", "--prompts", "in.jsonl", "--out", "out.jsonl", *OPTIONS[2:])
    _take_files(record, folder)
    run(folder, "audit", "--records", "out.jsonl")


def workers(record: Record) -> None:
    """Runs a worker that takes all chunks, and merges the outputs."""
    folder = new_folder("workers")
    write_lines(folder / "in.jsonl", _prompts())
    run(folder, "generate", "--prompts", "in.jsonl", "--out", "out.jsonl", "--shard", "auto", "--chunk-lines", "5", *OPTIONS)
    run(folder, "merge", "--out", "out.jsonl")
    _take_files(record, folder)


def audit_of_thoughts(record: Record) -> None:
    """Thoughts in an output, replayed."""
    folder = new_folder("thoughts")
    prompts, _ = asked.plain(43, 6, seed=11)
    write_lines(folder / "in.jsonl", [{"id": str(i), "prompt_token_ids": ids} for i, ids in enumerate(prompts)])
    model = ("--model", "thinking_parity")
    run(folder, "generate", *model, "--prompts", "in.jsonl", "--out", "out.jsonl", "--draft-thoughts", "self", *OPTIONS)
    _take_files(record, folder)
    run(folder, "audit", *model, "--records", "out.jsonl")


def two_engines(record: Record) -> None:
    """Two engines that share the requests of a job, each on a device of its own."""
    folder = new_folder("two_engines")
    write_lines(folder / "in.jsonl", _prompts())
    run(folder, "generate", "--prompts", "in.jsonl", "--out", "out.jsonl", "--engines", "2", *OPTIONS)
    _take_files(record, folder)


def new_folder(name: str) -> Path:
    """An empty folder in the working folder."""
    folder = Path("jobs") / name
    folder.mkdir(parents=True)
    return folder


def write_lines(path: Path, lines: list[dict[str, Any]]) -> None:
    """Writes each of `lines` as a line of JSON."""
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))


def run(folder: Path, *args: str) -> str:
    """Runs `detspec` with these arguments; returns stdout and stderr together. Fails if it does."""
    done = subprocess.run(_command(*args), cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    assert done.returncode == 0, f"detspec {' '.join(args)} exited with {done.returncode}: {done.stdout}"
    return done.stdout


def _command(*args: str) -> list[str]:
    return [sys.executable, "-m", "detspec", *args]


def _prompts() -> list[dict[str, Any]]:
    texts = [{"id": f"text-{i}", "prompt": text} for i, text in enumerate(asked.CODE)]
    prompts, sampling = asked.plain(2048, 8, seed=12)
    own = ("temperature", "seed", "logprobs", "max_tokens")
    tokens = [
        {"id": f"ids-{i}", "prompt_token_ids": ids, "sampling": {name: getattr(how, name) for name in own}}
        for i, (ids, how) in enumerate(zip(prompts, sampling, strict=True))
    ]
    return [*texts, *tokens, {"id": "stop", "prompt": "def f(", "sampling": {"stop": ["\n"]}, "metadata": {"a": 1}}]


def _run_and_keep_journal(folder: Path, args: tuple[str, ...]) -> bytes:
    """Runs a command, and returns the journal of its job, which the job removes at its end: a second name of the file stays."""
    journal, kept = folder / "out.jsonl.journal", folder / "journal"
    process = subprocess.Popen(_command(*args), cwd=folder, stderr=subprocess.DEVNULL)
    while process.poll() is None and not kept.exists():
        if journal.exists():
            os.link(journal, kept)
        time.sleep(SECONDS_BETWEEN_LOOKS)
    assert process.wait() == 0, f"detspec {' '.join(args)} exited with {process.returncode}"
    return kept.read_bytes()


def _take_files(record: Record, folder: Path) -> None:
    """Takes in the output as bits, and the manifests without the parts that tell of times and folders as digests."""
    for path in sorted(folder.rglob("out.*")):
        name = str(path.relative_to(folder))
        if path.suffix == ".jsonl":
            record.bits(name, path.read_bytes())
        elif path.name.endswith("manifest.json"):
            manifest = json.loads(path.read_text())
            manifest.pop("model", None)  # where it lies on this machine
            record.digests(name, manifest)
