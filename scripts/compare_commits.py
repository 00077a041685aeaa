"""Compares the speed of two commits: many short rounds in turns, since a machine's speed drifts.

    python scripts/compare_commits.py 50135f3^ HEAD --workdir out/compare
    python scripts/compare_commits.py 50135f3^ HEAD --workdir out/compare --model ~/models/Qwen3-0.6B --requests 1

A process of each commit waits until it is its turn. In a round both generate the same tokens once; which is first alternates.
Printed are medians over rounds of the first commit's time over the second's: above 1, the second is faster. Processor time is
shown, too, because other programs disturb it less than wall-clock time.
"""

import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from statistics import median, quantiles

MAX_LEN_MARGIN = 64  # positions besides the new tokens
REPEATED = "    def is_active(self):\n        return self.active\n\n" * 5  # the prompt in which prompt lookup finds drafts
# method, deterministic, streamed
KINDS = {
    "ordinary": ("none", False, False),
    "canonical": ("none", True, False),
    "self draft": ("self", True, False),
    "streams": ("none", True, True),
    "prompt lookup": ("ngram", True, False),
}

Seconds = tuple[float, float]  # on the clock, of the processor
Turn = tuple[str, int, int]  # kind, requests, new tokens of each


def main() -> int:
    """Prints a row for each kind of generation and number of requests."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("commits", nargs="*", metavar="COMMIT", help="the commit before, and the one after")
    parser.add_argument("--workdir", type=Path, help="folder for a worktree of each commit; it is kept")
    parser.add_argument("--rounds", type=int, default=31, help="rounds for each row")
    parser.add_argument("--requests", type=int, nargs="+", default=[1, 8, 32], help="numbers of requests at once")
    parser.add_argument("--kinds", nargs="+", default=list(KINDS), choices=KINDS, metavar="KIND", help=", ".join(KINDS))
    parser.add_argument("--new-tokens", type=int, default=64, metavar="N", help="of each request")
    parser.add_argument("--model", help="a model folder (default: the shipped one)")
    parser.add_argument("--turns", action="store_true", help=argparse.SUPPRESS)  # run by this script itself
    args = parser.parse_args()
    if args.turns:
        return take_turns(args.model)
    if len(args.commits) != 2 or args.workdir is None:
        parser.error("give two commits and --workdir")
    workers = [start(commit, args.workdir.resolve(), args.model) for commit in args.commits]
    print(f"{'kind':13} {'requests':>8} {'wall':>7} {'quartiles':>15} {'processor':>10}")
    for kind in args.kinds:
        for number in args.requests:
            ratios = compare(workers, (kind, number, args.new_tokens), args.rounds)
            wall, processor = zip(*ratios, strict=True)
            low, _, high = quantiles(wall, n=4)
            print(f"{kind:13} {number:8} {median(wall):7.3f} {low:7.3f} {high:7.3f} {median(processor):10.3f}", flush=True)
    for worker in workers:
        worker.stdin.close()
        worker.wait()
    return 0


def worktree(commit: str, workdir: Path) -> Path:
    """The folder of a worktree of `commit`, made in `workdir` unless it is there."""
    command = ["git", "-C", str(Path(__file__).parent), "rev-parse", f"{commit}^{{commit}}"]
    sha = subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    folder = workdir / sha[:12]
    if not folder.exists():
        add = ["git", "-C", str(Path(__file__).parent), "worktree", "add", "--quiet", "--detach", str(folder), sha]
        subprocess.run(add, check=True)
    return folder


def start(commit: str, workdir: Path, model: str | None) -> subprocess.Popen[str]:
    """A process that runs `commit`, in a worktree of its own."""
    folder = worktree(commit, workdir)
    environment = {**os.environ, "PYTHONPATH": str(folder)}
    command = [sys.executable, str(Path(__file__).resolve()), "--turns", *(["--model", model] if model else [])]
    worker = subprocess.Popen(command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    there = json.loads(worker.stdout.readline())
    assert Path(there).is_relative_to(folder), f"{commit} was imported from {there}, not from {folder}"
    return worker


def compare(workers: list[subprocess.Popen[str]], turn: Turn, num_rounds: int) -> list[Seconds]:
    """The first worker's seconds over the second's, for each round; the first round, which compiles, does not count."""
    ratios = []
    for index in range(num_rounds + 1):
        order = workers if index % 2 else workers[::-1]
        took = {id(worker): ask(worker, turn) for worker in order}
        before, after = (took[id(worker)] for worker in workers)
        ratios.append((before[0] / after[0], before[1] / after[1]))
    return ratios[1:]


def ask(worker: subprocess.Popen[str], turn: Turn) -> Seconds:
    """Lets the worker take a turn, and returns its seconds."""
    worker.stdin.write(json.dumps(turn) + "\n")
    worker.stdin.flush()
    return tuple(json.loads(worker.stdout.readline()))


def take_turns(path: str | None) -> int:
    """Generates once for each line of the standard input, and says what it took."""
    import detspec as ds

    print(json.dumps(ds.__file__), flush=True)
    model = ds.load(path)
    repeated = list(model.tokenizer.encode(REPEATED))[:MAX_LEN_MARGIN] if model.tokenizer else list(range(8)) * 8
    engines: dict[str, ds.Engine] = {}  # of the last line
    for line in sys.stdin:
        kind, number, new_tokens = json.loads(line)
        method, deterministic, streamed = KINDS[kind]
        sampling = ds.SamplingParams(max_tokens=new_tokens, ignore_eos=True, deterministic=deterministic)
        if line not in engines:
            engines.clear()
            max_len = new_tokens + MAX_LEN_MARGIN
            config = ds.EngineConfig(max_requests=number, max_len=max_len, method=method, prefix_sharing=False)
            engines[line] = ds.Engine(model, config)
            engines[line].prepare(number, ds.Needs.of([sampling]), first_only=True)
        engine = engines[line]
        began = time.perf_counter(), time.process_time()
        for place in range(number):
            prompt = repeated[place % 8 :] if method == "ngram" else [1 + place]
            engine.add(engine.request(prompt, sampling, id=str(place)), stream=streamed)
        while engine.has_work:
            engine.step()
        print(json.dumps([time.perf_counter() - began[0], time.process_time() - began[1]]), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
