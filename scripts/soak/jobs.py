"""The jobs that are killed: files of prompts, and what undisturbed processes made of them."""

import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from detspec.checkpoint.folder import find_folder
from detspec.checkpoint.tokenizer import Tokenizer
from detspec.jobs.files import sibling
from scripts.soak.processes import Process, Start
from scripts.soak.requests import Line, Material, python_texts, random_texts, some_lines
from scripts.soak.sizes import Size
from tests.engine.byte_model import write_folder

PLAIN = ("--max-requests", "1", "--method", "none", "--no-prefix-sharing")


class Job:
    """A file of prompts, its undisturbed output, and the folder of both.

    Attributes:
        name: name of the folder.
        lines: the requests.
        expected: lines of output by id, the samples of a request in their order.
    """

    def __init__(self, workdir: Path, name: str, model: Path | None, lines: Sequence[Line], *, max_len: int) -> None:
        """Writes prompts, and generates the output in the plainest way unless it is there; `model` None is the shipped one."""
        self.name = name
        self.lines = lines
        named = () if model is None else ("--model", str(model))
        self._arguments = (*named, "--max-len", str(max_len))
        self._named = named
        folder = workdir / "jobs" / name
        folder.mkdir(parents=True, exist_ok=True)
        self.out = folder / "out.jsonl"
        (folder / "in.jsonl").write_text(text_of(lines))
        Process.of(Start(self.generate(folder / "in.jsonl", self.out, *PLAIN), workdir / "cache")).succeed()
        self.expected: dict[str, list[bytes]] = {}
        for raw in self.out.read_bytes().splitlines(keepends=True):
            self.expected.setdefault(json.loads(raw)["id"], []).append(raw)
        assert sum(map(len, self.expected.values())) == self.num_completions(lines)

    @staticmethod
    def num_completions(lines: Sequence[Line]) -> int:
        """How many lines of output `lines` have."""
        return sum(line["sampling"].get("n", 1) for line in lines)

    def generate(self, prompts: Path, out: Path, *options: str) -> tuple[str, ...]:
        """The command that completes `prompts`."""
        return ("generate", *self._arguments, "--prompts", str(prompts), "--out", str(out), *options)

    def audit(self, records: Path) -> tuple[str, ...]:
        """The command that audits `records`."""
        return ("audit", *self._named, "--records", str(records))

    def fingerprint(self) -> dict[str, Any]:
        """Fingerprint, which the output's bits depend on."""
        manifest = json.loads(sibling(self.out, "manifest").read_text())
        return dict(manifest["fingerprint"])

    def bytes_of(self, lines: Sequence[Line]) -> bytes:
        """The output for `lines`, which are the job's in any order."""
        return b"".join(raw for line in lines for raw in self.expected[line["id"]])


def text_of(lines: Sequence[Line]) -> str:
    """A file of prompts."""
    return "".join(json.dumps(line) + "\n" for line in lines)


def some_jobs(workdir: Path, size: Size) -> list[Job]:
    """Jobs for a small random model over bytes, and perhaps one for the shipped model."""
    model = workdir / "byte_model"
    if not model.exists():
        Process(lambda: _write_model(model)).succeed()
    material = Material(random_texts(256, 400), most_prompt=60, most_new=60, stops=("a", "\x00"))
    jobs = [
        Job(workdir, f"small {i}", model, some_lines(material, size.job_requests, seed=i), max_len=128)
        for i in range(size.num_jobs)
    ]
    if size.with_shipped:
        texts = python_texts(Tokenizer(find_folder(None) / "tokenizer.json"))
        lines = some_lines(Material(texts, 300, 60, ("\n\n", "return")), size.job_requests // 4, seed=100)
        jobs.append(Job(workdir, "shipped", None, lines, max_len=384))
    return jobs


def _write_model(folder: Path) -> int:
    """Writes the model; in a fork, because making weights takes a device."""
    part = folder.with_suffix(".part")
    shutil.rmtree(part, ignore_errors=True)
    write_folder(part)
    part.rename(folder)
    return 0
