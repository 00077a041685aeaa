"""Eight workers share a job while they are killed, stopped and frozen at random moments: the bytes are those of one process.

    nice python -m scripts.soak_workers --workdir out/soak_workers

Each round runs `detspec generate --shard auto` eight times at once, in 1 to 8 places. At random moments of the job one of them
gets SIGKILL, SIGTERM or SIGINT, and is started again if the job is not done. Two are frozen by SIGSTOP for 5 to 80 s; after 60
others take their chunks. Then `detspec merge` joins what they did. The exit code is 0 if all rounds give the bytes of one
process, all workers ended as they must, and merge refused the control: a record of a line that was done twice, altered by one
bit.
"""

import argparse
import hashlib
import json
import random
import shutil
import signal
import subprocess
import sys
import time
import zlib
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import detspec as ds
from detspec.jobs.journal import CHECKSUM, line_of
from detspec.progress import Progress
from scripts.soak.tampering import one_record_altered

DETSPEC = (sys.executable, "-m", "detspec")
POLL_S = 0.05
LEAST_FROZEN_S = 5.0
EXIT_CODES = {  # the negative ones before handlers are there
    signal.SIGKILL: (-9,),
    signal.SIGTERM: (143, -15),
    signal.SIGINT: (130, -2),
}
INTERPRETER_STARTS = "Fatal Python error: init_import_site"  # SIGINT then ends it with 1, before any of our code
DOUBLE_CHECK = "10%"
BAD_INPUT = 2

Facts = dict[str, Any]


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the rounds, and prints the figures."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--workdir", type=Path, required=True, help="folder for prompts and results; its rounds are written anew"
    )
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--workers", type=int, default=8)
    parser.add_argument("--kills", type=int, default=12, help="signals of a round, at most, besides those that freeze")
    parser.add_argument("--frozen", type=int, default=2, help="workers of a round that are frozen")
    parser.add_argument("--most-frozen-s", type=float, default=80.0, help="seconds that a worker is frozen, at most")
    parser.add_argument("--requests", type=int, default=600, help="lines of the job")
    parser.add_argument("--model", default="", help="what `detspec generate` runs; the shipped model if empty")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args(argv)
    folder = args.workdir.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    prompts = folder / "in.jsonl"
    command = [*DETSPEC, "generate", "--prompts", str(prompts), "--max-len", "128"]
    command += ["--model", args.model] if args.model else []
    prompts.write_text("".join(json.dumps(line) + "\n" for line in some_lines(args.requests)), encoding="utf-8")
    began = time.perf_counter()
    alone = folder / "alone.jsonl"
    run([*command, "--out", str(alone), "--fresh", "--max-requests", "8"])
    seconds = time.perf_counter() - began
    digest = hashlib.sha256(alone.read_bytes()).hexdigest()
    rounds = []
    with Progress(args.rounds, "rounds") as progress:
        for number in range(args.rounds):
            progress.stage(f"round {number}")
            rng = random.Random(f"{args.seed}/{number}")
            rounds.append(one_round(command, folder / f"round{number}", rng, args))
            progress.finished()
    report = {
        "fingerprint": ds.fingerprint(),
        "requests": args.requests,
        "alone_s": round(seconds, 1),
        "sha256": digest,
        "rounds": rounds,
        "same_bytes": all(each["sha256"] == digest for each in rounds),
        "control_found": all(each["control_found"] for each in rounds),
    }
    (folder / "soak_workers.json").write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    print(table(report))
    return 0 if report["same_bytes"] and report["control_found"] else 1


def some_lines(number: int) -> list[Facts]:
    """Prompts of made-up tokens; lengths, temperatures and numbers of samples differ."""
    rng = random.Random(0)
    return [
        {
            "id": str(place),
            "prompt_token_ids": [rng.randrange(2048) for _ in range(rng.randrange(4, 64))],
            "sampling": {
                "max_tokens": rng.randrange(8, 64),
                "temperature": rng.choice((0.0, 0.8)),
                "n": rng.choice((1, 1, 1, 2)),
                "seed": place,
            },
        }
        for place in range(number)
    ]


def merge(out: Path) -> list[str]:
    """The command that joins what workers did."""
    return [*DETSPEC, "merge", "--out", str(out)]


def run(command: Sequence[str]) -> str:
    """Runs a command that must succeed; returns what it printed."""
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)} ended with {done.returncode}:\n{done.stdout}{done.stderr}")
    return done.stdout


class Worker:
    """A worker, and its starts.

    Attributes:
        is_done: it ended by itself, with exit code 0.
    """

    def __init__(self, command: Sequence[str], log: Path) -> None:
        self.is_done = False
        self._command = command
        self._log = log
        self._wakes_at: float | None = None
        self.start()

    def start(self) -> None:
        """Starts it, for the first time or again."""
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(self._command, stdout=log, stderr=log)

    def freeze(self, seconds: float) -> None:
        """Lets it stand still for a while."""
        self._process.send_signal(signal.SIGSTOP)
        self._wakes_at = time.monotonic() + seconds

    @property
    def is_frozen(self) -> bool:
        """Whether it stands still."""
        return self._wakes_at is not None

    def look(self) -> bool:
        """Wakes it in time, and notes its end; whether it runs."""
        if self._wakes_at is not None and time.monotonic() > self._wakes_at:
            self._process.send_signal(signal.SIGCONT)
            self._wakes_at = None
        if not self.is_done and (code := self._process.poll()) is not None:
            self._check(code, (0,))
            self.is_done = True
        return not self.is_done

    def signal(self, number: signal.Signals) -> bool:
        """Sends a signal and waits for the end; whether that came by the signal."""
        self._process.send_signal(number)
        code = self._process.wait()
        self._check(code, (0, *EXIT_CODES[number]))
        self.is_done = code == 0
        return not self.is_done

    def end(self) -> None:
        """Kills it if it still runs, also if it stands still."""
        self._process.kill()
        self._process.wait()

    def _check(self, code: int, allowed: Sequence[int]) -> None:
        if code in allowed:
            return
        log = self._log.read_text(encoding="utf-8", errors="replace")
        if not (code == 1 and -signal.SIGINT in allowed and INTERPRETER_STARTS in log):
            raise SystemExit(f"a worker ended with {code}:\n{log[-4000:]}")


