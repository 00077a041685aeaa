"""Starts `detspec generate` in several processes that share a mesh of CPU devices."""

import dataclasses
import json
import os
import re
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from tests.engine.byte_model import some_prompts, some_sampling, write_folder

ROOT = Path(__file__).parents[2]
MOST_S = 400  # a run takes about 20 s on two free cores
FIELDS = ("max_tokens", "temperature", "seed")


@dataclasses.dataclass
class Job:
    """A folder with a model, requests, and what comes of them."""

    folder: Path

    @classmethod
    def write(cls, folder: Path, num_requests: int) -> "Job":
        write_folder(folder / "model")
        lines = [
            {"id": f"r{i}", "prompt_token_ids": prompt, "sampling": {field: getattr(sampling, field) for field in FIELDS}}
            for i, (prompt, sampling) in enumerate(zip(some_prompts(num_requests), some_sampling(num_requests), strict=True))
        ]
        (folder / "in.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
        return cls(folder)

    def command(self, out: str, seed: int, prompts: str) -> list[str]:
        files = {"--model": "model", "--prompts": prompts, "--out": out}
        where = [part for option, name in files.items() for part in (option, str(self.folder / name))]
        size = ["--max-requests", "4", "--max-len", "64", "--num-speculative-tokens", "3"]
        return [sys.executable, "-m", "tests.processes.one_of_many", str(seed), "generate", *where, *size]

    def start(
        self, out: str, num_processes: int, prompts: Sequence[str] = ("in.jsonl", "in.jsonl"), **environment: str
    ) -> list[subprocess.Popen[str]]:
        """Processes with two devices each, for files of `prompts`; one alone has one device."""
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            address = f"127.0.0.1:{free.getsockname()[1]}"
        shared = {**os.environ, "JAX_PLATFORMS": "cpu", "JAX_NUM_PROCESSES": str(num_processes), **environment}
        if num_processes > 1:
            shared |= {"JAX_NUM_CPU_DEVICES": "2", "JAX_COORDINATOR_ADDRESS": address}
        return [
            subprocess.Popen(
                self.command(out, number, prompts[number]),
                env={**shared, "JAX_PROCESS_ID": str(number), "PYTHONHASHSEED": str(1 + number)},
                cwd=ROOT,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
            for number in range(num_processes)
        ]

    def run(self, out: str, num_processes: int) -> list[int]:
        """Runs it to the end; returns how many segments each process ran."""
        ended = [finish(process) for process in self.start(out, num_processes)]
        assert [code for code, _, _ in ended] == [0] * num_processes, "\n\n".join(errors for _, _, errors in ended)
        return [num_segments(said) for _, said, _ in ended]

    def bytes(self, out: str) -> bytes:
        return (self.folder / out).read_bytes()

    def wait_for_completions(self, out: str, number: int, processes: list[subprocess.Popen[str]]) -> None:
        """Waits until the journal holds `number` completions."""
        journal = self.folder / f"{out}.journal"

        def has_them() -> bool:
            return journal.exists() and journal.read_bytes().count(b"\n") > number

        wait_until(lambda: has_them() or any(process.poll() is not None for process in processes))
        assert has_them(), "\n\n".join(finish(process)[2] for process in processes)


def finish(process: subprocess.Popen[str], most_s: float = MOST_S) -> tuple[int, str, str]:
    """Exit code, standard output and standard error of a process; one that does not end in time is killed, and fails."""
    try:
        said, errors = process.communicate(timeout=most_s)
    except subprocess.TimeoutExpired:
        process.kill()
        said, errors = process.communicate()
        raise AssertionError(f"still running after {most_s} s:\n{errors}") from None
    return process.returncode, said, errors


def num_segments(said: str) -> int:
    found = re.search(r"segments (\d+)", said)
    assert found is not None, said
    return int(found[1])


def wait_until(is_so: Callable[[], bool]) -> None:
    end = time.monotonic() + MOST_S
    while not is_so():
        assert time.monotonic() < end
        time.sleep(0.02)
