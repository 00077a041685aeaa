"""Two processes share a model for a thousand rounds with wrong clocks, and are killed twenty times: the bytes are those of one.

    nice python -m scripts.soak_processes --workdir out/soak_processes

Each process has two simulated chips, a clock that is wrong by a factor of up to 100, and a hash seed of its own. They run a job
to its end. Then they run it again, and one gets SIGKILL at a random moment: the other must end by itself, with an error,
within a minute. The same commands go on from the journal to the next kill, and after the last one to the end. What has run is
noted in the work folder, so this command, too, goes on after a kill. The exit code is 0 if everything is as expected.
"""

import argparse
import hashlib
import json
import random
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import detspec as ds
from detspec.progress import Progress
from tests.processes.together import Job, finish

ALONE, TOGETHER, KILLED = "alone.jsonl", "together.jsonl", "killed.jsonl"
WITHIN_S = 60
NOT_JOINED = "RegisterTask"  # what jax names when the other process does not come; it waits 300 s, as hosts may start apart
WHILE_STARTING = 0.25  # share of the kills that come while a job starts
STARTING_S = 20.0  # seconds that count as the start

Facts = dict[str, Any]


def main() -> int:
    """Runs what has not run yet, and prints the figures."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--workdir", type=Path, required=True, help="folder for model, results and notes; it is kept")
    parser.add_argument("--rounds", type=int, default=1000, help="least number of rounds that both processes must run")
    parser.add_argument("--requests", type=int, default=800, help="number of requests of the job")
    parser.add_argument("--kills", type=int, default=20, help="number of kills")
    args = parser.parse_args()
    folder = args.workdir.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    job = Job.write(folder, args.requests)
    with Progress(args.kills + 3, "runs") as progress:

        def noted(name: str, run_fn: Callable[..., Facts], *arguments: Any) -> Facts:
            path = folder / f"{name}.note.json"
            progress.stage(name)
            if not path.exists():
                path.with_suffix(".part").write_text(json.dumps(run_fn(job, *arguments)))
                path.with_suffix(".part").replace(path)
            progress.finished()
            return json.loads(path.read_text())

        alone = noted("one process", to_the_end, ALONE, 1)
        together = noted("two processes", to_the_end, TOGETHER, 2)
        kills = [noted(f"kill {index}", kill_one, index, args.kills, args.requests) for index in range(args.kills)]
        rerun = noted("two processes after the kills", to_the_end, KILLED, 2)
    report = {
        "fingerprint": ds.fingerprint(),
        "alone": alone,
        "together": together,
        "kills": kills,
        "rerun": rerun,
        "same_rounds": together["rounds"][0] == together["rounds"][1] >= args.rounds,
        "same_bytes": alone["sha256"] == together["sha256"] == rerun["sha256"],
        "all_ended": all(kill["exit_code"] != 0 and (kill["ended_s"] < WITHIN_S or not kill["joined"]) for kill in kills),
    }
    (folder / "soak_processes.json").write_text(json.dumps(report, indent=2) + "\n")
    print(table(report))
    return 0 if report["same_rounds"] and report["same_bytes"] and report["all_ended"] else 1


def to_the_end(job: Job, out: str, num_processes: int) -> Facts:
    """Runs the job, or what is left of it, to its end."""
    began = time.perf_counter()
    rounds = job.run(out, num_processes)
    sha256 = hashlib.sha256(job.bytes(out)).hexdigest()
    return {"rounds": rounds, "sha256": sha256, "seconds": round(time.perf_counter() - began, 1)}


def kill_one(job: Job, index: int, num_kills: int, num_requests: int) -> Facts:
    """Starts the job, kills one process, and waits for the other.

    The moment leaves enough completions for the kills that follow.
    """
    rng = random.Random(index)
    victim = rng.randrange(2)
    kept = num_kept(job)
    processes = job.start(KILLED, 2)
    if rng.random() < WHILE_STARTING:
        time.sleep(rng.uniform(0.0, STARTING_S))
    else:
        share = max(1, (num_requests - kept) // (num_kills - index + 1))
        job.wait_for_completions(KILLED, kept + 1 + rng.randrange(share), processes)
        time.sleep(rng.uniform(0.0, 0.2))
    killed_at = time.monotonic()
    processes[victim].kill()
    exit_code, _, errors = finish(processes[1 - victim])
    ended_s = time.monotonic() - killed_at
    assert finish(processes[victim])[0] == -9, f"kill {index}: process {victim} had ended before:\n{errors}"
    facts = {"victim": victim, "kept": num_kept(job), "joined": NOT_JOINED not in errors}
    return {**facts, "exit_code": exit_code, "ended_s": round(ended_s, 1)}


def num_kept(job: Job) -> int:
    """Completions in the journal; a line that was being written does not count."""
    journal = job.folder / f"{KILLED}.journal"
    return max(0, journal.read_bytes().count(b"\n") - 1) if journal.exists() else 0


def table(report: Facts) -> str:
    """The kills, a row each, and the verdicts."""
    lines = ["| kill | process | had joined | completions kept | exit code of the other | after |", "|---|---|---|---|---|---|"]
    for index, kill in enumerate(report["kills"]):
        facts = (index, *(kill[key] for key in ("victim", "joined", "kept", "exit_code")), f"{kill['ended_s']} s")
        lines.append("| " + " | ".join(map(str, facts)) + " |")
    lines.append(f"rounds of both processes: {report['together']['rounds']}, as expected: {report['same_rounds']}")
    lines.append(f"the same bytes alone, together and after the kills: {report['same_bytes']}")
    lines.append(f"the others ended with errors, within {WITHIN_S} s where both had joined: {report['all_ended']}")
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