def one_round(command: Sequence[str], folder: Path, rng: random.Random, args: argparse.Namespace) -> Facts:
    """Runs the job with several workers that are disturbed, merges, and merges a copy in which a journal is wrong."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    out = folder / "out.jsonl"
    shared = [*command, "--out", str(out), "--shard", "auto", "--double-check", DOUBLE_CHECK]
    workers = [
        Worker([*shared, "--max-requests", str(1 + place)], folder / f"worker{place}.log") for place in range(args.workers)
    ]
    try:
        facts = disturbed(workers, out, rng, args)
    finally:
        for worker in workers:
            worker.end()
    num_journals = len(journals(out))
    found = control_found(out, folder / "control", rng)
    run(merge(out))
    sha256 = hashlib.sha256(out.read_bytes()).hexdigest()
    return {**facts, "journals": num_journals, "sha256": sha256, "control_found": found}


def disturbed(workers: Sequence[Worker], out: Path, rng: random.Random, args: argparse.Namespace) -> Facts:
    """Sends signals until all workers have ended by themselves; returns what was sent, and how long it took."""
    began = time.monotonic()
    sent: Counter[str] = Counter()
    frozen_s: list[float] = []
    signals = [signal.SIGSTOP] * args.frozen + [rng.choice(list(EXIT_CODES)) for _ in range(args.kills)]
    rng.shuffle(signals)
    moments = sorted(rng.randrange(args.requests) for _ in signals)  # by how many lines are done
    while running := [worker for worker in workers if worker.look()]:
        time.sleep(POLL_S)
        awake = [worker for worker in running if not worker.is_frozen]
        if not signals or not awake or num_done(out) < moments[-len(signals)]:
            continue
        worker = rng.choice(awake)
        number = signals[0]
        if number == signal.SIGSTOP:
            frozen_s.append(rng.uniform(min(LEAST_FROZEN_S, args.most_frozen_s), args.most_frozen_s))
            worker.freeze(frozen_s[-1])
        elif worker.signal(number):
            worker.start()
        else:
            continue  # it had just ended by itself
        del signals[0]
        sent[number.name] += 1
    seconds = time.monotonic() - began
    return {"seconds": round(seconds, 1), "signals": dict(sent), "frozen_s": [round(each, 1) for each in frozen_s]}


def journals(out: Path) -> list[Path]:
    """The journals of all starts of workers."""
    return sorted(Path(f"{out}.chunks").glob("*.journal"))


def num_done(out: Path) -> int:
    """Lines in all journals; one that was done twice counts twice."""
    return sum(max(0, path.read_bytes().count(b"\n") - 1) for path in journals(out))


def control_found(out: Path, folder: Path, rng: random.Random) -> bool:
    """Whether merge refuses a copy of what workers did in which one record of a line that was done twice is another."""
    altered = folder / out.name
    shutil.copytree(f"{out}.chunks", f"{altered}.chunks")
    seen: set[tuple[int, int]] = set()
    for path in journals(altered):
        entries = path.read_bytes().splitlines(keepends=True)
        for place, raw in enumerate(entries):
            if (found := line_of(raw)) is None:
                continue
            number, output = found
            if (number, output.index) in seen and output.num_tokens:
                assert json.dumps(json.loads(output.line)).encode() == output.line  # so nothing but the record differs
                content = raw[: raw.index(output.line)] + one_record_altered(output.line, rng).rstrip(b"\n")
                entries[place] = content + CHECKSUM % zlib.crc32(content)
                path.write_bytes(b"".join(entries))
                refused = subprocess.run(merge(altered), capture_output=True, text=True)
                return refused.returncode == BAD_INPUT and "different bytes" in refused.stderr and not altered.exists()
            seen.add((number, output.index))
    raise SystemExit(f"no line was done twice in {out}.chunks: ask for more lines, or more kills")


def table(report: Facts) -> str:
    """The rounds, a row each, and the verdicts."""
    lines = [
        "| round | seconds | SIGKILL | SIGTERM | SIGINT | SIGSTOP | journals | bytes of one process |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for number, each in enumerate(report["rounds"]):
        counts = [each["signals"].get(name, 0) for name in ("SIGKILL", "SIGTERM", "SIGINT", "SIGSTOP")]
        facts = (number, each["seconds"], *counts, each["journals"], each["sha256"] == report["sha256"])
        lines.append("| " + " | ".join(map(str, facts)) + " |")
    lines.append(f"one process in 8 places: {report['alone_s']} s")
    lines.append(f"the same bytes in all rounds: {report['same_bytes']}")
    lines.append(f"merge refused each altered journal: {report['control_found']}")
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
