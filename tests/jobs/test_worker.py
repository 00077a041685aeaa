"""Workers without fixed shards: one output whatever happens to them, and hardly more time than the work takes."""

import json
import random
from pathlib import Path

from detspec.jobs.chunk_folder import chunk_folder
from detspec.jobs.job import run_job
from detspec.jobs.merge_chunks import merge_chunks
from detspec.jobs.prompts import JobSpec, Prompts
from detspec.jobs.worker import WorkerOptions, run_worker
from detspec.sampling_params import SamplingParams
from tests.jobs.paced import PacedEngine, World, WorldClock, ideal_seconds

DEFAULTS = SamplingParams(max_tokens=8)
HORIZON = 1e6


def write_prompts(folder: Path, number: int) -> tuple[Path, int]:
    """A file of requests of 1 to 16 tokens, some of three samples; and all tokens together."""
    rng = random.Random(number)
    num_tokens = 0
    lines = []
    for i in range(number):
        sampling = {"max_tokens": rng.randint(1, 16), "n": 3 if i % 50 == 7 else 1}
        num_tokens += sampling["max_tokens"] * sampling["n"]
        lines.append(json.dumps({"id": f"r{i}", "prompt_token_ids": [i % 97], "sampling": sampling}))
    path = folder / "in.jsonl"
    path.write_text("\n\n".join(lines) + "\n")
    return path, num_tokens


def whole(prompts: Path, out: Path) -> bytes:
    """The output of one job without workers."""
    with Prompts(str(prompts)) as opened:
        run_job(PacedEngine(lambda seconds: None, places=64), JobSpec(opened, DEFAULTS), out)
    return out.read_bytes()


class Job:
    """A job in a world."""

    def __init__(self, prompts: Path, out: Path) -> None:
        self.prompts, self.out = prompts, out
        self.folder = chunk_folder(out)
        self.world = World(self.folder)
        self.engines: dict[str, PacedEngine] = {}

    def worker(self, name: str, speed: float, *, at: float = 0.0, wrong: str = "", **options) -> None:
        engine = PacedEngine(lambda seconds: self.world.sleep(name, seconds), speed=speed, wrong=wrong)
        self.engines[name] = engine
        chosen = WorkerOptions(name=name, clock=WorldClock(self.world, name), has_heartbeat=False, **options)

        def work() -> None:
            with Prompts(str(self.prompts)) as opened:
                run_worker(engine, JobSpec(opened, DEFAULTS), self.out, chosen)

        self.world.add(name, work, at=at)


def test_eight_unequal_workers_three_killed_one_frozen_take_no_more_than_115_percent_of_ideal(tmp_path):
    """Speeds 1 to 4. Every equal pair of bytes below was written by different workers in a different order."""
    prompts, num_tokens = write_prompts(tmp_path, 6000)
    job = Job(prompts, tmp_path / "out.jsonl")
    speeds = {f"host{i}-1-a": 1 + 3 * i / 7 for i in range(8)}
    for name, speed in speeds.items():
        job.worker(name, speed)
    killed = {"host0-1-a": 100.0, "host4-1-a": 150.0, "host7-1-a": 210.0}
    for name, moment in killed.items():
        job.world.kill(name, moment)
    job.world.freeze("host5-1-a", 120.0, 260.0)
    ended = job.world.run()
    spans = [(speed, 0.0, killed.get(name, HORIZON)) for name, speed in speeds.items() if name != "host5-1-a"]
    spans += [(speeds["host5-1-a"], 0.0, 120.0), (speeds["host5-1-a"], 260.0, HORIZON)]
    ideal = ideal_seconds(num_tokens, 4, spans)
    print("IDEAL", ideal, ended, sum(e.num_tokens for e in job.engines.values()) / num_tokens)
    assert set(ended) == set(speeds) - set(killed)
    assert max(ended.values()) <= 1.15 * ideal
    stats = merge_chunks(job.out, job.folder)
    assert job.out.read_bytes() == whole(prompts, tmp_path / "whole.jsonl")
    assert stats["num_tokens"] == num_tokens
    job.world.bury()
